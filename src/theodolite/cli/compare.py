"""`theodolite compare`: the same small model trained under each policy, then measured at and past its length."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theodolite.cli.loading import loading_errors, require_packages, require_places, tokens_argument

if TYPE_CHECKING:
    from accelerate import Accelerator

_EXAMPLES = """examples:
  theodolite compare --quick                                  four policies on the book of the package, 5 minutes
  theodolite compare --policies rope alibi rope+logn 'rope@64/rope@64/nope' --text mine/*.txt --length 256
  theodolite compare --task recall --policies rope alibi nope --length 128
  accelerate launch --multi_gpu -m theodolite compare --hidden 512 --layers 8 --tokens bpe:8192 --steps 20000

A comparison that was interrupted or killed goes on where it was when the same command is given again; with more
policies, seeds or lengths it does what is new. docs/policies.md has the names of policies, docs/tasks.md the tasks.
"""


def add_parser(verbs: Any) -> None:
    """Add the verb and its options."""
    parser = verbs.add_parser(
        "compare",
        help="train the same small model under each position policy, and measure it at and past its length",
        description="Train the same small decoder on the same data in the same order, once per policy and seed;\n"
        "measure it at its training length and at multiples of it, then run what is rotary under every scaling.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        metavar="NAME",
        help="rope, alibi, rope:theta=50000, rope+logn, rope@64/nope, ...; the first is what others are held against "
        "(default: nine; with --quick four)",
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="UTF-8 text files, or moby-dick, chinese-classics (default: moby-dick)",
    )
    data.add_argument(
        "--tokens", default="bytes", metavar="KIND", help="bytes, bpe:4096 (trained on the text), or a tokenizer.json"
    )
    data.add_argument("--task", metavar="NAME", help="a synthetic task in place of text: copy, recall:pairs=8, ...")
    size = parser.add_argument_group("model and training")
    size.add_argument("--length", type=tokens_argument, metavar="N", help="training length in tokens (default: 128)")
    size.add_argument("--hidden", type=int, metavar="N", help="channels (default: 128)")
    size.add_argument("--layers", type=int, metavar="N", help="layers (default: 3)")
    size.add_argument("--heads", type=int, metavar="N", help="heads (default: 4)")
    size.add_argument("--qk-norm", action="store_true", help="norm queries and keys")
    size.add_argument("--steps", type=int, metavar="N", help="of training (default: 1000; with --quick 150)")
    size.add_argument("--rows", type=int, metavar="N", help="a step, over all processes (default: 16)")
    size.add_argument("--lr", type=float, metavar="RATE", help="the highest learning rate (default: 0.003)")
    size.add_argument("--seeds", type=int, default=3, metavar="N", help="how many of each policy (default: 3)")
    test = parser.add_argument_group("tests")
    test.add_argument(
        "--times", default="1,2,4,8", metavar="LIST", help="test lengths, in training lengths (default: %(default)s)"
    )
    test.add_argument("--test-rows", type=int, default=64, metavar="N", help="rows of a test (default: %(default)s)")
    test.add_argument(
        "--scaling",
        metavar="LIST",
        help="what trained rotary models are run under besides, as a survey takes it; '' for none (default: "
        "linear, ntk, yarn and maps of distances)",
    )
    test.add_argument(
        "--fine-tune", type=int, metavar="STEPS", help="train rotary models on under scalings (default: 100; 0 for not)"
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", choices=("cpu", "cuda", "mps"), help="(default: the accelerator if there is one)")
    machine.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of training; weights are float32 (default: float32 on a CPU, else bfloat16)",
    )
    parser.add_argument("--quick", action="store_true", help="four policies, less training: minutes on two cores")
    parser.add_argument("-o", "--out", type=Path, metavar="DIR", help="folder of results (default: compare-DATA)")
    parser.set_defaults(run=run, errors=loading_errors, interrupted="interrupted; the same command goes on from here")


def run(options: argparse.Namespace) -> int:
    """Compare, draw, print."""
    require_packages("a comparison", "compare", "accelerate", "safetensors", "rich", "matplotlib", "jinja2")
    from theodolite.cli.progress import Progress
    from theodolite.compare import compare
    from theodolite.compare.run import FILE, require_possible
    from theodolite.report.compare_page import draw_comparison, write_comparison_page
    from theodolite.report.compare_table import render_comparison

    data = _data(options)
    settings = _settings(options, data.name)
    require_places((), settings.out)
    require_possible(settings, data)
    accelerator = _accelerator(options)
    with Progress(quiet=not accelerator.is_main_process) as progress:
        progress.finished(f"comparing {len(settings.policies)} policies on {data.name}, results in {settings.out}")
        result = compare(settings, data, accelerator, progress)
        if not accelerator.is_main_process:
            return 0
        page = settings.out / "compare.html"
        write_comparison_page(result, page)
        picture = draw_comparison(result, settings.out)
    render_comparison(result, progress.console)
    places = f"\nresult: {settings.out / FILE}\npage: {page}\npicture: {picture}"
    # A path that is broken over lines cannot be copied.
    progress.console.print(places, soft_wrap=True, markup=False, highlight=False)
    return 0


def _data(options: argparse.Namespace) -> Any:
    from theodolite.compare.tasks import read_data
    from theodolite.compare.texts import TextData

    if options.task is not None:
        if options.text is not None:
            raise ValueError("--task: give a task or --text, not both")
        return read_data(options.task)
    return TextData.read(options.text or ["moby-dick"], tokens=options.tokens)


def _settings(options: argparse.Namespace, name: str) -> Any:
    from theodolite.compare.settings import POLICIES, QUICK_POLICIES, SCALINGS, Settings, Size
    from theodolite.compare.training import Training

    quick = options.quick
    size = {"hidden_size": options.hidden, "num_layers": options.layers, "num_heads": options.heads}
    training = {"length": options.length, "rows": options.rows, "steps": options.steps, "lr": options.lr}
    usual = {"steps": 150 if quick else 1000}
    scalings = "linear,ntk" if quick else SCALINGS
    tuning = 0 if quick else 100
    if options.seeds < 1:
        raise ValueError(f"--seeds: got {options.seeds}; give 1 at least, 3 for any claim")
    return Settings(
        out=options.out or Path("compare-" + "".join(c if c.isalnum() or c in "-." else "-" for c in name)),
        policies=tuple(options.policies or (QUICK_POLICIES if quick else POLICIES)),
        seeds=tuple(range(options.seeds)),
        size=Size(**{k: v for k, v in size.items() if v is not None}, qk_norm=options.qk_norm),
        training=Training(**{**usual, **{k: v for k, v in training.items() if v is not None}}),
        times=_times(options.times),
        rows=options.test_rows,
        scalings=scalings if options.scaling is None else options.scaling,
        fine_tuning=tuning if options.fine_tune is None else options.fine_tune,
    )


def _times(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--times: got {text!r}; give whole numbers from 1, ascending: 1,2,4,8") from None


def _accelerator(options: argparse.Namespace) -> Accelerator:
    from accelerate import Accelerator

    from theodolite.cli.loading import require_device

    require_device(options.device)
    precision = {"float32": "no", "bfloat16": "bf16", "float16": "fp16", None: None}[options.dtype]
    accelerator = Accelerator(cpu=options.device == "cpu", mixed_precision=precision or "no")
    if options.device not in (None, accelerator.device.type):
        raise ValueError(f"--device: got {options.device!r}; accelerate runs on {accelerator.device.type!r} here")
    return accelerator
