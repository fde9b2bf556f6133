"""Reading in chunks, at any positions, with looks aside, is the plain forward cut up and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from theodolite.models import patched
from theodolite.models.reader import Reader, Scores
from theodolite.plan import Linear, ModelPlan

from .tiny import FAMILIES, logits, own_plan, tiny, tokens

LENGTH = 150
# Windows, chunks and temperatures that show within LENGTH tokens.
SHORT: dict[str, dict[str, Any]] = {
    **{family: {"sliding_window": 24} for family in ("mistral", "gemma2", "gemma3", "olmo3", "cohere2", "gpt_oss")},
    **{family: {"sliding_window": 24} for family in ("starcoder2", "exaone4")},
    "llama4": {"attention_chunk_size": 24, "floor_scale": 8},
}
ATTENTION_ONLY = [family for family in FAMILIES if family != "qwen3_next"]
WINDOWED = list(SHORT)
CHUNKS = (1, 7, 64, LENGTH)
# Two layers of 64 channels in float32: each nll is a sum of some 1,000 terms whose roundings (6e-8 of numbers up
# to 5) add up like a walk, sqrt(1000) * 6e-8 * 5 = 1e-5. The spread of nll over tokens is 0.4.
ROUNDED = 1e-5
CUE, PROBE = 3, 11


def model_and_plan(family: str) -> tuple[Any, ModelPlan]:
    model = tiny(family, **SHORT.get(family, {}))
    return model, own_plan(model).at_length(LENGTH)


def nll_of(all_logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(all_logits.double(), targets, reduction="none")


def read(model: Any, plan: ModelPlan, ids: Tensor, positions: Tensor, chunk: int) -> Scores:
    """All of `ids` (S + 1,) but the last read at `positions` (S,)."""
    with Reader(model, plan, capacity=len(positions), chunk=chunk) as reader:
        scores = reader.read(ids[:-1], positions, targets=ids[1:])
    assert scores is not None
    return scores


def worst(scores: Scores, nll: Tensor) -> float:
    return float((scores.nll.double() - nll).abs().max())


def masks_by_position(plan: ModelPlan, positions: Tensor) -> list[Tensor]:
    """For each layer which keys (S, T) a query sees when windows and chunks are of positions."""
    distance = positions[:, None] - positions[None, :]
    made = []
    for layer in plan.layers:
        seen = torch.ones(len(positions), len(positions), dtype=torch.bool).tril()
        if layer.mask.sliding_window is not None:
            seen &= distance < layer.mask.sliding_window
        if layer.mask.chunk is not None:
            seen &= positions[:, None] // layer.mask.chunk == positions[None, :] // layer.mask.chunk
        made.append(seen)
    return made


def plain_logits(model: Any, plan: ModelPlan, ids: Tensor, positions: Tensor) -> Tensor:
    """Logits (S, V) of transformers' own attention over `ids` (S,) at `positions` (S,), masks put in by hand."""
    additive = [
        torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        for seen in masks_by_position(plan, positions)
    ]

    def give_mask(index: int) -> Any:
        return lambda layer, args, kwargs: (args, {**kwargs, "attention_mask": additive[index]})

    hooks = [
        layer.register_forward_pre_hook(give_mask(i), with_kwargs=True) for i, layer in enumerate(model.model.layers)
    ]
    try:
        return logits(model, ids[None], position_ids=positions[None], attention_mask=torch.ones(1, len(ids)))[0]
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("family", ATTENTION_ONLY)
class TestChunks:
    """The size of a chunk is a matter of memory: no number depends on it."""

    def test_nll_equals_one_plain_forward(self, family: str) -> None:
        model, plan = model_and_plan(family)
        ids = tokens(LENGTH + 1)[0]
        expected = nll_of(logits(model, ids[None, :-1])[0], ids[1:])
        assert float(expected.std()) > 0.1
        for chunk in CHUNKS:
            assert worst(read(model, plan, ids, torch.arange(LENGTH), chunk), expected) < ROUNDED, chunk

    def test_probes_equal_plain_forwards_of_prefix_and_probe(self, family: str) -> None:
        model, plan = model_and_plan(family)
        ids, probes = tokens(LENGTH)[0], tokens(PROBE, batch=5, seed=2)
        with Reader(model, plan, capacity=LENGTH, chunk=2 * PROBE) as reader:
            reader.read(ids, torch.arange(LENGTH))
            positions = torch.arange(LENGTH, LENGTH + PROBE).expand(5, -1)
            scores = reader.probe(probes, positions, cue=CUE)
        assert scores.nll.shape == scores.correct.shape == (5, PROBE - CUE)
        for row, probe in enumerate(probes):
            whole = torch.cat((ids, probe))
            after = logits(model, whole[None, :-1])[0, LENGTH + CUE - 1 :]
            assert float((scores.nll[row].double() - nll_of(after, probe[CUE:])).abs().max()) < ROUNDED
            assert torch.equal(scores.correct[row], after.argmax(-1) == probe[CUE:])


class TestPositions:
    """Positions are data: skipped ones count as distance, in angles, in windows and in temperatures."""

    @pytest.mark.parametrize("family", ["llama", *(f for f in WINDOWED if f != "llama4")])
    @pytest.mark.parametrize("chunk", [7, LENGTH])
    def test_skipped_positions_in_reading(self, family: str, chunk: int) -> None:
        model, plan = model_and_plan(family)
        ids = tokens(LENGTH + 1)[0]
        positions = torch.arange(LENGTH) + 13 * (torch.arange(LENGTH) // 10)
        expected = nll_of(plain_logits(model, plan, ids[:-1], positions), ids[1:])
        assert float((expected - nll_of(logits(model, ids[None, :-1])[0], ids[1:])).abs().max()) > 1e-2
        assert worst(read(model, plan, ids, positions, chunk), expected) < ROUNDED

    @pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox", "deepseek_v3", "smollm3"])
    def test_probes_at_several_distances_in_one_call(self, family: str) -> None:
        model, plan = model_and_plan(family)
        ids, probe = tokens(40)[0], tokens(PROBE, seed=2)
        gaps = torch.tensor([0, 5, 30, 1000])
        with Reader(model, plan, capacity=40) as reader:
            reader.read(ids, torch.arange(40))
            scores = reader.probe(probe.expand(4, -1), 40 + gaps[:, None] + torch.arange(PROBE), cue=CUE)
        for row, gap in enumerate(gaps):
            whole = torch.cat((ids, probe[0]))[:-1]
            positions = torch.cat((torch.arange(40), 40 + gap + torch.arange(PROBE)))[:-1]
            if family == "gpt_neox":
                after = logits(model, whole[None], position_ids=positions[None], attention_mask=torch.ones(1, 50))[0]
            else:
                after = plain_logits(model, plan, whole, positions)
            expected = nll_of(after[40 + CUE - 1 :], probe[0, CUE:])
            assert float((scores.nll[row].double() - expected).abs().max()) < ROUNDED

    def test_llama4_temperature_is_of_positions(self) -> None:
        model, plan = model_and_plan("llama4")
        ids = tokens(LENGTH)[0]
        expected = nll_of(logits(model, ids[None, :-1])[0, 100:], ids[101:])
        hot = read(model, plan, ids, torch.arange(LENGTH - 1), 10)
        assert float((hot.nll[100:].double() - expected).abs().max()) < ROUNDED
        flat = tiny("llama4", **SHORT["llama4"], attn_temperature_tuning=False)
        cold = read(flat, own_plan(flat), ids, torch.arange(LENGTH - 1), 10)
        assert float((cold.nll - hot.nll).abs().max()) > 1e-3
        assert all(getattr(m, "attn_temperature_tuning", True) for m in model.modules())


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
class TestNoTrace:
    """A look aside leaves nothing behind, and sees nothing of another look."""

    def test_reading_goes_on_bit_for_bit(self, family: str) -> None:
        model, plan = model_and_plan(family)
        ids, half = tokens(LENGTH + 1)[0], 63
        undisturbed = read(model, plan, ids, torch.arange(LENGTH), half)
        with Reader(model, plan, capacity=LENGTH, chunk=half) as reader:
            rows = []
            for begin in range(0, LENGTH, half):
                part = slice(begin, min(begin + half, LENGTH))
                scores = reader.read(ids[part], torch.arange(LENGTH)[part], targets=ids[1:][part])
                assert scores is not None
                rows.append(scores.nll)
                before = reader.length
                reader.probe(tokens(PROBE, batch=3, seed=3), torch.arange(PROBE).expand(3, -1) + 4000, cue=CUE)
                assert reader.length == before
        assert torch.equal(torch.cat(rows), undisturbed.nll)

    def test_probes_do_not_see_each_other(self, family: str) -> None:
        model, plan = model_and_plan(family)
        probes = tokens(PROBE, batch=4, seed=2)
        positions = 60 + torch.arange(PROBE).expand(4, -1)
        with Reader(model, plan, capacity=60) as reader:
            reader.read(tokens(60)[0], torch.arange(60))
            together = reader.probe(probes, positions, cue=CUE).nll
            probes[1:] = tokens(PROBE, batch=3, seed=9)
            assert float((reader.probe(probes, positions, cue=CUE).nll[0] - together[0]).abs().max()) < ROUNDED
            alone = reader.probe(probes[:1], positions[:1], cue=CUE).nll[0]
        assert float((alone - together[0]).abs().max()) < ROUNDED

    def test_forget(self, family: str) -> None:
        model, plan = model_and_plan(family)
        ids, other = tokens(LENGTH + 1)[0], tokens(LENGTH, seed=8)[0]
        expected = read(model, plan, ids, torch.arange(LENGTH), 50)
        with Reader(model, plan, capacity=LENGTH, chunk=50) as reader:
            reader.read(ids[:50], torch.arange(50))
            reader.read(other[:80], torch.arange(1000, 1080))
            reader.forget(50)
            scores = reader.read(ids[50:-1], torch.arange(50, LENGTH), targets=ids[51:])
            assert scores is not None
            assert torch.equal(scores.nll, expected.nll[50:])
            reader.forget()
            assert reader.length == 0
            again = reader.read(ids[:-1], torch.arange(LENGTH), targets=ids[1:])
            assert again is not None
            assert torch.equal(again.nll, expected.nll)

    def test_probes_with_nothing_read(self, family: str) -> None:
        model, plan = model_and_plan(family)
        probes = tokens(PROBE, batch=2, seed=2)
        with Reader(model, plan, capacity=1) as reader:
            scores = reader.probe(probes, torch.arange(PROBE).expand(2, -1), cue=CUE)
        for row, probe in enumerate(probes):
            expected = nll_of(logits(model, probe[None, :-1])[0, CUE - 1 :], probe[CUE:])
            assert float((scores.nll[row].double() - expected).abs().max()) < ROUNDED


class TestModelIsGivenBack:
    """Reading borrows a model: after it, even after an error, the model is what it was."""

    @pytest.mark.parametrize("own", ["sdpa", "eager"])
    def test_attention_is_restored(self, own: str) -> None:
        model, plan = model_and_plan("gemma3")
        model.set_attn_implementation(own)
        ids = tokens(40)
        before = logits(model, ids)

        def fail() -> None:
            with Reader(model, plan, capacity=40) as reader:
                reader.read(ids[0], torch.arange(40))
                assert model.config._attn_implementation == "theodolite"
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert model.config._attn_implementation == own
        assert torch.equal(logits(model, ids), before)

    def test_after_an_error_inside_the_forward_reading_can_go_on(self) -> None:
        model, plan = model_and_plan("llama")
        ids = tokens(60)[0]
        expected = read(model, plan, ids, torch.arange(59), 20)
        with Reader(model, plan, capacity=59, chunk=20) as reader:
            reader.read(ids[:20], torch.arange(20))
            with pytest.raises(IndexError):
                reader.read(torch.full((20,), 10**6), torch.arange(20, 40))
            scores = reader.read(ids[20:-1], torch.arange(20, 59), targets=ids[21:])
        assert scores is not None
        assert torch.equal(scores.nll, expected.nll[20:])

    def test_llama4_keeps_its_temperature_after_an_error(self) -> None:
        model, plan = model_and_plan("llama4")
        before = logits(model, tokens(60))
        with pytest.raises(ZeroDivisionError), Reader(model, plan, capacity=1):
            raise ZeroDivisionError
        assert torch.equal(logits(model, tokens(60)), before)

    def test_patched_and_not_side_by_side(self) -> None:
        plain, other = tiny("llama"), tiny("llama")
        plan = own_plan(plain)
        scaled, ids = plan.with_scaling(Linear(factor=2.0)), tokens(LENGTH + 1)[0]
        # Without a mask, transformers takes a step between positions that is not 1 for the start of another document.
        halved = {"position_ids": torch.arange(LENGTH)[None] / 2, "attention_mask": torch.ones(1, LENGTH)}
        half = nll_of(logits(plain, ids[None, :-1], **halved)[0], ids[1:])
        whole = nll_of(logits(plain, ids[None, :-1])[0], ids[1:])
        with (
            patched(other, scaled),
            Reader(plain, plan, capacity=LENGTH, chunk=40) as a,
            Reader(other, scaled, capacity=LENGTH, chunk=40) as b,
        ):
            rows: list[list[Tensor]] = [[], []]
            for begin in range(0, LENGTH, 40):
                part = slice(begin, min(begin + 40, LENGTH))
                for reader, row in zip((a, b), rows, strict=True):
                    scores = reader.read(ids[part], torch.arange(LENGTH)[part], targets=ids[1:][part])
                    assert scores is not None
                    row.append(scores.nll)
        assert float((torch.cat(rows[0]).double() - whole).abs().max()) < ROUNDED
        assert float((torch.cat(rows[1]).double() - half).abs().max()) < ROUNDED
        assert float((half - whole).abs().max()) > 1e-2


class TestBoundary:
    """What cannot be read is an error that says so, never a wrong number."""

    def test_capacity(self) -> None:
        model, plan = model_and_plan("llama")
        with Reader(model, plan, capacity=10) as reader:
            reader.read(tokens(8)[0], torch.arange(8))
            with pytest.raises(ValueError, match="tokens: 3 more do not fit; 8 of 10 are taken"):
                reader.read(tokens(3)[0], torch.arange(8, 11))
            assert reader.length == 8
            reader.read(tokens(2)[0], torch.arange(8, 10))

    def test_recurrent_layers(self) -> None:
        model = tiny("qwen3_next")
        with pytest.raises(ValueError, match=r"Qwen3NextForCausalLM has layers with a recurrent state .*\(layers 0, 1"):
            Reader(model, own_plan(model), capacity=1).__enter__()
        assert model.config._attn_implementation == "sdpa"

    def test_a_cue_is_needed(self) -> None:
        model, plan = model_and_plan("llama")
        with Reader(model, plan, capacity=1) as reader:
            for cue in (0, PROBE):
                with pytest.raises(ValueError, match=f"cue: got {cue}; 1 to {PROBE - 1} tokens"):
                    reader.probe(tokens(PROBE), torch.arange(PROBE)[None], cue=cue)

    def test_numbers_that_are_none(self) -> None:
        model, plan = model_and_plan("llama")
        with torch.no_grad():
            model.lm_head.weight[5] = float("nan")
        with pytest.raises(FloatingPointError, match="its weights or its dtype overflow"):
            read(model, plan, tokens(10)[0], torch.arange(9), 10)

    def test_the_attention_works_inside_a_reader_only(self) -> None:
        model = tiny("llama")
        model.set_attn_implementation("theodolite")
        with pytest.raises(RuntimeError, match="works inside a theodolite Reader only"):
            logits(model, tokens(3))

    def test_default_chunk_shrinks_with_the_vocabulary(self) -> None:
        model, plan = model_and_plan("llama")
        assert Reader(model, plan, capacity=1).chunk == 1024
        model.lm_head = torch.nn.Linear(1, 262_144, device="meta")
        assert Reader(model, plan, capacity=1).chunk == 254
