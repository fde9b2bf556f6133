"""Writing on: token by token after what a Reader has read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from theodolite.models.reader import Reader

# Colder, scores overflow; the most likely token is drawn long before.
_COLDEST = 0.001


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

    As `generate` of transformers does, by the model's generation config: its repetition_penalty, no_repeat_ngram_size,
    bad_words_ids, suppress_tokens, begin_suppress_tokens and min_new_tokens, and where tokens are drawn its top_k,
    top_p, min_p, typical_p, epsilon_cutoff and eta_cutoff. Nothing else of it is heeded. A token is read once the next
    is asked for: the last one given has not been.

    Args:
        logits: (V,), after the last token read.
        before: the tokens read, which penalties go by; their number is the next position.
        temperature: 0 takes the most likely token; from 0.001 on tokens are drawn at random.
        seed: of what is drawn.

    Raises:
        ValueError: a temperature that cannot be drawn at.
        FloatingPointError: the model gives logits that are no numbers.
    """
    require_temperature(temperature)
    processors = _processors(reader.model, temperature, len(before), stop)
    drawn = torch.Generator().manual_seed(seed)
    line = list(before)
    for number in range(count):
        # In float32, as transformers does.
        scores = logits.float().cpu()[None]
        if bool(scores.isnan().any()):
            raise FloatingPointError("the model gave logits that are no numbers: its weights or its dtype overflow")
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


def require_temperature(temperature: float) -> None:
    """Raise for a temperature that is neither 0 nor a finite number from 0.001 on."""
    if temperature != 0 and not (temperature >= _COLDEST and math.isfinite(temperature)):
        raise ValueError(f"temperature: got {temperature}; give 0, or a number of at least {_COLDEST}")


def _processors(model: Any, temperature: float, read: int, stop: Sequence[int]) -> LogitsProcessorList:
    """In the order of transformers."""
    config, made = model.generation_config, LogitsProcessorList()
    if config.repetition_penalty not in (None, 1.0):
        made.append(RepetitionPenaltyLogitsProcessor(penalty=config.repetition_penalty))
    if config.no_repeat_ngram_size:
        made.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if config.bad_words_ids is not None:
        made.append(NoBadWordsLogitsProcessor(config.bad_words_ids, list(stop) or None))
    if config.min_new_tokens and stop:
        made.append(MinNewTokensLengthLogitsProcessor(read, config.min_new_tokens, list(stop)))
    if config.suppress_tokens is not None:
        made.append(SuppressTokensLogitsProcessor(config.suppress_tokens))
    if config.begin_suppress_tokens is not None:
        made.append(SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, read))
    return made if temperature == 0 else LogitsProcessorList([*made, *_warpers(config, temperature)])


def _warpers(config: Any, temperature: float) -> Iterator[Any]:
    yield TemperatureLogitsWarper(temperature)
    if config.top_k:
        yield TopKLogitsWarper(config.top_k)
    if config.top_p not in (None, 1.0):
        yield TopPLogitsWarper(config.top_p)
    if config.min_p is not None:
        yield MinPLogitsWarper(config.min_p)
    if config.typical_p not in (None, 1.0):
        yield TypicalLogitsWarper(config.typical_p)
    if config.epsilon_cutoff:
        yield EpsilonLogitsWarper(config.epsilon_cutoff)
    if config.eta_cutoff:
        yield EtaLogitsWarper(config.eta_cutoff)
