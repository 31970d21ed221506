"""What was compiled of a kernel, called without Triton's looking for it."""

from typing import Any


class Launches:
    """Of one kernel, with its compile-time constants. What was compiled for a step is called, for another one like it,
    without Triton's looking for it, which takes longer than all else that the host does."""

    def __init__(self, **constants: Any) -> None:
        self._constants = constants
        self._compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}  # behind which constants in their order

    def launch(self, kernel: Any, grid: tuple[int, int, int], variant: tuple[Any, ...], *args: Any) -> None:
        """`variant` has all that Triton compiles for anew, of `args` that may differ from one step to the next."""
        if (found := self._compiled.get(variant)) is not None:
            compiled, constants = found
            compiled[grid](*args, *constants)
        elif (compiled := kernel[grid](*args, **self._constants)) is not None:  # the interpreter compiles nothing
            self._compiled[variant] = compiled, [self._constants[name] for name in kernel.arg_names[len(args) :]]
