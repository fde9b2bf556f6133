"""The comparison itself: every policy with every seed, then what carries the rotary ones further."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from theodolite.compare.batch import Data
from theodolite.compare.evaluation import Floats
from theodolite.compare.result import summarize
from theodolite.compare.settings import Settings
from theodolite.compare.stand import Frequencies, Run, Stand
from theodolite.plan import ModelPlan, PlanError
from theodolite.runs import Store, write_json
from theodolite.survey.bench import Listener
from theodolite.survey.scalings import AS_SHIPPED, parse_scalings, require_known

if TYPE_CHECKING:
    from accelerate import Accelerator

FILE = "compare.json"


@dataclass(frozen=True, kw_only=True)
class Extended:
    """A trained rotary model under other frequencies.

    Args:
        style: how it was trained on under them ("plain", "pose"), or None for as it was.
        nll: (rows, S), the loss of each token of the test.
    """

    policy: str
    seed: int
    scaling: str
    style: str | None
    nll: Floats


@dataclass(kw_only=True)
class Measured:
    """All that a comparison measured.

    Args:
        runs: the trainings, by policy and seed.
        losses: of nested tests, (rows, S), by policy and seed.
        near: the same tokens read with the training length alone, end by end (`read_near`).
        answers: of tasks, (rows, 3), by policy, seed and length.
    """

    runs: dict[tuple[str, int], Run] = field(default_factory=dict)
    losses: dict[tuple[str, int], Floats] = field(default_factory=dict)
    near: dict[tuple[str, int], Floats] = field(default_factory=dict)
    answers: dict[tuple[str, int, int], Floats] = field(default_factory=dict)
    extended: list[Extended] = field(default_factory=list)


def compare(settings: Settings, data: Data, accelerator: Accelerator, listener: Listener) -> dict[str, Any]:
    """Train each policy with each seed, measure, write and return the result.

    What is done goes to `settings.out` as it comes, and is not done again: a comparison that was killed goes on where
    it was, and one with more policies, seeds or lengths does what is new in it.

    Raises:
        PlanError: a setting that does not fit the data or the policies.
        ValueError: too little text.
        BlockingIOError: another run writes to the folder.
    """
    require_possible(settings, data)
    with Store(settings.out) if accelerator.is_main_process else nullcontext() as store:
        stand = Stand(settings, data, accelerator, store, listener)
        measured = _Comparison(stand).run()
        if not accelerator.is_main_process:
            return {}
        result = summarize(settings, data, measured, accelerator)
        write_json(settings.out / FILE, result)
    return result


def require_possible(settings: Settings, data: Data) -> None:
    """Raise for what cannot be done, before any of it is begun."""
    length = settings.training.length
    data.require(length=length, longest=settings.longest, rows=settings.rows)
    for names in (settings.scalings, settings.fine_tuned):
        require_known(names)
    size = settings.size
    for spec in settings.specs:
        # A part may be too narrow for the heads, which nothing but making it tells.
        spec.build(
            hidden_size=size.hidden_size,
            num_layers=size.num_layers,
            num_heads=size.num_heads,
            head_dim=size.head_dim,
            length=length,
        )
        stop = spec.longest(length)
        if stop is not None and not data.nested and stop < settings.longest:
            raise PlanError(
                "policies",
                spec.name,
                f"it has no positions past {stop}, and {data.name} is asked at {settings.longest}: leave it out, or "
                "give --times 1",
            )


class _Comparison:
    def __init__(self, stand: Stand) -> None:
        self.stand, self.settings, self.listener = stand, stand.settings, stand.listener
        self.nested = stand.data.nested
        self.measured = Measured()

    def run(self) -> Measured:
        settings = self.settings
        self.listener.expect(self._work())
        for seed in settings.seeds:
            for spec in settings.specs:
                self.listener.working(f"training {spec.name}, seed {seed}")
                run = self.stand.train(spec, seed)
                self.measured.runs[spec.name, seed] = run
                self._test(run)
        for run in self._extendable():
            self._extend(run)
        return self.measured

    def _test(self, run: Run) -> None:
        name, seed = run.spec.name, run.seed
        if run.diverged is not None:
            self.listener.finished(f"{name:<16} seed {seed}  diverged: {run.diverged}")
            return
        if self.nested:
            self.measured.losses[name, seed] = self.stand.read(run)
            stop = run.spec.longest(self.settings.training.length)
            if stop is None and len(self.settings.lengths) > 1:
                self.measured.near[name, seed] = self.stand.read_near(run, self.settings.lengths[1:])
        else:
            for length in self.settings.lengths:
                self.measured.answers[name, seed, length] = self.stand.answer(run, length)
        self.listener.finished(f"{name:<16} seed {seed}  {self._line(name, seed)}")

    def _line(self, name: str, seed: int) -> str:
        lengths = self.settings.lengths
        if not self.nested:
            right = [self.measured.answers[name, seed, length] for length in lengths]
            if not right[0].size:
                return "tested by the first process"
            return "right: " + ", ".join(f"{r[:, 0].mean():.1%} at {n:,}" for r, n in zip(right, lengths, strict=True))
        nll = self.measured.losses[name, seed]
        if not nll.size:
            return "tested by the first process"
        figures = [f"{nll[:, :n].mean():.3f} at {n:,}" for n in lengths if n <= nll.shape[1]]
        return "nats a token: " + ", ".join(figures)

    def _extendable(self) -> list[Run]:
        if not self.nested:
            return []
        return [run for run in self.measured.runs.values() if run.diverged is None and self._plan(run) is not None]

    def _plan(self, run: Run) -> ModelPlan | None:
        size = self.settings.size
        return run.spec.plan(num_layers=size.num_layers, head_dim=size.head_dim, length=self.settings.training.length)

    def _frequencies(self, run: Run, names: str, *, seen: set[str]) -> list[Frequencies]:
        plan = self._plan(run)
        assert plan is not None

        def tell(line: str) -> None:
            # The same for every seed.
            if line not in seen:
                seen.add(line)
                self.listener.finished(f"{run.spec.name}: {line}")

        found = parse_scalings(names, plan, to=self.settings.aim, strict=False, tell=tell)
        return [
            Frequencies(name=one.name, plan=one.plan.at_length(self.settings.aim), relative=one.relative)
            for one in found
        ]

    def _extend(self, run: Run) -> None:
        seen: set[str] = set()
        for one in self._frequencies(run, self.settings.scalings, seen=seen):
            if one.name != AS_SHIPPED:
                self._keep(run, one, None, self.stand.read(run, one))
        if not self.settings.fine_tuning:
            return
        wanted = [name.strip() for name in self.settings.fine_tuned.split(",")]
        for one in self._frequencies(run, self.settings.fine_tuned, seen=seen):
            if one.name not in wanted or one.relative is not None:
                continue
            for style in self.settings.styles:
                self.listener.working(f"fine-tuning {run.spec.name} under {one.name}, {style}, seed {run.seed}")
                tuned = self.stand.fine_tune(run, one, style)
                if tuned.diverged is None:
                    self._keep(run, one, style, self.stand.read(tuned, one))

    def _keep(self, run: Run, one: Frequencies, style: str | None, nll: Floats) -> None:
        name = run.spec.name
        self.measured.extended.append(
            Extended(policy=name, seed=run.seed, scaling=one.name, style=style, nll=np.asarray(nll))
        )
        if nll.size:
            what = one.name if style is None else f"{one.name}, {style}"
            figures = ", ".join(f"{nll[:, :n].mean():.3f} at {n:,}" for n in self.settings.lengths)
            self.listener.finished(f"{name:<16} seed {run.seed}  under {what}: {figures}")

    def _work(self) -> float:
        """In steps of training."""
        settings = self.settings
        trainings = len(settings.policies) * len(settings.seeds) * settings.training.steps
        if not settings.fine_tuning or not self.nested:
            return float(trainings)
        rotary = sum(
            spec.plan(
                num_layers=settings.size.num_layers, head_dim=settings.size.head_dim, length=settings.training.length
            )
            is not None
            for spec in settings.specs
        )
        names: Sequence[str] = [name for name in settings.fine_tuned.split(",") if name.strip()]
        tunings = rotary * len(settings.seeds) * len(names) * len(settings.styles) * settings.fine_tuning
        return float(trainings + tunings)
