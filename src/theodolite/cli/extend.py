"""`theodolite extend`: write a model that holds longer, with the measurements that it rests on."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theodolite.cli import extension
from theodolite.cli.extension import Origin
from theodolite.cli.loading import loading_errors, require_packages
from theodolite.cli.loading import tokens_argument as _tokens
from theodolite.cli.terminated import removing_what_is_half

if TYPE_CHECKING:
    from theodolite.cli.progress import Progress
    from theodolite.models.extend import Card, Written
    from theodolite.models.source import Source

CLEAN, FAULTY = 0, 1
# What other formats of weights, archives and configs are called: no folder is meant by them.
_OF_FILES = (
    ".gguf", ".ggml", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".h5", ".npz", ".msgpack", ".json",
    ".zip", ".tar", ".gz", ".md",
)  # fmt: skip
_EXAMPLES = """examples:
  theodolite extend SmolLM2-135M-Instruct --survey survey-SmolLM2-135M-Instruct -o SmolLM2-16k
  theodolite extend model.gguf --scaling yarn:2 --to 16k --survey survey-model -o model-16k.gguf
  theodolite extend ./my-model --scaling search:search-my-model -o my-model-16k
  theodolite extend ./my-model --scaling linear:4 --to 32768 --unmeasured -o my-model-32k

The exit status is 0 where nothing is wrong with what was written, 1 where inspect finds an error, 2 for bad input.
"""


def add_parser(verbs: Any) -> None:
    """Add the verb and its options."""
    parser = verbs.add_parser(
        "extend",
        help="write a model folder or a .gguf file that holds longer; no weight is changed",
        description="Write a copy of a model whose files say more tokens and the scaling that carries it there, for\n"
        "transformers, vLLM, SGLang and llama.cpp, with a card of what was measured.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder with config.json and safetensors, a .gguf file, or a name on the hub",
    )
    parser.add_argument(
        "--scaling",
        metavar="NAME",
        help="as a survey has it: yarn:2, linear:2, ntk:3; or search:DIR, what a search has found (default: what "
        "--survey recommends)",
    )
    parser.add_argument(
        "--to",
        type=_tokens,
        metavar="N",
        help="tokens, 16384 or 16k (default: the length of --survey or of the search)",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="a new folder, or a new FILE.gguf from a .gguf file",
    )
    parser.add_argument("--survey", type=Path, metavar="DIR", help="folder of the survey that the length rests on")
    parser.add_argument(
        "--unmeasured", action="store_true", help="write a length that nothing measured; the card says so"
    )
    parser.add_argument("--copy", action="store_true", help="copy the weights, also where a hard link would do")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, errors=loading_errors, interrupted="interrupted; nothing was written")


def run(options: argparse.Namespace) -> int:
    """Choose, check, write, inspect."""
    _require_consistent(options)
    require_packages("an extension", "survey", "transformers", "rich")
    from theodolite.cli.progress import Progress
    from theodolite.models.appearing import require_absent
    from theodolite.models.extend import extend_folder, extend_gguf
    from theodolite.models.source import resolve

    source = resolve(options.model)
    as_gguf = options.out.suffix == ".gguf"
    _require_folder_name(options.out)
    if as_gguf and source.kind != "gguf":
        instead = "give a folder; llama.cpp's convert_hf_to_gguf.py makes a GGUF of it"
        raise ValueError(f"out: {str(options.out)!r} can only be written from a .gguf file; {instead}")
    require_absent(options.out)
    with removing_what_is_half(), Progress(stderr=True) as progress:
        origin = _open(source, as_gguf, progress)
        card = _card(options, origin, progress)
        if as_gguf:
            progress.expect(origin.path.stat().st_size)
            progress.working(f"writing {options.out.name}")
            written = extend_gguf(origin.path, options.out, card, progress=progress.advance)
        else:
            written = extend_folder(origin.path, options.out, card, copy=options.copy, progress=progress.working)
    return _tell(options, card, written)


def _require_folder_name(out: Path) -> None:
    if out.suffix.lower() in _OF_FILES and out.suffix != ".gguf":
        raise ValueError(
            f"out: {str(out)!r} would be a folder, and ends like a file; give a folder's name, or one that ends in "
            ".gguf for a GGUF file of a GGUF file"
        )


def _require_consistent(options: argparse.Namespace) -> None:
    from theodolite.survey.found import folder_of

    searched = options.scaling is not None and folder_of(options.scaling) is not None
    if options.survey is None and not searched and not options.unmeasured:
        raise ValueError(
            "survey: none is given; give the folder of a survey that holds to that length (theodolite survey), a "
            "scaling that a search has found (search:DIR), or say --unmeasured"
        )
    if options.survey is None and not searched and (options.scaling is None or options.to is None):
        missing = "--scaling" if options.scaling is None else "--to"
        raise ValueError(f"{missing[2:]}: it is needed where no --survey says it")


def _open(source: Source, as_gguf: bool, progress: Progress) -> Origin:
    from theodolite.models.gguf_cache import converted
    from theodolite.models.hub import fetch
    from theodolite.models.source import fingerprint, read_config_dict
    from theodolite.plan.gguf import read_file
    from theodolite.plan.huggingface import read_config
    from theodolite.plan.huggingface.reading import TEXT_PARTS

    if source.kind == "hub":
        progress.working(f"fetching {source.location} from the hub")
        path, digest = fetch(source.location)
    else:
        path, digest = source.path, fingerprint(source)
    if as_gguf:
        return Origin(source=source, path=path, plan=read_file(path), fingerprint=digest, part=None)
    if source.kind == "gguf":
        path = converted(source, digest=digest, progress=progress.working)
    config = read_config_dict(path)
    plan = read_config(config, source=f"config.json of {source.location}")
    part = next((name for name in TEXT_PARTS if isinstance(config.get(name), dict) and config[name]), None)
    return Origin(source=source, path=path, plan=plan, fingerprint=digest, part=part)


def _card(options: argparse.Namespace, origin: Origin, progress: Progress) -> Card:
    """What is to be written, checked, with what it rests on."""
    from theodolite.models.extend import Card, require_counted_over_stated, stretched

    summary = None if options.survey is None else extension.read_survey(options.survey, origin)
    search = extension.read_search(options.scaling, origin)
    wanted = options.to if search is None or summary is not None else options.to or search.to
    candidate, to = extension.choose(options.scaling, wanted, origin.plan, summary)
    after = stretched(origin.plan, candidate.plan, to, name=candidate.name, found=search is not None)
    entry = None if summary is None else extension.entry_of(summary, origin.plan, candidate)
    if entry is None and search is None:
        require_counted_over_stated(origin.plan, candidate.plan, to, name=candidate.name)
    measured = max(extension.measured_to(entry), extension.searched_to(search))
    if measured < to and not options.unmeasured:
        if search is not None:
            raise ValueError(extension.unconfirmed(candidate.name, to, search))
        assert summary is not None
        raise ValueError(extension.unreached(candidate.name, to, entry, summary))
    told = f"measured to {measured:,}" if measured else "unmeasured"
    progress.finished(f"{origin.source.name}: {candidate.name}, to {to:,} tokens, {told}")
    hub = origin.source.kind == "hub"
    return Card(
        model=origin.source.location if hub else origin.source.name,
        hub=hub,
        scaling=candidate.name,
        before=origin.plan,
        after=after,
        to=to,
        summary=summary,
        entry=entry,
        search=search,
        measured_to=measured,
        part=origin.part,
        gguf=origin.source.path.name if origin.source.kind == "gguf" and origin.path.is_dir() else None,
    )


def _tell(options: argparse.Namespace, card: Card, written: Written) -> int:
    """Print what was written, and what inspect finds in it."""
    from theodolite.plan.describe import describe
    from theodolite.plan.findings import find
    from theodolite.plan.open import open_model
    from theodolite.report.figures import plain

    opened = open_model(str(written.path))
    findings = card.findings(find(opened.plan, opened.raw, source=opened.kind, layout=opened.layout))
    errors = [finding for finding in findings if finding.severity == "error"]
    if options.json:
        print(json.dumps(_as_json(card, written, findings), allow_nan=False))
        return FAULTY if errors else CLEAN
    print(f"{plain(str(written.path))}: {card.to:,} tokens, {plain(describe(card.after))}")
    for how, files in (("linked", written.linked), ("copied", written.copied), ("written", written.made)):
        if files:
            print(f"  {how}: {', '.join(map(plain, files))}")
    if written.left_out:
        print(f"  left out: {', '.join(map(plain, written.left_out))}")
    if card.gguf is not None:
        print(f"  weights: {plain(card.gguf)}, dequantised to float32")
    measured = (
        f"to {card.measured_to:,} tokens, by the {'search' if card.search else 'survey'}"
        if card.measured_to
        else "nothing"
    )
    print(f"  measured: {measured}")
    for finding in findings:
        if finding.severity != "note":
            print(plain(f"  {finding.severity}: {finding.field}: {finding.message}"))
    return FAULTY if errors else CLEAN


def _as_json(card: Card, written: Written, findings: Any) -> dict[str, Any]:
    from theodolite.plan.layer_json import layer_json

    length = card.after.max_position_embeddings
    layers = list(dict.fromkeys(card.after.layers))
    return {
        "path": str(written.path),
        "model": card.model,
        "dequantised_from": card.gguf,
        "scaling": card.scaling,
        "to": card.to,
        "max_position_embeddings": length,
        "measured_to": card.measured_to or None,
        "layers": [layer_json(layer, length) for layer in layers],
        "linked": written.linked,
        "copied": written.copied,
        "written": written.made,
        "left_out": written.left_out,
        "findings": [vars(finding) for finding in findings],
    }
