"""Kernels in a process of their own, as `make check-arm` has them run: bit for bit what they compute in this one."""

from pathlib import Path

import emulated
import pytest
import torch
from compilers import compiler, needs_compiler, needs_vectors
from decode_scene import Scene, step_of
from torch import Tensor

from qada_cache.kernels import cpu
from qada_cache.kernels.cpu import building, compiled_decode, prompt, quantizing
from qada_cache.sketch import Layout

CACHES = cpu.build, cpu.build_partial, prompt._build_once, quantizing.build_quantizer


def compute(scene: Scene) -> list[Tensor]:
    """Results of a decode step, partial attention, a prompt and codes. Their arguments are in structures of structures,
    and numbers. Other tests have built these sizes."""
    for cache in CACHES:
        cache.cache_clear()
    found = [*compiled_decode.fused_decode(*step_of(**scene.step_arguments("cpu", 1.0, criterion="dense")))]
    made = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 600, 64, generator=made)
    found += cpu.compiled_partial_attention(query[:, :, :2], key, value, scaling=0.2) or ()
    found.append(torch.empty(1, 2, 600, 64))
    prompt.prompt_attention(query, key, value, scaling=0.2, causal=True, out=found[-1])
    coded = quantizing.quantize_segments(key, None, Layout.from_bits(64, 2))
    return [*found, coded["codes"]]


@needs_compiler
@needs_vectors
def test_a_runner_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(bulk=[(1500, 5), (63, 0)], short=(), bits=2)
    here = compute(scene)
    runner = emulated.Runner(str(compiler()), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(building, "_builds", building._Builds())
        emulated.use(runner, patch.setattr)
        there = compute(scene)
    runner.close()
    for cache in CACHES:
        cache.cache_clear()
    assert len(here) == len(there) == 6
    assert all(map(torch.equal, here, there))
