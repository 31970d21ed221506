"""Launches of Triton's kernels, which compile them the first time."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction

from ...garbage import without_collecting
from ..operands import Rows
from .direct import DirectLaunch, Field, at_device, find_stream, launch_once

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
    """The launches of one kernel with its compile-time constants. A later one of the same variant is a direct one."""

    def __init__(self, **constants: Any) -> None:
        self.constants = FUSING | constants
        self._compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}  # behind which constants in their order
        # All of them, also where two threads compiled the same: Triton 3.9 unloads a kernel that nobody keeps, and a
        # graph may launch it.
        self._kept: list[Any] = []

    def launch(self, kernel: Any, grid: tuple[int, int, int], variant: tuple[Any, ...], *args: Any) -> None:
        """Launch `kernel`. `variant` has all properties of `args` that may differ from step to step, and for which
        Triton compiles anew."""
        if _dry_run.launches is not None:
            _dry_run.launches.append((self, kernel, grid, args))
        elif (found := self._compiled.get(variant)) is None:
            if (compiled := kernel[grid](*args, **self.constants)) is not None:  # the interpreter compiles nothing
                self._kept.append(compiled)
                self._compiled[variant] = compiled, [self.constants[name] for name in kernel.arg_names[len(args) :]]
        elif are_watched():
            found[0][grid](*args, *found[1])
        else:
            launch_once(found[0], grid, (*args, *found[1]))

    def find_direct(
        self, variant: tuple[Any, ...], grid: tuple[int, int, int], args: Iterable[Any]
    ) -> DirectLaunch | None:
        """The launch with these arguments of what is compiled for this variant. None if nothing is, or if launches are
        looked at, by a profiler for instance."""
        found = self._compiled.get(variant)
        return None if found is None or are_watched() else DirectLaunch(found[0], grid, (*args, *found[1]))


Launch = tuple[Launches, Any, tuple[int, int, int], tuple[Any, ...]]


class Steps:
    """Launches one behind the other, from step to step. The first ones of a kind find all their arguments; later ones
    are direct, and write only those that change."""

    def __init__(self) -> None:
        self._variants: set[tuple[Any, ...]] = set()  # that have been launched
        self._direct: dict[tuple[Any, ...], list[DirectLaunch]] = {}  # by kind

    def forget(self) -> None:
        """Forget arguments, as tensors among those that do not change are others now."""
        self._direct.clear()

    def launch(
        self,
        list_launches: Callable[..., list[Launch]],
        changing: Sequence[Any],
        addresses: Sequence[Any],
        *,
        variant: tuple[Any, ...],
        kind: tuple[Any, ...],
        note: bool = True,
    ) -> None:
        """Launch what `list_launches` makes of the arguments that change from step to step, the first of which is a
        tensor on the kernels' device. `addresses` are the same with addresses for tensors. `variant` is as in
        `Launches`. All other arguments are the same for one `kind`, unless they are not to be noted."""
        with at_device(changing[0].device):
            if note and kind in self._direct and not are_watched():
                stream = find_stream()
                for direct in self._direct[kind]:
                    direct.launch(stream, addresses)
                return
            launches = list_launches(*changing)
            if len(launches) > 1 and variant not in self._variants:
                compile_together(launches)
                self._variants.add(variant)
            for of_kernel, kernel, grid, args in launches:
                of_kernel.launch(kernel, grid, variant, *args)
            if note:
                launches = list_launches(*map(Field, range(len(changing))))
                found = [
                    of_kernel.find_direct(variant, grid, _find_addresses(args, changing[0].device))
                    for of_kernel, _, grid, args in launches
                ]
                if all(found):
                    self._direct[kind] = [each for each in found if each is not None]


def _find_addresses(args: Iterable[Any], device: torch.device) -> list[Any]:
    """`args`, with addresses for tensors on the device. Those in host memory may have other addresses there."""
    return [each.data_ptr() if isinstance(each, Tensor) and each.device == device else each for each in args]


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


def are_watched() -> bool:
    """Whether launches are to be noted and not done in this thread, or have hooks, of a profiler for instance."""
    before, behind = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    hooked = getattr(before, "calls", before) or getattr(behind, "calls", behind)
    return bool(hooked) or _dry_run.launches is not None


class RowStrides(NamedTuple):
    """The tensors of `Rows` and their strides, which all layers of a pass launch with."""

    tensors: tuple[Tensor, ...]
    addresses: tuple[int, ...]  # of these
    strides: tuple[int, ...]  # from row to row
    variant: tuple[Any, ...]  # what Triton compiles for

    @classmethod
    def find(cls, rows: Rows, batch: int) -> "RowStrides":
        """The strides for `batch` rows of a query, which may share one row."""
        tensors = rows.local, rows.pending, rows.bulk_lengths, rows.decided
        strides = tuple(find_stride(each, batch) for each in tensors)
        addresses = tuple(each.data_ptr() for each in tensors)
        return cls(tensors, addresses, strides, (*strides[2:], *(each % 16 == 0 for each in addresses)))


def find_stride(tensor: Tensor, batch: int) -> int:
    """The stride from row to row: 0 if all rows share one."""
    return 0 if tensor.shape[0] < batch else tensor.stride(0)
