"""Gradients of the rotation: the same rotation the other way, to any order, for every layout."""

from __future__ import annotations

import itertools

import pytest
import torch

from theodolite.encodings import rotary_tables
from theodolite.kernels import rotate
from theodolite.kernels.reference import rotate_reference
from theodolite.plan import Rotary

from .cases import STORED, call, cases, exact, formula, heads_first, implementations, nan, randn, running, same_bits

# The best of the native ones, block by block in torch, and as operations of torch.
WAYS = implementations()[-3:]
ways = pytest.mark.parametrize("way", WAYS)
LAYOUTS = list(itertools.product([False, True], [None, 4], [False, True]))
CASES = cases()


def tables(tokens: int, pairs: int):
    return rotary_tables(Rotary(head_dim=2 * pairs, rope_theta=100.0), torch.arange(3, 3 + tokens))


def leaf(*shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype).requires_grad_()


class TestAgainstNumbers:
    """Finite differences in float64, once and twice."""

    @pytest.mark.parametrize(("interleaved", "rotary_dim", "trailing"), LAYOUTS)
    @pytest.mark.parametrize("conjugate", [False, True])
    def test_first_and_second_order(self, interleaved, rotary_dim, trailing, conjugate):
        cos, sin = tables(3, (rotary_dim or 8) // 2)
        options = {
            "interleaved": interleaved,
            "rotary_dim": rotary_dim,
            "trailing": trailing,
            "conjugate": conjugate,
        }

        def turned(q, k):
            return rotate(q, k, cos, sin, **options)

        inputs = leaf(2, 2, 3, 8), leaf(2, 1, 3, 8)
        assert torch.autograd.gradcheck(turned, inputs)
        assert torch.autograd.gradgradcheck(turned, inputs)

    @ways
    @pytest.mark.parametrize("conjugate", [False, True])
    @pytest.mark.parametrize(
        ("shape", "options"),
        [
            ((2, 2, 7, 2), {"positions": torch.tensor([[6, 0], [3, 6]])}),
            ((7, 4), {"positions": torch.tensor([6, 0]), "interleaved": True}),
            ((2, 2, 4), {"heads_first": False}),
            ((1, 2, 2, 4), {"interleaved": True, "trailing": True}),
        ],
        ids=["by head, of positions", "by channel, of positions", "by channel, tokens first", "by head and channel"],
    )
    def test_tables_of_every_form(self, way, shape, options, conjugate):
        cos, sin = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

        def turned(q, k):
            if not options.get("heads_first", True):
                q, k = q.transpose(1, 2), k.transpose(1, 2)
            return rotate(q, k, cos, sin, **options, rotary_dim=4, conjugate=conjugate)

        inputs = leaf(2, 4, 2, 6), leaf(2, 2, 2, 6)
        with running(way):
            assert torch.autograd.gradcheck(turned, inputs)
            assert torch.autograd.gradgradcheck(turned, inputs, fast_mode=True)

    @ways
    def test_in_place(self, way):
        cos, sin = tables(3, 4)
        with running(way):
            assert torch.autograd.gradcheck(lambda q: rotate(q * 1, None, cos, sin, inplace=True)[0], leaf(2, 2, 3, 8))

            def both(q, k):
                return rotate(q * 1, k * 1, cos, sin, inplace=True)

            assert torch.autograd.gradcheck(both, (leaf(2, 2, 3, 8), leaf(2, 1, 3, 8)))
            assert torch.autograd.gradgradcheck(both, (leaf(2, 2, 3, 8), leaf(2, 1, 3, 8)))

    @ways
    def test_packed_sequences(self, way):
        cos, sin = tables(9, 4)
        positions = torch.tensor([3, 4, 0])
        with running(way):
            assert torch.autograd.gradcheck(
                lambda q, k: rotate(q, k, cos, sin, positions=positions, heads_first=False),
                (leaf(3, 2, 8), leaf(3, 1, 8)),
            )

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_equals_the_gradient_of_the_oracle(self, interleaved):
        cos, sin = tables(63, 8)
        q, grad = leaf(2, 3, 63, 16), torch.randn(2, 3, 63, 16, dtype=torch.float64)
        (mine,) = torch.autograd.grad(rotate(q, None, cos, sin, interleaved=interleaved)[0], q, grad)
        (true,) = torch.autograd.grad(rotate_reference(q, cos, sin, interleaved=interleaved), q, grad)
        assert (mine - true).abs().max() <= 4 * 2.0**-53 * grad.abs().max()


class TestCallsOfEveryKind:
    """The gradient has the bits of the transposed rotation, in whatever memory and dtype it comes."""

    @ways
    @pytest.mark.parametrize("number", range(0, len(CASES), 3))
    def test_the_transpose(self, number, way):
        given = call(CASES[number])
        options = given.options | {"conjugate": not given.options["conjugate"]}
        xs = {name: x.detach().requires_grad_() for name, x in given.given().items()}
        with running(way):
            outs = rotate(xs.get("q"), xs.get("k"), given.cos, given.sin, **given.options)
        outs = {name: out for name, out in zip("qk", outs, strict=True) if out is not None}
        weights = {name: randn(*x.shape, dtype=x.dtype, seed=7) for name, x in xs.items()}
        for grads in (weights, {name: x.flatten()[0].expand(x.shape) for name, x in weights.items()}):
            with running(way):
                mine = torch.autograd.grad(
                    list(outs.values()), list(xs.values()), list(grads.values()), retain_graph=True
                )
            # Autograd of torch's operations adds two summands in its own order: a zero may have the other sign.
            same = torch.equal if way == "traced" else same_bits
            for x, grad in zip(mine, grads.values(), strict=True):
                assert same(x, formula(grad, given.cos, given.sin, **options))

    @pytest.mark.parametrize("number", range(1, len(CASES), 4))
    def test_autograd_through_the_oracle(self, number):
        case = CASES[number]._replace(dtype=torch.float64, tokens=min(CASES[number].tokens, 63), which="q")
        given = call(case)
        q = given.q.detach().requires_grad_()
        truth, _ = exact(q, given.cos, given.sin, **given.options)
        weight = randn(*truth.shape, dtype=torch.float64, seed=7)
        (true,) = torch.autograd.grad(truth, q, weight)
        out = heads_first(rotate(q, None, given.cos, given.sin, **given.options)[0], given.options)
        (mine,) = torch.autograd.grad(out, q, weight)
        # Two products and a sum, in either.
        options = given.options | {"conjugate": not given.options["conjugate"], "heads_first": True}
        _, bound = exact(weight, given.cos, given.sin, **options)
        assert (heads_first((mine - true).abs(), given.options) <= bound).all()


class TestBackward:
    """Gradients come in every stride and dtype that autograd makes."""

    @ways
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_expanded_gradients(self, dtype, way):
        cos, sin = tables(9, 8)
        q = leaf(2, 3, 9, 16, dtype=dtype)
        with running(way):
            rotate(q, None, cos, sin)[0].sum().backward()
            expected = rotate(torch.ones_like(q), None, cos, sin, conjugate=True)[0]
        assert q.grad.dtype == dtype
        assert torch.equal(q.grad, expected)

    def test_passing_channels_pass_their_gradient(self):
        q, grad = leaf(1, 2, 9, 16), torch.randn(1, 2, 9, 16, dtype=torch.float64)
        rotate(q, None, *tables(9, 2), rotary_dim=4)[0].backward(grad)
        assert torch.equal(q.grad[..., 4:], grad[..., 4:])

    def test_tokens_first(self):
        cos, sin = tables(9, 8)
        q, grad = leaf(2, 3, 9, 16), torch.randn(2, 3, 9, 16, dtype=torch.float64)
        (expected,) = torch.autograd.grad(rotate(q, None, cos, sin)[0], q, grad)
        turned = rotate(q.transpose(1, 2), None, cos, sin, heads_first=False)[0]
        (given,) = torch.autograd.grad(turned, q, grad.transpose(1, 2))
        assert torch.equal(given, expected)

    @ways
    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.parametrize("asking", ["q", "k"])
    def test_only_what_asks_gets_one(self, way, asking, inplace):
        cos, sin = tables(9, 8)
        xs = {name: leaf(1, 2, 9, 16).detach() for name in "qk"}
        wanted = xs[asking].clone().requires_grad_()
        mine = xs | {asking: wanted * 1}
        expected = {name: formula(x, cos, sin) for name, x in xs.items()}
        with running(way):
            out = dict(zip("qk", rotate(mine["q"], mine["k"], cos, sin, inplace=inplace), strict=True))
            assert {name for name, x in out.items() if x.requires_grad} == {asking}
            assert all(same_bits(x.detach(), expected[name]) for name, x in out.items())
            out[asking].sum().backward()
        assert same_bits(wanted.grad, formula(torch.ones_like(wanted.detach()), cos, sin, conjugate=True))

    @ways
    def test_a_loss_of_one_of_two(self, way):
        cos, sin = tables(9, 8)
        q, k = leaf(1, 2, 9, 16), leaf(1, 1, 9, 16)
        with running(way):
            rotate(q, k, cos, sin)[1].sum().backward()
        assert q.grad is None or not q.grad.any()
        assert same_bits(k.grad, formula(torch.ones_like(k.detach()), cos, sin, conjugate=True))

    def test_queries_and_keys_of_two_dtypes(self):
        cos, sin = tables(9, 8)
        q, k = leaf(2, 2, 9, 16, dtype=torch.float32), leaf(2, 1, 9, 16, dtype=torch.bfloat16)
        one, other = rotate(q, k, cos, sin)
        (one.sum() + other.float().sum()).backward()
        for x in (q, k):
            assert same_bits(x.grad, formula(torch.ones_like(x.detach()), cos, sin, conjugate=True))

    @ways
    def test_gradients_that_are_no_ordinary_tensors(self, way):
        cos, sin = tables(9, 8)
        q, grad = leaf(1, 2, 9, 16), randn(1, 2, 9, 16, dtype=torch.float64)

        class Marked(torch.Tensor):
            pass

        with running(way):
            out = rotate(q, None, cos, sin)[0]
            for given, as_stored in (
                (torch._neg_view(grad), -grad),
                (torch._efficientzerotensor(grad.shape, dtype=grad.dtype), torch.zeros_like(grad)),
                (grad.as_subclass(Marked), grad),
            ):
                (mine,) = torch.autograd.grad(out, q, given, retain_graph=True)
                mine = mine.as_subclass(torch.Tensor).resolve_neg()
                assert torch.equal(mine, formula(as_stored, cos, sin, conjugate=True))

    @ways
    @pytest.mark.parametrize("inplace", [False, True])
    def test_tables_and_positions_made_in_inference_mode(self, way, inplace):
        with torch.inference_mode():
            cos, sin, positions = torch.rand(9, 8), torch.rand(9, 8), torch.arange(9).flip(0)
        assert cos.is_inference()
        q, grad = leaf(1, 2, 9, 16), randn(1, 2, 9, 16, dtype=torch.float64)
        with running(way):
            rotate(q * 1, None, cos, sin, positions=positions, inplace=inplace)[0].backward(grad)
        assert torch.equal(q.grad, formula(grad, cos, sin, positions=positions, conjugate=True))

    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.parametrize("positions", [None, torch.arange(9)])
    def test_only_tables_are_kept(self, inplace, positions):
        (cos, sin), q, k = tables(9, 8), leaf(1, 2, 9, 16), leaf(1, 1, 9, 16)
        q, k, saved = q * 1, k * 1, []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
            rotate(q, k, cos, sin, positions=positions, inplace=inplace)
        kept = [cos, sin] if positions is None else [cos, sin, positions]
        assert set(saved) == {x.data_ptr() for x in kept}

    def test_tables_that_change_before_it_are_noticed(self):
        (cos, sin), q = tables(9, 8), leaf(1, 2, 9, 16)
        cos = cos.clone()
        out = rotate(q, None, cos, sin)[0]
        cos.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


class TestInPlace:
    """Writing in place is asked for, never a surprise, and autograd knows of it."""

    def test_a_leaf_is_refused_untouched(self):
        q = leaf(1, 2, 9, 16)
        before = q.detach().clone()
        with pytest.raises(RuntimeError, match="q: a leaf that requires a gradient cannot be turned in place"):
            rotate(q, None, *tables(9, 8), inplace=True)
        assert torch.equal(q.detach(), before)
        with torch.no_grad():
            assert rotate(q, None, *tables(9, 8), inplace=True)[0] is q

    @ways
    def test_an_intermediate_is_returned_itself(self, way):
        cos, sin = tables(9, 8)
        q = leaf(1, 2, 9, 16)
        with running(way):
            (expected,) = torch.autograd.grad(rotate(q * 2, None, cos, sin)[0].square().sum(), q)
            middle = q * 2
            out = rotate(middle, None, cos, sin, inplace=True)[0]
            assert out is middle
            (given,) = torch.autograd.grad(out.square().sum(), q)
        assert torch.equal(given, expected)

    @ways
    @pytest.mark.parametrize("together", [False, True])
    def test_slices_of_a_fused_projection(self, way, together):
        cos, sin = tables(9, 8)
        weight = leaf(1, 9, 6, 16)

        def loss(inplace):
            fused = weight * 2
            q, k, v = fused[:, :, :3], fused[:, :, 3:4], fused[:, :, 4:]
            if together:
                q, k = rotate(q, k, cos, sin, heads_first=False, inplace=inplace)
            else:
                q, _ = rotate(q, None, cos, sin, heads_first=False, inplace=inplace)
                _, k = rotate(None, k, cos, sin, heads_first=False, inplace=inplace)
            whole = fused.sum() if inplace else q.sum() + k.sum() + v.sum()
            return (q.square().sum(2) * k.sum(2)).sum() + v.sum() + whole

        with running(way):
            (expected,) = torch.autograd.grad(loss(False), weight)
            (given,) = torch.autograd.grad(loss(True), weight)
        # The parts of a gradient are added in another order.
        assert (given - expected).abs().max() <= 8 * 2.0**-53 * expected.abs().max()

    @ways
    @pytest.mark.parametrize("cut", [lambda x: x.split(1, 1), lambda x: x.chunk(2, 1), lambda x: x.unbind(1)])
    def test_views_that_autograd_cannot_follow_are_refused(self, way, cut):
        middle = leaf(1, 2, 9, 16) * 2
        x = cut(middle)[0]
        with (
            running(way),
            pytest.raises(
                RuntimeError,
                match=r"view and is being modified inplace|autograd lets no view that split, chunk, unbind",
            ),
        ):
            rotate(x if x.dim() == 4 else x[:, None], None, *tables(9, 8), inplace=True)

    @ways
    def test_and_are_as_they_were(self, way):
        middle = leaf(1, 2, 9, 16) * 2
        before = middle.detach().clone()
        with running(way), pytest.raises(RuntimeError):
            rotate(middle.split(1, 1)[0], None, *tables(9, 8), inplace=True)
        assert torch.equal(middle.detach(), before)

    @ways
    def test_what_was_saved_before_is_guarded(self, way):
        with running(way):
            for part in (slice(None), slice(1)):
                q = leaf(1, 2, 9, 16)
                middle = q * 2
                square = middle.square()
                rotate(middle[:, part], None, *tables(9, 8), inplace=True)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    square.sum().backward()


class TestOutputs:
    """No gradient passes through a place that the caller gave: where one is asked for, that is an error."""

    @ways
    @pytest.mark.parametrize("asking", ["q", "out_q"])
    def test_are_refused_where_a_gradient_is_asked_for(self, way, asking):
        given = {"q": leaf(1, 2, 9, 16).detach(), "out_q": torch.zeros(1, 2, 9, 16, dtype=torch.float64)}
        given[asking].requires_grad_()
        q, out = given["q"], given["out_q"]
        with running(way):
            with pytest.raises(
                RuntimeError, match="out_q: gradients do not pass through it; leave it out, or use no_g"
            ):
                rotate(q, None, *tables(9, 8), out_q=out)
            assert not out.detach().any()
            with torch.no_grad():
                assert rotate(q, None, *tables(9, 8), out_q=out)[0] is out
        assert same_bits(out.detach(), formula(q.detach(), *tables(9, 8)))

    @ways
    def test_beside_a_tensor_that_asks_for_one(self, way):
        (cos, sin), q, k = tables(9, 8), leaf(1, 2, 9, 16).detach(), leaf(1, 1, 9, 16)
        middle, out, before = k * 1, nan(1, 2, 9, 16, dtype=torch.float64), q.clone()
        with running(way):
            one, other = rotate(q, middle, cos, sin, out_q=out)
            other.sum().backward()
        assert one is out
        assert other is not middle
        assert same_bits(out, formula(before, cos, sin))
        assert torch.equal(q, before)
        assert torch.equal(middle, k)
        assert same_bits(k.grad, formula(torch.ones_like(k.detach()), cos, sin, conjugate=True))

    @ways
    @pytest.mark.parametrize("table", ["cos", "sin"])
    def test_are_refused_with_learned_tables(self, way, table):
        given = dict(zip(("cos", "sin"), (x.clone() for x in tables(9, 8)), strict=True))
        given[table].requires_grad_()
        q = leaf(1, 2, 9, 16).detach()
        with running(way):
            with pytest.raises(ValueError, match=f"{table}: it requires a gradient, which does not pass through out_q"):
                rotate(q, None, **given, out_q=torch.empty_like(q))
            with pytest.raises(ValueError, match=f"{table}: it requires a gradient, which needs q as it was"):
                rotate(q, None, **given, inplace=True)


class TestLearnedTables:
    """Learned frequencies need the gradient of cos and sin; peers that detach the table train nothing."""

    @pytest.mark.parametrize(("interleaved", "rotary_dim", "trailing"), LAYOUTS)
    @pytest.mark.parametrize("heads_first", [False, True])
    @pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 2, 3)])
    def test_gradients_of_cos_and_sin(self, interleaved, rotary_dim, trailing, heads_first, shape):
        options = {"interleaved": interleaved, "rotary_dim": rotary_dim, "trailing": trailing}

        def turned(q, k, cos, sin):
            if not heads_first:
                q, k = q.transpose(1, 2), k.transpose(1, 2)
            return rotate(q, k, cos, sin, heads_first=heads_first, **options)

        table = (*shape, (rotary_dim or 8) // 2)
        inputs = leaf(2, 4, 3, 8), leaf(2, 2, 3, 8), leaf(*table), leaf(*table)
        assert torch.autograd.gradcheck(turned, inputs)

    @pytest.mark.parametrize("conjugate", [False, True])
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize(
        ("shape", "positions"),
        [((3, 4), None), ((5, 2), [4, 0, 0]), ((2, 5, 4), [[4, 0, 0], [1, 1, 1]]), ((1, 2, 5, 4), [[4, 0, 0]])],
    )
    def test_by_channel_and_with_positions(self, shape, positions, interleaved, conjugate):
        positions = None if positions is None else torch.tensor(positions)
        options = {"interleaved": interleaved, "conjugate": conjugate, "rotary_dim": 4, "positions": positions}

        def turned(q, k, cos, sin):
            return rotate(q, k, cos, sin, **options)

        inputs = leaf(2, 4, 3, 6), leaf(2, 2, 3, 6), leaf(*shape), leaf(*shape)
        assert torch.autograd.gradcheck(turned, inputs)
        assert torch.autograd.gradgradcheck(turned, inputs, fast_mode=True)

    def test_equal_those_of_the_oracle(self):
        for case in CASES[::5]:
            case = case._replace(dtype=torch.float64, tokens=min(case.tokens, 63), which="q")
            if case.entries in STORED:
                continue
            given = call(case)
            learned = [table.detach().double().requires_grad_() for table in (given.cos, given.sin)]
            truth, _ = exact(given.q, *learned, **given.options)
            weight = randn(*truth.shape, dtype=torch.float64, seed=7)
            true = torch.autograd.grad(truth, learned, weight)
            out = heads_first(rotate(given.q, None, *learned, **given.options)[0], given.options)
            mine = torch.autograd.grad(out, learned, weight)
            # Every summand of an entry is a product or two: as many roundings as there are summands and one more.
            sizes = torch.autograd.grad(exact(given.q.abs(), *learned, **given.options)[0], learned, weight.abs())
            count = 2 * truth.shape[0] * truth.shape[1] * truth.shape[2] + 2
            for one, other, size in zip(mine, true, sizes, strict=True):
                assert ((one - other).abs() <= 2 * count * 2.0**-53 * size.abs().max()).all()

    def test_only_what_asks_gets_one(self):
        cos, sin = (table.clone() for table in tables(9, 8))
        out = rotate(leaf(1, 2, 9, 16).detach(), None, cos, sin.requires_grad_())[0]
        out.sum().backward()
        assert sin.grad.shape == sin.shape
        assert cos.grad is None

    def test_a_position_without_a_row(self):
        cos, sin = (table.clone().requires_grad_() for table in tables(9, 8))
        for wrong in (-1, 9):
            with pytest.raises(ValueError, match=f"positions: got {wrong}; the tables have 9 rows, 0 to 8"):
                rotate(leaf(1, 2, 2, 16), None, cos, sin, positions=torch.tensor([3, wrong]))

    def test_per_head_tables_in_place(self):
        cos, sin = torch.randn(2, 1, 2, 5, 4, dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda q: rotate(q * 1, None, cos, sin, inplace=True)[0], leaf(2, 4, 5, 8))

    def test_half_precision_queries(self):
        cos, sin = (torch.rand(5, 4, requires_grad=True) for _ in "cs")
        q, _ = rotate(torch.randn(1, 2, 5, 8).bfloat16(), None, cos, sin)
        q.float().sum().backward()
        assert q.dtype == torch.bfloat16
        assert cos.grad.dtype == sin.grad.dtype == torch.float32
