"""The rotary module: it holds a plan, so there is nothing that a framework could spoil."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from theodolite.encodings import RotaryEmbedding, rotary_tables
from theodolite.kernels import rotate
from theodolite.plan import DynamicNTK, Linear, Rotary, YaRN

PLAN = Rotary(head_dim=32, rope_theta=10000.0, scaling=YaRN(factor=4, original_max_position_embeddings=64))


def inputs(batch=2, tokens=63, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(batch, 4, tokens, 32, generator=generator).to(dtype)
    k = torch.randn(batch, 2, tokens, 32, generator=generator).to(dtype)
    return q, k, torch.arange(5, 5 + tokens)


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Model(nn.Module):
    """A layer with weights and a rotary module inside, as frameworks meet it."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.rotary_emb = RotaryEmbedding(PLAN)


CASTS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "bfloat16 and back": lambda m: m.bfloat16().float(),
    "to(dtype)": lambda m: m.to(torch.float16),
    "double": lambda m: m.double(),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "every tensor set to NaN": lambda m: m._apply(lambda t: torch.full_like(t, float("nan"))),
    "weight initialiser": lambda m: m.apply(lambda x: [nn.init.normal_(p) for p in x.parameters(recurse=False)]),
    "buffers cast by hand": lambda m: [
        sub._buffers.update({name: buffer.bfloat16() for name, buffer in sub._buffers.items()}) for sub in m.modules()
    ],
    "eval": lambda m: m.eval(),
    "requires_grad_": lambda m: m.requires_grad_(True),
}


class TestNothingToSpoil:
    """Casts, meta initialisation and weight initialisers ruin tables that are buffers; this one has none."""

    @pytest.mark.parametrize("change", CASTS)
    def test_survives(self, change):
        model, (q, k, positions) = Model(), inputs()
        expected = model.rotary_emb(q, k, positions)
        CASTS[change](model)
        assert same(model.rotary_emb(q, k, positions), expected)

    def test_built_on_the_meta_device(self):
        with torch.device("meta"):
            model = Model()
        model.to_empty(device="cpu")
        q, k, positions = inputs()
        assert same(model.rotary_emb(q, k, positions), Model().rotary_emb(q, k, positions))

    def test_longer_after_a_cast_than_before(self):
        model = Model()
        short = model.rotary_emb.tables(torch.arange(16))
        model.bfloat16()
        long = model.rotary_emb.tables(torch.arange(32))
        assert torch.equal(long.cos[:16], short.cos)
        assert torch.equal(long.cos, rotary_tables(PLAN, torch.arange(32)).cos)

    def test_copied_and_pickled(self):
        q, k, positions = inputs()
        rope = RotaryEmbedding(PLAN)
        expected = rope(q, k, positions)
        assert same(copy.deepcopy(rope)(q, k, positions), expected)
        assert same(pickle.loads(pickle.dumps(rope))(q, k, positions), expected)

    def test_the_plan_is_fixed(self):
        with pytest.raises(AttributeError):
            RotaryEmbedding(PLAN).rotary = Rotary(head_dim=32, rope_theta=5e5)

    def test_under_autocast_and_inference_mode(self):
        rope, (q, k, positions) = RotaryEmbedding(PLAN), inputs()
        expected = rope(q, k, positions)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert same(rope(q, k, positions), expected)
        with torch.inference_mode():
            assert same(rope(q, k, positions), expected)


class TestStateDict:
    """A table is derived from the config: it is in no checkpoint, and old checkpoints that have one still load."""

    def test_is_empty(self):
        rope = RotaryEmbedding(PLAN)
        assert rope.state_dict() == {}
        assert list(rope.parameters()) == list(rope.buffers()) == []

    @pytest.mark.parametrize("key", ["inv_freq", "original_inv_freq", "cos_cached", "sin_cached", "freqs"])
    def test_known_old_keys_are_dropped(self, key):
        model = Model()
        expected = model.rotary_emb.tables(torch.arange(9))
        state = {**model.state_dict(), f"rotary_emb.{key}": torch.full((16,), float("nan"))}
        with pytest.warns(UserWarning, match=f"RotaryEmbedding: the checkpoint's {key} is not read"):
            assert str(model.load_state_dict(state, strict=True)) == "<All keys matched successfully>"
        assert f"rotary_emb.{key}" in state
        assert same(model.rotary_emb.tables(torch.arange(9)), expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_stored_frequencies_may_be_rounded(self, dtype):
        rope = RotaryEmbedding(Rotary(head_dim=128, rope_theta=1e7))
        with pytest.warns(UserWarning, match="inv_freq is not read"):
            rope.load_state_dict({"inv_freq": torch.from_numpy(rope.rotary.inv_freq()).to(dtype)})

    @pytest.mark.parametrize(
        "other",
        [{"rope_theta": 2e4}, {"scaling": Linear(factor=2)}, {"live_pairs": 8}],
        ids=["base", "scaling", "live"],
    )
    def test_stored_frequencies_of_another_model_are_refused(self, other):
        rope = RotaryEmbedding(Rotary(head_dim=32, rope_theta=1e4))
        state = {"inv_freq": torch.from_numpy(Rotary(**{"head_dim": 32, "rope_theta": 1e4, **other}).inv_freq())}
        with pytest.raises(RuntimeError, match=r"inv_freq: the checkpoint's frequencies, .* base or scaling differ"):
            rope.load_state_dict(state)

    def test_unknown_keys_are_not(self):
        model = Model()
        with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "rotary_emb.weight"'):
            model.load_state_dict({**model.state_dict(), "rotary_emb.weight": torch.ones(1)})


class TestForward:
    """What the module does is tables, then rotation; nothing is derived from a shape."""

    @pytest.mark.parametrize("heads_first", [True, False])
    def test_is_tables_then_rotation(self, heads_first):
        q, k, positions = inputs()
        if not heads_first:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        rope = RotaryEmbedding(PLAN)
        expected = rotate(q, k, *rotary_tables(PLAN, positions), heads_first=heads_first)
        assert same(rope(q, k, positions, heads_first=heads_first), expected)
        tables = rope.tables(positions)
        assert same(rope.apply_tables(q, k, tables, heads_first=heads_first), expected)
        copies = q.clone(), k.clone()
        out = rope.apply_tables(*copies, tables, heads_first=heads_first, inplace=True)
        assert out[0] is copies[0]
        assert same(copies, expected)

    @pytest.mark.parametrize(
        "options", [{"interleaved": True}, {"rotary_dim": 16}, {"rotary_dim": 16, "trailing": True}, {"live_pairs": 3}]
    )
    def test_carries_the_plan_to_the_kernel(self, options):
        q, k, positions = inputs()
        plan = Rotary(head_dim=32, rope_theta=1e4, **options)
        layout = {name: value for name, value in options.items() if name != "live_pairs"}
        expected = rotate(q, k, *rotary_tables(plan, positions), **layout)
        assert same(RotaryEmbedding(plan)(q, k, positions), expected)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_dtype_out_is_dtype_in(self, dtype):
        q, k, positions = inputs(dtype=dtype)
        out = RotaryEmbedding(PLAN)(q, k, positions)
        assert [x.dtype for x in out] == [dtype, dtype]

    def test_meta_inputs_give_meta_outputs(self):
        q, k, positions = (x.to("meta") for x in inputs())
        out = RotaryEmbedding(PLAN)(q, k, positions)
        assert out[0].is_meta
        assert out[0].shape == q.shape

    def test_lengths_settle_each_row(self):
        plan = Rotary(head_dim=32, rope_theta=1e4, scaling=DynamicNTK(factor=2, original_max_position_embeddings=16))
        q, k, positions = inputs()
        out = RotaryEmbedding(plan)(q, k, positions.expand(2, -1), lengths=[16, 68])
        for row, length in enumerate([16, 68]):
            alone = RotaryEmbedding(plan.at_length(length))(q[row : row + 1], k[row : row + 1], positions)
            assert torch.equal(out[0][row], alone[0][0])
        with pytest.raises(ValueError, match="at_length"):
            RotaryEmbedding(plan)(q, k, positions)

    def test_linear_is_fractional_positions(self):
        q, k, positions = inputs(dtype=torch.float64)
        scaled = RotaryEmbedding(Rotary(head_dim=32, rope_theta=1e4, scaling=Linear(factor=3)))(q, k, positions)
        divided = RotaryEmbedding(Rotary(head_dim=32, rope_theta=1e4))(q, k, positions.double() / 3)
        # Each table is within 6e-8 of the same value, and an output is a sum of two products.
        assert (scaled[0] - divided[0]).abs().max() <= 4 * 6e-8 * q.abs().max()


class TestDecoding:
    """A token turned alone is turned as in the whole sequence, in any batch: caches hold what prefill wrote."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_token_by_token_equals_prefill(self, dtype):
        rope, (q, k, positions) = RotaryEmbedding(PLAN), inputs(dtype=dtype)
        whole = rope(q, k, positions)
        for token in range(q.shape[2]):
            step = rope(q[:, :, token : token + 1], k[:, :, token : token + 1], positions[token : token + 1])
            assert torch.equal(step[0][:, :, 0], whole[0][:, :, token])
            assert torch.equal(step[1][:, :, 0], whole[1][:, :, token])

    def test_a_batch_of_single_tokens_at_their_own_positions(self):
        rope, (q, k, _) = RotaryEmbedding(PLAN), inputs(batch=3, tokens=1)
        positions = torch.tensor([[7], [70_000], [3]])
        batch = rope(q, k, positions)
        for row in range(3):
            alone = rope(q[row : row + 1], k[row : row + 1], positions[row : row + 1])
            assert torch.equal(batch[0][row], alone[0][0])
            assert torch.equal(batch[1][row], alone[1][0])


class TestCompiled:
    """One graph without a break, from positions to turned queries, and the same bits as without a compiler."""

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize("plan", [PLAN, Rotary(head_dim=32, rope_theta=1e4, mrope_section=(4, 6, 6))])
    def test_equals_eager(self, backend, plan):
        torch._dynamo.reset()
        rope, (q, k, positions) = RotaryEmbedding(plan), inputs()
        if plan.mrope_section:
            positions = torch.stack([positions, positions // 2, positions // 3]).unsqueeze(1)
        compiled = torch.compile(rope, fullgraph=True, backend=backend)
        assert same(compiled(q, k, positions), rope(q, k, positions))

    def test_positions_out_of_range_are_still_refused(self):
        torch._dynamo.reset()
        rope, (q, k, positions) = RotaryEmbedding(PLAN), inputs()
        compiled = torch.compile(rope, fullgraph=True, backend="eager")
        with pytest.raises(ValueError, match="exact up to"):
            compiled(q, k, positions + 2**24)

    def test_exported(self):
        rope, (q, k, positions) = RotaryEmbedding(PLAN), inputs()
        exported = torch.export.export(rope, (q, k, positions)).module()
        assert same(exported(q, k, positions), rope(q, k, positions))


class TestWrongPositionsAreNamed:
    """A message about cos is no help to someone who never passed one."""

    ROPE = RotaryEmbedding(Rotary(head_dim=8, rope_theta=10000.0))

    def test_a_list(self) -> None:
        q = torch.zeros(1, 2, 3, 8)
        with pytest.raises(ValueError, match="positions: got a list; they must be a tensor"):
            self.ROPE(q, q.clone(), [0, 1, 2])

    def test_another_length(self) -> None:
        q = torch.zeros(1, 2, 3, 8)
        with pytest.raises(ValueError, match=r"positions: got 4 for the 3 tokens of q .* read as \(B, H, S, D\)"):
            self.ROPE(q, q.clone(), torch.arange(4))

    def test_a_scaling_by_name(self) -> None:
        with pytest.raises(ValueError, match="scaling: got 'yarn'; it must be a Scaling, for example YaRN"):
            Rotary(head_dim=8, rope_theta=10000.0, scaling="yarn")  # type: ignore[arg-type]
