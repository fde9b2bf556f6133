"""Writing on: token by token after what a Reader has read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from theodolite.models.reader import Reader


def decode(
    reader: Reader,
    logits: Tensor,
    before: Sequence[int],
    *,
    count: int,
    stop: Sequence[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[int]:
    """Up to `count` tokens, each the most likely one, as they come; one of `stop` is given too, and is the last.

    As `generate` of transformers does: penalties and limits of sampling are those of the model's generation config.
    A token is read once the next is asked for: the last one given has not been.

    Args:
        logits: (V,), after the last token read.
        before: the tokens read, which penalties go by; their number is the next position.
        temperature: above 0 tokens are drawn at random; 0 takes the most likely.
        seed: of what is drawn.
    """
    processors = _processors(reader.model, temperature)
    drawn = torch.Generator().manual_seed(seed)
    line = list(before)
    for number in range(count):
        # In float32, as transformers does.
        scores = logits.float().cpu()[None]
        if processors:
            scores = processors(torch.tensor([line]), scores)
        if temperature > 0:
            token = int(torch.multinomial(torch.softmax(scores[0], -1), 1, generator=drawn))
        else:
            token = int(scores[0].argmax())
        yield token
        if token in stop or number + 1 == count:
            return
        line.append(token)
        reader.prefix.make_room(reader.length + 1)
        logits = reader.next_logits(torch.tensor([token]), torch.tensor([len(line) - 1]))


def stop_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer: what the model's generation config says, else its tokenizer."""
    said = model.generation_config.eos_token_id
    if said is None:
        said = tokenizer.eos_token_id
    return () if said is None else tuple(said) if isinstance(said, (list, tuple)) else (int(said),)


def _processors(model: Any, temperature: float) -> LogitsProcessorList:
    config, made = model.generation_config, LogitsProcessorList()
    if config.repetition_penalty not in (None, 1.0):
        made.append(RepetitionPenaltyLogitsProcessor(penalty=config.repetition_penalty))
    if config.no_repeat_ngram_size:
        made.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if temperature > 0:
        made.append(TemperatureLogitsWarper(temperature))
        if config.top_k:
            made.append(TopKLogitsWarper(config.top_k))
        if config.top_p not in (None, 1.0):
            made.append(TopPLogitsWarper(config.top_p))
    return made
