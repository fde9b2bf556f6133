"""`theodolite detect`: which pair layout a checkpoint has, told from its query and key weights alone."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from theodolite.cli.loading import loading_errors

if TYPE_CHECKING:
    from theodolite.models.detect import Detection

_EXAMPLES = """examples:
  theodolite detect models/mine
  theodolite detect model.gguf -v
  theodolite detect consolidated.safetensors --config params.json
  theodolite detect model.safetensors --head-dim 64

"Cannot tell" is an answer too. The exit status is 0, or 2 for bad input.
"""


def add_parser(verbs: Any) -> None:
    """Add the verb and its options."""
    parser = verbs.add_parser(
        "detect",
        help="say which pair layout a checkpoint has (halves or interleaved), from its weights alone",
        description="Say which pair layout of RoPE a checkpoint has, from its query and key weights alone. The config "
        "is asked for widths and head counts, never for the layout. Tensors of a GGUF file are taken as they are.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="IN", help="a folder with safetensors, a .safetensors or .gguf file, or SmolLM2-135M-Instruct"
    )
    add_width_options(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="print one line a layer too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, errors=loading_errors, interrupted="interrupted")


def add_width_options(parser: Any) -> None:
    """What says how wide heads are, where the folder has no config."""
    parser.add_argument("--config", metavar="FILE", help="a config.json or params.json; the folder's own by default")
    parser.add_argument("--head-dim", type=int, metavar="N", help="channels of a head, in place of a config")
    parser.add_argument("--rotary-dim", type=int, metavar="N", help="channels of them that turn (default: all)")
    parser.add_argument("--trailing", action="store_true", help="the last channels turn, not the first")
    parser.add_argument(
        "--site",
        action="append",
        metavar="PATH",
        help="where the attention is, as in 'model.layers.*.self_attn', if it is in several places; may be repeated",
    )


def run(options: argparse.Namespace) -> int:
    """Read, judge, print."""
    from theodolite.models.detect import as_json, detect_layout
    from theodolite.models.source import resolve
    from theodolite.plan.open import DEFAULT_MODEL
    from theodolite.report.figures import plain

    model = str(resolve(options.model).path) if options.model == DEFAULT_MODEL else options.model
    try:
        found = detect_layout(
            model,
            config=options.config,
            head_dim=options.head_dim,
            rotary_dim=options.rotary_dim,
            trailing=options.trailing,
            sites=options.site,
        )
    except loading_errors() as error:
        # Names and keys in it are a stranger's.
        raise ValueError(plain(str(error))) from error
    if options.json:
        print(json.dumps({"model": options.model, **as_json(found)}, allow_nan=False))
    else:
        for line in lines(options.model, found, verbose=options.verbose):
            print(plain(line))
    sys.stdout.flush()
    return 0


def lines(name: str, found: Detection, *, verbose: bool) -> list[str]:
    """The answer as text."""
    from theodolite.models.detect import LARGEST_CHANCE

    numbers = f"halves {found.halves:+.1f}, interleaved {found.interleaved:+.1f} standard deviations"
    if found.layout is None:
        told = [f"{name}: cannot tell", f"  {numbers} above a random pairing", f"  {found.why}"]
    else:
        chance = f"{found.chance:.0e}" if found.chance >= 1e-12 else "less than 1e-12"
        told = [
            f"{name}: {found.layout}",
            f"  {numbers} above a random pairing",
            f"  {found.agreeing} of {len(found.layers)} layers say so on their own",
            f"  chance of that without any order of channels: {chance} (an answer needs {LARGEST_CHANCE:.0e})",
        ]
    if verbose:
        told += ["", "  layer  halves  interleaved"]
        told += [f"  {vote.layer:5d}  {vote.halves:+6.1f}  {vote.interleaved:+11.1f}" for vote in found.layers]
    return told
