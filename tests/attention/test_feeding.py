"""However a sequence is fed, each token gets the positions that it would have had in one pass, and the same output."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.attention import Attention, Cache
from theodolite.encodings import ALiBi, CoPE, Fire, ForgettingGate, Kerple, LogN, Policy, RotaryEmbedding, T5Bias, XPos
from theodolite.plan import DynamicNTK, LongRoPE, Mask, Rotary, YaRN, YaRNByLength
from theodolite.positions import AttentionSinks, ReRoPE

HEADS, KEY_HEADS, DIM, WIDTH, TOKENS = 4, 2, 8, 16, 41
SCALED = {"factor": 4, "original_max_position_embeddings": 16}
LISTS = {"short_factor": (1.0, 1.1, 1.3, 1.2), "long_factor": (1.0, 2.0, 3.5, 4.0)}


def rope(**options) -> RotaryEmbedding:
    return RotaryEmbedding(Rotary(**{"head_dim": DIM, "rope_theta": 100.0, **options}))


POLICIES = {
    "nope": lambda mask: Policy(mask=mask),
    "rope": lambda mask: Policy(rotate=rope(), mask=mask),
    "yarn, log-n": lambda mask: Policy(rotate=rope(scaling=YaRN(**SCALED)), scale=LogN(4), mask=mask),
    "partial, values": lambda mask: Policy(rotate=rope(rotary_dim=4, interleaved=True), rotate_values=True, mask=mask),
    "dynamic": lambda mask: Policy(rotate=rope(scaling=DynamicNTK(**SCALED)), mask=mask),
    "longrope": lambda mask: Policy(rotate=rope(scaling=LongRoPE(**SCALED, **LISTS)), rotate_values=True, mask=mask),
    "yarn by length": lambda mask: Policy(rotate=rope(scaling=YaRNByLength(yarn=YaRN(**SCALED))), mask=mask),
    "alibi": lambda mask: Policy(rotate=rope(), bias=ALiBi(HEADS), mask=mask),
    "t5": lambda mask: Policy(bias=T5Bias(HEADS, bidirectional=False, std=1.0), mask=mask),
    "kerple": lambda mask: Policy(bias=Kerple(HEADS), mask=mask),
    "fire": lambda mask: Policy(bias=Fire(HEADS), mask=mask),
    "gate": lambda mask: Policy(bias=ForgettingGate(HEADS, WIDTH), mask=mask),
}
BY_LENGTH = ("dynamic", "longrope", "yarn by length")
MASKS = {"causal": Mask(), "window": Mask(sliding_window=7), "chunk": Mask(chunk=8), "sinks": Mask(sinks=True)}


def attention_of(name: str, mask: Mask) -> Attention:
    torch.manual_seed(0)
    module = Attention(WIDTH, HEADS, POLICIES[name](mask), num_kv_heads=KEY_HEADS, head_dim=DIM).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return module.requires_grad_(False)


def inputs(rows: int) -> torch.Tensor:
    return torch.randn(rows, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@st.composite
def schedules(draw):
    """Numbers of tokens that add up to all of them."""
    left, parts = TOKENS, []
    while left:
        parts.append(draw(st.integers(1, left) if draw(st.booleans()) else st.just(1)))
        left -= parts[-1]
    return parts


class TestChunks:
    """Any chunks, any policy, any cache that may hold it."""

    @settings(max_examples=150, deadline=None)
    @given(
        name=st.sampled_from(sorted(POLICIES)),
        mask=st.sampled_from(sorted(MASKS)),
        turned=st.booleans(),
        room=st.sampled_from([None, TOKENS, TOKENS + 9]),
        parts=schedules(),
        first=st.sampled_from([0, 1000]),
    )
    def test_equal_one_pass(self, name, mask, turned, room, parts, first):
        module, x = attention_of(name, MASKS[mask]), inputs(2)
        at = torch.arange(first, first + TOKENS)
        lengths = [TOKENS, 12] if name in BY_LENGTH else None
        whole = module(x, at, lengths=lengths)
        window = MASKS[mask].sliding_window
        cache = Cache(turned=turned, capacity=room, window=None if room else window)
        start = 0
        for part in parts:
            now = slice(start, start + part)
            assert apart(module(x[:, now], at[now], cache=cache, lengths=lengths), whole[:, now]) < 1e-9
            start += part
        if cache.window is not None:
            assert len(cache) == window - 1

    @pytest.mark.parametrize("turned", [True, False])
    @pytest.mark.parametrize("window", [3, 7, 100])
    @pytest.mark.parametrize("sinks", [0, 1, 4])
    def test_a_window_with_the_first_tokens(self, turned, window, sinks):
        module, x, at = attention_of("rope", Mask()), inputs(2), torch.arange(TOKENS)
        distance = at[:, None] - at
        whole = module(x, at, visible=((distance < window) | (at < sinks))[None])
        cache, start = Cache(turned=turned, window=window, sinks=sinks), 0
        for part in (1, 1, 9, 2, 1, 20, 1, 6):
            now = slice(start, start + part)
            assert apart(module(x[:, now], at[now], cache=cache), whole[:, now]) < 1e-9
            start += part
            assert len(cache) <= window - 1 + sinks


class TestRows:
    """Rows of different length, padded on either side, beside each other in one cache."""

    @settings(max_examples=60, deadline=None)
    @given(
        name=st.sampled_from(["rope", "alibi", "t5", "fire", "yarn, log-n"]),
        counts=st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=1, max_size=7),
        left=st.booleans(),
        turned=st.booleans(),
        window=st.sampled_from([None, 5]),
    )
    def test_each_row_as_alone(self, name, counts, left, turned, window):
        module, x = attention_of(name, Mask(sliding_window=window)), inputs(3)
        whole = module(x, torch.arange(TOKENS))
        cache, seen = Cache(turned=turned, window=window), [0, 0, 0]
        for step in counts:
            tokens = max(*step, 1)
            new, positions = (
                torch.zeros(3, tokens, WIDTH, dtype=torch.float64),
                torch.zeros(3, tokens, dtype=torch.long),
            )
            real = torch.zeros(3, tokens, dtype=torch.long)
            for row, count in enumerate(step):
                count = min(count, TOKENS - seen[row])
                here = slice(tokens - count, tokens) if left else slice(0, count)
                there = slice(seen[row], seen[row] + count)
                new[row, here], positions[row, here], real[row, here] = x[row, there], torch.arange(TOKENS)[there], 1
            out = module(new, positions, cache=cache, real=real)
            for row in range(3):
                count = int(real[row].sum())
                expected = whole[row, seen[row] : seen[row] + count]
                if count:
                    assert apart(out[row, real[row].bool()], expected) < 1e-9
                seen[row] += count
            assert cache.seen.tolist() == seen

    def test_rows_in_another_order(self):
        module, x, at = attention_of("alibi", Mask()), inputs(3), torch.arange(TOKENS)
        cache, rows = Cache(), torch.tensor([2, 2, 0, 1])
        module(x[:, :20], at[:20], cache=cache)
        cache.select(rows)
        whole = module(torch.cat((x[rows, :20], x[:1, 20:].expand(4, -1, -1)), 1), at)
        assert apart(module(x[:1, 20:].expand(4, -1, -1), at[20:], cache=cache), whole[:, 20:]) < 1e-9


class TestDrafts:
    """What is rejected leaves no trace."""

    @settings(max_examples=60, deadline=None)
    @given(
        name=st.sampled_from(["rope", "alibi", "t5", "gate"]),
        drafts=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=12),
        window=st.sampled_from([None, 6]),
        turned=st.booleans(),
    )
    def test_taken_back(self, name, drafts, window, turned):
        module, x, at = attention_of(name, Mask(sliding_window=window)), inputs(1), torch.arange(TOKENS)
        wrong = inputs(1).flip(1) * 3
        whole = module(x, at)
        cache, start = Cache(turned=turned, window=window, margin=4 if window else 0), 0
        for drafted, accepted in drafts:
            accepted = min(accepted, drafted, TOKENS - start)
            draft = torch.cat((x[:, start : start + accepted], wrong[:, : drafted - accepted]), 1)
            out = module(draft, torch.arange(start, start + drafted), cache=cache)
            assert not accepted or apart(out[:, :accepted], whole[:, start : start + accepted]) < 1e-9
            start += accepted
            cache.truncate(start)
            assert cache.seen.tolist() == [start]

    def test_each_row_its_own(self):
        module, x, at = attention_of("rope", Mask()), inputs(2), torch.arange(TOKENS)
        cache = Cache()
        module(x[:, :10], at[:10], cache=cache)
        cache.truncate(torch.tensor([4, 9]))
        positions = torch.stack((torch.arange(4, 9), torch.arange(9, 14)))
        new = torch.stack((x[0, 4:9], x[1, 9:14]))
        whole = module(x, at)
        assert apart(module(new, positions, cache=cache), torch.stack((whole[0, 4:9], whole[1, 9:14]))) < 1e-9

    def test_a_draft_longer_than_the_margin(self):
        module, x, at = attention_of("rope", Mask(sliding_window=6)), inputs(1), torch.arange(TOKENS)
        cache = Cache(window=6, margin=2)
        for start in range(0, 20, 5):
            module(x[:, start : start + 5], at[start : start + 5], cache=cache)
        cache.truncate(18)
        with pytest.raises(
            ValueError, match=r"length: got 17 for row 0, whose keys up to position 12 are gone .* margin"
        ):
            cache.truncate(17)

    @pytest.mark.parametrize("sinks", [0, 3])
    def test_back_to_the_sinks_and_on(self, sinks):
        module, x, at = attention_of("rope", Mask()), inputs(1), torch.arange(TOKENS)
        distance = at[:, None] - at
        whole = module(x, at, visible=((distance < 4) | (at < sinks))[None])
        cache = Cache(window=4, sinks=sinks)
        for back in range(sinks + 1):
            while len(cache) == 0 or int(cache.seen) < 20:
                now = slice(0 if cache.seen is None else int(cache.seen), 20)
                assert apart(module(x[:, now], at[now], cache=cache), whole[:, now]) < 1e-9
            for lost in (sinks + 1, 16):
                with pytest.raises(ValueError, match="are gone from a window of 4"):
                    cache.truncate(lost)
            cache.truncate(back)
            assert len(cache) == back


class TestWhatALayerSees:
    """A cache that drops what a layer's mask or map shows would change its output, and is refused."""

    @pytest.mark.parametrize(
        ("mask", "relative", "options", "words"),
        [
            (Mask(sliding_window=8), None, {"window": 7}, "its window of 7 drops keys that Mask"),
            (Mask(chunk=8), None, {"window": 7}, "its window of 7 drops keys that Mask"),
            (Mask(sliding_window=8), None, {"window": 8, "sinks": 2}, "hides the 2 sinks"),
            (Mask(), AttentionSinks(window=8, sinks=2), {"window": 7, "sinks": 2}, "drop keys that AttentionSinks"),
            (Mask(), AttentionSinks(window=8, sinks=2), {"window": 8}, "drop keys that AttentionSinks"),
            (Mask(), ReRoPE(window=8), {"window": 20}, "shows all keys, and a window drops some"),
        ],
    )
    def test_refused(self, mask, relative, options, words):
        module, x, at = attention_of("rope", mask), inputs(2), torch.arange(TOKENS)
        module.relative = relative
        with pytest.raises(ValueError, match=words):
            module(x, at, cache=Cache(turned=False, **options))

    def test_sinks_by_a_map(self):
        module, x, at = attention_of("rope", Mask()), inputs(2), torch.arange(TOKENS)
        module.relative = AttentionSinks(window=8, sinks=2)
        whole, cache = module(x, at), Cache(turned=False, window=8, sinks=2)
        for start in range(0, TOKENS, 5):
            now = slice(start, start + 5)
            assert apart(module(x[:, now], at[now], cache=cache), whole[:, now]) < 1e-9
        assert len(cache) == 9


class TestFrequencies:
    """Keys of one rotation are never read by queries of another."""

    def test_another_is_refused_or_the_keys_are_turned_again(self):
        one, x, at = attention_of("rope", Mask()), inputs(2), torch.arange(TOKENS)
        other = attention_of("rope", Mask())
        other.policy = Policy(rotate=rope(rope_theta=5000.0, scaling=YaRN(**SCALED)))
        cache = Cache()
        one(x[:, :20], at[:20], cache=cache)
        with pytest.raises(ValueError, match=r"cache: its keys were turned by .*100.0.* this layer turns by .*5000.0"):
            other(x[:, 20:], at[20:], cache=cache)
        cache.turn_to(other.policy)
        # One more rotation, by float32 tables of entries below 1.1.
        assert apart(other(x[:, 20:], at[20:], cache=cache), other(x, at)[:, 20:]) < 1e-5
        with pytest.raises(ValueError, match="cache: its keys were turned by"):
            one(x[:, 20:], at[20:], cache=cache)

    def test_lengths_that_change(self):
        module, x, at = attention_of("dynamic", Mask()), inputs(2), torch.arange(TOKENS)
        cache, plain = Cache(), Cache(turned=False)
        for kind in (cache, plain):
            module(x[:, :20], at[:20], cache=kind, lengths=[20, 20])
        with pytest.raises(
            ValueError, match=r"at lengths \[20, 20\], and this layer turns by .* at lengths \[41, 20\]"
        ):
            module(x[:, 20:], at[20:], cache=cache, lengths=[41, 20])
        out = module(x[:, 20:], at[20:], cache=plain, lengths=[41, 20])
        assert apart(out, module(x, at, lengths=[41, 20])[:, 20:]) < 1e-9

    @pytest.mark.parametrize(("turned", "tolerance"), [(True, 1e-5), (False, 1e-9)])
    def test_a_prefix_at_another_offset(self, turned, tolerance):
        module, x, at = attention_of("alibi", Mask()), inputs(2), torch.arange(TOKENS)
        cache = Cache(turned=turned)
        module(x[:, :20], at[:20], cache=cache)
        cache.move(500)
        assert cache.seen.tolist() == [520, 520]
        assert apart(module(x[:, 20:], 500 + at[20:], cache=cache), module(x, 500 + at)[:, 20:]) < tolerance

    def test_a_bias_that_reads_keys(self):
        module, x, at = attention_of("rope", Mask()), inputs(2), torch.arange(TOKENS)
        module.policy = Policy(rotate=rope(), bias=CoPE(HEADS, DIM, max_positions=64)).double().requires_grad_(False)
        torch.nn.init.normal_(module.policy.bias.pos_emb)
        with pytest.raises(ValueError, match=r"cache: CoPE reads keys as they were .*; use Cache\(turned=False\)"):
            module(x[:, :20], at[:20], cache=Cache())
        cache = Cache(turned=False)
        out = [module(x[:, now], at[now], cache=cache) for now in (slice(0, 9), slice(9, 20), slice(20, TOKENS))]
        assert apart(torch.cat(out, 1), module(x, at)) < 1e-9

    def test_what_is_no_plan_cannot_be_moved(self):
        module, x, at = attention_of("rope", Mask()), inputs(2), torch.arange(TOKENS)
        module.policy = Policy(rotate=XPos(Rotary(head_dim=DIM, rope_theta=100.0), centre=0))
        cache = Cache()
        module(x[:, :20], at[:20], cache=cache)
        assert apart(module(x[:, 20:], at[20:], cache=cache), module(x, at)[:, 20:]) < 1e-6
        with pytest.raises(ValueError, match=r"move: the keys were turned by XPos, .* use Cache\(turned=False\)"):
            cache.move(3)


class TestRefusals:
    """What would go wrong later is refused at once."""

    def test_full(self):
        module, x, at = attention_of("rope", Mask()), inputs(2), torch.arange(TOKENS)
        cache = Cache(capacity=22)
        module(x[:, :20], at[:20], cache=cache)
        with pytest.raises(ValueError, match="cache: 20 of its 22 slots are in use, and 3 tokens are to come"):
            module(x[:, 20:23], at[20:23], cache=cache)
        assert len(cache) == 20
        assert apart(module(x[:, 20:22], at[20:22], cache=cache), module(x, at)[:, 20:22]) < 1e-9

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"capacity": 0}, "capacity: got 0; it must be at least 1"),
            ({"window": 0}, "window: got 0"),
            ({"sinks": 4}, "window: got None with sinks=4"),
            ({"window": 4, "margin": -1}, "margin: got -1"),
        ],
    )
    def test_made_of(self, options, text):
        with pytest.raises(ValueError, match=text):
            Cache(**options)

    def test_another_batch_and_other_tokens(self):
        module, x, at = attention_of("rope", Mask()), inputs(2), torch.arange(TOKENS)
        cache = Cache()
        module(x[:, :20], at[:20], cache=cache)
        with pytest.raises(ValueError, match=r"k: got shape \(1, .*; the cache has \(2, 2, S, "):
            module(x[:1, 20:], at[20:], cache=cache)
        with pytest.raises(ValueError, match=r"k: got shape .*float32; the cache has .*float64"):
            cache.append(module.policy, torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 1, 16), at[20:21])
        with pytest.raises(ValueError, match=r"k: got shape \(2, 4, 1, 16\)"):
            cache.append(module.policy, *torch.zeros(2, 2, 4, 1, 16).double(), at[20:21])
        with pytest.raises(ValueError, match=r"positions: got shape \(3,\); 2 rows of 5 tokens are added"):
            module(x[:, 20:25], at[20:23], cache=cache)
        with pytest.raises(ValueError, match=r"real: got shape \(3, 5\); 2 rows of 5 tokens are added"):
            module(x[:, 20:25], at[20:25], cache=cache, real=torch.ones(3, 5, dtype=torch.bool))
        assert len(cache) == 20
        with pytest.raises(ValueError, match="cache: with one, x attends to itself"):
            module(x[:, 20:], at[20:], cache=cache, visible=torch.ones(1, 21, 41, dtype=torch.bool))
        for length in (1.5, -1, torch.tensor([3, -1]), torch.tensor([3])):
            with pytest.raises(ValueError, match=r"length: got .*; give a whole number of at least 0"):
                cache.truncate(length)

    def test_gradients(self):
        module, x, at = attention_of("rope", Mask()).requires_grad_(), inputs(2), torch.arange(TOKENS)
        with pytest.raises(ValueError, match=r"cache: keys and values ask for a gradient, .* use torch.no_grad\(\)"):
            module(x[:, :20], at[:20], cache=Cache())
        with torch.no_grad():
            module(x[:, :20], at[:20], cache=Cache())

    def test_padding_that_a_state_would_count(self):
        module, x, at = attention_of("gate", Mask()), inputs(2), torch.arange(TOKENS)
        cache = Cache()
        module(x[:, :20], at[:20], cache=cache)
        with pytest.raises(ValueError, match="real: ForgettingGate sums over tokens, and padding between"):
            module(x[:, 20:22], at[20:22], cache=cache, real=torch.tensor([[0, 1], [1, 1]]))
