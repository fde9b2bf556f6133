"""A small decoder that hosts any policy, for comparing what positions do and nothing else."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from theodolite.attention import Attention, Cache
from theodolite.encodings import Embed, Policy, SharedTables
from theodolite.positions.relative import RelativeMap


class Decoder(nn.Module):
    """Tokens in, logits of the next out: RMSNorm before each half of a layer, SwiGLU, input and output tied.

    Shapes (B batch, S tokens, E hidden_size, V vocab_size).

    Args:
        vocab_size: tokens that there are.
        hidden_size: channels between layers.
        num_heads: query heads.
        policies: what positions do, one a layer.
        embed: what positions add to the embeddings, which have a variance of 1 a channel.
        num_kv_heads, head_dim, qk_norm, relative: of each layer's `Attention`.
        mlp_size: channels inside the feed-forward half; 8/3 of `hidden_size`, in whole 32s, by default.
        eps: of the norms.

    Example:
        >>> import torch
        >>> from theodolite.encodings import ALiBi, Policy
        >>> from theodolite.models.decoder import Decoder
        >>> model = Decoder(256, 64, 4, [Policy(bias=ALiBi(4)), Policy()]).initialise(seed=0)
        >>> model(torch.randint(256, (2, 10)), torch.arange(10)).shape
        torch.Size([2, 10, 256])
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        num_heads: int,
        policies: Sequence[Policy],
        *,
        embed: Embed | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        mlp_size: int | None = None,
        qk_norm: float | None = None,
        relative: RelativeMap | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if not policies:
            raise ValueError("policies: got none; give one a layer")
        mlp_size = math.ceil(hidden_size * 8 / 3 / 32) * 32 if mlp_size is None else mlp_size
        self.hidden_size = hidden_size
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.embed = embed
        self.layers = nn.ModuleList(
            Layer(
                Attention(
                    hidden_size,
                    num_heads,
                    policy,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    qk_norm=qk_norm,
                    relative=relative,
                ),
                SwiGLU(hidden_size, mlp_size),
                hidden_size,
                eps,
            )
            for policy in policies
        )
        self.norm = nn.RMSNorm(hidden_size, eps=eps)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        *,
        visible: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        """Logits (B, S, V) of what follows each of the tokens `ids` (B, S) int64.

        Args:
            positions: (S,) or (B, S).
            visible: (B, S, S) booleans besides the policies' masks, as of packed documents.
            caches: one a layer, of the tokens before these.
        """
        return self.logits(self.states(ids, positions, visible=visible, caches=caches))

    def states(
        self,
        ids: Tensor,
        positions: Tensor,
        *,
        visible: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        """What `logits` is made of, (B, S, E): the logits of many tokens at once may be larger than the model."""
        # Rows of length 1 a channel on average, as positions that are added are made for.
        x = self.tokens(ids) * math.sqrt(self.hidden_size)
        if self.embed is not None:
            x = self.embed(x, positions)
        tables = SharedTables(positions, device=x.device)
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, tables, visible, None if caches is None else caches[i])
        states: Tensor = self.norm(x)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """(..., V) of states (..., E)."""
        return linear(states, self.tokens.weight)

    def initialise(self, seed: int) -> Decoder:
        """Set all weights, each from `seed` and its own name: models that differ in one part agree in all others."""
        with torch.random.fork_rng(devices=[]):
            for name, module in self.named_modules():
                if not any(True for _ in module.parameters(recurse=False)):
                    continue
                torch.manual_seed(_seed_of(seed, name))
                if isinstance(module, nn.Embedding) and module is self.tokens:
                    nn.init.normal_(module.weight, std=self.hidden_size**-0.5)
                elif isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=module.in_features**-0.5)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)
                elif callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
            # What is added to the residual stream twice a layer would grow with the depth.
            for name, parameter in self.named_parameters():
                if name.endswith((".o_proj.weight", ".down.weight")):
                    parameter.data.mul_((2 * len(self.layers)) ** -0.5)
        return self


class Layer(nn.Module):
    """Attention, then a feed-forward half, each added to what it reads."""

    def __init__(self, attention: Attention, mlp: SwiGLU, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp
        self.attention_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.mlp_norm = nn.RMSNorm(hidden_size, eps=eps)

    def forward(
        self, x: Tensor, positions: Tensor, tables: SharedTables, visible: Tensor | None, cache: Cache | None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions, tables=tables, visible=visible, cache=cache)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden_size: int, mlp_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, mlp_size, bias=False)
        self.up = nn.Linear(hidden_size, mlp_size, bias=False)
        self.down = nn.Linear(mlp_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return down


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
