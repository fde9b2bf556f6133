"""Faults that shipped somewhere, planted in tiny models: each is found by a check, and its cause is named."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.conftest import calm  # noqa: F401
from tests.models.tiny import tiny
from theodolite.conformance import check_model

from . import planted

# Row, how it is planted, the check that finds it, and words of the cause.
FOUND: list[tuple[str, Any, str, str]] = [
    ("A2", planted.a2, "rotation", "pairs are of the other layout"),
    ("A3", planted.a3, "rotation", "tables of one pair layout meet a rotation of the other"),
    ("A4", planted.a4, "rotation", "turned twice"),
    ("B1", planted.b1, "autocast", "angles are computed in bfloat16 under autocast"),
    ("B2", planted.b2, "tables", "positions were rounded to bfloat16"),
    ("B3", planted.b3, "tables", "inv_freq was rounded to bfloat16"),
    ("B4", planted.b4, "tables", "inv_freq was rounded to bfloat16"),
    ("B5", planted.b5, "tables", "were added from an inv_freq that had been rounded to bfloat16"),
    ("B7", planted.b7, "tables", "cos and sin were rounded to bfloat16"),
    ("B8", planted.b8, "tables", "positions were rounded to bfloat16"),
    ("C1", planted.c1, "tables", "never filled in"),
    ("C1 garbage", planted.c1_garbage, "tables", "memory that was never filled in"),
    ("C2", planted.c2, "tables", "frequencies are zero"),
    ("C3", planted.c3, "tables", "other bytes"),
    ("D1", planted.dynamic, "decode across the original length", "turned by the frequencies of a shorter sequence"),
    ("D2", planted.dynamic, "history", "the longest call are kept"),
    ("E1", planted.e1, "decode across the original length", "turned by the frequencies of a shorter sequence"),
    ("E3", planted.e3, "tables", "the long list of factors is used for 4,096 tokens"),
    ("F1", planted.f1, "tables", "the factor is 1.25, and 4 is asked for"),
    ("F2", planted.f2, "tables", "the ends of YaRN's ramp are rounded"),
    ("F4", planted.f4, "score scale", "mscale_all_dim squared is left out"),
    ("F5", planted.f5, "tables", "0.1 ln(factor) + 1, where the config says otherwise"),
    ("F7", planted.f7, "tables", "beta_fast and beta_slow are swapped"),
    ("F8", planted.f8, "tables", "blends wavelengths"),
    ("F8 power", planted.f8_power, "tables", "inside the power"),
    ("F11", planted.f11, "rotation", "multiplied by 1.13863 besides"),
    ("G1", planted.g1, "tables", "the base is 10,000, and 1e+06 is asked for"),
    ("G2", planted.g2, "tables", "YaRN 4 from 2,048 tokens is dropped"),
    ("G4", planted.g4, "tables", "divided by 2 (linear), in place of Llama 3 scaling 32"),
    ("G5", planted.g5, "tables", "the factor is 8, and 32 is asked for"),
    ("G5 dropped", planted.g5_dropped, "tables", "Llama 3 scaling 32 from 1,024 tokens is dropped"),
    ("G6", planted.g6, "tables", "of other layers"),
    ("H1", planted.h1, "tables", "partial rotary factor is ignored"),
    ("H2", planted.h2, "tables", "the exponents run over head_dim"),
    ("H6", planted.h6, "rotation", "the layer leaves the rotation out"),
    ("H6 turned", planted.h6_turned, "rotation", "layers without rotation"),
    ("I1", planted.i1, "left padding", "positions are counted from the shape"),
    ("I1 rotary", planted.i1_rotary, "positions obeyed", "position_ids are ignored"),
    ("I3", planted.i3, "packing", "positions that start again are not obeyed"),
    ("I8", planted.i8, "tables", "every row of a batch is given the tables of the first"),
    ("I8 kernel", planted.i8_kernel, "rotation", "turned by the angles of the first"),
    ("J1", planted.j1, "chunked prefill", "each piece is counted from 0"),
    ("J1 twice", planted.j1_twice, "chunked prefill", "what was read before is added twice"),
    ("J3", planted.j3, "tables", "every position past 4,095 gets the row of 4,095"),
    ("J3 wrapped", planted.j3_wrapped, "tables", "start again"),
    ("J6", planted.j6, "decode", "rows that a cache still keeps"),
    ("J9", planted.j9, "rotation", "all rows but the first come out as zeros"),
    ("K3", planted.k3, "history", "something that one call leaves on the model"),
    ("M3", planted.m3, "past the stated length", "clamped or wrapped"),
    ("N1", planted.n1, "bias", "the plain series"),
    ("N3", planted.n3, "bias", "built on the number of queries"),
    ("N4", planted.n4, "bias", "half precision"),
]
NOTED: list[tuple[str, Any, str, str]] = [
    ("I2", planted.i2, "left padding", "only generate derives positions from the mask"),
    ("I4", planted.i4, "packing", "does not tell documents apart by their positions"),
]


@pytest.mark.parametrize(("row", "plant", "check", "words"), FOUND, ids=[row for row, *_ in FOUND])
class TestFound:
    """A checker that passes everything is worth nothing."""

    def test_and_named(self, row: str, plant: Any, check: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model, plan = plant(monkeypatch)
        verdicts = {verdict.name: verdict for verdict in check_model(model, plan)}
        verdict = verdicts[check]
        assert verdict.outcome == "fail", {name: str(one) for name, one in verdicts.items() if one.failed}
        assert verdict.cause is not None, str(verdict)
        assert words in verdict.cause
        if check != "positions obeyed" and verdict.deviation is not None and verdict.tolerance is not None:
            assert verdict.deviation > verdict.tolerance


@pytest.mark.parametrize(("row", "plant", "check", "words"), NOTED, ids=[row for row, *_ in NOTED])
class TestNoted:
    """What transformers itself does and people take for a bug is told, and fails nothing."""

    def test_and_named(self, row: str, plant: Any, check: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model, plan = plant(monkeypatch)
        verdicts = {verdict.name: verdict for verdict in check_model(model, plan)}
        assert verdicts[check].outcome == "note"
        assert words in (verdicts[check].cause or "")
        assert not any(verdict.failed for verdict in verdicts.values())


class TestWhere:
    """The position where it starts says more than the size."""

    @pytest.mark.parametrize(
        ("plant", "check", "starts"),
        [(planted.j3, "tables", 4096), (planted.b5, "tables", 1024), (planted.j6, "decode", 40),
         (planted.j1, "chunked prefill", 8), (planted.m3, "past the stated length", 128)],
        ids=["clamped", "grown", "counter", "chunks", "learned"],
    )  # fmt: skip
    def test_it_starts(self, plant: Any, check: str, starts: int, monkeypatch: pytest.MonkeyPatch) -> None:
        model, plan = plant(monkeypatch)
        verdict = next(one for one in check_model(model, plan) if one.name == check)
        assert verdict.starts_at == starts


class TestNoNumbers:
    """Where logits are no numbers nothing that compares them has an answer, and none may pass."""

    def test_a_table_of_no_numbers(self) -> None:
        model = tiny("llama")
        model.model.rotary_emb.inv_freq.fill_(float("nan"))
        verdicts = {verdict.name: verdict for verdict in check_model(model)}
        assert verdicts["finite logits"].failed
        assert verdicts["tables"].failed
        assert "never filled in" in (verdicts["tables"].cause or "")
        assert verdicts["rotation"].failed
        assert "could not be run" not in verdicts["rotation"].message
        for name in ("shift", "batch", "left padding", "packing", "chunked prefill", "decode", "history"):
            assert verdicts[name].outcome == "skip", name
        assert not [v for v in verdicts.values() if v.outcome == "pass" and "inf" in v.message]

    def test_weights_of_no_numbers(self) -> None:
        model = tiny("llama")
        model.model.layers[0].mlp.down_proj.weight.data.fill_(float("nan"))
        verdicts = {verdict.name: verdict for verdict in check_model(model)}
        assert verdicts["finite logits"].failed
        assert verdicts["tables"].outcome == "pass"
        assert verdicts["shift"].outcome == "skip"
