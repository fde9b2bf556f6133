"""The C source of the rotation without Python and torch: compiled in every way there is here, held to a model in C."""

from __future__ import annotations

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "src" / "theodolite" / "kernels" / "csrc"
HARNESS = Path(__file__).parent / "csrc" / "harness.c"

SANITISE = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
STRICT = ("-std=c11", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")
# The source asks for inlining everywhere, which takes a compiler minutes with every access checked.
INLINE_LESS = "-Dalways_inline=unused"
WARNINGS = (
    *STRICT,
    *("-Wpedantic", "-Wconversion", "-Wshadow", "-Wundef", "-Wvla", "-Wcast-qual", "-Wwrite-strings"),
    *("-Wstrict-prototypes", "-Wmissing-prototypes", "-Wold-style-definition"),
)
# Of libc, of its start-up code, and of what distributions add to every program.
LIBC = {
    *("memcpy", "memset", "memmove", "__memcpy_chk", "__memset_chk", "__memmove_chk", "__stack_chk_fail"),
    *("__cxa_finalize", "__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable"),
}
# What Linux says of a processor that runs each set.
FLAGS = {
    "avx2": {"avx2", "f16c"},
    "avx512": {"avx2", "f16c", "avx512f", "avx512dq", "avx512bw", "avx512vl"},
    "avx512_bf16": {"avx2", "f16c", "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_bf16"},
}

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the harness uses POSIX threads")


def find_compiler() -> str | None:
    named = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    return shutil.which(named) or shutil.which("cc")


CC = find_compiler()
CLANG = shutil.which("clang")
ARM_CC = shutil.which("aarch64-linux-gnu-gcc")
ARM_EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
needs_compiler = pytest.mark.skipif(CC is None, reason="there is no C compiler")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads ELF files")


def run(*command: object) -> subprocess.CompletedProcess[str]:
    # Leaks are looked for by tracing the process, which containers forbid; the library allocates nothing.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=900, check=False
    )


def compiled(*command: object) -> None:
    done = run(*command)
    assert done.returncode == 0, done.stderr


def constants() -> list[str]:
    """The sizes from which on the source does something else, for the harness to stand on both sides of."""
    source = (CSRC / "rotate.c").read_text()
    found = dict(re.findall(r"^#define (STREAM_BYTES|GRAIN|TOKENS_OF_BLOCK) (.+)$", source, re.MULTILINE))
    assert len(found) == 3
    return [f"-D{name}={value}" for name, value in found.items()]


def packaged_flags() -> list[str]:
    """Those of setup.py, which cannot be imported without being run."""
    for statement in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "FLAGS":
            return list(ast.literal_eval(statement.value))
    raise AssertionError("setup.py has no FLAGS")


def harness(*command: object) -> list[str]:
    """The instruction sets that agreed with the model."""
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    line = re.fullmatch(r"ok: (\d+) checks, sets: (.+)\n", done.stdout)
    assert line is not None, done.stdout
    assert int(line[1]) > 100_000
    return line[2].split()


def expected_sets() -> list[str] | None:
    """By the kernel's account of this processor; None where it gives none."""
    if not sys.platform.startswith("linux"):
        return None
    if platform.machine() == "aarch64":
        return ["scalar", "neon"]
    if platform.machine() != "x86_64":
        return ["scalar"]
    line = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = set(line[1].split()) if line else set()
    return ["scalar", *(name for name, needed in FLAGS.items() if needed <= flags)]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source compiled as the package compiles it."""
    path = tmp_path_factory.mktemp("native") / "librotate.so"
    compiled(CC, *packaged_flags(), "-shared", "-fPIC", CSRC / "rotate.c", "-o", path)
    return path


@needs_compiler
class TestEveryInstructionSet:
    """Nobody has all processors at hand: each set that one runs gives the bits of the same plain model."""

    def test_without_a_fault_in_memory_or_in_arithmetic(self, tmp_path):
        empty = tmp_path / "empty.c"
        empty.write_text("int main(void) { return 0; }\n")
        if run(CC, *SANITISE, empty, "-o", tmp_path / "empty").returncode or run(tmp_path / "empty").returncode:
            pytest.skip(f"{CC} has no sanitizers")
        program = tmp_path / "harness"
        flags = ("-O1", *SANITISE, *STRICT, INLINE_LESS, *constants(), f"-I{CSRC}")
        compiled(CC, *flags, HARNESS, CSRC / "rotate.c", "-o", program, "-lm", "-pthread")
        assert "scalar" in harness(program)

    def test_as_it_is_shipped(self, library, tmp_path):
        program = tmp_path / "harness"
        flags = ("-O1", *STRICT, *constants(), f"-I{CSRC}")
        compiled(CC, *flags, HARNESS, library, f"-Wl,-rpath,{library.parent}", "-o", program, "-lm", "-pthread")
        sets, expected = harness(program), expected_sets()
        assert expected is None or sets == expected

    @pytest.mark.skipif(CLANG is None, reason="clang is not installed")
    def test_by_another_compiler(self, tmp_path):
        program = tmp_path / "harness"
        # Loops that are not unrolled with every access checked are unrolled without.
        flags = ("-O3", *SANITISE, *STRICT, "-Wno-pass-failed", INLINE_LESS, *constants(), f"-I{CSRC}")
        compiled(CLANG, *flags, HARNESS, CSRC / "rotate.c", "-o", program, "-lm", "-pthread")
        assert "scalar" in harness(program)

    @pytest.mark.skipif(ARM_CC is None, reason="aarch64-linux-gnu-gcc is not installed")
    @pytest.mark.skipif(ARM_EMULATOR is None, reason="qemu-aarch64 is not installed")
    def test_of_arm_in_an_emulator(self, tmp_path):
        program = tmp_path / "harness"
        flags = ("-O2", "-static", *STRICT, *constants(), f"-I{CSRC}")
        compiled(ARM_CC, *flags, HARNESS, CSRC / "rotate.c", "-o", program, "-lm", "-pthread")
        assert harness(ARM_EMULATOR, program) == ["scalar", "neon"]


class TestTheSource:
    """It is compiled where nobody looks: what a compiler would warn of there, it says here."""

    @pytest.mark.parametrize("source", [CSRC / "rotate.c", HARNESS], ids=["rotate", "harness"])
    @pytest.mark.parametrize("compiler", [CC, CLANG, ARM_CC], ids=["cc", "clang", "arm"])
    def test_no_warning(self, compiler, source):
        if compiler is None:
            pytest.skip("this compiler is not installed")
        # Without -O some intrinsics are macros, which warn.
        compiled(compiler, "-O1", "-fsyntax-only", *WARNINGS, f"-I{CSRC}", source)


@linux
@needs_compiler
class TestTheSharedLibrary:
    """One wheel serves every Python, torch and libstdc++, since the library needs nothing but libc."""

    def symbols(self, library: Path, which: str) -> set[str]:
        if shutil.which("nm") is None:
            pytest.skip("nm is not installed")
        done = run("nm", "-D", which, library)
        assert done.returncode == 0, done.stderr
        return {line.split()[-1].partition("@")[0] for line in done.stdout.splitlines()}

    def test_needs_only_libc(self, library):
        assert self.symbols(library, "--undefined-only") <= LIBC

    def test_gives_what_its_header_names_and_nothing_else(self, library):
        declared = set(re.findall(r"^THEODOLITE_API .*?(\w+)\(", (CSRC / "rotate.h").read_text(), re.MULTILINE))
        given = self.symbols(library, "--defined-only")
        assert all(name.startswith("theodolite_") for name in given)
        assert given == declared

    def test_loads_no_other_library(self, library):
        if shutil.which("readelf") is None:
            pytest.skip("readelf is not installed")
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", library).stdout)
        assert needed
        assert all(name.startswith(("libc.", "ld-")) for name in needed), needed
