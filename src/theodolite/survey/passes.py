"""The full pass: a text read from its beginning, every token scored, and recall tried on the way.

At each checkpoint the reading stops, passages read earlier are begun again at the end and their
continuation is scored, and the reading goes on as if nothing had been asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theodolite.models.reader import Reader
from theodolite.plan import ModelPlan
from theodolite.positions import RelativeMap
from theodolite.survey.passages import LENGTH, copying

Progress = Callable[[int], None]
Nats = NDArray[np.float32]


def full_pass(
    model: Any,
    plan: ModelPlan,
    text: Tensor,
    *,
    length: int,
    checkpoints: Iterable[int] = (),
    depths: Iterable[float] = (),
    passages: int = 3,
    chunk: int | None = None,
    relative: RelativeMap | None = None,
    progress: Progress = lambda tokens: None,
) -> tuple[Nats, list[dict[str, float]]]:
    """Read the first `length` tokens of `text` (T > length) with `model`, already patched with `plan`.

    `relative` maps distances, if given.

    Returns:
        nll: (length,) float32, nats: entry i is -ln p(token i + 1 | tokens 0 to i), at position i + 1.
        recall: for each checkpoint (tokens read) and depth (0 the beginning, 1 the end), how well `passages`
            passages from there are continued: length, depth, distance (tokens), nll, accuracy, starts.
    """
    depths, rows, recall = tuple(depths), [], []
    stops = sorted({stop for stop in checkpoints if stop <= length} | {length})
    with Reader(model, plan, capacity=length, chunk=chunk, relative=relative) as reader:
        for stop in stops:
            for begin in range(reader.length, stop, reader.chunk):
                end = min(begin + reader.chunk, stop)
                scores = reader.read(text[begin:end], torch.arange(begin, end), targets=text[begin + 1 : end + 1])
                assert scores is not None
                rows.append(scores.nll)
                progress(end)
            if depths and stop in checkpoints:
                recall += _recall(reader, text, stop, depths, passages)
    return torch.cat(rows).numpy(), recall


def recall_starts(length: int, depth: float, passages: int) -> list[int]:
    """Where the passages of a cell begin: one after the other, about `depth` of the `length` tokens read."""
    first = round(depth * length) - passages * LENGTH // 2
    first = min(max(first, 0), length - passages * LENGTH)
    return [first + i * LENGTH for i in range(passages)]


def _recall(
    reader: Reader, text: Tensor, length: int, depths: tuple[float, ...], passages: int
) -> list[dict[str, Any]]:
    groups = [recall_starts(length, depth, passages) for depth in depths]
    cells = copying(reader, text, groups, [[length] * passages] * len(groups))
    return [
        {"length": length, "depth": depth, "distance": round(length - sum(group) / passages), **cell}
        for depth, group, cell in zip(depths, groups, cells, strict=True)
    ]


def truncated_window(
    model: Any,
    plan: ModelPlan,
    text: Tensor,
    *,
    length: int,
    window: int,
    stride: int,
    progress: Progress = lambda tokens: None,
) -> Nats:
    """What a model makes of tokens from position `window` on when it sees the last tokens only, at positions from 0.

    Every `stride` tokens a fresh window is read whose last `stride` tokens are scored, so each of them is
    predicted from the `window - stride` to `window - 1` tokens before it. Returns nll (length - window,),
    float32, nats: entry i belongs to the token at position window + i.
    """
    if not 0 < stride < window:
        raise ValueError(f"stride: got {stride}; it must be below the window of {window} tokens")
    rows = []
    for first in range(window, length, stride):
        last = min(first + stride, length)
        begin = first + stride - window
        with Reader(model, plan, capacity=window) as reader:
            reader.read(text[begin : first - 1], torch.arange(first - 1 - begin))
            places = torch.arange(first - 1 - begin, last - 1 - begin)
            scores = reader.read(text[first - 1 : last - 1], places, targets=text[first:last])
        assert scores is not None
        rows.append(scores.nll)
        progress(last - window)
    return torch.cat(rows).numpy()
