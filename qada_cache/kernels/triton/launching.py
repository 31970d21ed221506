"""What was compiled of a kernel, called without Triton's looking for it."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver

from ..operands import Rows


class Launches:
    """Of one kernel, with its compile-time constants. What was compiled for a step is called, for another one like it,
    without Triton's looking for it, which takes longer than all else that the host does."""

    def __init__(self, **constants: Any) -> None:
        self.constants = constants
        self._compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}  # behind which constants in their order

    def launch(self, kernel: Any, grid: tuple[int, int, int], variant: tuple[Any, ...], *args: Any) -> None:
        """`variant` has all that Triton compiles for anew, of `args` that may differ from one step to the next."""
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


def compile_together(launches: list[Launch]) -> None:
    """Side by side, what has to be compiled of the `Launches`, kernels, grids and arguments of one step."""
    new = [each for each in launches if isinstance(each[1], JITFunction)]  # the interpreter's are none
    if not new:
        return
    with ThreadPoolExecutor(len(new)) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for of_kernel, kernel, grid, args in new:  # the launch of one that cannot be compiled says why
            kernel.warmup(*args, grid=grid, **of_kernel.constants)


def _is_hooked() -> bool:
    """Whether a profiler, say, is to be told of launches."""
    before, behind = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(behind, "calls", behind))


class RowStrides(NamedTuple):
    """What the layers of a pass launch alike."""

    tensors: tuple[Tensor, ...]
    strides: tuple[int, ...]  # from row to row
    variant: tuple[Any, ...]  # what Triton compiles for

    @classmethod
    def find(cls, rows: Rows, batch: int) -> "RowStrides":
        """Those of `batch` rows, which may share one."""
        tensors = rows.local, rows.pending, rows.bulk_lengths, rows.decided
        strides = tuple(find_stride(each, batch) for each in tensors)
        return cls(tensors, strides, (*strides[2:], *(each.data_ptr() % 16 == 0 for each in tensors)))


def find_stride(tensor: Tensor, batch: int) -> int:
    """From row to row: 0, if all rows share one."""
    return 0 if tensor.shape[0] < batch else tensor.stride(0)
