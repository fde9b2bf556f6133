"""`theodolite inspect`: what a model says about positions, layer by layer, and what is wrong with it. No weights."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from theodolite.cli.loading import tokens_argument

if TYPE_CHECKING:
    from theodolite.plan.findings import Finding
    from theodolite.plan.open import Opened

ENGINES = ("vllm", "sglang", "llama.cpp", "transformers")
CLEAN, FAULTY = 0, 1
_EXAMPLES = """examples:
  theodolite inspect Qwen/Qwen3-0.6B
  theodolite inspect model.gguf --json
  theodolite inspect models/mine --diff models/theirs
  theodolite inspect config.json --for vllm
  theodolite inspect model.gguf --picture positions.png --html positions.html

The exit status is 0 where nothing is wrong, 1 for a finding of severity error (or a difference), 2 for bad input.
"""
_NARROWEST, _USUAL = 40, 100
# Models have some ten thousand; a file may state what would fill the disk.
_MOST_NUMBERS = 2**20


def add_parser(verbs: Any) -> None:
    """Add the verb and its options."""
    parser = verbs.add_parser(
        "inspect",
        help="say what a model states about positions, and what is wrong with it; reads no weights",
        description="Say what a model states about positions, layer by layer, what follows from it, and what is wrong "
        "or read differently by others. Neither weights nor torch are loaded.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder, a config.json or params.json, a .gguf file, or a name on the hub (its config.json is fetched)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--diff", metavar="OTHER", help="say where the positions of another model differ")
    what.add_argument(
        "--for", dest="engine", choices=ENGINES, metavar="ENGINE", help=f"print its settings: {', '.join(ENGINES)}"
    )
    parser.add_argument(
        "--length", type=tokens_argument, metavar="N", help="with --for: the tokens to serve (default: as stated)"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it too: a .png, .svg or .pdf file")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page too, on which base, factor and length move"
    )
    parser.set_defaults(run=run, errors=lambda: (ValueError, OSError, ImportError), interrupted="interrupted")


def run(options: argparse.Namespace) -> int:
    """Read, judge, print."""
    if options.length is not None and options.engine is None:
        raise ValueError("length: it is the length that an engine serves; give --for too")
    _load_numpy()
    from theodolite.plan.findings import find
    from theodolite.plan.open import open_model
    from theodolite.report.figures import plain

    try:
        opened = open_model(options.model)
        other = None if options.diff is None else open_model(options.diff)
    except (OSError, ValueError) as error:
        # Names and keys in it are a stranger's.
        raise ValueError(plain(str(error))) from error
    findings = find(opened.plan, opened.raw, source=opened.kind, layout=opened.layout)
    _draw(opened, findings, options)
    status = FAULTY if any(finding.severity == "error" for finding in findings) else CLEAN
    if other is not None:
        return _diff(opened, other, options.json)
    if options.engine is not None:
        _settings(opened, findings, options)
        return status
    if options.json:
        _print_json(_as_json(opened, findings))
    else:
        from theodolite.report.inspection import lines

        _print_lines(lines(opened, findings, width=_width()))
    return status


def _draw(opened: Opened, findings: tuple[Finding, ...], options: argparse.Namespace) -> None:
    """Write what is asked for beside the text: a picture, a page. It prints nothing, so that --json stays JSON."""
    from theodolite.report.figures import plain

    try:
        if options.picture is not None:
            from theodolite.report import plan_picture

            plan_picture.write(opened, options.picture)
        if options.html is not None:
            from theodolite.report import plan_page

            plan_page.write(opened, findings, options.html)
    except (OSError, ValueError) as error:
        raise ValueError(plain(str(error))) from error


def _load_numpy() -> None:
    """Load numpy with one thread for its products: they are small, and waking more takes longer than the rest."""
    name = "OPENBLAS_NUM_THREADS"
    if "numpy" in sys.modules or name in os.environ:
        return
    os.environ[name] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        # It is read once, and whoever is started from here decides again.
        del os.environ[name]


def _as_json(opened: Opened, findings: tuple[Finding, ...]) -> dict[str, Any]:
    from theodolite.plan.layer_json import derived_json, embed_json, layer_json

    length = opened.plan.max_position_embeddings
    pairs = sum(layer.rotate.rotary_dim // 2 for layer in opened.plan.layers if layer.rotate is not None)
    if pairs > _MOST_NUMBERS:
        raise ValueError(f"json: {pairs:,} frequencies of all layers are more than {_MOST_NUMBERS:,}; leave --json out")
    return {
        "model_type": opened.plan.model_type,
        "max_position_embeddings": length,
        "embed": embed_json(opened.plan),
        "layers": [layer_json(layer, length) for layer in opened.plan.layers],
        "derived": derived_json(opened.plan),
        "findings": [vars(finding) for finding in findings],
    }


def _settings(opened: Opened, findings: tuple[Finding, ...], options: argparse.Namespace) -> None:
    from theodolite.plan.engines import settings
    from theodolite.plan.layer_json import usual_length

    length = usual_length(opened.plan) if options.length is None else options.length
    if length is None:
        raise ValueError(
            f"max_position_embeddings: {opened.name!r} states no length, and an engine needs one; give --length"
        )
    told = settings(opened.plan, model=opened.name, length=length, part=opened.part, as_shipped=True)[options.engine]
    amiss = [finding for finding in _of_the_plan(opened, findings) if finding.severity != "note"]
    if options.json:
        _print_json({"engine": options.engine, "settings": told, "findings": [vars(finding) for finding in amiss]})
        return
    # Above the command, as comments, so that whoever copies it copies them; JSON has none.
    for finding in amiss:
        line = f"{finding.severity}: {finding.field}: {finding.message}"
        if isinstance(told, dict):
            _print_lines([f"theodolite inspect: {line}"], sys.stderr)
        else:
            _print_lines([f"# {line}"])
    _print_lines((json.dumps(told, indent=2) if isinstance(told, dict) else told).splitlines())


def _of_the_plan(opened: Opened, findings: tuple[Finding, ...]) -> list[Finding]:
    """Those that the settings repeat; what is amiss with the words of the file they put right."""
    from theodolite.plan.findings import find

    plain = find(opened.plan, layout=opened.layout)
    return [finding for finding in findings if finding in plain]


def _diff(opened: Opened, other: Opened, as_json: bool) -> int:
    from theodolite.plan.differences import differences
    from theodolite.report.inspection import difference_lines

    found = differences(opened.plan, other.plan)
    if as_json:
        _print_json({"models": [opened.name, other.name], "differences": [vars(difference) for difference in found]})
    else:
        _print_lines(difference_lines(opened.name, other.name, found, width=_width()))
    return FAULTY if found else CLEAN


def _print_json(found: dict[str, Any]) -> None:
    # In ASCII, so that no character of a stranger's file acts on the terminal.
    print(json.dumps(found, indent=None, allow_nan=False))


def _print_lines(lines: list[str], file: TextIO | None = None) -> None:
    from theodolite.report.figures import plain

    for line in lines:
        print(plain(line), file=file)


def _width() -> int:
    return max(_NARROWEST, shutil.get_terminal_size((_USUAL, 24)).columns)
