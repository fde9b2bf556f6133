"""What every score scale must withstand: dtypes, casts, compilers, frameworks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from theodolite.encodings.scale.constant import ConstantScale
from theodolite.encodings.scale.ssmax import SSMax
from theodolite.encodings.scale.temperature import LogN, LogScale, PowerScale, Temperature

HEADS = 4
SCALES = {
    "temperature": lambda: Temperature(beta=0.1, length=16, shift=1),
    "log": lambda: LogScale(alpha=0.1, length=12),
    "log n": lambda: LogN(10),
    "power": PowerScale,
    "ssmax": lambda: SSMax(HEADS),
    "ssmax with bias": lambda: SSMax(HEADS, bias=True, initial_bias=0.25),
    "constant": lambda: ConstantScale(1.589626),
}
LEARNED = {"ssmax": ["scale"], "ssmax with bias": ["scale", "bias"]}


@pytest.fixture(params=SCALES)
def name(request):
    return request.param


def inputs(tokens=33, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    q = torch.randn(2, HEADS, tokens, 8, generator=generator).to(dtype)
    return q, torch.stack((torch.arange(5, 5 + tokens), torch.arange(900, 900 + tokens)))


class TestEveryScale:
    """The promises of the place, one by one."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_rounds_once_to_the_dtype_of_q(self, name, dtype):
        scale, (q, positions) = SCALES[name](), inputs(dtype=dtype)
        out = scale(q, positions)
        assert out.dtype == dtype
        wide = q if dtype == torch.float64 else q.float()
        assert torch.equal(out, (wide * scale.factors(positions)[..., None]).to(dtype))
        assert not torch.equal(out, q)

    def test_tokens_before_heads(self, name):
        scale, (q, positions) = SCALES[name](), inputs()
        turned = scale(q.transpose(1, 2), positions, heads_first=False).transpose(1, 2)
        assert torch.equal(turned, scale(q, positions))
        with pytest.raises(ValueError, match="positions: got 33 for the 4 tokens of q"):
            scale(q, positions, heads_first=False)

    def test_under_autocast(self, name):
        scale, (q, positions) = SCALES[name](), inputs()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(scale(q, positions), scale(q, positions))
            inside = scale(q, positions)
        assert inside.dtype == torch.float32
        assert torch.equal(inside, scale(q, positions))

    @pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
    def test_casts(self, name, cast):
        """What is not learned keeps its bits; what is learned is rounded once, and the work stays at full precision."""
        scale, (_, positions) = SCALES[name](), inputs()
        expected = scale.factors(positions)
        changed = getattr(scale, cast)().factors(positions)
        if name in LEARNED:
            wide = SCALES[name]()
            wide.load_state_dict(scale.state_dict())
            expected = (wide.double() if cast == "double" else wide).factors(positions)
        assert changed.dtype == expected.dtype
        assert torch.equal(changed, expected)

    def test_from_the_meta_device(self, name):
        with torch.device("meta"):
            scale = SCALES[name]()
        q, positions = inputs()
        assert scale(q.to("meta"), positions.to("meta")).shape == q.shape
        scale.to_empty(device="cpu")
        scale.reset_parameters()
        assert torch.equal(scale(q, positions), SCALES[name]()(q, positions))

    def test_compiled_for_any_length(self, name):
        torch._dynamo.reset()
        scale, counter = SCALES[name](), CompileCounter()
        compiled = torch.compile(scale, fullgraph=True, dynamic=True, backend=counter)
        for tokens in (8, 9, 23, 64):
            q, positions = inputs(tokens)
            assert torch.equal(compiled(q, positions), scale(q, positions))
        assert counter.frame_count <= 2

    def test_exported_for_any_length(self, name):
        scale, (q, positions) = SCALES[name](), inputs(16)
        tokens = torch.export.Dim("tokens", min=2, max=4096)
        shapes = {"q": {2: tokens}, "positions": {1: tokens}}
        exported = torch.export.export(scale, (q, positions), dynamic_shapes=shapes).module()
        for length in (16, 61):
            q, positions = inputs(length)
            assert torch.equal(exported(q, positions), scale(q, positions))

    def test_training_after_inference(self, name):
        scale, (q, positions) = SCALES[name](), inputs()
        with torch.inference_mode():
            first = scale(q, positions)
        q.requires_grad_()
        out = scale(q, positions)
        out.sum().backward()
        assert torch.equal(out, first)
        assert torch.equal(q.grad, scale.factors(positions)[..., None].expand_as(q))
        for parameter in scale.parameters():
            assert parameter.grad.abs().min() > 0

    def test_state_dict_holds_what_is_learned(self, name):
        scale = SCALES[name]()
        assert list(scale.state_dict()) == LEARNED.get(name, [])
        assert list(scale.buffers()) == []

    def test_copied_pickled_and_shown(self, name):
        scale, (_, positions) = SCALES[name](), inputs()
        for other in (copy.deepcopy(scale), pickle.loads(pickle.dumps(scale))):
            assert torch.equal(other.factors(positions), scale.factors(positions))
        assert "=" in repr(scale) or name == "constant"

    def test_token_by_token(self, name):
        scale, (q, positions) = SCALES[name](), inputs()
        whole = scale(q, positions)
        for token in range(q.shape[2]):
            alone = scale(q[:, :, token : token + 1], positions[:, token : token + 1])
            assert torch.equal(alone[:, :, 0], whole[:, :, token])

    def test_half_precision_positions_are_refused(self, name):
        with pytest.raises(ValueError, match=r"positions: got torch.bfloat16; give integers"):
            SCALES[name]().factors(torch.arange(4).bfloat16())
