"""Where models are trained and tested: the cells of a comparison, each made once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from theodolite.compare.batch import Batch, Data
from theodolite.compare.evaluation import Floats, answers, losses, losses_near
from theodolite.compare.memory import kept_for_backward
from theodolite.compare.policies import PolicySpec
from theodolite.compare.settings import Settings
from theodolite.compare.trained import Weights
from theodolite.compare.training import Training, train
from theodolite.models.decoder import Decoder
from theodolite.plan import ModelPlan
from theodolite.positions import RelativeMap
from theodolite.positions.samplers import pose_positions
from theodolite.runs import Finished, Store
from theodolite.survey.bench import Listener
from theodolite.survey.maps import record

if TYPE_CHECKING:
    from accelerate import Accelerator

# Raised when a cell is made in another way than before under the same description.
_VERSION = 1

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training that is done.

    Args:
        cell: its description.
        weights: the digest of its weights; None where it diverged.
        result: what is stored of it.
    """

    cell: dict[str, Any]
    spec: PolicySpec
    seed: int
    weights: str | None
    result: dict[str, Any]

    @property
    def diverged(self) -> str | None:
        reason: str | None = self.result["diverged"]
        return reason


@dataclass(frozen=True, kw_only=True)
class Frequencies:
    """What a trained rotary model is run under in place of what it was trained with."""

    name: str
    plan: ModelPlan
    relative: RelativeMap | None = None

    @property
    def identity(self) -> dict[str, Any]:
        inv_freq = [[float(f) for f in rotary.inv_freq()] for rotary in self.plan.rotaries]
        factors = [rotary.attention_factor() for rotary in self.plan.rotaries]
        relative = None if self.relative is None else record(self.relative)
        return {"inv_freq": inv_freq, "attention_factor": factors, "relative": relative}


class Stand:
    """Makes cells, or takes them from the store where they were made before.

    In several processes each trains its share, and the first one stores and tests.
    """

    def __init__(
        self, settings: Settings, data: Data, accelerator: Accelerator, store: Store | None, listener: Listener
    ) -> None:
        self.settings, self.data, self.accelerator = settings, data, accelerator
        self.store, self.listener = store, listener
        self.weights = Weights(settings.out)

    def model(self, spec: PolicySpec, frequencies: Frequencies | None = None) -> Decoder:
        """A decoder with the policy, its weights not set."""
        size = self.settings.size
        places = spec.build(
            hidden_size=size.hidden_size,
            num_layers=size.num_layers,
            num_heads=size.num_heads,
            head_dim=size.head_dim,
            length=self.settings.training.length,
            plan=None if frequencies is None else frequencies.plan,
        )
        return Decoder(
            self.data.vocab_size,
            size.hidden_size,
            size.num_heads,
            places.policies,
            embed=places.embed,
            qk_norm=1e-6 if size.qk_norm else None,
            relative=None if frequencies is None else frequencies.relative,
        )

    def train(self, spec: PolicySpec, seed: int) -> Run:
        """Train a policy from the weights that the seed gives."""
        cell = self._cell("training", spec, seed=seed, training=asdict(self.settings.training))
        data, length, rows = self.data, self.settings.training.length, self.settings.training.rows

        def batches(step: int) -> Batch:
            return data.training_batch(step, rows=rows, length=length, seed=seed)

        return self._trained(
            cell, spec, seed, lambda: self.model(spec).initialise(seed), batches, self.settings.training
        )

    def fine_tune(self, run: Run, frequencies: Frequencies, style: str) -> Run:
        """Train on, under other frequencies and at a longer length."""
        plain, aim = style == "plain", self.settings.aim
        training = self._longer_training(plain)
        cell = self._cell(
            "fine-tuning",
            run.spec,
            seed=run.seed,
            weights=run.weights,
            frequencies=frequencies.identity,
            style=style,
            aim=aim,
            training=asdict(training),
        )
        seed = run.seed

        def batches(step: int) -> Batch:
            # Other batches than those of the training before it.
            batch = self.data.training_batch(
                step + self.settings.training.steps, rows=training.rows, length=training.length, seed=seed
            )
            if plain:
                return batch
            generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
            positions = pose_positions(training.rows, training.length, max_position_embeddings=aim, generator=generator)
            return replace(batch, positions=positions)

        return self._trained(cell, run.spec, seed, lambda: self._loaded(run, frequencies), batches, training)

    def _longer_training(self, plain: bool) -> Training:
        """As many tokens a step as before, at a third of the rate."""
        training, aim = self.settings.training, self.settings.aim
        length = aim if plain else training.length
        rows = max(self.accelerator.num_processes, training.rows * training.length // length)
        return replace(training, length=length, rows=rows, steps=self.settings.fine_tuning, lr=training.lr / 3)

    def read(self, run: Run, frequencies: Frequencies | None = None) -> Floats:
        """The loss of each token of the test, (rows, S); S is the longest that the policy can read."""
        stop = run.spec.longest(self.settings.training.length)
        longest, rows = self.settings.longest, self.settings.rows
        given = {"rows": rows, "length": longest, "read": longest if stop is None else min(stop, longest)}
        cell = self._test("losses", run, frequencies, **given)

        def measure() -> tuple[dict[str, Any], Floats]:
            model = self._loaded(run, frequencies)
            return {}, losses(model, self.data, device=self.accelerator.device, **given)

        return self._array(self._once(cell, measure))

    def read_near(self, run: Run, lengths: tuple[int, ...]) -> Floats:
        """The loss of the last tokens of each length with no more than the training length before them."""
        settings = self.settings
        given: dict[str, Any] = {
            "rows": settings.rows,
            "length": settings.longest,
            "ends": list(lengths),
            "context": settings.training.length,
            "tail": settings.tail,
        }
        cell = self._test("near losses", run, None, **given)

        def measure() -> tuple[dict[str, Any], Floats]:
            model = self._loaded(run, None)
            return {}, losses_near(model, self.data, device=self.accelerator.device, **given)

        return self._array(self._once(cell, measure))

    def answer(self, run: Run, length: int, frequencies: Frequencies | None = None) -> Floats:
        """How each row of the task was answered at a length: (rows, 3), as `answers` has it."""
        cell = self._test("answers", run, frequencies, length=length, rows=self.settings.rows)

        def measure() -> tuple[dict[str, Any], Floats]:
            model = self._loaded(run, frequencies)
            found = answers(model, self.data, rows=self.settings.rows, length=length, device=self.accelerator.device)
            return {}, found

        return self._array(self._once(cell, measure))

    def _cell(self, what: str, spec: PolicySpec, **given: Any) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "what": what,
            "policy": spec.name,
            "size": asdict(self.settings.size),
            "data": dict(self.data.identity),
            "precision": self.accelerator.mixed_precision,
            **given,
        }

    def _test(self, what: str, run: Run, frequencies: Frequencies | None, **given: Any) -> dict[str, Any]:
        identity = None if frequencies is None else frequencies.identity
        trained = self.settings.training.length
        return self._cell(what, run.spec, weights=run.weights, trained=trained, frequencies=identity, **given)

    def _trained(
        self,
        cell: dict[str, Any],
        spec: PolicySpec,
        seed: int,
        make: Callable[[], Decoder],
        batches: Callable[[int], Batch],
        training: Training,
    ) -> Run:
        found = self._first(lambda store: self._kept(store, cell))
        if found is None:
            model = make()
            kept = kept_for_backward(model.to(self.accelerator.device), batches(0))
            begun = time.monotonic()
            done = train(model, batches, training, self.accelerator, advance=self.listener.advance)
            seconds = time.monotonic() - begun
            result = {
                "curve": [list(point) for point in done.curve],
                "diverged": done.diverged,
                "parameters": sum(p.numel() for p in model.parameters()),
                "kept_bytes": kept,
            }
            speed = {"tokens_per_second": round(done.tokens_per_second), "seconds": round(seconds, 2)}

            def keep(store: Store) -> dict[str, Any]:
                weights = None if done.diverged else self.weights.save(cell, model)
                stored = store.put(cell, {**result, "weights": weights, "speed": speed}, again=True)
                return stored.result

            found = self._first(keep)
        else:
            self.listener.advance(training.steps)
        assert found is not None
        return Run(cell=cell, spec=spec, seed=seed, weights=found["weights"], result=found)

    def _kept(self, store: Store, cell: dict[str, Any]) -> dict[str, Any] | None:
        """What is stored of a training, if its weights are there."""
        found = store.get(cell)
        if found is None:
            return None
        digest = found.result["weights"]
        whole = digest is None or self.weights.read(cell, digest) is not None
        return found.result if whole else None

    def _loaded(self, run: Run, frequencies: Frequencies | None) -> Decoder:
        weights: dict[str, Tensor] | None = None if run.weights is None else self.weights.read(run.cell, run.weights)
        if weights is None:
            raise ValueError(
                f"weights of {run.spec.name}, seed {run.seed}: gone while the comparison ran; run it again"
            )
        model = self.model(run.spec, frequencies)
        model.load_state_dict(weights)
        moved: nn.Module = model.to(self.accelerator.device)
        assert isinstance(moved, Decoder)
        return moved

    def _once(self, cell: dict[str, Any], measure: Callable[[], tuple[dict[str, Any], Floats]]) -> Finished | None:
        """A test, by the first process."""
        if self.store is None:
            return None
        found = self.store.get(cell)
        if found is None:
            result, array = measure()
            found = self.store.put(cell, result, array=array)
        return found

    def _array(self, found: Finished | None) -> Floats:
        if found is None or found.array is None:
            return torch.empty(0, 0).numpy()
        return found.array

    def _first(self, ask: Callable[[Store], T]) -> T:
        """What the first process, which has the store, answers; told to all."""
        answer: list[Any] = [ask(self.store) if self.store is not None else None]
        if self.accelerator.num_processes > 1:
            from accelerate.utils import broadcast_object_list

            broadcast_object_list(answer)
        told: T = answer[0]
        return told
