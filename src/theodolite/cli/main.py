"""`theodolite VERB ...`: finds the verb, and turns errors that a user can act on into one line and exit status 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import theodolite
from theodolite.cli import ask, check, compare, convert, detect, extend, info, inspect, search, show, survey

BAD_INPUT = 2
INTERRUPTED = 130
PIPE_CLOSED = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 done, 2 bad input, 130 interrupted, 141 no reader."""
    parser = argparse.ArgumentParser(
        prog="theodolite",
        description="How far do a model's positions hold, and what carries them further?",
    )
    parser.add_argument("--version", action="version", version=f"theodolite {theodolite.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    inspect.add_parser(verbs)
    show.add_parser(verbs)
    check.add_parser(verbs)
    survey.add_parser(verbs)
    search.add_parser(verbs)
    compare.add_parser(verbs)
    extend.add_parser(verbs)
    convert.add_parser(verbs)
    detect.add_parser(verbs)
    ask.add_parser(verbs)
    info.add_parser(verbs)
    options = parser.parse_args(arguments)
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read (head, less) has seen enough; what is still buffered has no reader.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        print(f"\n{options.interrupted}", file=sys.stderr)
        return INTERRUPTED
    except options.errors() as error:
        print(f"theodolite {options.verb}: {error}", file=sys.stderr)
        return BAD_INPUT
