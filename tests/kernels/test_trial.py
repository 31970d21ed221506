"""A GPU decodes with Triton's kernel by default, if a trial finds no fault: the trial, and its consequences.

The kernel is Triton's under its interpreter, or a stand-in of the reference that is made wrong in one thing.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import Inputs, find_kernel
from models import tiny
from pair import Pair
from planted import WRONG, WRONG_RECORDS, WRONG_SKETCHES, plant
from scenarios import small_buffers
from steps import gpu, interpreter
from torch import Tensor

from qada_cache import QAdACache
from qada_cache.kernels import choice, decode_trial, reference, turn
from qada_cache.kernels import triton as decode
from qada_cache.kernels.operands import Query, Rows
from qada_cache.kernels.triton.turn import fused_turn
from qada_cache.said_once import warn_once
from qada_cache.sketch import MIN_TOKENS, Layout
from qada_cache.sketch.coded import RecordLayout, Records
from qada_cache.versions import pass_cache

CPU = torch.device("cpu")
LAYOUT = Layout.from_bits(32, 2)
QUERY, BULK = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 8, 16)
SIZES: dict[str, Any] = {"group": 2, "dim": 32, "value_dim": 32, "layout": None, "records": None, "pinned": False}
CODED: dict[str, Any] = {"layout": LAYOUT, "records": RecordLayout.from_bits(32, 32, 8)}
CODED_LATENTS: dict[str, Any] = {"layout": LAYOUT, "records": RecordLayout(32, 0, 5, 6)}


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trials are made, and warnings given, as if no other test had run; later tests try anew, too."""
    monkeypatch.delenv("QADA_KERNELS", raising=False)
    decode_trial.find_decode_fault.cache_clear()
    warn_once.cache_clear()
    yield
    decode_trial.find_decode_fault.cache_clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The reference instead of the kernel, on a CPU that "auto" takes for a GPU; what it was called with."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(choice, "AUTO_DEVICES", ("cpu",))
    monkeypatch.setattr(choice, "explain_unsupported", lambda *call: None)
    monkeypatch.setattr(choice.compiled_decode, "supports", lambda *call: False)
    plant(monkeypatch, lambda kwargs: kwargs, seen=seen)
    return seen


@pytest.mark.parametrize(
    ("wrong", "dtype"),
    [
        *((wrong, torch.bfloat16) for wrong in (*WRONG, *WRONG_SKETCHES, *WRONG_RECORDS)),
        *((wrong, dtype) for wrong in list(WRONG)[:1] for dtype in (torch.float32, torch.float16)),
    ],
    ids=str,
)
def test_what_is_wrong_is_noticed(wrong: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dtypes differ by the error that is allowed alone, and bfloat16's is the largest."""
    change, words = (WRONG | WRONG_SKETCHES | WRONG_RECORDS)[wrong]
    latents = {"layout": LAYOUT, "value_dim": 24, "shared": True}
    bulks: list[dict[str, Any]] = [{"layout": None}, {"layout": LAYOUT}, CODED, latents]
    first = 2 if wrong in WRONG_RECORDS else 1 if wrong in WRONG_SKETCHES else 0
    for bulk in bulks[first : 3 if first == 2 or wrong == "keys for values" else 4]:
        sizes = SIZES | bulk
        plant(monkeypatch, lambda kwargs: kwargs)
        assert decode_trial.find_decode_fault(decode.fused_decode, CPU, dtype, **sizes) is None
        decode_trial.find_decode_fault.cache_clear()
        plant(monkeypatch, change)
        assert words in str(decode_trial.find_decode_fault(decode.fused_decode, CPU, dtype, **sizes))
        decode_trial.find_decode_fault.cache_clear()


@interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in Triton's interpreter
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.float16, {"group": 7, "value_dim": 24, "sinks": True}),
        (torch.float32, {"group": 8, "layout": Layout.from_bits(32, 1)}),
        (torch.bfloat16, {"group": 3, "layout": Layout.from_bits(64, 1.5), "dim": 64}),
        (torch.float16, {"group": 4, "layout": Layout.from_bits(32, 4)}),
        (torch.float32, {"group": 8, "sinks": True} | CODED),
        (torch.bfloat16, {"group": 3, "records": RecordLayout.from_bits(32, 32, 4), "layout": LAYOUT}),
        (torch.bfloat16, {"group": 9, "dim": 72, "value_dim": 64, "shared": True}),
        (torch.float32, {"group": 5, "value_dim": 24, "layout": LAYOUT, "shared": True}),
        (torch.bfloat16, {"group": 5, "value_dim": 24, "shared": True} | CODED_LATENTS),
    ],
)
def test_nothing_is_wrong_with_the_kernels(
    dtype: torch.dtype, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels pass their trial even with half of the allowed tolerance."""
    monkeypatch.setattr(reference, "TOLERANCE", {dtype: within / 2 for dtype, within in reference.TOLERANCE.items()})
    assert decode_trial.find_decode_fault(decode.fused_decode, CPU, dtype, **SIZES | sizes) is None


@interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # likewise
def test_turns_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a kernel that takes them for other rows' is found out."""
    assert decode_trial.find_decode_fault(fused_turn, CPU, torch.float32, **SIZES | CODED, queries=2) is None
    split = turn._split

    def mix(*given: Any) -> tuple[Query, Rows]:
        query, rows = split(*given)
        return replace(query, states=query.states[[0, 2, 4, 1, 3, 5]]), rows

    monkeypatch.setattr(turn, "_split", mix)
    decode_trial.find_decode_fault.cache_clear()
    found = decode_trial.find_decode_fault(fused_turn, CPU, torch.float32, **SIZES, queries=2)
    assert "is off by" in str(found)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "group"), [(64, 4), (128, 7), (256, 1)])
@pytest.mark.parametrize(("bits", "rung"), [(None, 16), (1.5, 16), (1.5, 8), (1.5, 4)])
@pytest.mark.parametrize("pinned", [False, True])
def test_nothing_is_wrong_on_a_gpu(
    device: str, dtype: torch.dtype, dim: int, group: int, bits: float | None, rung: int, pinned: bool
) -> None:
    sizes: dict[str, Any] = {"group": group, "dim": dim, "value_dim": dim, "pinned": pinned}
    sizes |= {"layout": Layout.from_bits(dim, bits), "records": RecordLayout.from_bits(dim, dim, rung)}
    assert decode_trial.find_decode_fault(decode.fused_decode, torch.device(device, 0), dtype, **sizes) is None


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "rung"), [(None, 16), (1.5, 16), (1.5, 8), (1.5, 4)])
@pytest.mark.parametrize("queries", [1, 2])
def test_nothing_is_wrong_with_latents_on_a_gpu(
    device: str, dtype: torch.dtype, bits: float | None, rung: int, queries: int
) -> None:
    sizes: dict[str, Any] = {"group": 16, "dim": 576, "value_dim": 512, "pinned": False, "shared": True}
    sizes |= {"layout": Layout.from_bits(576, bits), "queries": queries}
    sizes |= {"records": RecordLayout.from_bits(576, 0, rung)}
    kernel = decode.fused_decode if queries == 1 else fused_turn
    assert decode_trial.find_decode_fault(kernel, torch.device(device, 0), dtype, **sizes) is None


def test_other_defaults_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda kwargs: kwargs)
    sizes = SIZES | {"layout": LAYOUT}
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert not decode_trial.find_decode_fault(decode.fused_decode, CPU, torch.bfloat16, **sizes)
    finally:
        torch.set_default_dtype(torch.float32)


def test_tried_once_and_then_taken(calls: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    """Once for a device, dtype, head size, group and sketch; and not at all where it is asked for by name."""
    assert choice.choose_kernel(QUERY, BULK, BULK, "gaussian", "triton") is decode.fused_decode
    assert not calls
    for _ in range(3):
        assert choice.choose_kernel(QUERY, BULK, BULK, "gaussian", "auto") is decode.fused_decode
    assert len(calls) == 2  # one by each rule of groups
    assert all(call["query"].shape == (3, 6, 1, 16) and "sketch" not in call for call in calls)
    others: list[tuple[Tensor, Tensor, Layout | None]] = [
        (QUERY, BULK, Layout.from_bits(16, 2)), (QUERY.bfloat16(), BULK.bfloat16(), None), (QUERY[:, :2], BULK, None),
        (QUERY[..., :8], BULK[..., :8], None),
    ]  # fmt: skip
    for number, (query, bulk, layout) in enumerate(others, start=2):
        assert choice.choose_kernel(query, bulk, bulk, "gaussian", "auto", layout=layout) is not None
        assert len(calls) == 2 * number
    coded = RecordLayout.from_bits(16, 16, 8)
    assert coded is not None
    records = Records(*torch.zeros(2, 1, 2, 8, coded.size, dtype=torch.uint8), torch.ones(2, 16), coded)
    given: dict[str, Any] = {"layout": Layout.from_bits(16, 2), "records": records}
    for _ in range(2):
        assert choice.choose_kernel(QUERY, BULK, BULK, "gaussian", "auto", **given) is not None
    assert len(calls) == 2 * len(others) + 4
    assert calls[-1]["records"].layout == coded
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
    monkeypatch.setattr(choice, "_is_installed", lambda: False)
    for _ in range(2):
        assert choice.choose_kernel(QUERY, BULK, BULK, "gaussian", "auto") is None
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
