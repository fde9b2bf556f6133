"""`theodolite ask`: questions over long documents, answered by a local model, with the passages that it looked at."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theodolite.cli.answers import as_json, printable, quote, whole
from theodolite.cli.loading import add_machine, load_within_memory, loading_errors, require_packages

if TYPE_CHECKING:
    from theodolite.ask.choice import Choice
    from theodolite.ask.documents import Document
    from theodolite.ask.prompt import Prompt
    from theodolite.ask.session import Session
    from theodolite.cli.progress import Progress
    from theodolite.models.load import LoadedModel

_EXAMPLES = """examples:
  theodolite ask contract.pdf "When does it end?"
  theodolite ask notes/*.md --chat --model Qwen/Qwen3-0.6B --save-cache notes.cache
  theodolite ask moby-dick "Who is Queequeg?" --scaling yarn:4 --json

The answer and the passages go to the standard output (--passages 0: the answer alone), all else to the standard error.
"""
# Answers that a conversation has room for.
_CONVERSATION = 8


def add_parser(verbs: Any) -> None:
    """Add the verb and its options."""
    parser = verbs.add_parser(
        "ask",
        usage="%(prog)s [options] DOCUMENT... QUESTION\n       %(prog)s [options] --chat DOCUMENT... [QUESTION]",
        help="ask a local model about long documents, and see which passages it looked at",
        description="Read documents with a local model, further than it was trained if need be, and answer questions "
        "about them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        nargs="+",
        metavar="DOCUMENT... QUESTION",
        help="text, Markdown, HTML or PDF files, or moby-dick, chinese-classics; and a question in quotation marks",
    )
    parser.add_argument("--chat", action="store_true", help="go on asking; a line each, an empty one ends")
    parser.add_argument(
        "--model",
        default="SmolLM2-135M-Instruct",
        help="a folder with config.json and safetensors, a .gguf file, or a name on the hub (default: %(default)s)",
    )
    parser.add_argument(
        "--scaling",
        metavar="NAME",
        help="how to read more than the model was trained on, as a survey has it: none, yarn:2, self-extend:4 "
        "(default: what a survey found; without one, what copies best from this text)",
    )
    parser.add_argument(
        "--survey", type=Path, metavar="DIR", help="folder of a survey's results (default: survey-MODEL, if there)"
    )
    parser.add_argument(
        "--save-cache",
        type=Path,
        metavar="FILE",
        help="keep what was read in this file; where it is there, go on from it, with the same model, plan and text",
    )
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="of an answer (default: %(default)s)")
    parser.add_argument("--passages", type=int, default=3, metavar="N", help="to quote (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the most likely token (default: 0)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn at a temperature above 0")
    parser.add_argument("--encoding", help="of text files that are not UTF-8")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each question")
    add_machine(parser)
    parser.set_defaults(run=run, errors=loading_errors, interrupted="interrupted")


def run(options: argparse.Namespace) -> int:
    """Read, answer, quote."""
    _require_in_range(options)
    sources, question = _given(options.words, options.chat)
    require_packages("a question", "ask", "transformers", "psutil", "rich")
    from theodolite.ask.documents import read_document
    from theodolite.ask.prompt import Turn, build_prompt
    from theodolite.ask.session import Session
    from theodolite.cli.progress import Progress
    from theodolite.models.decode import require_temperature
    from theodolite.survey.scalings import require_known

    # What can be told without the model is told before it is loaded.
    require_temperature(options.temperature)
    require_known(options.scaling or "")
    documents = [read_document(source, encoding=options.encoding) for source in sources]
    documents = _told_apart(documents, sources)
    with Progress(stderr=True) as progress:
        for document in documents:
            for note in document.notes:
                progress.finished(f"{document.name}: {note}")
        loaded = load_within_memory(options.model, options.dtype, options.device, progress)
        prompt = build_prompt(loaded.tokenizer, documents, [Turn(question or "?")])
        needed = len(prompt.tokens)
        room = _room(options, needed, loaded.plan.max_position_embeddings)
        named = ", ".join(document.name for document in documents)
        progress.finished(f"{loaded.name}: {needed:,} tokens, {named} and what is asked of it")
        choice = _choose(options, loaded, prompt, room, progress)
        progress.finished(f"reading {choice.why}")
        _require_memory(loaded, choice, room)
        session = Session(loaded, documents, candidate=choice.candidate, room=room)
        with session:
            _read(session, options.save_cache, progress)
            for asked in _questions(question, options.chat):
                _answer(session, asked, options, progress, choice)
    return 0


def _told_apart(documents: list[Document], sources: list[str]) -> list[Document]:
    """Documents of one name in several folders by their paths."""
    names = [document.name for document in documents]
    return [
        replace(document, name=printable(whole(source))) if names.count(document.name) > 1 else document
        for document, source in zip(documents, sources, strict=True)
    ]


def _require_in_range(options: argparse.Namespace) -> None:
    for name, least in (("max_tokens", 1), ("passages", 0), ("seed", 0)):
        value = getattr(options, name)
        if not least <= value < 2**63:
            raise ValueError(f"{name.replace('_', '-')}: got {value}; give a whole number of at least {least}")
    folder = options.save_cache and options.save_cache.resolve()
    if folder and (folder.is_dir() or not folder.parent.is_dir()):
        raise ValueError(f"save-cache: {str(options.save_cache)!r} is no file in a folder that exists")


def _room(options: argparse.Namespace, needed: int, trained: int | None) -> int:
    """How many tokens there will be at most, questions and answers included."""
    from theodolite.ask.session import kept_room

    count: int = options.max_tokens
    once = needed + count
    kept = kept_room(options.save_cache) if options.save_cache and options.save_cache.exists() else None
    if kept is not None and kept >= once:
        # Frequencies and maps that follow the length are those that were kept.
        return kept
    if not options.chat:
        return once
    room = needed + count * _CONVERSATION
    # A conversation begins anew before it goes where the model was not trained.
    return min(room, trained) if trained is not None and once <= trained else room


def _given(words: list[str], chat: bool) -> tuple[list[str], str | None]:
    """The documents, and the question; None where a chat begins without one."""
    *sources, last = words
    if not last.strip():
        raise ValueError("question: it is empty; put a question after the documents, in quotation marks")
    is_file = _is_document(last)
    if chat and (is_file or not sources):
        return words, None
    if is_file:
        raise ValueError(
            f"question: the last word is the question, and {last!r} is a file; put the question after it in quotation "
            "marks, or take --chat"
        )
    if not sources:
        raise ValueError(
            f"documents: got the question {last!r} and no document to ask about; give files before it, or moby-dick"
        )
    return sources, whole(last)


def _is_document(word: str) -> bool:
    from theodolite.ask.documents import books

    try:
        return word in books() or Path(word).exists()
    except (OSError, ValueError):
        # Longer than a name can be, or with a character that none can have.
        return False


def _choose(options: argparse.Namespace, loaded: LoadedModel, prompt: Prompt, room: int, progress: Progress) -> Choice:
    import torch

    from theodolite.ask import choice

    folder = options.survey or Path(f"survey-{loaded.name}")
    summary = None
    if options.survey is not None or (folder / "summary.json").is_file():
        try:
            summary = choice.read_survey(loaded, folder)
        except ValueError as error:
            if options.survey is not None:
                raise
            progress.finished(f"left aside: {error}")
    if summary is not None:
        progress.finished(choice.holds(summary))
    if options.scaling is not None:
        return choice.as_asked(loaded, options.scaling, room)
    if (found := choice.by_length(loaded, room)) is not None:
        return found
    progress.finished(f"longer than the {loaded.plan.max_position_embeddings:,} tokens of training")
    if summary is not None:
        if (found := choice.from_survey(loaded, summary, room)) is not None:
            return found
        progress.finished(f"nothing in the survey holds to {room:,}")
    return choice.by_reach(loaded, torch.tensor(prompt.tokens[: prompt.document.stop]), room, progress)


def _require_memory(loaded: LoadedModel, choice: Choice, room: int) -> None:
    from theodolite.survey.memory import require_memory, survey_bytes

    mapped = choice.candidate.relative is not None
    needed = survey_bytes(loaded.model, choice.candidate.plan, length=room, mapped=mapped)
    instead = "a shorter document, another dtype, or another machine"
    require_memory(needed, f"Reading {room:,} tokens", loaded.model.device, instead=instead)


def _read(session: Session, path: Path | None, progress: Progress) -> None:
    """Read the documents, or take what is kept of them; what was read is kept, also where it was interrupted."""
    if path is not None and path.exists():
        session.resume(path)
        progress.finished(f"{path}: {session.read:,} of {session.document_tokens:,} tokens were read before")
    before = session.read
    if before == session.document_tokens:
        return
    progress.expect(session.document_tokens - before)
    progress.working(f"reading {session.document_tokens - before:,} tokens")
    done = before

    def told(tokens: int) -> None:
        nonlocal done
        progress.advance(tokens - done)
        done = tokens

    try:
        session.read_documents(told)
    finally:
        if path is not None and session.read > before:
            _keep(session, path, progress)
    progress.finished(f"read {session.document_tokens:,} tokens")


def _keep(session: Session, path: Path, progress: Progress) -> None:
    """Write what was read; a second Ctrl-C waits for it, and a full disk costs no answer."""
    waits = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if waits else None
    try:
        session.save(path)
        progress.finished(f"kept in {path}: {session.read:,} tokens")
    except OSError as error:
        progress.finished(f"not kept: {error}")
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _questions(first: str | None, chat: bool) -> Iterator[str]:
    if first is not None:
        yield first
    while chat:
        if sys.stdin.isatty():
            print("\n> ", end="", file=sys.stderr, flush=True)
        line = whole(sys.stdin.readline())
        if not line.strip():
            return
        yield line.strip()


def _answer(
    session: Session,
    question: str,
    options: argparse.Namespace,
    progress: Progress,
    choice: Choice,
) -> None:
    def told(text: str) -> None:
        progress.hide()
        if not options.json:
            print(printable(text), end="", flush=True)

    if not session.fits(question, options.max_tokens) and session.turns:
        progress.finished("the conversation is full; a new one about the same documents begins")
        session.forget_conversation()
    if not session.fits(question, options.max_tokens) and options.chat:
        progress.finished(f"this question is too long: with it and an answer there is room for {session.room:,} tokens")
        return
    try:
        answer = session.answer(
            question,
            count=options.max_tokens,
            temperature=options.temperature,
            seed=options.seed,
            passages=options.passages,
            told=told,
        )
    except KeyboardInterrupt:
        if not options.chat:
            raise
        # The answer is broken off, not the conversation.
        print(file=sys.stderr if options.json else sys.stdout, flush=True)
        return
    if options.json:
        print(json.dumps(as_json(session, question, answer, choice), ensure_ascii=False), flush=True)
        return
    print(flush=True)
    quote(answer)
