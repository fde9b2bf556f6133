"""Losses of tests against float64, and the promise that one pass serves every length."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.compare.words import VOCAB, Last, Words
from theodolite.compare import evaluation
from theodolite.compare.batch import IGNORE
from theodolite.compare.evaluation import answers, losses, losses_near
from theodolite.compare.parts import PARTS
from theodolite.compare.policies import read_policy
from theodolite.models.decoder import Decoder


def model(name: str = "rope", length: int = 8) -> Decoder:
    places = read_policy(name).build(hidden_size=16, num_layers=2, num_heads=2, head_dim=8, length=length)
    return Decoder(VOCAB, 16, 2, places.policies, embed=places.embed).initialise(0)


def nats(logits: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
    logits = logits.detach().double()
    logsumexp = (logits - logits.amax(-1, keepdim=True)).exp().sum(-1).log() + logits.amax(-1)
    return (logsumexp - logits.gather(-1, targets[..., None])[..., 0]).numpy()


class TestLosses:
    def test_are_those_of_the_rows(self):
        net, batch = model(), Words().test_batch(0, rows=7, length=12)
        found = losses(net, Words(), rows=7, length=12)
        assert found.shape == (7, 12)
        # float32 of logits of order 1.
        assert found == pytest.approx(nats(net(batch.ids, batch.positions), batch.targets), abs=2e-6)

    def test_rows_that_do_not_come_out_even(self, monkeypatch):
        wanted = losses(model(), Words(), rows=7, length=12)
        for at_once in (12, 13, 40, 24):
            monkeypatch.setattr(evaluation, "TOKENS_AT_ONCE", at_once)
            assert losses(model(), Words(), rows=7, length=12) == pytest.approx(wanted, abs=2e-6)

    @pytest.mark.parametrize("name", [name for name in PARTS if name != "learned"] + ["rope@3/nope+sinks", "rope+logn"])
    def test_one_pass_serves_every_length(self, name):
        """The first n tokens of a row are read as if there were no others."""
        whole = losses(model(name), Words(), rows=3, length=24)
        for read in (5, 8, 16):
            assert whole[:, :read] == pytest.approx(
                losses(model(name), Words(), rows=3, length=24, read=read), abs=4e-6
            )

    def test_nothing_is_learnt(self):
        net = model()
        losses(net, Words(), rows=2, length=8)
        assert all(parameter.grad is None for parameter in net.parameters())
        assert not net.training


class TestNear:
    def test_are_those_of_the_last_tokens_alone(self):
        net, batch = model(), Words().test_batch(0, rows=5, length=24)
        found = losses_near(net, Words(), rows=5, length=24, ends=[12, 24], context=8, tail=3)
        assert found.shape == (5, 6)
        for i, end in enumerate((12, 24)):
            ids, targets = batch.ids[:, end - 8 : end], batch.targets[:, end - 8 : end]
            wanted = nats(net(ids, torch.arange(8)), targets)[:, -3:]
            assert found[:, 3 * i : 3 * i + 3] == pytest.approx(wanted, abs=2e-6)

    def test_all_context_is_no_other(self):
        whole = losses(model(), Words(), rows=4, length=10)
        assert losses_near(model(), Words(), rows=4, length=10, ends=[10], context=10, tail=4) == pytest.approx(
            whole[:, -4:], abs=2e-6
        )


class TestAnswers:
    def test_are_counted_where_asked(self, monkeypatch):
        data = Last()

        class Knows(torch.nn.Module):
            """Right in even rows, wrong in odd ones."""

            def forward(self, ids, positions):
                said = torch.zeros(*ids.shape, VOCAB)
                right = ids[:, :1].expand_as(ids)
                wrong = (right + 1) % VOCAB
                odd = torch.arange(len(ids))[:, None] % 2 == 1
                return said.scatter(-1, torch.where(odd, wrong, right)[..., None], 5.0)

        found = answers(Knows(), data, rows=6, length=9)
        assert found[:, 0].tolist() == found[:, 1].tolist() == [1, 0, 1, 0, 1, 0]
        low, high = np.log(np.exp(5) + VOCAB - 1) - 5, np.log(np.exp(5) + VOCAB - 1)
        assert found[:, 2] == pytest.approx([low, high] * 3, abs=1e-6)

    def test_a_share_of_a_row(self):
        class Half(Last):
            def _batch(self, seeds, length):
                batch = super()._batch(seeds, length)
                batch.targets[:, -2] = (batch.ids[:, 0] + 1) % VOCAB
                return batch

        class First(torch.nn.Module):
            def forward(self, ids, positions):
                return torch.nn.functional.one_hot(ids[:, :1].expand_as(ids), VOCAB).float()

        found = answers(First(), Half(), rows=3, length=6)
        assert found[:, :2].tolist() == [[0.5, 0.0]] * 3
        assert int((Half().test_batch(0, rows=1, length=6).targets != IGNORE).sum()) == 2
