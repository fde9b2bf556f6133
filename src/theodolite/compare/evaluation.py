"""What a trained model is measured by: the loss at each position of long rows, and the answers to tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from theodolite.compare.batch import IGNORE, Batch, Data

Floats = NDArray[np.float32]

TOKENS_AT_ONCE = 16_384
"""Of a test: more at once take more memory and no less time."""


def losses(
    model: nn.Module,
    data: Data,
    *,
    rows: int,
    length: int,
    read: int | None = None,
    device: torch.device | str = "cpu",
) -> Floats:
    """The loss (nats) of each token of the test, (rows, read): one pass.

    What a causal model says of the first n tokens of a row does not depend on those behind them, so the means of its
    columns are those of windows of every length up to this one.

    Args:
        length: of the test's rows.
        read: how many of their tokens are read, all by default.
    """
    read = length if read is None else read
    found = []
    for start, count in _parts(rows, length):
        batch = data.test_batch(start, rows=count, length=length)
        found.append(_nll(model, batch.ids[:, :read], batch.targets[:, :read], batch.positions[:read], device))
    return np.concatenate(found)


def losses_near(
    model: nn.Module,
    data: Data,
    *,
    rows: int,
    length: int,
    ends: Sequence[int],
    context: int,
    tail: int,
    device: torch.device | str = "cpu",
) -> Floats:
    """The loss of the last `tail` tokens before each of `ends`, read with the last `context` tokens alone.

    Args:
        length: of the test's rows, whose tokens these are.

    Returns:
        (rows, len(ends) x tail), end by end.
    """
    columns = []
    for start, count in _parts(rows, length):
        batch = data.test_batch(start, rows=count, length=length)
        read = []
        for end in ends:
            begin = end - context
            ids, targets = batch.ids[:, begin:end], batch.targets[:, begin:end]
            read.append(_nll(model, ids, targets, torch.arange(context), device)[:, -tail:])
        columns.append(np.concatenate(read, axis=1))
    return np.concatenate(columns)


def answers(
    model: nn.Module,
    data: Data,
    *,
    rows: int,
    length: int,
    device: torch.device | str = "cpu",
) -> Floats:
    """How each row of a test at `length` tokens was answered, (rows, 3).

    The share that is right, whether all is (0 or 1), and the mean loss (nats).

    A token is right when it is the likeliest of all, given the right tokens before it.
    """
    found = []
    for start, count in _parts(rows, length):
        batch = data.test_batch(start, rows=count, length=length)
        found.append(_answered(model, batch, device))
    return np.concatenate(found)


@torch.inference_mode()
def _answered(model: nn.Module, batch: Batch, device: torch.device | str) -> Floats:
    logits = _logits(model, batch.ids, batch.positions, device)
    targets = batch.targets.to(logits.device)
    asked = targets != IGNORE
    each = asked.sum(dim=1).clamp_min(1)
    right = ((logits.argmax(dim=-1) == targets) & asked).sum(dim=1) / each
    nll = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
    mean = nll.view_as(targets).sum(dim=1) / each
    return torch.stack([right, (right == 1).float(), mean], dim=1).float().cpu().numpy()


@torch.inference_mode()
def _nll(model: nn.Module, ids: Tensor, targets: Tensor, positions: Tensor, device: torch.device | str) -> Floats:
    logits = _logits(model, ids, positions, device)
    nll = cross_entropy(logits.flatten(0, 1), targets.to(logits.device).flatten(), reduction="none")
    return nll.view(ids.shape).float().cpu().numpy()


def _logits(model: nn.Module, ids: Tensor, positions: Tensor, device: torch.device | str) -> Tensor:
    model.eval()
    logits: Tensor = model(ids.to(device), positions.to(device))
    return logits.float()


def _parts(rows: int, length: int) -> Iterator[tuple[int, int]]:
    """(first row, how many) of batches that are no larger than needed."""
    size = max(1, TOKENS_AT_ONCE // length)
    for start in range(0, rows, size):
        yield start, min(size, rows - start)
