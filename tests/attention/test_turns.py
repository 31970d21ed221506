"""Several tokens in one call, by the kernel for single ones: a short turn, or a draft."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compilers import needs_compiler
from models import prompt, tiny
from stand_in import accelerator
from torch import Tensor
from transformers import DynamicCache

from qada_cache import QAdACache
from qada_cache.attention.decode import takes_turns
from qada_cache.kernels import query_adaptive
from qada_cache.kernels.cpu import compiled_decode
from qada_cache.sketch import selection
from qada_cache.sketch.codec import Sketch
from qada_cache.state.layer import DRAFT_TOKENS, find_adaptive_tokens
from qada_cache.versions import pass_cache

HELD = 1700
OPTIONS = {"moments": "current", "threshold": 0.085, "group_rule": "head", "token_threshold": 1.5}
pytestmark = needs_compiler


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each call that the kernel computed."""
    found: list[int] = []
    original = compiled_decode.fused_turn
    monkeypatch.setattr(
        compiled_decode,
        "fused_turn",
        lambda query, *given: found.append(query.states.shape[2]) or original(query, *given),
    )
    return found


def read(model: Any, ids: Tensor, **options: Any) -> QAdACache:
    """A cache that holds `HELD` tokens, the last 10 of which were decoded."""
    cache = QAdACache(model, **OPTIONS, **options)
    for first, end in itertools.pairwise((0, HELD - 10, *range(HELD - 9, HELD + 1))):
        model(ids[:, first:end], **pass_cache(cache))
    return cache


def find_middle(cache: QAdACache, model: Any, ids: Tensor) -> float:
    """A limit that about half of the queries' estimates are above, by `selection.find_unreliable`, and none is at."""
    halves = []

    def note(query: Tensor, sketch: Sketch, *, scaling: float) -> Tensor:
        noise = torch.matmul(query.float().square(), sketch.noise[..., None])[..., 0]
        halves.append((0.5 * scaling**2 * noise).flatten())
        return torch.zeros_like(noise, dtype=torch.bool)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_adaptive, "find_unreliable", note)
        model(ids, **pass_cache(cache.fork(kernels="torch")))
    found = torch.cat(halves).sort().values
    found = found[len(found) // 4 : -len(found) // 4]
    widest = int(found.diff().argmax())
    return float(found[widest : widest + 2].mean())


@pytest.mark.parametrize("rough", [False, True], ids=["reliable", "rough"])
@pytest.mark.parametrize("tokens", [2, 7, 40])
@torch.inference_mode()
def test_turns_are_those_of_torch(tokens: int, rough: bool, turns: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, decisions and bytes, of which what several tokens read counts once; with sketches that some find too
    rough, too."""
    model, ids = tiny(head_dim=32), prompt(HELD + tokens)[0]
    cache = read(model, ids, bulk_bits=16)
    if rough:
        monkeypatch.setattr(selection, "NOISE_SHARE", 0.0)
        monkeypatch.setattr(selection, "UNRELIABLE", find_middle(cache, model, ids[:, HELD:]))
    logits, stats = [], []
    for kernels in ("auto", "torch"):
        twin = cache.fork(kernels=kernels)
        logits.append(model(ids[:, HELD:], **pass_cache(twin)).logits)
        stats.append(twin.stats())
    assert turns == [tokens] * model.config.num_hidden_layers
    torch.testing.assert_close(*logits, rtol=2e-4, atol=2e-4)
    for name in ("decisions", "bulk_read_bytes", "sketch_read_bytes", "dense_bulk_bytes"):
        assert getattr(stats[0], name) == getattr(stats[1], name) > 0, name
    assert torch.equal(stats[0].local_share, stats[1].local_share)
    assert 0 < stats[0].sparsity < 1


@pytest.mark.parametrize(("bits", "kernels"), [(16, "auto"), (8, "auto"), (16, "torch")])
@torch.inference_mode()
def test_turns_are_their_tokens_one_by_one(
    bits: int, kernels: str, turns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each decides and selects for itself, and reads all if its own estimates are unreliable."""
    model, ids = tiny(head_dim=32), prompt(HELD + 9)[0]
    cache = read(model, ids, kernels=kernels, bulk_bits=bits)
    monkeypatch.setattr(selection, "NOISE_SHARE", 0.0)
    monkeypatch.setattr(selection, "UNRELIABLE", find_middle(cache, model, ids[:, HELD:]))
    twins = cache.fork(), cache.fork()
    together = model(ids[:, HELD:], **pass_cache(twins[0])).logits
    read_by_one, apart = 0, []
    for at in range(HELD, HELD + 9):
        before = twins[1].stats().bulk_read_bytes
        apart.append(model(ids[:, at : at + 1], **pass_cache(twins[1])).logits)
        read_by_one = max(read_by_one, twins[1].stats().bulk_read_bytes - before)
    torch.testing.assert_close(together, torch.cat(apart, dim=1), rtol=2e-4 if bits == 16 else 1e-3, atol=1e-3)
    assert torch.equal(*(twin.stats().local_share for twin in twins))
    assert read_by_one <= twins[0].stats().bulk_read_bytes < twins[1].stats().bulk_read_bytes
    assert len(turns) == (model.config.num_hidden_layers if kernels == "auto" else 0)


@torch.inference_mode()
def test_padding_in_a_turn(turns: list[int]) -> None:
    """Its queries read nothing, and change nothing for others."""
    model, ids = tiny(head_dim=32), prompt(HELD + 6)[0]
    cache = read(model, ids)
    padded = torch.cat([ids[:, : HELD + 2], torch.zeros_like(ids[:, :3]), ids[:, HELD + 2 :]], dim=1)
    mask = torch.ones_like(padded)
    mask[:, HELD + 2 : HELD + 5] = 0
    places = (mask.cumsum(dim=1) - 1)[:, HELD:]
    twin, cache = cache.fork(), cache.fork()
    expected = model(ids[:, HELD:], **pass_cache(cache)).logits
    found = model(padded[:, HELD:], attention_mask=mask, position_ids=places, **pass_cache(twin)).logits
    assert sorted(turns) == [6, 6, 9, 9]
    torch.testing.assert_close(found[:, mask[0, HELD:].bool()], expected, rtol=2e-4, atol=2e-4)
    assert twin.stats().decisions == cache.stats().decisions


@torch.inference_mode()
def test_what_torch_computes(turns: list[int]) -> None:
    """Turns of several rows, and of caches whose heads are read whole, or that are observed."""
    model, ids = tiny(head_dim=32), prompt(HELD + 4)[0]
    cache = read(model, ids)
    for options in ({"token_threshold": 0.0}, {"kernels": "torch"}, {}):
        twin = cache.fork(**options)
        twin.observer = None if options else lambda seen: None
        model(ids[:, HELD:], **pass_cache(twin))
    cache.batch_repeat_interleave(2)
    model(ids[:, HELD:].repeat(2, 1), **pass_cache(cache))
    assert not turns


@pytest.mark.parametrize("rows", [1, 3])
def test_kernels_on_an_accelerator_take_rows(rows: int) -> None:
    layer: Any = SimpleNamespace(options=SimpleNamespace(kernels="auto"))
    store: Any = SimpleNamespace(sketch=object())
    assert takes_turns(layer, store, torch.empty(rows, 4, 112, 16, device="meta"))
    assert takes_turns(layer, store, torch.empty(rows, 4, 112, 16)) == (rows == 1)


@torch.inference_mode()
@pytest.mark.parametrize("options", [{}, {"token_threshold": 0.0}, {"criterion": "local"}, {"offloading": False}])
def test_a_turn_that_is_long_for_the_bus(options: dict[str, Any]) -> None:
    """It would bring the same tokens of an offloaded bulk again and again. So it is exact, decides nothing, and its
    tokens are cropped as any others."""
    model, ids = tiny(head_dim=32), prompt(HELD + 40)[0]
    full = DynamicCache(config=model.config)
    with accelerator():
        cache = QAdACache(model, **OPTIONS | options)
        for each in (cache, full):
            model(ids[:, :HELD], **pass_cache(each))
        window = cache.options.window
        assert find_adaptive_tokens(cache.layers, window) == (DRAFT_TOKENS if not options else window)
        assert find_adaptive_tokens([], window) == window  # a model without full-attention layers
        if options:
            return
        for first, crop in ((HELD, 1), (HELD + 16, 10), (HELD + 23, 2)):
            turn = slice(first, first + DRAFT_TOKENS + 1)
            expected = model(ids[:, turn], **pass_cache(full)).logits
            found = model(ids[:, turn], **pass_cache(cache)).logits
            torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
            for each in (cache, full):
                each.crop(-crop)
        assert not cache.stats().decisions
        model(ids[:, :DRAFT_TOKENS], **pass_cache(cache))
        assert cache.stats().decisions
