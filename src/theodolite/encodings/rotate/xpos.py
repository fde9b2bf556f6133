"""xPos: a rotation, and a decay with distance that is shared out between the query and the key."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from theodolite.encodings.rotate.base import K, Q, Rotate
from theodolite.encodings.rotate.exact import cos_sin, host_positions, require_settled, row_blocks
from theodolite.encodings.rotate.lengths import Lengths
from theodolite.encodings.rotate.operands import layout_of
from theodolite.encodings.rotate.tables import Tables, pair_tables
from theodolite.kernels import rotate
from theodolite.kernels.outputs import require_apart
from theodolite.plan import Rotary
from theodolite.plan.errors import is_number
from theodolite.positions.checks import can_read_at_once, require_positions
from theodolite.positions.traced import is_traced


class QueryKeyTables(NamedTuple):
    """Tables of queries and tables of keys, where the two differ.

    `furthest` is the largest distance from the centre among the positions, one number, on the CPU.
    """

    q: Tables
    k: Tables
    furthest: Tensor


class XPos(Rotate):
    """xPos (2212.10554): pair i of a query at m is turned and multiplied by `zeta_i ** ((m - c) / S)`, of a key at n
    by `zeta_i ** (-(n - c) / S)`; so the score decays by `zeta_i ** ((m - n) / S)`, at any centre c.

    `zeta_i = (2i / R + gamma) / (1 + gamma)`, below 1: fast pairs decay sooner. The centre is fixed, unlike in
    rotary-embedding-torch, x-transformers and flash-attention, which put it at half the length of each call, so that
    keys cached in one call do not meet queries of a longer one.

    The factors leave the range of half precision soon: see `reach`. Take a centre in the middle of the positions
    that are used. Channels that do not turn do not decay either.

    Args:
        rotary: the rotation; one axis, and frequencies that do not depend on the length.
        centre: c, the position whose tokens are not scaled (tokens).
        scale_base: S, in tokens; the larger, the slower the decay.
        gamma: the larger, the more alike the decay of fast and slow pairs; 0.4 in the paper.
    """

    def __init__(self, rotary: Rotary, *, centre: float, scale_base: float = 512.0, gamma: float = 0.4) -> None:
        require_settled("rotary", rotary)
        super().__init__(**layout_of(rotary))
        if rotary.mrope_section:
            raise ValueError(
                f"rotary: got mrope_section {rotary.mrope_section}; xPos decays along one axis, so it must be None"
            )
        if not is_number(centre):
            raise ValueError(f"centre: got {centre!r}; it must be a finite number, a position in tokens")
        for name, value in (("scale_base", scale_base), ("gamma", gamma)):
            if not is_number(value) or value <= 0:
                raise ValueError(f"{name}: got {value!r}; it must be a finite number above 0")
        self.rotary, self.centre, self.scale_base, self.gamma = rotary, float(centre), float(scale_base), float(gamma)
        self._inv_freq = tuple(rotary.inv_freq().tolist())
        zeta = ((2 * pair / self.rotary_dim + gamma) / (1 + gamma) for pair in range(self.rotary_dim // 2))
        # Nats per token.
        self._rates = tuple(-math.log(value) / scale_base for value in zeta)

    def reach(self, dtype: torch.dtype) -> int:
        """How far from the centre (tokens) the factors of all pairs are still normal numbers of `dtype`.

        With the defaults 3,966 in float16 and 35,694 in bfloat16 and float32; float64 is as float32, which the
        tables are. The queries and keys that are multiplied need room beside it: a channel of size a has
        `ln(a) / 0.00245` tokens less. A score of a key that *follows* its query grows with their distance and may be
        infinite where both are within reach: mask such scores by replacing them, not by adding to them.
        """
        info = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
        amplitude = math.log(self.rotary.attention_factor())
        return int(min(math.log(info.max) - amplitude, amplitude - math.log(info.tiny)) / self._rates[0])

    def tables(
        self,
        positions: Tensor,
        *,
        lengths: Lengths | None = None,
        amplitude: bool = True,
        device: torch.device | str | None = None,
    ) -> QueryKeyTables:
        """cos and sin for queries and for keys, each (S, R/2) or (B, S, R/2), float32.

        Every entry is within 6e-8 of the true value, times its factor where that is above 1.

        Args:
            positions: (S,) or (B, S); integers, or float32 or float64 where fractions are meant.
            lengths: of no effect: the frequencies do not depend on it.
            amplitude: false leaves out the attention factor and the decay: pure rotations, for queries and keys alike.
            device: where the tables are put; that of `positions` by default.

        Raises:
            ValueError: positions of another dtype or shape, or further from the centre than `reach(torch.float32)`.
        """
        if not amplitude:
            same = pair_tables(self._inv_freq, positions, device=device)
            return QueryKeyTables(same, same, torch.zeros((), dtype=torch.float64, device="cpu"))
        require_positions("positions", positions, dims=(1, 2))
        device = positions.device if device is None else torch.device(device)
        if positions.is_meta and device.type != "meta":
            raise ValueError(f"positions: they are on the meta device and have no values to make tables of on {device}")
        compute = _compute_opaque if is_traced(positions) else _compute
        factor, reach = self.rotary.attention_factor(), float(self.reach(torch.float32))
        cos, sin, cos_k, sin_k, furthest = compute(positions, self._inv_freq, self._rates, self.centre, factor, reach)
        queries, keys = Tables(cos.to(device), sin.to(device)), Tables(cos_k.to(device), sin_k.to(device))
        return QueryKeyTables(queries, keys, furthest)

    def apply_tables(
        self, q: Q, k: K, tables: QueryKeyTables, *, heads_first: bool = True, inplace: bool = False
    ) -> tuple[Q, K]:
        """Turn and scale q (B, H, S, D) and k (B, Hkv, S, D), either may be None, by tables that were made before.

        Raises:
            ValueError: a position is out of `reach` in the dtype of q or k. A compiled graph looks for float32 only.
        """
        for name, x in (("q", q), ("k", k)):
            if x is None:
                continue
            self._check_fit(name, x, tables.q if name == "q" else tables.k, heads_first)
            if can_read_at_once(tables.furthest):
                self._check_reach(name, x.dtype, float(tables.furthest))
        if inplace and q is not None and k is not None:
            require_apart(q, k)
        layout = self._layout(heads_first)
        q, _ = rotate(q, None, tables.q.cos, tables.q.sin, inplace=inplace, **layout)
        _, k = rotate(None, k, tables.k.cos, tables.k.sin, inplace=inplace, **layout)
        return q, k

    def turn(self, x: Tensor, tables: QueryKeyTables, *, heads_first: bool = True, conjugate: bool = False) -> Tensor:
        """Turn one tensor (B, H, S, D) by tables made with `amplitude=False`; `conjugate` turns the other way.

        Raises:
            ValueError: the tables carry the decay, which is not the same for a query and a key, and not undone by
                turning the other way.
        """
        if tables.q is not tables.k:
            raise ValueError(
                "tables: they carry xPos's decay, which differs for queries and keys; make them with amplitude=False, "
                "or use apply_tables"
            )
        return super().turn(x, tables.q, heads_first=heads_first, conjugate=conjugate)

    @property
    def table_key(self) -> Hashable:
        return type(self), self.rotary, self.centre, self.scale_base, self.gamma

    def _fixed_frequencies(self) -> Sequence[Sequence[float]]:
        return (self._inv_freq,)

    def extra_repr(self) -> str:
        return f"{self.rotary!r}, centre={self.centre:g}, scale_base={self.scale_base:g}, gamma={self.gamma:g}"

    def _check_reach(self, name: str, dtype: torch.dtype, furthest: float) -> None:
        if furthest > self.reach(dtype):
            raise ValueError(
                f"{name}: got {dtype} and a position {furthest:g} tokens from the centre {self.centre:g}; the factors "
                f"of xPos stay in its range up to {self.reach(dtype)} tokens: use bfloat16 or float32, or a larger "
                "scale_base"
            )


def _compute(
    positions: Tensor, inv_freq: Sequence[float], rates: Sequence[float], centre: float, amplitude: float, reach: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """cos and sin of queries, then of keys, float32, and the largest distance from the centre; on the CPU."""
    shape = (*positions.shape, len(inv_freq))
    if positions.is_meta:
        made = [positions.new_empty(shape, dtype=torch.float32) for _ in range(4)]
        return made[0], made[1], made[2], made[3], positions.new_empty((), dtype=torch.float64)
    # Made outside inference mode, so that training can use them later.
    with torch.inference_mode(False):
        host = host_positions("positions", positions).reshape(-1, 1)
        offset = host - centre
        furthest = offset.abs().amax() if offset.numel() else torch.zeros((), dtype=torch.float64, device="cpu")
        if furthest.item() > reach:
            worst = host[offset.abs().argmax()].item()
            raise ValueError(
                f"positions: got {worst:g}, {furthest.item():g} tokens from the centre {centre:g}; the factors of xPos "
                f"stay in the range of float32 up to {reach:g} tokens: choose a centre amid the positions, or a larger "
                "scale_base"
            )
        frequencies, decays = (torch.tensor(given, dtype=torch.float64, device="cpu") for given in (inv_freq, rates))
        made = [torch.empty((len(host), len(inv_freq)), dtype=torch.float32, device="cpu") for _ in range(4)]
        for block in row_blocks(len(host), len(inv_freq)):
            cos, sin = cos_sin(host[block] * frequencies, amplitude, torch.float64)
            decay = offset[block] * decays
            shrink, grow = decay.neg().exp(), decay.exp()
            for table, factor, turn in zip(made, (shrink, shrink, grow, grow), (cos, sin, cos, sin), strict=True):
                table[block] = turn * factor
        cos, sin, cos_k, sin_k = (table.view(shape) for table in made)
        return cos, sin, cos_k, sin_k, furthest


@torch.library.custom_op("theodolite::xpos_tables", mutates_args=())
def _compute_opaque(
    positions: Tensor, inv_freq: Sequence[float], rates: Sequence[float], centre: float, amplitude: float, reach: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`_compute` as one node of a compiled graph, so that the compiler cannot redo its float64 some other way."""
    return _compute(positions, inv_freq, rates, centre, amplitude, reach)


@_compute_opaque.register_fake
def _(
    positions: Tensor, inv_freq: Sequence[float], rates: Sequence[float], centre: float, amplitude: float, reach: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = (*positions.shape, len(inv_freq))
    made = [torch.empty(shape, dtype=torch.float32, device="cpu") for _ in range(4)]
    return made[0], made[1], made[2], made[3], torch.empty((), dtype=torch.float64, device="cpu")
