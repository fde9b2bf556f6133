"""Small tokenizers of every kind that matters here, made without a network."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

LINES = ["Call me Ishmael. Some years ago, never mind how long precisely.", "user assistant system question"] * 5
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Writes its own <s>, trims, names the roles otherwise, and takes no system message.
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}"
    "{% endif %}{% if m.role == 'user' %}{{ '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "inst": INST}


def _dressed(tokenizer: Tokenizer, template: str | None, **options: Any) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=template,
        **options,
    )


def byte_level(
    template: str | None = None, *, prefix: bool = False, marks_are_special: bool = True, lines: list[str] = LINES
) -> Any:
    """As GPT-2's: bytes in BPE, a space in the token of the word after it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = SPECIAL if marks_are_special else SPECIAL[:3]
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=special, show_progress=False),
    )
    if not marks_are_special:
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in SPECIAL[3:]])
    return _dressed(tokenizer, template)


def characters(template: str | None = None) -> Any:
    """WordLevel with a word for each character of ASCII; all others are unknown."""
    vocabulary = {text: index for index, text in enumerate([*SPECIAL, *map(chr, range(32, 127)), "\n"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _dressed(tokenizer, template)


def words(template: str | None = None) -> Any:
    """WordLevel that drops white space, and puts <s> before each text by default."""
    vocabulary = {text: index for index, text in enumerate([*SPECIAL, "a", "b", "Question", ":", "Answer"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return _dressed(tokenizer, template)


def llama(template: str | None = None, *, metaspace: bool = False) -> Any:
    """As Llama 2's: ▁ for a space and one before each text, bytes for what is in no token."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    vocabulary = {text: index for index, text in enumerate([*dict.fromkeys(pieces), "▁a", "ab"])}
    merges = [("▁", "a"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(SPECIAL)
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _dressed(tokenizer, template)


class Slow(PreTrainedTokenizer):
    """A tokenizer in Python, a token for each character: it does not tell which characters are in a token."""

    def __init__(self, **options: Any) -> None:
        self._characters = [*SPECIAL, *map(chr, range(32, 127)), "\n"]
        super().__init__(
            bos_token="<s>", eos_token="</s>", unk_token="<unk>", additional_special_tokens=SPECIAL[3:], **options
        )

    @property
    def vocab_size(self) -> int:
        return len(self._characters)

    def get_vocab(self) -> dict[str, int]:
        return {text: index for index, text in enumerate(self._characters)}

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab().get(token, 2)

    def _convert_id_to_token(self, index: int) -> str:
        return self._characters[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)
