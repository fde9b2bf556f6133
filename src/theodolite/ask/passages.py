"""Which passages of the documents a question and its answer attended to most, and their words."""

from __future__ import annotations

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
_END = re.compile(r"[.!?]+[\"'”’)\]]*(?=\s)|[。！？]+[」』”’）]*")
_MOST, _FEWEST, _SHORTEST, _LENGTH, _QUOTE = 200, 8, 200, 600, 280
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
        reader: has read the documents, as `prompt` has them, and what is before all of `spoken`.
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

    None is much longer than 600 characters (200 in a short text), or than what makes 200 of all documents where they
    are of one length.
    """
    size = len(text) * documents
    longest = max(min(max(size // _FEWEST, _SHORTEST), _LENGTH), size // _MOST)
    passages: list[tuple[int, int]] = []
    gaps = [at for match in _PARAGRAPH.finditer(text) for at in match.span()]
    for start, end in _pieces(text, [0, *gaps, len(text)]):
        if passages and end - passages[-1][0] <= longest:
            passages[-1] = passages[-1][0], end
        elif end - start <= longest:
            passages.append((start, end))
        else:
            passages += _joined(text, _sentences(text, start, end), longest)
    return passages


def _runs(part: Part, documents: Sequence[Document]) -> list[Part]:
    """Of a passage what can be quoted: from each sentence on as many as a quotation may have."""
    index, begin, last = part
    text = documents[index].text
    sentences = _joined(text, _sentences(text, begin, last), 1)
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


def _sentences(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """The sentences of a range of a text, with the marks that close them."""
    ends = [match.end() for match in _END.finditer(text, start, end)]
    return _pieces(text, [start, *(at for cut in ends for at in (cut, cut)), end])


def _pieces(text: str, edges: Sequence[int]) -> list[tuple[int, int]]:
    """What stands between the edges, two by two, without white space at the ends."""
    pieces = []
    for a, b in zip(edges[::2], edges[1::2], strict=True):
        words = text[a:b]
        if words.strip():
            pieces.append((a + len(words) - len(words.lstrip()), b - len(words) + len(words.rstrip())))
    return pieces


def _joined(text: str, pieces: list[tuple[int, int]], longest: int) -> list[tuple[int, int]]:
    """Neighbours in one as long as they fit; what is far too long by itself is cut."""
    joined: list[tuple[int, int]] = []
    for start, end in pieces:
        if joined and end - joined[-1][0] <= longest:
            joined[-1] = joined[-1][0], end
            continue
        room = max(longest, _LENGTH)
        for at in range(start, end, room):
            joined += _pieces(text, [at, min(at + room, end)])
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
    begin = reader.length
    said = [slice(start - begin, stop - begin) for start, stop in spoken if start < stop]

    def sizes(weights: Tensor) -> Tensor:
        return torch.stack([weights[:, rows].square().mean(1) for rows in said])

    # (layers, 1 or 2, heads, parts): of all heads of all layers those that single a passage out.
    size = attended(reader, torch.tensor(line[begin:]), torch.arange(begin, len(line)), ranges, reduced=sizes)
    above = (size - size.median(dim=-1, keepdim=True).values).transpose(0, 1).flatten(1, 2)
    return above.topk(min(_HEADS, above.shape[1]), dim=1).values.mean(1).amax(0)
