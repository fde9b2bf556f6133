"""A request to end, taken so that what is half written is removed first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def removing_what_is_half() -> Iterator[None]:
    """Within it SIGTERM ends the process by way of every `finally`, with the status that a shell gives it (143).

    In another thread than the first, which alone may ask for signals, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _end(number: int, frame: FrameType | None) -> None:
    # Once: what is being removed is not to be left half removed.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
