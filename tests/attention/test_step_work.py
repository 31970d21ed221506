"""A decode step does the same work on the host whatever the length of the context."""

from __future__ import annotations

import copy
import gc
import os
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from types import FrameType
from typing import Any

import devices as module_of_devices
import pytest
import torch
from compilers import needs_compiler
from devices import KIND, DeviceTensor, devices
from models import SMALL, prompt, tiny
from operations import Operations
from small_sketch import small_sketch
from stand_in import accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves
from transformers import PreTrainedModel

from qada_cache import QAdACache, kernels
from qada_cache.files import private_map
from qada_cache.kernels import cpu
from qada_cache.storage.padding import NONE
from qada_cache.versions import pass_cache


def calls(
    model: PreTrainedModel, cache: QAdACache, ids: torch.Tensor, mask: torch.Tensor | None = None
) -> Counter[str]:
    """How often each function was called, ours, transformers' and torch's, in decoding one token."""
    made: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            made[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1
        elif event == "c_call":
            made[argument.__qualname__] += 1

    gc.disable()  # what it finalises, it would call in the middle of a step
    sys.setprofile(count)
    try:
        model(ids, attention_mask=mask, **pass_cache(cache))
    finally:
        sys.setprofile(None)
        gc.enable()
    return made


@torch.inference_mode()
def test_nothing_is_estimated_of_a_bulk_that_is_not_there() -> None:
    """While sinks and window hold all tokens, by the moments of no keys."""
    model, ids = tiny(), prompt(9)[0]
    cache = QAdACache(model, moments="current")
    model(ids, **pass_cache(cache))
    made = calls(model, cache, ids[:, :1])
    assert made["estimate_log_bulk"] > made["gaussian_log_bulk"] == 0


@pytest.mark.parametrize(
    ("kernels", "threshold"),
    [
        ("torch", 0.0),
        ("torch", 1.0),
        pytest.param("auto", 0.0, marks=needs_compiler),
        pytest.param("auto", 0.5, marks=needs_compiler),  # the kernel itself sees to heads that differ
        pytest.param("auto", 1.0, marks=needs_compiler),
    ],
)
@torch.inference_mode()
def test_python_work_does_not_grow_with_the_context(
    kernels: str, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same calls at two lengths, both long enough to be split among threads, and into parts of the same kind."""
    monkeypatch.setenv("QADA_KERNELS", kernels)
    monkeypatch.setattr(cpu, "MIN_TOKENS", 1)
    model = tiny(max_position_embeddings=8192, num_hidden_layers=2)
    made = []
    for tokens in (2400, 2400 + 333 * 12):
        cache = QAdACache(model, threshold=threshold, moments="current")
        ids = prompt(tokens)[0]
        model(ids, **pass_cache(cache))
        for _ in range(3):
            before = calls(model, cache, ids[:, :1])
        made.append(before)
        assert cache.stats().decisions == 3
    assert made[0] == made[1]
    assert sum(made[0].values()) > 100


def launches(model: PreTrainedModel, tokens: int, **options: Any) -> Counter[str]:
    """How often each operation that computes something is called for a token decoded after a prompt of so many: on a
    GPU, what is launched."""
    cache = QAdACache(model, moments="current", **options)
    ids = prompt(tokens)[0]
    model(ids, **pass_cache(cache), logits_to_keep=1)
    model(ids[:, :1], **pass_cache(cache))
    with Operations() as seen:
        model(ids[:, :1], **pass_cache(cache))
    assert not cache.stats().kv_local_share.any()
    return Counter(str(each) for each in seen.called if not each.is_view)


@pytest.mark.parametrize(("offloaded", "operators"), [(True, True), (False, False)])
@pytest.mark.parametrize("options", [{"threshold": 1.0}, {"criterion": "oracle"}, {"token_threshold": 1.0}])
@torch.inference_mode()
def test_launches_do_not_grow_with_the_context(
    options: dict[str, Any], offloaded: bool, operators: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's path, which a GPU without Triton takes, launches as many operators after a longer context: with torch's
    fused operators, and without any."""
    monkeypatch.setenv("QADA_KERNELS", "torch")
    if not operators:
        monkeypatch.setattr(kernels, "OPERATORS", {})
    kernels._choose_operator.cache_clear()
    model = tiny(max_position_embeddings=2**15, num_hidden_layers=1)
    options = {"threshold": 0.999999} | options
    with accelerator() if offloaded else nullcontext():
        short, long = (launches(model, tokens, **options) for tokens in (4096, 16384))
    kernels._choose_operator.cache_clear()
    assert short == long
    assert ("aten._scaled_dot_product_flash_attention_for_cpu.default" in long) == (
        operators and "token_threshold" not in options
    )
    assert sum(long.values()) > 50


class Elements(TorchDispatchMode):
    """How many elements of masks, bool or whole numbers, the operations read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **kwargs or {})
        if not function.is_view:
            tensors = [value for value in tree_flatten(args)[0] if isinstance(value, torch.Tensor)]
            self.read += sum(tensor.numel() for tensor in tensors if not tensor.is_floating_point())
        return made


LEFT = slice(0, 9)
ROWS, SHORT, LONG, PADDED = 3, 300, 380, 100  # every row has tokens enough for a small sketch


def padded_step(layers: int, tokens: int, act: Any = None) -> tuple[int, Counter[str]]:
    """Elements of masks that are read, and calls, in decoding one token of a padded batch."""
    model = tiny(num_hidden_layers=layers)
    cache = QAdACache(model, threshold=0.0, moments="current", **SMALL)
    ids, mask = prompt(tokens, tokens - PADDED, tokens - 1)
    model(ids, attention_mask=mask, **pass_cache(cache))
    if act is not None:
        cache = act(cache, model)
    for _ in range(3):
        mask = torch.cat([mask, mask.new_ones(ROWS, 1)], dim=1)
        made = calls(model, cache, ids[:, :1], mask)
    mask = torch.cat([mask, mask.new_ones(ROWS, 1)], dim=1)
    with Elements() as elements:
        model(ids[:, :1], attention_mask=mask, **pass_cache(cache))
    return elements.read, made


def stored_and_loaded(cache: QAdACache, model: PreTrainedModel) -> QAdACache:
    with tempfile.TemporaryDirectory() as folder:
        cache.save(os.path.join(folder, "cache"))
        return QAdACache.load(os.path.join(folder, "cache"), model)


@torch.no_grad()
@pytest.mark.parametrize("verb", ["reorder_cache", "batch_select_indices"])
def test_indices_come_to_the_host_once_for_all_layers(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, transfers = tiny(num_hidden_layers=6), []
    cache, ids = QAdACache(model, moments="current"), prompt(40, 40)[0]
    model(ids, **pass_cache(cache))
    for name in ("cpu", "tolist"):
        transfer = getattr(DeviceTensor, name)
        told = lambda given, transfer=transfer: transfers.append(transfer) or transfer(given)  # noqa: E731
        monkeypatch.setattr(DeviceTensor, name, told)
    with devices():
        index = torch.tensor([1, 0], device=f"{KIND}:0")
        getattr(cache, verb)(index)
    assert len(transfers) == 1
    assert cache.layers[5].store.batch == 2


@torch.no_grad()
@pytest.mark.parametrize("bits", [16, 8])
def test_rows_are_told_to_the_device_once_for_all_layers(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index of Python's numbers would be, by each tensor of each layer."""
    told, run = [], module_of_devices._run

    def spy(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function._schema.name.startswith("aten::index") and isinstance(args[0], DeviceTensor):
            told.extend(each for each in tree_leaves(args[1:]) if isinstance(each, torch.Tensor))
        return run(function, args, kwargs)

    monkeypatch.setattr(module_of_devices, "_run", spy)
    with devices():
        model = tiny(num_hidden_layers=4)
        model.set_attn_implementation("eager")
        cache = QAdACache(model, moments="current", kernels="torch", offloading=False, bulk_bits=bits)
        model, ids = model.to(place := f"{KIND}:0"), prompt(400, 400, 400)[0].to(place)
        model(ids, **pass_cache(cache))
        told.clear()
        cache.reorder_cache(torch.tensor([1, 0, 1]))
    indices = [each for each in told if each.dtype == torch.int64 and each.dim() == 1]
    assert indices
    assert all(isinstance(each, DeviceTensor) for each in indices)
    assert len({each.here.untyped_storage().data_ptr() for each in indices}) == 1


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_masks_are_sent_once_for_all_layers(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between host and device, for a decoded token, a short turn and a long one, padded at the left and within."""
    sent, run, place = [], module_of_devices._run, f"{KIND}:0"

    def spy(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        found = run(function, args, kwargs)
        if function._schema.name == "aten::_to_copy" and isinstance(args[0], DeviceTensor) != isinstance(
            found, DeviceTensor
        ):
            sent.append(found)
        return found

    monkeypatch.setattr(module_of_devices, "_run", spy)

    def count(layers: int, *padding: slice) -> int:
        """Copies in a call of `tokens` tokens after a prompt of 60."""
        mask = torch.ones(2, 60 + tokens, dtype=torch.long)
        for part in padding:
            mask[1, part] = 0
        with devices():
            model = tiny(num_hidden_layers=layers)
            model.set_attn_implementation("eager")
            cache, ids = QAdACache(model, moments="current", kernels="torch", offloading=False, **SMALL), prompt(60, 60)
            model, ids = model.to(place), ids[0].to(place)
            model(ids, attention_mask=mask[:, :60].to(place), **pass_cache(cache))
            mask = mask.to(place)
            sent.clear()
            model(ids[:, :tokens], attention_mask=mask, **pass_cache(cache))
        return len(sent)

    within = slice(62, 62 + tokens // 3)  # of the call itself
    plain, left, holes = ([count(layers, *padding) for layers in (1, 5)] for padding in ((), (LEFT,), (LEFT, within)))
    assert left[0] - plain[0] == left[1] - plain[1] > 0
    assert holes[0] - plain[0] == holes[1] - plain[1] > 0


def reordered(cache: QAdACache, model: PreTrainedModel) -> QAdACache:
    cache.reorder_cache(torch.LongTensor([0, 2, 1]))
    cache.reorder_cache(torch.LongTensor([0, 2, 1]))
    return cache


@pytest.mark.parametrize("act", [None, reordered, stored_and_loaded, lambda cache, _: copy.deepcopy(cache)])
@torch.inference_mode()
def test_masks_are_read_once_for_all_layers(act: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a padded batch more tokens cost the same for one layer as for five, and as many calls as fewer tokens."""
    monkeypatch.setenv("QADA_KERNELS", "torch")
    monkeypatch.setattr(private_map, "WORTH", 0)  # a file that is mapped is looked at in every pass, once
    grown = []
    for layers in (1, 5):
        with small_sketch(64, 64):
            (short, few), (long, many) = (padded_step(layers, tokens, act) for tokens in (SHORT, LONG))
        assert few == many
        grown.append(long - short)
    assert grown[0] == grown[1] > 0


@pytest.mark.parametrize(
    "change", [lambda padding: padding.select_rows([1, 0]), lambda padding: padding.crop(PADDED // 2)]
)
def test_padding_changes_once_for_all_layers(change: Any) -> None:
    valid = torch.ones(ROWS, LONG, dtype=torch.bool)
    valid[1, :PADDED] = False
    padding, *_ = NONE.extend(valid, batch=ROWS, seen=LONG, queries=LONG)
    changed = change(padding)
    with Elements() as elements:
        assert change(padding) is changed
    assert not elements.read


def test_only_new_tokens_come_to_the_host() -> None:
    """The rest of a mask is read where it lies, once; and a mask of other padding is still noticed."""
    valid = torch.ones(ROWS, LONG, dtype=torch.bool)
    valid[1, :PADDED] = False
    padding, new, _ = NONE.extend(valid, batch=ROWS, seen=LONG, queries=LONG)
    assert torch.equal(new, valid)
    longer = torch.cat([valid, torch.ones(ROWS, 2, dtype=torch.bool)], dim=1)
    with Elements() as elements:
        assert padding.extend(longer, batch=ROWS, seen=LONG + 2, queries=2) == (padding, None, None)
    assert elements.read < ROWS * (LONG + 3 * PADDED) + 100
    for place in ((1, 3), (0, 300)):
        longer[place] = ~longer[place]
        with pytest.raises(ValueError, match="does not agree"):
            padding.extend(longer, batch=ROWS, seen=LONG + 2, queries=2)
        longer[place] = ~longer[place]
