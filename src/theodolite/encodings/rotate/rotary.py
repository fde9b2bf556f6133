"""The rotation that a plan describes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from theodolite.encodings.rotate.base import Rotate
from theodolite.encodings.rotate.tables import Tables, rotary_tables, tables_of
from theodolite.plan import Rotary


class RotaryEmbedding(Rotate):
    """Turns queries and keys by position. Holds a plan and nothing else: no buffer, no parameter, no history.

    So there is nothing for `.half()`, `.to()`, meta initialisation or a weight initialiser to spoil, and no key in
    a state dict; the keys of older rotary modules (`inv_freq` and the like) are dropped, with a note, when one is
    loaded. Frequencies that such a checkpoint holds are compared first: those of another base, of another scaling, or
    that were learned, are an error.

    Args:
        rotary: what to apply. Fixed once given.

    Example:
        >>> import torch
        >>> from theodolite.plan import Rotary
        >>> rope = RotaryEmbedding(Rotary(head_dim=64, rope_theta=10000.0))
        >>> q, k = torch.randn(1, 8, 5, 64), torch.randn(1, 2, 5, 64)
        >>> q, k = rope(q, k, torch.arange(5))
    """

    def __init__(self, rotary: Rotary) -> None:
        super().__init__(rotary_dim=rotary.rotary_dim, interleaved=rotary.interleaved, trailing=rotary.trailing)
        self._rotary = rotary
        # Plain numbers: no cast finds them, and a compiled graph carries them as constants.
        self._inv_freq = None if rotary.depends_on_length else tuple(rotary.inv_freq().tolist())

    @property
    def rotary(self) -> Rotary:
        """What is applied."""
        return self._rotary

    def tables(
        self,
        positions: Tensor,
        *,
        lengths: Sequence[int] | None = None,
        amplitude: bool = True,
        device: torch.device | str | None = None,
    ) -> Tables:
        """cos and sin at `positions`; the arguments are those of `rotary_tables`."""
        if lengths is not None or self._inv_freq is None:
            return rotary_tables(self.rotary, positions, lengths=lengths, amplitude=amplitude, device=device)
        return tables_of(self.rotary, self._inv_freq, positions, amplitude=amplitude, device=device)

    @property
    def table_key(self) -> Hashable:
        return self.rotary

    def extra_repr(self) -> str:
        return repr(self.rotary)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for key in _STORED_FREQUENCIES:
            stored = state_dict.get(prefix + key)
            if stored is not None and self._inv_freq is not None and _are_others(stored, self._inv_freq):
                del state_dict[prefix + key]
                error_msgs.append(
                    f"{prefix}{key}: the checkpoint's frequencies, {stored[0].item():.6g} to {stored[-1].item():.6g}, "
                    f"are not those of {self.rotary!r}, {self._inv_freq[0]:.6g} to {self._inv_freq[-1]:.6g}; base or "
                    "scaling differ, or they were learned (LeRoPE)"
                )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


_STORED_FREQUENCIES = ("inv_freq", "original_inv_freq", "freqs")


def _are_others(stored: Any, inv_freq: Sequence[float]) -> bool:
    """Whether it is a set of frequencies, and another one; what was never filled is none."""
    if not isinstance(stored, Tensor) or stored.is_meta or tuple(stored.shape) != (len(inv_freq),):
        return False
    given, true = stored.detach().to("cpu", torch.float64), torch.tensor(inv_freq, dtype=torch.float64, device="cpu")
    if not bool((given.isfinite() & (given >= 0)).all()) or bool((given.diff() > 0).any()) or not given.any():
        return False
    # bfloat16 keeps 8 bits, and what is below its least number is 0 in float16.
    return bool(((given - true).abs() > 2.0**-8 * true + 2.0**-24).any())
