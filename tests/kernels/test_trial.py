"""By default a GPU decodes with Triton's kernel where a trial finds nothing wrong: the trial, and what follows from it.

The kernel is Triton's under its interpreter, or a stand-in of the reference that is made wrong in one thing.
"""

import ctypes
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import decode_scene
import pytest
import torch
from decode_scene import ROWS, step_of
from harness import Inputs, find_kernel
from models import tiny
from pair import Pair
from scenarios import small_buffers
from torch import Tensor
from transformers.utils.logging import warning_once

from qada_cache import QAdACache
from qada_cache.kernels import choice, decode_reference, reference
from qada_cache.kernels.operands import Operands, Query, Rows
from qada_cache.sketch import MIN_TOKENS, Layout
from qada_cache.sketch.codec import Sketch

pytest.importorskip("triton", reason="triton is not installed: pip install triton", exc_type=ModuleNotFoundError)
from qada_cache.kernels import triton as decode
from qada_cache.kernels.triton.kernels import INTERPRETED
from qada_cache.versions import pass_cache

CPU = torch.device("cpu")
LAYOUT = Layout.from_bits(32, 2)
QUERY, BULK = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 8, 16)
SIZES: dict[str, Any] = {"group": 2, "dim": 32, "value_dim": 32, "layout": None, "pinned": False}
Changed = Callable[[dict[str, Any]], dict[str, Any]]
interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
no_gpu = INTERPRETED or not torch.cuda.is_available()
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(no_gpu, reason="needs a CUDA device and TRITON_INTERPRET=0")]


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of what other tests have found out nothing is known here, nor the reverse."""
    monkeypatch.delenv("QADA_KERNELS", raising=False)
    decode_reference.find_decode_fault.cache_clear()
    warning_once.cache_clear()
    yield
    decode_reference.find_decode_fault.cache_clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The reference instead of the kernel, on a CPU that "auto" takes for a GPU; what it was called with."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(choice, "AUTO_DEVICES", ("cpu",))
    monkeypatch.setattr(choice, "unsupported_reason", lambda *call: None)
    monkeypatch.setattr(choice.compiled_decode, "supports", lambda *call: False)
    plant(monkeypatch, lambda kwargs: kwargs, seen=seen)
    return seen


def plant(
    monkeypatch: pytest.MonkeyPatch,
    change: Changed,
    after: Callable[[Tensor, Tensor], Any] | None = None,
    seen: list[dict[str, Any]] | None = None,
) -> None:
    """Instead of the kernel the reference, of arguments that are changed first, or of results that are."""

    def kernel(*call: Any) -> Any:
        kwargs = flat(*call)
        if seen is not None:
            seen.append(kwargs)
        found = decode_reference.decode_step(*step_of(**put_back(change(dict(kwargs)))))
        return found if after is None else after(*found)

    monkeypatch.setattr(decode, "fused_decode", kernel)


def flat(query: Query, rows: Rows, layer: Operands) -> dict[str, Any]:
    """What `step_of` would make it of, without what it has none of."""
    kwargs = {"query": query.states} | {name: getattr(query, name) for name in decode_scene.QUERY}
    kwargs |= {name: getattr(rows, name) for name in ROWS} | vars(layer)
    return {name: part for name, part in kwargs.items() if part is not None and name != "binding"}


def put_back(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Heads that lie elsewhere where the reference looks for them."""
    resident_pointers, _ = kwargs.pop("resident_pointers", None), kwargs.pop("resident_hit_bytes", None)
    for part, name in enumerate(("bulk_keys", "bulk_values") if resident_pointers is not None else ()):
        kwargs[name] = kwargs[name].clone()
        for row, head in resident_pointers[:, :, part].nonzero().tolist():
            target = kwargs[name][row, head]
            ctypes.memmove(target.data_ptr(), int(resident_pointers[row, head, part]), target.nbytes)
    return kwargs


def changed(**changes: Callable[[Any], Any]) -> Changed:
    return lambda kwargs: kwargs | {name: change(kwargs[name]) for name, change in changes.items() if name in kwargs}


def resketched(**changes: Callable[[Tensor], Tensor]) -> Changed:
    def change(sketch: Sketch) -> Sketch:
        return replace(sketch, **{name: one(getattr(sketch, name)) for name, one in changes.items()})

    return changed(sketch=change)


def without_column(mask: Tensor) -> Tensor:
    mask = mask.clone()
    mask[0, 0, 0, mask[0, 0, 0].nonzero()[-1]] = False
    return mask


WRONG: dict[str, tuple[Changed, str]] = {
    "a token too few": (changed(bulk_lengths=lambda lengths: lengths - 1), "off by"),
    "a token too many": (changed(bulk_lengths=lambda lengths: lengths + 1), "off by nan"),
    "a local token too few": (changed(local=without_column), "off by"),
    "a pending token too few": (changed(pending=without_column), "off by"),
    "scaled otherwise": (changed(scaling=lambda scaling: 1.1 * scaling), "off by"),
    "padding decides": (changed(decided=torch.ones_like), "decisions"),
    "each head for itself": (changed(group_rule=lambda _: "head"), "decisions"),
    "all of a group": (changed(group_rule=lambda _: "any"), "decisions"),
    "all read": (changed(logit_threshold=lambda _: math.inf), "decisions"),
    "none reads": (changed(logit_threshold=lambda _: -math.inf), "decisions"),
    "another's mass": (changed(log_bulk=lambda masses: masses.flip(1)), "decisions"),
    "not where heads lie": (changed(resident_pointers=torch.zeros_like), "off by nan"),
    "keys for values": (lambda kwargs: kwargs | {"bulk_values": kwargs["bulk_keys"]}, "off by"),
    "bytes not counted": (
        lambda kwargs: kwargs | {"bulk_read_bytes": torch.zeros_like(kwargs["bulk_read_bytes"])},
        "counts",
    ),
}
WRONG_SKETCHES: dict[str, tuple[Changed, str]] = {
    "nothing for the rest": (resketched(mean_value=torch.zeros_like, slopes=torch.zeros_like), "off by"),
    "the mean for the rest": (resketched(slopes=torch.zeros_like), "off by"),
    "more tokens chosen": (changed(token_threshold=lambda share: share / 8), "off by"),
    "times the weights": (resketched(weights=torch.reciprocal), "off by"),
    "no centres": (resketched(centres=torch.zeros_like), "off by"),
    "one segment for another": (resketched(units=lambda units: units.flip(2)), "off by"),
    "an unreliable sketch": (resketched(noise=torch.zeros_like), "counts"),
    "all tokens read": (changed(sketch=lambda _: None), "off by"),
    "codes not counted": (
        lambda kwargs: kwargs | {"sketch_read_bytes": torch.zeros_like(kwargs["sketch_read_bytes"])},
        "counts",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wrong", [*WRONG, *WRONG_SKETCHES])
def test_what_is_wrong_is_noticed(wrong: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    change, words = (WRONG | WRONG_SKETCHES)[wrong]
    for layout in (LAYOUT,) if wrong in WRONG_SKETCHES else (None, LAYOUT):
        sizes = SIZES | {"layout": layout}
        plant(monkeypatch, lambda kwargs: kwargs)
        assert decode_reference.find_decode_fault(decode.fused_decode, CPU, dtype, **sizes) is None
        decode_reference.find_decode_fault.cache_clear()
        plant(monkeypatch, change)
        assert words in str(decode_reference.find_decode_fault(decode.fused_decode, CPU, dtype, **sizes))
        decode_reference.find_decode_fault.cache_clear()


@interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in Triton's interpreter
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.float16, {"group": 7, "value_dim": 24}),
        (torch.float32, {"group": 8, "layout": Layout.from_bits(32, 1)}),
        (torch.bfloat16, {"group": 3, "layout": Layout.from_bits(64, 1.5), "dim": 64}),
        (torch.float16, {"group": 4, "layout": Layout.from_bits(32, 4)}),
    ],
)
def test_nothing_is_wrong_with_the_kernels(
    dtype: torch.dtype, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By half of what is allowed."""
    monkeypatch.setattr(reference, "TOLERANCE", {dtype: within / 2 for dtype, within in reference.TOLERANCE.items()})
    assert decode_reference.find_decode_fault(decode.fused_decode, CPU, dtype, **SIZES | sizes) is None


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "group"), [(64, 4), (128, 7), (256, 1)])
@pytest.mark.parametrize("bits", [None, 1.5])
@pytest.mark.parametrize("pinned", [False, True])
def test_nothing_is_wrong_on_a_gpu(
    device: str, dtype: torch.dtype, dim: int, group: int, bits: float | None, pinned: bool
) -> None:
    sizes = {"group": group, "dim": dim, "value_dim": dim, "pinned": pinned}
    sizes["layout"] = None if bits is None else Layout.from_bits(dim, bits)
    assert decode_reference.find_decode_fault(decode.fused_decode, torch.device(device, 0), dtype, **sizes) is None


def test_other_defaults_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda kwargs: kwargs)
    sizes = SIZES | {"layout": LAYOUT}
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert not decode_reference.find_decode_fault(decode.fused_decode, CPU, torch.bfloat16, **sizes)
    finally:
        torch.set_default_dtype(torch.float32)


def test_tried_once_and_then_taken(calls: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    """Once for a device, dtype, head size, group and sketch; and not at all where it is asked for by name."""
    assert choice.decode_kernel(QUERY, BULK, BULK, "gaussian", "triton") is decode.fused_decode
    assert not calls
    for _ in range(3):
        assert choice.decode_kernel(QUERY, BULK, BULK, "gaussian", "auto") is decode.fused_decode
    assert len(calls) == 2  # one by each rule of groups
    # Kernels are compiled anew for what is None, so the first trial compiles those of a bulk without residents.
    of_residents = {"resident_pointers", "resident_hit_bytes"}
    assert [of_residents & call.keys() for call in calls] == [set(), of_residents]
    assert all(call["query"].shape == (3, 6, 1, 16) and "sketch" not in call for call in calls)
    others: list[tuple[Tensor, Tensor, Layout | None]] = [
        (QUERY, BULK, Layout.from_bits(16, 2)), (QUERY.bfloat16(), BULK.bfloat16(), None), (QUERY[:, :2], BULK, None),
        (QUERY[..., :8], BULK[..., :8], None),
    ]  # fmt: skip
    for number, (query, bulk, layout) in enumerate(others, start=2):
        assert choice.decode_kernel(query, bulk, bulk, "gaussian", "auto", layout=layout) is not None
        assert len(calls) == 2 * number
    assert not caplog.records


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda out, flags: (out * 1.5, flags), "it is off by"),
        (lambda out, flags: (out, ~flags), "its decisions or counts"),
        (lambda out, flags: (out[..., :8], flags), "not torch.float32 [3, 6, 1, 16]"),
        (lambda out, flags: 1 / 0, "it raised ZeroDivisionError: division by zero"),
    ],
)
def test_wrong_ones_are_not_taken(
    wrong: Any, words: str, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    plant(monkeypatch, lambda kwargs: kwargs, wrong, calls)
    for _ in range(3):
        assert find_kernel(QUERY, BULK, BULK, "gaussian") is None
    assert len(calls) == 1
    assert len(caplog.records) == 1
    said = caplog.records[0].getMessage()
    assert said.startswith("tokens are decoded on cpu by torch's operations, not by Triton's kernel: ")
    assert words in said


def test_out_of_memory_is_no_answer(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(out: Tensor, flags: Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    plant(monkeypatch, lambda kwargs: kwargs, full)
    with pytest.raises(torch.OutOfMemoryError):
        find_kernel(QUERY, BULK, BULK, "gaussian")
    plant(monkeypatch, lambda kwargs: kwargs)
    assert find_kernel(QUERY, BULK, BULK, "gaussian") is decode.fused_decode


def test_an_obstacle_is_said(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(choice, "AUTO_DEVICES", ("cpu",))
    monkeypatch.setattr(choice, "_installed", lambda: False)
    for _ in range(2):
        assert choice.decode_kernel(QUERY, BULK, BULK, "gaussian", "auto") is None
    assert [record.getMessage() for record in caplog.records] == [
        "tokens are decoded on cpu by torch's operations, not by Triton's kernel: "
        f"triton is not installed ({choice.INSTALL[sys.platform]})"
    ]


@pytest.mark.parametrize("right", [True, False])
def test_a_cache_by_default(
    right: bool, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every output against the reference: the trial comes in the middle of a call, and leaves it as it was."""
    if not right:
        plant(monkeypatch, lambda kwargs: kwargs, lambda out, flags: (out + 1, flags), calls)
    pair, inputs = Pair(), Inputs()
    with small_buffers():
        pair.update(*inputs(60))
        before = torch.get_rng_state()
        for _ in range(5):
            pair.update(*inputs(1))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(calls) == (2 + 5 if right else 1)
    assert len(caplog.records) == (0 if right else 1)


@torch.inference_mode()
def test_a_cache_that_chooses_tokens(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that choose are tried when there is a sketch to choose by, and not before."""
    model = tiny(max_position_embeddings=4096, num_hidden_layers=1, num_attention_heads=4, head_dim=16)
    cache = QAdACache(model, moments="current", token_threshold=1.0, threshold=0.9)
    ids = torch.randint(1, 90, (1, MIN_TOKENS + 300), generator=torch.Generator().manual_seed(0))
    tried = []
    for part in (ids[:, :500], ids[:, :1], ids[:, 500:], ids[:, :1], ids[:, :1]):
        model(part, **pass_cache(cache))
        tried.append(["sketch" in call for call in calls])
        calls.clear()
    assert tried == [[], [False] * 3, [], [True] * 3, [True]]
