"""What every bias that reads queries and keys must withstand: dtypes, casts, compilers, frameworks, long inputs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.profiler import ProfilerActivity, profile

from tests.encodings.bias.content_cases import BIASES, HEADS, HIDDEN, made, rows_of_positions, vectors
from theodolite.encodings.bias import content
from theodolite.encodings.bias.cope import CoPE
from theodolite.encodings.bias.deberta import DisentangledBias
from theodolite.encodings.bias.shaw import ShawBias
from theodolite.encodings.bias.transformer_xl import TransformerXLBias

LEARNED = {
    "transformer-xl": ["r_w_bias", "r_r_bias", "r_net.weight"],
    "deberta": [
        "rel_embeddings.weight",
        "pos_key_proj.weight",
        "pos_key_proj.bias",
        "pos_query_proj.weight",
        "pos_query_proj.bias",
    ],
    "shaw": ["relative_keys", "relative_values"],
    "cope": ["pos_emb"],
}


@pytest.fixture(params=BIASES)
def name(request):
    return request.param


def inputs(q_tokens=5, k_tokens=9, dtype=torch.float32):
    q, k = vectors(q_tokens, k_tokens, dtype=dtype)
    return (*rows_of_positions(q_tokens, k_tokens), q, k)


def dense(bias, q_positions, k_positions, q, k):
    return bias.dense(q_positions, k_positions, q=q, k=k)


def same(one, other):
    """A compiler may sum in another order: 32 terms, of a total below 256, each rounded by 2^-24."""
    torch.testing.assert_close(one, other, rtol=0, atol=32 * 256 * 2**-24)


class Caller(torch.nn.Module):
    """What is compiled and exported: a layer that asks for the bias."""

    def __init__(self, bias):
        super().__init__()
        self.bias = bias

    def forward(self, q_positions, k_positions, q, k):
        return self.bias.dense(q_positions, k_positions, q=q, k=k)


class TestEveryBias:
    """The promises of the place, one by one."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @torch.no_grad()
    def test_half_precision_content(self, name, dtype):
        bias, (*at, q, k) = made(name), inputs(dtype=dtype)
        out = dense(bias, *at, q, k)
        assert out.dtype == torch.float32
        assert torch.equal(out, dense(bias, *at, q.float(), k.float()))

    @torch.no_grad()
    def test_float64(self, name):
        bias, given = made(name), inputs(dtype=torch.float64)
        assert dense(bias, *given).dtype == torch.float64
        assert torch.equal(dense(bias, *given), dense(made(name).double(), *given))

    def test_under_autocast(self, name):
        bias, given = made(name), inputs()
        expected = dense(bias, *given)
        given[2].requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = dense(bias, *given)
            out.sum().backward()
        assert torch.equal(out, expected)
        inside, given[2].grad = given[2].grad, None
        dense(bias, *given).sum().backward()
        assert torch.equal(inside, given[2].grad)

    @pytest.mark.parametrize("cast", ["half", "bfloat16"])
    @torch.no_grad()
    def test_casts(self, name, cast):
        """What is learned is rounded once; the work stays at full precision."""
        narrow, given = getattr(made(name), cast)(), inputs()
        assert torch.equal(dense(narrow, *given), dense(copy.deepcopy(narrow).float(), *given))

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
    @torch.no_grad()
    def test_small_integers_do_not_wrap(self, name, dtype):
        bias, (q, k) = made(name), vectors(3, 5, dtype=torch.float32)
        at = torch.tensor([0, 1, 250]), torch.tensor([0, 2, 50, 110, 255])
        assert torch.equal(dense(bias, *(x.to(dtype) for x in at), q, k), dense(bias, *at, q, k))

    def test_from_the_meta_device(self, name):
        with torch.device("meta"):
            bias = BIASES[name]()
        given = inputs()
        assert dense(bias, *(x.to("meta") for x in given)).shape == (2, HEADS, 5, 9)
        bias.to_empty(device="cpu")
        for parameter in bias.parameters():
            torch.nn.init.constant_(parameter, torch.nan)
        torch.manual_seed(3)
        bias.reset_parameters()
        torch.manual_seed(3)
        for parameter, other in zip(bias.parameters(), _fresh(name).parameters(), strict=True):
            assert torch.equal(parameter, other)
        assert torch.isfinite(dense(bias, *given)).all()

    @torch.no_grad()
    def test_compiled_for_any_length(self, name):
        torch._dynamo.reset()
        bias, counter = Caller(made(name)), CompileCounter()
        compiled = torch.compile(bias, fullgraph=True, dynamic=True, backend=counter)
        # Not 8 first: sizes that are equal at the first call, as tokens and channels, are taken to be one.
        for tokens in (9, 8, 23, 64):
            given = inputs(tokens, tokens + 3)
            same(compiled(*given), bias(*given))
        assert counter.frame_count == 1

    @torch.no_grad()
    def test_exported_for_any_length(self, name):
        bias, given = Caller(made(name)), inputs(16, 19)
        q_tokens, k_tokens = (torch.export.Dim(side, min=2, max=4096) for side in ("q_tokens", "k_tokens"))
        shapes = {
            "q_positions": {1: q_tokens},
            "k_positions": {1: k_tokens},
            "q": {2: q_tokens},
            "k": {2: k_tokens},
        }
        exported = torch.export.export(bias, given, dynamic_shapes=shapes).module()
        for tokens in (16, 61):
            given = inputs(tokens, tokens + 7)
            same(exported(*given), bias(*given))

    def test_training_after_inference(self, name):
        bias, (*at, q, k) = made(name), inputs()
        with torch.inference_mode():
            first = dense(bias, *at, q, k)
        out = dense(bias, *at, q.requires_grad_(), k)
        out.square().sum().backward()
        assert torch.equal(out, first)
        assert q.grad.abs().min() > 0
        for learned, parameter in bias.named_parameters():
            assert learned == "relative_values" or parameter.grad.abs().max() > 0

    def test_state_dict_holds_what_is_learned(self, name):
        bias = BIASES[name]()
        assert list(bias.state_dict()) == LEARNED[name.split(" ")[0].split("-v2")[0]]
        assert list(bias.buffers()) == []

    @torch.no_grad()
    def test_copied_pickled_and_shown(self, name):
        bias, given = made(name), inputs()
        for other in (copy.deepcopy(bias), pickle.loads(pickle.dumps(bias))):
            assert torch.equal(dense(other, *given), dense(bias, *given))
        assert "num_heads=4, head_dim=8, " in repr(bias)

    @pytest.mark.parametrize(("q_tokens", "k_tokens"), [(0, 9), (5, 0), (1, 1)])
    def test_no_token_and_one(self, name, q_tokens, k_tokens):
        *at, q, k = inputs(q_tokens, k_tokens)
        out = dense(made(name), *at, q.requires_grad_(), k)
        assert out.shape == (2, HEADS, q_tokens, k_tokens)
        out.sum().backward()
        assert q.grad.shape == q.shape

    def test_shapes_that_do_not_fit(self, name):
        *at, q, k = inputs()
        bias = made(name)
        with pytest.raises(ValueError, match=r"q: got shape \(2, 4, 4, 8\); the positions and head_dim ask for \(2, 4"):
            dense(bias, *at, q[:, :, :4], k)
        with pytest.raises(ValueError, match="q: got 3 heads; there are 4 query heads"):
            dense(bias, *at, q[:, :3], k)
        with pytest.raises(ValueError, match="positions: got 2 rows; q has 1, give one for all or one each"):
            dense(bias, *at, q[:1], k[:1])
        if "k" in bias.reads:
            with pytest.raises(ValueError, match="k: got 3 heads; there are 4 query heads"):
                dense(bias, *at, q, torch.cat((k, k), dim=1)[:, :3])
            with pytest.raises(ValueError, match="k: got shape"):
                dense(bias, *at, q, k[:1])


class TestBlocksChangeNothing:
    """Whoever has more memory gets the same numbers."""

    @pytest.fixture
    def small_blocks(self, monkeypatch):
        """Blocks of two rows, the last one shorter."""
        monkeypatch.setattr(content, "_BLOCK", 1)
        monkeypatch.setattr(content, "_PARTS", 2)

    def test_values_and_gradients(self, name, small_blocks, monkeypatch):
        results = []
        for parts in (2, 1):
            monkeypatch.setattr(content, "_PARTS", parts)
            bias, (*at, q, k) = made(name, torch.float64), inputs(5, 9, torch.float64)
            out = dense(bias, *at, q.requires_grad_(), k.requires_grad_())
            weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
            (out * weight).sum().backward()
            grads = [p.grad for p in bias.parameters() if p.grad is not None]
            results.append([out.detach(), q.grad, *([] if k.grad is None else [k.grad]), *grads])
        assert len(results[0]) == len(results[1]) > 2
        for one, other in zip(*results, strict=True):
            # Sums of at most 5 x 9 x 8 terms in float64, in another order.
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)

    def test_one_frozen_parameter(self, name, small_blocks):
        bias, given = made(name), inputs()
        first = next(iter(bias.parameters()))
        first.requires_grad_(False)
        out = dense(bias, *(x.requires_grad_(x.is_floating_point()) for x in given))
        out.sum().backward()
        assert first.grad is None


LARGE = {
    "transformer-xl": lambda: TransformerXLBias(HEADS, 16, hidden_size=64, clamp_length=100),
    "deberta-v2": lambda: DisentangledBias(
        HEADS, 16, hidden_size=HIDDEN, max_relative_positions=512, position_buckets=256
    ),
    "shaw": lambda: ShawBias(HEADS, 16, 128),
    "cope": lambda: CoPE(HEADS, 16, 64),
}


class TestMemory:
    """No form holds more than its own output, forward and backward; functions of pairs hold no tensor of all pairs."""

    @pytest.mark.parametrize("name", LARGE)
    @pytest.mark.parametrize(("q_tokens", "k_tokens"), [(1024, 1024), (150, 4096)])
    def test_peak(self, name, q_tokens, k_tokens):
        bias, size = LARGE[name](), HEADS * q_tokens * k_tokens * 4
        q, k = (torch.randn(1, HEADS, tokens, 16, requires_grad=True) for tokens in (q_tokens, k_tokens))
        at = torch.arange(k_tokens - q_tokens, k_tokens), torch.arange(k_tokens)
        out, peak, kept = _allocated(lambda: dense(bias, *at, q, k))
        assert size <= peak < 2 * size
        # Kept for the backward: what belongs to queries and to keys.
        assert kept < 1.25 * size
        grad = torch.ones_like(out)
        _, peak, _ = _allocated(lambda: out.backward(grad))
        assert peak < size

    @pytest.mark.parametrize("name", ["deberta-v2", "shaw"])
    @torch.no_grad()
    def test_functions_of_pairs(self, name):
        bias, tokens = LARGE[name](), 2048
        q, k, at = torch.randn(1, HEADS, tokens, 16), torch.randn(1, HEADS, tokens, 16), torch.arange(tokens)
        mod, peak, _ = _allocated(lambda: bias.score_mod(at, at, q=q, k=k))
        rows = 2 * HEADS * tokens * 512 * 4 if name == "deberta-v2" else HEADS * tokens * 257 * 4
        assert peak < 1.25 * rows < HEADS * tokens * tokens * 4
        del mod


def _fresh(name):
    bias = BIASES[name]()
    torch.manual_seed(3)
    bias.reset_parameters()
    return bias


def _allocated(work):
    """What `work` gives, the bytes allocated at its peak, and those that are left after it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = work()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return result, peak, live
