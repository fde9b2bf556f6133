"""Which passages of the documents a question and its answer attended to most, and their words."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.ask.documents import Document
from theodolite.ask.prompt import Prompt
from theodolite.models.attended import attended
from theodolite.models.reader import Reader

_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*")
_SENTENCE = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+|(?<=[。！？])[」』”’）]*")
_MOST, _LENGTH, _QUOTE = 200, 600, 280
# The first tokens of all take attention that is of nothing.
_SINK = 8
_HEADS = 5

Part = tuple[int, int, int]
"""A document by its index, and a range of its characters."""


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A quotation: `text` as it stands in the document `name`, at `place` (in words), characters `start` to `end`."""

    name: str
    place: str
    text: str
    start: int
    end: int


def most_attended(
    reader: Reader,
    documents: Sequence[Document],
    prompt: Prompt,
    spoken: Sequence[tuple[int, int]],
    line: Sequence[int],
    *,
    count: int,
) -> list[Passage]:
    """The `count` passages attended to most, most first, with the sentences in them that were.

    A passage's score is how much more of a head's attention (the mean square of the weights on it) it had than the
    median passage, in the heads that single it out most. The mean of all heads says little: most look nearby.

    Args:
        reader: has read the documents, as `prompt` has them, and nothing after them.
        spoken: ranges of `line` that attend, the question and the answer: what counts is the one that does so more.
        line: all tokens, from the prompt's first to the answer's last.
    """
    parts = [(i, *part) for i, document in enumerate(documents) for part in split(document.text, len(documents))]
    best = _scores(reader, prompt, parts, spoken, line).topk(min(count, len(parts))).indices.tolist()
    runs = [(number, run) for number in best for run in _runs(parts[number], documents)]
    scores = _scores(reader, prompt, [run for _, run in runs], spoken, line).tolist()
    found = []
    for number in best:
        _, (index, start, end) = max(
            (score, run) for score, (of, run) in zip(scores, runs, strict=True) if of == number
        )
        document = documents[index]
        words = " ".join(document.text[start:end].split())
        found.append(Passage(name=document.name, place=document.place(start, end), text=words, start=start, end=end))
    return found


def split(text: str, documents: int = 1) -> list[tuple[int, int]]:
    """Passages of a text, as ranges of characters without the white space around: paragraphs, joined or parted.

    None is much longer than 600 characters, or than what makes 200 of all documents where they are of one length.
    """
    longest = max(_LENGTH, len(text) * documents // _MOST)
    passages: list[tuple[int, int]] = []
    for start, end in _pieces(text, 0, len(text), _PARAGRAPH):
        if passages and end - passages[-1][0] <= longest:
            passages[-1] = passages[-1][0], end
        elif end - start <= longest:
            passages.append((start, end))
        else:
            passages += _joined(_pieces(text, start, end, _SENTENCE), longest)
    return passages


def _runs(part: Part, documents: Sequence[Document]) -> list[Part]:
    """Of a passage what can be quoted: from each sentence on as many as a quotation may have."""
    index, begin, last = part
    sentences = _joined(_pieces(documents[index].text, begin, last, _SENTENCE), 1)
    runs = []
    for first, (start, end) in enumerate(sentences):
        for _, further in sentences[first + 1 :]:
            if further - start > _QUOTE:
                break
            end = further
        runs.append((index, start, end))
        if end == last:
            break
    return runs


def _pieces(text: str, start: int, end: int, between: re.Pattern[str]) -> list[tuple[int, int]]:
    """What stands between the matches of a pattern in a range of a text, without white space at the ends."""
    edges = [start, *(at for match in between.finditer(text, start, end) for at in match.span()), end]
    pieces = []
    for a, b in zip(edges[::2], edges[1::2], strict=True):
        words = text[a:b]
        if words.strip():
            pieces.append((a + len(words) - len(words.lstrip()), b - len(words) + len(words.rstrip())))
    return pieces


def _joined(pieces: list[tuple[int, int]], longest: int) -> list[tuple[int, int]]:
    """Neighbours in one as long as they fit; what is far too long by itself is cut."""
    joined: list[tuple[int, int]] = []
    for start, end in pieces:
        if joined and end - joined[-1][0] <= longest:
            joined[-1] = joined[-1][0], end
            continue
        room = max(longest, _LENGTH)
        joined += [(at, min(at + room, end)) for at in range(start, end, room)]
    return joined


def _scores(
    reader: Reader,
    prompt: Prompt,
    parts: Sequence[Part],
    spoken: Sequence[tuple[int, int]],
    line: Sequence[int],
) -> Tensor:
    ranges = []
    for part in parts:
        tokens = prompt.token_range(*part)
        ranges.append(slice(max(tokens.start, _SINK), tokens.stop))
    begin = prompt.document.stop
    said = torch.tensor(line[begin:])
    weights = attended(reader, said, torch.arange(begin, len(line)), ranges)
    total = torch.full((len(parts),), -math.inf)
    for start, stop in spoken:
        if start == stop:
            continue
        size = weights[:, :, start - begin : stop - begin].square().mean(2).flatten(0, 1)
        above = size - size.median(dim=-1, keepdim=True).values
        total = torch.maximum(total, above.topk(min(_HEADS, len(above)), dim=0).values.mean(0))
    return total
