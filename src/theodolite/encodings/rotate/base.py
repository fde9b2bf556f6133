"""What all rotations share: tables once per forward, then the turning of queries, keys, values and outputs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from theodolite.encodings.legacy import drop_legacy_keys
from theodolite.encodings.rotate.frequencies import refuse_others
from theodolite.encodings.rotate.lengths import Lengths
from theodolite.encodings.rotate.operands import device_of, require_heads, require_tables, require_width
from theodolite.encodings.rotate.precision import FullPrecision
from theodolite.kernels import rotate

Q = TypeVar("Q", Tensor, None)
K = TypeVar("K", Tensor, None)


class Rotate(FullPrecision):
    """A rotation of queries and keys: *which angle* is for a subclass to say, in `tables`; the turning is here.

    What it learns stays float32 in a model of half precision (`FullPrecision`).

    Args:
        rotary_dim: channels that turn.
        interleaved: pairs are channels (2i, 2i+1) when true, (i, i + rotary_dim/2) when false.
        trailing: the channels that turn are the last of the head, not the first.
        head_dim: channels of a head: heads of another width are refused, but for the `rotary_dim` channels that turn
            given alone, where `trailing` has no effect. By default any width that has room.
    """

    # Derived from the config by older modules, and stored: nothing is lost with them.
    legacy_keys: tuple[str, ...] = (
        "inv_freq",
        "original_inv_freq",
        "freqs",
        "freqs_cis",
        "cos_cached",
        "sin_cached",
        "cached_freqs",
    )

    def __init__(
        self, *, rotary_dim: int, interleaved: bool = False, trailing: bool = False, head_dim: int | None = None
    ) -> None:
        super().__init__()
        self.rotary_dim, self.interleaved, self.trailing, self.head_dim = rotary_dim, interleaved, trailing, head_dim

    def tables(
        self,
        positions: Tensor,
        *,
        lengths: Lengths | None = None,
        amplitude: bool = True,
        device: torch.device | str | None = None,
    ) -> Any:
        """cos and sin at `positions`; make them once per forward and give them to every layer's `apply_tables`.

        Args:
            positions: (S,) or (B, S), or (axes, B, S) where there are several axes.
            lengths: the tokens of each row's whole sequence, B of them, numbers or a tensor of integers, for
                frequencies that depend on it: positions (S,) then serve all rows. Of no effect for others.
            amplitude: false leaves the attention factor out: pure rotations.
            device: where the tables are put; that of `positions` by default.

        Returns:
            Tables of (S, R/2) or (B, S, R/2), or (B, Ht, S, R/2) where heads turn by frequencies of their own; or
            what else the `apply_tables` of the same class takes.
        """
        raise NotImplementedError

    def apply_tables(self, q: Q, k: K, tables: Any, *, heads_first: bool = True, inplace: bool = False) -> tuple[Q, K]:
        """Turn q (B, H, S, D) and k (B, Hkv, S, D), either may be None, by tables that were made before."""
        for name, x in (("q", q), ("k", k)):
            if x is not None:
                self._check_fit(name, x, tables, heads_first)
        return rotate(q, k, tables.cos, tables.sin, inplace=inplace, **self._layout(heads_first))

    def forward(
        self, q: Q, k: K, positions: Tensor, *, lengths: Lengths | None = None, heads_first: bool = True
    ) -> tuple[Q, K]:
        """Turn q (B, H, S, D) and k (B, Hkv, S, D), or (B, S, H, D) with `heads_first=False`, at `positions`.

        Either may be None, where queries and keys stand at different positions and are turned apart.
        """
        tables = self.tables(positions, lengths=lengths, device=device_of(q, k))
        for name, x in (("q", q), ("k", k)):
            if x is not None:
                self._check_tokens(name, x, positions, heads_first)
        return self.apply_tables(q, k, tables, heads_first=heads_first)

    def turn(self, x: Tensor, tables: Any, *, heads_first: bool = True, conjugate: bool = False) -> Tensor:
        """Turn one tensor (B, H, S, D) by tables that were made before; `conjugate` turns the other way."""
        self._check_fit("x", x, tables, heads_first)
        return rotate(x, None, tables.cos, tables.sin, conjugate=conjugate, **self._layout(heads_first))[0]

    def turn_values(self, v: Tensor, tables: Any, *, heads_first: bool = True) -> Tensor:
        """Turn values (B, Hkv, S, D) too, so that outputs carry relative positions (DeepSeek-V4).

        `tables` are those of the keys, made with `amplitude=False`.
        """
        return self.turn(v, tables, heads_first=heads_first)

    def turn_output_back(self, out: Tensor, tables: Any, *, heads_first: bool = True) -> Tensor:
        """The inverse for attention's output (B, H, S, D): `o_m = R(-m) sum_n a_mn R(n) v_n = sum_n a_mn R(n-m) v_n`.

        `tables` are those of the queries, made with `amplitude=False`.
        """
        return self.turn(out, tables, heads_first=heads_first, conjugate=True)

    @property
    def table_key(self) -> Hashable:
        """Modules with equal keys have equal tables at equal positions: one forward makes them once."""
        return self

    def reset_parameters(self) -> None:
        """Initialise what is learned."""

    def _layout(self, heads_first: bool) -> dict[str, Any]:
        return {
            "interleaved": self.interleaved,
            "rotary_dim": self.rotary_dim,
            "trailing": self.trailing,
            "heads_first": heads_first,
        }

    def _check_fit(self, name: str, x: Tensor, tables: Any, heads_first: bool) -> None:
        require_heads(name, x)
        if self.head_dim is not None:
            require_width(name, x, self.head_dim, self.rotary_dim)
        require_tables(name, x, tables)

    def _fixed_frequencies(self) -> Sequence[Sequence[float]]:
        """The sets of frequencies that those of a checkpoint are compared with."""
        return ()

    def _check_tokens(self, name: str, x: Tensor, positions: Tensor, heads_first: bool) -> None:
        tokens = x.shape[-2 if heads_first else -3]
        if positions.shape[-1] != tokens:
            layout = "(B, H, S, D)" if heads_first else "(B, S, H, D)"
            raise ValueError(
                f"positions: got {positions.shape[-1]} for the {tokens} tokens of {name} of shape {tuple(x.shape)}, "
                f"read as {layout}; heads_first={not heads_first} reads the other order"
            )

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
        plan = getattr(self, "rotary", type(self).__name__)
        refuse_others(state_dict, prefix, self._fixed_frequencies(), str(plan), error_msgs)
        drop_legacy_keys(self, state_dict, prefix)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
