"""FIRE: a bounded function of how far back a key is, of all that the query could see."""

from __future__ import annotations

import math

import pytest
import torch

from theodolite.encodings.bias.fire import Fire


def oracle(bias, q_positions, k_positions):
    """(H, Sq, Sk), float64, by loops over pairs, heads and hidden units."""
    state = {name: value.double() for name, value in bias.state_dict().items()}
    c, threshold = float(state["c"]), abs(float(state["L_multiplier"]) * bias.init_L)

    def one(head, m, n):
        x = math.log(abs(c * (m - n)) + 1) / (math.log(abs(c * max(m, threshold)) + 1) + 1e-6)
        hidden = [max(0.0, float(w * x + b)) for w, b in zip(state["mlp.0.weight"], state["mlp.0.bias"], strict=True)]
        return sum(float(w) * h for w, h in zip(state["mlp.2.weight"][head], hidden, strict=True)) + float(
            state["mlp.2.bias"][head]
        )

    return torch.tensor(
        [[[one(head, m, n) for n in k_positions] for m in q_positions] for head in range(bias.num_heads)],
        dtype=torch.float64,
    )


def make(heads=3, *, seed=0, **options):
    torch.manual_seed(seed)
    return Fire(heads, **options)


class TestFormula:
    """The code in the paper's appendix, pair by pair."""

    @pytest.mark.parametrize("hidden", [1, 5, 32])
    def test_against_loops(self, hidden):
        bias = make(hidden=hidden, init_L=20.0).double()
        with torch.no_grad():
            bias.c.fill_(0.3)
            bias.L_multiplier.fill_(-0.7)
        q, k = [13, 0, 900, 15], [0, 12, 899, 15, 20]
        torch.testing.assert_close(
            bias(torch.tensor(q), torch.tensor(k))[0], oracle(bias, q, k), rtol=1e-12, atol=1e-12
        )

    def test_float32_to_a_few_roundings(self):
        bias = make()
        q, k = [700, 3], [0, 699, 3]
        # 32 terms of a size below 1, each with a handful of roundings.
        error = bias(torch.tensor(q), torch.tensor(k))[0].double() - oracle(bias, q, k)
        assert error.abs().max() < 32 * 4 * 2.0**-24

    def test_fractions(self):
        bias = make(init_L=4.0).double()
        q, k = [9.5, 2.25], [2.0, 0.75]
        dense = bias(torch.tensor(q, dtype=torch.float64), torch.tensor(k, dtype=torch.float64))
        torch.testing.assert_close(dense[0], oracle(bias, q, k), rtol=1e-12, atol=1e-12)

    def test_a_threshold_of_zero_at_position_zero(self):
        bias = make()
        with torch.no_grad():
            bias.L_multiplier.zero_()
        dense = bias(torch.tensor([0]), torch.tensor([0]))
        assert torch.isfinite(dense).all()


class TestShape:
    """What the construction promises of every trained network."""

    def test_the_same_number_at_distance_zero_everywhere(self):
        bias = make(init_L=16.0)
        positions = torch.tensor([0, 5, 17, 100, 10**6])
        diagonal = bias(positions, positions).diagonal(dim1=2, dim2=3)
        assert torch.equal(diagonal, diagonal[..., :1].expand_as(diagonal))

    def test_bounded_at_any_length(self):
        # What enters the network is in [0, 1], so no number is above the most that it gives there.
        bias = make(init_L=16.0)
        x = torch.linspace(0, 1, 20001)[:, None]
        most = bias.mlp(x).abs().max()
        for query in (3, 16, 1000, 10**6):
            keys = torch.linspace(0, query, 500).round().long()
            assert bias(torch.tensor([query]), keys).abs().max() <= most * (1 + 1e-4)

    def test_the_first_token_is_at_the_end_of_the_network(self):
        bias = make(init_L=16.0).double()
        end = bias.mlp(torch.ones(1, dtype=torch.float64))
        for query in (16, 500, 10**6):
            # The guard against zero moves the end by 1e-6 of 1 / psi.
            torch.testing.assert_close(
                bias(torch.tensor([query]), torch.tensor([0]))[0, :, 0, 0], end, rtol=0, atol=1e-5
            )

    def test_shifts_are_free_up_to_the_threshold_and_not_past_it(self):
        bias = make(init_L=64.0).double()
        positions = torch.arange(10)
        here, near, past = (bias(positions + shift, positions + shift) for shift in (0, 50, 200))
        assert torch.equal(near, here)
        assert (past - here).abs().tril(-1).max() > 0.01

    def test_a_longer_threshold_looks_further(self):
        # Twice the multiplier is twice the threshold.
        bias, other = make(init_L=64.0), make(init_L=128.0)
        with torch.no_grad():
            bias.L_multiplier.fill_(2.0)
        positions = torch.arange(90)
        assert torch.equal(bias(positions, positions), other(positions, positions))


class TestCheckpoints:
    """The state of the authors' module, with the constant that they store beside what is learned."""

    def state(self, init_L):
        return {
            "mlp.0.weight": torch.randn(32, 1),
            "mlp.0.bias": torch.randn(32),
            "mlp.2.weight": torch.randn(4, 32),
            "mlp.2.bias": torch.randn(4),
            "c": torch.tensor(0.2),
            "init_L": torch.tensor(init_L),
            "L_multiplier": torch.tensor(0.9),
        }

    def test_loads(self):
        holder = torch.nn.Module()
        holder.fire = Fire(4)
        state = self.state(512.0)
        holder.load_state_dict({f"fire.{name}": value for name, value in state.items()}, strict=True)
        assert torch.equal(holder.fire.mlp[2].weight, state["mlp.2.weight"])
        assert holder.fire.c.item() == pytest.approx(0.2)
        assert "fire.init_L" not in holder.state_dict()

    def test_another_constant_is_refused(self):
        with pytest.raises(RuntimeError, match="init_L: the checkpoint has 256, this module 512"):
            Fire(4).load_state_dict(self.state(256.0), strict=True)

    def test_initial_values(self):
        bias = Fire(4, init_c=0.25, init_L=100.0)
        assert bias.c.item() == 0.25
        assert bias.L_multiplier.item() == 1.0


class TestRefusals:
    """Networks and constants that cannot be."""

    @pytest.mark.parametrize("hidden", [0, -3, 2.0, True])
    def test_hidden(self, hidden):
        with pytest.raises(ValueError, match=r"hidden: got .*; it must be a whole number of at least 1"):
            Fire(4, hidden=hidden)

    @pytest.mark.parametrize("name", ["init_c", "init_L"])
    @pytest.mark.parametrize("number", [0.0, -1.0, math.nan, math.inf])
    def test_constants(self, name, number):
        with pytest.raises(ValueError, match=rf"{name}: got .*; it must be a positive number"):
            Fire(4, **{name: number})
