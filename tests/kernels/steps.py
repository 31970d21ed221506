"""The ways to compute a decode step, and steps that are compared with float64.

Triton's interpreter runs where `TRITON_INTERPRET=1`, which `conftest.py` sets; `make gpu` unsets it for cases marked
`gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from compilers import needs_compiler
from decode_scene import Scene, step_of
from torch import Tensor

from qada_cache.kernels import cpu, decode_reference
from qada_cache.kernels.cpu import compiled_decode
from qada_cache.kernels.operands import Operands, Query, Rows
from qada_cache.sketch.codec import Sketch
from qada_cache.sketch.coded import Records

pytest.importorskip("triton", reason="triton is not installed: pip install triton", exc_type=ModuleNotFoundError)
from qada_cache.kernels import triton as triton_decode
from qada_cache.kernels.triton.kernels import INTERPRETED

interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device and TRITON_INTERPRET=0"
    ),
]
Path = tuple[Callable[[Query, Rows, Operands], tuple[Tensor, Tensor]], str]
REFERENCE = pytest.param((decode_reference.decode_step, "cpu"), id="reference")
KERNEL = pytest.param((triton_decode.fused_decode, "cpu"), id="interpreter", marks=interpreter)
COMPILED = pytest.param((compiled_decode.fused_decode, "cpu"), id="compiled", marks=needs_compiler)
GPU = pytest.param((triton_decode.fused_decode, "cuda"), id="gpu", marks=gpu)
EVERY = pytest.mark.parametrize("path", [REFERENCE, COMPILED, KERNEL, GPU])
OF_TRITON = pytest.mark.parametrize("path", [KERNEL, GPU])
ON_GPU = pytest.mark.parametrize("path", [GPU])
DEVICES = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreter, id="interpreter"), pytest.param("cuda", marks=gpu, id="gpu")]
)


@contextmanager
def small_splits(tokens: int, scan: int) -> Iterator[None]:
    """Bulks are split into so many tokens, and selected from among so many at once; a CPU's threads share few."""
    sizes = dict.fromkeys(("SPLIT_TOKENS", "ESTIMATE_TOKENS", "SELECTED_TOKENS"), tokens)
    with ExitStack() as stack:
        for name, value in {**sizes, "SCAN_TOKENS": scan, "SCAN_RUN": 4}.items():
            stack.enter_context(mock.patch.object(triton_decode.sizing, name, value))
        stack.enter_context(mock.patch.object(cpu, "THREAD_TOKENS", 50))
        stack.enter_context(mock.patch.object(compiled_decode, "ALONE", 0))
        yield


class Step(NamedTuple):
    """A step's outputs and flags, and the tokens that it read of the bulks it selects from, as `Scene.selected`."""

    out: Tensor
    flags: Tensor
    selected: dict[tuple[int, int], Tensor]

    @property
    def share(self) -> float:
        """The share of sketched heads' tokens that are read."""
        return float(torch.cat(list(self.selected.values())).float().mean())

    @property
    def mixed(self) -> bool:
        """Whether some KV heads have a flagged head and others none."""
        needed = self.flags[:-1].any(2)  # without the last row, which has no bulk
        return bool(needed.any() and not needed.all())


def run(
    path: Path,
    scene: Scene,
    *,
    token_threshold: float | None = None,
    splits: tuple[int, int] | None = None,
    pin: bool = False,
    **decision: Any,
) -> Step:
    """Compute the scene's step by `path`; compare flags, outputs and bytes read with float64. Tokens that must not be
    read are nan. Without a `threshold` all heads read their bulks. Scenes with bits select tokens, unless
    `token_threshold` is 0.

    The CPU's kernel runs with one thread, which does a few heads at a time, and with so many that heads are split.
    """
    function, device = path
    decision = {"criterion": "gaussian" if "threshold" in decision else "dense"} | decision
    if token_threshold is None and scene.bits:
        token_threshold = scene.token_threshold()
    table = decision["criterion"]
    flags = scene.flags(**decision | ({"criterion": table.flatten()} if isinstance(table, Tensor) else {}))
    selected = scene.selected(flags, token_threshold) if token_threshold else {}
    scene.place(device)
    needed = scene.forget_unneeded(flags, selected)
    for threads in (1, 16) if function is compiled_decode.fused_decode else (1,):
        arguments = scene.step_arguments(device, token_threshold, pin=pin, **decision)
        with (
            mock.patch.object(torch, "get_num_threads", lambda threads=threads: threads),
            small_splits(*(splits or scene.splits)),
        ):
            out, found = function(*step_of(**arguments))
        assert found.dtype == torch.bool
        assert torch.equal(found.cpu(), flags)
        scene.check(out.cpu(), flags, selected)
        assert arguments["bulk_read_bytes"].item() == needed
        if scene.bits:
            assert arguments["sketch_read_bytes"].item() == scene.sketch_read_bytes(selected, flags)
    return Step(out, found, selected)


def take_row(arguments: dict[str, Any], row: int) -> dict[str, Any]:
    """A row of what `step_of` takes, alone."""
    alone = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.dim() and len(value) > 1:
            alone[name] = value[row : row + 1]
        elif isinstance(value, Sketch):
            alone[name] = value.map(lambda tensor: tensor[row : row + 1])
        elif isinstance(value, Records):
            alone[name] = replace(value, tensor=value.tensor[row : row + 1], open=value.open[row : row + 1])
    return alone


class Launched:
    """Stands in for a kernel; appends its name and what it is launched with."""

    def __init__(self, name: str, launched: list[tuple[str, dict[str, Any]]]) -> None:
        self.name, self.launched = name, launched

    def __getitem__(self, grid: Any) -> Any:
        assert min(grid) > 0
        return lambda *_, **constants: self.launched.append((self.name, constants))
