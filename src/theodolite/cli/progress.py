"""Live progress: a bar with the time left, and a line for each figure as it comes."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any


class Progress:
    """A survey's listener. On a terminal a bar moves; in a log only lines are written, each with the seconds so far.

    Args:
        stderr: write to the standard error, where the standard output is for results.
        quiet: write nothing, as where another process of the same run writes.
    """

    def __init__(self, *, stderr: bool = False, quiet: bool = False) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar
        except ImportError as error:
            raise ImportError(
                "progress is shown by rich, which is not installed: pip install 'theodolite[survey]'"
            ) from error
        self.console: Any = Console(stderr=stderr, quiet=quiet)
        self._begun = time.monotonic()
        columns = (
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("so far,"),
            TimeRemainingColumn(),
            TextColumn("left:"),
            TextColumn("{task.description}"),
        )
        self._bar: Any = Bar(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def expect(self, total: float) -> None:
        self._bar.reset(self._task, total=total)

    def hide(self) -> None:
        """Take the bar away, so that others can write to the terminal."""
        self._bar.stop()

    def working(self, what: str) -> None:
        # Names of files and models are data, not markup.
        self._bar.update(self._task, description=what.replace("[", r"\["))
        if not self.console.is_terminal:
            # A log has no bar, and a pass takes minutes.
            self.finished(f"... {what}")

    def advance(self, done: float) -> None:
        self._bar.advance(self._task, done)

    def finished(self, line: str) -> None:
        seconds = time.monotonic() - self._begun
        self.console.print(f"{seconds:6.0f} s  {line}", markup=False, highlight=False, soft_wrap=True)
