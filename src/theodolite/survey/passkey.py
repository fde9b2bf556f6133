"""The passkey test: a number hidden in a text and asked for at its end. Necessary, far from sufficient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from theodolite.models.reader import Reader
from theodolite.plan import ModelPlan
from theodolite.positions import RelativeMap

KEY = "75213"
_NEEDLE = f" The pass key is {KEY}. Remember it. {KEY} is the pass key. "
_QUESTION = "\nWhat is the pass key? The pass key is "


def passkey_prompt(tokenizer: Any, text: Tensor, *, length: int, depth: float) -> tuple[Tensor, Tensor]:
    """Prompt (length - D,) and the digits (D,) that should follow it: `length` tokens together.

    The needle lies at `depth` of the filler, which is `text`. Where the prompt ends is found by tokenizing question
    and answer together: many tokenizers write a number with a token for the space before it, and a prompt without it
    is one that no trained model was ever shown.
    """
    needle = _ids(tokenizer, _NEEDLE)
    asked, answered = _ids(tokenizer, _QUESTION.rstrip()), _ids(tokenizer, _QUESTION + KEY)
    if answered[: len(asked)].tolist() != asked.tolist():
        raise ValueError(
            "the tokenizer joins the pass key with the words before it, so no prompt can stop between them"
        )
    digits = _digits(tokenizer, answered)
    question = answered[: len(answered) - len(digits)]
    filler = length - len(needle) - len(answered)
    if filler < 1:
        raise ValueError(f"length: got {length}; the pass key and its question alone take {length - filler}")
    before = round(filler * depth)
    return torch.cat((text[:before], needle, text[before:filler], question)), digits


def _digits(tokenizer: Any, answered: Tensor) -> Tensor:
    """The last tokens that decode to the key and nothing else."""
    for count in range(1, len(KEY) + 1):
        if tokenizer.decode(answered[-count:]).strip() == KEY:
            return answered[-count:]
    raise ValueError(f"the tokenizer has no tokens that spell {KEY} at the end of a text")


def _ids(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)


def passkey(
    model: Any,
    tokenizer: Any,
    plan: ModelPlan,
    text: Tensor,
    *,
    length: int,
    depth: float,
    relative: RelativeMap | None = None,
) -> dict[str, Any]:
    """Mean nats per token of the key, and whether greedy decoding would write it; `model` is patched with `plan`."""
    prompt, digits = passkey_prompt(tokenizer, text, length=length, depth=depth)
    whole = torch.cat((prompt, digits))
    with Reader(model, plan, capacity=length, relative=relative) as reader:
        reader.read(prompt[:-1], torch.arange(len(prompt) - 1))
        asked = torch.arange(len(prompt) - 1, len(whole) - 1)
        scores = reader.read(whole[asked], asked, targets=digits)
    assert scores is not None
    # If every digit is the most likely one after the right ones before it, greedy decoding writes them all.
    return {"nll": round(float(scores.nll.mean()), 6), "exact": bool(scores.correct.all())}
