"""`theodolite search`: a better frequency map for one model, tried on its own text and confirmed by full passes."""

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
  theodolite search --to 16k                             the model and the book that come with the package
  theodolite search ./my-model --to 65536 --text contracts/*.txt --join --evaluations 300
  theodolite extend ./my-model --scaling search:search-my-model --to 65536 -o my-model-64k

A search that was interrupted or killed goes on where it was when the same command is given again; with more
--evaluations it goes further. The exit status is 0 whether it won or not: the result says so.
"""


def add_parser(verbs: Any) -> None:
    """Add the verb and its options."""
    parser = verbs.add_parser(
        "search",
        help="search a frequency map that carries this model further than the named scalings do",
        description="Search the base, factor, betas and temperature of YaRN, then a divisor for every pair of\n"
        "channels, for what lets this model copy from far back without losing short text; confirm it by full passes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default="SmolLM2-135M-Instruct",
        metavar="MODEL",
        help="a folder with config.json and safetensors, a .gguf file, or a name on the hub (default: %(default)s)",
    )
    parser.add_argument(
        "--to", type=tokens_argument, required=True, metavar="N", help="how far, in tokens, 16384 or 16k"
    )
    parser.add_argument(
        "--text",
        nargs="+",
        default=["moby-dick"],
        metavar="FILE",
        help="UTF-8 text files, or moby-dick, chinese-classics (default: moby-dick); 2 x N tokens at least, 5 x N at "
        "best",
    )
    parser.add_argument("--join", action="store_true", help="make one document of all text files")
    parser.add_argument(
        "--evaluations", type=int, default=120, metavar="K", help="how many maps are tried (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens",
        type=tokens_argument,
        metavar="K",
        help="how many tokens are read for a trial, in chunks spread over the length: more come closer to a full pass, "
        "and take longer (default: N / 2)",
    )
    parser.add_argument(
        "--space",
        default="yarn,pairs",
        metavar="LIST",
        help="yarn: base, factor, betas, temperature; pairs: a divisor for every pair, temperature "
        "(default: %(default)s, the second from where the first ended)",
    )
    parser.add_argument(
        "--against",
        metavar="LIST",
        help="named scalings to beat, as a survey takes them (default: YaRN and NTK at several factors)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the optimiser (default: %(default)s)")
    add_machine(parser)
    parser.add_argument("-o", "--out", type=Path, metavar="DIR", help="folder of results (default: search-MODEL)")
    parser.set_defaults(run=run, errors=loading_errors, interrupted="interrupted; the same command goes on from here")


def run(options: argparse.Namespace) -> int:
    """Search, draw, print."""
    require_packages("a search", "search", "cma", "transformers", "psutil", "rich", "matplotlib")
    from theodolite.cli.progress import Progress
    from theodolite.models.source import resolve
    from theodolite.report.search_picture import draw_search
    from theodolite.report.search_table import print_places, render_search
    from theodolite.search import Settings, search
    from theodolite.search.settings import checked_length
    from theodolite.survey.scalings import require_known

    require_device(options.device)
    source = resolve(options.model)
    settings = Settings(
        out=options.out or Path(f"search-{source.name}"),
        to=options.to,
        texts=tuple(options.text),
        evaluations=options.evaluations,
        tokens=options.tokens,
        spaces=tuple(name.strip() for name in options.space.split(",") if name.strip()),
        against=options.against,
        seed=options.seed,
        join=options.join,
    )
    # What can be told without the model is told before it is loaded.
    if settings.against is not None:
        require_known(settings.against)
    require_places(settings.texts, settings.out)
    with Progress() as progress:
        loaded = load_within_memory(options.model, options.dtype, options.device, progress)
        checked_length(settings, loaded.plan)
        require_room(loaded, settings.to, mapped=False)
        progress.finished(f"{loaded.name}: searching to {settings.to:,} tokens, results in {settings.out}")
        result = search(loaded, settings, progress)
        picture = draw_search(result, settings.out)
    render_search(result, progress.console)
    print_places(progress.console, settings.out, picture)
    return 0
