"""What every additive encoding does with embeddings: where it adds, where it does not, and one rounding."""

from __future__ import annotations

import pytest
import torch

from theodolite.encodings.embed.base import Embed
from theodolite.encodings.embed.learned import LearnedEmbedding
from theodolite.encodings.embed.sinusoidal import Sinusoidal


class Ramp(Embed):
    """Channel c of position p is p + c/8: a table that a reader can check by eye."""

    def _table(self, positions, device):
        return positions.float()[..., None] + torch.arange(self.dim) / 8


def embeddings(batch=3, tokens=7, width=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch, tokens, width, generator=generator).to(dtype)


def by_hand(x, positions, mask=None, channels=None):
    """Loops, float64, one rounding."""
    out = x.clone()
    batch, tokens, width = x.shape
    positions = positions.expand(batch, tokens)
    for b in range(batch):
        for s in range(tokens):
            if mask is not None and not mask.expand(batch, tokens)[b, s]:
                continue
            for i, c in enumerate(range(*(channels or slice(None)).indices(width))):
                out[b, s, c] = (x[b, s, c].double() + float(positions[b, s]) + i / 8).to(x.dtype)
    return out


POSITIONS = {
    "(S,)": torch.tensor([4, 0, 9, 9, 2, 31, 5]),
    "(1, S)": torch.tensor([[4, 0, 9, 9, 2, 31, 5]]),
    "(B, S)": torch.arange(21).flip(0).reshape(3, 7),
}


class TestSum:
    """Each token gets the vector of its own position, whatever shape the positions come in."""

    @pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
    def test_is_rounded_once(self, positions, dtype):
        x = embeddings(dtype=dtype)
        out = Ramp(6)(x, positions)
        assert out.dtype == dtype
        # Eighths and small numbers: their float32 sum with a half is exact but for its last bits, so one rounding
        # from it is one rounding from the true sum, save at ties of 24 bits that these numbers do not have.
        assert torch.equal(out, by_hand(x, positions))

    @pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
    def test_a_table_made_before(self, positions):
        x, mask = embeddings(dtype=torch.bfloat16), torch.arange(7) % 2
        ramp = Ramp(3, channels=slice(3, None))
        assert torch.equal(ramp.add_table(x, ramp.table(positions), mask=mask), ramp(x, positions, mask=mask))

    def test_float64_embeddings_lose_nothing(self):
        x = embeddings(dtype=torch.float64)
        table = torch.arange(7)[:, None] + torch.arange(6, dtype=torch.float64) / 8
        assert torch.equal(Ramp(6)(x, torch.arange(7)), x + table)

    def test_the_input_is_left_alone(self):
        x = embeddings()
        copy = x.clone()
        Ramp(3, channels=slice(3, None))(x, torch.arange(7), mask=torch.ones(7, dtype=torch.bool))
        assert torch.equal(x, copy)


class TestOnlyAtChosenTokens:
    """Positions at sentence starts alone: the other tokens leave bit for bit as they came."""

    @pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
    @pytest.mark.parametrize("shape", [(7,), (1, 7), (3, 7)])
    @pytest.mark.parametrize("kind", [torch.bool, torch.int64])
    def test_equals_the_loop(self, positions, shape, kind):
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
        assert mask.any()
        assert not mask.all()
        x = embeddings(dtype=torch.bfloat16)
        assert torch.equal(Ramp(6)(x, positions, mask=mask.to(kind)), by_hand(x, positions, mask))

    def test_negative_zero_stays(self):
        out = Ramp(6)(torch.full((1, 2, 6), -0.0), torch.zeros(2, dtype=torch.int64), mask=torch.tensor([0, 1]))
        assert torch.signbit(out[0, 0]).all()

    @pytest.mark.parametrize("shape", [(7,), (1, 7), (3, 7)])
    def test_positions_elsewhere_are_not_looked_at(self, shape):
        mask = torch.zeros(shape, dtype=torch.bool)
        mask[..., 2] = True
        table, x = LearnedEmbedding(5, 6), embeddings()
        for positions in (torch.full((7,), 99), torch.full((3, 7), -1)):
            positions[..., 2] = 4
            out = table(x, positions, mask=mask)
            assert torch.equal(out[:, 2], x[:, 2] + table.weight[4])
            assert torch.equal(out[:, 3:], x[:, 3:])

    def test_one_row_chooses_and_another_does_not(self):
        mask = torch.tensor([[True, False, False], [False, False, True]])
        x = embeddings(2, 3)
        out = Ramp(6)(x, torch.tensor([5, 6, 7]), mask=mask)
        assert torch.equal(out, by_hand(x, torch.tensor([5, 6, 7]), mask))

    def test_no_gradient_comes_back_from_the_others(self):
        table = LearnedEmbedding(7, 6)
        table(embeddings(), torch.arange(7), mask=torch.arange(7) < 2).sum().backward()
        assert torch.equal(table.weight.grad, torch.tensor([3.0, 3, 0, 0, 0, 0, 0])[:, None].expand(7, 6))


class TestPartOfTheWidth:
    """A sinusoid on the first half of the channels leaves the other half to a rotation."""

    @pytest.mark.parametrize("channels", [slice(0, 3), slice(3, None), slice(-3, None), slice(1, None, 2), slice(1, 4)])
    @pytest.mark.parametrize("masked", [False, True])
    def test_equals_the_loop(self, channels, masked):
        mask = torch.arange(7) % 3 == 0 if masked else None
        x, positions = embeddings(dtype=torch.float16), POSITIONS["(B, S)"]
        out = Ramp(3, channels=channels)(x, positions, mask=mask)
        assert torch.equal(out, by_hand(x, positions, mask, channels))

    def test_gradients_reach_all_channels(self):
        x = embeddings().requires_grad_()
        Ramp(3, channels=slice(0, 3))(x, torch.arange(7)).sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))

    def test_two_halves_are_a_grid(self):
        rows, columns = torch.arange(6) // 3, torch.arange(6) % 3
        x = embeddings(2, 6, 16)
        out = Sinusoidal(8, channels=slice(8, None))(Sinusoidal(8, channels=slice(0, 8))(x, rows), columns)
        table = torch.cat((Sinusoidal(8).table(rows), Sinusoidal(8).table(columns)), -1)
        assert torch.equal(out, x + table)


class TestRefusals:
    """Each message names the argument, what came and what is needed."""

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: Ramp(6)(embeddings(), torch.arange(8)), r"positions: got \(8,\) for x of shape \(3, 7, 6\)"),
            (lambda: Ramp(6)(embeddings(), torch.zeros(2, 7).long()), r"it must be \(7,\) or \(3, 7\)"),
            (lambda: Ramp(6)(embeddings(), torch.arange(7).half()), "positions: got torch.float16.* cannot count past"),
            (lambda: Ramp(6)(embeddings(), torch.arange(7).reshape(1, 1, 7)), r"positions: got shape \(1, 1, 7\)"),
            (lambda: Ramp(6).table(torch.tensor(3)), r"positions: got shape \(\); it must be \(S,\) or \(B, S\)"),
            (lambda: Ramp(6).table([0, 1]), "positions: got a list"),
            (lambda: Ramp(8)(embeddings(), torch.arange(7)), "x: got 6 channels; this encoding has dim 8"),
            (lambda: Ramp(1)(embeddings(), torch.arange(7)), "x: got 6 channels; this encoding has dim 1"),
            (lambda: Ramp(6)(embeddings().long(), torch.arange(7)), r"x: got torch.int64 of shape \(3, 7, 6\)"),
            (
                lambda: Ramp(4, channels=slice(3, None))(embeddings(), torch.arange(7)),
                "x: got 6 channels, 3 of them in channels 3:; this encoding has dim 4",
            ),
            (
                lambda: Ramp(6)(torch.zeros(3, 7).long(), torch.arange(7)),
                r"x: got torch.int64 of shape \(3, 7\); it must be embeddings \(B, S, E\)",
            ),
            (lambda: Ramp(6)(embeddings()[0], torch.arange(7)), r"x: got torch.float32 of shape \(7, 6\)"),
            (lambda: Ramp(6)("x", torch.arange(7)), "x: got a str"),
            (
                lambda: Ramp(6)(embeddings(), torch.arange(7), mask=torch.ones(6)),
                "mask: got torch.float32; give booleans",
            ),
            (
                lambda: Ramp(6)(embeddings(), torch.arange(7), mask=torch.ones(6).bool()),
                r"mask: got \(6,\) for x",
            ),
            (lambda: Ramp(6).add_table(embeddings(), torch.zeros(7, 5)), r"table: got shape \(7, 5\); .* \(S, 6\)"),
            (lambda: Ramp(6).add_table(embeddings(), torch.zeros(8, 6)), r"table: got \(8,\) for x of shape"),
            (lambda: Ramp(6).add_table(embeddings(), torch.zeros(2, 7, 6)), r"table: got \(2, 7\) for x of shape"),
            (lambda: Ramp(6).add_table(embeddings(), torch.zeros(6)), r"table: got shape \(6,\)"),
            (lambda: Ramp(0), "dim: got 0; it must be at least 1"),
            (lambda: Ramp(6.0), "dim: got a float"),
            (lambda: Ramp(6, channels=6), "channels: got 6; give a slice"),
            (
                lambda: Ramp(6, channels=slice(None, None, -1)),
                r"channels: got slice\(None, None, -1\); its step must be at least 1",
            ),
            (lambda: Ramp(6, channels=slice(0, 6, 0)), r"channels: got slice\(0, 6, 0\); its step must be at least 1"),
            (
                lambda: Ramp(6)(embeddings(), torch.arange(7), mask=torch.ones(7, dtype=torch.bool, device="meta")),
                "mask: got a tensor on the meta device, which has no values, and positions is on cpu",
            ),
            (
                lambda: Ramp(6).add_table(embeddings(), torch.zeros(7, 6, device="meta")),
                "table: got a tensor on the meta device, which has no values, and x is on cpu",
            ),
        ],
    )
    def test_words(self, call, message):
        with pytest.raises(ValueError, match=message):
            call()
