"""Synthetic tasks by name: `copy`, `copy:kind=repeated`, `recall:pairs=16`. docs/tasks.md has them all."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from theodolite.compare.tasks.base import Task, TaskData
from theodolite.compare.tasks.copying import Copying
from theodolite.compare.tasks.counting import Counting
from theodolite.compare.tasks.flip_flop import FlipFlop
from theodolite.compare.tasks.passkey import Passkey
from theodolite.compare.tasks.recall import Recall
from theodolite.plan import PlanError

TASKS: dict[str, Any] = {
    "copy": Copying,
    "reverse": Copying,
    "flip-flop": FlipFlop,
    "recall": Recall,
    "passkey": Passkey,
    "counting": Counting,
}
_ALWAYS: dict[str, dict[str, Any]] = {"reverse": {"backwards": True}}
_HIDDEN = "backwards"

__all__ = ["TASKS", "Task", "TaskData", "read_data"]


def read_data(name: str) -> TaskData:
    """The task of that name; equal tasks have equal names.

    Raises:
        PlanError: an unknown task or setting, or a value out of range.
    """
    kind, *given = (piece.strip() for piece in name.split(":"))
    if kind not in TASKS:
        raise PlanError("task", name, f"no task is named {kind!r}; allowed: {', '.join(TASKS)}")
    usual = {f.name: f.default for f in fields(TASKS[kind]) if f.name != _HIDDEN}
    settings: dict[str, Any] = {}
    for i, piece in enumerate(given):
        key, equals, text = piece.partition("=")
        if not equals and i == 0:
            key, text = next(iter(usual)), piece
        if key not in usual or key in settings:
            said = "stands twice" if key in settings else "is no setting of it"
            raise PlanError("task", name, f"{key!r} {said}; {kind} has {', '.join(usual)}")
        settings[key] = text if isinstance(usual[key], str) else _number(name, key, text)
    try:
        task = TASKS[kind](**settings, **_ALWAYS.get(kind, {}))
    except PlanError as error:
        raise PlanError("task", name, f"{error.field}: {error.allowed}") from None
    changed = {key: value for key, value in asdict(task).items() if key in usual and value != usual[key]}
    return TaskData(name=":".join([kind, *(f"{key}={value}" for key, value in changed.items())]), task=task)


def _number(name: str, key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise PlanError("task", name, f"{key} is {text!r}, which is no number") from None
