"""When the fused kernel computes a decode step, and that a whole cache does the same with it."""

import functools
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import Inputs, find_kernel
from models import tiny
from pair import Pair, Tally
from quick_cases import mark_rest_slow
from scenarios import play, small_buffers
from steps import DEVICES
from torch._subclasses import FakeTensorMode

from qada_cache import QAdACache, StaticHeads
from qada_cache.kernels import choice, decode_trial
from qada_cache.kernels import triton as triton_decode
from qada_cache.kernels.operands import Operands, Query, Rows
from qada_cache.kernels.triton import kernels as triton_kernels
from qada_cache.kernels.triton.turn import fused_turn
from qada_cache.said_once import warn_once
from qada_cache.sketch.coded import RecordLayout, Records

QUERY, BULK = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 8, 16)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Asks for the kernel; one entry for each step it computed."""
    seen, original = [], triton_decode.fused_decode

    def spy(query: Query, rows: Rows, layer: Operands) -> Any:
        seen.append(query.states.device)
        return original(query, rows, layer)

    monkeypatch.setenv("QADA_KERNELS", "triton")
    monkeypatch.setattr(triton_decode, "fused_decode", spy)
    return seen


POLICIES: dict[str, dict[str, Any]] = {
    "frozen": {"update_moments": False},
    "dense": {"criterion": "dense"},
    "static-kv-heads": {"criterion": StaticHeads(torch.tensor([[False, True]]))},
    "group-any": {"group_rule": "any"},
    "bfloat16": {"dtype": torch.bfloat16, "value_dim": 24},
}
# The default suite has each policy and scenario that differ for a kernel; sources of moments do not differ for it.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "turns-static-kv-heads": ("turns", POLICIES["static-kv-heads"]),
    "crops_with_padding-group-any": ("crops_with_padding", POLICIES["group-any"]),
    "holes-bfloat16": ("holes", POLICIES["bfloat16"]),
    "dense": ("turns", POLICIES["dense"]),
    **{name: ("turns", options) for name, options in POLICIES.items() if name not in ("static-kv-heads", "dense")},
    **{f"{scenario}-gaussian": (scenario, {}) for scenario in ("crops_with_padding", "holes", "rows")},
}


@DEVICES
@pytest.mark.parametrize(("scenario", "options"), mark_rest_slow(list(CASES.values()), 4), ids=list(CASES))
def test_cache_with_the_kernel_equals_reference(
    scenario: str, options: dict[str, Any], device: str, launches: list[torch.device]
) -> None:
    """On a GPU the bulk is offloaded, and read in place."""
    with small_buffers():
        pair = play(scenario, device=device, offloading=True, **options)
    assert len(launches) > 3
    assert pair.tally.local + pair.tally.long_context > 20
    assert isinstance(pair.layer.counters.bulk_read_bytes, torch.Tensor)


@DEVICES
def test_same_counters_as_the_torch_path(device: str, launches: list[torch.device]) -> None:
    """Also when both paths take turns on one cache, inside and outside inference mode."""
    counted: list[tuple[int, Tally]] = []
    for kernels in (["torch"] * 4, ["triton"] * 4, ["torch", "triton", "triton", "torch"]):
        pair, inputs = Pair(), Inputs(device=device)
        pair.update(*inputs(60))
        for turn, name in enumerate(kernels):
            pair.layer.shared.options = replace(pair.layer.options, kernels=name)
            pair.layer.drop_plans()  # which no cache needs: its options stay
            with torch.inference_mode(turn % 2 == 1):
                pair.update(*inputs(1))
                pair.update(*inputs(3))
        counted.append((int(pair.layer.counters.bulk_read_bytes), pair.tally))
    assert len(launches) == 4 + 2
    assert counted[0] == counted[1] == counted[2]
    assert counted[0][0] > 0


def test_automatic_choice_on_a_cpu_is_not_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QADA_KERNELS", raising=False)
    monkeypatch.setattr(triton_kernels, "INTERPRETED", True)
    assert find_kernel(QUERY, BULK, BULK, "gaussian") is None


@pytest.mark.parametrize(
    ("query", "value_dim", "bulk", "criterion", "interpreted", "message"),
    [
        (
            QUERY,
            16,
            BULK,
            "gaussian",
            False,
            "needs CUDA tensors, or CPU tensors with TRITON_INTERPRET=1, not cpu ones",
        ),
        (QUERY.double(), 16, BULK, "gaussian", True, "no torch.float64"),
        (QUERY, 288, BULK, "gaussian", True, "head dimensions up to 256, not 288"),
        (QUERY, 16, BULK, "oracle", True, "'oracle' needs every score"),
        (QUERY, 16, BULK.to("meta"), "dense", True, "host memory that is not pinned"),
    ],
)
def test_asked_for_and_impossible(
    query: torch.Tensor,
    value_dim: int,
    bulk: torch.Tensor,
    criterion: str,
    interpreted: bool,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QADA_KERNELS", "triton")
    monkeypatch.setattr(triton_kernels, "INTERPRETED", interpreted)
    with pytest.raises(NotImplementedError, match=message):
        find_kernel(query, bulk, bulk.new_zeros(*bulk.shape[:3], value_dim), criterion)


@pytest.mark.parametrize(
    ("dim", "rank", "message"),
    [
        (648, 512, "latents of up to 512 channels, and 640 in all, not 512, 648"),
        (576, 520, "latents of up to 512 channels, and 640 in all, not 520, 576"),
        (576, 512, None),
    ],
)
def test_sizes_of_latents(dim: int, rank: int, message: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads may have more channels where these are values too; and more than a kernel takes are as several rows."""
    monkeypatch.setattr(triton_kernels, "INTERPRETED", True)
    query, latents = torch.zeros(2, 32, 1, dim), torch.zeros(2, 1, 9, dim)
    call = query, latents, latents[..., :rank], "gaussian", "triton"
    if message is None:
        assert choice.choose_kernel(*call) is fused_turn
        assert choice.choose_kernel(query[:, :16], *call[1:]) is triton_decode.fused_decode
        records = Records(latents, latents, latents, RecordLayout(dim, 0, 5, 6))
        assert choice.choose_kernel(*call, records=records) is fused_turn
        return
    with pytest.raises(NotImplementedError, match=message):
        choice.choose_kernel(*call)


@pytest.mark.parametrize(
    ("platform", "way_out"),
    [
        ("linux", "pip install 'qada-cache[triton]'"),
        ("win32", "pip install triton-windows"),  # the extra is for Linux alone
        ("darwin", "there is none for darwin"),
    ],
)
def test_not_installed(platform: str, way_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QADA_KERNELS", "triton")
    monkeypatch.setattr(choice, "_is_installed", lambda: False)
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(NotImplementedError, match=re.escape(f"triton is not installed ({way_out})")):
        find_kernel(QUERY, BULK, BULK, "gaussian")


def test_installed_and_damaged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Torch computes, and a warning says why; whoever asks for Triton gets the reason."""
    monkeypatch.setitem(sys.modules, triton_decode.__name__, None)  # importing it raises ImportError
    monkeypatch.setattr(choice, "_find_import_fault", functools.cache(choice._find_import_fault.__wrapped__))
    monkeypatch.setattr(choice, "AUTO_DEVICES", ("cpu",))
    monkeypatch.setattr(choice.compiled_decode, "supports", lambda *_: False)
    warn_once.cache_clear()
    assert choice.choose_kernel(QUERY, BULK, BULK, "gaussian", "auto") is None
    assert "not by Triton's kernel: triton cannot be imported: " in caplog.text
    with pytest.raises(NotImplementedError, match="triton cannot be imported"):
        choice.choose_kernel(QUERY, BULK, BULK, "gaussian", "triton")


@pytest.mark.parametrize("kernels", ["auto", "triton"])
@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (12, 0)])
def test_older_gpus_are_not_asked_to_compile_it(
    capability: tuple[int, int], kernels: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_kernels, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(decode_trial, "find_decode_fault", lambda *args, **kwargs: None)
    warn_once.cache_clear()
    with FakeTensorMode():
        query, bulk = (torch.empty(tensor.shape, device="cuda") for tensor in (QUERY, BULK))
        call = query, bulk, bulk, "gaussian", kernels
        wrong = f"needs a GPU of compute capability 8.0 or above, not {capability[0]}.{capability[1]}"
        if capability >= (8, 0):
            assert choice.choose_kernel(*call) is triton_decode.fused_decode
        elif kernels == "triton":
            with pytest.raises(NotImplementedError, match=wrong):
                choice.choose_kernel(*call)
        else:
            assert choice.choose_kernel(*call) is None
            assert wrong in caplog.text


def test_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QADA_KERNELS", "cuda")
    with pytest.raises(ValueError, match="QADA_KERNELS must be auto, torch or triton, got 'cuda'"):
        find_kernel(QUERY, BULK, BULK, "gaussian")


def test_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument goes before the environment, which is read when a cache is built and then no more."""
    monkeypatch.setenv("QADA_KERNELS", "torch")
    model = tiny()
    caches = [QAdACache(model, moments="current", **given) for given in ({}, {"kernels": "auto"})]
    monkeypatch.setenv("QADA_KERNELS", "triton")
    assert [cache.options.kernels for cache in caches] == ["torch", "auto"]
    assert caches[0].fork(kernels="auto").options.kernels == "auto"
    for build in (lambda: QAdACache(model, kernels="cuda"), lambda: caches[0].fork(kernels="cuda")):
        with pytest.raises(ValueError, match="kernels must be auto, torch or triton, got 'cuda'"):
            build()
