"""The walk through a space by CMA-ES (Hansen's `cma`): it asks for points and is told what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from theodolite.search.space import Space


@dataclass(frozen=True, kw_only=True)
class Step:
    """A generation: the points that were tried, what each cost, and the best of all so far."""

    points: list[list[float]]
    costs: list[float]
    best: list[float]
    best_cost: float


def walk(space: Space, cost: Callable[[list[float]], float], *, evaluations: int, seed: int) -> Iterator[Step]:
    """Try about `evaluations` points of a space, generation by generation, beginning at its start.

    The same seed and costs give the same points, so a walk that is begun again over stored costs goes the same way.
    A generation is never broken off: the last one may be left out where it would not fit, but one is always made.
    """
    cma = _cma()
    box = space.coordinates
    start = [coordinate.start for coordinate in box]
    best, best_cost = start, cost(start)
    yield Step(points=[start], costs=[best_cost], best=best, best_cost=best_cost)
    generator = np.random.default_rng(seed)
    size = min(4 + math.floor(3 * math.log(len(box))), max(evaluations - 1, 2))
    strategy = cma.CMAEvolutionStrategy(
        start,
        1.0,
        {
            "CMA_stds": [coordinate.step for coordinate in box],
            "bounds": [[coordinate.low for coordinate in box], [coordinate.high for coordinate in box]],
            "popsize": size,
            # A generator of its own: the common one would be set back for everyone.
            "randn": lambda *shape: generator.standard_normal(shape),
            "seed": math.nan,
            "verbose": -9,
            # The budget ends a walk, and nothing else: each evaluation costs a minute of someone's machine.
            "tolfun": 0,
            "tolfunhist": 0,
            "tolx": 0,
            "tolflatfitness": evaluations,
            "tolstagnation": evaluations,
        },
    )
    for _ in range(max(1, (evaluations - 1) // size)):
        points = [space.inside(point) for point in strategy.ask()]
        costs = [cost(point) for point in points]
        strategy.tell(points, costs)
        least = min(range(len(costs)), key=costs.__getitem__)
        if costs[least] < best_cost:
            best, best_cost = points[least], costs[least]
        yield Step(points=points, costs=costs, best=best, best_cost=best_cost)


def _cma() -> Any:
    try:
        import cma
    except ImportError as error:
        raise ImportError(f"a search needs cma ({error}); install it with: pip install 'theodolite[search]'") from error
    return cma
