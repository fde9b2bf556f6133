"""`theodolite show`: pictures of an encoding, or of a model's own positions."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theodolite.report.show.pictures import Pictures
    from theodolite.report.show.settings import Settings

_EXAMPLES = """examples:
  theodolite show --list                                        encodings and their views
  theodolite show sinusoidal                                    all its views, a file each
  theodolite show rotary --scaling yarn:4,ntk:4 --trained 4096 --view decay
  theodolite show rotary --view hands --position 5000 --out hands.svg
  theodolite show alibi --heads 12 --view distance
  theodolite show learned --table model.safetensors --key wpe.weight
  theodolite show ./my-model --scaling yarn:2                   a model's own positions, and scaled
"""


def add_parser(verbs: Any) -> None:
    """Add the verb and its options."""
    parser = verbs.add_parser(
        "show",
        help="draw an encoding: heat maps, curves, decay by distance, biases, angles as clock hands",
        description="Draw an encoding, or what a model says about positions, and print the names of the files.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "encoding",
        nargs="?",
        metavar="ENCODING",
        help="a name that --list prints, or a model: a folder, a config.json, a .gguf file, a name on the hub",
    )
    parser.add_argument("--list", action="store_true", help="print the encodings and their views")
    parser.add_argument("--view", metavar="NAME", help="draw one view (default: all, a file each)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("."),
        metavar="FILE",
        help="a .png, .svg or .pdf file, or a folder; of several views the names get the view's (default: this folder)",
    )
    parser.add_argument("--length", type=_tokens, metavar="N", help="tokens that are drawn, 2048 or 2k")
    parser.add_argument("--trained", type=_tokens, metavar="N", help="length that scalings start from (default: 8192)")
    parser.add_argument(
        "--scaling", metavar="LIST", help="of rotations: none,linear:4,ntk:4,yarn:4 (the default), as in a survey"
    )
    parser.add_argument("--position", type=int, metavar="N", help="where clock hands stand (default: 1000)")
    parser.add_argument("--theta", type=float, metavar="BASE", help="base of the frequencies (default: 10000)")
    parser.add_argument("--dim", type=int, metavar="N", help="channels of an added vector (default: 128)")
    parser.add_argument("--head-dim", type=int, metavar="N", help="channels of a head (default: 128)")
    parser.add_argument("--heads", type=int, metavar="N", help="heads of a bias (default: 8, or the model's)")
    parser.add_argument("--channels", type=_numbers, metavar="LIST", help="channels drawn as curves: 0,8,64")
    parser.add_argument("--bidirectional", action="store_true", default=None, help="keys after the query too")
    parser.add_argument("--table", type=Path, metavar="FILE", help="a learned table: .npy or .safetensors")
    parser.add_argument("--key", metavar="NAME", help="the tensor's name in it")
    parser.add_argument("--seed", type=int, metavar="N", help="of weights that are drawn as initialised (default: 0)")
    parser.set_defaults(run=run, errors=lambda: (ValueError, OSError, ImportError), interrupted="interrupted")


def run(options: argparse.Namespace) -> int:
    """Draw, write, print the names of the files."""
    if options.list:
        _print_list()
        return 0
    if options.encoding is None:
        raise ValueError("encoding: give a name that --list prints, or a model")
    from theodolite.report.figures import plain
    from theodolite.report.show.settings import Settings

    names = [name for name in Settings.__dataclass_fields__ if getattr(options, name, None) is not None]
    settings = Settings(**{name: getattr(options, name) for name in names})
    # Before anything is drawn, a name that cannot be written to is refused.
    kind = _kind(options.out)
    try:
        pictures = _pictures(options.encoding, settings, names)
    except (OSError, ValueError) as error:
        # Names and keys in it may be a stranger's.
        raise ValueError(plain(str(error))) from error
    if options.view is not None and options.view not in pictures:
        raise ValueError(f"view: got {options.view!r}; {plain(options.encoding)} has {', '.join(pictures)}")
    chosen = pictures if options.view is None else {options.view: pictures[options.view]}
    _write(chosen, options.out, kind, _stem(options.encoding))
    return 0


def _pictures(name: str, settings: Settings, given: Sequence[str]) -> Pictures:
    from theodolite.plan.open import open_model
    from theodolite.report.show.catalogue import ENCODINGS, pictures_of
    from theodolite.report.show.of_model import READS, pictures_of_model

    kind = name.partition(":")[0]
    if kind in ENCODINGS:
        _require_read(kind, given, ENCODINGS[kind].reads)
        return pictures_of(name, settings)
    meant = get_close_matches(kind, ENCODINGS, n=1, cutoff=0.75)
    if meant and not Path(name).exists():
        raise ValueError(f"encoding: got {name!r}; did you mean {meant[0]}? `theodolite show --list` has them all")
    try:
        opened = open_model(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"encoding: {name!r} is none that --list prints, and no model: {error}") from error
    _require_read(name, given, READS)
    return pictures_of_model(opened, settings)


def _require_read(name: str, given: Sequence[str], reads: Collection[str]) -> None:
    """Refuse an option that would change nothing."""
    for setting in given:
        if setting not in reads:
            known = ", ".join(f"--{one.replace('_', '-')}" for one in sorted(reads))
            raise ValueError(f"{setting}: {name!r} does not read it; it reads {known}")


def _kind(out: Path) -> str | None:
    """The kind of picture that the name of a file asks for; None for a folder."""
    from theodolite.report.show.canvas import kind_of_file

    if out.is_dir() or (not out.suffix and not out.exists()):
        return None
    return kind_of_file(out, "out")


def _write(pictures: Pictures, out: Path, kind: str | None, stem: str) -> None:
    from theodolite.report.figures import plain
    from theodolite.report.files import write_whole
    from theodolite.report.show.canvas import encoded

    for view, draw in pictures.items():
        if kind is None:
            path = out / f"{stem}-{view}.png"
        else:
            path = out if len(pictures) == 1 else out.with_name(f"{out.stem}-{view}{out.suffix}")
        print(plain(str(write_whole(path, encoded(draw(), kind or "png")))), flush=True)


def _stem(name: str) -> str:
    """The beginning of a file's name: the encoding's, or the last part of a model's."""
    last = Path(name).name or "model"
    made = "".join(c if c.isalnum() or c in "._-" else "-" for c in last.removesuffix(".json").removesuffix(".gguf"))
    return made.strip(".-")[:80] or "model"


def _print_list() -> None:
    from theodolite.report.show.catalogue import ENCODINGS

    column = 2 + max(map(len, ENCODINGS))
    for name, encoding in ENCODINGS.items():
        print(f"{name.ljust(column)}{encoding.means}\n{' ' * column}views: {', '.join(encoding.views)}")


def _tokens(text: str) -> int:
    """A number of tokens: 2048, 2k (times 1,024)."""
    scale = 1024 if text[-1:].lower() == "k" else 1
    try:
        return int(text.rstrip("kK").replace(",", "").replace("_", "")) * scale
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}; a number of tokens is 2048 or 2k") from None


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}; give whole numbers with commas between: 0,8,64") from None
