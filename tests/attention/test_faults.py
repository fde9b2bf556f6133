"""What goes wrong in other people's caches and attention, held against what one pass over the whole text gives."""

from __future__ import annotations

import math

import pytest
import torch

from theodolite.attention import Attention, Cache, attend_by_policy, cache
from theodolite.encodings import ALiBi, Policy, RotaryEmbedding, SharedTables, T5Bias
from theodolite.plan import DynamicNTK, LongRoPE, Mask, Rotary
from theodolite.plan.scaling import YaRN, YaRNByLength
from theodolite.positions import mrope_next_positions, mrope_positions

HEADS, KEY_HEADS, DIM, WIDTH = 4, 2, 16, 24
PLAN = Rotary(head_dim=DIM, rope_theta=100.0)
FAR = Rotary(head_dim=DIM, rope_theta=10000.0)
AXES = Rotary(head_dim=DIM, rope_theta=100.0, mrope_section=(2, 3, 3))
SCALINGS = {
    "dynamic": DynamicNTK(factor=2, original_max_position_embeddings=16),
    "longrope": LongRoPE(short_factor=(1.0,) * 8, long_factor=(2.0,) * 8, original_max_position_embeddings=16),
    "yarn": YaRNByLength(yarn=YaRN(factor=4, original_max_position_embeddings=16)),
}


def attention_of(policy: Policy, **options) -> Attention:
    torch.manual_seed(0)
    module = Attention(WIDTH, HEADS, policy, num_kv_heads=KEY_HEADS, head_dim=DIM, **options).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return module.requires_grad_(False)


def inputs(rows: int, tokens: int) -> torch.Tensor:
    return torch.randn(rows, tokens, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def softmax_over(scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores, -1) @ v.repeat_interleave(scores.shape[1] // v.shape[1], 1)


class TestAPrefixThatIsKept:
    """A prefix that was turned for a short text is no prefix of a long one, and of another short one it is."""

    def prefix(self, name: str, length: int) -> tuple[Attention, Cache]:
        module = attention_of(Policy(rotate=RotaryEmbedding(Rotary(head_dim=DIM, rope_theta=100.0, **scaled(name)))))
        kept = Cache()
        module(inputs(1, 40)[:, :12], torch.arange(12), cache=kept, lengths=[length])
        return module, kept

    @pytest.mark.parametrize("name", SCALINGS)
    @pytest.mark.parametrize(("first", "second"), [(12, 40), (40, 12)])
    def test_of_the_other_kind(self, name, first, second):
        (module, kept), x, at = self.prefix(name, first), inputs(1, 40), torch.arange(40)
        with pytest.raises(ValueError, match=rf"at lengths \[{first}\], and this layer turns by .* \[{second}\]"):
            module(x[:, 12:], at[12:], cache=kept, lengths=[second])
        kept.turn_to(module.policy, lengths=[second])
        out = module(x[:, 12:], at[12:], cache=kept, lengths=[second])
        # One more rotation of each key, by tables within 6e-8.
        assert apart(out, module(x, at, lengths=[second])[:, 12:]) < 1e-5

    @pytest.mark.parametrize("name", SCALINGS)
    def test_of_the_same_kind(self, name):
        (module, kept), x, at = self.prefix(name, 12), inputs(1, 40), torch.arange(40)
        out = module(x[:, 12:16], at[12:16], cache=kept, lengths=[16])
        assert apart(out, module(x[:, :16], at[:16], lengths=[16])[:, 12:]) < 1e-9

    @pytest.mark.parametrize("name", SCALINGS)
    def test_the_settled_plan_is_the_key_of_a_store_of_prefixes(self, name):
        plan = Rotary(head_dim=DIM, rope_theta=100.0, **scaled(name))
        kinds = {plan.at_length(length) for length in (1, 9, 16)}
        assert len(kinds) == 1
        assert plan.at_length(17) not in kinds
        assert (plan.at_length(17) == plan.at_length(40)) == (name != "dynamic")


def scaled(name: str) -> dict:
    return {"scaling": SCALINGS[name]}


class TestTheBoundaryIsCrossedOnce:
    """Keys are turned when the first token past the original length comes, and never again by the same list."""

    @pytest.mark.parametrize(("name", "turns"), [("longrope", [16]), ("yarn", [16]), ("dynamic", [16, 17, 18, 19])])
    def test_how_often(self, name, turns, monkeypatch):
        module = attention_of(Policy(rotate=RotaryEmbedding(Rotary(head_dim=DIM, rope_theta=100.0, **scaled(name)))))
        turned, kept, x = [], Cache(follow_lengths=True), inputs(2, 20)
        rerotate = cache.rerotate

        def counted(k, **options):
            turned.append((len(kept), k.shape[0]))
            return rerotate(k, **options)

        monkeypatch.setattr(cache, "rerotate", counted)
        for token in range(20):
            now = slice(token, token + 1)
            # The second row stays short.
            module(x[:, now], torch.arange(token, token + 1), cache=kept, lengths=[token + 1, 5])
        assert turned == [(tokens, 1) for tokens in turns]


def pictures() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions (3, 2, 40) and deltas (2,) of 40 tokens with a picture of 4 x 5 and one of 3 x 2, and their order."""
    types = torch.zeros(2, 40, dtype=torch.int64)
    types[0, 5:25], types[1, 20:26] = 1, 1
    positions, delta = mrope_positions(types, spatial_merge_size=1, image_grid_thw=[[1, 4, 5], [1, 3, 2]])
    return positions, delta, torch.arange(40)


class TestSeveralAxes:
    """With pictures a token's position is not its number: the mask goes by the one, the angles by the other."""

    @pytest.mark.parametrize("parts", [(32, 8), (7,) * 5 + (5,), (1,) * 40, (12, 1, 1, 26)])
    def test_chunks_of_a_prompt(self, parts):
        module, x = attention_of(Policy(rotate=RotaryEmbedding(AXES))), inputs(2, 40)
        positions, _, order = pictures()
        whole, kept, start = module(x, positions, order=order), Cache(), 0
        for part in parts:
            now = slice(start, start + part)
            tables = SharedTables(positions[:, :, now])
            assert apart(module(x[:, now], order[now], cache=kept, tables=tables), whole[:, now]) < 1e-9
            start += part
        assert kept.seen.tolist() == [40, 40]

    def test_drafts_after_pictures(self):
        # The next position is behind the number of tokens by the row's delta, and a draft is taken back by the number.
        module, x = attention_of(Policy(rotate=RotaryEmbedding(AXES))), inputs(2, 52)
        positions, delta, _ = pictures()
        assert delta.tolist() == [-15, -3]
        after = mrope_next_positions(torch.tensor([40, 40]), delta=delta, new_tokens=12)
        assert after[0, :, 0].tolist() == [25, 37]
        whole = module(x, torch.cat((positions, after), -1), order=torch.arange(52))
        kept, rows = Cache(), torch.arange(2)[:, None]
        module(x[:, :40], torch.arange(40), cache=kept, tables=SharedTables(positions))
        for accepted in ([2, 4], [0, 1], [4, 0], [3, 4]):
            seen = kept.seen
            at = seen[:, None] + torch.arange(4)
            draft, wrong = x[rows, at], torch.arange(4) >= torch.tensor(accepted)[:, None]
            tables = SharedTables(mrope_next_positions(seen, delta=delta, new_tokens=4))
            out = module(torch.where(wrong[..., None], -draft, draft), at, cache=kept, tables=tables)
            assert apart(out[~wrong], whole[rows, at][~wrong]) < 1e-9
            kept.truncate(seen + torch.tensor(accepted))
            assert kept.seen.tolist() == (seen + torch.tensor(accepted)).tolist()
        assert kept.seen.tolist() == [49, 49]

    @pytest.mark.parametrize("by", [500, -3])
    def test_moved(self, by):
        # Every axis moves, the pictures keep their shape.
        module, x = attention_of(Policy(rotate=RotaryEmbedding(AXES))), inputs(2, 40)
        positions, _, order = pictures()
        positions, order = positions + 7, order + 7
        kept = Cache()
        module(x[:, :30], order[:30], cache=kept, tables=SharedTables(positions[:, :, :30]))
        kept.move(by)
        out = module(x[:, 30:], order[30:] + by, cache=kept, tables=SharedTables(positions[:, :, 30:] + by))
        whole = module(x, positions + by, order=order + by)[:, 30:]
        # One more rotation of each key, by tables within 6e-8.
        assert apart(out, whole) < 1e-5
        wrong = module(x[:, 30:], order[30:] + by, cache=kept, tables=SharedTables(positions[:, :, 30:]))
        assert apart(wrong, whole) > 1e-2


class TestSinksAndWindow:
    """Query and keys go by the same count: all by where they stood in the text, or all by their place in the cache."""

    def test_by_the_place_in_the_cache(self):
        # Of 10 tokens the first 2 and the last 4 are left, and stand at 0 to 5 (StreamingLLM).
        policy = Policy(rotate=RotaryEmbedding(PLAN))
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, heads, 10, DIM, generator=generator, dtype=torch.float64) for heads in (HEADS, 2, 2))
        stored = Cache(turned=False, window=4, sinks=2)
        for token in range(10):
            now = slice(token, token + 1)
            stored.append(policy, k[:, :, now], v[:, :, now], torch.arange(token, token + 1))
            kept, at = stored.kept(), torch.arange(len(stored))
            out = attend_by_policy(policy, q[:, :, now], kept.k, kept.v, at[-1:], at)
            assert kept.positions[0].tolist() == [t for t in range(token + 1) if t < 2 or t > token - 4]
            rotated = turned(kept.k, at.double()).repeat_interleave(2, 1)
            scores = turned(q[:, :, now], at[-1:].double()) @ rotated.transpose(-1, -2) / math.sqrt(DIM)
            # Scores below 40, of tables within 6e-8.
            assert apart(out, softmax_over(scores, kept.v)) < 1e-5
            stored.evict()

    @pytest.mark.parametrize("turned_keys", [True, False])
    def test_the_counter_goes_on(self, turned_keys):
        module, x, kept = attention_of(Policy(rotate=RotaryEmbedding(PLAN))), inputs(2, 30), None
        kept = Cache(turned=turned_keys, window=3, sinks=2)
        for token in range(30):
            module(x[:, token : token + 1], torch.arange(token, token + 1), cache=kept)
            assert kept.seen.tolist() == [token + 1] * 2
            assert len(kept) == min(token + 1, 4)


def turned(x: torch.Tensor, positions: torch.Tensor, plan: Rotary = PLAN) -> torch.Tensor:
    """Pairs (i, i + D/2) as complex numbers times exp(i w p), in float64."""
    frequencies = plan.rope_theta ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    first, second = x.chunk(2, -1)
    angles = positions[:, None] * frequencies
    turned_pairs = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned_pairs.real, turned_pairs.imag), -1)


class TestMovedAgainAndAgain:
    """500 moves of one round 500 times; one move of 500 rounds once."""

    # Published for one move with the tables in the dtype too: 5e-8, 4.6e-4, 3.5e-3. Those of 500 moves are 9e-6, 0.11
    # and 0.61; here 1e-5, 0.03 and 0.26, since products are float32 and only the key is rounded.
    @pytest.mark.parametrize(
        ("dtype", "once", "often"),
        [(torch.float32, 1e-7, 2e-5), (torch.float16, 4.6e-4, 0.11), (torch.bfloat16, 3.5e-3, 0.61)],
    )
    def test_one_move_or_many(self, dtype, once, often):
        policy = Policy(rotate=RotaryEmbedding(FAR))
        k = torch.randn(1, 2, 64, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
        found = []
        for steps in (1, 500):
            kept = Cache()
            kept.append(policy, k, k, torch.arange(1000, 1064))
            for _ in range(steps):
                kept.move(-500 // steps)
            assert kept.seen.tolist() == [564]
            exact = turned(k.double(), torch.arange(500, 564).double(), FAR)
            found.append(float((kept.kept().k.double() - exact).norm() / exact.norm()))
            assert torch.equal(kept.kept().v, k)
        assert found[0] < once
        assert 20 * found[0] < found[1] < often


class WithMemory(ALiBi):
    """Keys at positions below 0 are memory, of no distance to anything."""

    def _value(self, q_position, k_position, head, *parameters):
        return torch.where(k_position < 0, 0.0, super()._value(q_position, k_position, head, *parameters))


class TestALiBi:
    """The bias goes by positions given, whatever stands in which slot: padding, memory, gaps."""

    def oracle(self, module: Attention, x: torch.Tensor, at: torch.Tensor, memory: int) -> torch.Tensor:
        """One row (S, WIDTH) at positions (S,), every pair written out in float64."""
        q, k, v = module._project(x[None], x[None])
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / HEADS) for head in range(HEADS)], dtype=torch.float64)
        bias = -slopes[:, None, None] * (at[:, None] - at)
        bias[..., :memory] = 0
        scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / math.sqrt(DIM) + bias
        scores = scores.masked_fill(at[:, None] < at, -math.inf)
        return module.o_proj(softmax_over(scores, v).transpose(1, 2).flatten(2))[0]

    @pytest.mark.parametrize("turned_keys", [True, False])
    @pytest.mark.parametrize("memory", [0, 3])
    def test_padding_on_the_left_memory_and_gaps(self, memory, turned_keys):
        module = attention_of(Policy(bias=WithMemory(HEADS)))
        generator, kept, fed = torch.Generator().manual_seed(1), Cache(turned=turned_keys), [[], []]
        first = torch.arange(-memory, 0)
        if memory:
            x = inputs(2, memory)
            module(x, first, cache=kept)
            fed = [[(x[row], first)] for row in range(2)]
        last = [0, 0]
        for counts in ((5, 2), (1, 1), (0, 3), (1, 0), (4, 4)):
            tokens = max(counts)
            x = torch.randn(2, tokens, WIDTH, generator=generator, dtype=torch.float64)
            at, real = torch.zeros(2, tokens, dtype=torch.int64), torch.zeros(2, tokens, dtype=torch.int64)
            for row, count in enumerate(counts):
                places = last[row] + torch.randint(1, 5, (count,), generator=generator).cumsum(0)
                at[row, tokens - count :], real[row, tokens - count :] = places, 1
                fed[row].append((x[row, tokens - count :], places))
                last[row] = int(places[-1]) if count else last[row]
            out = module(x, at, cache=kept, real=real)
            for row, count in enumerate(counts):
                so_far, places = (torch.cat(part) for part in zip(*fed[row], strict=True))
                whole = self.oracle(module, so_far, places.double(), memory)
                if count:
                    assert apart(out[row, tokens - count :], whole[-count:]) < 1e-9


class TestT5:
    """Its decoder attends to the encoder without a bias, wherever that stands, and unscaled."""

    def test_cross_attention_is_that_of_transformers(self):
        t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
        config = t5.T5Config(d_model=WIDTH, d_kv=DIM, num_heads=HEADS, dropout_rate=0.0, is_decoder=True)
        theirs = t5.T5Attention(config, layer_idx=0).double().eval().requires_grad_(False)
        policy = Policy(mask=Mask(causal=False), score_scale=1.0)
        module = Attention(WIDTH, HEADS, policy, head_dim=DIM).double().requires_grad_(False)
        for name in "qkvo":
            torch.nn.init.normal_(getattr(theirs, name).weight, std=0.3)
            getattr(module, f"{name}_proj").weight.copy_(getattr(theirs, name).weight)
        x, context = inputs(2, 7), inputs(2, 11).flip(1)
        expected = theirs(x, key_value_states=context)[0]
        for first in (0, 400):
            out = module(x, torch.arange(7), context=context, context_positions=torch.arange(first, first + 11))
            assert apart(out, expected) < 1e-9
        biased = Policy(bias=T5Bias(HEADS, bidirectional=True, std=1.0), mask=Mask(causal=False), score_scale=1.0)
        module.policy = biased.double().requires_grad_(False)
        out = module(x, torch.arange(7), context=context, context_positions=torch.arange(11))
        assert apart(out, expected) > 1e-2


class Biased(torch.nn.Module):
    """Attention with a policy's bias, as a graph has it."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, q, k, v, positions):
        mask = self.policy.attn_mask(positions, positions, q=q, k=k)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class TestExportedAtAnotherLength:
    """Buckets and distances are worked out in the graph: traced at 8 tokens it serves 12, and 300."""

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize(
        "make",
        [
            lambda: T5Bias(HEADS, bidirectional=False, std=1.0),
            lambda: T5Bias(HEADS, bidirectional=True, std=1.0),
            lambda: ALiBi(HEADS),
        ],
    )
    def test_in_onnx(self, make):
        for needed in ("onnx", "onnxscript"):
            pytest.importorskip(needed)
        runtime = pytest.importorskip("onnxruntime")
        torch.manual_seed(0)
        module = Biased(Policy(bias=make())).eval().requires_grad_(False)

        def given(tokens):
            generator = torch.Generator().manual_seed(tokens)
            q, k, v = (torch.randn(1, HEADS, tokens, DIM, generator=generator) for _ in range(3))
            return q, k, v, torch.arange(tokens)

        tokens = torch.export.Dim("tokens", min=2, max=1024)
        shapes = ({2: tokens}, {2: tokens}, {2: tokens}, {0: tokens})
        program = torch.onnx.export(module, given(8), dynamo=True, dynamic_shapes=shapes, verbose=False)
        session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
        names = [one.name for one in session.get_inputs()]
        for length in (8, 12, 300):
            arguments = given(length)
            (out,) = session.run(None, {name: x.numpy() for name, x in zip(names, arguments, strict=True)})
            # Sums of up to 300 products in float32, in another order.
            assert apart(torch.from_numpy(out), module(*arguments)) < 1e-5

    def test_the_module_is_not_exported_for_one_length_in_silence(self):
        module = attention_of(Policy(bias=T5Bias(HEADS, bidirectional=False, std=1.0))).float()
        tokens = torch.export.Dim("tokens", min=2, max=1024)
        with pytest.raises(Exception, match=r"your code specialized it to be a constant \(8\)"):
            torch.export.export(
                module, (torch.randn(1, 8, WIDTH), torch.arange(8)), dynamic_shapes=({1: tokens}, {0: tokens})
            )
