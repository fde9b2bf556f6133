"""`theodolite info`: what a bug report begins with, and how to have the rotation faster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import theodolite
from tests.cli.test_refusals import WITHOUT
from theodolite import kernels
from theodolite.cli import info, main
from theodolite.kernels import native

ROOT = Path(__file__).parents[2]
DESCRIBED = [("rotation on the CPU", "as a river flows"), ("rotation on a GPU", "not at all")]


def told(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What `theodolite info` prints, and nothing beside it."""
    assert main(["info", *options]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def rows(text: str) -> dict[str, str]:
    """The two columns, with what was wrapped put together again."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        start, rest = re.fullmatch(r"(\S+(?: \S+)*)?\s{2,}(\S.*)", line).groups()
        name = start or name
        found[name] = f"{found[name]} {rest}" if not start else rest
    return found


class TestWhatIsTold:
    """One look says which versions and which rotation a figure was measured with."""

    def test_versions(self, capsys):
        found = rows(told(capsys))
        assert found["theodolite"] == theodolite.__version__
        assert found["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.{sys.version_info[2]} (")
        assert found["torch"] == f"{torch.__version__}, threads on the CPU: {torch.get_num_threads()}"
        assert found["folder"] == str(Path(theodolite.__file__).parent)

    def test_what_rotates(self, capsys, monkeypatch):
        monkeypatch.setattr(kernels, "describe", lambda: DESCRIBED)
        found = rows(told(capsys))
        assert {name: found[name] for name, _ in DESCRIBED} == dict(DESCRIBED)

    def test_as_it_is_here(self, capsys):
        assert rows(told(capsys)).items() >= dict(kernels.describe()).items()

    def test_json_says_the_same(self, capsys):
        found = json.loads(told(capsys, "--json"))
        assert found == json.loads(json.dumps(info.gather()))
        assert found["rotation"] == dict(kernels.describe())
        assert found["torch"]["version"] == torch.__version__
        assert set(found) == {
            *("theodolite", "folder", "python", "platform", "torch", "rotation", "faster", "extras"),
        }

    def test_graphics_cards(self, capsys, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: ["NVIDIA H200", "NVIDIA A10"][i])
        assert rows(told(capsys))["accelerators"] == "cuda:0 NVIDIA H200, cuda:1 NVIDIA A10"

    def test_a_driver_that_does_not_fit(self, capsys, monkeypatch):
        def name(index: int) -> str:
            raise RuntimeError("The NVIDIA driver on your system is too old\nand more")

        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", name)
        expected = "none that works (RuntimeError: The NVIDIA driver on your system is too old)"
        assert rows(told(capsys))["accelerators"] == expected

    @pytest.mark.parametrize("columns", [80, 100, 237])
    def test_no_wider_than_the_terminal(self, capsys, monkeypatch, columns):
        narrow = told(capsys)
        monkeypatch.setenv("COLUMNS", str(columns))
        wrapped = told(capsys)
        assert rows(wrapped) == rows(narrow)
        # What has no space in it cannot be broken.
        assert all(
            len(line) <= columns for line in wrapped.splitlines() if " " in line.strip().partition("  ")[2].strip()
        )


class TestFaster:
    """What is slower than it could be is told with the command that changes it."""

    def test_nothing_where_nothing_is_missing(self, capsys, monkeypatch):
        monkeypatch.setattr(kernels, "active", lambda: "native")
        monkeypatch.setattr(info, "find_spec", lambda name: name)
        assert "faster" not in told(capsys)

    @pytest.fixture
    def no_library(self, monkeypatch):
        """As where no compiler was found."""
        monkeypatch.setattr(kernels, "active", lambda: "eager")
        monkeypatch.setattr(kernels, "describe", lambda: DESCRIBED)
        monkeypatch.setattr(native, "load", lambda: None)

    @pytest.mark.usefixtures("no_library")
    def test_native_in_a_checkout(self, capsys):
        expected = f"with a C compiler (gcc, clang, MSVC): pip install -v --no-deps -e {ROOT}"
        assert rows(told(capsys))["faster on the CPU"] == expected

    @pytest.mark.usefixtures("no_library")
    def test_native_from_the_index(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setattr(theodolite, "__file__", str(tmp_path / "lib" / "theodolite" / "__init__.py"))
        command = rows(told(capsys))["faster on the CPU"].partition(": ")[2]
        # A wheel without the library may be in pip's cache, and the same version is there already.
        options = "-v --no-deps --no-cache-dir --force-reinstall --no-binary theodolite"
        assert command == f"pip install {options} theodolite"

    def test_plain_torch_was_asked_for(self, capsys, monkeypatch):
        monkeypatch.setattr(kernels, "active", lambda: "eager")
        monkeypatch.setattr(kernels, "describe", lambda: DESCRIBED)
        monkeypatch.setattr(native, "load", lambda: "a library")
        assert rows(told(capsys))["faster on the CPU"] == "unset THEODOLITE_KERNEL, which asks for plain torch"

    @pytest.mark.parametrize(("system", "advised"), [("Linux", True), ("Windows", False), ("Darwin", False)])
    def test_triton_where_there_is_one(self, capsys, monkeypatch, system, advised):
        monkeypatch.setattr(info, "find_spec", lambda name: None)
        monkeypatch.setattr(info.platform, "system", lambda: system)
        found = rows(told(capsys))
        assert found.get("faster on a GPU") == ("pip install 'theodolite[triton]'" if advised else None)


class TestWithoutTorch:
    """It is asked when something does not work, so a torch that does not work is told, not fallen over."""

    def test_not_installed(self):
        command = (sys.executable, "-c", WITHOUT, "torch", "info")
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
        assert (done.returncode, done.stderr) == (0, "")
        found = rows(done.stdout)
        assert found["torch"] == "cannot be imported (ModuleNotFoundError: No module named 'torch')"
        assert found["rotation"] == "needs torch"
        assert "rotation on the CPU" not in found

    @pytest.mark.parametrize(
        ("raised", "words"),
        [
            ("OSError('libcudart.so.12: not found\\nand more')", "OSError: libcudart.so.12: not found"),
            ("RuntimeError()", "RuntimeError: no reason given"),
        ],
    )
    def test_broken(self, tmp_path, raised, words):
        (tmp_path / "torch.py").write_text(f"raise {raised}", encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = (sys.executable, "-m", "theodolite", "info")
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert (done.returncode, done.stderr) == (0, "")
        assert rows(done.stdout)["torch"] == f"cannot be imported ({words})"

    def test_the_same_in_json(self):
        command = (sys.executable, "-c", WITHOUT, "torch", "info", "--json")
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
        found = json.loads(done.stdout)
        assert found["torch"] == {"error": "ModuleNotFoundError: No module named 'torch'"}
        assert found["rotation"] == {}

    def test_help_does_not_load_it(self):
        code = "import sys\nfrom theodolite.cli import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert "info " in done.stdout
        assert not {"torch", "numpy", "transformers", "rich"} & set(done.stdout.split())


class TestExtras:
    """Which optional packages are there, and what to install for those that are not."""

    def test_as_the_metadata_has_them(self):
        expected: dict[str, set[str]] = {}
        for requirement in map(Requirement, metadata.requires("theodolite")):
            for extra in metadata.metadata("theodolite").get_all("Provides-Extra"):
                wanted = requirement.marker and requirement.marker.evaluate({**default_environment(), "extra": extra})
                if wanted and requirement.name != "theodolite":
                    expected.setdefault(extra, set()).add(requirement.name)
        found = info.gather()["extras"]
        assert {extra: {one["package"] for one in packages} for extra, packages in found.items()} == expected
        assert all(one["installed"] == metadata.version(one["package"]) for one in found["survey"])
        assert all(one["fits"] for packages in found.values() for one in packages)

    @pytest.fixture
    def made_up(self, monkeypatch):
        """A package of this name with extras of every kind, and versions of what they need."""
        needs = [
            "torch>=2.6",
            'old<6,>=5.24; extra == "survey"',
            'there>=1; extra == "survey"',
            'missing>=0.5; extra == "survey"',
            "here>=3; platform_system == \"Linux\" and extra == 'gpu'",
            'whole>=1; extra == "whole"',
            'theodolite[gpu,whole]; extra == "test"',
            'tool; extra == "test"',
            'absent; extra == "more"',
        ]
        versions = {"old": "4.40.0", "there": "1.0", "whole": "2.0+local", "tool": "0.1"}

        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(info.metadata, "requires", lambda name: needs)
        monkeypatch.setattr(info.metadata, "version", version)
        monkeypatch.setattr(info.platform, "system", lambda: "Windows")

    @pytest.mark.usefixtures("made_up")
    def test_told(self, capsys):
        found = rows(told(capsys))
        lacking = "there 1.0; lacks old<6,>=5.24 (found 4.40.0), missing>=0.5: pip install 'theodolite[survey]'"
        assert found["[survey]"] == lacking
        assert found["[gpu]"] == "nothing for this system"
        assert found["[whole]"] == "whole 2.0+local"
        assert found["[test]"] == "tool 0.1"
        assert found["[more]"] == "lacks absent: pip install 'theodolite[more]'"

    @pytest.mark.usefixtures("made_up")
    def test_json(self, capsys):
        found = json.loads(told(capsys, "--json"))["extras"]
        assert found["survey"] == [
            {"package": "old", "needed": "<6,>=5.24", "installed": "4.40.0", "fits": False},
            {"package": "there", "needed": ">=1", "installed": "1.0", "fits": True},
            {"package": "missing", "needed": ">=0.5", "installed": None, "fits": False},
        ]

    def test_not_installed(self, capsys, monkeypatch):
        def requires(name: str) -> list[str]:
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(info.metadata, "requires", requires)
        assert rows(told(capsys))["extras"] == "not known: theodolite runs from a folder, without being installed"

    @example([5, 24], [(">=", [5, 24, 0])])
    @example([6, 0, 0], [("<", [6])])
    @given(
        st.lists(st.integers(0, 12), min_size=1, max_size=4),
        st.lists(
            st.tuples(st.sampled_from([">=", "<"]), st.lists(st.integers(0, 12), min_size=1, max_size=3)), max_size=2
        ),
    )
    def test_bounds(self, release, bounds):
        version = ".".join(map(str, release))
        needed = ",".join(sign + ".".join(map(str, bound)) for sign, bound in bounds)
        assert info._fits(version, needed) == SpecifierSet(needed).contains(version)


class TestEnvironment:
    """What a user set wrongly is said in a line, and a reader who has seen enough is no fault."""

    def test_an_implementation_that_does_not_exist(self):
        done = subprocess.run(
            [sys.executable, "-m", "theodolite", "info"],
            env={**os.environ, "THEODOLITE_KERNEL": "foo"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert done.stderr == "theodolite info: THEODOLITE_KERNEL: got 'foo'; there are native, triton, eager\n"

    @pytest.mark.skipif(sys.platform == "win32", reason="pipes close otherwise there")
    def test_no_reader(self):
        command = [sys.executable, "-m", "theodolite", "info"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
            run.stdout.close()
            assert run.stderr.read() == b""
        assert run.returncode == 141
