"""The forget gate of FoX: each token says how much of what came before it is forgotten (2503.02130)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from theodolite.encodings.bias.base import Bias, Content, ScoreMod
from theodolite.encodings.bias.devices import require_beside
from theodolite.encodings.bias.projection import project, require_layer_input
from theodolite.positions.checks import require_count, require_reachable


class ForgettingGate(Bias):
    """Adds `c_m - c_n` to the score of query m and key n: c is the running sum of `ln f`, `f = sigmoid(w.x + b)`.

    So a key loses the logarithm of every gate after it, up to the query's own: nothing at m = n (2503.02130, eq. 5;
    the same convention as its authors' kernel and flash-linear-attention's `forgetting_attn`). A constant gate
    `f = e^-s` is ALiBi with slope s.

    c grows without end, and one float32 would be off by 4e-3 at c = -69 000, where 100 000 gates of 1/2 lead. So the
    state is a float32 pair, (B, H, S, 2): c rounded, and what the rounding left. The bias is then within
    `2^-22 |c_m - c_n| + (2^-45 + 2^-53 |m - n|) max |c|` of the exact one at any length: no restart is needed between
    the documents of a packed row, nor behind padding, whose part cancels. The pair is kept like a key of two
    channels: new tokens are joined on dimension 2.

    Args:
        num_heads: heads of the whole model, over all ranks of tensor parallelism.
        hidden_size: width of the layer's input, E.

    Attributes:
        weight: (H, E), initialised as normal with 0.02.
        bias: (H,), initialised as 0: gates of 1/2.
    """

    reads: ClassVar[tuple[str, ...]] = ("q_state", "k_state")
    causal_only: ClassVar[bool] = True

    def __init__(self, num_heads: int, hidden_size: int) -> None:
        super().__init__(num_heads)
        require_count("hidden_size", hidden_size, least=1)
        self.hidden_size = hidden_size
        self.weight = nn.Parameter(torch.empty(num_heads, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise what is learned."""
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def state(self, x: Tensor, previous: Tensor | None = None, *, heads: slice | None = None) -> Tensor:
        """The running sum c after each token of x, as pairs.

        Args:
            x: (B, S, E), the layer's input.
            previous: (B, H, 2), the state of the token before the first of x, `state[:, :, -1]`, where there is one.
            heads: the heads of this rank; all by default. `previous` then carries these heads only.

        Returns:
            (B, H, S, 2), float32; float64 where x or the parameters are.

        Raises:
            ValueError: x or `previous` of another shape.
        """
        require_layer_input(x, self.hidden_size)
        require_beside(self, self.weight, x=x)
        mine = self._heads(heads)
        logits = project(x, self.weight[mine], self.bias[mine]).transpose(1, 2)
        # The sum is made in float64, on the CPU for Apple's GPUs, which have none.
        wide = (logits.cpu() if logits.device.type == "mps" else logits).to(torch.float64)
        total = functional.logsigmoid(wide).cumsum(-1)
        if previous is not None:
            require_reachable(x, "x", previous=previous)
            expected = (x.shape[0], mine.stop - mine.start, 2)
            if previous.shape != expected:
                raise ValueError(
                    f"previous: got shape {tuple(previous.shape)}; it must be (B, H, 2) = {expected}, the state of "
                    "the last token before x: state[:, :, -1]"
                )
            total = total + previous.to(total.device, torch.float64).sum(-1)[..., None]
        return _pair(total, logits.dtype).to(logits.device)

    def _dense(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> Tensor:
        (q_high, q_low), (k_high, k_low) = self._sides(q_positions, k_positions, content, heads)
        # Large parts first: their difference is exact wherever it is small. In place: one tensor of all pairs.
        out = q_high[..., None] + (-k_high)[:, :, None, :]
        return out.add_(q_low[..., None]).sub_(k_low[:, :, None, :])

    def _score_mod(self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice) -> ScoreMod:
        sides = self._sides(q_positions, k_positions, content, heads)
        # FlexAttention's compiler wants buffers of their own, not views of one.
        layout = torch.contiguous_format
        (q_high, q_low), (k_high, k_low) = ([part.clone(memory_format=layout) for part in side] for side in sides)
        rows = q_high.shape[0] > 1, k_high.shape[0] > 1

        def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
            q = batch if rows[0] else 0, head, q_index
            k = batch if rows[1] else 0, head, k_index
            return score + (q_high[q] - k_high[k] + q_low[q] - k_low[k])

        return score_mod

    def _sides(
        self, q_positions: Tensor, k_positions: Tensor, content: Content, heads: slice
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        q_state, k_state = content.q_state, content.k_state
        if q_state is not None and k_state is not None and q_state.device != k_state.device:
            raise ValueError(f"k_state: got a tensor on {k_state.device}, and q_state is on {q_state.device}")
        count = heads.stop - heads.start
        return (
            _parts("q_state", q_state, count, q_positions.shape[-1]),
            _parts("k_state", k_state, count, k_positions.shape[-1]),
        )


def _pair(total: Tensor, dtype: torch.dtype) -> Tensor:
    """A float64 tensor as (..., 2): rounded to `dtype`, and the rest, which carries no gradient."""
    if dtype == torch.float64:
        return torch.stack((total, torch.zeros_like(total)), -1)
    # Veltkamp's split at 24 bits. A cast down and up again would do, but compilers take that for nothing.
    large = total.detach() * (2**29 + 1)
    high = large - (large - total.detach())
    low = total.detach() - high
    return torch.stack(((total - low).to(dtype), low.to(dtype)), -1)


def _parts(name: str, state: Tensor | None, heads: int, tokens: int) -> tuple[Tensor, Tensor]:
    """The rounded sum and the rest, (B, H, S) each."""
    if state is None or state.dim() != 4 or state.shape[1:] != (heads, tokens, 2):
        given = "None" if state is None else f"shape {tuple(state.shape)}"
        raise ValueError(
            f"{name}: got {given}; it must be (B, H, S, 2) = (B, {heads}, {tokens}, 2), what state() gives for the "
            "tokens of its positions"
        )
    high, low = state.unbind(-1)
    return high, low
