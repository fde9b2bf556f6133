"""What is learned of positions stays in full precision when the model around it is cast, moved, copied or loaded."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from theodolite.encodings.rotate.base import Rotate
from theodolite.encodings.rotate.learned import LearnedBase, LeRoPE
from theodolite.encodings.rotate.learned_tables import learned_tables
from theodolite.encodings.rotate.length_base import LengthBase
from theodolite.encodings.rotate.mixed import MixedRotary
from theodolite.encodings.rotate.parts import RotateByHead
from theodolite.encodings.rotate.rotary import RotaryEmbedding
from theodolite.plan import Rotary

PLAN = Rotary(head_dim=16, rope_theta=10000.0)


class Own(Rotate):
    """A learned rotation as a user would write it."""

    def __init__(self) -> None:
        super().__init__(rotary_dim=16)
        self.log_freq = nn.Parameter(torch.linspace(0, -9, 8))

    def tables(self, positions, *, lengths=None, amplitude=True, device=None):
        return learned_tables(self.log_freq.double().exp(), positions, device=device)


BUILD = {
    "one base": lambda: LearnedBase(PLAN),
    "a base per head": lambda: LearnedBase(PLAN, num_heads=2),
    "LeRoPE": lambda: LeRoPE(PLAN),
    "base by length": lambda: LengthBase(PLAN, theta_min=1e3, theta_max=1e6, reference_length=64),
    "mixed": lambda: MixedRotary(16, 2),
    "one's own": Own,
}
ALL = pytest.mark.parametrize("name", BUILD)
HALVES = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "to a dtype": lambda module: module.to(torch.bfloat16),
    "to a device and a dtype": lambda module: module.to("cpu", torch.float16),
    "to like a tensor": lambda module: module.to(torch.zeros(1, dtype=torch.bfloat16)),
    "type": lambda module: module.type(torch.float16),
    "to eight bits": lambda module: module.to(torch.float8_e4m3fn),
}


def moved(rotate: Rotate, seed: int = 3) -> Rotate:
    """Away from where training begins."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in rotate.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return rotate


def values(rotate: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in rotate.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def model(rotate: Rotate) -> nn.ModuleDict:
    """Part of something larger, inside another rotation too."""
    return nn.ModuleDict({"linear": nn.Linear(3, 3), "rope": RotateByHead([(rotate, 2), (None, 1)])})


@ALL
class TestCastsOfAModel:
    """A frequency rounded to bfloat16 is off by a radian at a few hundred; a cast of the model must not do that."""

    @pytest.mark.parametrize("cast", HALVES)
    def test_narrower_moves_only(self, name, cast):
        rotate = moved(BUILD[name]())
        before, whole = values(rotate), model(rotate)
        HALVES[cast](whole)
        assert whole["linear"].weight.dtype.itemsize <= 2
        assert same(values(rotate), before)

    def test_wider_and_back(self, name):
        rotate = moved(BUILD[name]())
        before = values(rotate)
        rotate.double()
        assert same(values(rotate), [value.double() for value in before])
        rotate.half()
        assert same(values(rotate), [value.double() for value in before])
        assert same(values(rotate.float()), before)

    def test_the_parameter_is_the_optimisers(self, name):
        """The same object, with its gradient in its dtype, so that an optimiser made before the cast goes on."""
        rotate = moved(BUILD[name]())
        optimiser = torch.optim.Adam(rotate.parameters(), lr=0.01)
        kept = list(rotate.parameters())
        for parameter in kept:
            parameter.grad = torch.ones_like(parameter)
        before = values(rotate)
        rotate.bfloat16()
        assert all(a is b for a, b in zip(kept, rotate.parameters(), strict=True))
        assert all(parameter.grad.dtype == torch.float32 for parameter in kept)
        optimiser.step()
        # Adam's first step is lr, whatever the gradient.
        for value, old in zip(values(rotate), before, strict=True):
            torch.testing.assert_close(value, old - 0.01, rtol=1e-5, atol=1e-6)

    def test_by_swapping_tensors(self, name):
        rotate = moved(BUILD[name]())
        before = values(rotate)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            rotate.half()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert same(values(rotate), before)

    def test_to_another_device_and_from_it(self, name):
        rotate = BUILD[name]()
        rotate.to("meta", torch.bfloat16)
        assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in rotate.parameters())
        rotate.to_empty(device="cpu")
        assert all(parameter.dtype == torch.float32 and not parameter.is_meta for parameter in rotate.parameters())

    def test_copies(self, name):
        rotate = moved(BUILD[name]())
        before = values(rotate)
        for other in (copy.deepcopy(rotate), pickle.loads(pickle.dumps(rotate))):
            assert same(values(other.half()), before)


@ALL
class TestCheckpoints:
    """A checkpoint in half precision is loaded by its values, and trained on in float32."""

    @pytest.mark.parametrize("assign", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_in_half_precision(self, name, dtype, assign):
        rotate = BUILD[name]()
        state = {key: value.to(dtype) for key, value in moved(BUILD[name](), seed=5).state_dict().items()}
        whole = nn.ModuleDict({"rope": rotate})
        whole.load_state_dict({f"rope.{key}": value for key, value in state.items()}, assign=assign)
        assert same(values(rotate), [value.float() for value in state.values()])
        assert all(value.dtype == dtype for value in state.values())

    def test_onto_the_meta_device(self, name):
        with torch.device("meta"):
            rotate = BUILD[name]()
        state = {key: value.bfloat16() for key, value in moved(BUILD[name]()).state_dict().items()}
        rotate.load_state_dict(state, assign=True)
        assert same(values(rotate), [value.float() for value in state.values()])
        assert all(parameter.requires_grad for parameter in rotate.parameters())

    def test_full_precision_is_assigned_as_it_is(self, name):
        rotate, state = BUILD[name](), moved(BUILD[name]()).state_dict()
        rotate.load_state_dict(state, assign=True)
        for key, parameter in rotate.named_parameters():
            assert parameter.data_ptr() == state[key].data_ptr()

    def test_functional_calls_take_what_they_are_given(self, name):
        rotate = BUILD[name]()
        given = {key: value.bfloat16().requires_grad_() for key, value in rotate.state_dict().items()}
        positions = torch.zeros(2, 5) if name == "mixed" else torch.arange(5)[None]
        lengths = {"lengths": [7]} if name == "base by length" else {}
        q = torch.randn(1, 2, 5, 16)
        out, _ = torch.func.functional_call(rotate, given, (q, None, positions + 1), lengths)
        out.square().mul(q).sum().backward()
        assert all(value.grad.dtype == torch.bfloat16 for value in given.values())


class TestHowFarACastIsOff:
    """The reason, and that it is gone."""

    def test_at_four_thousand(self):
        rotate, positions = LeRoPE(Rotary(head_dim=64, rope_theta=10000.0)), torch.arange(4096)
        nn.init.constant_(rotate.alpha, 0.3)
        exact = rotate.tables(positions).cos.detach()
        rounded = copy.deepcopy(rotate)
        rounded.alpha.data = rounded.alpha.data.bfloat16()
        # 0.3 is 0.30078 in bfloat16, by which the fastest pair is off 4.3 radians at the end.
        assert (rounded.tables(positions).cos - exact).abs().max() > 1
        assert torch.equal(rotate.bfloat16().tables(positions).cos, exact)

    def test_nothing_else_is_held_back(self):
        whole = model(RotaryEmbedding(PLAN)).half()
        assert all(parameter.dtype == torch.float16 for parameter in whole.parameters())


class Layer(nn.Module):
    """A projection whose output is turned, by a forward of the rotation or by tables made before."""

    def __init__(self, by_tables: bool) -> None:
        super().__init__()
        self.linear, self.rope, self.by_tables = nn.Linear(16, 16), moved(LeRoPE(PLAN)), by_tables

    def forward(self, x, positions):
        q = self.linear(x)[:, None]
        if not self.by_tables:
            return self.rope(q, None, positions)[0]
        self.made = self.rope.tables(positions)
        return self.rope.apply_tables(q, None, self.made)[0]


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings():
        # Of torch's own making.
        warnings.simplefilter("ignore")
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class TestFullySharded:
    """What the page says of FSDP2 is what it does."""

    POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def test_apart(self, mesh):
        positions, x = torch.arange(4000, 4006), torch.randn(2, 6, 16)
        for cast, options in ((True, {}), (False, {"mp_policy": self.POLICY})):
            layer = Layer(by_tables=True)
            exact = layer.rope.tables(positions).cos.detach()
            layer = layer.bfloat16() if cast else layer
            fully_shard(layer.rope, mesh=mesh)
            register_fsdp_forward_method(layer.rope, "tables")
            fully_shard(layer, mesh=mesh, **options)
            layer(x.bfloat16(), positions).float().square().mul(x[:, None]).sum().backward()
            assert torch.equal(layer.made.cos, exact)
            assert layer.rope.alpha.grad.dtype == torch.float32
            assert float(layer.rope.alpha.grad.to_local().abs().min()) > 0

    def test_apart_by_its_forward(self, mesh):
        layer = Layer(by_tables=False).bfloat16()
        fully_shard(layer.rope, mesh=mesh)
        fully_shard(layer, mesh=mesh)
        layer(torch.randn(2, 6, 16).bfloat16(), torch.arange(6)).sum().backward()
        assert float(layer.rope.alpha.grad.to_local().abs().max()) > 0

    def test_one_group_of_two_dtypes_is_refused(self, mesh):
        layer = Layer(by_tables=True).bfloat16()
        fully_shard(layer, mesh=mesh)
        with pytest.raises(AssertionError, match="uniform original parameter dtype"):
            layer(torch.randn(2, 6, 16).bfloat16(), torch.arange(6))

    def test_a_policy_of_the_group_rounds(self, mesh):
        layer, positions = Layer(by_tables=True), torch.arange(4000, 4006)
        exact = layer.rope.tables(positions).cos.detach()
        fully_shard(layer, mesh=mesh, mp_policy=self.POLICY)
        layer(torch.randn(2, 6, 16), positions)
        assert (layer.made.cos - exact).abs().max() > 0.1
