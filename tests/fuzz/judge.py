"""Whether `theodolite inspect` does with a file what it promises: a plan in finite numbers, or one line of refusal."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import math
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from tests.fuzz.cases import Case
from theodolite.cli import inspect

MOST_SECONDS, MOST_BYTES = 2.0, 200 * 2**20
_LONGEST_LINE, _LONGEST_OUTPUT = 2000, 100 * 2**20
# What a boundary says when nobody has looked at the value: it names no field.
_UNNAMED = re.compile(r"^(config|params|metadata) in .*a value in it is of the wrong type or out of range$")
# What a file that can be read may yet be refused for: an engine needs a length, and JSON has so many numbers.
_LATER = re.compile(r"^(json|max_position_embeddings): ")
_NO_NUMBER = re.compile(r"(?<![\w./'\"-])-?(nan|inf)(?![\w/.'\"])")


@dataclass
class Verdict:
    """What came of a case: faults, and what they cost at most, in seconds of processor time and bytes of memory."""

    accepted: bool = False
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    bytes: int = 0
    refusal: str = ""


def judged(case: Case, folder: Path) -> Verdict:
    """Run all of `inspect` on the case's file."""
    path, original = case.write(folder)
    verdict = Verdict()
    before = _settle_memory()
    _run_all(case, path, original, verdict)
    verdict.bytes = _status("VmHWM") - before
    if verdict.bytes > MOST_BYTES:
        verdict.faults.append(f"{verdict.bytes / 2**20:.0f} MiB")
    return verdict


def _run_all(case: Case, path: Path, original: Path, verdict: Verdict) -> None:
    if case.kind == "safetensors":
        _count(path, verdict)
        return
    status, _ = _inspect(verdict, path)
    verdict.accepted = status in (0, 1)
    if verdict.accepted:
        _, text = _inspect(verdict, path, "--json")
        _check_numbers(verdict, text)
        for engine in inspect.ENGINES:
            _inspect(verdict, path, "--for", engine)
        _inspect(verdict, path, "--diff", str(original), "--json")
        _inspect(verdict, original, "--diff", str(path))


@cache
def _parser() -> argparse.ArgumentParser:
    # To make the parsers of all verbs anew each time takes longer than most files.
    parser = argparse.ArgumentParser()
    inspect.add_parser(parser.add_subparsers())
    return parser


def main(arguments: list[str]) -> int:
    """`theodolite.cli.main` of this verb."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except options.errors() as error:
        print(f"theodolite inspect: {error}", file=sys.stderr)
        return 2


def _inspect(verdict: Verdict, path: Path, *arguments: str) -> tuple[int | None, str]:
    """The exit status (None after an exception) and what was printed, both checked."""
    out, err = io.StringIO(), io.StringIO()
    what = " ".join(argument for argument in arguments if not os.path.isabs(argument)) or "text"

    def run() -> int:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return main(["inspect", str(path), *arguments])

    status = _measured(verdict, what, run)
    printed, told = out.getvalue(), err.getvalue()
    if status == 2:
        verdict.refusal = told.strip()
        _check_refusal(verdict, what, path, printed, told)
    elif status is not None:
        # What is wrong with a plan stands beside the settings that are printed of it.
        marks = ("theodolite inspect: warning: ", "theodolite inspect: error: ")
        warned = all(line.startswith(marks) and line.isprintable() for line in told.splitlines())
        if not (warned and ("--for" in arguments or not told)) or not printed or status not in (0, 1):
            verdict.faults.append(f"{what}: status {status}, {len(printed)} characters, and told {told[:200]!r}")
        _check_printed(verdict, what, printed, is_json="--json" in arguments)
    return status, printed if status in (0, 1) else ""


def _measured(verdict: Verdict, what: str, run: Callable[[], Any]) -> Any:
    """What a run returns, warnings being errors; None after an exception, which is a fault."""
    # What a long process holds besides is not gone through by the collector for this run's sake.
    gc.freeze()
    begun = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = run()
    except Exception as error:
        result = None
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "theodolite" in frame.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        verdict.faults.append(f"{what}: {type(error).__name__} at {where}: {str(error)[:200]}")
    seconds = time.process_time() - begun
    gc.unfreeze()
    verdict.seconds = max(verdict.seconds, seconds)
    if seconds > MOST_SECONDS:
        verdict.faults.append(f"{what}: {seconds:.2f} s")
    return result


def _check_refusal(verdict: Verdict, what: str, path: Path, printed: str, told: str) -> None:
    told = told.removesuffix("\n")
    reason = told.removeprefix("theodolite inspect: ")
    if printed or not told.isprintable() or reason == told or len(told) > _LONGEST_LINE + len(str(path)):
        verdict.faults.append(f"{what}: refused in {len(told)} characters: {told[:200]!r}")
    # What is said of an option (--for, --json) is about the option.
    if path.name not in reason and what in ("text",):
        verdict.faults.append(f"{what}: no file in {reason[:200]!r}")
    if what != "text" and not _LATER.search(reason):
        verdict.faults.append(f"{what}: refused with {reason[:200]!r}")
    if _UNNAMED.search(reason):
        verdict.faults.append(f"{what}: no field in {reason[:300]!r}")


def _check_printed(verdict: Verdict, what: str, printed: str, *, is_json: bool) -> None:
    if len(printed) > _LONGEST_OUTPUT:
        verdict.faults.append(f"{what}: {len(printed)} characters")
    if is_json:
        try:
            json.loads(printed, parse_constant=_no_json)
        except ValueError as error:
            verdict.faults.append(f"{what}: {error}")
        if not printed.isascii():
            verdict.faults.append(f"{what}: more than ASCII")
        return
    # A break of lines in JSON text is its own.
    if not all(line.isprintable() for line in printed.splitlines()):
        verdict.faults.append(f"{what}: characters that are not printable")
    found = _NO_NUMBER.search(printed)
    if found and what == "text":
        verdict.faults.append(f"{what}: {printed[max(0, found.start() - 60) : found.end() + 20]!r}")


def _no_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _check_numbers(verdict: Verdict, text: str) -> None:
    """Every frequency finite, and above zero where the pair turns."""
    if not text:
        return
    seen = set()
    for i, layer in enumerate(json.loads(text)["layers"]):
        frequencies = layer["inv_freq"]
        if frequencies is None or tuple(frequencies) in seen:
            continue
        seen.add(tuple(frequencies))
        live = len(frequencies) if layer["live_pairs"] is None else layer["live_pairs"]
        if not all(math.isfinite(one) for one in frequencies) or not all(one > 0 for one in frequencies[:live]):
            verdict.faults.append(f"--json: layer {i} turns by {min(frequencies)} to {max(frequencies)}")
        if not math.isfinite(layer["attention_factor"]) or layer["attention_factor"] <= 0:
            verdict.faults.append(f"--json: layer {i} has the factor {layer['attention_factor']}")


def _count(path: Path, verdict: Verdict) -> None:
    # torch takes a while to load, and the other kinds do without it.
    from theodolite.models.safetensors_header import count_parameters

    def run() -> int | str:
        try:
            return count_parameters(path)
        except (ValueError, OSError) as error:
            return str(error)

    found = _measured(verdict, "count", run)
    verdict.accepted = isinstance(found, int)
    if isinstance(found, str):
        verdict.refusal = found
        if path.name not in found or len(found) > _LONGEST_LINE:
            verdict.faults.append(f"count: no file in {found[:200]!r}")
    elif isinstance(found, int) and found < 0:
        verdict.faults.append(f"count: {found} numbers")


def _settle_memory() -> int:
    """Start to count the most memory anew; returns what is resident now. 0 where the system does not say."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return _status("VmRSS")


def _status(name: str) -> int:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
