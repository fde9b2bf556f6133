"""The search itself: named scalings first, then the spaces, the finalists on other text, and the full passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from theodolite.models.load import LoadedModel
from theodolite.plan import ModelPlan, PlanError
from theodolite.runs import Store, write_json
from theodolite.search.confirm import Confirmed, lengths_to_confirm, read_in_full
from theodolite.search.optimise import walk
from theodolite.search.pair_space import PairSpace
from theodolite.search.result import NO_COPYING, summarize
from theodolite.search.searched import Searched, Trial
from theodolite.search.settings import Settings, Texts, checked_length, shared_out, wanted_tokens
from theodolite.search.space import Space
from theodolite.search.spaces import spaces
from theodolite.search.trials import Measure, Trials, Unsaid, require_finite
from theodolite.survey.bench import Bench, Listener, positions_digest
from theodolite.survey.found import FILE, FOUND
from theodolite.survey.reach import Spread
from theodolite.survey.scalings import Candidate, default_factor, parse_scalings
from theodolite.survey.settings import Settings as SurveySettings
from theodolite.survey.texts import read_documents

_CHUNK, _PASSAGES = 256, 2
_YARN_SHARE = 0.4
_MOST_RIVALS = 2


def search(loaded: LoadedModel, settings: Settings, listener: Listener) -> dict[str, Any]:
    """Search a frequency map for a loaded model; write and return the result.

    What is measured goes to `settings.out` as it comes, and is not measured again by the same search, which goes on
    where it was; with more evaluations it goes further.

    Raises:
        PlanError: a setting that does not fit the model, or a model whose frequencies no config could change.
        ValueError: too little text.
        BlockingIOError: another run writes to the folder.
    """
    trained = checked_length(settings, loaded.plan)
    have, lack = spaces(loaded.plan, settings.to)
    if not set(settings.spaces) & set(have):
        raise PlanError("spaces", ",".join(settings.spaces), "; ".join(lack[name] for name in settings.spaces))
    documents = read_documents(
        list(settings.texts),
        loaded.tokenizer,
        tokens=settings.to + 1,
        most=wanted_tokens(settings.to),
        join=settings.join,
        tell=listener.finished,
    )
    texts = shared_out(documents, settings.to)
    with Store(settings.out) as store:
        bench = Bench(loaded, store, listener)
        found = _Search(bench, settings, texts, trained).run(have, lack)
        result = summarize(loaded, settings, found)
        write_json(settings.out / FILE, result)
    return result


class _Search:
    def __init__(self, bench: Bench, settings: Settings, texts: Texts, trained: int) -> None:
        self.bench, self.settings, self.texts, self.trained = bench, settings, texts, trained
        self.listener, self.shipped, self.to = bench.listener, bench.loaded.plan, settings.to
        quiet = Bench(bench.loaded, bench.store, Unsaid(bench.listener))
        spread = Spread(tokens=settings.read, chunk=min(_CHUNK, self.to // 8), passages=_PASSAGES)
        form = SurveySettings(out=settings.out, to=self.to, spread=spread)
        self.measure = Trials(quiet, self.shipped, form, to=self.to)
        self.trials: list[Trial] = []
        self.short = 0.0

    def run(self, have: dict[str, type[Space]], lack: dict[str, str]) -> Searched:
        named = self._named()
        wanted = [name for name in self.settings.spaces if name in have]
        lengths = lengths_to_confirm(self.trained, self.to)
        self.listener.expect(self._work(len(named)))
        for name in self.settings.spaces:
            if name in lack:
                self.listener.finished(f"left out: the space {name}; {lack[name]}")
        copies = self._copies()
        self._try_named(named)
        best: ModelPlan | None = None
        for name, evaluations in zip(wanted, _shares(self.settings.evaluations, wanted), strict=True):
            best = self._walk(name, have[name], best, evaluations)
        rivals = self._rivals()
        finalists = self._finalists(rivals)
        winner = finalists[0][0]
        return Searched(
            trained=self.trained,
            texts=self.texts,
            copies=copies,
            short=self.short,
            trials=self.trials,
            left_out={name: lack[name] for name in self.settings.spaces if name in lack},
            rivals=rivals,
            finalists=finalists,
            winner=winner,
            lengths=lengths,
            confirmed=self._confirm(winner, rivals, lengths),
        )

    def _named(self) -> list[Candidate]:
        factor = default_factor(self.trained, self.to)
        usual = ",".join(
            f"{kind}:{factor * more:g}"
            for kind, most in (("yarn", 1.5), ("ntk", 2.0))
            for more in (1.0, 1.5, 2.0)
            if more <= most
        )
        listed, tell = self.settings.against, self.listener.finished
        candidates = parse_scalings(listed or usual, self.shipped, to=self.to, strict=listed is not None, tell=tell)
        return [candidate for candidate in candidates if candidate.relative is None]

    def _copies(self) -> bool:
        """Whether the model continues passages from near by at all: what one that does not is measured by is noise."""
        copies = self.measure.instruments((self.texts.search,)).threshold() is not None
        if not copies:
            self.listener.finished(f"warning: {NO_COPYING}")
        return copies

    def _try_named(self, named: list[Candidate]) -> None:
        measured = []
        for candidate in named:
            self.listener.working(f"reach of {candidate.name}")
            measured.append(self._measured(candidate.plan, candidate.name))
            self.listener.finished(f"named  {candidate.name:<14} {_line(measured[-1])}")
        self.short = min(measured[index].short for index in _best_of_each(named, measured))
        for candidate, measure in zip(named, measured, strict=True):
            self._keep(candidate.name, "named", (), candidate.plan, measure)

    def _walk(self, name: str, kind: type[Space], start: ModelPlan | None, evaluations: int) -> ModelPlan:
        space = PairSpace(self.shipped, self.to, start) if kind is PairSpace else kind(self.shipped, self.to)

        def cost(point: list[float]) -> float:
            plan = space.plan_of(point)
            measure = self._measured(plan, f"{name} {len(self.trials)}")
            return self._keep(f"{name} {len(self.trials)}", name, tuple(point), plan, measure)

        self.listener.working(f"searching the space {name}")
        best: list[float] = []
        for number, step in enumerate(walk(space, cost, evaluations=evaluations, seed=self.settings.seed)):
            best = step.best
            mine = min((t for t in self.trials if t.space == name), key=lambda t: t.cost)
            self.listener.finished(f"{name:<6} generation {number:<3} {mine.cost:.3f}: {_line(mine.measure)}")
        return space.plan_of(best)

    def _measured(self, plan: ModelPlan, what: str) -> Measure:
        measure = self.measure.measure(plan, (self.texts.search,), what)
        require_finite(measure.copying + measure.short, what)
        return measure

    def _keep(self, name: str, space: str, point: tuple[float, ...], plan: ModelPlan, measure: Measure) -> float:
        cost = measure.cost(self.short)
        self.trials.append(Trial(name=name, space=space, point=point, plan=plan, measure=measure, cost=cost))
        return cost

    def _finalists(self, rivals: list[Trial]) -> list[tuple[Trial, float]]:
        """The best of what was searched, each with its cost on other text, least first."""
        distinct: dict[str, Trial] = {}
        for trial in sorted((t for t in self.trials if t.space != "named"), key=lambda t: t.cost):
            distinct.setdefault(positions_digest(trial.plan.at_length(self.to)), trial)
        chosen = list(distinct.values())[: self.settings.finalists]
        if not self.texts.choice:
            return [(trial, trial.cost) for trial in chosen]
        short = min(self.measure.short_text(rival.plan, self.texts.choice, rival.name) for rival in rivals)
        again = []
        for trial in chosen:
            measure = self.measure.measure(trial.plan, self.texts.choice, trial.name)
            again.append((trial, measure.cost(short)))
            line = f"{measure.cost(short):.3f} on other text: {_line(measure)}"
            self.listener.finished(f"again  {trial.name:<14} {line}")
        return sorted(again, key=lambda pair: pair[1])

    def _rivals(self) -> list[Trial]:
        """The named scaling of each kind that copies best, best first; the model as shipped where there is no other."""
        named = [trial for trial in self.trials if trial.space == "named"]
        return [named[index] for index in _best_of_each(named, [trial.measure for trial in named])]

    def _confirm(self, winner: Trial, rivals: list[Trial], lengths: list[int]) -> dict[str, Confirmed]:
        found = {}
        for name, trial in ((FOUND, winner), *((rival.name, rival) for rival in rivals)):
            short = self.measure.short_text(trial.plan, self.texts.confirm, name)
            read = read_in_full(self.bench, trial.plan, self.texts.confirm, lengths, name, short)
            found[name] = read
            recalled = ", ".join(f"{read.recall[length].mean():.0%} at {length:,}" for length in lengths)
            self.listener.finished(f"pass   {name:<14} recall {recalled}; short text {short:.4f}")
        return found

    def _work(self, named: int) -> float:
        choice = self.settings.finalists * len(self.texts.choice)
        passes = 3 * len(self.texts.confirm) * self.bench.reading(self.to)
        return (named + self.settings.evaluations + choice) * self.measure.work + passes


def _shares(evaluations: int, wanted: list[str]) -> list[int]:
    """How many evaluations each space gets."""
    if len(wanted) < 2:
        return [evaluations] * len(wanted)
    first = max(2, round(evaluations * (_YARN_SHARE if wanted[0] == "yarn" else 1 - _YARN_SHARE)))
    return [first, max(2, evaluations - first)]


def _line(measure: Measure) -> str:
    return f"copying {measure.copying:.3f} nats ({measure.accuracy:.0%} right), short text {measure.short:.4f}"


def _best_of_each(named: Sequence[Candidate | Trial], measured: Sequence[Measure]) -> list[int]:
    """Which scalings copy best, one of each kind and two at most, best first; the model as shipped, which is the first,
    only where there is no other."""
    best: dict[str, int] = {}
    for index in sorted(range(1, len(named)), key=lambda i: measured[i].copying):
        best.setdefault(named[index].name.split(":")[0], index)
    return list(best.values())[:_MOST_RIVALS] or [0]
