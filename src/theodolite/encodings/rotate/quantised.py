"""Tables that are stored, in few bytes, and read by position."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from theodolite.encodings.rotate.base import Rotate
from theodolite.encodings.rotate.exact import axes_of, require_settled, row_blocks
from theodolite.encodings.rotate.lengths import Lengths
from theodolite.encodings.rotate.operands import layout_of
from theodolite.encodings.rotate.tables import Tables, pair_tables, tables_of
from theodolite.encodings.rotate.tracing import positions_within
from theodolite.plan import Rotary
from theodolite.positions.checks import LARGEST_POSITION, require_count, require_integers
from theodolite.positions.traced import is_traced

_STEPS = 127
# Of the file, not of a module: modules are copied and pickled, which no lock is.
_GROWING = threading.Lock()
_CPU = torch.device("cpu")
_DTYPES = (torch.int8, torch.float16, torch.bfloat16)


class StoredRotary(Rotate):
    """A rotation whose cos and sin are stored for positions 0, 1, 2, ... and picked by position: no trigonometry in a
    decoding step, for a table of `nbytes`.

    The entries are off by at most, each times the attention factor and besides 1.2e-7 of rounding to float32:

    | stored as | bytes of a position | an entry is off by | scores are off by (root mean square, worst of 4 million) |
    |---|---|---|---|
    | int8 | R | 1/254 = 3.9e-3 | 4.5e-3, 0.03 |
    | float16 | 2R | 2^-12 = 2.4e-4 | 2.4e-4, 0.0015 |
    | bfloat16 | 2R | 2^-9 = 2.0e-3 | 1.9e-3, 0.012 |

    The last column is measured, in standard deviations of the scores: normal queries and keys of 128 channels, base
    10,000, positions up to 4,096. Exact tables (`RotaryEmbedding`) have entries within 6e-8.

    A position past the end makes the table longer, by at least a half, up to 2^24, and changes no row that is there;
    nothing clamps or wraps. The table is no parameter and no buffer: it is in no state dict, and no cast, meta device
    or weight initialiser reaches it. A copy is kept on each device that it was read on. In a compiled or exported
    graph the same rows, bit for bit, are computed rather than picked.

    Args:
        rotary: the rotation; its frequencies must not depend on the length. Several axes read one table.
        length: positions stored from the beginning.
        dtype: torch.int8, torch.float16 or torch.bfloat16.
    """

    def __init__(self, rotary: Rotary, *, length: int, dtype: torch.dtype = torch.int8) -> None:
        require_settled("rotary", rotary)
        super().__init__(**layout_of(rotary))
        require_count("length", length, least=1)
        if dtype not in _DTYPES:
            raise ValueError(f"dtype: got {dtype}; it must be torch.int8, torch.float16 or torch.bfloat16")
        self.rotary, self.dtype = rotary, dtype
        self._inv_freq = tuple(rotary.inv_freq().tolist())
        # One table for each device, of the same rows: (N, 2, R/2), cos above sin. No tensor attribute of the module.
        self._stored: dict[torch.device, Tensor] = {}
        self._least = length
        # Where tensors have no values, the table is made when one is read that has.
        if not is_traced():
            self._table(_CPU, length - 1)

    @property
    def length(self) -> int:
        """How many positions are stored."""
        table = self._stored.get(_CPU)
        return self._least if table is None else table.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of one table: `length * rotary_dim`, twice that in half precision."""
        return self.length * self.rotary_dim * self.dtype.itemsize

    def tables(
        self,
        positions: Tensor,
        *,
        lengths: Lengths | None = None,
        amplitude: bool = True,
        device: torch.device | str | None = None,
    ) -> Tables:
        """cos and sin, float32, at `positions`.

        Args:
            positions: (S,) or (B, S), or (axes, B, S) where the plan has axes; integers of at least 0.
            lengths: of no effect: the frequencies do not depend on it.
            amplitude: false leaves the attention factor out.
            device: where the tables are put; that of `positions` by default.

        Raises:
            ValueError: positions that are fractions, negative or past 2**24, or of another shape.
        """
        axes = axes_of(self.rotary)
        require_integers("positions", positions, dims=(3,) if axes else (1, 2))
        if axes and positions.shape[0] != axes:
            raise ValueError(f"positions: got {positions.shape[0]} axes; this encoding has {axes}")
        factor = self.rotary.attention_factor() if amplitude else 1.0
        if positions.is_meta or is_traced(positions):
            if not positions.is_meta:
                positions = positions_within(positions, 0, LARGEST_POSITION)
            exact = tables_of(self.rotary, self._inv_freq, positions, amplitude=False, device=device)
            return Tables(*(_restored(_rounded(table, self.dtype), factor) for table in exact))
        device = positions.device if device is None else torch.device(device)
        last = _furthest(positions)
        # Made outside inference mode, so that training can use them later.
        with torch.inference_mode(False):
            rows = self._table(positions.device, last)[positions.long()]
            if axes:
                axis = torch.tensor(self.rotary.axis_of_pairs(), device=rows.device)
                rows = rows.gather(0, axis.expand(1, *rows.shape[1:])).squeeze(0)
            cos, sin = _restored(rows.to(device), factor).unbind(-2)
            return Tables(cos.contiguous(), sin.contiguous())

    @property
    def table_key(self) -> Hashable:
        return type(self), self.rotary, self.dtype

    def _fixed_frequencies(self) -> Sequence[Sequence[float]]:
        return (self._inv_freq,)

    def extra_repr(self) -> str:
        return f"{self.rotary!r}, length={self.length}, dtype={self.dtype}"

    def _table(self, device: torch.device, last: int) -> Tensor:
        """A table on `device` that has a row for `last`; what other threads do to `_stored` is nothing to it."""
        table = self._stored.get(device)
        if table is not None and last < table.shape[0]:
            return table
        with _GROWING, torch.inference_mode(False):
            rows = self._stored.get(_CPU)
            if rows is None or last >= rows.shape[0]:
                rows = self._longer(rows, last)
                # Copies on other devices are made anew when they are read.
                self._stored = {_CPU: rows}
            table = self._stored.get(device)
            if table is None or last >= table.shape[0]:
                table = self._stored[device] = rows.to(device)
            return table

    def _longer(self, before: Tensor | None, last: int) -> Tensor:
        start = 0 if before is None else before.shape[0]
        length = max(last + 1, self._least, min(start + start // 2, LARGEST_POSITION + 1))
        rows = torch.empty((length, 2, self.rotary_dim // 2), dtype=self.dtype, device=_CPU)
        if before is not None:
            rows[:start] = before
        # In blocks: the float32 entries are four times the table.
        for block in row_blocks(length - start, self.rotary_dim // 2):
            new = torch.arange(start + block.start, min(start + block.stop, length), device=_CPU)
            exact = pair_tables(self._inv_freq, new)
            rows[new[0] : new[-1] + 1] = torch.stack([_rounded(table, self.dtype) for table in exact], dim=-2)
        return rows


def _furthest(positions: Tensor) -> int:
    """The largest, -1 where there are none."""
    if not positions.numel():
        return -1
    # One wait for the device, for both ends.
    first, last = torch.stack(torch.aminmax(positions.long())).tolist()
    if first < 0:
        raise ValueError(f"positions: got {first}; the table begins at 0")
    if last > LARGEST_POSITION:
        raise ValueError(f"positions: got {last}; the tables are exact up to 2**24 = {LARGEST_POSITION}")
    return int(last)


def _rounded(table: Tensor, dtype: torch.dtype) -> Tensor:
    """A table of amplitude 1, float32, as it is stored."""
    return (table * _STEPS).round().to(dtype) if dtype == torch.int8 else table.to(dtype)


def _restored(rows: Tensor, factor: float) -> Tensor:
    """float32, times `factor`."""
    factor = factor / _STEPS if rows.dtype == torch.int8 else factor
    rows = rows.float()
    return rows if factor == 1.0 else rows * factor
