"""`theodolite info`: what is installed, what turns queries and keys on this machine, and how to have it faster."""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import textwrap
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import theodolite

_REQUIREMENT = re.compile(r"(?P<package>[\w.-]+)(?P<extras>\[[^]]*\])?\s*(?P<needed>[^;]*?)\s*(;(?P<marker>.*))?")
_EXTRA = re.compile(r"""extra\s*==\s*["']([\w-]+)["']""")
_SYSTEM = re.compile(r"""platform_system\s*==\s*["'](\w+)["']""")


def add_parser(verbs: Any) -> None:
    """Add the verb and its options."""
    parser = verbs.add_parser(
        "info",
        help="say what is installed, and what rotates on the CPU and on a GPU",
        description="Say what is installed, what turns queries and keys on this machine, and how to have it faster.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    # All that is the user's is the environment: THEODOLITE_KERNEL.
    parser.set_defaults(run=run, errors=lambda: (ValueError,), interrupted="interrupted")


def run(options: argparse.Namespace) -> int:
    """Find out and print."""
    found = gather()
    print(json.dumps(found, indent=2, ensure_ascii=False) if options.json else "\n".join(lines(found)))
    return 0


def gather() -> dict[str, Any]:
    """Everything that is told, as JSON has it; `torch` is `{"error": ...}` where it cannot be imported."""
    torch = _torch()
    rotation, faster = ({}, {}) if "error" in torch else _rotation()
    return {
        "theodolite": theodolite.__version__,
        "folder": str(Path(theodolite.__file__).parent),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "torch": torch,
        "rotation": rotation,
        "faster": faster,
        "extras": _extras(),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """What `gather` found as text: a column of names and one of what is true of them, no wider than the terminal."""
    torch = found["torch"]
    rows = [(name, found[name]) for name in ("theodolite", "folder", "python", "platform")]
    if "error" in torch:
        rows += [("torch", f"cannot be imported ({torch['error']})"), ("rotation", "needs torch")]
    else:
        rows += [
            ("torch", f"{torch['version']}, threads on the CPU: {torch['threads']}"),
            ("accelerators", ", ".join(torch["accelerators"]) or "none that torch can use"),
        ]
    rows += [*found["rotation"].items(), *found["faster"].items()]
    if found["extras"] is None:
        rows.append(("extras", "not known: theodolite runs from a folder, without being installed"))
    else:
        rows += [(f"[{extra}]", _told(extra, packages)) for extra, packages in found["extras"].items()]
    column = 2 + max(len(name) for name, _ in rows)
    width = max(40, shutil.get_terminal_size((100, 24)).columns - column)
    printed = []
    for name, told in rows:
        # A command or a path is copied whole.
        first, *rest = textwrap.wrap(told, width, break_long_words=False, break_on_hyphens=False)
        printed += [name.ljust(column) + first, *(" " * column + line for line in rest)]
    return printed


def _torch() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # A broken installation raises anything.
        return {"error": _reason(error)}
    try:
        accelerators = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
        if not accelerators and torch.accelerator.is_available():
            accelerators = [str(torch.accelerator.current_accelerator())]
    except Exception as error:  # So does a driver that does not fit.
        accelerators = [f"none that works ({_reason(error)})"]
    return {"version": torch.__version__, "threads": torch.get_num_threads(), "accelerators": accelerators}


def _reason(error: Exception) -> str:
    """An error's name and first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"


def _rotation() -> tuple[dict[str, str], dict[str, str]]:
    """What rotates, by device, and how to have what does not, by device."""
    from theodolite import kernels
    from theodolite.kernels import native

    faster = {}
    if kernels.active() != "native" and native.load() is not None:
        faster["faster on the CPU"] = "unset THEODOLITE_KERNEL, which asks for plain torch"
    elif kernels.active() != "native":
        root = Path(theodolite.__file__).parents[2]
        package = "--no-cache-dir --force-reinstall --no-binary theodolite theodolite"
        command = f"pip install -v --no-deps {f'-e {root}' if (root / 'setup.py').exists() else package}"
        faster["faster on the CPU"] = f"with a C compiler (gcc, clang, MSVC): {command}"
    if platform.system() == "Linux" and find_spec("triton") is None:
        faster["faster on a GPU"] = "pip install 'theodolite[triton]'"
    return dict(kernels.describe()), faster


def _extras() -> dict[str, list[dict[str, Any]]] | None:
    """The packages of each extra; None where theodolite is not installed, so that nothing says what they are."""
    try:
        requirements = metadata.requires("theodolite") or []
    except metadata.PackageNotFoundError:
        return None
    extras: dict[str, list[dict[str, Any]]] = {}
    for requirement in requirements:
        parsed = _REQUIREMENT.fullmatch(requirement)
        if parsed is None or not (extra := _EXTRA.search(parsed["marker"] or "")):
            continue
        packages = extras.setdefault(extra[1], [])
        system = _SYSTEM.search(parsed["marker"])
        # An extra that takes in others of this package lists only what it adds.
        if parsed["package"] != "theodolite" and (system is None or system[1] == platform.system()):
            packages.append(_package(parsed["package"], parsed["needed"]))
    return extras


def _package(name: str, needed: str) -> dict[str, Any]:
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        installed = None
    return {"package": name, "needed": needed, "installed": installed, "fits": _fits(installed, needed)}


def _fits(installed: str | None, needed: str) -> bool:
    """Whether a version is within bounds such as `>=5.24,<6`."""
    if installed is None:
        return False

    def numbers(version: str) -> list[int]:
        release = re.match(r"\d+(\.\d+)*", version)
        # 5.24.0 is 5.24.
        return [int(part) for part in re.sub(r"(\.0)+$", "", release[0]).split(".")] if release else []

    bounds = re.findall(r"(>=|<)\s*([\d.]+)", needed)
    return all((numbers(installed) >= numbers(bound)) == (sign == ">=") for sign, bound in bounds)


def _told(extra: str, packages: list[dict[str, Any]]) -> str:
    """An extra in words: what is installed, and how to install what is missing."""
    there = ", ".join(f"{found['package']} {found['installed']}" for found in packages if found["fits"])
    missing = ", ".join(
        f"{found['package']}{found['needed']}" + (f" (found {found['installed']})" if found["installed"] else "")
        for found in packages
        if not found["fits"]
    )
    if not missing:
        return there or "nothing for this system"
    return (f"{there}; " if there else "") + f"lacks {missing}: pip install 'theodolite[{extra}]'"
