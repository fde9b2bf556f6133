"""A text through a model in chunks: the same numbers however it is cut, and memory that does not grow where bounded."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from tests.models.tiny import logits, own_plan, tiny, tokens
from theodolite.models import LoadError, Stream, patch, patched, stream
from theodolite.models.kept import read_kept, write_kept
from theodolite.models.patch import current_plan
from theodolite.plan import ModelPlan
from theodolite.positions import AttentionSinks, DualChunk, LeakyReRoPE, LMInfinite, ReRoPE, SelfExtend

COUNT = 50


def log_probs(of: Tensor, ids: Tensor) -> Tensor:
    """Of logits (n, V): that of each token after the first."""
    return torch.log_softmax(of[:-1].double(), -1).gather(1, ids[1:, None])[:, 0]


def gathered(parts) -> Tensor:
    parts = list(parts)
    return torch.cat([part.log_probs for part in parts])


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


class Dense:
    """The definition, every pair written out in float64: what a stream with a window must give."""

    def __init__(self, plan: ModelPlan, window: int, sinks: int) -> None:
        self.plan, self.window, self.sinks = plan, window, sinks

    def __call__(self, module, query, key, value, attention_mask, scaling=None, s_aux=None, **kwargs):
        layer = self.plan.layers[module.layer_idx]
        q, k, v = query.double(), key.double(), value.double()
        group, count = q.shape[1] // k.shape[1], q.shape[2]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        at = torch.arange(count)
        distance = at[:, None] - at
        scores = q @ k.mT * scaling
        seen = (distance >= 0) & (distance < self.window) & (at >= self.sinks)
        if layer.mask.sliding_window is not None:
            seen &= distance < layer.mask.sliding_window
            seen |= (distance >= 0) & (distance < layer.mask.sliding_window) & (at < self.sinks)
        else:
            # Back to how queries were projected, and on to where they stand among what is kept.
            among = at.clamp(max=self.sinks + self.window - 1)
            moved = self.turn(self.turn(q, layer.rotate, -at), layer.rotate, among)
            first = moved @ k[:, :, : self.sinks].mT * scaling
            scores[..., : self.sinks] = first
            seen[:, : self.sinks] = distance[:, : self.sinks] >= 0
        scores = scores.masked_fill(~seen, -math.inf)
        if s_aux is not None:
            scores = torch.cat((scores, s_aux.double()[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
        out = torch.softmax(scores, -1)[..., :count] @ v
        return out.to(query.dtype).transpose(1, 2).contiguous(), None

    @staticmethod
    def turn(x: Tensor, rotary, positions: Tensor) -> Tensor:
        if rotary is None:
            return x
        half = rotary.rotary_dim // 2
        angle = positions[:, None].double() * torch.tensor(rotary.inv_freq())
        a, b = x[..., :half], x[..., half : 2 * half]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), -1)


def by_definition(model, ids: Tensor, window: int, sinks: int) -> Tensor:
    plan = own_plan(model)
    AttentionInterface.register("dense definition", Dense(plan, window, sinks))
    own = model.config._attn_implementation
    with patched(model, plan):
        model.set_attn_implementation("dense definition")
        try:
            return logits(model, ids[None])[0]
        finally:
            model.set_attn_implementation(own)


class TestEverythingKept:
    """Without a window it is transformers' one forward."""

    @pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2", "smollm3", "gpt_oss"])
    @pytest.mark.parametrize("chunk", [1, 7, 64])
    def test_equals_one_forward(self, family: str, chunk: int) -> None:
        model, ids = tiny(family, dtype=torch.float64), tokens(COUNT)[0]
        found = gathered(stream(model, ids, own_plan(model), chunk=chunk))
        with patched(model, own_plan(model)):
            true = log_probs(logits(model, ids[None])[0], ids)
        assert found.dtype == torch.float32
        assert apart(found, true) < 1e-5

    def test_hidden_states(self) -> None:
        model, ids = tiny("llama", dtype=torch.float64), tokens(COUNT)[0]
        parts = list(stream(model, ids, own_plan(model), chunk=16, states=True))
        assert [part.start for part in parts] == [0, 16, 32, 48]
        with patched(model, own_plan(model)), torch.inference_mode():
            true = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        assert apart(torch.cat([part.states for part in parts]), true) < 1e-9

    def test_the_model_is_as_it_was(self) -> None:
        model, ids = tiny("llama"), tokens(COUNT)[0]
        before = logits(model, ids[None])
        reading = stream(model, ids, own_plan(model), chunk=16)
        next(reading)
        assert current_plan(model) is None
        assert torch.equal(logits(model, ids[None]), before)
        assert len(list(reading)) == 3

    def test_the_plan_of_a_patched_model(self) -> None:
        model, ids = tiny("llama"), tokens(COUNT)[0]
        patch(model, own_plan(model))
        assert apart(gathered(stream(model, ids)), gathered(stream(model, ids, own_plan(model)))) == 0


class TestWindow:
    """A bounded cache: the definition, whatever the chunks."""

    @pytest.mark.parametrize(("window", "sinks"), [(1, 0), (8, 0), (8, 4), (3, 9), (60, 4), (16, 1)])
    @pytest.mark.parametrize("family", ["llama", "gemma3", "smollm3", "gpt_oss"])
    def test_equals_the_definition(self, family: str, window: int, sinks: int) -> None:
        model, ids = tiny(family, dtype=torch.float64), tokens(COUNT)[0]
        true = log_probs(by_definition(model, ids, window, sinks), ids)
        # Tables of float32, once more for the sinks.
        for chunk in (1, 5, 64):
            assert (
                apart(gathered(stream(model, ids, own_plan(model), window=window, sinks=sinks, chunk=chunk)), true)
                < 1e-5
            )

    def test_chunks_make_no_difference(self) -> None:
        model, ids = tiny("llama", dtype=torch.float64), tokens(COUNT)[0]
        states = [
            torch.cat([p.states for p in stream(model, ids, own_plan(model), window=8, chunk=chunk, states=True)])
            for chunk in (1, 3, 17, 64)
        ]
        assert all(apart(states[0], other) < 1e-9 for other in states[1:])
        wide = torch.cat([p.states for p in stream(model, ids, own_plan(model), window=COUNT, states=True)])
        assert apart(states[0], wide) > 1e-3

    def test_what_is_kept_does_not_grow(self) -> None:
        model, ids = tiny("llama"), tokens(300)[0]
        reading = Stream(model, own_plan(model), window=32, sinks=4, chunk=16)
        held = []
        for _ in reading.feed(ids):
            pairs = [pair for pair in (*reading._window.first, *reading._window.last) if pair is not None]
            held.append(sum(x.untyped_storage().nbytes() for pair in pairs for x in pair))
        assert held[-1] == held[3]
        assert held[-1] == 2 * len(own_plan(model).layers) * 35 * pairs[0][0].shape[1] * pairs[0][0].shape[3] * 4


MAPS = [
    ReRoPE(window=9),
    LeakyReRoPE(window=9, factor=4),
    SelfExtend(group_size=4, window=9),
    LMInfinite(window=9, sinks=3),
    AttentionSinks(window=9, sinks=3),
    DualChunk(chunk_size=16, local_size=4),
]


class Mapped(Dense):
    """Every score by its mapped distance, the queries and keys turned back to how they were projected first."""

    def __init__(self, plan: ModelPlan, relative, at: Tensor | None = None) -> None:
        self.plan, self.relative, self.at = plan, relative, at

    def __call__(self, module, query, key, value, attention_mask, scaling=None, s_aux=None, **kwargs):
        layer = self.plan.layers[module.layer_idx]
        group, count = query.shape[1] // key.shape[1], query.shape[2]
        at = torch.arange(count) if self.at is None else self.at
        q, k = (self.turn(x.double(), layer.rotate, -at) for x in (query, key))
        k, v = (x.double().repeat_interleave(group, 1) for x in (k, value))
        own = layer.mask.sliding_window
        distance = at[:, None] - at
        seen = distance >= 0 if own is None else (distance >= 0) & (distance < own)
        if own is None:
            distance, seen = self.relative.relative(at, at), seen & self.relative.seen(at, at)
        # A query turned by the distance over keys that are not turned.
        moved = torch.stack([self.turn(q, layer.rotate, distance[:, key]) for key in range(count)], dim=3)
        scores = ((moved * k[:, :, None]).sum(-1) * scaling).masked_fill(~seen, -math.inf)
        if s_aux is not None:
            scores = torch.cat((scores, s_aux.double()[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
        out = torch.softmax(scores, -1)[..., :count] @ v
        return out.to(query.dtype).transpose(1, 2).contiguous(), None


def at_mapped_distances(model, plan: ModelPlan, ids: Tensor, relative, at: Tensor | None = None) -> Tensor:
    """Logits (n, V) by the definition; `at` are the tokens' positions where they skip some."""
    AttentionInterface.register("dense definition", Mapped(plan, relative, at))
    own = model.config._attn_implementation
    with patched(model, plan):
        model.set_attn_implementation("dense definition")
        try:
            return logits(model, ids[None], position_ids=None if at is None else at[None])[0]
        finally:
            model.set_attn_implementation(own)


class TestMappedDistances:
    """ReRoPE and its kin in a model of transformers."""

    @pytest.mark.parametrize("relative", MAPS, ids=lambda relative: type(relative).__name__)
    @pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
    def test_equals_the_definition(self, family: str, relative) -> None:
        model, ids = tiny(family, dtype=torch.float64), tokens(COUNT)[0]
        plan = own_plan(model)
        true = log_probs(at_mapped_distances(model, plan, ids, relative), ids)
        plain = log_probs(by_definition(model, ids, COUNT, 0), ids)
        for chunk in (1, 7, 64):
            assert apart(gathered(stream(model, ids, plan, relative=relative, chunk=chunk)), true) < 1e-5
        assert apart(plain, true) > 1e-4

    def test_attention_sinks_are_a_stream_with_a_window(self) -> None:
        model, ids = tiny("llama", dtype=torch.float64), tokens(COUNT)[0]
        plan = own_plan(model)
        mapped = gathered(stream(model, ids, plan, relative=AttentionSinks(window=9, sinks=3)))
        assert apart(mapped, gathered(stream(model, ids, plan, window=9, sinks=3))) < 1e-6

    def test_saved_and_refused(self, tmp_path) -> None:
        model, ids = tiny("llama", dtype=torch.float64), tokens(COUNT)[0]
        plan = own_plan(model)
        whole = gathered(stream(model, ids, plan, relative=MAPS[2]))
        one, two = (Stream(model, plan, relative=MAPS[2], chunk=10) for _ in range(2))
        found = [gathered(one.feed(ids[:31]))]
        one.save(tmp_path / "kept")
        two.resume(tmp_path / "kept")
        assert apart(torch.cat((*found, gathered(two.feed(ids[31:])))), whole) < 1e-6
        with pytest.raises(LoadError, match="it is of another relative"):
            Stream(model, plan).resume(tmp_path / "kept")
        with pytest.raises(ValueError, match="relative: got a map of distances and a window"):
            Stream(model, plan, relative=MAPS[0], window=8)
        with pytest.raises(ValueError, match="relative: this model has layers that turn nothing"):
            Stream(tiny("smollm3"), own_plan(tiny("smollm3")), relative=MAPS[0])


class TestPieces:
    """A text that comes in parts, and a run that was killed."""

    @pytest.mark.parametrize("window", [None, 8])
    @pytest.mark.parametrize("cuts", [(1, 2, 47), (20, 30), (49, 1), (0, 50, 0)])
    def test_fed_in_parts(self, window, cuts) -> None:
        model, ids = tiny("llama", dtype=torch.float64), tokens(COUNT)[0]
        whole = gathered(stream(model, ids, own_plan(model), window=window, chunk=11))
        reading, start, found = Stream(model, own_plan(model), window=window, chunk=11), 0, []
        for cut in cuts:
            for part in reading.feed(ids[start : start + cut]):
                assert part.start == 1 + sum(len(x) for x in found)
                found.append(part.log_probs)
            start += cut
            assert reading.length == start
        assert apart(torch.cat(found), whole) < 1e-6

    @pytest.mark.parametrize("window", [None, 8])
    def test_resumed(self, window, tmp_path) -> None:
        model, ids = tiny("llama", dtype=torch.float64), tokens(COUNT)[0]
        whole = gathered(stream(model, ids, own_plan(model), window=window, chunk=10))
        reading = Stream(model, own_plan(model), window=window, chunk=10)
        parts = reading.feed(ids)
        found = [next(parts).log_probs, next(parts).log_probs]
        reading.save(tmp_path / "kept")
        assert not list(tmp_path.glob("*.part"))
        again = Stream(model, own_plan(model), window=window, chunk=10)
        again.resume(tmp_path / "kept")
        assert again.length == 21
        found.append(gathered(again.feed(ids[again.length :])))
        assert apart(torch.cat(found), whole) < 1e-6

    def test_what_is_not_its_own_is_refused(self, tmp_path) -> None:
        model, ids = tiny("llama"), tokens(COUNT)[0]
        plan, path = own_plan(model), tmp_path / "kept"
        reading = Stream(model, plan, window=8)
        list(reading.feed(ids))
        reading.save(path)
        for other, text in (
            (Stream(model, plan, window=9), "it is of another window: 8, and what is asked for has 9"),
            (Stream(model, plan), "it is of another window: 8, and what is asked for has None"),
            (
                Stream(
                    tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 5.0}),
                    own_plan(tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 5.0})),
                    window=8,
                ),
                "it is of another plan$",
            ),
            (Stream(tiny("llama", dtype=torch.float64), plan, window=8), "it is of another (weights|dtype)"),
        ):
            with pytest.raises(LoadError, match=text):
                other.resume(path)
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(LoadError, match="it cannot be read as a saved stream"):
            Stream(model, plan, window=8).resume(path)
        with pytest.raises(LoadError, match="there is no such file"):
            Stream(model, plan, window=8).resume(tmp_path / "none")

    def test_what_was_changed_is_refused(self, tmp_path) -> None:
        model, path = tiny("llama"), tmp_path / "kept"
        plan, identity = own_plan(model), Stream(tiny("llama"), own_plan(tiny("llama")))._identity()
        reading = Stream(model, plan)
        list(reading.feed(tokens(COUNT)[0]))
        reading.save(path)
        tensors, state = read_kept(path, "a saved stream", identity)
        for changed in (
            {name: x for name, x in tensors.items() if name != "v.1"},
            {**tensors, "k.0": tensors["k.0"][:, :, 1:]},
            {**tensors, "k.0": tensors["k.0"].double()},
        ):
            write_kept(path, "a saved stream", changed, identity, **state)
            again = Stream(model, plan)
            with pytest.raises(LoadError, match=r"layer [01] is not as it was written"):
                again.resume(path)
            assert again.length == 0
        write_kept(path, "a saved document", tensors, identity, **state)
        with pytest.raises(LoadError, match="it is no saved stream of this version"):
            Stream(model, plan).resume(path)

    def test_a_write_that_fails_leaves_the_old_file(self, tmp_path, monkeypatch) -> None:
        model, path = tiny("llama"), tmp_path / "kept"
        reading = Stream(model, own_plan(model))
        list(reading.feed(tokens(COUNT)[0]))
        reading.save(path)
        before = path.read_bytes()

        def full(*args: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            reading.save(path)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]


class TestRefusals:
    """What cannot be streamed is said before anything is read."""

    def test_arguments(self) -> None:
        model = tiny("llama")
        plan = own_plan(model)
        for options, text in (
            ({"window": 0}, "window: got 0; it must be at least 1"),
            ({"chunk": 0}, "chunk: got 0"),
            ({"sinks": -1, "window": 4}, "sinks: got -1"),
        ):
            with pytest.raises(ValueError, match=text):
                Stream(model, plan, **options)
        with pytest.raises(ValueError, match="plan: got None, and the model is not patched"):
            Stream(model)
        with pytest.raises(ValueError, match=r"tokens: got torch\.float32; give integers"):
            list(Stream(model, plan).feed(torch.zeros(4)))

    def test_states_after_log_probabilities(self) -> None:
        model, ids = tiny("llama"), tokens(COUNT)[0]
        reading = Stream(model, own_plan(model))
        list(reading.feed(ids))
        with pytest.raises(ValueError, match="states: this stream has given log-probabilities so far"):
            list(reading.feed(ids, states=True))
