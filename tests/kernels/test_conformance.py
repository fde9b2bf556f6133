"""Every implementation of the rotation gives the same bits: those of the formula, which its float64 oracle bounds."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch

from theodolite.kernels import choice, native, recipes, rotate, watched
from theodolite.kernels.layout import Layout
from theodolite.kernels.memory import overlaps_itself
from theodolite.kernels.reference import rotate_reference
from theodolite.kernels.traced import rotate_traced

from .cases import (
    DTYPES,
    Call,
    call,
    cases,
    exact,
    formula,
    heads_first,
    implementations,
    memory_of,
    nan,
    out_of,
    randn,
    running,
    same_bits,
)
from .test_triton import rotate_into as triton_interpreter  # noqa: F401

CASES = cases()
NUMBERS = range(len(CASES))
IMPLEMENTATIONS = implementations()


@pytest.fixture(autouse=True)
def _nothing_is_remembered(monkeypatch):
    """So that the first call of a test is checked, and the second one follows it."""
    monkeypatch.setattr(recipes, "_recipes", {})


@functools.lru_cache(maxsize=4)
def expected(number: int) -> dict[str, torch.Tensor]:
    given = call(CASES[number])
    return {name: formula(x, given.cos, given.sin, **given.options) for name, x in given.given().items()}


def turned(given: Call, **changes) -> dict[str, torch.Tensor]:
    """What `rotate` returns, by name."""
    results = rotate(given.q, given.k, given.cos, given.sin, **given.options, **changes)
    return {name: x for name, x in zip("qk", results, strict=True) if x is not None}


def check_new(given: Call, right: dict[str, torch.Tensor]) -> None:
    before = {name: x.clone() for name, x in given.given().items()}
    results = turned(given)
    assert results.keys() == right.keys()
    for name, x in given.given().items():
        assert same_bits(results[name], right[name])
        assert same_bits(x, before[name])


def check_outputs(given: Call, right: dict[str, torch.Tensor], out: str) -> None:
    outs = {name: out_of(x, out) for name, x in given.given().items()}
    results = turned(given, **{f"out_{name}": place for name, place in outs.items()})
    for name, place in outs.items():
        assert results[name] is place
        assert same_bits(place, right[name])
        # What lies beside it in memory is as it was.
        place.fill_(torch.nan)
        whole = memory_of(place).view(place.dtype)
        assert whole.isnan().all()


def check_inplace(given: Call, right: dict[str, torch.Tensor]) -> None:
    xs = given.given()
    if any(overlaps_itself(x) for x in xs.values()):
        with pytest.raises(RuntimeError, match="it overlaps itself"):
            turned(given, inplace=True)
        return
    before = {name: (memory_of(x).clone(), x.clone()) for name, x in xs.items()}
    results = turned(given, inplace=True)
    for name, x in xs.items():
        assert results[name] is x
        assert same_bits(x, right[name])
    for name, x in xs.items():
        x.copy_(before[name][1])
    for name, x in xs.items():
        assert torch.equal(memory_of(x), before[name][0])


class TestSameBits:
    """Products and sums are rounded each and the result once: where a model runs changes nothing."""

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize("number", NUMBERS)
    def test_calls_of_every_kind(self, number, implementation):
        given, right = call(CASES[number]), expected(number)
        with running(implementation):
            check_new(given, right)
            # Native calls that lie like an earlier one take another way.
            check_new(call(CASES[number]), right)
            for _ in range(2):
                check_outputs(given, right, CASES[number].out)
                check_inplace(call(CASES[number]), right)

    @pytest.mark.parametrize("number", NUMBERS)
    def test_and_they_are_right(self, number):
        given, right = call(CASES[number]), expected(number)
        for name, x in given.given().items():
            truth, bound = exact(x, given.cos, given.sin, **given.options)
            assert ((heads_first(right[name], given.options).double() - truth).abs() <= bound).all()

    @pytest.mark.parametrize("number", NUMBERS[::8])
    def test_triton(self, number, triton_interpreter):  # noqa: F811
        case = CASES[number]._replace(tokens=min(CASES[number].tokens, 5))
        given = call(case)
        right = {name: formula(x, given.cos, given.sin, **given.options) for name, x in given.given().items()}
        with running("triton"):
            check_new(given, right)
            check_outputs(given, right, case.out)
            check_inplace(call(case), right)

    @pytest.mark.parametrize("number", NUMBERS[::5])
    def test_operations_of_torch_in_the_canonical_form(self, number):
        given, right = call(CASES[number]), expected(number)
        options = given.options
        tables = [{2: lambda t: t[None, None], 3: lambda t: t[:, None], 4: lambda t: t}[t.dim()](t) for t in given[2:4]]
        positions = options["positions"]
        positions = positions[None] if positions is not None and positions.dim() == 1 else positions
        layout = Layout(*(options[name] for name in ("interleaved", "rotary_dim", "trailing", "conjugate")))
        for name, x in given.given().items():
            out = rotate_traced(heads_first(x, options), *tables, positions, layout)
            assert same_bits(out, heads_first(right[name], options).contiguous())


class TestTheOracle:
    """Two ways to write it agree, or neither is a witness."""

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("conjugate", [False, True])
    def test_matrices_are_the_reference(self, interleaved, conjugate):
        x, cos, sin = randn(2, 3, 9, 8), randn(9, 4, seed=1), randn(9, 4, seed=2)
        truth, bound = exact(x, cos, sin, interleaved=interleaved, conjugate=conjugate)
        plain = rotate_reference(x, cos, -sin if conjugate else sin, interleaved=interleaved)
        # Both round two products and a sum in float64.
        assert ((truth - plain).abs() <= bound * 2.0**-28).all()

    def test_the_bound_is_narrow(self):
        # A result in float32 uses more than a third of it somewhere, so a rounding more would show.
        x, cos, sin = randn(2, 3, 100, 64), randn(100, 32, seed=1), randn(100, 32, seed=2)
        truth, bound = exact(x, cos, sin)
        assert ((formula(x, cos, sin).double() - truth).abs() / bound).max() > 1 / 3

    def test_every_pair_of_choices_is_there(self):
        assert len(CASES) < 200
        for one, two in (("memory", "entries"), ("positions", "table"), ("head_dim", "dtype"), ("which", "out")):
            met = {(getattr(case, one), getattr(case, two)) for case in CASES}
            assert len(met) == len({a for a, _ in met}) * len({b for _, b in met})


class TestWhoTurns:
    """A suite that runs one implementation under five names proves nothing."""

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_it_is_the_one_that_was_asked_for(self, implementation):
        kind, _, instructions = implementation.partition(" ")
        where = {
            "native": (native, "rotate_into"),
            "eager": (choice.eager, "rotate_into"),
            "traced": (watched, "rotate_traced"),
        }
        with running(implementation):
            for name, (module, function) in where.items():
                q, cos = randn(1, 2, 7, 22), randn(7, 11)
                with mock.patch.object(module, function, wraps=getattr(module, function)) as seen:
                    rotate(q, None, cos, cos, conjugate=name == "native", trailing=name == "eager")
                assert seen.called == (name == kind)
            if instructions:
                assert native.load().chosen_set == instructions

    def test_the_set_of_before_is_back(self):
        if native.load() is None:
            pytest.skip("there is no library")
        before = native.load().chosen_set
        with running("native scalar"):
            assert native.load().chosen_set == "scalar"
        assert native.load().chosen_set == before


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestThreads:
    """Work is shared out in parts of any size: where one ends shows in no bit."""

    @pytest.mark.parametrize("threads", [1, 2, 3])
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("shape", [(2, 2, 1025, 64), (1, 1, 5001, 96), (2, 5, 335, 128)])
    def test_give_the_same_bits(self, shape, interleaved, threads, implementation):
        x, cos, sin = torch.randn(shape), *torch.randn(2, shape[2], shape[3] // 2)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(threads)
            with running(implementation):
                out = rotate(x, None, cos, sin, interleaved=interleaved)[0]
                mine = x.transpose(1, 2).clone(memory_format=torch.contiguous_format)
                rotate(mine, None, cos, sin, interleaved=interleaved, heads_first=False, inplace=True)
        finally:
            torch.set_num_threads(before)
        right = formula(x, cos, sin, interleaved=interleaved)
        assert same_bits(out, right)
        assert same_bits(mine.transpose(1, 2), right)


class TestNumbersThatAreNoOrdinaryOnes:
    """IEEE arithmetic throughout: nothing is flushed to zero, and no infinity is repaired."""

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_in_queries_and_tables(self, dtype, interleaved, implementation):
        info = torch.finfo(dtype)
        special = [0.0, -0.0, info.tiny, -info.tiny / 2, info.tiny * info.eps, info.max, -info.max]
        special = torch.tensor([*special, torch.inf, -torch.inf, torch.nan, 1.0, -3.0, 2.0**-140], dtype=torch.float64)
        entries = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-130, 2.0**-149, torch.inf, torch.nan, 0.7])
        # Every number beside every other, by every entry beside every other.
        count, many = len(special), len(entries)
        x = torch.stack(torch.meshgrid(special, special, indexing="ij"), -1).reshape(1, 1, 1, -1).to(dtype)
        cos, sin = torch.meshgrid(entries, entries, indexing="ij")
        cos, sin = (table.reshape(-1, 1).expand(-1, count * count) for table in (cos, sin))
        x = x.expand(1, 1, many * many, -1).contiguous()
        x = x if interleaved else x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        right = formula(x, cos, sin, interleaved=interleaved)
        with running(implementation):
            assert same_bits(rotate(x, None, cos, sin, interleaved=interleaved)[0], right)
            assert same_bits(rotate(x, None, cos.contiguous(), sin.contiguous(), interleaved=interleaved)[0], right)

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_every_half_precision_number(self, dtype, implementation):
        # Turned by 1 and 0, all 2^16 come out as they went in; halved, the subnormals round to even.
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 1, 512, 128)
        zero = torch.zeros(512, 64)
        with running(implementation):
            for entry in (1.0, 0.5, 1 + 2.0**-8, 3.0):
                cos = torch.full_like(zero, entry)
                assert same_bits(rotate(x, None, cos, zero)[0], formula(x, cos, zero))

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize("trailing", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_channels_that_do_not_turn_keep_their_bits(self, dtype, trailing, implementation):
        generator = torch.Generator().manual_seed(0)
        integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
        bits = torch.randint(-(2**15), 2**15, (2, 3, 9, 24), generator=generator).to(integers) << (
            8 * dtype.itemsize - 16
        )
        # Signalling NaNs too: quiet bit clear, something below set.
        bits[..., ::5] = {8: 0x7FF0000000000001, 4: 0x7F800001, 2: 0x7F81 if dtype == torch.bfloat16 else 0x7C01}[
            dtype.itemsize
        ]
        x, rest = bits.view(dtype), slice(0, 18) if trailing else slice(6, None)
        table = randn(9, 3)
        with running(implementation):
            for inplace in (False, True):
                out = rotate(x.clone(), None, table, table, rotary_dim=6, trailing=trailing, inplace=inplace)[0]
                assert torch.equal(out.view(integers)[..., rest], bits[..., rest])


@functools.lru_cache(maxsize=1)
def large(dtype: torch.dtype, interleaved: bool, tokens_first: bool) -> tuple[torch.Tensor, ...]:
    """Arguments of just over 16 MiB, and the right result."""
    part = randn(1, 9, 16, 128, dtype=dtype)
    x = part.repeat(1, 1, 2**24 // part.nbytes + 1, 1)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if tokens_first else x
    cos, sin = torch.randn(2, x.shape[2], 32)
    return x, cos, sin, formula(x, cos, sin, interleaved=interleaved, rotary_dim=64, trailing=tokens_first)


class TestLarge:
    """Outputs beyond the caches are written past them, in threads, and block by block."""

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize(
        ("dtype", "interleaved", "tokens_first"),
        [
            (torch.float32, False, False),
            (torch.bfloat16, True, True),
            (torch.float16, False, True),
            (torch.float64, True, False),
        ],
    )
    def test_the_same_bits(self, dtype, interleaved, tokens_first, implementation):
        x, cos, sin, right = large(dtype, interleaved, tokens_first)
        out = torch.full_like(x, torch.nan)
        with running(implementation):
            rotate(x, None, cos, sin, out_q=out, interleaved=interleaved, rotary_dim=64, trailing=tokens_first)
        assert same_bits(out, right)

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("width", [2046, 2048, 2050, 4096])
    def test_heads_as_wide_as_a_model(self, width, dtype, interleaved, implementation):
        # Some rotate what no head divides; the library's rows end at 2048 channels.
        x = randn(1, 2, 3, width, dtype=dtype)
        cos, sin = (torch.randint(-127, 128, (3, width), dtype=torch.int8) for _ in "cs")
        options = {"interleaved": interleaved, "stored_tables": True}
        right = formula(x, cos, sin, **options)
        with running(implementation):
            for _ in range(2):
                assert same_bits(rotate(x, None, cos, sin, **options)[0], right)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestStoredTables:
    """Coarse tables are taken where the caller says so: a table that a model cast in passing is an error."""

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16])
    def test_refused_unless_asked_for(self, dtype, implementation):
        q, cos, sin = randn(1, 2, 9, 8), torch.ones(9, 4, dtype=dtype), torch.zeros(9, 4, dtype=dtype)
        with running(implementation):
            assert torch.equal(rotate(q, None, cos, sin, stored_tables=True)[0], formula(q, cos, sin))
            with pytest.raises(
                ValueError, match=f"cos: got {dtype}; tables are float32 or float64.*stored_tables=True"
            ):
                rotate(q, None, cos, sin)

    def test_wider_ones_are_taken_as_they_are(self, implementation):
        q, cos, sin = randn(1, 2, 9, 8), randn(9, 4, seed=1), randn(9, 4, seed=2)
        with running(implementation):
            assert torch.equal(rotate(q, None, cos, sin, stored_tables=True)[0], formula(q, cos, sin))

    def test_an_entry_of_int8_is_rounded_to_float32_for_float64_too(self, implementation):
        q, cos = torch.ones(1, 1, 255, 2, dtype=torch.float64), torch.arange(-127, 128, dtype=torch.int8)[:, None]
        with running(implementation):
            out = rotate(q, None, cos, torch.zeros_like(cos), stored_tables=True)[0]
        entry = torch.tensor(1 / 127, dtype=torch.float32)
        assert torch.equal(out[0, 0, :, 0], (torch.arange(-127.0, 128.0) * entry).double())


def test_memory_for_results_is_written_everywhere():
    # `nan` is what the tests above rely on.
    assert nan(3, dtype=torch.bfloat16).isnan().all()
