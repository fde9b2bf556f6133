"""Builds the C source of the rotation as a plain shared library; pyproject.toml says everything else.

The library knows neither Python nor torch, so one wheel per platform serves every version of both, and what cannot be
compiled is left out: the package then rotates in plain torch. THEODOLITE_NATIVE=0 in the environment leaves it out
unasked, THEODOLITE_NATIVE=1 makes a compilation that fails an error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, OptionError

# theodolite.kernels.native looks for the same name.
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
# A sum of products is rounded twice on every machine: no contraction. No -march: the source chooses as it runs.
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-g0"]
MSVC_FLAGS = ["/std:c11", "/O2", "/fp:precise"]


class BuildLibrary(build_ext):
    """Compile without Python: no tag in the name, no init function to export, no libpython; or leave it out."""

    def run(self) -> None:
        wanted = os.environ.get("THEODOLITE_NATIVE", "")
        if wanted not in ("", "0", "1"):
            raise OptionError(f"THEODOLITE_NATIVE: got {wanted!r}; allowed: 0 (leave out), 1 (require), or unset")
        # What an earlier build left may be of other sources, whatever the dates of the files say.
        self.force = True
        in_place = self.inplace
        if wanted == "0":
            self._leave_out("THEODOLITE_NATIVE=0", in_place)
            return
        try:
            super().run()
        except (BaseError, CCompilerError) as error:
            if wanted == "1":
                raise
            self._leave_out(str(error), in_place)

    def build_extension(self, ext: Extension) -> None:
        ext.extra_compile_args = MSVC_FLAGS if self.compiler.compiler_type == "msvc" else FLAGS
        super().build_extension(ext)

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + SUFFIX

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols

    def get_libraries(self, ext: Extension) -> list[str]:
        return ext.libraries

    def _leave_out(self, reason: str, in_place: bool) -> None:
        # One of an earlier build would be packed, or loaded, as if it were this source's.
        for ext in self.extensions:
            for folder in (self.build_lib, "src") if in_place else (self.build_lib,):
                Path(folder, self.get_ext_filename(ext.name)).unlink(missing_ok=True)
        self.distribution.ext_modules = []
        if wheel := self.distribution.get_command_obj("bdist_wheel", create=False):
            wheel.root_is_pure = True
        self.warn(f"the native rotation is left out; plain torch rotates instead, with the same results: {reason}")


class TagWheel(bdist_wheel):
    """A wheel with the library is bound to a platform but to no Python; one without it, to neither."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("theodolite.kernels._rotate", ["src/theodolite/kernels/csrc/rotate.c"])],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": TagWheel},
)
