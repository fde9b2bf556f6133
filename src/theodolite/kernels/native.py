"""The rotation in C: the library is loaded once, and told where a call's tensors lie by a description that is kept."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from theodolite.kernels.layout import Layout
from theodolite.kernels.memory import span
from theodolite.kernels.rows import refuse_row

# Of rotate.h.
ABI = 1
MAX_PAIRS = 1024
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3, torch.int8: 4}
_POSITION, OVERLAP, _UNALIGNED, WITHOUT_MEMORY, _THREADS = 1, 2, 3, 4, 5
_SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
PATH = Path(__file__).with_name("_rotate" + _SUFFIX)


class Operand(ctypes.Structure):
    """`struct theodolite_operand`."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "heads",
            "batch_stride",
            "head_stride",
            "token_stride",
            "out_batch_stride",
            "out_head_stride",
            "out_token_stride",
            "bytes",
            "out_bytes",
        )
    ]


class Table(ctypes.Structure):
    """`struct theodolite_table`."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch_stride", "head_stride", "row_stride", "bytes")]


class Call(ctypes.Structure):
    """`struct theodolite_call`."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "batch",
                "tokens",
                "head_dim",
                "first_channel",
                "rotary_dim",
                "table_heads",
                "rows",
                "position_batch_stride",
                "position_token_stride",
                "position_bytes",
            )
        ),
        ("operands", Operand * 2),
        ("cos", Table),
        ("sin", Table),
        *(
            (name, ctypes.c_int32)
            for name in (
                "type",
                "table_type",
                "position_size",
                "interleaved",
                "conjugate",
                "by_channel",
                "apart",
                "reserved",
            )
        ),
    ]


class Library:
    """The C library, loaded.

    Args:
        path: of the file.

    Raises:
        OSError: it is not there, or no library.
        RuntimeError: it is that of another version.
    """

    def __init__(self, path: Path) -> None:
        free, held = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        free.theodolite_call_size.restype = ctypes.c_int64
        abi, size = free.theodolite_abi(), free.theodolite_call_size()
        if abi != ABI or size != ctypes.sizeof(Call):
            raise RuntimeError(
                f"{path.name} has interface {abi} and not {ABI}: it is of another version; build it anew"
            )
        # Small calls keep the interpreter's lock, which costs more to give back than they take.
        self.small, self.large = _typed(held.theodolite_rotate), _typed(free.theodolite_rotate)
        free.theodolite_set_name.restype = ctypes.c_char_p
        free.theodolite_set_parallel.argtypes = [ctypes.c_void_p]
        self._library = free
        self.threaded = self._take_threads()

    @property
    def sets(self) -> list[str]:
        """The instruction sets that this processor runs, the plainest first."""
        count = self._library.theodolite_sets()
        return [self._name(number) for number in range(count) if self._library.theodolite_set_runs(number)]

    @property
    def chosen_set(self) -> str:
        """The one in use."""
        return self._name(self._library.theodolite_chosen_set())

    def choose_set(self, name: str) -> None:
        """Use another, for this process.

        Raises:
            ValueError: it does not run here.
        """
        for number in range(self._library.theodolite_sets()):
            if self._name(number) == name and self._library.theodolite_choose_set(number):
                return
        raise ValueError(f"instruction set: got {name!r}; this processor runs {', '.join(self.sets)}")

    def _name(self, number: int) -> str:
        return str(self._library.theodolite_set_name(number).decode())

    def _take_threads(self) -> bool:
        """Threads are torch's own, in the number that it is set to, where it lends them (from 2.10)."""
        function = _torch_parallel_for()
        self._library.theodolite_set_parallel(function)
        if function is not None:
            # A thread pool does not survive a fork.
            os.register_at_fork(after_in_child=lambda: self._library.theodolite_set_parallel(None))
        return function is not None


@functools.cache
def load() -> Library | None:
    """The library, or None where there is none that works (`why_not` has the reason)."""
    library, _ = _loaded()
    return library


def why_not() -> str | None:
    """Why there is no library, in words; None if there is one."""
    return _loaded()[1]


@functools.cache
def _loaded() -> tuple[Library | None, str | None]:
    if not PATH.exists():
        return None, "it was not built: no C compiler was found when theodolite was installed"
    try:
        return Library(PATH), None
    except (AttributeError, OSError, RuntimeError) as error:
        return None, str(error)


def _typed(function: Callable[..., int]) -> Callable[..., int]:
    function.argtypes = [ctypes.c_void_p] * 8  # type: ignore[attr-defined]
    function.restype = ctypes.c_int64  # type: ignore[attr-defined]
    return function


def _torch_parallel_for() -> int | None:
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll"):
        if (folder / name).exists():
            function = getattr(ctypes.CDLL(str(folder / name)), "torch_parallel_for", None)
            return None if function is None else ctypes.cast(function, ctypes.c_void_p).value
    return None


class Recipe:
    """A call that was checked, for all tensors that lie alike in memory.

    Args:
        turns: (out, x), one or two, (B, H, S, D).
        cos, sin: (1 or B, Ht, L, P).
        positions: (1 or B, S) or None.
        layout: which channels turn.
        second: the one of `turns` is the library's second operand.
    """

    def __init__(
        self,
        library: Library,
        turns: Sequence[tuple[Tensor, Tensor]],
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        layout: Layout,
        *,
        second: bool = False,
    ) -> None:
        self.call = call = Call()
        x = turns[0][1]
        call.batch, _, call.tokens, call.head_dim = x.shape
        call.rotary_dim, call.interleaved, call.conjugate = layout.rotary_dim, layout.interleaved, layout.conjugate
        call.first_channel = x.shape[3] - layout.rotary_dim if layout.trailing else 0
        call.table_heads, call.rows = cos.shape[1:3]
        call.by_channel = cos.shape[3] == layout.rotary_dim
        call.type, call.table_type = TYPES[x.dtype], TYPES[cos.dtype]
        for operand, (out, x) in zip(call.operands[1:] if second else call.operands, turns, strict=False):
            operand.heads = x.shape[1]
            operand.batch_stride, operand.head_stride, operand.token_stride, _ = x.stride()
            operand.out_batch_stride, operand.out_head_stride, operand.out_token_stride, _ = out.stride()
            operand.bytes, operand.out_bytes = span(x) * x.element_size(), span(out) * out.element_size()
        for table, given in ((call.cos, cos), (call.sin, sin)):
            table.batch_stride = given.stride(0) if given.shape[0] > 1 else 0
            table.head_stride, table.row_stride, _ = given.stride()[1:]
            table.bytes = span(given) * given.element_size()
        if positions is not None:
            call.position_size = positions.element_size()
            call.position_batch_stride = positions.stride(0) if positions.shape[0] > 1 else 0
            call.position_token_stride = positions.stride(1)
            call.position_bytes = span(positions) * call.position_size
        elements = call.batch * call.tokens * call.head_dim * sum(operand.heads for operand in call.operands)
        self.function = library.small if elements <= _SMALL else library.large
        self.address = address_of(call)


# Elements of a call that keeps the interpreter's lock: a few microseconds.
_SMALL = 2**15


def address_of(call: Call) -> int:
    """Where it lies in memory, as long as it lives."""
    return ctypes.addressof(call)


def supports(turns: Sequence[tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor, layout: Layout) -> bool:
    """Whether these lie as the library reads them: heads and rows of tables without gaps, and not too wide."""
    tensors = [*(x for turn in turns for x in turn), cos, sin]
    return layout.rotary_dim <= 2 * MAX_PAIRS and all(x.stride(-1) == 1 or x.numel() == 0 for x in tensors)


def rotate_into(
    turns: Sequence[tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor, positions: Tensor | None, layout: Layout
) -> None:
    """Turn each `x` of `turns`, pairs `(out, x)` of (B, H, S, D), into its `out`; all of them as `supports` has it.

    Raises:
        ValueError: a position has no row; nothing is written then.
    """
    library = load()
    if library is None:
        raise RuntimeError(f"the native rotation is not there: {why_not()}")
    recipe = Recipe(library, turns, cos, sin, positions, layout)
    recipe.call.apart = True
    pointers: list[int | None] = [pointer for out, x in turns for pointer in (x.data_ptr(), out.data_ptr())]
    pointers += [None] * (4 - len(pointers))
    position = None if positions is None else positions.data_ptr()
    outcome = recipe.function(recipe.address, *pointers, cos.data_ptr(), sin.data_ptr(), position)
    if outcome:
        refuse(outcome, cos, positions)


def refuse(outcome: int, cos: Tensor, positions: Tensor | None) -> None:
    """Say what a call did not take.

    Raises:
        ValueError: a position has no row, memory does not begin where an element can, or it is shared.
        RuntimeError: threads failed.
    """
    code = outcome & 0xFF
    if code == _POSITION and positions is not None:
        rows, index = positions.reshape(-1, positions.shape[-1]), outcome >> 8
        batch, token = divmod(index, rows.shape[1])
        refuse_row(int(rows[batch % rows.shape[0], token]), cos.shape[-2])
    if code == _UNALIGNED:
        raise ValueError(
            "q, k, cos, sin, positions, out_q, out_k: one of them begins within an element of memory; give a copy"
        )
    if code == OVERLAP:
        raise ValueError("q, k: one of them is written over cos, sin or positions")
    if code == _THREADS:
        raise RuntimeError("torch could not start its threads: what was written is not to be used")
    raise ValueError(f"the native rotation refused the call (outcome {code})")
