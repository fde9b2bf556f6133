"""What turns is told by what it is: no name of a stranger's function or argument decides what the check sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

from tests.models.conftest import calm  # noqa: F401
from tests.models.tiny import tiny
from theodolite.conformance import Verdict, check_model

Turn = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
RIGHT = modeling_llama.apply_rotary_pos_emb
OTHER_NAMES: dict[str, Callable[[Turn], Any]] = {
    "of transformers": lambda turn: lambda q, k, cos, sin, unsqueeze_dim=1: turn(q, k, cos, sin),
    "short": lambda turn: lambda q, k, c, s, unsqueeze_dim=1: turn(q, k, c, s),
    "any": lambda turn: lambda *args, **kw: turn(*args),
    "tables renamed for queries": lambda turn: lambda cos, sin, q, k, *a, **kw: turn(cos, sin, q, k),
}
FAULTS: dict[str, tuple[Turn, str]] = {
    "the other way": (lambda q, k, c, s: RIGHT(q, k, c, -s), "queries and keys turn the other way"),
    "twice": (lambda q, k, c, s: RIGHT(*RIGHT(q, k, c, s), c, s), "queries and keys are turned twice"),
    "keys still": (lambda q, k, c, s: (RIGHT(q, k, c, s)[0], k), "keys are not turned"),
    "queries still": (lambda q, k, c, s: (q, RIGHT(q, k, c, s)[1]), "queries are not turned"),
    "neither": (lambda q, k, c, s: (q, k), "nothing is turned"),
    "keys twice": (lambda q, k, c, s: (RIGHT(q, k, c, s)[0], RIGHT(*RIGHT(q, k, c, s), c, s)[1]), "keys are turned"),
    "keys the other way": (
        lambda q, k, c, s: (RIGHT(q, k, c, s)[0], RIGHT(q, k, c, -s)[1]),
        "keys turn the other way, and queries do not",
    ),
}


def rotation_with(turn: Any, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Verdict:
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", turn)
    return next(verdict for verdict in check_model(tiny("llama", **more)) if verdict.name == "rotation")


@pytest.mark.parametrize("names", OTHER_NAMES)
class TestNamesDecideNothing:
    """Tables taken for what is turned made every fault pass."""

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_fault_is_found(self, names: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
        turn, words = FAULTS[fault]
        verdict = rotation_with(OTHER_NAMES[names](turn), monkeypatch)
        assert verdict.failed, str(verdict)
        assert words in (verdict.cause or ""), str(verdict)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_what_is_right_passes(self, names: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        verdict = rotation_with(OTHER_NAMES[names](RIGHT), monkeypatch, dtype=dtype)
        assert verdict.outcome == "pass", str(verdict)


class TestNested:
    """A function that calls another for each of the two is one turning."""

    @pytest.mark.parametrize(("sign", "outcome"), [(1, "pass"), (-1, "fail")])
    def test_the_outer_one_counts(self, sign: int, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def one(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
            return RIGHT(x, x, c, s)[0]

        monkeypatch.setattr(modeling_llama, "apply_rotary_one", one, raising=False)

        def both(q: Tensor, k: Tensor, c: Tensor, s: Tensor, **_: Any) -> Any:
            turn = modeling_llama.apply_rotary_one
            return turn(q, c, sign * s), turn(k, c, sign * s)

        assert rotation_with(both, monkeypatch).outcome == outcome


class TestNoTelling:
    """What cannot be looked at is no pass."""

    def test_a_result_of_another_form(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Odd:
            def __init__(self, q: Tensor, k: Tensor) -> None:
                self.both = q, k

            def __iter__(self) -> Any:
                return iter(self.both)

        verdict = rotation_with(lambda q, k, c, s, **_: Odd(*RIGHT(q, k, c, -s)), monkeypatch)
        assert verdict.outcome == "skip"
        assert "returns nothing, so that it cannot be told what turns" in verdict.message
