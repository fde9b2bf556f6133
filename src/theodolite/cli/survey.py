"""`theodolite survey`: how far a model's positions hold, and which scaling carries them further."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from theodolite.cli.loading import (
    add_machine,
    load_within_memory,
    loading_errors,
    require_device,
    require_packages,
    require_places,
    require_room,
    tokens_argument,
)

_EXAMPLES = """examples:
  theodolite survey                                      the model and the book that come with the package
  theodolite survey ./my-model --text contracts/*.txt --to 16384
  theodolite survey Qwen/Qwen3-0.6B --scaling none,yarn:2,yarn:4,ntk:3 --passes 3 --out survey-qwen
  theodolite survey --scaling none,yarn,self-extend,dca,rerope --passes 4 --no-far --out survey-maps

A run that was interrupted or killed goes on where it was when the same command is given again.
"""


def add_parser(verbs: Any) -> None:
    """Add the verb and its options."""
    parser = verbs.add_parser(
        "survey",
        help="measure how far a model's positions hold, under each RoPE scaling, on your text",
        description="Measure where a model breaks as shipped, how each RoPE scaling does instead, whether far context\n"
        "is used, what each costs on short text, and which one to take, with the settings to paste.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default="SmolLM2-135M-Instruct",
        help="a folder with config.json and safetensors, a .gguf file, or a name on the hub (default: %(default)s)",
    )
    parser.add_argument(
        "--text",
        nargs="+",
        default=["moby-dick"],
        metavar="FILE",
        help="UTF-8 text files, or moby-dick, chinese-classics (default: moby-dick)",
    )
    parser.add_argument("--join", action="store_true", help="make one document of all text files")
    parser.add_argument(
        "--to",
        type=tokens_argument,
        metavar="N",
        help="how far to go, in tokens, 16384 or 16k (default: 1.5 x trained length)",
    )
    parser.add_argument(
        "--scaling",
        default="none,linear,ntk,dynamic,yarn",
        metavar="LIST",
        help="scalings, with a factor and settings if wanted: yarn:2, yarn:4:beta_fast=64 (default: %(default)s; "
        "without a factor: N / trained length, rounded up, at least 2), and maps of distances: self-extend, dca, "
        "rerope, leaky-rerope, sinks, lm-infinite, with settings if wanted: self-extend:4:window=1024; and search:DIR, "
        "what theodolite search has found",
    )
    parser.add_argument(
        "--passes",
        type=int,
        default=2,
        metavar="K",
        help="how many scalings to read in full beside the model as shipped, best by reach first (default: 2)",
    )
    parser.add_argument("--passkey", action="store_true", help="also hide a number in the text and ask for it (slow)")
    parser.add_argument("--no-far", action="store_true", help="leave out the far reach, to 4 x the trained length")
    add_machine(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of results (default: survey-MODEL)")
    parser.set_defaults(run=run, errors=loading_errors, interrupted="interrupted; the same command goes on from here")


def run(options: argparse.Namespace) -> int:
    """Survey, draw, print."""
    require_packages("a survey", "survey", "transformers", "psutil", "rich", "jinja2", "matplotlib")
    from theodolite.cli.progress import Progress
    from theodolite.models.source import resolve
    from theodolite.report import page, pictures, terminal
    from theodolite.survey import Settings, survey
    from theodolite.survey.scalings import names_map, require_known
    from theodolite.survey.settings import checked_length

    require_device(options.device)
    source = resolve(options.model)
    settings = Settings(
        out=options.out or Path(f"survey-{source.name}"),
        texts=tuple(options.text),
        to=options.to,
        scalings=options.scaling,
        passes=options.passes,
        far=not options.no_far,
        passkey=options.passkey,
        join=options.join,
    )
    # What can be told without the model is told before it is loaded.
    require_known(settings.scalings)
    require_places(settings.texts, settings.out)
    with Progress() as progress:
        loaded = load_within_memory(options.model, options.dtype, options.device, progress)
        to = checked_length(settings, loaded.plan)
        require_room(loaded, to, mapped=names_map(settings.scalings))
        progress.finished(f"{loaded.name}: surveying to {to:,} tokens, results in {settings.out}")
        summary = survey(loaded, settings, progress)
    drawn = pictures.draw(summary, settings.out)
    report = page.write(summary, settings.out)
    terminal.render(summary, progress.console)
    progress.console.print(
        f"\nreport: {report}\nnumbers: {settings.out / 'summary.json'}\npictures: {len(drawn)} in {settings.out}",
        # A path that is broken over lines cannot be copied.
        soft_wrap=True,
    )
    return 0
