"""What can be asked for, and what memory it takes: both said before anything is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny import own_plan, tiny
from theodolite.models.reader import Reader
from theodolite.plan import PlanError
from theodolite.survey import Settings, memory
from theodolite.survey.memory import require_memory, survey_bytes
from theodolite.survey.settings import checked_length, checkpoints

from .plans import plan_of


def asked(**more: Any) -> Settings:
    return Settings(out=Path("nowhere"), **more)


class TestLengths:
    """The default is 1.5 times the trained length; what is too short or too long to measure is refused."""

    def test_default(self):
        assert checked_length(asked(), plan_of(length=8192)) == 12288
        assert checked_length(asked(to=1000), plan_of(length=8192)) == 1000

    @pytest.mark.parametrize(
        ("settings", "length", "message"),
        [
            ({}, None, "max_position_embeddings: got None; a survey needs a trained length of at least 352"),
            ({}, 351, "max_position_embeddings: got 351"),
            ({"to": 351}, 512, "to: got 351; at least 352 tokens"),
            ({"to": 20_000_000}, 8192, "to: got 20000000; positions end at 16777216"),
            ({"to": 1000, "passages": 12}, 512, "to: got 1000; at least 1056 tokens"),
            ({"to": 2000, "passages": 6}, 512, "passages: got 6; at most 5 fit the shortest length"),
        ],
    )
    def test_refused(self, settings, length, message):
        with pytest.raises(PlanError, match=message):
            checked_length(asked(**settings), plan_of(length=length))

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"to": 0}, "to: got 0"),
            ({"to": 1.5}, "to: got 1.5"),
            ({"passages": 0}, "passages: got 0"),
            ({"passes": -1}, "passes: got -1; 0 for none"),
            ({"depths": (0.5, 1.01)}, r"depths: got 1.01; between 0 \(the beginning\) and 1"),
        ],
    )
    def test_settings_that_mean_nothing(self, settings, message):
        with pytest.raises(PlanError, match=message):
            asked(**settings)

    @pytest.mark.parametrize(
        ("trained", "to", "stops"),
        [
            (8192, 12288, [2048, 8192, 12288]),
            (8192, 16384, [2048, 8192, 12288, 16384]),
            (8192, 65536, [2048, 8192, 22528, 36864, 51200, 65536]),
            (8192, 8193, [2048, 8192, 8193]),
            (512, 768, [256, 512, 768]),
            (8192, 4000, [2000, 4000]),
        ],
    )
    def test_checkpoints(self, trained, to, stops):
        assert checkpoints(trained, to) == stops


class TestMemory:
    """Not enough memory is said before the run, with both figures."""

    def test_the_message_says_both_figures(self, monkeypatch):
        monkeypatch.setattr(memory, "_free", lambda device: 3 * 2**29)
        require_memory(3 * 2**29, "Reading", torch.device("cpu"), instead="less")
        message = r"Reading 9 tokens needs 2\.0 GiB and 1\.5 GiB are free on cpu; take less"
        with pytest.raises(MemoryError, match=message):
            require_memory(2**31, "Reading 9 tokens", torch.device("cpu"), instead="less")

    def test_the_free_memory_of_this_machine(self):
        with pytest.raises(MemoryError, match=r"needs 1024\.0 GiB and \d+\.\d GiB are free"):
            require_memory(2**40, "It", torch.device("cpu"), instead="less")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_token_more_is_its_keys_and_values_more(self, dtype):
        model = tiny("llama", dtype=dtype)
        plan = own_plan(model)
        # 2 layers, 2 key-value heads of 16 channels, keys and values.
        per_token = 2 * 2 * 2 * 16 * dtype.itemsize
        assert survey_bytes(model, plan, length=1001) - survey_bytes(model, plan, length=1000) == per_token

    def test_maps_turn_the_keys_of_one_layer_for_each_of_three_groups(self):
        model = tiny("llama")
        plan = own_plan(model)
        plain, mapped = (survey_bytes(model, plan, length=1000, mapped=mapped) for mapped in (False, True))
        # 2 key-value heads of 16 channels, float32.
        assert mapped - plain == 3 * 1000 * 2 * 16 * 4

    @pytest.mark.parametrize(("family", "share"), [("llama", 1.0), ("gemma3", 1.0), ("deepseek_v3", 5 / 6)])
    def test_the_cache_of_the_reader_is_what_was_said(self, family, share):
        model = tiny(family)
        plan = own_plan(model)
        with Reader(model, plan, capacity=500) as reader:
            reader.read(torch.arange(3, 10), torch.arange(7))
            held = sum(x.numel() * x.element_size() for pair in reader.prefix._layers if pair for x in pair)
        said = survey_bytes(model, plan, length=500) - survey_bytes(model, plan, length=0)
        # The values of latent attention are narrower than its keys (16 of 24 channels), and counted as wide.
        assert held == pytest.approx(share * said)
