"""Bulks of records in a fused decode step, against float64: what is selected of them, and whole heads; Triton's kernels
in `test_triton_records.py`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from decode_scene import step_of
from quick_cases import mark_rest_slow
from record_scene import RecordScene
from small_sketch import small_sketch
from test_triton import COMPILED, REFERENCE, Path
from torch import Tensor

from qada_cache.kernels import cpu
from qada_cache.kernels.cpu import compiled_decode
from qada_cache.kernels.operands import OperandError
from qada_cache.sketch import selection

EVERY = pytest.mark.parametrize("path", [REFERENCE, COMPILED])
BULK = [(769, 5), (0, 1), (63, 0), (39, 9), (1324, 70)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows of few tokens have a sketch, and are split."""
    monkeypatch.setattr(cpu, "THREAD_TOKENS", 50)
    with small_sketch(40):
        yield


def run(path: Path, scene: RecordScene, *, token_threshold: float, **decision: Any) -> dict[tuple[int, int], Tensor]:
    """Compute, and compare flags, outputs and bytes read with float64's; what is not to be read is nan. By one thread,
    and by so many that heads are split."""
    function, device = path
    scene.place(device)
    decision = {"criterion": "dense"} | decision
    flags = scene.flags(**decision)
    selected = scene.selected(flags, token_threshold) if token_threshold else {}
    needed = scene.forget_unneeded(flags, selected)
    for threads in (1, 16) if function is compiled_decode.fused_decode else (1,):
        arguments = scene.arguments(device) | scene.decision_arguments(device, **decision)
        arguments |= scene.sketch_arguments(device, token_threshold) | scene.record_arguments(device)
        with mock.patch.object(torch, "get_num_threads", lambda threads=threads: threads):
            out, found = function(*step_of(**arguments))
        assert torch.equal(found.cpu(), flags)
        scene.check(out.cpu(), flags, selected)
        assert arguments["bulk_read_bytes"].item() == needed
        assert arguments["sketch_read_bytes"].item() == scene.sketch_bytes(flags, selected)
    return selected


def share(selected: dict[tuple[int, int], Tensor]) -> float:
    """Of the tokens of sketched heads, how many are read."""
    return float(torch.cat(list(selected.values())).float().mean())


SIZES = mark_rest_slow(
    [
        (64, 64, torch.float32, 1.5),
        (128, 128, torch.bfloat16, 2),
        (96, 80, torch.bfloat16, 4),
        (80, 96, torch.float16, 1),
        (24, 8, torch.float32, 3),
        (256, 64, torch.float16, 1.5),
    ],
    3,
)


@EVERY
@pytest.mark.parametrize("rung", [8, 4])
@pytest.mark.parametrize(("dim", "value_dim", "dtype", "bits"), SIZES)
def test_selected_tokens(path: Path, dim: int, value_dim: int, dtype: torch.dtype, bits: float, rung: int) -> None:
    sizes = {"dim": dim, "value_dim": value_dim, "dtype": dtype, "bits": bits, "rung": rung}
    scene = RecordScene(bulk=[(1037, 9), (63, 0), (769, 1)], short=(2,), group=3, **sizes)
    assert 0.05 < share(run(path, scene, token_threshold=scene.token_threshold())) < 0.7


@EVERY
@pytest.mark.parametrize("rung", [8, 4])
@pytest.mark.parametrize(("dim", "value_dim", "dtype", "bits"), SIZES)
def test_whole_heads(path: Path, dim: int, value_dim: int, dtype: torch.dtype, bits: float, rung: int) -> None:
    sizes = {"dim": dim, "value_dim": value_dim, "dtype": dtype, "bits": bits, "rung": rung}
    run(path, RecordScene(bulk=[(1037, 9), (63, 0), (769, 1)], short=(2,), group=3, **sizes), token_threshold=0)


@EVERY
@pytest.mark.parametrize(("group", "group_rule"), [(1, "head"), (7, "head"), (16, "head"), (4, "any")])
@pytest.mark.parametrize("selects", [True, False])
def test_decided_heads(path: Path, group: int, group_rule: str, selects: bool) -> None:
    """Only long-context heads read, whichever of a group they are."""
    scene = RecordScene(bulk=BULK, group=group, dtype=torch.bfloat16, bits=2)
    decision = {"criterion": "gaussian", "threshold": scene.threshold(group_rule), "group_rule": group_rule}
    run(path, scene, token_threshold=scene.token_threshold(0.1) if selects else 0, **decision)


@EVERY
@pytest.mark.parametrize("selects", [True, False])
@pytest.mark.parametrize(
    ("dim", "value_dim", "group", "dtype", "rung"),
    [(72, 64, 9, torch.float32, 4), (72, 64, 9, torch.bfloat16, 8), (576, 512, 16, torch.bfloat16, 8)],
)
def test_values_in_keys(
    path: Path, dim: int, value_dim: int, group: int, dtype: torch.dtype, rung: int, selects: bool
) -> None:
    """As latents are: one key for all heads, whose first channels, decoded, are the value."""
    sizes = {"kv_heads": 1, "group": group, "dim": dim, "value_dim": value_dim, "shared": True}
    scene = RecordScene(bulk=BULK, dtype=dtype, bits=1.5, rung=rung, **sizes)
    decision = {"criterion": "gaussian", "threshold": scene.threshold()}
    selected = run(path, scene, token_threshold=scene.token_threshold(0.1) if selects else 0, **decision)
    assert not selects or 0.02 < share(selected) < 0.8


@EVERY
@pytest.mark.parametrize("group", [1, 4])
def test_a_sketch_that_is_too_rough(path: Path, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some heads, which read their records whole."""
    scene = RecordScene(bulk=BULK, group=group, dtype=torch.bfloat16, bits=2)
    decision = {"criterion": "gaussian", "threshold": scene.threshold()}
    flags = scene.flags(**decision)
    cut, reliable = scene.rough_for_some(flags)
    monkeypatch.setattr(selection, "UNRELIABLE", cut)
    monkeypatch.setattr(selection, "NOISE_SHARE", 0.0)
    assert len(run(path, scene, token_threshold=1.0, **decision)) == reliable > 0


@EVERY
def test_from_no_token_to_all(path: Path) -> None:
    for token_threshold, expected in ((1e-30, 1.0), (1e9, 0.0)):
        assert share(run(path, RecordScene(bulk=BULK, bits=2), token_threshold=token_threshold)) == expected


@EVERY
def test_padding(path: Path) -> None:
    run(path, RecordScene(bulk=BULK, padding=(0, 3), bits=2), token_threshold=1.0)


def test_what_records_do_not_hold_is_refused() -> None:
    scene = RecordScene(bulk=[(1100, 9), (900, 0)], short=(), bits=2)
    function, device = COMPILED.values[0]
    given = scene.arguments(device) | scene.decision_arguments(device, criterion="dense")
    given |= scene.sketch_arguments(device, 1.0) | scene.record_arguments(device)
    records, sketch = given["records"], given["sketch"]
    parts = {"codes": sketch.codes[..., :1040].clone(), "scales": sketch.scales[..., :1040].clone()}
    shortened = replace(sketch, **parts)  # which ends in the open segment
    for name, bad in (
        ("records", {"records": replace(records, tensor=records.tensor[..., 1:])}),
        ("open_records", {"records": replace(records, open=records.open[:, :1].clone())}),
        ("record_weights", {"records": replace(records, weights=records.weights.double())}),
        ("scales", {"sketch": shortened}),
        ("bulk_lengths is 1100", {"records": replace(records, tensor=records.tensor[:, :, :500].clone())}),
        ("bulk_lengths is 588", {"records": replace(records, open=records.open[:, :, :587].clone())}),
        ("bulk_lengths is 588", {n: given[n][:, :, :587].clone() for n in ("bulk_keys", "bulk_values")}),
    ):
        with pytest.raises(OperandError, match=name):
            function(*step_of(**(given | bad)))
