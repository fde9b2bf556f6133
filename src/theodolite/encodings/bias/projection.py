"""What a bias makes of the layer's input by a learned matrix, at full precision whatever surrounds it."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from theodolite.encodings.bias.content import full_precision, working_dtype


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` for x (B, S, E) and weight (N, E): (B, S, N), float32, or float64 where an operand is.

    Autocast does not lower it: what a bias adds to scores must not depend on who calls it.
    """
    dtype = working_dtype(x, weight)
    with full_precision(x.device):
        return functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def require_layer_input(x: Tensor, hidden_size: int, tokens: int | None = None) -> None:
    """Refuse an x that is not (B, S, E) floating point, with E = `hidden_size` and S = `tokens` where that is known.

    Raises:
        ValueError: as said.
    """
    if x.dim() != 3 or x.shape[-1] != hidden_size or not x.is_floating_point():
        raise ValueError(
            f"x: got {x.dtype} of shape {tuple(x.shape)}; it must be the layer's input, floating point, (B, S, E) "
            f"with E = hidden_size = {hidden_size}"
        )
    if tokens is not None and x.shape[1] != tokens:
        raise ValueError(f"x: got {x.shape[1]} tokens for {tokens} q_positions; it must be (B, Sq, E), the queries'")
