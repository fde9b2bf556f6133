"""What users install: the source distribution, the wheel built from it, and both where no compiler works."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from theodolite.kernels import native

ROOT = Path(__file__).parents[1]
NEEDED = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
LIBRARY = f"theodolite/kernels/{native.PATH.name}"
WITH_THE_CODE = ("py.typed", "report/templates/report.html.j2", "texts/moby-dick.txt", "kernels/api.py")
NO_COMPILER = "/bin/false"

_COMPILER = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cl").split()[0]
needs_compiler = pytest.mark.skipif(shutil.which(_COMPILER) is None, reason=f"there is no C compiler ({_COMPILER})")

# Run where the package is installed: who rotates, from which folder, and the bits that come out.
ROTATES = """
import sys
folder, out = sys.argv[1:]
sys.path.insert(0, folder)
import hashlib, itertools, json
import numpy as np
import torch
import theodolite
from theodolite import kernels

random = np.random.default_rng(7)
q, k = random.standard_normal((2, 6, 17, 24)), random.standard_normal((2, 3, 17, 24))
angles = random.uniform(0, 7, (33, 10))
positions = random.integers(0, 33, (2, 17))
np.savez(out, q=q, k=k, angles=angles, positions=positions)
tables = [torch.from_numpy(f(angles)).float() for f in (np.cos, np.sin)]
bits = {}
for dtype, interleaved, trailing, conjugate in itertools.product(
    (torch.float64, torch.float32, torch.bfloat16, torch.float16), *[(False, True)] * 3
):
    turned = kernels.rotate(
        *(torch.from_numpy(x).to(dtype) for x in (q, k)), *tables, positions=torch.from_numpy(positions),
        rotary_dim=20, interleaved=interleaved, trailing=trailing, conjugate=conjugate,
    )
    name = f"{dtype} {interleaved} {trailing} {conjugate}"
    bits[name] = [hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for x in turned]
print(json.dumps({"from": theodolite.__file__, "active": kernels.active(), "bits": bits}))
"""


def run(*command: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process whose output is kept, and that knows nothing of how this one was set up to build."""
    clean = {name: value for name, value in os.environ.items() if name not in ("THEODOLITE_NATIVE", "PYTHONPATH")}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env={**clean, **environment}, capture_output=True, text=True, timeout=300
    )


def build(source: Path, *options: str, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build without the network, with the setuptools that is here."""
    return run(
        sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *options, source, cwd=out, **environment
    )


def only(folder: Path, pattern: str) -> Path:
    """The one file of a folder whose name fits."""
    (found,) = folder.glob(pattern)
    return found


def packed(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def tags(wheel: Path) -> list[str]:
    """The tags that the wheel says of itself."""
    (said,) = [text.decode() for name, text in packed(wheel).items() if name.endswith(".dist-info/WHEEL")]
    return re.findall(r"^Tag: (.+)$", said, re.MULTILINE)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built, in which an earlier build has left a library that is nobody's."""
    source = tmp_path_factory.mktemp("source")
    for name in NEEDED:
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", native.PATH.name)
    )
    (source / "src" / LIBRARY).write_bytes(b"stale")
    (source / "tests").mkdir()
    shutil.copy(__file__, source / "tests")
    return source


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and with the wheel that was built from it."""
    out = tmp_path_factory.mktemp("built")
    done = build(source, out=out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def unpacked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        archive.extractall(folder, filter="data")
    return only(folder, "*")


@pytest.fixture(scope="module")
def without(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel that is built where the compiler fails, from a tree that was built before."""
    out = tmp_path_factory.mktemp("without")
    # Of the same name as a real build's, where setuptools collects what it packs.
    platform = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    stale = unpacked / "build" / platform / LIBRARY
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"stale")
    done = build(unpacked, "--wheel", out=out, CC=NO_COMPILER)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not stale.exists()
    assert "the native rotation is left out; plain torch rotates instead" in done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def rotated(built: Path, without: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict]]:
    """What the package of each wheel says and computes, installed into a folder of its own."""
    said = {}
    for name, folder in (("built", built), ("without", without)):
        target = tmp_path_factory.mktemp("installed")
        wheel = only(folder, "*.whl")
        pip = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", target)
        done = run(sys.executable, *pip, wheel)
        assert done.returncode == 0, done.stderr
        done = run(sys.executable, "-I", "-c", ROTATES, target, target / "inputs.npz", cwd=target)
        assert done.returncode == 0, done.stderr
        said[name] = {**json.loads(done.stdout), "target": target}
    return said


class TestSourceDistribution:
    """Whoever has no wheel for their platform builds from it, so all that is compiled must be in it."""

    def test_what_is_in_it(self, unpacked):
        files = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
        sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "src/theodolite/kernels/csrc").iterdir()}
        assert sources >= {"src/theodolite/kernels/csrc/rotate.c"}
        assert files >= {*NEEDED, *sources, *(f"src/theodolite/{name}" for name in WITH_THE_CODE)}

    def test_what_is_not(self, built):
        with tarfile.open(only(built, "*.tar.gz")) as archive:
            names = archive.getnames()
        assert not [name for name in names if name.endswith(native.PATH.name) or "/tests/" in name]


class TestWheel:
    """One wheel serves every Python and torch of its platform."""

    @needs_compiler
    def test_bound_to_the_platform_only(self, built):
        wheel = only(built, "*.whl")
        platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
        if sys.platform == "linux":
            assert wheel.name.endswith(f"-py3-none-{platform}.whl")
        assert tags(wheel) == ["-".join(wheel.stem.split("-")[2:])]
        assert not wheel.name.endswith("-any.whl")

    @needs_compiler
    def test_the_library_is_the_one_of_this_source(self, built, tmp_path):
        path = tmp_path / native.PATH.name
        path.write_bytes(packed(only(built, "*.whl"))[LIBRARY])
        library = ctypes.CDLL(str(path))
        assert library.theodolite_rotate
        # Without a Python of its own and without C++, it loads wherever the C library does.
        assert not re.findall(rb"libpython|libstdc\+\+|libc\+\+|PyInit", path.read_bytes())

    def test_what_goes_with_the_code(self, built, without):
        for folder in (built, without):
            files = packed(only(folder, "*.whl"))
            assert set(files) >= {f"theodolite/{name}" for name in WITH_THE_CODE}
            assert not [name for name in files if name.endswith((".c", ".h")) or name.startswith("tests")]

    @needs_compiler
    def test_it_rotates_natively(self, rotated):
        said = rotated["built"]
        assert Path(said["from"]).is_relative_to(said["target"])
        assert said["active"] == "native"


class TestWithoutCompiler:
    """The library makes it faster, never different, and never stands in the way of an installation."""

    def test_bound_to_nothing(self, without):
        wheel = only(without, "*.whl")
        assert wheel.name.endswith("-py3-none-any.whl")
        assert tags(wheel) == ["py3-none-any"]
        assert LIBRARY not in packed(wheel)

    def test_it_rotates_in_plain_torch(self, rotated):
        said = rotated["without"]
        assert Path(said["from"]).is_relative_to(said["target"])
        assert said["active"] == "eager"

    def test_the_same_bits(self, rotated):
        assert len(rotated["without"]["bits"]) == 32
        assert rotated["without"]["bits"] == rotated["built"]["bits"]

    def test_the_bits_are_right(self, rotated):
        given = np.load(rotated["without"]["target"] / "inputs.npz")
        c, s = (f(given["angles"]).astype(np.float32)[given["positions"]][:, None] for f in (np.cos, np.sin))
        expected = []
        for x in (given["q"].astype(np.float32), given["k"].astype(np.float32)):
            x1, x2 = x[..., :10], x[..., 10:20]
            expected.append(np.concatenate([x1 * c - x2 * s, x2 * c + x1 * s, x[..., 20:]], axis=-1))
        bits = [hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest() for x in expected]
        assert rotated["without"]["bits"]["torch.float32 False False False"] == bits


class TestAsked:
    """THEODOLITE_NATIVE says whether the library is wanted; those who build wheels must not lose it unseen."""

    def test_required(self, unpacked, tmp_path):
        done = build(unpacked, "--wheel", out=tmp_path, CC=NO_COMPILER, THEODOLITE_NATIVE="1")
        assert done.returncode != 0
        assert not list(tmp_path.iterdir())

    def test_unwanted(self, unpacked, tmp_path):
        done = build(unpacked, "--wheel", out=tmp_path, THEODOLITE_NATIVE="0")
        assert done.returncode == 0, done.stderr
        assert only(tmp_path, "*.whl").name.endswith("-py3-none-any.whl")

    def test_anything_else(self, unpacked, tmp_path):
        done = build(unpacked, "--wheel", out=tmp_path, THEODOLITE_NATIVE="yes")
        assert done.returncode != 0
        assert (
            "THEODOLITE_NATIVE: got 'yes'; allowed: 0 (leave out), 1 (require), or unset" in done.stdout + done.stderr
        )


class TestEditable:
    """`pip install -e .` leaves the library of this source beside the code, or none."""

    BUILD = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"

    @needs_compiler
    def test_in_place(self, source, tmp_path):
        # What is compiled matters not here, and the whole takes long.
        tree = shutil.copytree(source, tmp_path / "tree")
        (tree / "src/theodolite/kernels/csrc/rotate.c").write_text("int theodolite_rotate(void) { return 0; }\n")
        library = tree / "src" / LIBRARY
        for environment, there in (({}, True), ({"CC": NO_COMPILER}, False)):
            library.write_bytes(b"stale")
            done = run(sys.executable, "-c", self.BUILD, tmp_path, cwd=tree, **environment)
            assert done.returncode == 0, done.stderr
            assert library.exists() == there, environment
            assert not there or library.read_bytes() != b"stale"


class TestPins:
    """`make test` runs on the versions of constraints.txt and no others, and they are ones that are allowed."""

    def test_every_requirement_is_pinned_within_its_bounds(self):
        tomllib = pytest.importorskip("tomllib")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
        pinned = {canonicalize_name(name): version for name, version in pins.items()}
        wanted = [
            *project["dependencies"],
            *(one for extra in project["optional-dependencies"].values() for one in extra),
        ]
        for requirement in map(Requirement, wanted):
            if requirement.name != project["name"]:
                assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement
