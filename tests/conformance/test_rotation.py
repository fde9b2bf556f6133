"""Our rotation passes every check, and every check catches the fault that it was written for."""

from __future__ import annotations

import copy

import pytest
import torch

from theodolite.encodings import RotaryEmbedding
from theodolite.plan import Llama3, Rotary, YaRN

from .rotation import CHECKS, Expected, failures

LLAMA3 = Llama3(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
PLAIN = Rotary(head_dim=32, rope_theta=10000.0)


def expected_of(rotary: Rotary) -> Expected:
    return Expected(
        head_dim=rotary.head_dim,
        inv_freq=rotary.inv_freq().tolist(),
        interleaved=rotary.interleaved,
        trailing=rotary.trailing,
        amplitude=rotary.attention_factor(),
        furthest=2**24,
    )


class TestOurs:
    """The module users get, in every layout, through the checks that users can run on their own."""

    @pytest.mark.parametrize(
        "rotary",
        [
            PLAIN,
            Rotary(head_dim=32, rope_theta=5e5, interleaved=True),
            Rotary(head_dim=32, rope_theta=1e6, rotary_dim=16),
            Rotary(head_dim=32, rope_theta=1e6, rotary_dim=12, interleaved=True, trailing=True),
            Rotary(head_dim=64, rope_theta=1e6, live_pairs=8),
            Rotary(head_dim=64, rope_theta=5e5, scaling=LLAMA3),
            Rotary(head_dim=64, rope_theta=1e4, scaling=YaRN(factor=16, original_max_position_embeddings=4096)),
        ],
        ids=["halves", "interleaved", "partial", "trailing", "proportional", "llama3", "yarn"],
    )
    def test_nothing_fails(self, rotary):
        assert failures(RotaryEmbedding(rotary), expected_of(rotary)) == []


def _angles(positions, interleaved_table=False, inv_freq=None, dtype=torch.float64):
    inv_freq = torch.as_tensor(PLAIN.inv_freq() if inv_freq is None else inv_freq).to(dtype)
    angles = positions.to(dtype)[..., None] * inv_freq
    angles = angles.repeat_interleave(2, -1) if interleaved_table else torch.cat((angles, angles), -1)
    return angles.unsqueeze(-3) if angles.dim() == 3 else angles


def _halves(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _every_second(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def _apply(x, angles, rotate_half=_halves):
    cos, sin = angles.cos().float(), angles.sin().float()
    return (x * cos + rotate_half(x) * sin).to(x.dtype)


def _both(turn):
    return lambda q, k, positions: (turn(q, positions), turn(k, positions))


def _in_place(q, k, positions):
    for x in (q, k):
        x.copy_(_apply(x, _angles(positions)))
    return q, k


def _first_row_only(x, positions):
    out = x.clone()
    out[:1] = _apply(x[:1], _angles(positions if positions.dim() == 1 else positions[:1]))
    return out


class _Remembers:
    """Keeps the frequencies of the longest sequence seen (dynamic NTK with state)."""

    longest = 1000

    def __call__(self, q, k, positions):
        self.longest = max(self.longest, int(positions.max()) + 1)
        inv_freq = PLAIN.inv_freq() / (1 if self.longest <= 4096 else 2)
        return tuple(_apply(x, _angles(positions, inv_freq=inv_freq)) for x in (q, k))


FAULTS = {
    "table interleaved, rotation in halves": (
        _both(lambda x, p: _apply(x, _angles(p, interleaved_table=True))),
        "a rotation should multiply norms by 1",
    ),
    "the other layout": (
        _both(lambda x, p: _apply(x, _angles(p, interleaved_table=True), _every_second)),
        "channel 0 should be paired with channel 16, and is with 1",
    ),
    "the other direction": (_both(lambda x, p: _apply(x, -_angles(p))), "it turns the other way"),
    "turned twice": (_both(lambda x, p: _apply(_apply(x, _angles(p)), _angles(p))), "it turns twice"),
    "heads for tokens": (
        _both(lambda x, p: _apply(x, _angles(torch.arange(x.shape[1])).unsqueeze(-2))),
        "the axis of heads is taken for the axis of tokens",
    ),
    "positions from the shape": (
        _both(lambda x, p: _apply(x, _angles(torch.arange(x.shape[2])))),
        "is turned differently among others than alone",
    ),
    "never turned": (_both(lambda x, p: x.clone()), "nothing turns along the axis of tokens"),
    "one position late": (_both(lambda x, p: _apply(x, _angles(p + 1))), "position 0 should change nothing"),
    "float32 angles": (
        _both(lambda x, p: _apply(x, _angles(p, dtype=torch.float32))),
        "the cosine or sine of pair",
    ),
    "positions in the dtype of the input": (
        _both(lambda x, p: _apply(x, _angles(p.to(x.dtype)))),
        "positions or tables follow the input's dtype",
    ),
    "frequencies in bfloat16": (
        _both(lambda x, p: _apply(x, _angles(p, inv_freq=torch.tensor(PLAIN.inv_freq()).bfloat16()))),
        "radians a token, and turns by",
    ),
    "another base": (
        _both(lambda x, p: _apply(x, _angles(p, inv_freq=Rotary(head_dim=32, rope_theta=5e5).inv_freq()))),
        "pair 1 should turn by 0.5623413 radians a token",
    ),
    "attention factor where none belongs": (
        _both(lambda x, p: _apply(x, _angles(p)) * 1.1386),
        "a rotation should multiply norms by 1, and multiplies one by 1.1386",
    ),
    "float32 out of bfloat16": (
        _both(lambda x, p: _apply(x.float(), _angles(p))),
        "q went in as bfloat16 (1, 4, 5, 32) and came out as float32",
    ),
    "in place by surprise": (_in_place, "the inputs are overwritten"),
    "only the first row": (_both(_first_row_only), "of row 1 is turned differently in a batch of three"),
    "keeps the longest table": (_Remembers(), "another answer after a longer one"),
    "fixed score, not relative": (
        _both(lambda x, p: _apply(x, torch.sqrt(_angles(p)))),
        "a query 4 tokens after its key should score the same everywhere",
    ),
}


class TestFaultsAreFound:
    """Each is a fault that shipped somewhere; the sentence names it."""

    @pytest.mark.parametrize("fault", FAULTS)
    def test_by_name(self, fault):
        # A copy: one of them remembers what it was called with.
        rotate, sentence = copy.deepcopy(FAULTS[fault])
        found = failures(rotate, expected_of(PLAIN))
        assert any(sentence in line for line in found), found

    @pytest.mark.parametrize(
        "ignored",
        [Rotary(head_dim=32, rope_theta=1e4), Rotary(head_dim=32, rope_theta=1e4, rotary_dim=16)],
        ids=["partial factor ignored", "leading for trailing"],
    )
    def test_of_width(self, ignored):
        wanted = Rotary(head_dim=32, rope_theta=1e4, rotary_dim=16, trailing=True)
        found = failures(RotaryEmbedding(ignored), expected_of(wanted))
        assert any("16 channels should pass unchanged" in line for line in found), found

    def test_of_proportional_taken_for_partial(self):
        wanted = Rotary(head_dim=32, rope_theta=1e4, live_pairs=4)
        found = failures(RotaryEmbedding(Rotary(head_dim=32, rope_theta=1e4, rotary_dim=8)), expected_of(wanted))
        assert any("channel 0 should be paired with channel 16, and is with 4" in line for line in found), found

    def test_a_reference_in_float64_passes(self):
        # Half precision computed in half precision is forgiven; so is any other pair of roundings.
        assert failures(_both(lambda x, p: _apply(x, _angles(p))), expected_of(PLAIN)) == []

    def test_every_check_says_why_it_is_there(self):
        assert all(check.__doc__ for check in CHECKS)
