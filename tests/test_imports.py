"""What an import costs, and which way the rooms lean."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import theodolite

SOURCE = Path(theodolite.__file__).parent

# Each room imports only from rooms before it.
ROOMS = (
    "plan",
    "positions",
    "kernels",
    "encodings",
    "attention",
    "models",
    "runs",
    "conformance",
    "survey",
    "search",
    "compare",
    "advise",
    "ask",
    "report",
    "cli",
)


def modules_after(statement: str) -> set[str]:
    """The names of all modules that a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


class TestLight:
    """`theodolite inspect` answers at once: torch takes seconds to load and is not needed to read a config."""

    @pytest.mark.parametrize(
        "statement", ["import theodolite", "import theodolite.plan", "from theodolite import Rotary"]
    )
    def test_no_torch(self, statement):
        loaded = modules_after(statement)
        assert not {"torch", "transformers", "matplotlib", "rich", "gguf", "safetensors"} & loaded

    def test_the_package_alone_needs_nothing(self):
        assert "numpy" not in modules_after("import theodolite")

    def test_every_name_on_offer_is_there(self):
        for name in theodolite.__all__:
            assert getattr(theodolite, name) is not None
        with pytest.raises(AttributeError, match="module 'theodolite' has no attribute 'Rotray'"):
            theodolite.Rotray  # noqa: B018


def imported(path: Path) -> set[str]:
    """Every module of this package that a file imports, at its top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which room is meant"
            names.add(node.module or "")
    return {name for name in names if name.split(".")[0] == "theodolite"}


def packages(nodes: Iterable[ast.AST]) -> set[str]:
    """The top-level packages that these statements import."""
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.split(".")[0] for name in names}


class TestOptional:
    """Each extra is needed where it is used, and nowhere before."""

    READERS = ("bs4", "markdown_it", "pypdf")

    def test_documents_load_no_reader_and_no_model(self):
        loaded = modules_after("import theodolite.ask.documents, theodolite.ask.prompt")
        assert not {"torch", "transformers", *self.READERS} & loaded

    @pytest.mark.parametrize(
        ("name", "package"),
        [("a.html", "beautifulsoup4"), ("a.md", "markdown-it-py"), ("a.pdf", "pypdf"), ("a.txt", "")],
    )
    def test_a_reader_that_is_missing(self, tmp_path, name, package):
        (tmp_path / name).write_bytes(b"%PDF-1.7" if name == "a.pdf" else b"words")
        code = (
            f"import sys\nfor name in {self.READERS}: sys.modules[name] = None\n"
            f"from theodolite.ask.documents import read_document\nread_document('moby-dick')\n"
            f"try: print(read_document({str(tmp_path / name)!r}).text)\nexcept ImportError as error: print(error)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
        kind = {"a.html": "HTML", "a.md": "Markdown", "a.pdf": "PDF"}.get(name)
        needed = f"reading {kind} needs {package}: pip install 'theodolite[ask]'" if package else "words"
        assert done.stdout.strip() == needed


class TestFloors:
    """A room knows only the rooms above it; nothing goes back upstairs."""

    def test_every_room_is_listed(self):
        rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
        assert rooms <= set(ROOMS)

    @pytest.mark.parametrize("room", ROOMS)
    def test_imports_lead_up(self, room):
        for path in sorted((SOURCE / room).rglob("*.py")):
            for name in imported(path):
                other = [*name.split("."), ""][1]
                assert other in ("", *ROOMS[: ROOMS.index(room) + 1]), f"{path.relative_to(SOURCE)} imports {name}"

    def test_implementations_of_the_rotation_know_nothing_of_each_other(self):
        shared = {"theodolite.kernels.layout", "theodolite.kernels.memory", "theodolite.kernels.rows"}
        own = {"native": set(), "eager": {"blocks"}, "triton_rotation": {"triton_code"}, "traced": {"packed"}}
        own |= {"reference": set(), "triton_code": set(), "blocks": set(), "packed": set()}
        for name, parts in own.items():
            path = SOURCE / "kernels" / f"{name}.py"
            assert imported(path) <= shared | {f"theodolite.kernels.{part}" for part in parts}, name

    def test_the_rotation_loads_no_compiler(self):
        before = modules_after("import torch")
        added = modules_after("import torch, theodolite.kernels, theodolite.encodings") - before
        assert not {name for name in added if name.split(".")[0] in ("triton", "onnx", "transformers")}
        assert "torch._dynamo" not in added
        assert "torch._inductor" not in added

    def test_plans_need_numpy_only(self):
        allowed = {"numpy", "theodolite", *sys.stdlib_module_names}
        for path in (SOURCE / "plan").rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert packages(tree.body) <= allowed, path.name
            # Inside a function something optional may be needed, but never these two.
            assert not packages(ast.walk(tree)) & {"torch", "transformers"}, path.name
