"""A process that has imported everything once and runs the command line in forks of itself, for tests.

Reads a JSON object a line: `arguments` of the command line, `log` (a file for what it prints), `kill_after` (a number
of cells after whose last the fork kills itself with SIGKILL, or null), `draw` (whether the report is drawn). Answers
each with a line, the exit status; minus the signal's number for a fork that was killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from theodolite.cli.main import main
from theodolite.report import page, pictures
from theodolite.runs import Store


def run(arguments: list[str], *, log: str, kill_after: int | None, draw: bool) -> int:
    """The exit status of the command line, in this process."""
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if not draw:
        pictures.draw = lambda summary, folder: {}
        page.write = lambda summary, folder: folder
    if kill_after is not None:
        put, finished = Store.put, 0

        def put_and_die(self: Store, *what: Any, **more: Any) -> Any:
            nonlocal finished
            result = put(self, *what, **more)
            finished += 1
            if finished == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        Store.put = put_and_die  # type: ignore[method-assign]
    return main(arguments)


def serve() -> None:
    """Answer until the input ends."""
    # What a survey imports when it starts.
    import torch

    import theodolite.models.load
    import theodolite.survey
    import theodolite.survey.memory  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        fork = os.fork()
        if not fork:
            status = 70
            try:
                status = run(**json.loads(line))
            except SystemExit as ended:
                status = int(ended.code or 0)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
