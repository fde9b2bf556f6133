"""Text to token ids, so that special tokens in what is quoted are text."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.int64]


class Encoder:
    """Reads the parts of one text, each apart from the others.

    Args:
        tokenizer: one of transformers.
        written: all that is not quoted. Added tokens in it are taken for those that mark turns, whether the
            tokenizer calls them special or not.

    Attributes:
        controls: the ids of those tokens, and of all special ones: quoted text has none of them.
    """

    def __init__(self, tokenizer: Any, written: str) -> None:
        self._tokenizer = tokenizer
        marks = set(getattr(tokenizer, "chat_control_tokens", None) or ())
        # White space is ordinary in a template, though some tokenizers add it (Gemma).
        controls = {
            index: token.content
            for index, token in tokenizer.added_tokens_decoder.items()
            if token.special or token.content in marks or (token.content in written and token.content.strip())
        }
        # Words of no vocabulary give it rightly.
        self.controls = frozenset(controls) - {tokenizer.unk_token_id}
        contents = sorted((text for text in controls.values() if len(text) > 1), key=len, reverse=True)
        self._written_out = re.compile("|".join(map(re.escape, contents))) if contents else None
        self._prepends = self._puts_a_space_before()

    def encode(self, text: str, *, quoted: bool, continues: bool) -> tuple[list[int], Offsets | None]:
        """The ids of `text`, and (T, 2) int64: the characters of each, None if the tokenizer does not tell.

        Args:
            text: a part.
            quoted: special tokens in it are text; else they are read.
            continues: it stands after another part, and gets no space before it from a tokenizer that adds one.

        Raises:
            ValueError: a special token is written in a quoted text, and this tokenizer cannot take it for text.
        """
        if not text:
            return [], np.zeros((0, 2), np.int64) if self._tokenizer.is_fast else None
        ids, offsets = self._read(text, quoted, continues)
        if not quoted or self.controls.isdisjoint(ids):
            return ids, offsets
        pieces = [self._read(text[start:stop], True, continues or start > 0) for start, stop in self._cuts(text)]
        ids = [index for piece, _ in pieces for index in piece]
        if found := self.controls.intersection(ids):
            token = self._tokenizer.convert_ids_to_tokens(min(found))
            raise ValueError(
                f"tokenizer: it reads {token!r} in a quoted text as a special token; take it out of the text"
            )
        if offsets is None:
            return ids, None
        moved = [
            told + start for (_, told), (start, _) in zip(pieces, self._cuts(text), strict=True) if told is not None
        ]
        return ids, np.concatenate(moved)

    def _cuts(self, text: str) -> list[tuple[int, int]]:
        """Ranges of `text` such that none holds a control token: each is cut after its first character."""
        found = self._written_out.finditer(text) if self._written_out else ()
        cuts = [0, *(match.start() + 1 for match in found), len(text)]
        return [(start, stop) for start, stop in pairwise(cuts) if start < stop]

    def _read(self, text: str, quoted: bool, continues: bool) -> tuple[list[int], Offsets | None]:
        if not (continues and self._prepends):
            return self._call(text, quoted)
        # The space goes before a newline, which is dropped again with it.
        ids, offsets = self._call("\n" + text, quoted)
        assert offsets is not None
        dropped = int(np.searchsorted(offsets[:, 1], 1, side="right"))
        if dropped == len(ids) or offsets[dropped, 0] < 1:
            return self._call(text, quoted)
        return ids[dropped:], offsets[dropped:] - 1

    def _call(self, text: str, quoted: bool) -> tuple[list[int], Offsets | None]:
        fast = bool(self._tokenizer.is_fast)
        told = self._tokenizer(
            text,
            add_special_tokens=False,
            split_special_tokens=quoted,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=fast,
            verbose=False,
        )
        ids: list[int] = told["input_ids"]
        if not fast:
            return ids, None
        return ids, np.array(told["offset_mapping"], dtype=np.int64).reshape(-1, 2)

    def _puts_a_space_before(self) -> bool:
        if not self._tokenizer.is_fast:
            return False
        ids, _ = self._call("a", False)
        return bool(ids) and str(self._tokenizer.convert_ids_to_tokens(ids[0])).startswith(("▁", "Ġ"))
