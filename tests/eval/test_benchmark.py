"""Which methods the benchmark times, where, and in what order."""

from types import SimpleNamespace

import pytest
import torch
from models import tiny
from transformers import DynamicCache

from eval.benchmark import CUDNN, OTHERS, allow_cudnn, decode, list_runs, select_methods
from eval.shared.counting import count_bus_bytes
from eval.shared.workloads import FEW_FRACTIONS, RESIDENT_TOKENS, TOKENS, Work, fill, list_methods
from qada_cache import QAdACache


def make_work(device: str) -> Work:
    model = SimpleNamespace(device=torch.device(device), config=tiny().config)
    part = torch.zeros(1, 2, 300, 8)
    return Work(model, [(part, part)] * 2, torch.zeros(1, 4, dtype=torch.long), 2, False, 0)


def test_bulks_lie_in_three_places_on_an_accelerator() -> None:
    found = list_methods(make_work("cuda"), 1.0).keys()
    kinds = ("QAdACache", "QAdACache resident", "QAdACache budget")
    assert {f"{kind} f={fraction:g}" for kind in kinds for fraction in FEW_FRACTIONS} <= found
    assert {f"{of}, {bits} bits" for of in ("QAdACache f=1", TOKENS) for bits in (8, 4)} <= found
    assert {TOKENS, RESIDENT_TOKENS, f"{RESIDENT_TOKENS}, 8 bits", CUDNN, "DynamicCache, offloading"} <= found
    assert found - list_methods(make_work("cpu"), 1.0).keys() >= {CUDNN, RESIDENT_TOKENS, "QAdACache budget f=1"}
    assert CUDNN not in list_methods(make_work("mps"), 1.0)


def test_methods_by_name() -> None:
    """An exact one alone, though others begin like it; baselines always."""
    made = list_methods(make_work("cuda"), 1.0)
    assert select_methods(made, None) is made
    assert list(select_methods(made, [TOKENS])) == [name for name in made if name in {*OTHERS, TOKENS}]
    begin = {name for name in made if name.startswith("QAdACache res")}
    assert len(begin) == 6
    assert select_methods(made, ["QAdACache res", "always bulk"]).keys() == {*OTHERS, *begin, "always bulk"}
    with pytest.raises(ValueError, match="--methods: none is 'QAda', of no context, DynamicCache"):
        select_methods(made, [TOKENS, "QAda"])


def test_what_is_compiled_is_not_timed() -> None:
    """But cuDNN's attention, which plans for each length as it meets it."""
    names = ["no context", CUDNN, TOKENS]
    runs = list_runs(names, 2, accelerated=True)
    assert runs[:3] == [("no context", False), (CUDNN, True), (TOKENS, False)]
    assert runs[3:] == [("no context", True), (TOKENS, True)] * 2
    assert list_runs(["no context", TOKENS], 1, accelerated=False) == [("no context", True), (TOKENS, True)]


@pytest.mark.parametrize("allowed", [True, False])
def test_cudnn_is_as_before(allowed: bool) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with allow_cudnn(allowed):
        assert torch.backends.cuda.cudnn_sdp_enabled() == allowed
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_bytes_over_the_bus() -> None:
    """What is read of a bulk on the host; nothing of one on the device."""
    model = tiny()
    part = torch.randn(1, 2, 300, 8)
    work = Work(model, [(part, part)] * 2, torch.ones(1, 1, dtype=torch.long), 0, False, 0)
    options = {"criterion": "dense", "token_threshold": 0.0, "moments": "current"}
    for offloading, expected in ((True, 2 * 2 * 2 * (300 - 16 - 111) * 8 * 4), (False, 0)):
        cache = fill(QAdACache(model, **options, offloading=offloading), work)
        decode(work, cache)
        assert count_bus_bytes(cache, 1) == pytest.approx(expected, rel=0.05), offloading
    assert count_bus_bytes(fill(DynamicCache(config=model.config), work), 1) == 0
