"""The trial of a kernel before its first use on this machine."""

from collections.abc import Callable

import torch
from torch import Tensor

# Relative and absolute: a few roundings of a softmax average, far below the change by a missing part.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def fault(compute: Callable[[], tuple[Tensor, ...]], expected: tuple[Tensor, ...]) -> str | None:
    """A kernel's fault, in words for a warning; None without one.

    Args:
        compute: has the kernel compute; the results, on the host.
        expected: the same shapes and dtypes; floating values within `TOLERANCE` of the dtype, others exactly.

    Raises:
        torch.OutOfMemoryError: as `compute` does: it says nothing of the kernel.
    """
    try:
        found = compute()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler, a driver or an operator of another release may raise
        return f"it raised {type(error).__name__}: {(str(error).strip().splitlines() or ['no word'])[0]}"
    for one, other in zip(found, expected, strict=True):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"it gave {one.dtype} {list(one.shape)}, not {other.dtype} {list(other.shape)}"
        if not other.is_floating_point():
            if not torch.equal(one, other):
                return "its decisions or counts are not those of the same computation in plain torch"
        elif not torch.allclose(one, other, rtol=TOLERANCE[other.dtype], atol=TOLERANCE[other.dtype]):
            worst = float((one.double() - other.double()).abs().max())
            return f"it is off by {worst:.2g} from the same computation in plain torch"
    return None
