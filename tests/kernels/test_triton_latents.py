"""Triton's kernel for latents: against float64, beside torch's products, and in a cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import LATENT, exact, forced, prompt, tiny
from small_sketch import small_sketch
from test_latent_kernel import NEAR, SCALING, by_torch, check_errors, check_records, in_float64, tensors
from torch import Tensor

from qada_cache import QAdACache
from qada_cache.kernels import choice, latent_choice
from qada_cache.kernels.cpu import latent as compiled
from qada_cache.kernels.operands import Query
from qada_cache.said_once import warn_once
from qada_cache.sketch import Layout
from qada_cache.sketch.codec import Sketch
from qada_cache.sketch.coded import RecordLayout, fit_records

pytest.importorskip("triton", reason="triton is not installed: pip install triton", exc_type=ModuleNotFoundError)
from steps import DEVICES, interpreter

from qada_cache.kernels.triton import BoundLaunches
from qada_cache.kernels.triton import latents as kernel

KINDS = list(zip(itertools.cycle(LATENT), (16, 8, 4)))  # to a kernel all models' latents are the same


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of few queries, and splits of few tokens, several of which are merged one after another."""
    for name, value in {"QUERIES": 16, "WIDE_QUERIES": 32, "SPLIT_TOKENS": 40, "PARTS": 2}.items():
        monkeypatch.setattr(kernel, name, value)
    kernel._bind.cache_clear()
    yield
    kernel._bind.cache_clear()


def attend(query: Tensor, latents: Tensor, rank: int, device: str) -> tuple[Tensor, Tensor]:
    """Rows are read where they are in a larger buffer."""
    assert latents._base is not None
    held = latents._base.to(device)[1:, :, : latents.shape[2]]
    found = kernel.attend_latents(query.to(device), held, rank, scaling=SCALING)
    return found[0].cpu(), found[1].cpu()


@DEVICES
@pytest.mark.parametrize(
    ("dtype", "dim", "rank"),
    [(torch.bfloat16, 576, 512), (torch.float32, 48, 32), (torch.float16, 40, 24), (torch.float16, 24, 16)],
    ids=str,
)
def test_as_near_to_float64_as_torch(dtype: torch.dtype, dim: int, rank: int, device: str) -> None:
    check_errors(lambda query, latents: attend(query, latents, rank, device), dtype, dim, rank)


@DEVICES
@pytest.mark.parametrize(
    ("dtype", "dim", "rank", "bits"),
    [(torch.bfloat16, 576, 512, 8), (torch.float32, 40, 16, 4), (torch.float16, 192, 120, 4)],
    ids=str,
)
def test_records_are_decoded(dtype: torch.dtype, dim: int, rank: int, bits: int, device: str) -> None:
    def attend(query: Tensor, records: Tensor, sketch: Sketch, weights: Tensor, *told: Any, **named: Any) -> Any:
        """Rows are read where they are in a larger buffer."""
        assert records._base is not None
        held = fit_records(records._base, told[0].find_stride(torch.device(device))).to(device)
        told = held[:, :, : records.shape[2]], sketch.map(lambda part: part.to(device)), weights.to(device), *told
        found = kernel.attend_recorded_latents(query.to(device), *told, **named)
        return found[0].cpu(), found[1].cpu()

    with small_sketch(40, 64):
        check_records(attend, dtype, dim, rank, bits, tokens=110)


@DEVICES
def test_scores_far_apart(device: str) -> None:
    """One token outweighs all others, in the first split or in the last."""
    query, latents = tensors(16, 300, 48, torch.float32, spread=100.0)
    wanted, wanted_lse = in_float64(query, latents, 32)
    found = attend(query, latents, 32, device)
    errors = [(each - wanted).abs().max() for each in (found[0], by_torch(query, latents, 32))]
    assert errors[0] <= NEAR[torch.float32][1] * errors[1]
    torch.testing.assert_close(found[1].double(), wanted_lse, atol=1e-4, rtol=2e-6)


@DEVICES
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
def test_what_is_not_finite_shows(device: str) -> None:
    query, latents = tensors(16, 300, 48, torch.float32)
    query[0, 0, 3, 5] = latents[1, 0, 150, 7] = torch.nan
    wrong = ~attend(query, latents, 32, device)[0].isfinite().all(-1)[:, 0]
    expected = torch.zeros_like(wrong)
    expected[0, 3] = expected[1] = True
    assert torch.equal(wrong, expected)


@DEVICES
def test_no_token(device: str) -> None:
    """The neutral element of merging, as `partial_attention` gives it."""
    query, latents = tensors(5, 0, 48, torch.float32)
    out, lse = attend(query, latents, 32, device)
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.fixture
def taken_for_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU without C++ kernels."""
    for module in (choice, latent_choice):
        monkeypatch.setattr(module, "AUTO_DEVICES", ("cpu",))
    monkeypatch.setattr(compiled, "serves_latents", lambda *call: False)
    trials = latent_choice._find_latent_fault, latent_choice._find_record_fault
    for trial in trials:
        trial.cache_clear()
    warn_once.cache_clear()
    yield
    for trial in trials:
        trial.cache_clear()


@interpreter
@pytest.mark.usefixtures("taken_for_gpu")
@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_a_cache_reads_by_it(kind: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows, turns and tokens are those of torch's operations, to rounding; bytes are the same."""
    model, (ids, mask), split = tiny(kind, num_hidden_layers=1), prompt(120, 111), [110, 3, 6, 1]
    calls: list[int] = []
    name = "attend_latents" if bits == 16 else "attend_recorded_latents"
    original = getattr(kernel, name)

    def counted(query: Tensor, *told: Any, **named: Any) -> tuple[Tensor, Tensor]:
        calls.append(query.shape[2])
        return original(query, *told, **named)

    monkeypatch.setattr(kernel, name, counted)
    found, read = [], []
    with small_sketch(40, 64):
        for kernels in ("torch", "auto"):
            cache = exact(model, kernels=kernels, bulk_bits=bits)
            found.append(forced(model, ids, split, cache, mask)[mask.bool()])
            read.append(cache.stats().streamed_bytes)
    torch.testing.assert_close(*found, atol=2e-5, rtol=0)
    assert read[0] == read[1] > 0
    assert len(set(calls)) > 2  # the trial's, and those of tokens and turns


@interpreter
@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_heads_decide_by_triton(kind: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows, tokens and a turn, as by torch. All are selected, as rounding may change which of fewer are."""
    model = tiny(kind, num_hidden_layers=1, initializer_range=0.2)
    (ids, mask), split = prompt(114, 105), [110, 1, 3]
    told = {"criterion": "gaussian", "moments": "current", "local_tokens": 20, "sink_tokens": 4, "bulk_bits": bits}
    found, counts, calls = [], [], set[int]()
    compute = BoundLaunches.compute

    def counted(launches: BoundLaunches, query: Query, *told: Any) -> tuple[Tensor, Tensor]:
        calls.add(len(query.states))
        return compute(launches, query, *told)

    monkeypatch.setattr(BoundLaunches, "compute", counted)
    with small_sketch(40, 64):
        for kernels in ("torch", "triton"):
            cache = QAdACache(model, **told, token_threshold=1e-30, kernels=kernels)
            found.append(forced(model, ids, split, cache, mask)[mask.bool()])
            stats = cache.stats()
            counts.append((stats.steps, stats.bulk_read_bytes, stats.sketch_read_bytes))
            assert stats.bulk_read_bytes > stats.sketch_read_bytes > 0
    torch.testing.assert_close(*found, atol=2e-5, rtol=0)
    assert counts[0] == counts[1]
    assert calls == {2, 2 * 3}  # rows: of tokens, and of the turn


@interpreter
@pytest.mark.usefixtures("taken_for_gpu")
@pytest.mark.parametrize("fault", ["values", "lse", "raises", "behind"])
def test_what_is_wrong_is_noticed(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch's operations serve, and a warning says so, once."""
    original = kernel.attend_latents

    def broken(query: Tensor, latents: Tensor, rank: int, *, scaling: float) -> tuple[Tensor, Tensor]:
        if fault == "raises":
            raise RuntimeError("no such instruction")
        if fault == "behind":
            latents = latents._base[:, :, : latents.shape[2] + 1]
        out, lse = original(query, latents, rank, scaling=scaling)
        return (1.1 * out if fault == "values" else out), (lse + 0.1 if fault == "lse" else lse)

    monkeypatch.setattr(kernel, "attend_latents", broken)
    query, latents = tensors(3, 90, 48, torch.float32)
    for _ in range(2):
        assert latent_choice.find_latent_attention(query, latents, 32, "auto") is None
    assert [record.message for record in caplog.records if "not by Triton's kernel" in record.message][1:] == []
    assert "latents are read on cpu by torch's operations" in caplog.text


@interpreter
@pytest.mark.usefixtures("taken_for_gpu")
def test_what_is_wrong_with_records_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes the second segment's tokens for the first one's is not chosen."""
    original = kernel.attend_recorded_latents
    told = *tensors(3, 90, 48, torch.float32), 32, "auto", Layout.from_bits(48, 1.5), RecordLayout.from_bits(48, 0, 8)
    assert latent_choice.find_recorded_attention(*told) is original
    latent_choice._find_record_fault.cache_clear()

    def broken(*given: Any, segments: int, **named: Any) -> tuple[Tensor, Tensor]:
        return original(*given, segments=segments - 1, **named)

    monkeypatch.setattr(kernel, "attend_recorded_latents", broken)
    assert latent_choice.find_recorded_attention(*told) is None


@interpreter
@pytest.mark.usefixtures("taken_for_gpu")
def test_what_it_does_not_serve() -> None:
    query, latents = tensors(3, 90, 48, torch.float32)
    assert latent_choice.find_latent_attention(query, latents, 32, "auto") is not None
    for other in (
        (query, latents, 32, "torch"),
        (query.double(), latents.double(), 32, "auto"),
        (query, latents.mT.contiguous().mT, 32, "auto"),
        (*tensors(3, 90, 648, torch.float32), 512, "auto"),
        (*tensors(3, 90, 576, torch.float32), 520, "auto"),
        (query.clone().requires_grad_(), latents, 32, "auto"),
    ):
        assert latent_choice.find_latent_attention(*other) is None
