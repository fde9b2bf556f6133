"""An extended model as a GGUF file, with its card beside it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from theodolite.models.appearing import flush, require_absent
from theodolite.models.extend.card import Card, write_card
from theodolite.models.extend.folder import Written
from theodolite.models.extend.gguf_copy import copy_changed
from theodolite.plan.gguf import read_file, read_keys
from theodolite.plan.gguf_writing import changes_for, require_says


def extend_gguf(
    source: Path, out: Path, card: Card, *, progress: Callable[[int], object] = lambda written: None
) -> Written:
    """Write a GGUF file that says `card.after`, read back before it has its name; and `OUT.md`, its card.

    Args:
        source: the file that `card.before` was read from (`theodolite.plan.gguf.read_file`).
        out: a file that is not there yet.
        progress: called with the bytes written since the last call.

    Raises:
        PlanError: GGUF, or llama.cpp's code for the architecture, has no words for the plan; or the file is damaged.
        FileExistsError: `out` or its card is there.
        OSError: they cannot be written.
    """
    beside = out.with_name(f"{out.name}.md")
    require_absent(out)
    require_absent(beside)
    keys, _ = read_keys(source)
    changes = changes_for(keys, read_file(source), card.after)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, partial_card = (path.with_name(f".{os.getpid()}.{path.name}") for path in (out, beside))
    told = (
        "The file is a copy of the original with other metadata, and no other byte of it was changed: "
        f"{len(changes.values)} keys"
        + (f", and the tensors {', '.join(f'`{name}`' for name in changes.divisors)}." if changes.divisors else ".")
    )
    try:
        copy_changed(source, partial, changes, progress)
        require_says(partial, card.after)
        partial_card.write_text(write_card(card, name=out.name, files=told), encoding="utf-8", errors="replace")
        flush(partial)
        require_absent(out)
        os.replace(partial, out)
        os.replace(partial_card, beside)
    finally:
        partial.unlink(missing_ok=True)
        partial_card.unlink(missing_ok=True)
    return Written(path=out, made=(out.name, beside.name))
