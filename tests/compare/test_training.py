"""Training against a loop written out, and in two processes against one."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.compare.words import VOCAB, Last, Words
from theodolite.compare.batch import IGNORE, Batch
from theodolite.compare.memory import kept_for_backward
from theodolite.compare.policies import read_policy
from theodolite.compare.trained import Weights
from theodolite.compare.training import Training, optimiser_of, train
from theodolite.models.decoder import Decoder
from theodolite.plan import PlanError

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def accelerator() -> Any:
    return accelerate.Accelerator(cpu=True)


def model(name: str = "rope+alibi") -> Decoder:
    places = read_policy(name).build(hidden_size=16, num_layers=2, num_heads=2, head_dim=8, length=8)
    return Decoder(VOCAB, 16, 2, places.policies, embed=places.embed).initialise(0)


def batches(step: int, data: Words | None = None) -> Batch:
    return (data or Words()).training_batch(step, rows=4, length=8, seed=0)


class TestLoop:
    """What accelerate runs is the loop that one would write."""

    @pytest.mark.parametrize("data", [Words(), Last()])
    def test_is_a_loop_written_out(self, accelerator, data):
        training = Training(length=8, rows=4, steps=20, lr=1e-2, warmup=0.2, clip=0.5)
        trained, by_hand = model(), model()
        done = train(trained, lambda step: batches(step, data), training, accelerator)
        matrices = [m.weight for m in by_hand.modules() if isinstance(m, nn.Linear)]
        others = [p for p in by_hand.parameters() if all(p is not m for m in matrices)]
        optimiser = torch.optim.AdamW(
            [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,
        )
        losses = []
        for step in range(20):
            rate = (
                1e-2 * (step + 1) / 4 if step < 4 else 1e-2 * (0.1 + 0.45 * (1 - math.cos(math.pi * (20 - step) / 16)))
            )
            for group in optimiser.param_groups:
                group["lr"] = rate
            batch = batches(step, data)
            loss = cross_entropy(by_hand(batch.ids, batch.positions).flatten(0, 1), batch.targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
            optimiser.step()
            optimiser.zero_grad()
            losses.append(float(loss.detach()))
        wanted = by_hand.state_dict()
        for name, tensor in trained.state_dict().items():
            # The mean is a sum times the reciprocal here, half a rounding apart, over 20 steps of 1e-2.
            assert torch.allclose(tensor, wanted[name], atol=2e-5, rtol=0), name
        assert [point[0] for point in done.curve] == list(range(1, 21))
        assert [point[1] for point in done.curve] == pytest.approx(losses, abs=1e-5)
        assert done.diverged is None

    def test_curves_have_at_most_a_hundred_points(self, accelerator):
        done = train(model(), batches, Training(length=8, rows=4, steps=230), accelerator)
        assert len(done.curve) == 77
        assert [point[0] for point in done.curve[:2]] == [3, 6]
        assert done.curve[-1][0] == 230
        assert done.tokens == 227 * 32
        assert done.seconds > 0

    def test_says_how_far_it_is(self, accelerator):
        told: list[int] = []
        train(model(), batches, Training(length=8, rows=4, steps=205), accelerator, advance=told.append)
        assert sum(told) == 205

    def test_a_diverged_run_ends(self, accelerator):
        done = train(model(), batches, Training(length=8, rows=4, steps=50, lr=1e30), accelerator)
        assert "the loss was" in done.diverged or "the loss rose" in done.diverged

    def test_a_run_that_gets_worse_is_none(self, accelerator):
        net = model()
        train(net, batches, Training(length=8, rows=4, steps=150, lr=1e-2), accelerator)
        short = Training(length=8, rows=4, steps=20, lr=1e-9)
        done = train(net, lambda step: batches(step) if step < 5 else _upside_down(step), short, accelerator)
        assert "the loss rose from" in done.diverged


def _upside_down(step: int) -> Batch:
    batch = batches(step)
    return Batch(ids=batch.ids, targets=(batch.targets + 5) % VOCAB, positions=batch.positions)


class TestSettings:
    def test_rates(self):
        training = Training(steps=100, lr=1.0, warmup=0.1)
        assert [training.rate(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
        assert training.rate(10) == pytest.approx(1.0)
        assert training.rate(55) == pytest.approx(0.55)
        assert 0.1 < training.rate(99) < 0.11
        assert Training(steps=1, warmup=0.0).rate(0) > 0

    @pytest.mark.parametrize(
        "given", [{"steps": 0}, {"length": 0}, {"rows": 0}, {"lr": math.nan}, {"lr": -1.0}, {"warmup": 2.0}]
    )
    def test_refuses(self, given):
        with pytest.raises(PlanError, match=next(iter(given))):
            Training(**given)

    def test_what_decays(self):
        net = model("rope+t5")
        groups = optimiser_of(net, Training()).param_groups
        names = {id(p): name for name, p in net.named_parameters()}
        decayed, others = ({names[id(p)] for p in group["params"]} for group in groups)
        assert (groups[0]["weight_decay"], groups[1]["weight_decay"]) == (0.1, 0.0)
        assert {"layers.0.attention.q_proj.weight", "layers.1.mlp.down.weight"} <= decayed
        assert {"tokens.weight", "norm.weight", "layers.0.attention.policy.bias.weight"} <= others
        assert decayed | others == set(names.values())

    def test_projections_of_positions_do_not_decay(self):
        net = model("transformer-xl")
        groups = optimiser_of(net, Training()).param_groups
        names = {id(p): name for name, p in net.named_parameters()}
        assert not [names[id(p)] for p in groups[0]["params"] if "policy" in names[id(p)]]


_PROGRAM = """
import json, sys
from accelerate import Accelerator
from tests.compare.test_training import batches, model
from tests.compare.words import Last
from theodolite.compare.training import Training, train
accelerator = Accelerator(cpu=True)
net = model()
done = train(net, lambda step: batches(step, Last()), Training(length=8, rows=4, steps=12, lr=1e-2), accelerator)
if accelerator.is_main_process:
    weights = {name: tensor.flatten().tolist() for name, tensor in net.state_dict().items()}
    json.dump({"processes": accelerator.num_processes, "curve": done.curve, "weights": weights}, open(sys.argv[1], "w"))
"""


class TestProcesses:
    """Two processes with half of the rows each are one with all."""

    def test_two_are_one(self, tmp_path):
        program = tmp_path / "program.py"
        program.write_text(_PROGRAM)
        found = []
        for count in (1, 2):
            out = tmp_path / f"{count}.json"
            command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", "--master-port=0"]
            command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(program), str(out)]
            given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]), "ACCELERATE_USE_CPU": "1"}
            environment = {**os.environ, **given}
            done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
            found.append(json.loads(out.read_text()))
        one, two = found
        assert (one["processes"], two["processes"]) == (1, 2)
        assert [p[1] for p in two["curve"]] == pytest.approx([p[1] for p in one["curve"]], abs=1e-5)
        for name, weights in one["weights"].items():
            # A gradient summed in another order: Adam makes of a rounding at most that share of a step, 12 of 1e-2.
            assert two["weights"][name] == pytest.approx(weights, abs=1e-4), name

    def test_rows_must_be_shared_out(self, accelerator, monkeypatch):
        monkeypatch.setattr(type(accelerator), "num_processes", property(lambda self: 3))
        with pytest.raises(PlanError, match="a multiple of the 3 processes"):
            train(model(), batches, Training(length=8, rows=4, steps=2), accelerator)


class TestKept:
    """Memory is counted, so that it is the same on every machine."""

    def test_by_hand(self):
        class Linear(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(VOCAB, 6)
                self.out = nn.Linear(6, VOCAB, bias=False)

            def forward(self, ids, positions):
                return self.out(self.table(ids))

        batch = Words().training_batch(0, rows=4, length=8, seed=0)
        # Ids with the token after them, what the linear map reads, the log-softmax, targets, and their number.
        assert kept_for_backward(Linear(), batch) == 4 * 9 * 8 + 32 * (6 * 4 + VOCAB * 4 + 8) + 4

    def test_is_the_same_again(self):
        net, batch = model(), batches(0)
        assert kept_for_backward(net, batch) == kept_for_backward(net, batch) > 0
        assert all(parameter.grad is None for parameter in net.parameters())

    def test_a_bias_of_all_pairs_is_seen(self):
        long = Words().training_batch(0, rows=1, length=256, seed=0)
        assert kept_for_backward(model("rope"), long) < 2 * kept_for_backward(model("alibi"), long)


class TestWeightsOnDisk:
    def test_come_back_as_they_were(self, tmp_path):
        net, cell = model(), {"what": "training"}
        digest = Weights(tmp_path).save(cell, net)
        found = Weights(tmp_path).read(cell, digest)
        assert found.keys() == net.state_dict().keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in net.state_dict().items())

    def test_damaged_or_gone_are_none(self, tmp_path):
        weights, cell = Weights(tmp_path), {"what": "training"}
        digest = weights.save(cell, model())
        (path,) = (tmp_path / "weights").iterdir()
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert weights.read(cell, digest) is None
        path.unlink()
        assert weights.read(cell, digest) is None
        assert weights.read({"what": "other"}, digest) is None


def test_targets_that_are_not_asked_do_not_count():
    assert int((Last().training_batch(0, rows=4, length=8, seed=0).targets != IGNORE).sum()) == 4
