"""Checks of a function that turns queries and keys: ours passes, every planted fault is found and named."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.conformance import assert_conforms, check_rotate
from theodolite.encodings import LearnedBase, RotaryEmbedding
from theodolite.plan import DynamicNTK, Llama3, PlanError, Rotary, YaRN

from .test_rotation import FAULTS as OLDER
from .test_rotation import PLAIN, _angles, _apply, _both, _every_second

CLAIMS = {
    "halves": Rotary(head_dim=32, rope_theta=1e4),
    "interleaved": Rotary(head_dim=32, rope_theta=5e5, interleaved=True),
    "partial": Rotary(head_dim=32, rope_theta=1e6, rotary_dim=12),
    "trailing": Rotary(head_dim=48, rope_theta=1e6, rotary_dim=12, interleaved=True, trailing=True),
    "proportional": Rotary(head_dim=64, rope_theta=1e6, live_pairs=8),
    "llama3": Rotary(
        head_dim=64,
        rope_theta=5e5,
        scaling=Llama3(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192),
    ),
    "yarn": Rotary(head_dim=64, rope_theta=1e4, scaling=YaRN(factor=16, original_max_position_embeddings=4096)),
}
HALF = Rotary(head_dim=32, rope_theta=1e4, rotary_dim=16)


def plain(base: float = 1e4, dim: int = 32) -> Tensor:
    return torch.tensor([base ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)


def scaled_rows(x: Tensor, p: Tensor) -> Tensor:
    out = _apply(x, _angles(p))
    if x.shape[2] == 1 and len(x) > 1:
        out = torch.cat((out[:1], torch.zeros_like(out[1:])))
    return out


class _Detached(torch.autograd.Function):
    """A backward pass that turns the same way again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.save_for_backward(p)
        return _apply(x, _angles(p))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _apply(grad, _angles(ctx.saved_tensors[0])), None


def matmul_angles(x: Tensor, p: Tensor) -> Tensor:
    angles = (plain().float()[None, :, None] @ p.reshape(-1, 1, p.shape[-1]).float()).transpose(1, 2)
    angles = torch.cat((angles, angles), -1)
    return _apply(x, angles if p.dim() == 1 else angles.unsqueeze(1))


def on_width(width: int, partner: str = "near") -> Any:
    """Turns the first `width` channels of 32, with exponents over 32 or partners half a head away."""

    def turn(x: Tensor, p: Tensor) -> Tensor:
        if partner == "far":
            w = torch.cat((plain(dim=16), torch.zeros(8)))
            return _apply(x, _angles(p, inv_freq=w))
        turned = _apply(x[..., :width], _angles(p, inv_freq=plain(dim=32)[: width // 2]))
        return torch.cat((turned, x[..., width:]), -1)

    return turn


# Row, the function, what it claims, the check that finds it, words of the cause.
FAULTS: list[tuple[str, Any, Rotary, str, str]] = [
    ("A2", _both(lambda x, p: _apply(x, _angles(p, interleaved_table=True), _every_second)), PLAIN, "pairs",
     "this is the interleaved layout"),
    ("A2 the other way", _both(lambda x, p: _apply(x, _angles(p))),
     Rotary(head_dim=32, rope_theta=1e4, interleaved=True), "pairs", "this is the layout of two halves"),
    ("A3", OLDER["table interleaved, rotation in halves"][0], PLAIN, "norms", "tables of one pair layout"),
    ("A4", OLDER["turned twice"][0], PLAIN, "angles", "turned twice"),
    ("A6", OLDER["heads for tokens"][0], PLAIN, "axes", "the axis of heads is taken for the axis of tokens"),
    ("direction", OLDER["the other direction"][0], PLAIN, "angles", "it turns the other way"),
    ("B1", _both(matmul_angles), PLAIN, "autocast", "a matrix product"),
    ("B2", OLDER["positions in the dtype of the input"][0], PLAIN, "half precision", "follow the dtype of the input"),
    ("B4", OLDER["frequencies in bfloat16"][0], PLAIN, "angles", "inv_freq was rounded to bfloat16"),
    ("B4 float16", _both(lambda x, p: _apply(x, _angles(p, inv_freq=plain().half()))), PLAIN, "angles",
     "inv_freq was rounded to float16"),
    ("B8", _both(lambda x, p: _apply(x, _angles(p.bfloat16().double()))), PLAIN, "angles",
     "positions were rounded to bfloat16"),
    ("B10", OLDER["float32 out of bfloat16"][0], PLAIN, "shapes and dtypes", "tables decide the dtype"),
    ("D2", OLDER["keeps the longest table"][0], PLAIN, "history", "something is kept of the longest call"),
    ("F5", OLDER["attention factor where none belongs"][0], PLAIN, "norms", "multiplied by 1.1386, and should be by 1"),
    ("G1", OLDER["another base"][0], PLAIN, "angles", "the base is 500,000, and 10,000 is asked for"),
    ("G4", _both(lambda x, p: _apply(x, _angles(p, inv_freq=plain() / 4))), PLAIN, "angles", "are divided by 4"),
    ("H1", _both(lambda x, p: _apply(x, _angles(p))), HALF, "width", "the partial rotary factor is ignored"),
    ("H2", _both(on_width(16)), HALF, "angles", "the exponents run over head_dim (32)"),
    ("H2 partner", _both(on_width(16, "far")), HALF, "pairs", "partners stand half a head apart"),
    ("H3", RotaryEmbedding(Rotary(head_dim=32, rope_theta=1e4, rotary_dim=8)),
     Rotary(head_dim=32, rope_theta=1e4, live_pairs=4), "pairs", "a proportional rotation is taken for a partial one"),
    ("I1", OLDER["positions from the shape"][0], PLAIN, "positions obeyed", "positions are counted from the shape"),
    ("I8", OLDER["only the first row"][0], PLAIN, "batch", "all rows but the first are not turned"),
    ("I8 tables", _both(lambda x, p: _apply(x, _angles(p[:1] if p.dim() > 1 else p))), PLAIN, "decode",
     "every row is turned by the positions of the first"),
    ("J1", OLDER["one position late"][0], PLAIN, "position 0", "every position is counted +1"),
    ("J3", _both(lambda x, p: _apply(x, _angles(p.clamp(max=2047)))), PLAIN, "angles", "every position past 2,047"),
    ("J9", _both(scaled_rows), PLAIN, "decode", "come out as zeros"),
    ("in place", OLDER["in place by surprise"][0], PLAIN, "inputs", "in place"),
    ("backward", _both(lambda x, p: _Detached.apply(x, p)), PLAIN, "gradient", "the backward pass"),
    ("no gradient", _both(lambda x, p: _apply(x.detach(), _angles(p))), PLAIN, "gradient", "outside of what autograd"),
    ("nothing", OLDER["never turned"][0], PLAIN, "axes", "nothing turns along the axis of tokens"),
]  # fmt: skip


class TestOurs:
    """The module users get passes every check, exact out to 16 million tokens."""

    @pytest.mark.parametrize("claim", CLAIMS)
    def test_all_pass(self, claim: str) -> None:
        verdicts = check_rotate(RotaryEmbedding(CLAIMS[claim]), CLAIMS[claim])
        assert {verdict.outcome for verdict in verdicts} == {"pass"}, [str(v) for v in verdicts if v.outcome != "pass"]

    def test_tokens_before_heads(self) -> None:
        ours = RotaryEmbedding(PLAIN)

        def turn(q: Tensor, k: Tensor, positions: Tensor) -> Any:
            turned = ours(q.transpose(1, 2), k.transpose(1, 2), positions)
            return tuple(x.transpose(1, 2) for x in turned)

        assert_conforms(turn, PLAIN, heads_first=False)
        with pytest.raises(AssertionError, match=r"1 check failed\ncall: .*Change: give heads_first=False\."):
            assert_conforms(turn, PLAIN)


class TestFound:
    """Each is a fault that shipped somewhere."""

    @pytest.mark.parametrize(("row", "rotate", "claim", "check", "words"), FAULTS, ids=[row for row, *_ in FAULTS])
    def test_and_named(self, row: str, rotate: Any, claim: Rotary, check: str, words: str) -> None:
        verdicts = {verdict.name: verdict for verdict in check_rotate(copy.deepcopy(rotate), claim)}
        failed = {name: str(verdict) for name, verdict in verdicts.items() if verdict.failed}
        assert verdicts[check].outcome == "fail", failed
        assert words in (verdicts[check].cause or ""), failed

    @pytest.mark.parametrize("fault", OLDER)
    def test_whatever_the_other_suite_finds(self, fault: str) -> None:
        verdicts = check_rotate(copy.deepcopy(OLDER[fault][0]), PLAIN)
        # Angles in float32 are usual: they are noted, with what they cost.
        outcomes = ("note",) if fault == "float32 angles" else ("fail",)
        assert any(verdict.outcome in outcomes for verdict in verdicts)


class TestFarAngles:
    """B12: float32 angles are right near and off far out; a note says by how much."""

    def test_the_measured_error(self) -> None:
        verdicts = check_rotate(OLDER["float32 angles"][0], PLAIN, furthest=1_048_575)
        far = next(verdict for verdict in verdicts if verdict.name == "far angles")
        assert not any(verdict.failed for verdict in verdicts)
        p = torch.tensor([131_071, 1_048_575])
        exact = (p.double()[:, None] * plain()).cos()
        wrong = (p.float()[:, None] * plain().float()).cos().double()
        assert far.deviation is not None
        assert far.deviation >= float((exact - wrong).abs().max()) > 1e-3
        assert far.starts_at == 131_071

    def test_a_table_that_ends(self) -> None:
        table = _angles(torch.arange(4096))

        def turn(q: Tensor, k: Tensor, positions: Tensor) -> Any:
            angles = table[positions]
            angles = angles.unsqueeze(-3) if angles.dim() == 3 else angles
            return _apply(q, angles), _apply(k, angles)

        assert not any(verdict.failed for verdict in check_rotate(turn, PLAIN, furthest=4095))
        assert any(verdict.failed for verdict in check_rotate(turn, PLAIN))


class _Buffered(nn.Module):
    """Frequencies in a float buffer, as everyone has them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", plain().float())

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> Any:
        return tuple(_apply(x, _angles(positions, inv_freq=self.inv_freq)) for x in (q, k))


class TestClaims:
    """What is claimed is checked, and nothing else is assumed."""

    def test_by_name(self) -> None:
        assert_conforms(RotaryEmbedding(PLAIN), head_dim=32, rope_theta=1e4)
        with pytest.raises(AssertionError, match="the base is 10,000, and 500,000 is asked for"):
            assert_conforms(RotaryEmbedding(PLAIN), head_dim=32, rope_theta=5e5)

    def test_a_cast_is_noted(self) -> None:
        verdicts = {verdict.name: verdict for verdict in check_rotate(_Buffered(), PLAIN, furthest=8191)}
        assert verdicts["cast and back"].outcome == "note"
        assert not any(verdict.failed for verdict in verdicts.values())

    def test_frequencies_of_a_length(self) -> None:
        dynamic = Rotary(
            head_dim=32, rope_theta=1e4, scaling=DynamicNTK(factor=2, original_max_position_embeddings=1024)
        )
        assert_conforms(RotaryEmbedding(dynamic.at_length(4096)), dynamic, length=4096)
        with pytest.raises(AssertionError, match="angles: fail"):
            assert_conforms(RotaryEmbedding(dynamic.at_length(2048)), dynamic, length=4096)

    def test_bad_claims(self) -> None:
        with pytest.raises(PlanError, match="rope_theta"):
            check_rotate(RotaryEmbedding(PLAIN), head_dim=32, rope_theta=0.5)
        with pytest.raises(TypeError, match="rotary: it is given, and head_dim besides"):
            check_rotate(RotaryEmbedding(PLAIN), PLAIN, head_dim=32)
        with pytest.raises(TypeError, match="rotate: got int"):
            check_rotate(3, PLAIN)  # type: ignore[arg-type]

    def test_a_function_that_raises_fails(self) -> None:
        def broken(q: Tensor, k: Tensor, positions: Tensor) -> Any:
            raise RuntimeError("no such kernel")

        verdicts = check_rotate(broken, PLAIN)
        assert all(verdict.outcome in ("fail", "skip") for verdict in verdicts)
        assert "no such kernel" in str(verdicts[0])


class TestOneFaultOneCause:
    """What is wrong near by is not given another cause far out, or in the gradient."""

    def test_another_base(self) -> None:
        verdicts = {v.name: v for v in check_rotate(copy.deepcopy(OLDER["another base"][0]), PLAIN)}
        assert "the base is 500,000" in (verdicts["angles"].cause or "")
        assert verdicts["far angles"].cause == verdicts["angles"].cause
        assert verdicts["gradient"].outcome == "skip"

    def test_tables_of_one_layout_in_a_rotation_of_the_other(self) -> None:
        verdicts = {v.name: v for v in check_rotate(OLDER["table interleaved, rotation in halves"][0], PLAIN)}
        assert {verdicts[name].cause for name in ("norms", "angles", "far angles")} == {verdicts["norms"].cause}

    def test_a_table_that_is_put_back_for_short_calls(self) -> None:
        """Dynamic NTK of transformers: only a call between the short and the longest shows what was kept."""

        class PutBack:
            longest = 0

            def __call__(self, q: Any, k: Any, positions: Any) -> Any:
                needed = int(positions.max()) + 1
                self.longest = 0 if needed <= 512 else max(self.longest, needed)
                inv_freq = Rotary(head_dim=32, rope_theta=1e4 * max(1.0, self.longest / 512)).inv_freq()
                return tuple(_apply(x, _angles(positions, inv_freq=inv_freq)) for x in (q, k))

        history = next(v for v in check_rotate(PutBack(), PLAIN) if v.name == "history")
        assert history.failed
        assert "something is kept of the longest call" in (history.cause or "")

    def test_a_module_that_learns(self) -> None:
        rotary = Rotary(head_dim=32, rope_theta=1e4)
        verdicts = check_rotate(LearnedBase(rotary), rotary, furthest=8191)
        assert not [str(v) for v in verdicts if "could not be run" in v.message]
