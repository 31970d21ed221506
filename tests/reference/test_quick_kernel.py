"""The quick kernels that serve in place of Triton's are held to what these are held to."""

import pytest
import torch
from decode_scene import Scene, step_of
from quick_kernel import QuickStorer, quick_decode

from qada_cache.kernels.storing import find_storing_fault


@pytest.mark.parametrize("rule", ["head", "any"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_what_a_kernel_does(rule: str, dtype: torch.dtype) -> None:
    scene = Scene(padding=(2,), dtype=dtype)
    decision = {"threshold": scene.threshold(rule), "group_rule": rule, "criterion": "gaussian"}
    wanted = scene.flags(**decision)
    needed = scene.forget_unneeded(wanted)
    query, rows, layer = step_of(**scene.arguments("cpu"), **scene.decision_arguments(**decision))
    out, flags = quick_decode(query, rows, layer)
    assert torch.equal(flags, wanted)
    assert 0 < flags.sum() < flags.numel()
    scene.check(out, flags)
    assert layer.bulk_read_bytes == needed


def test_a_token_is_stored_and_estimated_as_a_kernel_is_tried() -> None:
    assert find_storing_fault(QuickStorer, torch.device("cpu"), torch.float32, group=2, dim=16, value_dim=24) is None
