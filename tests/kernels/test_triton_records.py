"""Bulks of records in Triton's decode step, against float64: by its interpreter, and on a GPU."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_scene import step_of
from quick_cases import mark_rest_slow
from record_scene import RecordScene
from small_sketch import small_sketch
from stand_in import without_waiting
from test_records import run
from test_triton import GPU, KERNEL, Path
from torch import Tensor

from qada_cache.kernels import triton as triton_decode
from qada_cache.kernels.operands import OperandError
from qada_cache.sketch import coded, selection
from qada_cache.sketch.codec import Sketch
from qada_cache.sketch.coded import Records

EVERY = pytest.mark.parametrize("path", [KERNEL, GPU])
BULK = [(777, 5), (39, 1), (1153, 0)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows of few tokens have a sketch, and are split."""
    for name, value in {
        "SPLIT_TOKENS": 400,
        "ESTIMATE_TOKENS": 400,
        "SELECTED_TOKENS": 400,
        "SCAN_TOKENS": 64,
        "SCAN_RUN": 4,
    }.items():
        monkeypatch.setattr(triton_decode.sizing, name, value)
    with small_sketch(40):
        yield


# Sizes that fill blocks and such that do not, words and bytes, one, two and three terms of weights.
SIZES = [
    (64, 64, torch.float32, 1.5, 1, 8),
    (64, 64, torch.bfloat16, 1.5, 3, 4),
    (128, 128, torch.bfloat16, 2, 4, 8),
    (128, 128, torch.float32, 1.5, 7, 4),
    (80, 80, torch.bfloat16, 1.5, 8, 8),
    (80, 96, torch.float16, 1, 3, 4),
    (96, 80, torch.float32, 4, 2, 8),
    (24, 8, torch.float32, 3, 5, 8),
    (8, 16, torch.bfloat16, 2, 1, 4),
    (256, 256, torch.float16, 1.5, 1, 8),
]


@EVERY
@pytest.mark.parametrize("selects", [True, False])
@pytest.mark.parametrize(("dim", "value_dim", "dtype", "bits", "group", "rung"), mark_rest_slow(SIZES, 5))
def test_sizes(
    path: Path, dim: int, value_dim: int, dtype: torch.dtype, bits: float, group: int, rung: int, selects: bool
) -> None:
    """Selected tokens and whole heads, of a row that lies in records and of a short one."""
    sizes = {"dim": dim, "value_dim": value_dim, "dtype": dtype, "bits": bits, "group": group, "rung": rung}
    scene = RecordScene(bulk=[(777, 9), (39, 0)], short=(2,), kv_heads=1, **sizes)
    read = run(path, scene, token_threshold=scene.token_threshold() if selects else 0)
    if selects:
        assert 0.05 < float(read[0, 0].float().mean()) < 0.9


@EVERY
@pytest.mark.parametrize(("group", "group_rule"), [(1, "head"), (7, "head"), (4, "any")])
@pytest.mark.parametrize("selects", [True, False])
def test_decided_heads(path: Path, group: int, group_rule: str, selects: bool) -> None:
    """Only long-context heads read, whichever of a group they are."""
    scene = RecordScene(bulk=BULK, group=group, dtype=torch.bfloat16, bits=2)
    decision = {"criterion": "gaussian", "threshold": scene.threshold(group_rule), "group_rule": group_rule}
    run(path, scene, token_threshold=scene.token_threshold(0.1) if selects else 0, **decision)


@EVERY
def test_a_sketch_that_is_too_rough(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some heads, which read their records whole."""
    scene = RecordScene(bulk=BULK, group=4, bits=2)
    decision = {"criterion": "gaussian", "threshold": scene.threshold()}
    cut, reliable = scene.rough_for_some(scene.flags(**decision))
    monkeypatch.setattr(selection, "UNRELIABLE", cut)
    monkeypatch.setattr(selection, "NOISE_SHARE", 0.0)
    assert len(run(path, scene, token_threshold=1.0, **decision)) == reliable > 0


@EVERY
@pytest.mark.parametrize(("token_threshold", "expected"), [(1e-30, 1.0), (1e9, 0.0)])
def test_from_no_token_to_all(path: Path, token_threshold: float, expected: float) -> None:
    read = run(path, RecordScene(bulk=BULK, bits=2), token_threshold=token_threshold)
    assert float(torch.cat(list(read.values())).float().mean()) == expected


@EVERY
def test_padding(path: Path) -> None:
    run(path, RecordScene(bulk=BULK, padding=(0, 3), bits=2), token_threshold=1.0)


@pytest.mark.parametrize("path", [KERNEL])
@pytest.mark.parametrize(("dim", "copied", "step"), [(128, (), 32), (80, (), 4), (80, ("cpu",), 32)])
def test_where_records_lie(
    path: Path, dim: int, copied: tuple[str, ...], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a bus or behind it, and at multiples of how many bytes."""
    monkeypatch.setattr(triton_decode.sizing, "COPIED", copied)
    monkeypatch.setitem(coded.STRIDES, "cpu", step)
    sizes = {"dim": dim, "value_dim": dim, "dtype": torch.bfloat16, "bits": 1.5}
    scene = RecordScene(bulk=[(777, 9), (39, 0)], short=(2,), kv_heads=1, group=4, **sizes)
    run(path, scene, token_threshold=scene.token_threshold())


@EVERY
def test_rows_do_not_matter(path: Path) -> None:
    """A row alone gives what it gives in a batch, to the bit."""
    scene, (function, device) = RecordScene(bulk=BULK, bits=2), path
    given = scene.arguments(device) | scene.decision_arguments(device, criterion="dense")
    given |= scene.sketch_arguments(device, scene.token_threshold()) | scene.record_arguments(device)
    whole = function(*step_of(**given))
    for row in range(scene.batch):
        alone: dict[str, Any] = {}
        for name, value in given.items():
            if isinstance(value, Tensor) and value.dim() and len(value) > 1:
                value = value[row : row + 1]
            elif isinstance(value, Sketch):
                value = value.map(lambda tensor, row=row: tensor[row : row + 1])
            elif isinstance(value, Records):
                value = replace(value, tensor=value.tensor[row : row + 1], open=value.open[row : row + 1])
            alone[name] = value
        out, flags = function(*step_of(**alone))
        assert torch.equal(out[0], whole[0][row])
        assert torch.equal(flags[0], whole[1][row])


@EVERY
@pytest.mark.parametrize("splits", [(1000, 128), (1, 7)])
def test_splits_do_not_matter(path: Path, splits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for of in ("SPLIT_TOKENS", "ESTIMATE_TOKENS", "SELECTED_TOKENS"):
        monkeypatch.setattr(triton_decode.sizing, of, splits[0])
    for of in ("MAX_SPLITS", "SELECTED_SPLITS"):
        monkeypatch.setattr(triton_decode.sizing, of, splits[1])
    scene = RecordScene(bulk=BULK, bits=2, dtype=torch.float16)
    run(path, scene, token_threshold=scene.token_threshold())


@EVERY
def test_what_kernels_would_misread_is_refused(path: Path) -> None:
    scene, (function, device) = RecordScene(bulk=[(777, 9)], short=(), bits=2), path
    given = scene.arguments(device) | scene.decision_arguments(device, criterion="dense")
    given |= scene.sketch_arguments(device, 1.0) | scene.record_arguments(device)
    records = given["records"]
    for name, tensor in (("records", records.tensor.to("meta")), ("records", records.tensor[..., 1:])):
        with pytest.raises(OperandError, match=name):
            function(*step_of(**(given | {"records": replace(records, tensor=tensor)})))


@pytest.mark.parametrize("path", [GPU])
@pytest.mark.parametrize("selects", [True, False])
def test_records_in_pinned_memory(path: Path, selects: bool) -> None:
    """Read in place, captured on rows without a bulk, and replayed on all of it."""
    scene, (function, device) = RecordScene(bulk=BULK, bits=2, dim=128, dtype=torch.bfloat16), path
    given = scene.arguments(device) | scene.decision_arguments(device, criterion="dense")
    given |= scene.sketch_arguments(device, scene.token_threshold() if selects else 0.0)
    given |= scene.record_arguments(device, pin=True)
    call, lengths, pending = step_of(**given), given["bulk_lengths"].clone(), given["pending"].clone()
    expected = function(*call)  # compiles, too
    given["bulk_lengths"].zero_()
    given["pending"].zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with without_waiting(), torch.cuda.graph(graph):
        out, flags = function(*call)
    given["bulk_lengths"].copy_(lengths)
    given["pending"].copy_(pending)
    graph.replay()
    assert torch.equal(flags, expected[1])
    assert torch.equal(out, expected[0])
