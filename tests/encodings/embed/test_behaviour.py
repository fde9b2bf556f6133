"""What frameworks do to a module, done to every additive encoding."""

from __future__ import annotations

import copy
import pickle
import shutil
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from theodolite.encodings.embed.learned import LearnedEmbedding
from theodolite.encodings.embed.sinusoidal import Sinusoidal

MAKERS = {
    "sinusoidal": lambda: Sinusoidal(12),
    "halves, odd": lambda: Sinusoidal(11, layout="halves", channels=slice(1, None)),
    "tensor2tensor, odd": lambda: Sinusoidal(11, layout="halves", spacing="tensor2tensor", channels=slice(0, 11)),
    "offset": lambda: Sinusoidal(12, offset=2, strength=0.3),
    "learned strength": lambda: Sinusoidal(12, strength=0.5, learn_strength=True),
    "half the width": lambda: Sinusoidal(6, channels=slice(0, 6)),
    "learned": lambda: LearnedEmbedding(80, 12),
    "after padding": lambda: LearnedEmbedding(80, 12, padding_idx=1),
    "learned on half the width": lambda: LearnedEmbedding(80, 6, offset=2, channels=slice(6, None)),
}
LEARNED = {
    "learned strength": ["strength"],
    "learned": ["weight"],
    "after padding": ["weight"],
    "learned on half the width": ["weight"],
}


@pytest.fixture(params=MAKERS)
def name(request):
    torch.manual_seed(0)
    return request.param


@pytest.fixture
def module(name):
    return MAKERS[name]()


def inputs(tokens=9, dtype=torch.float32, batch=2, width=12):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(batch, tokens, width, generator=generator).to(dtype)
    positions = torch.randint(0, 80, (batch, tokens), generator=generator)
    mask = torch.rand(batch, tokens, generator=generator) < 0.7
    return x, positions, mask


def by_table(module, x, positions, mask):
    """The sum from the module's own table, in float64, rounded as promised: to float32 at least, then to x's dtype."""
    table = module.table(positions).double()
    out = x.clone()
    channels = module.channels or slice(None)
    total = x[..., channels].double() + table
    total = (total if x.dtype == torch.float64 else total.float()).to(x.dtype)
    out[..., channels] = torch.where(mask[..., None], total, x[..., channels])
    return out


class TestTypes:
    """The dtype of the embeddings comes out, whatever goes on around."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_dtype_out_is_dtype_in(self, module, dtype):
        x, positions, mask = inputs(dtype=dtype)
        out = module(x, positions, mask=mask)
        assert out.dtype == dtype
        assert torch.equal(out, by_table(module, x, positions, mask))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
    def test_autocast_changes_nothing(self, module, dtype, given):
        x, positions, mask = inputs(dtype=given)
        expected = module(x, positions, mask=mask)
        with torch.autocast("cpu", dtype=dtype):
            out = module(x, positions, mask=mask)
        assert out.dtype == given
        assert torch.equal(out, expected)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_cast(self, name, module, dtype):
        _, positions, _ = inputs()
        before = module.table(positions)
        after = module.to(dtype).table(positions)
        assert after.dtype == torch.float32
        if name not in LEARNED:
            assert torch.equal(after, before)
        else:
            # What is stored is rounded once; what is computed from it is not.
            assert ((after - before).abs() <= torch.finfo(dtype).eps / 2 * before.abs() + 2.0**-25).all()

    def test_default_dtype_and_device_have_no_say(self, module):
        x, positions, mask = inputs()
        expected = module(x, positions, mask=mask)
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                out = module(x, positions, mask=mask)
        finally:
            torch.set_default_dtype(torch.float32)
        assert out.dtype == torch.float32
        assert torch.equal(out, expected)


class TestMeta:
    """Made without memory, given memory, initialised: as if made at once."""

    def test_materialised(self, name, module):
        x, positions, mask = inputs()
        with torch.device("meta"):
            late = MAKERS[name]()
        assert all(parameter.is_meta for parameter in late.parameters())
        late.to_empty(device="cpu")
        for parameter in late.parameters():
            nn.init.constant_(parameter, float("nan"))
        torch.manual_seed(0)
        late.reset_parameters()
        assert torch.equal(late(x, positions, mask=mask), module(x, positions, mask=mask))

    def test_meta_in_meta_out(self, module):
        x, positions, mask = inputs()
        out = module.to("meta")(x.to("meta"), positions.to("meta"), mask=mask.to("meta"))
        assert out.is_meta
        assert out.shape == x.shape


class TestNoHistory:
    """The same call gives the same answer, whatever was called before."""

    def test_long_then_short(self, name, module):
        x, positions, mask = inputs()
        expected = module(x, positions, mask=mask)
        module(*inputs(tokens=70)[:2])
        assert torch.equal(module(x, positions, mask=mask), expected)
        assert not list(module.buffers())

    def test_token_by_token_equals_prefill(self, module):
        x, positions, mask = inputs()
        whole = module(x, positions, mask=mask)
        for t in range(x.shape[1]):
            step = module(x[:, t : t + 1], positions[:, t : t + 1], mask=mask[:, t : t + 1])
            assert torch.equal(step, whole[:, t : t + 1])

    def test_inference_first_training_after(self, name, module):
        x, positions, mask = inputs()
        with torch.inference_mode():
            expected = module(x, positions, mask=mask)
        x.requires_grad_()
        out = module(x, positions, mask=mask)
        out.square().sum().backward()
        assert torch.equal(out, expected)
        assert x.grad is not None
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())

    def test_copied_and_pickled(self, module):
        x, positions, mask = inputs()
        expected = module(x, positions, mask=mask)
        assert torch.equal(copy.deepcopy(module)(x, positions, mask=mask), expected)
        assert torch.equal(pickle.loads(pickle.dumps(module))(x, positions, mask=mask), expected)


class TestStateDict:
    """What is learned, and nothing else."""

    def test_keys(self, name, module):
        assert list(module.state_dict()) == LEARNED.get(name, [])

    def test_round_trip(self, name, module):
        torch.manual_seed(1)
        other = MAKERS[name]()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(0.25)
        module.load_state_dict(other.state_dict())
        x, positions, mask = inputs()
        assert torch.equal(module(x, positions, mask=mask), other(x, positions, mask=mask))


class TestCompiled:
    """One graph, compiled twice at most for all lengths."""

    def test_lengths(self, module):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
        for tokens in (8, 9, 17, 33, 64):
            x, positions, mask = inputs(tokens)
            assert torch.equal(compiled(x, positions, mask=mask), module(x, positions, mask=mask))
        assert counter.frame_count <= 2

    @pytest.mark.parametrize("name", ["half the width", "learned strength", "learned on half the width"])
    def test_gradients(self, name):
        torch._dynamo.reset()
        module, (x, positions, mask) = MAKERS[name](), inputs()
        x.requires_grad_()
        compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
        wanted = [x, *module.parameters()]
        expected = torch.autograd.grad(module(x, positions, mask=mask).square().sum(), wanted)
        given = torch.autograd.grad(compiled(x, positions, mask=mask).square().sum(), wanted)
        for one, other in zip(given, expected, strict=True):
            assert torch.equal(one, other)

    @pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a compiler")
    def test_inductor(self):
        torch._dynamo.reset()
        sinusoidal, learned = Sinusoidal(12, strength=0.5, learn_strength=True), LearnedEmbedding(80, 12, offset=2)
        x, positions, mask = inputs(dtype=torch.bfloat16)

        def call(x, positions, mask):
            return learned(sinusoidal(x, positions, mask=mask), positions)

        with warnings.catch_warnings():
            # Of the compiler's own making, not ours.
            warnings.simplefilter("ignore")
            out = torch.compile(call, fullgraph=True, dynamic=True)(x, positions, mask)
        between, expected = sinusoidal(x, positions, mask=mask), call(x, positions, mask)
        # A fused kernel may leave out the rounding between the two sums: a step of either.
        allowed = torch.finfo(x.dtype).eps * (between.double().abs() + expected.double().abs())
        assert ((out.double() - expected.double()).abs() <= allowed).all()


class TestExported:
    """The program has the same numbers at another length than the one it was exported at."""

    def test_another_length(self, module):
        module.eval()
        tokens = torch.export.Dim("tokens", min=2, max=64)
        shapes = {"x": {1: tokens}, "positions": {1: tokens}, "mask": {1: tokens}}
        x, positions, mask = inputs()
        exported = torch.export.export(module, (x, positions), {"mask": mask}, dynamic_shapes=shapes).module()
        for length in (9, 31):
            x, positions, mask = inputs(length)
            assert torch.equal(exported(x, positions, mask=mask), module(x, positions, mask=mask))
