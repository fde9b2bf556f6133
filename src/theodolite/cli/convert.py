"""`theodolite convert layout`: a checkpoint written anew in the other pair layout."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from theodolite.cli.detect import add_width_options
from theodolite.cli.loading import loading_errors
from theodolite.cli.terminated import removing_what_is_half

if TYPE_CHECKING:
    from theodolite.models.convert import Conversion

_LAYOUTS = {"half": "halves", "halves": "halves", "interleaved": "interleaved"}
_SHOWN = 6
_EXAMPLES = """examples:
  theodolite convert layout models/mine models/mine-interleaved --to interleaved
  theodolite convert layout models/mine out --to half --dry-run
  theodolite convert layout adapter adapter-interleaved --to interleaved --config models/base/config.json
  theodolite convert layout consolidated.safetensors out.safetensors --to half --config params.json

Rows of queries and keys move and no number changes. What layout the input is in is told from its weights, else from
its config; where that is wrong, give --from. The exit status is 0 when done, 2 for bad input.
"""


def add_parser(verbs: Any) -> None:
    """Add the verb, its one subject and its options."""
    parser = verbs.add_parser(
        "convert",
        help="write a checkpoint in the other pair layout (halves or interleaved)",
        description="Write a checkpoint anew. There is one subject so far: its pair layout.",
    )
    subjects = parser.add_subparsers(dest="subject", metavar="SUBJECT", required=True)
    layout = subjects.add_parser(
        "layout",
        help="the pair layout: halves (Llama in transformers) or interleaved (Meta's Llama, GPT-J, DeepSeek)",
        description="Write a safetensors checkpoint in the other pair layout of RoPE: weights, biases, norms, LoRA, "
        "fused projections. Memory is bounded by the largest tensor; OUT appears whole or not at all.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    layout.add_argument("model", metavar="IN", help="a folder with safetensors, or one .safetensors file")
    layout.add_argument("out", metavar="OUT", help="a folder (a file for a file) that does not exist yet")
    layout.add_argument("--to", required=True, choices=_LAYOUTS, metavar="LAYOUT", help="half or interleaved")
    layout.add_argument(
        "--from",
        dest="source_layout",
        choices=_LAYOUTS,
        metavar="LAYOUT",
        help="what IN is in, where you know it better than its weights and its config tell",
    )
    add_width_options(layout)
    layout.add_argument("--heads", type=int, metavar="N", help="query heads, beside --head-dim")
    layout.add_argument("--key-heads", type=int, metavar="N", help="key-value heads, beside --head-dim")
    layout.add_argument("--dry-run", action="store_true", help="list what would move, and write nothing")
    layout.add_argument("--json", action="store_true", help="print one JSON object")
    layout.set_defaults(run=run, errors=loading_errors, interrupted="interrupted: nothing was written")


def run(options: argparse.Namespace) -> int:
    """Convert, and say what was done."""
    from theodolite.models.convert import convert_layout
    from theodolite.report.figures import plain

    try:
        with removing_what_is_half():
            done = convert_layout(
                options.model,
                options.out,
                to=_LAYOUTS[options.to],  # type: ignore[arg-type]
                source_layout=_LAYOUTS.get(options.source_layout),  # type: ignore[arg-type]
                config=options.config,
                num_heads=options.heads,
                num_key_value_heads=options.key_heads,
                head_dim=options.head_dim,
                rotary_dim=options.rotary_dim,
                trailing=options.trailing,
                sites=options.site,
                dry_run=options.dry_run,
                progress=lambda line: print(plain(line), file=sys.stderr, flush=True),
            )
    except loading_errors() as error:
        # Names and keys in it are a stranger's.
        raise ValueError(plain(str(error))) from error
    if options.json:
        told = {**vars(done), "moved": dict(done.moved), "written": not options.dry_run, "out": options.out}
        print(json.dumps(told))
    else:
        for line in lines(options, done):
            print(plain(line))
    return 0


def lines(options: argparse.Namespace, done: Conversion) -> list[str]:
    """What was done, as text."""
    verb = "would be" if options.dry_run else "is"
    told = [f"{options.out} {verb} {done.to}; {options.model} is {done.source_layout}: {done.why}"]
    told.append(f"  {len(done.moved)} tensors {'would have' if options.dry_run else 'have'} rows moved")
    names = list(done.moved.items())
    shown = names if options.dry_run else names[:_SHOWN]
    told += [f"    {name} ({part})" for name, part in shown]
    if len(names) > len(shown):
        told.append(f"    and {len(names) - len(shown)} more")
    told += [f"  left out, for it has or names other weights: {name}" for name in done.left_out]
    return [*told, f"  {done.note}"]
