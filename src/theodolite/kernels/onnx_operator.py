"""The rotation as ONNX has it: RotaryEmbedding of opset 23, where that can say it."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.kernels.layout import Layout
from theodolite.kernels.operands import Tables


def expresses(x: Tensor, tables: Tables, layout: Layout) -> bool:
    """Whether a graph for ONNX is being made, and its operator does what is asked for.

    It has one table for all heads, one entry for both channels of a pair, and no float64.
    """
    cos = tables.cos
    return bool(
        torch.onnx.is_in_onnx_export()
        and hasattr(torch.onnx, "ops")
        and cos.shape[1] == 1
        and 2 * cos.shape[3] == layout.rotary_dim
        and x.dtype != torch.float64
        and not (tables.positions is not None and cos.shape[0] != 1)
    )


def rotate(x: Tensor, tables: Tables, layout: Layout) -> Tensor:
    """Turn `x` (B, H, S, D). The operator computes in the dtype that it is given, so it is given float32.

    A position without a row is for the runtime to find: ONNX lets negative ones count from the end.
    """
    batch, _, tokens, channels = x.shape
    cos, sin = (_widened(table)[:, 0] for table in (tables.cos, tables.sin))
    positions = tables.positions
    if positions is None:
        cos, sin = (table.expand(batch, -1, -1) for table in (cos, sin))
    else:
        cos, sin = cos[0], sin[0]
        positions = positions.long().expand(batch, tokens)
    start = channels - layout.rotary_dim if layout.trailing else 0
    turning = x.float().narrow(-1, start, layout.rotary_dim)
    turned = torch.onnx.ops.rotary_embedding(
        turning, cos, -sin if layout.conjugate else sin, positions, interleaved=layout.interleaved
    ).to(x.dtype)
    if layout.rotary_dim == channels:
        return turned
    kept = x.narrow(-1, 0 if layout.trailing else layout.rotary_dim, channels - layout.rotary_dim)
    return torch.cat((kept, turned) if layout.trailing else (turned, kept), dim=-1)


def _widened(table: Tensor) -> Tensor:
    return table.float() * (1 / 127) if table.dtype == torch.int8 else table.float()
