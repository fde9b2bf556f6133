"""Draw the pictures of docs/pictures.md by the commands that stand there: `python -m docs.draw.pictures`."""

from __future__ import annotations

import re
import shlex
import tempfile
from pathlib import Path

from PIL import Image

from theodolite.cli import main as theodolite

DOCS = Path(__file__).resolve().parents[1]
_COLOURS = 256


def commands() -> list[list[str]]:
    """The arguments of every command of the page."""
    text = (DOCS / "pictures.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


def main() -> None:
    folder = DOCS / "images" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as drawn:
        for arguments in commands():
            *given, name = arguments
            picture = Path(drawn) / name
            if theodolite([*given, str(picture)]):
                raise SystemExit(1)
            # A page is read at 800 pixels, and a palette is a third of the bytes.
            image = Image.open(picture).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
            image.save(folder / name, optimize=True)


if __name__ == "__main__":
    main()
