"""A Reader at distances that a map has changed: what the survey and a question over a document are read by."""

from __future__ import annotations

import pytest
import torch

from tests.models.test_stream import MAPS, apart, at_mapped_distances, gathered, log_probs
from tests.models.tiny import logits, own_plan, tiny, tokens
from theodolite.models import current_plan, patch, patched, stream
from theodolite.models.reader import Reader
from theodolite.positions import SelfExtend

COUNT = 50
# nll is taken in float32 of a log-sum-exp of at most 6: half a unit in its last place is 2.4e-7. Tables are float32,
# 6e-8 off the definition's, in scores and logits around 1.
ROUNDED = 1e-6


@pytest.mark.parametrize("relative", MAPS, ids=lambda relative: type(relative).__name__)
class TestMappedReader:
    """Reading, looking aside and going on give what one pass over the mapped distances gives."""

    @pytest.mark.parametrize("chunk", [1, 7, 64])
    def test_what_is_read(self, relative, chunk: int) -> None:
        model, ids = tiny("gemma3", dtype=torch.float64, sliding_window=24), tokens(COUNT)[0]
        plan = own_plan(model)
        true = gathered(stream(model, ids, plan, relative=relative))
        with Reader(model, plan, capacity=COUNT, chunk=chunk, relative=relative) as reader:
            scores = reader.read(ids[:-1], torch.arange(COUNT - 1), targets=ids[1:])
        assert scores is not None
        assert apart(-scores.nll, true) < ROUNDED

    def test_probes_at_skipped_positions(self, relative) -> None:
        model, ids = tiny("llama", dtype=torch.float64), tokens(30)[0]
        plan, probes = own_plan(model), tokens(11, batch=3, seed=5)
        places = torch.stack([start + torch.arange(11) for start in (30, 47, 90)])
        with Reader(model, plan, capacity=40, relative=relative) as reader:
            reader.read(ids, torch.arange(30))
            scores = reader.probe(probes, places, cue=4)
            # They leave no trace.
            after = reader.read(ids[:10], torch.arange(30, 40), targets=ids[1:11])
        for probe, place, nll in zip(probes, places, scores.nll, strict=True):
            at = torch.cat((torch.arange(30), place))
            true = log_probs(
                at_mapped_distances(model, plan, torch.cat((ids, probe)), relative, at), torch.cat((ids, probe))
            )
            assert apart(-nll, true[-7:]) < ROUNDED
        line = torch.cat((ids, ids[:11]))
        assert after is not None
        assert apart(-after.nll, gathered(stream(model, line, plan, relative=relative))[-10:]) < ROUNDED

    def test_probes_of_nothing_read(self, relative) -> None:
        model, probes = tiny("llama", dtype=torch.float64), tokens(40, batch=2, seed=5)
        plan = own_plan(model)
        with Reader(model, plan, capacity=1, relative=relative) as reader:
            scores = reader.probe(probes, torch.arange(40).expand(2, -1), cue=1)
        for probe, nll in zip(probes, scores.nll, strict=True):
            assert apart(-nll, gathered(stream(model, probe, plan, relative=relative))) < ROUNDED

    def test_next_logits(self, relative) -> None:
        model, ids = tiny("llama", dtype=torch.float64), tokens(COUNT)[0]
        plan = own_plan(model)
        true = at_mapped_distances(model, plan, ids, relative)
        with Reader(model, plan, capacity=COUNT, chunk=16, relative=relative) as reader:
            assert apart(reader.next_logits(ids[:40], torch.arange(40)), true[39]) < ROUNDED
            for at in range(40, COUNT):
                assert apart(reader.next_logits(ids[at : at + 1], torch.tensor([at])), true[at]) < ROUNDED


class TestTheModel:
    """It is patched while it is read, and as it was before and after."""

    def test_as_it_was(self) -> None:
        model, ids = tiny("llama"), tokens(COUNT)
        plan, before = own_plan(model), logits(model, ids)
        with Reader(model, plan, capacity=COUNT, relative=SelfExtend(window=8, group_size=4)) as reader:
            reader.read(ids[0], torch.arange(COUNT))
        assert torch.equal(logits(model, ids), before)
        with patched(model, plan):
            with Reader(model, plan, capacity=COUNT, relative=SelfExtend(window=8, group_size=4)):
                assert all(layer.rotate is None for layer in current_plan(model).layers)
            assert current_plan(model) == plan

    def test_outside_of_with(self) -> None:
        model, ids = tiny("llama"), tokens(COUNT)[0]
        reader = Reader(model, own_plan(model), capacity=COUNT)
        with pytest.raises(RuntimeError, match="read inside of `with` alone"):
            reader.read(ids, torch.arange(COUNT))
        with reader:
            reader.read(ids[:9], torch.arange(9))
        with pytest.raises(RuntimeError, match="read inside of `with` alone"):
            reader.next_logits(ids[9:10], torch.tensor([9]))
        assert reader.length == 9
        with reader:
            assert reader.next_logits(ids[9:10], torch.tensor([9])).shape == (97,)

    def test_refused(self) -> None:
        model = tiny("smollm3")
        with pytest.raises(ValueError, match="relative: this model has layers that turn nothing"):
            Reader(model, own_plan(model), capacity=9, relative=SelfExtend(window=8, group_size=4))


class TestNextLogits:
    """The logits after the last token, in chunks of any size and token by token: transformers' own."""

    @pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "llama4", "deepseek_v3", "smollm3"])
    def test_equals_one_forward(self, family: str) -> None:
        # A window of 24 shows within COUNT tokens.
        short = {"sliding_window": 24} if family in ("gemma3", "gpt_oss") else {}
        model, ids = tiny(family, dtype=torch.float64, **short), tokens(COUNT)[0]
        plan = own_plan(model)
        patch(model, plan)
        true = logits(model, ids[None])[0]
        with Reader(model, plan, capacity=COUNT, chunk=9) as reader:
            assert apart(reader.next_logits(ids[:31], torch.arange(31)), true[30]) < ROUNDED
            for at in range(31, COUNT):
                assert apart(reader.next_logits(ids[at : at + 1], torch.tensor([at])), true[at]) < ROUNDED
            with pytest.raises(ValueError, match="tokens: got none"):
                reader.next_logits(ids[:0], torch.arange(0))
