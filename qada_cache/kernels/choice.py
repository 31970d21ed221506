"""Which implementation computes a decode step: asked for by name, or selected by checks.

- "torch": torch's own operations alone.
- "triton": Triton's kernel, for one token, or for several as in `turn.py`; else an error says why not.
- "auto": Triton's kernel on a GPU, once tried there (`decode_trial.py`), and the C++ kernel on a CPU
  (`compiled_decode.py`); else torch, and on a GPU a warning says why.
"""

import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from ..said_once import warn_once
from ..sketch import Layout
from ..sketch.coded import Records
from . import cpu, decode_trial
from .cpu import compiled_decode
from .operands import is_shared

logger = logging.getLogger(__name__)

AUTO_DEVICES = ("cuda",)  # "auto" takes Triton's kernel on these; on a CPU it is interpreted, for tests only
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_DIM = 256  # channels of a head
MAX_SHARED, MAX_RANK = 640, 512  # channels of keys whose first channels are the values, and of these values
CAPABILITY = (8, 0)  # of a CUDA device; older ones lack instructions that the kernel needs
INSTALL = {"linux": "pip install 'qada-cache[triton]'", "win32": "pip install triton-windows"}  # by sys.platform
KINDS = ("auto", "torch", "triton")


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _find_import_fault() -> str | None:
    """Why our kernels cannot be imported where Triton is installed, in words; None if they can."""
    try:
        from .triton import kernels  # noqa: F401  # imported to see whether that works
    except Exception as error:  # a damaged Triton, or one of another version, may raise any
        return f"triton cannot be imported: {error!r}"
    return None


def explain_unsupported(
    query: Tensor,
    bulk_keys: Tensor,
    bulk_values: Tensor,
    criterion: object,
    records: Records | None = None,
    *,
    most: int = MAX_DIM,
) -> str | None:
    """Why a Triton kernel with heads of `most` channels at most cannot compute this call, in words for an error
    message; None if it can. Tensors and `records` are as in `Query` and `Operands`, `criterion` as in `Options`."""
    if not _is_installed():
        return f"triton is not installed ({INSTALL.get(sys.platform, f'there is none for {sys.platform}')})"
    if (fault := _find_import_fault()) is not None:
        return fault
    from .triton import kernels as triton_kernels

    if query.device.type != ("cpu" if triton_kernels.INTERPRETED else "cuda"):
        return f"the kernel needs CUDA tensors, or CPU tensors with TRITON_INTERPRET=1, not {query.device.type} ones"
    if query.device.type == "cuda" and (capability := torch.cuda.get_device_capability(query.device)) < CAPABILITY:
        needed, has = (".".join(map(str, version)) for version in (CAPABILITY, capability))
        return f"the kernel needs a GPU of compute capability {needed} or above, not {has}"
    if query.dtype not in DTYPES:
        return f"the kernel has no {query.dtype}"
    if not query.dtype == bulk_keys.dtype == bulk_values.dtype:
        return f"it has one dtype, not {query.dtype}, {bulk_keys.dtype} and {bulk_values.dtype}"
    dim, value_dim = query.shape[-1], bulk_values.shape[-1]
    if is_shared(bulk_keys, bulk_values):
        if dim > MAX_SHARED or value_dim > MAX_RANK:
            return (
                f"the kernel has latents of up to {MAX_RANK} channels, and {MAX_SHARED} in all, not {value_dim}, {dim}"
            )
    elif max(dim, value_dim) > most:
        return f"the kernel has head dimensions up to {most}, not {max(dim, value_dim)}"
    if criterion == "oracle":
        return "criterion='oracle' needs every score, which the kernel exists not to compute"
    stored = bulk_keys if records is None else records.tensor
    if stored.numel() and stored.device != query.device and not stored.is_pinned():
        return "the bulk lies in host memory that is not pinned, so that the device cannot read it"
    return None


def resolve_kernels(kernels: str | None) -> str:
    """The requested one of `KINDS`: `kernels`, or if that is None the environment's `QADA_KERNELS`. Others raise
    ValueError."""
    name, kind = ("QADA_KERNELS", os.environ.get("QADA_KERNELS", "auto")) if kernels is None else ("kernels", kernels)
    if kind not in KINDS:
        raise ValueError(f"{name} must be auto, torch or triton, got {kind!r}")
    return kind


def choose_kernel(
    query: Tensor,
    bulk_keys: Tensor,
    bulk_values: Tensor,
    criterion: object,
    kernels: str,
    layout: Layout | None = None,
    *,
    records: Records | None = None,
    sinks: bool = False,
    turn: bool = False,
) -> Callable | None:
    """The `fused_decode` that computes such calls, or for a `turn` the `fused_turn`; None if torch has to, in
    attention/by_torch.py.

    The first four arguments and `records` are as for `explain_unsupported`. `kernels` is one of `KINDS`. `layout` is
    that of the bulk's sketch, None without one. `sinks`: heads have learned sinks. NotImplementedError, if `kernels`
    is "triton" and the kernel cannot compute the call.
    """
    call, group = (query, bulk_keys, bulk_values, criterion, records), query.shape[1] // bulk_keys.shape[1]
    shared = is_shared(bulk_keys, bulk_values)
    heads_at_once = cpu.split_heads(group) if shared and bulk_keys.shape[1] == 1 else group
    if kernels == "auto" and compiled_decode.supports(*call):
        if heads_at_once < group:
            return None if turn else compiled_decode.fused_parts
        return compiled_decode.fused_turn if turn else compiled_decode.fused_decode
    if kernels == "torch" or (kernels == "auto" and query.device.type not in AUTO_DEVICES):
        return None
    reason = explain_unsupported(*call)
    if reason is None:
        from .triton import fused_decode
        from .triton.turn import fused_turn

        turn = turn or heads_at_once < group
        kernel = fused_turn if turn else fused_decode
        if kernels == "auto":
            stored = bulk_keys if records is None else records.tensor
            pinned = stored.device != query.device
            sizes = {"group": heads_at_once, "dim": query.shape[3], "value_dim": bulk_values.shape[3]}
            of_bulk = {"layout": layout, "records": None if records is None else records.layout, "pinned": pinned}
            features = {"queries": 2} if turn else {}
            features |= {"sinks": True} if sinks else {}
            features |= {"shared": True} if shared else {}
            reason = decode_trial.find_decode_fault(kernel, query.device, query.dtype, **sizes, **of_bulk, **features)
        if reason is None:
            return kernel
    if kernels == "triton":
        raise NotImplementedError(
            f"Triton's kernels were asked for (by kernels= or QADA_KERNELS), but {reason}: auto takes those that serve"
        )
    warn_once(logger, f"tokens are decoded on {query.device} by torch's operations, not by Triton's kernel: {reason}")
    return None
