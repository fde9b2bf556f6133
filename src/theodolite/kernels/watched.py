"""The rotation where torch watches: by plain operations, or by the operator that stands for them in a graph."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.kernels import onnx_operator, operator
from theodolite.kernels.layout import Layout
from theodolite.kernels.operands import Tables, canonical
from theodolite.kernels.recording import is_plain, is_watched
from theodolite.kernels.rows import require_rows
from theodolite.kernels.running import Maybe
from theodolite.kernels.traced import rotate_traced


def run_watched(xs: Maybe, outs: Maybe, tables: Tables, layout: Layout, heads_first: bool) -> list[Tensor | None]:
    """Turn q and k, either may be None: what graphs, transforms, other kinds of tensor and learned tables need.

    Args:
        outs: where each is copied to, or None.

    Raises:
        ValueError: a position has no row; in a compiled graph, when it runs. In an exported program or under a
            transform it is torch's IndexError or RuntimeError.
    """
    if tables.positions is not None and not is_watched() and is_plain(tables.positions):
        require_rows(tables.positions, tables.cos.shape[2])
    turned = [None if x is None else _turn(x, tables, layout, heads_first) for x in xs]
    return [x if out is None or x is None else out.copy_(x) for x, out in zip(turned, outs, strict=True)]


def _turn(x: Tensor, tables: Tables, layout: Layout, heads_first: bool) -> Tensor:
    view = canonical(x, heads_first)
    if onnx_operator.expresses(view, tables, layout):
        turned = onnx_operator.rotate(view, tables, layout)
    elif operator.pays(view, tables, layout):
        turned = torch.ops.theodolite.rotate(view, *tables, *layout)
    else:
        turned = rotate_traced(view, *_checked(tables), layout)
    turned = turned if x.dim() == 4 else turned.squeeze(0)
    return turned if heads_first else turned.transpose(-3, -2)


def _checked(tables: Tables) -> Tables:
    positions = tables.positions
    if positions is None or not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return tables
    return tables._replace(positions=torch.ops.theodolite.rows_within(positions, tables.cos.shape[2]))
