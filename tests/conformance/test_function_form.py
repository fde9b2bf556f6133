"""A function that cannot be called, ends early, or turns one of the two: one line says so, and says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from theodolite.conformance import Verdict, assert_conforms, check_rotate
from theodolite.conformance.verdict import failures
from theodolite.encodings import RotaryEmbedding
from theodolite.plan import Rotary

from .test_rotation import PLAIN, _angles, _apply


def right(x: Tensor, p: Tensor) -> Tensor:
    return _apply(x, _angles(p))


def failed(rotate: Any, rotary: Rotary = PLAIN, **more: Any) -> dict[str, Verdict]:
    return {verdict.name: verdict for verdict in failures(check_rotate(rotate, rotary, **more))}


def table(rows: int, sign: int = 1) -> Any:
    kept = sign * _angles(torch.arange(rows))

    def turn(q: Tensor, k: Tensor, positions: Tensor) -> Any:
        angles = kept[positions]
        angles = angles.unsqueeze(-3) if angles.dim() == 3 else angles
        return _apply(q, angles), _apply(k, angles)

    return turn


class TestForm:
    """What is returned in another form than (q, k) has no angles to find fault with."""

    @pytest.mark.parametrize(
        ("rotate", "words"),
        [
            (lambda q, k, p: right(q, p), "it must return q and k, and returns one tensor of (1, 3, 5, 32)"),
            (lambda q, k, p: None, "it must return q and k, and returns a NoneType"),
            (lambda q, k, p: (q, k, q), "it must return q and k, and returns 3 tensors"),
            (lambda q, k, p: (q.numpy(), k.numpy()), "returns a tuple of ndarray, ndarray"),
            (lambda q, k, p: (right(q, p)[..., :16], right(k, p)), "it returns q of (1, 3, 5, 16)"),
            (
                lambda q, k, p: (right(q, p), right(k, p) * float("nan")),
                "returns k with numbers that are not finite",
            ),
            (lambda q, p: right(q, p), "it could not be run with q and k of (1, 3, 5, 32) and positions of (5,): Type"),
        ],
    )
    def test_one_line(self, rotate: Any, words: str) -> None:
        verdicts = check_rotate(rotate, PLAIN)
        assert [verdict.name for verdict in failures(verdicts)] == ["call"]
        assert words in verdicts[0].message
        assert {verdict.outcome for verdict in verdicts[1:]} == {"skip"}

    def test_complex_tables_with_tokens_before_heads(self) -> None:
        """The order of axes of Meta's code."""

        def turn(q: Tensor, k: Tensor, positions: Tensor) -> Any:
            angles = positions.double()[..., None] * torch.from_numpy(PLAIN.inv_freq())
            freqs = torch.polar(torch.ones_like(angles), angles).unsqueeze(-2)
            pairs = [torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2)) for x in (q, k)]
            return tuple(torch.view_as_real(x * freqs).flatten(-2).to(q.dtype) for x in pairs)

        interleaved = Rotary(head_dim=32, rope_theta=1e4, interleaved=True)
        assert failed(turn, interleaved, heads_first=False) == {}
        found = failed(turn, interleaved)
        assert list(found) == ["call"]
        assert found["call"].cure == "give heads_first=False"
        assert found["call"].cause == "it takes q and k of (B, S, H, D), and is given (B, H, S, D)"

    def test_tokens_before_heads_where_no_shape_tells(self) -> None:
        found = failed(RotaryEmbedding(PLAIN), heads_first=False)
        assert "give heads_first=True" in str([*found.values()])

    def test_positions_of_rows(self) -> None:
        def one_row(q: Tensor, k: Tensor, p: Tensor) -> Any:
            if p.dim() > 1:
                raise ValueError("positions: one row")
            return right(q, p), right(k, p)

        found = failed(one_row)
        assert set(found) == {"batch", "decode"}
        assert "positions of (3, 4), a row for each of the batch, are not taken: ValueError" in found["batch"].message


class TestOneOfTheTwo:
    """A fault of keys is as bad as one of queries."""

    @pytest.mark.parametrize(
        ("rotate", "check", "words"),
        [
            (lambda q, k, p: (right(q, p), k), "queries and keys", "keys are not turned"),
            (lambda q, k, p: (q, right(k, p)), "queries and keys", "queries are not turned"),
            (lambda q, k, p: (right(q, p), right(k, -p)), "queries and keys", "keys turn the other way"),
            (lambda q, k, p: (right(k, p), right(q, p)), "queries and keys", "it returns k before q"),
        ],
    )
    def test_known(self, rotate: Any, check: str, words: str) -> None:
        found = failed(rotate)
        assert words in (found[check].cause or "")
        # The same cause, or none: no other is made up.
        assert {verdict.cause for verdict in found.values()} <= {found[check].cause, None}
        assert "gradient" not in found

    @pytest.mark.parametrize("wrong", ["queries", "keys"])
    @pytest.mark.parametrize(
        ("make", "check", "words"),
        [
            (lambda x, p: _angles(p.to(x.dtype)), "half precision", "follow the dtype of the input"),
            (lambda x, p: _angles(p % 100_000), "far angles", "start again"),
            (lambda x, p: _angles(p, inv_freq=Rotary(head_dim=32, rope_theta=5e5).inv_freq()), "angles", "500,000"),
            (lambda x, p: _angles(torch.arange(x.shape[2])), "positions obeyed", "counted from the shape"),
            (
                lambda x, p: _angles(p, dtype=torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float64),
                "autocast",
                "which autocast computes in bfloat16",
            ),
        ],
        ids=["half", "far", "base", "shape", "autocast"],
    )
    def test_with_the_cause_of_either(self, wrong: str, make: Any, check: str, words: str) -> None:
        def turn(q: Tensor, k: Tensor, p: Tensor) -> Any:
            return tuple(
                _apply(x, make(x, p) if name == wrong else _angles(p)) for name, x in (("queries", q), ("keys", k))
            )

        found = failed(turn)
        assert check in found, list(found)
        assert words in (found[check].cause or "")

    @pytest.mark.parametrize("wrong", [0, 1])
    def test_of_the_longest_call(self, wrong: int) -> None:
        class Kept:
            longest = 0

            def __call__(self, q: Any, k: Any, p: Any) -> Any:
                self.longest = max(self.longest, int(p.max()))
                factors = [2.0 if self.longest > 8000 and index == wrong else 1.0 for index in range(2)]
                inv_freq = PLAIN.inv_freq()
                both = zip((q, k), factors, strict=True)
                return tuple(_apply(x, _angles(p, inv_freq=inv_freq / factor)) for x, factor in both)

        assert "history" in failed(Kept())

    @pytest.mark.parametrize("wrong", [0, 1])
    def test_heads_past_a_block(self, wrong: int) -> None:
        def blocks(q: Tensor, k: Tensor, p: Tensor) -> Any:
            out = [right(q, p), right(k, p)]
            out[wrong][:, 64:] = (q, k)[wrong][:, 64:]
            return tuple(out)

        found = failed(blocks)
        assert set(found) == {"axes"}
        assert f"equal heads of {('queries', 'keys')[wrong]}, head 64 is turned differently" in found["axes"].message


class TestEnds:
    """A table that ends is one line, and what lies before its end is checked all the same."""

    @pytest.mark.parametrize("rows", [16, 100, 512, 1001, 4096])
    def test_asked_up_to_its_last_row(self, rows: int) -> None:
        assert failed(table(rows), furthest=rows - 1) == {}

    @pytest.mark.parametrize("rows", [16, 512, 4096])
    @pytest.mark.parametrize("asked", ["its rows", "by default"])
    def test_asked_past_it(self, rows: int, asked: str) -> None:
        found = failed(table(rows), furthest=rows if asked == "its rows" else 2**24 - 1)
        assert list(found) == ["last position"]
        assert f"give furthest={rows - 1} " in (found["last position"].cure or "")
        assert found["last position"].starts_at == rows
        assert f"it takes positions up to {rows - 1:,}" in found["last position"].message

    def test_a_fault_before_the_end(self) -> None:
        found = failed(table(4096, sign=-1))
        assert {"last position", "angles"} <= set(found)
        assert found["angles"].cause == "it turns the other way"

    @pytest.mark.parametrize(
        ("given", "error", "words"),
        [
            ({"furthest": 14}, ValueError, "furthest: got 14; give at least 15"),
            ({"furthest": -1}, ValueError, "furthest: got -1"),
            ({"furthest": 2**60}, ValueError, "at most 2"),
            ({"length": 0}, ValueError, "length: got 0; give at least 16"),
            ({"length": 1.5}, TypeError, "length: got 1.5; give a whole number of tokens"),
            (
                {"length": 513, "furthest": 511},
                ValueError,
                "positions end at 511; give at most 512",
            ),
        ],
    )
    def test_bad_ends(self, given: Any, error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words):
            check_rotate(RotaryEmbedding(PLAIN), PLAIN, **given)


class TestSentences:
    """Each sentence has its stop, also where verdicts are read as text."""

    def test_stops(self) -> None:
        verdict = Verdict(name="a", outcome="fail", message="one", cause="two.", cure="three", reference="o/r#1")
        assert str(verdict) == "a: fail. one. Cause: two. Change: three. See o/r#1."

    def test_the_count(self) -> None:
        with pytest.raises(AssertionError, match=r": 1 check failed\n"):
            assert_conforms(lambda q, k, p: None, PLAIN)
