"""Each instrument against plain forwards that do the same the long way round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.tiny import own_plan, tiny, tokens
from theodolite.models.reader import Reader
from theodolite.survey import passes, reach
from theodolite.survey.passages import CUE, LENGTH, passages_at, spread_starts
from theodolite.survey.passes import full_pass, recall_starts, truncated_window
from theodolite.survey.reach import Spread, alone, far_reach, spread_chunks, spread_reach

FAMILIES = {"llama": {}, "gemma3": {"sliding_window": 64}}
# As in the tests of the reader: roundings of float32 through two layers; and numbers are stored to six places.
ROUNDED = 1e-5
STORED = ROUNDED + 1e-6


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param, **FAMILIES[request.param])


def plain(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """nll (S - 1,) of each token of `ids` (S,) after the first, by one forward with windows of positions."""
    distance = positions[:, None] - positions[None, :]
    causal = torch.ones_like(distance, dtype=torch.bool).tril()
    lowest = torch.finfo(torch.float32).min
    seen: Any = torch.zeros(causal.shape).masked_fill(~causal, lowest)[None, None]
    if model.config.model_type == "gemma3_text":
        near = causal & (distance < model.config.sliding_window)
        window = torch.zeros(causal.shape).masked_fill(~near, lowest)[None, None]
        seen = {"full_attention": seen, "sliding_attention": window}
    with torch.inference_mode():
        logits = model(input_ids=ids[None], position_ids=positions[None], attention_mask=seen, use_cache=False).logits[
            0, :-1
        ]
    return torch.nn.functional.cross_entropy(logits.double(), ids[1:], reduction="none")


def copied(model: Any, read: Tensor, places: Tensor, passage: Tensor, at: int) -> float:
    """Mean nll of a passage's continuation when it is begun again at position `at` after `read` at `places`."""
    ids = torch.cat((read, passage))
    return float(plain(model, ids, torch.cat((places, at + torch.arange(LENGTH))))[len(read) + CUE - 1 :].mean())


class TestFullPass:
    """Every token scored from all before it; recall asked on the way changes nothing."""

    def test_nll(self, model):
        text = tokens(601)[0]
        nll, recall = full_pass(model, own_plan(model), text, length=600, chunk=170)
        expected = plain(model, text, torch.arange(601))
        assert nll.dtype == "float32"
        assert nll.shape == (600,)
        assert recall == []
        assert float((torch.from_numpy(nll) - expected).abs().max()) < ROUNDED

    def test_recall(self, model):
        text, depths = tokens(601)[0], (0.0, 0.4, 1.0)
        _, recall = full_pass(
            model, own_plan(model), text, length=600, checkpoints=[300, 600], depths=depths, passages=2, chunk=170
        )
        assert [(cell["length"], cell["depth"]) for cell in recall] == [(n, d) for n in (300, 600) for d in depths]
        for cell in recall:
            starts = recall_starts(cell["length"], cell["depth"], 2)
            length = cell["length"]
            each = [
                copied(model, text[:length], torch.arange(length), passage, length)
                for passage in passages_at(text, starts)
            ]
            assert cell["nll"] == pytest.approx(sum(each) / 2, abs=STORED)
            assert cell["distance"] == length - sum(starts) / 2

    def test_recall_leaves_the_pass_as_it_was(self, model):
        text, plan = tokens(601)[0], own_plan(model)
        quiet, _ = full_pass(model, plan, text, length=600, checkpoints=[250, 600], chunk=170)
        asked, _ = full_pass(
            model, plan, text, length=600, checkpoints=[250, 600], depths=[0.1, 0.9], passages=2, chunk=170
        )
        assert asked.tobytes() == quiet.tobytes()

    def test_checkpoints_past_the_end_are_not_tried(self, model):
        text = tokens(201)[0]
        _, recall = full_pass(model, own_plan(model), text, length=200, checkpoints=[200, 300], depths=[0.5])
        assert [cell["length"] for cell in recall] == [200]

    def test_progress_rises_to_the_length(self, model):
        told: list[int] = []
        full_pass(
            model, own_plan(model), tokens(501)[0], length=500, checkpoints=[250], chunk=100, progress=told.append
        )
        assert told == [100, 200, 250, 350, 450, 500]


class TestTruncatedWindow:
    """Each token from the last ones only, at positions from 0."""

    @pytest.mark.parametrize(("length", "stride"), [(512, 64), (500, 64), (261, 64), (400, 255)])
    def test_equals_windows_one_by_one(self, model, length, stride):
        text, window = tokens(length + 1)[0], 256
        told: list[int] = []
        nll = truncated_window(
            model, own_plan(model), text, length=length, window=window, stride=stride, progress=told.append
        )
        assert nll.shape == (length - window,)
        assert told[-1] == length - window
        for first in range(window, length, stride):
            last = min(first + stride, length)
            begin = first + stride - window
            seen = text[begin:last]
            expected = plain(model, seen, torch.arange(len(seen)))[first - begin - 1 :]
            got = torch.from_numpy(nll[first - window : last - window])
            assert float((got - expected).abs().max()) < ROUNDED
            assert len(seen) <= window

    @pytest.mark.parametrize("stride", [0, 256])
    def test_a_stride_that_leaves_nothing_to_see(self, model, stride):
        with pytest.raises(ValueError, match=f"stride: got {stride}; it must be below the window of 256 tokens"):
            truncated_window(model, own_plan(model), tokens(400)[0], length=399, window=256, stride=stride)


class TestReach:
    """Copying across skipped positions, as one plain forward over what was read and the passage."""

    def test_spread(self, model):
        text, form = tokens(1001)[0], Spread(tokens=300, chunk=100, passages=2)
        cells = spread_reach(model, own_plan(model), text, length=1000, spread=form)
        chunks = spread_chunks(form, 1000)
        assert chunks == [0, 450, 900]
        assert [cell["distance"] for cell in cells] == [72, 522, 972]
        places = torch.cat([torch.arange(begin, begin + 100) for begin in chunks])
        for cell, begin in zip(cells, reversed(chunks), strict=True):
            starts = spread_starts(begin, begin + 100, 2)
            each = [copied(model, text[places], places, passage, 1000) for passage in passages_at(text, starts)]
            assert cell["nll"] == pytest.approx(sum(each) / 2, abs=STORED)

    def test_far(self, model):
        text = tokens(1001)[0]
        cells = far_reach(model, own_plan(model), text, read=150, distances=[150, 700, 4000], passages=3)
        starts = spread_starts(0, 150, 3)
        for cell in cells:
            each = [
                copied(model, text[:150], torch.arange(150), passage, start + cell["distance"])
                for start, passage in zip(starts, passages_at(text, starts), strict=True)
            ]
            assert cell["nll"] == pytest.approx(sum(each) / 3, abs=STORED)

    def test_alone(self, model):
        text, groups = tokens(1001)[0], [[0], [50, 500, 900], [10, 20]]
        cells = alone(model, own_plan(model), text, groups)
        for cell, starts in zip(cells, groups, strict=True):
            each = [plain(model, p, torch.arange(LENGTH))[CUE - 1 :].mean() for p in passages_at(text, starts)]
            assert cell["nll"] == pytest.approx(float(sum(each)) / len(starts), abs=STORED)


class Recorder(Reader):
    """A reader that keeps what it is given."""

    reads: list[tuple[Tensor, Tensor]]
    probes: list[tuple[Tensor, Tensor]]

    def read(self, tokens: Tensor, positions: Tensor, **more: Any) -> Any:
        self.reads.append((tokens, positions))
        return super().read(tokens, positions, **more)

    def probe(self, tokens: Tensor, positions: Tensor, **more: Any) -> Any:
        self.probes.append((tokens, positions))
        return super().probe(tokens, positions, **more)


class TestPositionsAreThoseOfTheText:
    """What is read stands where it stands in the text; what is begun again starts at the end."""

    @pytest.fixture
    def recorder(self, monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
        Recorder.reads, Recorder.probes = [], []
        monkeypatch.setattr(reach, "Reader", Recorder)
        monkeypatch.setattr(passes, "Reader", Recorder)
        return Recorder

    @pytest.mark.parametrize("length", [300, 777, 2000])
    def test_spread(self, recorder, length):
        # A text whose tokens repeat in no short piece says by itself where a piece is from.
        text, small = tokens(length + 1)[0], tiny("llama")
        spread_reach(small, own_plan(small), text, length=length, spread=Spread(tokens=250, chunk=88, passages=2))
        ((ids, positions),) = recorder.reads
        assert torch.equal(ids, text[positions])
        assert torch.equal(positions, positions.unique())
        ((passages, places),) = recorder.probes
        assert (places == length + torch.arange(LENGTH)).all()
        windows = text.unfold(0, LENGTH, 1)
        starts = [int((windows == passage).all(-1).nonzero()[0]) for passage in passages]
        assert all(set(range(start, start + LENGTH)) <= set(positions.tolist()) for start in starts)

    def test_full_pass(self, recorder):
        text, small = tokens(401)[0], tiny("llama")
        full_pass(small, own_plan(small), text, length=400, checkpoints=[150], depths=[0.5], chunk=64)
        assert torch.equal(torch.cat([positions for _, positions in recorder.reads]), torch.arange(400))
        assert torch.equal(torch.cat([ids for ids, _ in recorder.reads]), text[:-1])
        assert all((places == 150 + torch.arange(LENGTH)).all() for _, places in recorder.probes)
