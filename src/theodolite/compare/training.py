"""Training one model on one stream of batches, through accelerate: one process or many, with the same loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from theodolite.compare.batch import IGNORE, Batch
from theodolite.plan.errors import PlanError, require_whole

if TYPE_CHECKING:
    from accelerate import Accelerator

Batches = Callable[[int], Batch]
"""The batch of a step, from 0."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained.

    Args:
        length: tokens a row.
        rows: rows a step, over all processes.
        steps: how many.
        lr: the highest learning rate: reached in a line over `warmup` of the steps, left along half a cosine for a
            tenth of it.
        weight_decay: of matrices; of norms, biases and embeddings there is none, nor of what positions learn.
        clip: the largest norm of the gradient.
    """

    length: int = 128
    rows: int = 16
    steps: int = 1000
    lr: float = 3e-3
    warmup: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        require_whole(length=self.length, rows=self.rows, steps=self.steps)
        for name, least, most in (("lr", 0.0, math.inf), ("warmup", 0.0, 1.0), ("clip", 0.0, math.inf)):
            value = getattr(self, name)
            if not (math.isfinite(value) and least <= value <= most):
                raise PlanError(name, value, f"between {least:g} and {most:g}")

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return self.lr * (step + 1) / rise
        left = (self.steps - step) / max(1, self.steps - rise)
        return self.lr * (0.1 + 0.9 * (1 - math.cos(math.pi * left)) / 2)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What training came to.

    Args:
        curve: the mean loss (nats a token) of each of at most 100 stretches of steps, with its last step.
        diverged: why it was given up, or None.
        seconds: of the steps, the first few left out.
        tokens: that these seconds were for.
    """

    curve: list[tuple[int, float]]
    diverged: str | None
    seconds: float
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


_UNTIMED = 3
_POINTS = 100
# What batches differ by is a few tenths of a nat at the most.
_RISEN = 0.5


def train(
    model: nn.Module,
    batches: Batches,
    training: Training,
    accelerator: Accelerator,
    *,
    advance: Callable[[int], None] = lambda steps: None,
) -> Trained:
    """Train `model` where it stands, on the device of `accelerator`.

    Each process works on its share of the rows of a step, and the loss is the mean over the targets of all.

    Args:
        model: takes (ids, positions) and gives logits (B, S, V).
        batches: must be the same function in every process.
        advance: is told of steps that are done.
    """
    if training.rows % accelerator.num_processes:
        raise PlanError("rows", training.rows, f"a multiple of the {accelerator.num_processes} processes")
    wrapped, optimiser = accelerator.prepare(model, optimiser_of(model, training))
    wrapped.train()
    losses: list[Tensor] = []
    curve: list[tuple[int, float]] = []
    stretch = max(1, math.ceil(training.steps / _POINTS))
    begun, tokens, diverged = time.perf_counter(), 0, None
    for step in range(training.steps):
        if step == _UNTIMED:
            begun, tokens = time.perf_counter(), 0
        for group in optimiser.param_groups:
            group["lr"] = training.rate(step)
        batch = batches(step)
        loss = _loss(wrapped, batch, accelerator)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(wrapped.parameters(), training.clip)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.detach())
        tokens += batch.ids.numel()
        if len(losses) == stretch or step == training.steps - 1:
            mean = float(accelerator.reduce(torch.stack(losses), "mean").double().mean())
            advance(len(losses))
            losses = []
            if not math.isfinite(mean):
                diverged = f"the loss was {mean} by step {step + 1}"
                break
            curve.append((step + 1, mean))
    seconds = time.perf_counter() - begun
    accelerator.free_memory()
    return Trained(curve=curve, diverged=diverged or _grown(curve), seconds=seconds, tokens=tokens)


def optimiser_of(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    """AdamW; the matrices of linear maps alone decay."""
    matrices = {
        id(module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not _of_positions(name)
    }
    decayed = [p for p in model.parameters() if id(p) in matrices]
    others = [p for p in model.parameters() if id(p) not in matrices]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=training.lr,
        betas=(0.9, 0.95),
        weight_decay=training.weight_decay,
        # One pass over the parameters in place of one each: a third of a small step.
        fused=True,
    )


def _of_positions(name: str) -> bool:
    return "policy" in name.split(".")


def _loss(model: nn.Module, batch: Batch, accelerator: Accelerator) -> Tensor:
    """This process's part of the mean loss over all targets, such that the mean over processes is that mean."""
    asked = (batch.targets != IGNORE).sum()
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    device = accelerator.device
    positions = batch.positions if batch.positions.dim() == 1 else batch.positions[mine]
    logits = model(batch.ids[mine].to(device), positions.to(device))
    summed = cross_entropy(
        logits.float().flatten(0, 1), batch.targets[mine].to(device).flatten(), ignore_index=IGNORE, reduction="sum"
    )
    share: Tensor = summed * (accelerator.num_processes / int(asked))
    return share


def _grown(curve: list[tuple[int, float]]) -> str | None:
    """Why a curve that ends well above where it began is no training."""
    if curve[-1:] and curve[-1][1] > curve[0][1] + _RISEN:
        return f"the loss rose from {curve[0][1]:.3f} to {curve[-1][1]:.3f}"
    return None
