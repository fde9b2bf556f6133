"""The edges of `rotate`: memory that is shared, rows that are not there, nothing to turn, tensors of other kinds."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from theodolite.kernels import recipes, rotate

from .cases import Watching, formula, implementations, nan, randn, running, same_bits

# The best of the native ones, block by block in torch, and as operations of torch.
WAYS = implementations()[-3:]
# A call is checked once, and the next one like it goes straight to the library.
CALLS = pytest.mark.parametrize("earlier", [0, 2], ids=["first", "remembered"])
ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def _nothing_is_remembered(monkeypatch):
    monkeypatch.setattr(recipes, "_recipes", {})


def tables(tokens: int = 9, pairs: int = 4) -> tuple[Tensor, Tensor]:
    return randn(tokens, pairs, seed=11), randn(tokens, pairs, seed=12)


class TestSharedMemory:
    """What is written is read by nothing else, or a result depends on the order in which memory is walked."""

    # Where each lies in one memory, in elements of float32; nothing meets.
    APART: ClassVar = {"q": 0, "k": 200, "cos": 300, "sin": 400, "positions": 500, "out_q": 600, "out_k": 800}
    SHAPES: ClassVar = {"q": (1, 2, 9, 8), "k": (1, 1, 9, 8), "cos": (9, 4), "sin": (9, 4), "positions": (18,)}

    def arguments(self, places: dict[str, int], names: str) -> tuple[Tensor, dict[str, Tensor]]:
        memory, given = torch.full((1000,), 0.5), {}
        for name in ("cos", "sin", *names.split()):
            shape = self.SHAPES[name.removeprefix("out_")]
            at = {**self.APART, **places}[name]
            given[name] = memory[at : at + torch.Size(shape).numel()].view(shape)
            if name == "positions":
                given[name] = given[name].view(torch.int64).copy_(torch.arange(9))
        return memory, given

    @ways
    @CALLS
    @pytest.mark.parametrize(
        ("names", "places", "text"),
        [
            ("q k", {"k": 0}, "k: it shares elements with q"),
            ("q k", {"k": 143}, "k: it shares elements with q"),
            ("q k", {"q": 271}, "k: it shares elements with q"),
            ("q k", {"cos": 143}, "q: it shares memory with cos"),
            ("q k", {"sin": 271}, "k: it shares memory with sin"),
            ("q k positions", {"positions": 142}, "q: it shares memory with positions"),
            ("q", {"cos": 0}, "q: it shares memory with cos"),
            ("k", {"sin": 165}, "k: it shares memory with sin"),
            ("q k out_q out_k", {"out_q": 8}, "out_q: it shares elements with q, which is read after"),
            ("q k out_q out_k", {"q": 608}, "out_q: it shares elements with q, which is read after"),
            ("q k out_q out_k", {"out_q": 57}, "out_q: it shares elements with "),
            ("q k out_q out_k", {"out_k": 129}, "out_k: it shares elements with q"),
            ("q k out_q out_k", {"out_q": 728}, "out_q: it shares elements with out_k|out_k: .* with out_q"),
            ("q k out_q", {"out_q": 300}, "out_q: it shares memory with cos"),
            ("q k out_k", {"out_k": 329}, "out_k: it shares memory with (cos|sin)"),
            ("q out_q positions", {"out_q": 516}, "out_q: it shares memory with positions"),
        ],
    )
    def test_is_refused_and_nothing_is_written(self, way, earlier, names, places, text):
        inplace = "out" not in names
        with running(way):
            for _ in range(earlier):
                _, apart = self.arguments({}, names)
                rotate(apart.pop("q", None), apart.pop("k", None), **apart, inplace=inplace)
            memory, given = self.arguments(places, names)
            before = memory.clone()
            with pytest.raises(ValueError, match=f"^({text})"):
                rotate(given.pop("q", None), given.pop("k", None), **given, inplace=inplace)
        assert torch.equal(memory.view(torch.int32), before.view(torch.int32))

    @ways
    @pytest.mark.parametrize("inplace", [False, True])
    def test_one_behind_the_other_is_not_refused(self, way, inplace):
        outputs = {} if inplace else {"out_q": 72, "out_k": 0}
        places = {"k": 216, "q": 288, "cos": 432, "positions": 468, "sin": 486} | outputs
        _, given = self.arguments(places, " ".join(["q k positions", *outputs]))
        expected = [formula(given[name].clone(), given["cos"], given["sin"]) for name in "qk"]
        with running(way):
            turned = rotate(**given, inplace=inplace)
        assert all(same_bits(*both) for both in zip(turned, expected, strict=True))

    @ways
    def test_tables_are_looked_at_beside_slices_too(self, way):
        # The slices lie between each other, which is seen once; what the tables do is another matter.
        def parts(memory: Tensor) -> tuple[Tensor, Tensor]:
            fused = memory[: 9 * 32].view(1, 9, 4, 8)
            return fused[:, :, :2], fused[:, :, 2:3]

        cos, sin = tables()
        with running(way):
            for _ in range(3):
                rotate(*parts(randn(400)), cos, sin, heads_first=False, inplace=True)
            memory = randn(400)
            before = memory.clone()
            with pytest.raises(ValueError, match="it shares memory with cos"):
                rotate(*parts(memory), memory[160:196].view(9, 4), sin, heads_first=False, inplace=True)
        assert torch.equal(memory, before)

    @ways
    @CALLS
    def test_the_same_place_by_other_strides_is_refused(self, way, earlier):
        cos, sin = tables(8)
        with running(way):
            for _ in range(earlier):
                rotate(randn(1, 2, 8, 8), None, cos, sin, out_q=randn(1, 2, 8, 8).transpose(2, 3))
            q = randn(1, 2, 8, 8)
            with pytest.raises(ValueError, match="out_q: it shares elements with q"):
                rotate(q, None, cos, sin, out_q=q.transpose(2, 3))

    @ways
    def test_its_own_place_may_be_the_output(self, way):
        q, (cos, sin) = randn(1, 2, 9, 8), tables()
        expected = formula(q, cos, sin)
        with running(way):
            for _ in range(3):
                mine = q.clone()
                rotate(mine, None, cos, sin, out_q=mine[:])
                assert same_bits(mine, expected)

    @ways
    def test_slots_beside_each_other_may_be_outputs(self, way):
        # Keys and values of a cache that stands token by token; queries go between the values.
        (cos, sin), q, k = tables(), randn(1, 9, 2, 8), randn(1, 9, 1, 8, seed=1)
        with running(way):
            for _ in range(3):
                cache = nan(1, 9, 4, 8, dtype=torch.float32)
                out_q, out_k = cache[:, :, ::2], cache[:, :, 1:2]
                rotate(q, k, cos, sin, heads_first=False, out_q=out_q, out_k=out_k)
                assert same_bits(out_q, formula(q, cos, sin, heads_first=False))
                assert same_bits(out_k, formula(k, cos, sin, heads_first=False))
                assert cache[:, :, 3].isnan().all()

    @ways
    def test_what_is_only_read_may_be_shared(self, way):
        q, (cos, _) = randn(1, 2, 9, 8), tables()
        with running(way):
            for _ in range(2):
                one, other = rotate(q, q[:, 1:], cos, cos)
                assert same_bits(one, formula(q, cos, cos))
                assert same_bits(other, one[:, 1:])

    @ways
    def test_any_two_views(self, way):
        """Two views of one memory, at random: turned in place they are right, or refused; never refused if they stand
        in turn with equal strides."""
        generator = random.Random(0)
        refused = 0
        for _ in range(150):
            memory = randn(300)
            rows, heads = generator.choice([1, 2, 3]), generator.choice([1, 2, 3])
            strides = {True: (0, generator.choice([4, 5, 8]), 24, 1), False: (0, 60, generator.choice([4, 6]), 1)}
            strides = strides[generator.random() < 0.7]
            shapes = [(1, generator.choice([1, 2, heads]), rows, 4) for _ in "qk"]
            q, k = (memory.as_strided(shape, strides, generator.randrange(60)) for shape in shapes)
            taken = [
                set(torch.arange(300).as_strided(x.shape, x.stride(), x.storage_offset()).flatten().tolist())
                for x in (q, k)
            ]
            apart = not taken[0] & taken[1]
            cos, sin = tables(rows, 2)
            expected = formula(q, cos, sin), formula(k, cos, sin)
            with running(way):
                try:
                    rotate(q, k, cos, sin, inplace=True)
                except ValueError:
                    assert not apart
                    refused += 1
                    continue
            assert apart
            assert same_bits(q, expected[0])
            assert same_bits(k, expected[1])
        assert 20 < refused < 130

    @ways
    @pytest.mark.parametrize("axis", range(3))
    def test_more_elements_than_an_int32_counts(self, way, axis, tmp_path):
        # A file with holes takes no memory; from its middle, an offset that wrapped around would read zeros.
        file = torch.from_file(str(tmp_path / "x"), shared=True, size=2**32 + 64, dtype=torch.float16)
        (tmp_path / "x").unlink()
        shape, strides = [1, 1, 1, 4], [16, 16, 16, 1]
        shape[axis], strides[axis] = 3, 2**30
        x = file.as_strided(shape, strides, 2**31).copy_(randn(*shape))
        cos, sin = tables(shape[2], 2)
        expected = formula(x, cos, sin)
        with running(way):
            for _ in range(2):
                assert same_bits(rotate(x, None, cos, sin)[0], expected)
            assert same_bits(rotate(x, None, cos, sin, inplace=True)[0], expected)

    @ways
    @pytest.mark.parametrize("huge", [(1, 2**20, 2**20, 64), (2**12, 1, 2**40, 8)])
    def test_huge_tensors_that_overlap_themselves(self, way, huge):
        q, table = torch.zeros(()).expand(huge), torch.zeros(()).expand(huge[2], huge[3] // 2)
        with running(way), pytest.raises(RuntimeError, match="q: it overlaps itself"):
            rotate(q, None, table, table, inplace=True)


class TestAlignment:
    """Memory from elsewhere may begin between two elements: it is refused, on every processor, and never misread."""

    @ways
    @CALLS
    @pytest.mark.parametrize("name", ["q", "k", "cos", "sin", "positions", "out_q"])
    def test_memory_that_begins_within_an_element(self, way, earlier, name):
        def given(shift: int) -> dict[str, Tensor]:
            aligned = {"q": randn(1, 2, 9, 8), "k": randn(1, 1, 9, 8), "cos": randn(9, 4), "sin": randn(9, 4, seed=1)}
            aligned |= {"positions": torch.arange(9).flip(0), "out_q": torch.zeros(1, 2, 9, 8)}
            x = aligned[name].contiguous()
            buffer = bytearray(x.nbytes + 16)
            buffer[shift : shift + x.nbytes] = x.numpy().tobytes()
            moved = torch.frombuffer(buffer, dtype=x.dtype, offset=shift, count=x.numel()).view(x.shape)
            return aligned | {name: moved}

        with running(way):
            for _ in range(earlier):
                rotate(**given(0))
            odd = given(1)
            with pytest.raises(ValueError, match=f"{name}\\b.*begins within an element of memory; give a copy"):
                rotate(**odd)
        assert not odd["out_q"].any()

    @ways
    def test_nothing_is_turned_where_one_is_refused(self, way):
        # Of two dtypes, so that each is a call of its own.
        q, before = randn(1, 2, 9, 8, dtype=torch.float64), randn(1, 2, 9, 8, dtype=torch.float64)
        k = torch.frombuffer(bytearray(300), dtype=torch.float32, offset=1, count=72).view(1, 1, 9, 8)
        with running(way), pytest.raises(ValueError, match="k: it begins within an element"):
            rotate(q, k, *tables(), inplace=True)
        assert torch.equal(q, before)


class TestPositions:
    """A position picks a row of its own: none is wrapped, clamped, or read beyond the table."""

    @ways
    @CALLS
    @pytest.mark.parametrize(
        ("form", "wrong"),
        [
            *itertools.product(["(S,)", "(B, S)", "every second", "int32"], [-1, -9, 9, 2**31 - 1]),
            *itertools.product(["(S,)", "(B, S)"], [2**40, -(2**40), 2**63 - 1, -(2**63)]),
        ],
    )
    def test_without_a_row_are_refused_and_nothing_is_written(self, way, earlier, wrong, form):
        def positions(last: int) -> Tensor:
            rows = torch.tensor([8, 0, 3, 3, last], dtype=torch.int32 if form == "int32" else torch.int64)
            if form == "(B, S)":
                return torch.stack([rows.clamp(0, 8), rows])
            return torch.full((10,), 99)[::2].copy_(rows) if form == "every second" else rows

        (cos, sin), q, k = tables(), randn(2, 2, 5, 8), randn(2, 1, 5, 8, seed=1)
        mine, out = q.clone(), nan(2, 1, 5, 8, dtype=torch.float32)
        with running(way):
            for _ in range(earlier):
                rotate(q.clone(), k.clone(), cos, sin, positions=positions(4), inplace=True)
                rotate(None, k, cos, sin, positions=positions(4), out_k=out)
                rotate(q, k, cos, sin, positions=positions(4))
            out.fill_(torch.nan)
            version = mine._version, out._version
            # What runs in graphs leaves it to the operations of torch.
            refused = IndexError if way == "traced" else ValueError
            text = "index" if way == "traced" else rf"^positions: got {wrong}; the tables have 9 rows, 0 to 8$"
            with pytest.raises(refused, match=text):
                rotate(mine, k, cos, sin, positions=positions(wrong), inplace=True)
            with pytest.raises(refused, match=text):
                rotate(None, k, cos, sin, positions=positions(wrong), out_k=out)
            with pytest.raises(refused, match=text):
                rotate(q, k, cos, sin, positions=positions(wrong))
        assert torch.equal(mine, q)
        assert out.isnan().all()
        # What autograd saved of them is still there.
        assert (mine._version, out._version) == version

    @ways
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
    def test_of_any_integers(self, way, dtype):
        (cos, sin), q, positions = tables(), randn(2, 2, 5, 8), torch.tensor([8, 0, 3, 3, 7], dtype=dtype)
        with running(way):
            for _ in range(3):
                assert same_bits(
                    rotate(q, None, cos, sin, positions=positions)[0], formula(q, cos, sin, positions=positions)
                )

    @ways
    @pytest.mark.parametrize(
        ("positions", "text"),
        [
            (torch.zeros(5), "positions: got torch.float32; give a tensor of integers"),
            (torch.zeros(5, dtype=torch.bool), "positions: got torch.bool"),
            ([0] * 5, "positions: got a list"),
            (torch.zeros(4, dtype=torch.int64), r"positions: got shape \(4,\); .* it must be \(5,\) or \(2, 5\)"),
            (torch.zeros(3, 5, dtype=torch.int64), r"positions: got shape \(3, 5\)"),
            (torch.zeros(1, 1, 5, dtype=torch.int64), r"positions: got shape \(1, 1, 5\)"),
            (torch.tensor(3), r"positions: got shape \(\)"),
        ],
    )
    def test_that_do_not_fit(self, way, positions, text):
        with running(way), pytest.raises(ValueError, match=text):
            rotate(randn(2, 2, 5, 8), None, *tables(), positions=positions)


class TestNothing:
    """An empty batch at the end of an epoch, a cache without tokens: results are as empty, and errors are the same."""

    @ways
    @CALLS
    @pytest.mark.parametrize("empty", ["batch", "heads", "tokens"])
    @pytest.mark.parametrize("with_positions", [False, True])
    def test_to_turn(self, way, earlier, empty, with_positions):
        sizes = {"batch": 2, "heads": 2, "tokens": 5} | {empty: 0}
        q = torch.empty(*sizes.values(), 8)
        k = torch.empty(sizes["batch"], 0, sizes["tokens"], 8) if empty == "heads" else q[:, :1].clone()
        cos, sin = tables(9 if with_positions else sizes["tokens"])
        positions = torch.zeros(sizes["batch"], sizes["tokens"], dtype=torch.int64) if with_positions else None
        out = torch.empty_like(q)
        with running(way):
            for _ in range(1 + earlier):
                results = rotate(q, k, cos, sin, positions=positions)
                assert [x.shape for x in results] == [q.shape, k.shape]
                assert rotate(q, None, cos, sin, positions=positions, inplace=True)[0] is q
                assert rotate(q, None, cos, sin, positions=positions, out_q=out)[0] is out

    @ways
    def test_in_one_of_two(self, way):
        q, k, (cos, sin) = randn(2, 4, 9, 8), torch.empty(2, 0, 9, 8), tables()
        with running(way):
            for _ in range(2):
                assert same_bits(rotate(q, k, cos, sin)[0], formula(q, cos, sin))
                assert same_bits(rotate(k, q, cos, sin)[1], formula(q, cos, sin))
                assert rotate(q, k, cos, sin)[1].shape == k.shape

    @ways
    def test_with_a_gradient(self, way):
        q = torch.empty(0, 2, 9, 8, requires_grad=True)
        with running(way):
            rotate(q, None, *tables())[0].sum().backward()
        assert q.grad.shape == q.shape

    @ways
    def test_in_a_table(self, way):
        q, table = torch.empty(1, 2, 0, 8), torch.empty(0, 4)
        with running(way):
            assert rotate(q, None, table, table, positions=torch.empty(0, dtype=torch.int64))[0].shape == q.shape
            text = "index" if way == "traced" else "positions: got 0; the tables have no rows"
            with pytest.raises(IndexError if way == "traced" else ValueError, match=text):
                rotate(randn(1, 2, 1, 8), None, table, table, positions=torch.tensor([0]))

    @ways
    def test_of_channels_is_refused(self, way):
        with running(way), pytest.raises(ValueError, match="rotary_dim: got 0; it must be even, above 0"):
            rotate(torch.empty(1, 2, 9, 0), None, *tables(9, 0))


class TestTensorsOfOtherKinds:
    """What has no numbers at its address, or others than it shows, is not read as if it had."""

    @ways
    @CALLS
    def test_negative_views(self, way, earlier):
        (cos, sin), q = tables(), randn(1, 2, 9, 8)
        q, cos, sin = q, cos, sin
        with running(way):
            for _ in range(earlier):
                rotate(q, None, cos, sin)
                rotate(q.clone(), None, cos, sin, inplace=True)
                rotate(q, None, cos, sin, out_q=torch.empty_like(q))
            assert same_bits(rotate(torch._neg_view(q), None, cos, sin)[0], formula(-q, cos, sin))
            assert same_bits(rotate(q, None, torch._neg_view(cos), sin)[0], formula(q, -cos, sin))
            assert same_bits(rotate(q, None, cos, torch._neg_view(sin))[0], formula(q, cos, -sin))
            mine = torch._neg_view(q.clone())
            assert rotate(mine, None, cos, sin, inplace=True)[0] is mine
            assert same_bits(mine.resolve_neg(), formula(-q, cos, sin))
            out = torch._neg_view(torch.empty_like(q))
            rotate(q, None, cos, sin, out_q=out)
            assert same_bits(out.resolve_neg(), formula(q, cos, sin))

    @ways
    def test_negative_views_in_place_share_memory_as_others_do(self, way):
        q = torch._neg_view(randn(1, 2, 9, 8))
        with running(way), pytest.raises(ValueError, match="k: it shares elements with q"):
            rotate(q, q[:, :1], *tables(), inplace=True)

    @ways
    @CALLS
    def test_zeros_that_are_not_stored(self, way, earlier):
        (cos, sin), q = tables(), randn(1, 9, 2, 8).transpose(1, 2)
        zero = torch._efficientzerotensor((1, 9, 2, 8)).transpose(1, 2)
        with running(way):
            for _ in range(earlier):
                rotate(q, None, cos, sin)
            assert not rotate(zero, None, cos, sin)[0].any()
            none = torch._efficientzerotensor(cos.shape)
            assert not rotate(q, None, none, none)[0].any()
            assert torch.equal(rotate(q, None, cos, none)[0], formula(q, cos, torch.zeros_like(cos)))
            # And what lies like it is not taken for it.
            for _ in range(2):
                assert same_bits(rotate(q, None, cos, sin)[0], formula(q, cos, sin))

    @ways
    def test_subclasses_stay_what_they_are(self, way):
        class Marked(Tensor):
            pass

        (cos, sin), q = tables(), randn(1, 2, 9, 8)
        with running(way):
            out = rotate(q.as_subclass(Marked), None, cos, sin)[0]
            assert type(out) is Marked
            assert same_bits(out.as_subclass(Tensor), formula(q, cos, sin))

    @ways
    def test_parameters(self, way):
        q, cos = torch.nn.Parameter(randn(1, 2, 9, 8)), torch.nn.Parameter(randn(9, 4), requires_grad=False)
        with running(way):
            assert same_bits(rotate(q, None, cos, cos)[0], formula(q.detach(), cos, cos))

    @ways
    def test_queries_and_keys_on_two_devices(self, way):
        q, k = randn(1, 2, 9, 8), torch.empty(1, 1, 9, 8, device="meta")
        with running(way):
            for pair in ((q, k), (k, q)):
                with pytest.raises(ValueError, match=r"k: it is on (meta|cpu), and q on (meta|cpu)"):
                    rotate(*pair, *tables())

    @pytest.mark.skipif(len(WAYS) < 3 or WAYS[0] == "eager", reason="torch itself reads at address 0")
    @CALLS
    def test_memory_that_was_given_back_is_refused(self, earlier):
        (cos, sin), q = tables(), randn(1, 2, 9, 8)
        for _ in range(earlier):
            rotate(q, None, cos, sin)
            rotate(q, None, cos, sin, out_q=q.clone())
        empty = q.clone()
        empty.untyped_storage().resize_(0)
        for given in ({"q": empty}, {"q": q, "out_q": empty}):
            with pytest.raises(ValueError):
                rotate(k=None, cos=cos, sin=sin, **given)

    @ways
    @pytest.mark.parametrize("kind", ["to_sparse", "to_mkldnn"])
    def test_without_strides_are_refused(self, way, kind):
        if kind == "to_mkldnn" and not torch.backends.mkldnn.is_available():
            pytest.skip("torch was built without")
        with running(way), pytest.raises((RuntimeError, NotImplementedError, ValueError)):
            rotate(getattr(randn(1, 2, 9, 8), kind)(), None, *tables())

    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.parametrize("shape", [(2, 3, 9, 8), (2**10, 2**10, 2**20, 2**8)])
    def test_on_meta_only_shapes_are_made(self, shape, inplace):
        q = torch.empty(shape, device="meta", dtype=torch.bfloat16)
        k = torch.empty(shape[0], shape[2], shape[1], shape[3], device="meta").transpose(1, 2)
        table = torch.empty(shape[2] + 2, shape[3] // 2, device="meta")
        positions = torch.empty(shape[0], shape[2], dtype=torch.int64, device="meta")
        turned = rotate(q, k, table, table, positions=positions, inplace=inplace)
        for x, out in zip((q, k), turned, strict=True):
            assert out.is_meta
            assert (out.shape, out.dtype, out.stride()) == (x.shape, x.dtype, x.stride())
            assert (out is x) == inplace


def known(*arguments: Tensor, **options) -> None:
    """Have a call remembered, so that the tests below would take its way if they took it for theirs."""
    for _ in range(2):
        rotate(*arguments, **options)


class TestWatched:
    """Transforms, graphs and modes see operations of torch, also where a call like theirs was remembered."""

    def setup_method(self):
        self.q, self.k = randn(2, 4, 9, 8), randn(2, 2, 9, 8, seed=1)
        self.cos, self.sin = tables()

    def prepare(self):
        known(self.q, self.k, self.cos, self.sin)
        known(self.q, None, self.cos, self.sin)
        known(self.q[:1], None, self.cos, self.sin)
        known(self.q[0], None, self.cos, self.sin)

    def test_vmap(self):
        self.prepare()
        expected = formula(self.q, self.cos, self.sin)
        assert same_bits(torch.func.vmap(lambda q: rotate(q, None, self.cos, self.sin)[0])(self.q), expected)
        both = torch.func.vmap(lambda q, k: rotate(q, k, self.cos, self.sin))(self.q, self.k)
        assert same_bits(both[1], formula(self.k, self.cos, self.sin))

    def test_vmap_over_tables_and_positions(self):
        tables_of = randn(3, 9, 4), randn(3, 9, 4, seed=1)
        many = torch.func.vmap(lambda c, s: rotate(self.q, None, c, s)[0])(*tables_of)
        assert same_bits(many, torch.stack([formula(self.q, c, s) for c, s in zip(*tables_of, strict=True)]))
        positions = torch.tensor([[0, 8, 1, 2], [3, 3, 7, 0]])
        q = self.q[:, :, :4]
        many = torch.func.vmap(lambda p: rotate(q, None, self.cos, self.sin, positions=p)[0])(positions)
        assert same_bits(many, torch.stack([formula(q, self.cos, self.sin, positions=p) for p in positions]))

    @pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
    def test_grad_and_jvp(self):
        self.prepare()

        def turned(q):
            return rotate(q, None, self.cos, self.sin)[0]

        weight = randn(2, 4, 9, 8, seed=3)
        back = formula(weight, self.cos, self.sin, conjugate=True)
        assert same_bits(torch.func.grad(lambda q: (turned(q) * weight).sum())(self.q), back)
        out, tangent = torch.func.jvp(turned, (self.q,), (weight,))
        assert same_bits(out, formula(self.q, self.cos, self.sin))
        assert same_bits(tangent, formula(weight, self.cos, self.sin))
        small = self.q[:1, :1, :2].double()
        one, other = (
            how(lambda q: rotate(q, None, self.cos[:2], self.sin[:2])[0])(small)
            for how in (torch.func.jacrev, torch.func.jacfwd)
        )
        assert torch.equal(one, other)

    def test_gradients_of_each_sample(self):
        self.prepare()
        cos = self.cos.double().requires_grad_()

        def loss(cos, q):
            return rotate(q[None], None, cos, self.sin.double())[0].square().sum()

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(cos.detach(), self.q.double())
        for q, mine in zip(self.q.double(), each, strict=True):
            (alone,) = torch.autograd.grad(loss(cos, q), cos)
            assert torch.equal(mine, alone)

    def test_gradients_of_many_losses_at_once(self):
        q, weights = self.q.clone().requires_grad_(), randn(3, 2, 4, 9, 8)
        self.prepare()
        out = rotate(q, None, self.cos, self.sin)[0]
        (many,) = torch.autograd.grad(out, q, weights, is_grads_batched=True)
        assert same_bits(many, torch.stack([formula(w, self.cos, self.sin, conjugate=True) for w in weights]))

    @pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
    def test_dual_numbers(self):
        self.prepare()
        tangent = randn(2, 4, 9, 8, seed=3)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(self.q, tangent)
            out, moved = forward_ad.unpack_dual(rotate(dual, None, self.cos, self.sin)[0])
            # The tables may have tangents as well.
            table = forward_ad.make_dual(self.cos, self.cos)
            _, by_table = forward_ad.unpack_dual(rotate(self.q, None, table, self.sin)[0])
        assert same_bits(out, formula(self.q, self.cos, self.sin))
        assert same_bits(moved, formula(tangent, self.cos, self.sin))
        assert torch.equal(by_table, formula(self.q, self.cos, torch.zeros_like(self.sin)))

    @pytest.mark.parametrize("inplace", [False, True])
    def test_fake_tensors(self, inplace):
        self.prepare()
        mode = FakeTensorMode()
        q, cos, sin = (mode.from_tensor(x) for x in (self.q.bfloat16().transpose(1, 2), self.cos, self.sin))
        with mode:
            out = rotate(q, None, cos, sin, heads_first=False, inplace=inplace)[0]
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        # Also after the mode has ended.
        assert rotate(q, None, cos, sin, heads_first=False)[0].shape == q.shape

    def test_recorded_graphs_turn_other_numbers(self):
        self.prepare()
        q, cos = randn(2, 4, 9, 8, seed=4), randn(9, 4, seed=5)

        def turned(q, cos, sin, positions):
            return rotate(q, None, cos, sin, positions=positions)[0]

        positions, others = torch.arange(9), torch.arange(9).flip(0)
        graph = make_fx(turned)(self.q, self.cos, self.sin, positions)
        assert same_bits(graph(q, cos, self.sin, others), formula(q, cos, self.sin, positions=others))

    @pytest.mark.filterwarnings("ignore")
    def test_traced_by_the_older_tracer(self):
        self.prepare()
        traced = torch.jit.trace(lambda q, c, s: rotate(q, None, c, s)[0], (self.q, self.cos, self.sin))
        q, cos = randn(2, 4, 9, 8, seed=4), randn(9, 4, seed=5)
        assert same_bits(traced(q, cos, self.sin), formula(q, cos, self.sin))

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpoints(self, reentrant):
        self.prepare()
        q, weight = self.q.clone().requires_grad_(), randn(2, 4, 9, 8, seed=3)

        def turned(q):
            return rotate(q * 1, None, self.cos, self.sin, inplace=True)[0] * weight

        checkpoint(turned, q, use_reentrant=reentrant).sum().backward()
        assert same_bits(q.grad, formula(weight, self.cos, self.sin, conjugate=True))

    @pytest.mark.parametrize("inplace", [False, True])
    def test_modes_that_see_functions(self, inplace):
        self.prepare()

        class Quiet(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

        expected = formula(self.q, self.cos, self.sin)
        for mode in (Quiet(), torch.device("meta"), Watching()):
            for _ in range(2):
                with mode:
                    out = rotate(self.q.clone(), None, self.cos, self.sin, inplace=inplace)[0]
                assert same_bits(out, expected)


class TestSurroundings:
    """Settings of the process or of the thread change how torch works, and not what comes out."""

    @ways
    @CALLS
    @pytest.mark.parametrize(
        "surrounding",
        [
            torch.no_grad,
            torch.inference_mode,
            functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
            functools.partial(torch.autograd.graph.saved_tensors_hooks, lambda x: x, lambda x: x),
            functools.partial(torch.autograd.set_detect_anomaly, True),
        ],
        ids=["no_grad", "inference_mode", "autocast", "saved_tensors_hooks", "anomaly"],
    )
    @pytest.mark.filterwarnings("ignore:Anomaly")
    def test_same_bits(self, way, earlier, surrounding):
        q, (cos, sin) = randn(2, 4, 9, 8), tables()
        expected = formula(q, cos, sin)
        with running(way):
            for _ in range(earlier):
                rotate(q, None, cos, sin)
                rotate(q.clone(), None, cos, sin, inplace=True)
            with surrounding():
                for _ in range(2):
                    assert same_bits(rotate(q, None, cos, sin)[0], expected)
                    assert same_bits(rotate(q.clone(), None, cos, sin, inplace=True)[0], expected)
            # And what was made in there is turned out here.
            with surrounding():
                mine = q.clone(), cos.clone(), sin.clone()
            with torch.no_grad():
                assert same_bits(rotate(mine[0], None, *mine[1:])[0], expected)

    @ways
    def test_default_dtype_and_deterministic_algorithms(self, way):
        q, (cos, sin) = randn(2, 4, 9, 8), tables()
        expected = formula(q, cos, sin)
        try:
            torch.set_default_dtype(torch.float64)
            torch.use_deterministic_algorithms(True)
            with running(way):
                assert same_bits(rotate(q, None, cos, sin)[0], expected)
        finally:
            torch.use_deterministic_algorithms(False)
            torch.set_default_dtype(torch.float32)

    def test_threads(self):
        wrong: list[int] = []

        def work(number: int) -> None:
            generator = random.Random(number)
            for step in range(60):
                # Slices at other distances in each, so that no thread goes by what another one saw.
                fused = randn(2, 9, 7, 8, seed=1000 * number + step)
                first = generator.randrange(4)
                q, k = fused[:, :, first : first + 2], fused[:, :, (first + 2) % 5 + 1 : (first + 2) % 5 + 2]
                expected = [formula(x, *tables(), heads_first=False) for x in (q, k)]
                rotate(q, k, *tables(), heads_first=False, inplace=True)
                if not all(same_bits(*both) for both in zip((q, k), expected, strict=True)):
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
