"""What all additive encodings share: a table at explicit positions, and its sum with the embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from theodolite.encodings.legacy import drop_legacy_keys
from theodolite.positions.checks import require_count, require_mask, require_positions, require_reachable


class Embed(nn.Module):
    """Adds a vector of each token's position to its embedding: *which vector* is for a subclass to say, in `_table`.

    Shapes (B batch, S tokens, E embedding width): x (B, S, E), positions (S,) or (B, S).

    Args:
        dim: channels of the vector.
        channels: the channels of x that it is added to, `dim` of them; all by default. With `slice(0, 256)` on a width
            of 512 the other half is left to a rotation; two modules with a half each are a 2-D encoding.
    """

    # Position numbers that older modules stored: nothing is lost with them.
    legacy_keys: tuple[str, ...] = ("position_ids",)

    def __init__(self, dim: int, *, channels: slice | None = None) -> None:
        super().__init__()
        require_count("dim", dim, least=1)
        if channels is not None and not isinstance(channels, slice):
            raise ValueError(f"channels: got {channels!r}; give a slice, or None for all")
        # Tensors are sliced forwards only.
        if channels is not None and channels.step is not None and not channels.step >= 1:
            raise ValueError(f"channels: got {channels!r}; its step must be at least 1")
        self.dim, self.channels = dim, channels

    def table(self, positions: Tensor, *, device: torch.device | str | None = None) -> Tensor:
        """The vectors at `positions` (S,) or (B, S): (S, dim) or (B, S, dim), on `device`.

        float32, or float64 where the parameters are.
        """
        require_positions("positions", positions, dims=(1, 2))
        return self._table(positions, device)

    def forward(self, x: Tensor, positions: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """x + table, summed in float32 at least and rounded once to the dtype of x.

        Args:
            x: (B, S, E) embeddings, multiplied before by whatever the model multiplies them by.
            positions: (S,), (1, S) or (B, S).
            mask: (S,) or (B, S), not 0 at the tokens that get a vector: starts of sentences, or all but padding. The
                others leave as they came, bit for bit, and their positions are not looked at.

        Raises:
            ValueError: x that is no embedding, another number of tokens or channels, positions that the table lacks.
        """
        require_positions("positions", positions, dims=(1, 2))
        self._check_width(x)
        _check_tokens("positions", positions.shape, x)
        if mask is not None:
            require_mask("mask", mask, dims=(1, 2))
            _check_tokens("mask", mask.shape, x)
            require_reachable(positions, "positions", mask=mask)
            positions = _only_chosen(positions, mask.to(torch.bool))
        return self.add_table(x, self.table(positions, device=x.device), mask=mask)

    def add_table(self, x: Tensor, table: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """x + `table` (S, dim), (1, S, dim) or (B, S, dim), made before: where one serves many calls.

        Sinusoids at the same positions in every step of training need be made once only.
        """
        self._check_width(x)
        if table.dim() not in (2, 3) or table.shape[-1] != self.dim:
            raise ValueError(f"table: got shape {tuple(table.shape)}; it must be (S, {self.dim}) or (B, S, {self.dim})")
        _check_tokens("table", table.shape[:-1], x)
        require_reachable(x, "x", table=table)
        part = x if self.channels is None else x[..., self.channels]
        # Type promotion sums in the wider of the two.
        total = (part + table.to(x.device)).to(x.dtype)
        if mask is not None:
            require_mask("mask", mask, dims=(1, 2))
            _check_tokens("mask", mask.shape, x)
            require_reachable(x, "x", mask=mask)
            total = torch.where(mask.to(x.device, torch.bool)[..., None], total, part)
        if self.channels is None:
            return total
        out = x.clone()
        out[..., self.channels] = total
        return out

    def reset_parameters(self) -> None:
        """Initialise what is learned."""

    def _table(self, positions: Tensor, device: torch.device | str | None) -> Tensor:
        raise NotImplementedError

    def _check_width(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or x.dim() != 3 or not x.is_floating_point():
            given = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(f"x: got {given}; it must be embeddings (B, S, E), floating point")
        width = len(range(*(self.channels or slice(None)).indices(x.shape[-1])))
        if width != self.dim:
            where = "" if self.channels is None else f", {width} of them in channels {_plainly(self.channels)}"
            raise ValueError(f"x: got {x.shape[-1]} channels{where}; this encoding has dim {self.dim}")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        drop_legacy_keys(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.dim}" if self.channels is None else f"{self.dim}, channels={_plainly(self.channels)}"


def _check_tokens(name: str, given: tuple[int, ...], x: Tensor) -> None:
    batch, tokens = x.shape[:2]
    if given[-1] != tokens or (len(given) == 2 and given[0] not in (1, batch)):
        raise ValueError(
            f"{name}: got {tuple(given)} for x of shape {tuple(x.shape)}; it must be ({tokens},) or ({batch}, {tokens})"
        )


def _only_chosen(positions: Tensor, mask: Tensor) -> Tensor:
    """Positions, 0 where no token is chosen: numbers at the others may lie outside the table."""
    if not positions.is_floating_point():
        positions = positions.to(torch.int64)
    chosen = mask.to(positions.device)
    if chosen.dim() == 2 and (positions.dim() == 1 or positions.shape[0] < chosen.shape[0]):
        # One table serves all rows still: it needs every position that some row has chosen.
        chosen = chosen.any(0, keepdim=positions.dim() == 2)
    return positions.masked_fill(~chosen, 0)


def _plainly(channels: slice) -> str:
    ends = ["" if end is None else str(end) for end in (channels.start, channels.stop)]
    return ":".join(ends if channels.step is None else [*ends, str(channels.step)])
