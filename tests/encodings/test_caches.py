"""Keys that were turned before: evicted windows, frequencies that change with the length, rows of one token."""

from __future__ import annotations

import pytest
import torch

from theodolite.encodings import RotaryEmbedding, rerotate
from theodolite.plan import DynamicNTK, LongRoPE, Rotary, YaRN

HEAD_DIM, TOKENS = 16, 24
SCALINGS = {
    "dynamic": DynamicNTK(factor=2, original_max_position_embeddings=16),
    "longrope": LongRoPE(
        short_factor=(1.0,) * 8,
        long_factor=tuple(1.0 + i for i in range(8)),
        factor=4.0,
        original_max_position_embeddings=16,
    ),
}


def inputs(tokens: int = TOKENS, *, batch: int = 2, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, batch, heads, tokens, HEAD_DIM, generator=generator, dtype=torch.float64)
    return q, k


def rotary(**options) -> Rotary:
    return Rotary(head_dim=HEAD_DIM, rope_theta=100.0, **options)


def close(one: torch.Tensor, other: torch.Tensor, *, turns: int) -> None:
    """Tables are float32: each turn is off by 2**-24 of the length of a pair, both ways, and so are the scores."""
    size = 4 * HEAD_DIM**0.5
    assert (one - other).abs().max() <= turns * 4 * 2.0**-24 * size * size


class TestSinksAndWindow:
    """The first tokens are kept and the last ones; all stand at their index in the cache, 0 to its length."""

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_moved_keys_are_those_turned_at_their_index(self, interleaved):
        sinks, window, plan = 2, 4, rotary(interleaved=interleaved)
        rope, (q, k) = RotaryEmbedding(plan), inputs()
        cached = rope(None, k[:, :, : sinks + window], torch.arange(sinks + window))[1]
        for token in range(sinks + window, TOKENS):
            moved = rerotate(cached[:, :, sinks + 1 :], rotary=plan, by=-1)
            at = torch.tensor([sinks + window - 1])
            turned_q, new = rope(q[:, :, [token]], k[:, :, [token]], at)
            cached = torch.cat((cached[:, :, :sinks], moved, new), dim=2)
            kept = [*range(sinks), *range(token - window + 1, token + 1)]
            afresh = rope(None, k[:, :, kept], torch.arange(sinks + window))[1]
            # A key is moved once for each token that it has been in the window: at most window - 1 times.
            close(turned_q @ cached.mT, turned_q @ afresh.mT, turns=window + 1)


class TestFrequenciesThatChange:
    """Keys that were turned by the frequencies of a shorter sequence are turned to those of the longer one."""

    @pytest.mark.parametrize("kind", SCALINGS)
    def test_token_by_token_equals_one_shot(self, kind):
        plan, (q, k) = rotary(scaling=SCALINGS[kind]), inputs()
        whole = RotaryEmbedding(plan.at_length(TOKENS))(q, k, torch.arange(TOKENS))
        cached, before = k[:, :, :0], plan.at_length(1)
        for token in range(TOKENS):
            now = plan.at_length(token + 1)
            if now != before:
                cached = rerotate(cached, old=before, new=now, positions=torch.arange(token))
            rope, at = RotaryEmbedding(now), torch.tensor([token])
            turned_q, new = rope(q[:, :, [token]], k[:, :, [token]], at)
            cached, before = torch.cat((cached, new), dim=2), now
        close(turned_q @ cached.mT, whole[0][:, :, -1:] @ whole[1].mT, turns=TOKENS)

    def test_keeping_them_would_be_wrong(self):
        plan, (q, k) = rotary(scaling=SCALINGS["longrope"]), inputs()
        short, long = (RotaryEmbedding(plan.at_length(tokens)) for tokens in (16, TOKENS))
        turned_q, right = long(q, k, torch.arange(TOKENS))
        stale = short(None, k, torch.arange(TOKENS))[1]
        assert (turned_q @ stale.mT - turned_q @ right.mT).abs().max() > 1

    def test_each_row_by_its_own_length(self):
        """A batch of a short row and a long one: the short row keeps the short factors."""
        plan, (q, k) = rotary(scaling=SCALINGS["longrope"]), inputs()
        positions = torch.arange(TOKENS).expand(2, -1)
        both = RotaryEmbedding(plan)(q, k, positions, lengths=[8, 40])
        for row, length in enumerate((8, 40)):
            alone = RotaryEmbedding(plan.at_length(length))(q[[row]], k[[row]], positions[[row]])
            assert torch.equal(both[0][[row]], alone[0])
            assert torch.equal(both[1][[row]], alone[1])

    def test_the_amplitude_moves_along(self):
        old, (_, k) = rotary(), inputs()
        new = rotary(scaling=YaRN(factor=4, original_max_position_embeddings=16))
        positions = torch.arange(100, 100 + TOKENS)
        moved = rerotate(RotaryEmbedding(old)(None, k, positions)[1], old=old, new=new, positions=positions)
        close(moved, RotaryEmbedding(new)(None, k, positions)[1], turns=3)


class TestOneToken:
    """Decoding: rows of one token, at places of their own, as each would be alone."""

    @pytest.mark.parametrize("batch", [1, 3])
    @pytest.mark.parametrize("heads", [1, 4])
    def test_rows_as_alone(self, batch, heads):
        (q, k), rope = inputs(1, batch=batch, heads=heads), RotaryEmbedding(rotary())
        positions = torch.tensor([[7], [40_000], [0]])[:batch]
        together = rope(q, k, positions)
        for row in range(batch):
            alone = rope(q[[row]], k[[row]], positions[[row]])
            assert torch.equal(together[0][[row]], alone[0])
            assert torch.equal(together[1][[row]], alone[1])
