"""All checks of a loaded model, in an order in which none spoils the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from theodolite.conformance import batches, bias, caches, casts, moved, rotation, tables
from theodolite.conformance.subject import TOKENS, Subject
from theodolite.conformance.verdict import Verdict, skipped
from theodolite.models.quiet import quiet
from theodolite.plan import ModelPlan
from theodolite.plan.huggingface import read_config

Check = Callable[[Subject], Verdict]

FINITE = "finite logits"
# What compares logits: without numbers it has no answer, and the causes that it would name are none.
_OF_LOGITS = {
    moved.HISTORY, moved.OBEYED, moved.SHIFT, batches.BATCH, batches.PADDING, batches.PACKING, caches.CHUNKS,
    caches.DECODE, caches.CROSSING,
}  # fmt: skip

# History first, before other checks have made some.
CHECKS: tuple[tuple[str, Check], ...] = (
    (moved.HISTORY, moved.history),
    (tables.TABLES, tables.tables),
    (rotation.ROTATION, rotation.rotation),
    (rotation.SCALE, rotation.score_scale),
    (bias.BIAS, bias.bias),
    (moved.OBEYED, moved.obeyed),
    (moved.SHIFT, moved.shift),
    (batches.BATCH, batches.batch),
    (batches.PADDING, batches.left_padding),
    (batches.PACKING, batches.packing),
    (caches.CHUNKS, caches.chunks),
    (caches.DECODE, caches.decode),
    (caches.CROSSING, caches.crossing),
    (moved.PAST, moved.past),
    (casts.AUTOCAST, casts.autocast),
    (casts.CAST, casts.cast),
    (casts.META, casts.meta),
)


def check_model(model: Any, plan: ModelPlan | None = None) -> tuple[Verdict, ...]:
    """Check the positions of a causal language model of transformers, as it is loaded.

    It runs some dozens of forwards of at most a few dozen tokens (of a window and 40, where layers have one of at most
    1,024 tokens). Weights, buffers and mode are afterwards as they were.

    Args:
        model: in any dtype, on any device.
        plan: what its positions should be; by default what its own config says.

    Raises:
        TypeError: no causal language model of transformers.
        ValueError: it cannot be run on the few tokens that every check needs.
        PlanError: its config contradicts itself or says something unknown about positions.
    """
    return tuple(iterate(model, plan))


def iterate(model: Any, plan: ModelPlan | None = None) -> Iterator[Verdict]:
    """`check_model`, each verdict when it is there."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "to_dict", None)) or not callable(getattr(model, "generate", None)):
        raise TypeError(f"model: got {type(model).__name__}; give a causal language model of transformers")
    if getattr(config, "is_encoder_decoder", False):
        raise TypeError(f"model: got {type(model).__name__}, an encoder with a decoder; give a causal language model")
    if plan is None:
        plan = read_config(config.to_dict(), source="the model's config")
    training, returning = model.training, getattr(config, "return_dict", True)
    model.eval()
    try:
        # Outputs are read by name.
        config.return_dict = True
        with quiet():
            subject, finite = _opened(model, plan)
        if not finite:
            yield Verdict(
                name=FINITE,
                outcome="fail",
                message="its logits are no numbers, so that nothing which compares them can be asked",
                starts_at=0,
                cure="see the tables below; if they are right, the weights or their dtype are not",
                reference="huggingface/transformers#45902",
            )
        for name, check in CHECKS:
            if not finite and name in _OF_LOGITS:
                yield skipped(name, "its logits are no numbers")
                continue
            with quiet():
                verdict = _run(name, check, subject)
            yield verdict
    finally:
        config.return_dict = returning
        model.train(training)


def _opened(model: Any, plan: ModelPlan) -> tuple[Subject, bool]:
    """The model as it is checked, and whether its logits are numbers."""
    try:
        subject = Subject(model, plan)
        return subject, subject.finite
    except (IndexError, ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        stated = plan.max_position_embeddings
        room = "" if stated is None or stated >= TOKENS else f"; it states {stated} tokens, and {TOKENS} are needed"
        raise ValueError(f"model: it could not be run on {TOKENS} tokens ({moved.said_by(error)}){room}") from error


def _run(name: str, check: Check, subject: Subject) -> Verdict:
    try:
        # What is not finite is found by its value.
        with np.errstate(all="ignore"):
            return check(subject)
    except MemoryError:
        raise
    except Exception as error:
        return Verdict(name=name, outcome="fail", message=f"it could not be run: {moved.said_by(error)}")
