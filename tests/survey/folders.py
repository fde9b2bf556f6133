"""Tiny random models as folders that a survey can run on: 512 tokens of trained length, a tokenizer of the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.models.tiny import tiny
from theodolite.survey.texts import builtin_text

TRAINED = 512
VOCABULARY = 400
SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3": {"sliding_window": 64},
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on the beginning of a book; whatever is not in it is spelt in bytes."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([builtin_text("moby-dick")[:60_000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def write_model(folder: Path, family: str) -> Path:
    """A folder with config.json, model.safetensors and a tokenizer."""
    model = tiny(family, vocab_size=VOCABULARY, max_position_embeddings=TRAINED, **SIZES[family])
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
