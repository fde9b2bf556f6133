"""What the harness of `theodolite compare` adds to a bare training loop of the same model on the same batches.

Both loops begin with equal weights and take turns, stretch by stretch, in one process; the weights that they end with
must agree first. Setting up counts, a tenth of a second a training. A bare loop is the fewest lines that train: no
accelerate, no curve, no check of the loss.

    python benchmarks/compare_cost.py [--steps 80] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from theodolite.compare.policies import read_policy
from theodolite.compare.settings import Size
from theodolite.compare.texts import TextData
from theodolite.compare.training import Training, optimiser_of, train
from theodolite.models.decoder import Decoder

MOST = 1.10
_NAMES = ("rope", "alibi")


def fresh(name: str, data: TextData, size: Size, training: Training) -> Decoder:
    """The model that compare trains by default."""
    places = read_policy(name).build(
        hidden_size=size.hidden_size,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        head_dim=size.head_dim,
        length=training.length,
    )
    model = Decoder(data.vocab_size, size.hidden_size, size.num_heads, places.policies, embed=places.embed)
    return model.initialise(seed=0)


def bare(model: Decoder, data: TextData, training: Training) -> None:
    """The fewest lines that do what `train` does."""
    optimiser = optimiser_of(model, training)
    for step in range(training.steps):
        for group in optimiser.param_groups:
            group["lr"] = training.rate(step)
        batch = data.training_batch(step, rows=training.rows, length=training.length, seed=0)
        loss = cross_entropy(model(batch.ids, batch.positions).flatten(0, 1), batch.targets.flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), training.clip)
        optimiser.step()
        optimiser.zero_grad()


def main() -> int:
    """Print the ratio of each policy's times; 1 where one is above the most that is allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    data, size, training = TextData.read(["moby-dick"]), Size(), Training(steps=options.steps)
    accelerator = Accelerator(cpu=True)
    worst = 0.0
    print(f"{options.rounds} rounds of {options.steps} steps each, {torch.get_num_threads()} threads\n")
    for name in _NAMES:
        ratios = []
        for _ in range(options.rounds):
            ours, theirs = (fresh(name, data, size, training) for _ in range(2))
            begun = time.perf_counter()
            bare(theirs, data, training)
            middle = time.perf_counter()
            train(
                ours,
                lambda step: data.training_batch(step, rows=training.rows, length=training.length, seed=0),
                training,
                accelerator,
            )
            ratios.append((time.perf_counter() - middle) / (middle - begun))
            # Half a rounding of the mean apart, which Adam makes at most that share of a step of.
            apart = max(float((a - b).abs().max()) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
            if apart > 1e-3:
                raise AssertionError(f"{name}: the two loops end {apart} apart")
        middle_ratio = statistics.median(ratios)
        worst = max(worst, middle_ratio)
        print(f"{name:8} {middle_ratio:.3f} of the bare loop's time (from {min(ratios):.3f} to {max(ratios):.3f})")
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main())
