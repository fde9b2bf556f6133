"""The command line: one file per verb, which parses, calls and prints."""

from theodolite.cli.main import main

__all__ = ["main"]
