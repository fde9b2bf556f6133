"""Draw the pictures of the pages: `python -m docs.draw`, or `python docs/draw rotary images-2d --out FOLDER`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1]
# Started as a folder, Python looks for modules in here alone.
sys.path.insert(0, str(DOCS))

from draw import adding, biasing, images, reading, rotating, rounding, scaling  # noqa: E402
from draw.style import drawing, save  # noqa: E402

# One entry more for each file of pictures; every name of its `__all__` is a page's, with underscores.
FILES = (adding, rotating, images, rounding, scaling, biasing, reading)

PICTURES: dict[str, Callable[[], Figure]] = {
    name.replace("_", "-"): getattr(file, name) for file in FILES for name in file.__all__
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.draw", description="Draw the pictures of docs/encodings.")
    parser.add_argument("pages", nargs="*", help=f"of these: {', '.join(PICTURES)}; all by default")
    parser.add_argument("--out", type=Path, default=DOCS / "images" / "encodings")
    arguments = parser.parse_args()
    unknown = [page for page in arguments.pages if page not in PICTURES]
    if unknown:
        parser.error(f"pages: got {', '.join(unknown)}; there are {', '.join(PICTURES)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for page in arguments.pages or PICTURES:
        with drawing():
            save(PICTURES[page](), arguments.out / f"{page}.png")


if __name__ == "__main__":
    main()
