"""What every bias must stand: casts, autocast, meta, compile, export, shards of heads; one entry a class.

A case names a class and makes one with 4 heads of 8 channels on an input of 16. What it reads is made for it: q, k and
x by chance, and states by its own `state` of x, whose gradient is the parameters' where they enter nowhere else.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from theodolite.encodings.bias.alibi import ALiBi
from theodolite.encodings.bias.base import Bias
from theodolite.encodings.bias.blocks import _BLOCK
from theodolite.encodings.bias.combined import BiasByHead, BiasSum
from theodolite.encodings.bias.cope import CoPE
from theodolite.encodings.bias.deberta import DisentangledBias
from theodolite.encodings.bias.fire import Fire
from theodolite.encodings.bias.forgetting import ForgettingGate
from theodolite.encodings.bias.kerple import Kerple
from theodolite.encodings.bias.low_rank import LowRankBias
from theodolite.encodings.bias.shaw import ShawBias
from theodolite.encodings.bias.t5 import T5Bias
from theodolite.encodings.bias.transformer_xl import TransformerXLBias

HEADS, HEAD_DIM, WIDTH = 4, 8, 16


@dataclass(frozen=True)
class Case:
    """`has_score_mod` is false where the bias cannot be said pair by pair.

    `blocks` are scratch tensors of one block of queries that live beside the output and a part of the same size, where
    biases are joined.
    """

    name: str
    make: Callable[[], Bias]
    has_score_mod: bool = True
    blocks: int = 0

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("alibi", lambda: ALiBi(HEADS)),
    Case("alibi symmetric", lambda: ALiBi(HEADS, symmetric=True)),
    Case("t5 encoder", lambda: T5Bias(HEADS, bidirectional=True, std=1.0)),
    Case("t5 decoder", lambda: T5Bias(HEADS, num_buckets=8, max_distance=16, bidirectional=False, std=1.0)),
    Case("kerple log", lambda: Kerple(HEADS, kind="log")),
    Case("kerple power", lambda: Kerple(HEADS, kind="power")),
    Case("fire", lambda: Fire(HEADS, hidden=6, init_L=9.0)),
    Case("transformer-xl", lambda: TransformerXLBias(HEADS, HEAD_DIM, hidden_size=WIDTH), has_score_mod=False),
    Case("deberta", lambda: DisentangledBias(HEADS, HEAD_DIM, hidden_size=WIDTH, max_relative_positions=6)),
    Case("shaw", lambda: ShawBias(HEADS, HEAD_DIM, 4, values=False)),
    Case("cope", lambda: CoPE(HEADS, HEAD_DIM, 7), has_score_mod=False),
    Case("forgetting gate", lambda: ForgettingGate(HEADS, WIDTH)),
    Case("low rank", lambda: LowRankBias(HEADS, WIDTH, extent=6, rank=3)),
    Case("a sum", lambda: BiasSum([ALiBi(HEADS), Fire(HEADS, hidden=2)]), blocks=6),
    Case("by head", lambda: BiasByHead([(ALiBi(2), 2), (Kerple(HEADS - 2), HEADS - 2)]), blocks=1),
]

every = pytest.mark.parametrize("case", CASES, ids=str)
with_score_mod = pytest.mark.parametrize("case", [case for case in CASES if case.has_score_mod], ids=str)
learned = pytest.mark.parametrize("case", [case for case in CASES if list(case.make().parameters())], ids=str)


def make(case: Case, *, seed: int = 0) -> Bias:
    torch.manual_seed(seed)
    return case.make()


@dataclass(frozen=True)
class Inputs:
    """Positions, and what the bias reads at them."""

    q_positions: torch.Tensor
    k_positions: torch.Tensor
    content: dict[str, torch.Tensor]

    def dense(self, bias: Bias, **more: Any) -> torch.Tensor:
        return bias.dense(self.q_positions, self.k_positions, **self.content, **more)

    def part(self, rows: slice, queries: slice, keys: slice) -> Inputs:
        """Some rows, queries and keys."""
        axes = {"q": (queries, 2), "q_state": (queries, 2), "x": (queries, 1), "k": (keys, 2), "k_state": (keys, 2)}
        content = {}
        for name, whole in self.content.items():
            tokens, axis = axes[name]
            content[name] = whole[rows][(slice(None),) * axis + (tokens,)]
        return Inputs(
            self.q_positions[rows if self.q_positions.dim() == 2 else ...][..., queries],
            self.k_positions[rows if self.k_positions.dim() == 2 else ...][..., keys],
            content,
        )

    def as_tuple(self) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        return self.q_positions, self.k_positions, tuple(x.detach() for x in self.content.values())

    def of_heads(self, heads: slice) -> Inputs:
        content = {name: x if name == "x" else x[:, heads] for name, x in self.content.items()}
        return Inputs(self.q_positions, self.k_positions, content)

    def seen(self) -> torch.Tensor:
        """(1 or B, 1, Sq, Sk): what a causal mask leaves; other numbers mean nothing."""
        q, k = (p if p.dim() == 2 else p[None] for p in (self.q_positions, self.k_positions))
        return (k[:, None, None, :] <= q[:, None, :, None]).clone()


def inputs(
    bias: Bias, queries: int = 7, keys: int = 10, *, rows: int = 2, start: int = 3, dtype: torch.dtype = torch.float32
) -> Inputs:
    """The last `queries` of `keys` tokens from position `start`; the second row, if any, starts 5 later."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=wide)

    positions = torch.stack([torch.arange(start + 5 * row, start + 5 * row + keys) for row in range(rows)])
    x = random(rows, keys, WIDTH)
    q, k = random(rows, HEADS, queries, HEAD_DIM), random(rows, HEADS, keys, HEAD_DIM)
    content = {"q": q, "k": k, "x": x[:, keys - queries :]}
    content = {name: x.to(dtype) for name, x in content.items()}
    if "k_state" in bias.reads or "q_state" in bias.reads:
        state = bias.state(x.to(dtype))
        content |= {"k_state": state, "q_state": state[:, :, keys - queries :]}
    return Inputs(positions[:, keys - queries :], positions, {name: content[name] for name in bias.reads})


def close(one: torch.Tensor, other: torch.Tensor, seen: torch.Tensor | bool = True) -> None:
    """Equal to a few roundings of the largest number: sums of up to 16 terms may be taken in another order."""
    assert one.shape == other.shape
    difference = ((one - other).abs() * torch.as_tensor(seen)).max()
    assert difference <= 16 * torch.finfo(one.dtype).eps * other.abs().max(), difference


class TestRowsAndShards:
    """A bias belongs to a pair of tokens, not to the batch, chunk or rank that they came in."""

    @every
    def test_shape_and_dtype(self, case):
        bias = make(case)
        given = inputs(bias)
        assert given.dense(bias).shape == (2, HEADS, 7, 10)
        assert given.dense(bias).dtype == torch.float32
        if not bias.reads:
            assert bias(torch.arange(3), torch.arange(5)).shape == (1, HEADS, 3, 5)

    @every
    def test_decoding_gives_the_rows_of_prefill(self, case):
        # A bias that is built on the number of queries is all zeros, or of another shape, at every step.
        bias = make(case)
        given = inputs(bias, queries=10, keys=10)
        whole = given.dense(bias)
        for token in range(10):
            step = given.part(slice(None), slice(token, token + 1), slice(0, token + 1)).dense(bias)
            close(step, whole[:, :, token : token + 1, : token + 1])

    @every
    def test_rows_are_as_if_alone(self, case):
        bias = make(case)
        given = inputs(bias)
        whole = given.dense(bias)
        for row in range(2):
            alone = given.part(slice(row, row + 1), slice(None), slice(None))
            close(alone.dense(bias), whole[row : row + 1], alone.seen())

    @every
    def test_positions_of_one_row_serve_all(self, case):
        bias = make(case)
        given = inputs(bias)
        one = Inputs(given.q_positions[0], given.k_positions[0], given.content)
        same = Inputs(given.q_positions[:1].expand(2, -1), given.k_positions[:1].expand(2, -1), given.content)
        close(one.dense(bias).expand(2, -1, -1, -1), same.dense(bias), same.seen())

    @every
    def test_heads_of_tensor_parallel_ranks_make_the_whole(self, case):
        bias = make(case)
        given = inputs(bias)
        ranks = [given.of_heads(heads).dense(bias, heads=heads) for heads in (slice(0, 2), slice(2, 4))]
        close(torch.cat(ranks, dim=1), given.dense(bias), given.seen())

    @every
    def test_zigzag_shards_of_queries_make_the_whole(self, case):
        bias = make(case)
        given = inputs(bias, queries=8, keys=8)
        whole = given.dense(bias)
        for shard in ([0, 3, 4, 7], [1, 2, 5, 6]):
            content = {
                name: x[:, shard] if name == "x" else x[:, :, shard] if name in ("q", "q_state") else x
                for name, x in given.content.items()
            }
            part = Inputs(given.q_positions[:, shard], given.k_positions, content)
            close(part.dense(bias), whole[:, :, shard], part.seen())

    @every
    def test_nothing_depends_on_history(self, case):
        bias = make(case)
        before = inputs(bias).dense(bias)
        inputs(bias, queries=40, keys=50, dtype=torch.bfloat16).dense(bias)
        assert torch.equal(inputs(bias).dense(bias), before)


class TestForms:
    """The tensor and the function say the same."""

    @every
    def test_there_is_a_function_or_none(self, case):
        bias = make(case)
        given = inputs(bias)
        score_mod = bias.score_mod(given.q_positions, given.k_positions, **given.content)
        assert (score_mod is not None) == case.has_score_mod

    @with_score_mod
    @pytest.mark.parametrize("heads", [None, slice(2, 4)], ids=["all heads", "a rank"])
    def test_at_every_pair(self, case, heads):
        bias = make(case)
        given = inputs(bias)
        if heads is not None:
            given = given.of_heads(heads)
        score_mod = bias.score_mod(given.q_positions, given.k_positions, **given.content, heads=heads)
        dense = given.dense(bias, heads=heads)
        indices = [torch.arange(length) for length in dense.shape]
        pairwise = score_mod
        for axis in reversed(range(4)):
            pairwise = torch.vmap(pairwise, in_dims=(0, *(0 if other == axis else None for other in range(4))))
        scores = torch.linspace(-2, 2, dense.numel()).view(dense.shape)
        close(pairwise(scores, *indices), scores + dense, given.seen())

    @with_score_mod
    def test_flex_attention_forward_and_backward(self, case):
        bias = make(case)
        given = inputs(bias)
        q, k, v = (torch.randn(2, HEADS, length, HEAD_DIM) for length in (7, 10, 10))
        seen = given.seen()

        def gradients(out: torch.Tensor) -> list[torch.Tensor]:
            leaves = list(bias.parameters())
            return list(torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)) if leaves else []

        dense = given.dense(bias).masked_fill(~seen, -torch.inf)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
        score_mod = bias.score_mod(given.q_positions, given.k_positions, **given.content)

        def causal(score, batch, head, q_index, k_index):
            there = given.k_positions[batch, k_index] <= given.q_positions[batch, q_index]
            return torch.where(there, score_mod(score, batch, head, q_index, k_index), -torch.inf)

        with warnings.catch_warnings():
            # It says that it is slow uncompiled.
            warnings.simplefilter("ignore")
            out = flex_attention(q, k, v, score_mod=causal)
        close(out, expected)
        for one, other in zip(gradients(out), gradients(expected), strict=True):
            # Sums over 560 pairs.
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

    @with_score_mod
    def test_the_function_holds_no_tensor_of_all_pairs(self, case):
        bias = make(case)
        given = inputs(bias, queries=96, keys=96, rows=1)
        score_mod = bias.score_mod(given.q_positions, given.k_positions, **given.content)
        assert max(held.numel() for held in tensors_of(score_mod)) < 96 * 96

    @every
    def test_slopes_are_the_bias_where_there_are_any(self, case):
        bias = make(case)
        slopes = bias.slopes()
        if slopes is None:
            return
        given = inputs(bias)
        distance = (given.q_positions[:, :, None] - given.k_positions[:, None, :])[:, None]
        assert torch.equal((given.dense(bias) * given.seen()), (-slopes[:, None, None] * distance) * given.seen())
        assert torch.equal(bias.slopes(slice(1, 3)), slopes[1:3])


class TestPrecision:
    """Whatever the model around it is cast to, the bias is computed in float32."""

    @every
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_cast_module_rounds_its_parameters_and_nothing_else(self, case, dtype):
        low = make(case).to(dtype)
        wide = copy.deepcopy(low).float()
        given = inputs(wide)
        assert given.dense(low).dtype == torch.float32
        assert torch.equal(given.dense(low), given.dense(wide))

    @every
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_inputs_give_float32(self, case, dtype):
        bias = make(case)
        given = inputs(bias, dtype=dtype)
        dense = given.dense(bias)
        assert dense.dtype == torch.float32
        wide = Inputs(given.q_positions, given.k_positions, {name: x.float() for name, x in given.content.items()})
        close(dense, wide.dense(bias), given.seen())

    @every
    def test_autocast_changes_no_bit(self, case):
        bias = make(case)
        given = inputs(bias)
        outside = given.dense(bias)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(given.dense(bias), outside)

    @learned
    def test_float64_parameters_give_float64(self, case):
        bias = make(case).double()
        given = inputs(bias, dtype=torch.float64)
        assert given.dense(bias).dtype == torch.float64

    @learned
    def test_gradients(self, case):
        bias = make(case).double()
        given = inputs(bias, queries=3, keys=4, rows=1, dtype=torch.float64)
        names, values = zip(*bias.named_parameters(), strict=True)
        floats = list(given.content)
        leaves = [value.detach().clone().requires_grad_() for value in (*values, *given.content.values())]
        seen = given.seen()

        def dense(*leaves):
            parameters = dict(zip(names, leaves, strict=False))
            content = dict(zip(floats, leaves[len(names) :], strict=True))
            args = (given.q_positions, given.k_positions)
            return torch.func.functional_call(bias, parameters, args, content) * seen

        assert torch.autograd.gradcheck(dense, leaves)


class TestLifecycle:
    """Made, saved, moved and compiled like any module."""

    @every
    def test_the_state_dict_holds_learned_parameters_alone(self, case):
        bias = make(case)
        assert set(bias.state_dict()) == {name for name, _ in bias.named_parameters()}
        assert not list(bias.buffers())
        other = make(case, seed=1)
        other.load_state_dict(bias.state_dict(), strict=True)
        given = inputs(bias)
        assert torch.equal(given.dense(other), given.dense(bias))

    @every
    def test_meta_then_materialised(self, case):
        with torch.device("meta"):
            bias = case.make()
        assert all(parameter.is_meta for parameter in bias.parameters())
        bias.to_empty(device="cpu")
        for parameter in bias.parameters():
            torch.nn.init.constant_(parameter, torch.nan)
        bias.reset_parameters()
        given = inputs(bias)
        assert torch.isfinite(given.dense(bias)).all()

    @every
    def test_positions_on_meta(self, case):
        bias = make(case).to("meta")
        given = inputs(make(case))
        content = {name: x.to("meta") for name, x in given.content.items()}
        dense = Inputs(given.q_positions.to("meta"), given.k_positions.to("meta"), content).dense(bias)
        assert dense.is_meta
        assert dense.shape == (2, HEADS, 7, 10)

    @learned
    def test_inference_first_and_training_after(self, case):
        bias = make(case)
        with torch.inference_mode():
            inputs(bias).dense(bias)
        given = inputs(bias)
        (given.dense(bias) * given.seen()).sum().backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in bias.parameters())
        assert any(parameter.grad.any() for parameter in bias.parameters())

    @every
    def test_compiles_once_for_all_lengths(self, case):
        bias = make(case)
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        torch._dynamo.reset()
        compiled = torch.compile(bias, backend=counter, fullgraph=True, dynamic=True)
        # None equal to a width, which the compiler would take for the same.
        for length in (9, 17, 64, 33):
            given = inputs(bias, queries=length, keys=length, rows=1)
            q_positions, k_positions, content = given.as_tuple()
            out = compiled(q_positions, k_positions, **dict(zip(bias.reads, content, strict=True)))
            close(out, given.dense(bias), given.seen())
        assert counter.frame_count <= 2
        torch._dynamo.reset()

    @every
    def test_exports_with_a_length_that_varies(self, case):
        bias = make(case)
        given = inputs(bias, queries=9, keys=9, rows=1)
        tokens = torch.export.Dim.AUTO
        axes = {"x": 1, "q": 2, "k": 2, "q_state": 2, "k_state": 2}
        content = tuple({axes[name]: tokens} for name in given.content)
        exported = torch.export.export(
            InOneLine(bias), given.as_tuple(), dynamic_shapes=({1: tokens}, {1: tokens}, content)
        )
        longer = inputs(bias, queries=12, keys=12, rows=1, start=4)
        close(exported.module()(*longer.as_tuple()), longer.dense(bias), longer.seen())


class InOneLine(torch.nn.Module):
    """What a bias reads, in a tuple: `torch.export` takes no lengths that vary for `**content`."""

    def __init__(self, bias: Bias) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, q_positions, k_positions, content):
        return self.bias(q_positions, k_positions, **dict(zip(self.bias.reads, content, strict=True)))


class TestMemory:
    """Dense holds its output and as much again at most, forward and backward."""

    @every
    def test_forward_and_backward(self, case):
        bias = make(case)
        given = inputs(bias, queries=1024, keys=1024, rows=1)
        size = HEADS * 1024 * 1024 * 4
        with LiveBytes() as live:
            dense = given.dense(bias)
        assert size <= live.peak <= 2 * size + case.blocks * 4 * _BLOCK
        if dense.requires_grad:
            grad = torch.ones_like(dense)
            with LiveBytes() as live:
                dense.backward(grad)
            # And what is linear in the tokens.
            assert live.peak <= size + 1024 * 64 * HEADS


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside hold at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {self._storage(x)._cdata for x in torch.utils._pytree.tree_leaves((args, kwargs)) if self._is(x)}
        out = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if self._is(x) and self._storage(x)._cdata not in given:
                self._add(self._storage(x))
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        size, key = storage.nbytes(), storage._cdata

        def gone(_: Any) -> None:
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)

    @staticmethod
    def _is(x: Any) -> bool:
        return isinstance(x, torch.Tensor)

    @staticmethod
    def _storage(x: torch.Tensor) -> torch.UntypedStorage:
        return x.untyped_storage()


def tensors_of(holder: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """All tensors that a function holds: in its closure, in functions and containers there, in modules bound to it."""
    seen = set() if seen is None else seen
    if id(holder) in seen:
        return
    seen.add(id(holder))
    parts: list[Any] = []
    if isinstance(holder, torch.Tensor):
        yield holder
    elif isinstance(holder, torch.nn.Module):
        parts = [*holder.parameters(), *vars(holder).values()]
    elif isinstance(holder, tuple | list):
        parts = list(holder)
    elif isinstance(holder, dict):
        parts = list(holder.values())
    elif callable(holder):
        cells = getattr(holder, "__closure__", None) or ()
        parts = [cell.cell_contents for cell in cells] + [getattr(holder, "__self__", None)]
        parts += [getattr(holder, "func", None), getattr(holder, "args", None), getattr(holder, "keywords", None)]
    for part in parts:
        yield from tensors_of(part, seen)


class TestTheMeters:
    """The two instruments of this file, on what is known."""

    def test_live_bytes(self):
        with LiveBytes() as live:
            a = torch.ones(1000)
            b = a + 1
            b = b[:500] * 2
            del a
            torch.ones(250)
        # a and its sum; then the product beside both; the last is small enough.
        assert live.peak == 4 * (1000 + 1000 + 500)

    def test_tensors_of(self):
        big = torch.ones(100)
        assert [held.numel() for held in tensors_of(lambda: [lambda: big][0])] == [100]


class TestRefusals:
    """In words that name the argument."""

    @every
    def test_positions_in_half_precision(self, case):
        bias = make(case)
        given = inputs(bias)
        with pytest.raises(ValueError, match=r"q_positions: got torch\.bfloat16"):
            bias(given.q_positions.bfloat16(), given.k_positions, **given.content)

    @every
    def test_heads_that_are_not_there(self, case):
        bias = make(case)
        with pytest.raises(ValueError, match=r"heads: got .* must lie within the 4 heads"):
            inputs(bias).dense(bias, heads=slice(2, 5))

    @every
    def test_what_it_reads_left_out(self, case):
        bias = make(case)
        given = inputs(bias)
        for name in bias.reads:
            with pytest.raises(ValueError, match=f"{name}: got None"):
                bias(given.q_positions, given.k_positions, **{**given.content, name: None})
