"""A learned vector for each position, up to a limit that is never passed in silence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from theodolite.encodings.embed.base import Embed
from theodolite.encodings.embed.resize import Method, Mode, resize_grid_table, resize_table
from theodolite.positions.checks import require_count, require_integers, require_reachable


class LearnedEmbedding(Embed):
    """A table `weight` (rows, dim), row `position + offset` for each token (BERT, GPT-2, OPT, RoBERTa, ViT).

    A position below 0 or past the end is an error, never another row. Where positions are on the CPU it is a ValueError
    that names the position and the limit. On CUDA, where reading them would make the device wait, and in a compiled
    or exported graph, it is an assertion that the device makes (`torch._assert_async`), which names the limit.

    Args:
        num_positions: positions there are, from 0. Rows before them are counted apart: see `from_rows`.
        dim: channels.
        offset: rows before that of position 0. 2 in OPT.
        padding_idx: the row of padding, zeros and never looked up; positions begin after it, so that offset is
            padding_idx + 1 (RoBERTa: 1). Positions are from 0 here as everywhere; those that begin at padding_idx + 1
            already, as transformers makes them, belong to a table without `padding_idx`. With the mask of
            real tokens in `forward`, padding gets nothing, which is what its row of zeros would add.
        std: of the normal distribution that `weight` begins with. 0.02 in BERT and GPT-2.
        channels: as in `Embed`.

    Example:
        >>> import torch
        >>> wpe = LearnedEmbedding(1024, 768)
        >>> x = wpe(torch.randn(2, 5, 768), torch.arange(5))
        >>> longer = wpe.resize(4096)
    """

    def __init__(
        self,
        num_positions: int,
        dim: int,
        *,
        offset: int = 0,
        padding_idx: int | None = None,
        std: float = 0.02,
        channels: slice | None = None,
    ) -> None:
        super().__init__(dim, channels=channels)
        require_count("num_positions", num_positions, least=1)
        self.num_positions, self.padding_idx, self.std = num_positions, padding_idx, std
        self.offset = _offset(offset, padding_idx)
        self.weight = nn.Parameter(torch.empty(num_positions + self.offset, dim))
        self.reset_parameters()

    @classmethod
    def from_rows(
        cls,
        rows: int,
        dim: int,
        *,
        offset: int = 0,
        padding_idx: int | None = None,
        std: float = 0.02,
        channels: slice | None = None,
    ) -> LearnedEmbedding:
        """A table of so many rows, as RoBERTa's `max_position_embeddings` counts them: 514 are 512 positions after
        padding_idx 1, and 510 after padding_idx 3."""
        require_count("rows", rows, least=1)
        before = _offset(offset, padding_idx)
        if rows <= before:
            raise ValueError(f"rows: got {rows}; {before} of them stand before position 0, and none is left")
        return cls(rows - before, dim, offset=offset, padding_idx=padding_idx, std=std, channels=channels)

    @classmethod
    def from_weight(
        cls, weight: Tensor, *, offset: int = 0, padding_idx: int | None = None, channels: slice | None = None
    ) -> LearnedEmbedding:
        """A table with a copy of `weight` (rows, dim), or (1, rows, dim) as vision models keep it."""
        if not isinstance(weight, Tensor) or weight.dim() not in (2, 3) or (weight.dim() == 3 and weight.shape[0] != 1):
            given = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
            raise ValueError(f"weight: got {given}; it must be (rows, dim) or (1, rows, dim)")
        weight = weight.detach().reshape(weight.shape[-2:])
        with torch.device("meta"):
            made = cls.from_rows(*weight.shape, offset=offset, padding_idx=padding_idx, channels=channels)
        made.weight = nn.Parameter(weight.clone())
        return made

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].zero_()

    def resize(
        self, num_positions: int, *, method: Method = "stretch", keep: int = 0, alpha: float = 0.4
    ) -> LearnedEmbedding:
        """A new module for another number of positions; this one is left as it is. See `resize_table`.

        Rows before position 0 are taken over; `keep` counts positions. An optimiser must be given the new weight.
        """
        self._require_values()
        table = resize_table(self.weight[self.offset :], num_positions, method=method, keep=keep, alpha=alpha)
        return self._with_positions(table)

    def resize_grid(
        self,
        *,
        old: tuple[int, int],
        new: tuple[int, int],
        prefix: int,
        mode: Mode = "bicubic",
        antialias: bool = False,
    ) -> LearnedEmbedding:
        """A new module for another grid of patches; this one is left as it is. See `resize_grid_table`.

        From 14 x 14 patches after a class token: `resize_grid(old=(14, 14), new=(24, 32), prefix=1)`.
        """
        self._require_values()
        table = self.weight[self.offset :]
        table = resize_grid_table(table, old=old, new=new, prefix=prefix, mode=mode, antialias=antialias)
        return self._with_positions(table)

    def _table(self, positions: Tensor, device: torch.device | str | None) -> Tensor:
        require_integers("positions", positions)
        require_reachable(self.weight, "weight", positions=positions)
        positions = positions.to(torch.int64)
        if device is not None and torch.device(device).type != "meta":
            self._require_values()
        self._require_rows(positions)
        weight: Tensor = self.weight
        if weight.dtype in (torch.float16, torch.bfloat16) and weight.requires_grad and torch.is_grad_enabled():
            # A row's gradient is a sum over the batch: not in half precision.
            weight = weight.float()
        table = nn.functional.embedding(positions.to(weight.device) + self.offset, weight)
        table = table.to(torch.promote_types(table.dtype, torch.float32))
        return table if device is None else table.to(device)

    def _require_rows(self, positions: Tensor) -> None:
        if positions.is_meta:
            return
        if torch.compiler.is_compiling() or positions.device.type == "cuda":
            inside = (positions >= 0) & (positions < self.num_positions)
            torch._assert_async(inside.all(), f"positions: some are outside the table; {self._limit()}")
        elif positions.numel():
            for worst in (int(positions.max()), int(positions.min())):
                if not 0 <= worst < self.num_positions:
                    longer = "; resize() makes a longer one" if worst >= 0 else ""
                    raise ValueError(f"positions: got {worst}; {self._limit()}{longer}")

    def _limit(self) -> str:
        limit = f"the table has positions 0 to {self.num_positions - 1}"
        if not self.offset:
            return limit
        why = f"offset {self.offset}" if self.padding_idx is None else f"padding_idx {self.padding_idx}"
        return f"{limit}: {self.num_positions} of its {len(self.weight)} rows, for they begin after {why}"

    def _require_values(self) -> None:
        if self.weight.is_meta:
            raise ValueError("weight: it is on the meta device and has no values; load it first")

    def _with_positions(self, table: Tensor) -> LearnedEmbedding:
        weight = torch.cat((self.weight.detach()[: self.offset], table))
        offset = self.offset if self.padding_idx is None else 0
        made = self.from_weight(weight, offset=offset, padding_idx=self.padding_idx, channels=self.channels)
        made.std = self.std
        made.weight.requires_grad_(self.weight.requires_grad)
        return made.train(self.training)

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
        given = state_dict.get(prefix + "weight")
        if isinstance(given, Tensor) and given.shape != self.weight.shape and given.shape[1:] == self.weight.shape[1:]:
            error_msgs.append(
                f"{prefix}weight: the checkpoint's table has {len(given)} rows and this one {len(self.weight)} "
                f"({self.num_positions} positions, {self.offset} rows before them); make the module with "
                f"from_rows({len(given)}, {self.dim}, ...), load, then resize() it"
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        parts = [str(self.num_positions), super().extra_repr()]
        if self.padding_idx is not None:
            parts.append(f"padding_idx={self.padding_idx}")
        elif self.offset:
            parts.append(f"offset={self.offset}")
        return ", ".join(parts)


def _offset(offset: int, padding_idx: int | None) -> int:
    require_count("offset", offset, least=0)
    if padding_idx is None:
        return offset
    require_count("padding_idx", padding_idx, least=0)
    if offset:
        raise ValueError(f"offset: got {offset} beside padding_idx {padding_idx}, which is offset {padding_idx + 1}")
    return padding_idx + 1
