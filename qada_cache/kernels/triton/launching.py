"""Launches of compiled kernels without Triton's own lookup, which takes the host longer than the launch."""

import contextlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver

from ...garbage import without_collecting
from ..operands import Rows

# In older Pythons, a thread in which garbage is collected while it makes a syntax tree breaks other threads' trees
# (SystemError: "AST constructor recursion depth mismatch", cpython's issue 106905).
TREES_ARE_APART = sys.version_info >= (3, 12, 2) or (3, 11, 8) <= sys.version_info < (3, 12)

# A product and a sum are one instruction. Triton 3.10 fuses them no more unless told to, and 3.9 warns of it.
FUSING = {"enable_fp_fusion": True}


class _DryRun(threading.local):
    """Launches that this thread asks for while it launches nothing; None: it does."""

    launches: "list[Launch] | None" = None


_dry_run = _DryRun()


class Launches:
    """The launches of one kernel with its compile-time constants. A later step of the same variant calls the compiled
    kernel directly: Triton's own lookup takes longer than all else that the host does."""

    def __init__(self, **constants: Any) -> None:
        self.constants = FUSING | constants
        self._compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}  # behind which constants in their order

    def launch(self, kernel: Any, grid: tuple[int, int, int], variant: tuple[Any, ...], *args: Any) -> None:
        """Launch `kernel`. `variant` has all properties of `args` that may differ from step to step, and for which
        Triton compiles anew."""
        if _dry_run.launches is not None:
            _dry_run.launches.append((self, kernel, grid, args))
            return
        if (found := self._compiled.get(variant)) is None:
            if (compiled := kernel[grid](*args, **self.constants)) is not None:  # the interpreter compiles nothing
                self._compiled[variant] = compiled, [self.constants[name] for name in kernel.arg_names[len(args) :]]
            return
        compiled, constants = found
        if _is_hooked():
            compiled[grid](*args, *constants)
            return
        # As that does it, but for a description of all arguments that only a hook would read.
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        metadata = compiled.function, compiled.packed_metadata, None, None, None
        compiled.run(*grid, stream, *metadata, *args, *constants)


Launch = tuple[Launches, Any, tuple[int, int, int], tuple[Any, ...]]


def compile_ahead(work: Callable[[], object]) -> None:
    """Compile the kernels that `work` launches in parallel. It is called, and launches nothing meanwhile."""
    if knobs.runtime.interpret:
        return
    _dry_run.launches = []
    try:
        work()
        launches = _dry_run.launches
    finally:
        _dry_run.launches = None
    compile_together(launches)


def compile_together(launches: list[Launch]) -> None:
    """Compile these kernels in parallel, those that are not compiled yet."""
    new = [each for each in launches if isinstance(each[1], JITFunction)]  # the interpreter's are none
    if not new:
        return
    collects = contextlib.nullcontext() if TREES_ARE_APART else without_collecting()
    with collects, ThreadPoolExecutor(len(new)) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for of_kernel, kernel, grid, args in new:  # the launch of one that cannot be compiled says why
            kernel.warmup(*args, grid=grid, **of_kernel.constants)


def _is_hooked() -> bool:
    """Whether launches have hooks, of a profiler for instance."""
    before, behind = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(behind, "calls", behind))


class RowStrides(NamedTuple):
    """The tensors of `Rows` and their strides, which all layers of a pass launch with."""

    tensors: tuple[Tensor, ...]
    strides: tuple[int, ...]  # from row to row
    variant: tuple[Any, ...]  # what Triton compiles for

    @classmethod
    def find(cls, rows: Rows, batch: int) -> "RowStrides":
        """The strides for `batch` rows of a query, which may share one row."""
        tensors = rows.local, rows.pending, rows.bulk_lengths, rows.decided
        strides = tuple(find_stride(each, batch) for each in tensors)
        return cls(tensors, strides, (*strides[2:], *(each.data_ptr() % 16 == 0 for each in tensors)))


def find_stride(tensor: Tensor, batch: int) -> int:
    """The stride from row to row: 0 if all rows share one."""
    return 0 if tensor.shape[0] < batch else tensor.stride(0)
