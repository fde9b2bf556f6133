"""The module that turns queries and keys by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.encodings.tables import Tables, rotary_tables, tables_of
from theodolite.kernels import rotate
from theodolite.plan import Rotary

# What older releases of rotary modules put into checkpoints: derived from the config, so nothing is lost with them.
LEGACY_KEYS = ("inv_freq", "original_inv_freq", "freqs", "freqs_cis", "cos_cached", "sin_cached", "cached_freqs")


class RotaryEmbedding(nn.Module):
    """Turns queries and keys by position. Holds a plan and nothing else: no buffer, no parameter, no history.

    So there is nothing for `.half()`, `.to()`, meta initialisation or a weight initialiser to spoil, and no key in
    a state dict; the keys of older rotary modules (`inv_freq` and the like) are dropped when one is loaded.

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
        super().__init__()
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
        """cos and sin at `positions`; make them once per forward and give them to every layer's `apply_tables`.

        The arguments are those of `rotary_tables`.
        """
        if lengths is not None or self._inv_freq is None:
            return rotary_tables(self.rotary, positions, lengths=lengths, amplitude=amplitude, device=device)
        return tables_of(self.rotary, self._inv_freq, positions, amplitude=amplitude, device=device)

    def apply_tables(
        self, q: Tensor, k: Tensor, tables: Tables, *, heads_first: bool = True, inplace: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Turn q (B, H, S, D) and k (B, Hkv, S, D) by tables that were made before."""
        return rotate(
            q,
            k,
            tables.cos,
            tables.sin,
            interleaved=self.rotary.interleaved,
            rotary_dim=self.rotary.rotary_dim,
            trailing=self.rotary.trailing,
            heads_first=heads_first,
            inplace=inplace,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        *,
        lengths: Sequence[int] | None = None,
        heads_first: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Turn q (B, H, S, D) and k (B, Hkv, S, D), or (B, S, H, D) with `heads_first=False`, at `positions`."""
        tables = self.tables(positions, lengths=lengths, device=q.device)
        tokens = q.shape[-2 if heads_first else -3]
        if positions.shape[-1] != tokens:
            layout = "(B, H, S, D)" if heads_first else "(B, S, H, D)"
            raise ValueError(
                f"positions: got {positions.shape[-1]} for the {tokens} tokens of q of shape {tuple(q.shape)}, read as "
                f"{layout}; heads_first={not heads_first} reads the other order"
            )
        return self.apply_tables(q, k, tables, heads_first=heads_first)

    def extra_repr(self) -> str:
        return repr(self.rotary)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in LEGACY_KEYS:
            state_dict.pop(prefix + key, None)
        super()._load_from_state_dict(state_dict, prefix, *args)
