"""What every rotation does wherever a framework puts it: one list of modules, one list of promises."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from theodolite.encodings import RotaryEmbedding
from theodolite.encodings.rotate.base import Rotate
from theodolite.encodings.rotate.learned import LearnedBase, LeRoPE
from theodolite.encodings.rotate.length_base import LengthBase
from theodolite.encodings.rotate.per_head import PerHeadRotary
from theodolite.encodings.rotate.quantised import StoredRotary
from theodolite.encodings.rotate.xpos import XPos
from theodolite.plan import Linear, Rotary, YaRN

BATCH, HEADS, KV_HEADS, WIDTH = 2, 4, 2, 16
PLAN = Rotary(head_dim=WIDTH, rope_theta=10000.0, scaling=YaRN(factor=4, original_max_position_embeddings=64))
AXES = Rotary(head_dim=WIDTH, rope_theta=10000.0, mrope_section=(2, 3, 3))
PART = Rotary(head_dim=WIDTH, rope_theta=10000.0, rotary_dim=8, interleaved=True, trailing=True)


def one_axis(tokens: int) -> torch.Tensor:
    return torch.arange(5, 5 + tokens)


def rows(tokens: int) -> torch.Tensor:
    return torch.stack([torch.arange(tokens), torch.arange(7, 7 + tokens)])


def three_axes(tokens: int) -> torch.Tensor:
    return torch.stack([rows(tokens), rows(tokens) // 2, rows(tokens) // 3])


class Case(NamedTuple):
    """How to build a rotation, and positions of a number of tokens for it."""

    build: Callable[[], Rotate]
    positions: Callable[[int], torch.Tensor] = one_axis
    needs_lengths: bool = False


# A new rotation is a new line here.
CASES = {
    "rotary": Case(lambda: RotaryEmbedding(PLAN)),
    "rotary of three axes": Case(lambda: RotaryEmbedding(AXES), three_axes),
    "per head": Case(lambda: PerHeadRotary([PLAN, Rotary(head_dim=WIDTH, rope_theta=500.0, scaling=Linear(factor=3))])),
    "per head by rows": Case(lambda: PerHeadRotary([PART, Rotary(**{**vars(PART), "rope_theta": 90.0})]), rows),
    "xpos": Case(lambda: XPos(PLAN, centre=30)),
    "xpos by rows": Case(lambda: XPos(PART, centre=30), rows),
    "one learned base": Case(lambda: LearnedBase(PLAN)),
    "learned base per head": Case(lambda: LearnedBase(PART, num_heads=KV_HEADS), rows),
    "LeRoPE": Case(lambda: LeRoPE(PLAN)),
    "LeRoPE of three axes": Case(lambda: LeRoPE(AXES), three_axes),
    "base by length": Case(
        lambda: LengthBase(PLAN, theta_min=1e3, theta_max=1e6, reference_length=32), rows, needs_lengths=True
    ),
    "stored in int8": Case(lambda: StoredRotary(PLAN, length=20)),
    "stored in bfloat16": Case(lambda: StoredRotary(AXES, length=20, dtype=torch.bfloat16), three_axes),
}
ALL = pytest.mark.parametrize("name", CASES)


def moved(rotate: Rotate) -> Rotate:
    """With parameters away from where they begin, the same ones each time."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in rotate.parameters():
            parameter += (0.1 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
    return rotate


def options(case: Case, tokens: int = 19) -> dict:
    return {"lengths": torch.tensor([tokens, tokens + 7])} if case.needs_lengths else {}


def inputs(tokens: int = 19, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(BATCH, HEADS, tokens, WIDTH, generator=generator)
    return q.to(dtype), torch.randn(BATCH, KV_HEADS, tokens, WIDTH, generator=generator).to(dtype)


def run(rotate: Rotate, case: Case, tokens: int = 19, dtype: torch.dtype = torch.float32):
    return rotate(*inputs(tokens, dtype), case.positions(tokens), **options(case, tokens))


def equal(one, other) -> bool:
    return len(one) == len(other) == 2 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@ALL
class TestDtypes:
    """Computed in float32 and rounded once to the dtype of the input, whatever autocast is set to."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_is_rounded_once(self, name, dtype):
        case = CASES[name]
        rotate = moved(case.build())
        q, k = inputs(dtype=dtype)
        exact = rotate(q.float(), k.float(), case.positions(19), **options(case))
        out = rotate(q, k, case.positions(19), **options(case))
        assert equal(out, [x.to(dtype) for x in exact])

    def test_float64_stays_float64(self, name):
        case = CASES[name]
        rotate = moved(case.build())
        out, single = run(rotate, case, dtype=torch.float64), run(rotate, case)
        for mine, other, x in zip(out, single, inputs(), strict=True):
            assert mine.dtype == torch.float64
            # The tables are the same; two products and a sum in float32, of factors up to 1.14 * 1.2 in xPos.
            length = x.double().norm(dim=-1, keepdim=True)
            assert ((mine - other.double()).abs() <= 4 * 1.4 * 2.0**-24 * length).all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast_has_no_say(self, name, dtype):
        case = CASES[name]
        rotate = moved(case.build())
        expected = run(rotate, case)
        with torch.autocast("cpu", dtype=dtype):
            out = run(rotate, case)
        assert equal(out, expected)

    def test_default_dtype_has_no_say(self, name):
        case = CASES[name]
        expected, (q, k) = run(case.build(), case), inputs()
        torch.set_default_dtype(torch.float64)
        try:
            rotate = case.build()
            out = rotate(q, k, case.positions(19), **options(case))
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(parameter.dtype == torch.float32 for parameter in rotate.parameters())
        assert equal(out, expected)


@ALL
class TestCasts:
    """A cast of the model changes no bit: what is learned stays float32, and there is nothing else to cast."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_of_the_module(self, name, dtype):
        case = CASES[name]
        rotate = moved(case.build())
        expected = run(rotate, case)
        rotate.to(dtype)
        assert all(parameter.dtype == torch.float32 for parameter in rotate.parameters())
        assert equal(run(rotate, case), expected)

    def test_there_and_back(self, name):
        case = CASES[name]
        rotate = moved(case.build())
        expected = run(rotate, case)
        rotate.half().double()
        assert all(parameter.dtype == torch.float64 for parameter in rotate.parameters())
        rotate.bfloat16()
        assert all(parameter.dtype == torch.float64 for parameter in rotate.parameters())
        assert equal(run(rotate.float(), case), expected)

    def test_a_parameter_that_is_rounded_elsewhere(self, name):
        """FSDP's policies hand over bfloat16: tables are float32, exact at the rounded values."""
        case = CASES[name]
        rotate = moved(case.build())
        rounded = copy.deepcopy(rotate)
        for parameter, other in zip(rotate.parameters(), rounded.parameters(), strict=True):
            parameter.data = parameter.data.bfloat16()
            other.data = parameter.data.float()
        tables = rotate.tables(case.positions(19), **options(case))
        assert all(x.dtype == torch.float32 for x in tables[:2] if isinstance(x, torch.Tensor))
        assert equal(run(rotate, case), run(rounded, case))


@ALL
class TestStateDict:
    """What is learned and nothing else; old keys that follow from the config are dropped with a note."""

    def test_holds_what_is_learned(self, name):
        rotate = moved(CASES[name].build())
        assert list(rotate.buffers()) == []
        assert list(rotate.state_dict()) == [key for key, _ in rotate.named_parameters()]
        fresh = CASES[name].build()
        fresh.load_state_dict(rotate.state_dict())
        assert equal(run(fresh, CASES[name]), run(rotate, CASES[name]))

    def test_derived_keys_are_dropped(self, name):
        rotate = CASES[name].build()
        # Never filled, of the module's own number of pairs.
        stored = rotate.rotary_dim // 2
        with pytest.warns(UserWarning, match="the checkpoint's inv_freq is not read"):
            rotate.load_state_dict({**rotate.state_dict(), "inv_freq": torch.zeros(stored)})

    def test_copies_are_equal(self, name):
        rotate = moved(CASES[name].build())
        assert equal(run(copy.deepcopy(rotate), CASES[name]), run(rotate, CASES[name]))


@ALL
class TestMeta:
    """Built without memory and materialised later, as large models are."""

    def test_materialised(self, name):
        case = CASES[name]
        with torch.device("meta"):
            rotate = case.build()
        assert all(parameter.is_meta for parameter in rotate.parameters())
        rotate.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in rotate.parameters():
                parameter.fill_(float("nan"))
        rotate.reset_parameters()
        assert equal(run(rotate, case), run(case.build(), case))

    def test_shapes_without_values(self, name):
        case = CASES[name]
        with torch.device("meta"):
            rotate = case.build()
        arguments = {key: value.to("meta") for key, value in options(case).items()}
        out = rotate(*(x.to("meta") for x in inputs()), case.positions(19).to("meta"), **arguments)
        assert [(x.is_meta, x.shape) for x in out] == [(True, x.shape) for x in inputs()]

    def test_under_a_default_device(self, name):
        case = CASES[name]
        rotate, positions, arguments, (q, k) = case.build(), case.positions(19), options(case), inputs()
        expected = rotate(q, k, positions, **arguments)
        with torch.device("meta"):
            out = rotate(q, k, positions, **arguments)
        assert equal(out, expected)


@ALL
class TestHistory:
    """Nothing depends on what was called before."""

    def test_inference_first_and_training_after(self, name):
        case = CASES[name]
        rotate = moved(case.build())
        expected = run(moved(case.build()), case)
        with torch.inference_mode():
            run(rotate, case, tokens=40)
            positions, arguments = case.positions(19), options(case)
        q, k = (x.requires_grad_() for x in inputs())
        out = rotate(q, k, positions, **arguments)
        assert equal(out, expected)
        (out[0].square().sum() + out[1].sum()).backward()
        assert q.grad is not None
        assert all(parameter.grad is not None for parameter in rotate.parameters())

    def test_a_token_alone_is_turned_as_in_the_whole(self, name):
        case = CASES[name]
        rotate = moved(case.build())
        q, k = inputs()
        positions, arguments = case.positions(19), options(case)
        whole = rotate(q, k, positions, **arguments)
        for token in (0, 7, 18):
            one = slice(token, token + 1)
            step = rotate(q[:, :, one], k[:, :, one], positions[..., one], **arguments)
            assert equal(step, [x[:, :, one] for x in whole])

    def test_queries_and_keys_apart(self, name):
        case = CASES[name]
        rotate = moved(case.build())
        q, k = inputs()
        positions, arguments = case.positions(19), options(case)
        whole = rotate(q, k, positions, **arguments)
        apart = rotate(q, None, positions, **arguments)[0], rotate(None, k, positions, **arguments)[1]
        assert equal(apart, whole)

    def test_tokens_first_and_in_place(self, name):
        case = CASES[name]
        rotate = moved(case.build())
        q, k = inputs()
        positions, arguments = case.positions(19), options(case)
        whole = rotate(q, k, positions, **arguments)
        other = rotate(q.transpose(1, 2), k.transpose(1, 2), positions, heads_first=False, **arguments)
        assert equal([x.transpose(1, 2) for x in other], whole)
        with torch.no_grad():
            tables = rotate.tables(positions, **arguments)
            assert equal(rotate.apply_tables(q, k, tables, inplace=True), whole)
        assert equal((q, k), whole)


@ALL
class TestTurningValues:
    """Values are turned as keys are, by pure rotations, and the output is turned back."""

    def test_back_again(self, name):
        case = CASES[name]
        rotate = moved(case.build())
        _, v = inputs(dtype=torch.float64)
        tables = rotate.tables(case.positions(19), amplitude=False, **options(case))
        turned = rotate.turn_values(v, tables)
        back = rotate.turn_output_back(turned, tables)
        # cos^2 + sin^2 of entries that are off by at most `off` is off by 2 sqrt(2) off (+ 2 off^2).
        off = 1 / 254 + 6e-8 if "int8" in name else 2.0**-9 if "bfloat16" in name else 6e-8
        assert (back - v).abs().max() <= 3 * off * v.abs().max()
        assert not torch.equal(turned, v)


@ALL
class TestCompiled:
    """One graph without a break, at most two compilations for all lengths, and the bits of the eager call."""

    def test_any_length(self, name):
        case = CASES[name]
        torch._dynamo.reset()
        rotate, counter = moved(case.build()), CompileCounter()
        compiled = torch.compile(rotate, fullgraph=True, dynamic=True, backend=counter)
        with torch.no_grad():
            for tokens in (8, 9, 33, 64):
                q, k = inputs(tokens)
                out = compiled(q, k, case.positions(tokens), **options(case, tokens))
                assert equal(out, run(rotate, case, tokens))
        assert counter.frame_count <= 2

    def test_exported_at_another_length(self, name):
        case = CASES[name]
        rotate = moved(case.build())
        tokens = torch.export.Dim("tokens", min=2, max=4096)
        shapes = {
            "q": {2: tokens},
            "k": {2: tokens},
            "positions": {case.positions(19).dim() - 1: tokens},
            **dict.fromkeys(options(case), None),
        }
        with warnings.catch_warnings():
            # Of the exporter's own making.
            warnings.simplefilter("ignore")
            program = torch.export.export(
                rotate, (*inputs(), case.positions(19)), options(case), dynamic_shapes=shapes, strict=False
            )
        with torch.no_grad():
            for tokens in (41, 2):
                exported = program.module()(*inputs(tokens), case.positions(tokens), **options(case, tokens))
                assert equal(exported, run(rotate, case, tokens))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if list(case.build().parameters())])
class TestCompiledTraining:
    """The gradient of what is learned comes through a compiled graph too."""

    def test_gradients(self, name):
        case = CASES[name]
        torch._dynamo.reset()
        rotate = moved(case.build())
        compiled = torch.compile(rotate, fullgraph=True, dynamic=False, backend="aot_eager")
        wanted = [*(x.requires_grad_() for x in inputs()), *rotate.parameters()]

        def gradients(module):
            out = module(*wanted[:2], case.positions(19), **options(case))
            return torch.autograd.grad(out[0].square().sum() + (out[1] ** 3).sum(), wanted)

        for mine, other in zip(gradients(compiled), gradients(rotate), strict=True):
            # The same operations; a traced sum may be taken in another order.
            assert (mine - other).abs().max() <= 64 * 2.0**-24 * other.abs().max()
