"""When layers of a cache bind kernels to their tensors, and what is stored before."""

import copy
from typing import Any

import pytest
import torch
from compilers import needs_compiler
from decode_scene import step_of
from models import prompt, tiny
from test_binding import PARTS, arguments
from torch import Tensor

from qada_cache import KeyMoments, QAdACache
from qada_cache.kernels import cpu
from qada_cache.kernels.cpu import compiled_decode
from qada_cache.kernels.operands import OperandError
from qada_cache.storage import TokenStore
from qada_cache.versions import pass_cache


def lay_out(part: Tensor, gap: int = 0) -> Tensor:
    """The same numbers as a model's projection lays them out: heads side by side, `gap` numbers between them."""
    made = torch.full((len(part), 1, part.shape[1], part.shape[3] + gap), torch.nan)
    made[..., : part.shape[3]] = part.transpose(1, 2)
    return made[..., : part.shape[3]].transpose(1, 2)


@needs_compiler
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("sizes", [{}, {"dim": 64, "value_dim": 24}], ids=str)
def test_a_token_that_is_not_stored_is_stored_first(sizes: dict[str, int], gap: int) -> None:
    """In the newest column alone, and only where it is given."""
    held, made = arguments(**sizes), arguments(**sizes)
    wanted = compiled_decode.fused_decode(*step_of(**held))
    call = step_of(**made)
    near = call[2].near_keys, call[2].near_values
    call[0].unstored = tuple(lay_out(part[:, :, -1:].clone(), gap) for part in near)
    for part in near:
        part[:, :, -1] = torch.nan
    found = compiled_decode.fused_decode(*call)
    assert all(map(torch.equal, found, wanted))
    for part, name in zip(near, PARTS, strict=False):
        assert torch.equal(part.nan_to_num(9.0), held[name].nan_to_num(9.0))
    call[0].unstored, bound = None, call[2].bound
    near[0][:, :, -1] = near[1][:, :, -1] = 0.0
    compiled_decode.fused_decode(*call)
    assert not near[0][:, :, -1].any()
    assert call[2].bound is bound


@needs_compiler
@pytest.mark.parametrize("wrong", ["new_keys", "new_values"])
@pytest.mark.parametrize(
    "change",
    [lambda new: new.double(), lambda new: new[:-1], lambda new: new[:, :1], lambda new: new[..., :-1],
     lambda new: new.repeat(1, 1, 2, 1), lambda new: new.to("meta")],
)  # fmt: skip
def test_a_token_to_be_stored_is_looked_at(change: Any, wrong: str) -> None:
    call = step_of(**arguments())
    new = [part[:, :, -1:].clone() for part in (call[2].near_keys, call[2].near_values)]
    place = ("new_keys", "new_values").index(wrong)
    new[place] = change(new[place])
    call[0].unstored = tuple(new)
    with pytest.raises(OperandError, match=f"{wrong} is .* not torch.float32"):
        compiled_decode.fused_decode(*call)


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 3])
def test_kernel_and_torch_store_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of the first layer, on which attention has no influence, over more than one flush."""
    monkeypatch.setattr(cpu, "MIN_TOKENS", 1)
    model, ids, write = tiny(num_hidden_layers=1), prompt(400)[0].repeat(rows, 1), TokenStore.write
    written, held = [], []
    monkeypatch.setattr(TokenStore, "write", lambda *_: written.append(1) or write(*_))
    ids[1:, 1:] = ids[1:, 1:].flip(1)
    for kernels in ("auto", "torch"):
        cache = QAdACache(model, moments="current", kernels=kernels)
        for place in (200, *range(201, 400)):
            model(ids[:, cache.get_seq_length() : place], **pass_cache(cache))
        held.append(cache.layers[0].store)
        assert len(written) == {"auto": 0, "torch": 199}[kernels]
    parts = [(store.near_keys, store.near_values, *store.copy_tokens(slice(0, rows), 0, 399)) for store in held]
    assert all(map(torch.equal, *parts))


@needs_compiler
@torch.inference_mode()
def test_layers_bind_when_storage_changes_and_not_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MIN_TOKENS", 1)
    made, original = [], compiled_decode.BoundStep

    def counted(*call: Any) -> Any:
        made.append(call)
        return original(*call)

    monkeypatch.setattr(compiled_decode, "BoundStep", counted)
    model = tiny(max_position_embeddings=8192, num_hidden_layers=3)
    cache, ids = QAdACache(model, moments="current"), prompt(1500)[0]
    model(ids, **pass_cache(cache))
    for _ in range(20):
        model(ids[:, :1], **pass_cache(cache))
    assert len(made) == 3
    twin = copy.deepcopy(cache)
    for used in (twin, cache, twin):
        model(ids[:, :1], **pass_cache(used))
    assert len(made) == 6
    cache.crop(-3)
    model(ids[:, :1], **pass_cache(cache))
    assert len(made) == 6
    cache.batch_repeat_interleave(2)
    model(ids[:, :1].expand(2, 1), **pass_cache(cache))
    assert len(made) == 9


@needs_compiler
@torch.inference_mode()
def test_caches_that_take_turns_make_no_moments_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of different lengths, by another prompt's moments, which depend on the length."""
    monkeypatch.setattr(cpu, "MIN_TOKENS", 1)
    model, made, original = tiny(max_position_embeddings=8192, num_hidden_layers=2), [], KeyMoments._find_layer_at
    ids = prompt(900)[0]
    caches = [QAdACache(model, moments="random-tokens") for _ in range(4)]
    for tokens, cache in zip((300, 500, 700, 900), caches, strict=True):
        model(ids[:, :tokens], **pass_cache(cache))
        model(ids[:, :1], **pass_cache(cache))

    def counted(moments: KeyMoments, layer: int, length: int) -> tuple[Tensor, Tensor]:
        made.append(length)
        return original(moments, layer, length)

    monkeypatch.setattr(KeyMoments, "_find_layer_at", counted)
    for cache in caches * 3:
        model(ids[:, :1], **pass_cache(cache))
    assert not made


@needs_compiler
@torch.inference_mode()
def test_rows_of_several_lengths_are_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their moments are not put together in every step, so that what was bound holds."""
    monkeypatch.setattr(cpu, "MIN_TOKENS", 1)
    model, bound, original = tiny(num_hidden_layers=1), [], compiled_decode.BoundStep
    monkeypatch.setattr(compiled_decode, "BoundStep", lambda *call: bound.append(call) or original(*call))
    ids, mask = prompt(400)[0].expand(2, -1), torch.ones(2, 400, dtype=torch.int64)
    mask[0, :150] = 0
    cache = QAdACache(model, moments="random-tokens", token_threshold=0.0)
    for step in (390, *range(391, 401)):
        model(ids[:, cache.get_seq_length() : step], attention_mask=mask[:, :step], **pass_cache(cache))
    assert len(bound) == 1


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize("moments", ["random-tokens", "current+random-tokens"])
def test_rows_alike_share_another_prompts_moments(moments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is decided about as it is alone."""
    monkeypatch.setattr(cpu, "MIN_TOKENS", 1)
    model, ids = tiny(num_hidden_layers=2), prompt(300, 300)[0]
    ids[1] = ids[1].flip(0)

    def decode(rows: Tensor) -> tuple[Tensor, Any]:
        cache = QAdACache(model, moments=moments, token_threshold=0.0, threshold=0.5)
        model(rows[:, :290], **pass_cache(cache))
        logits = torch.cat([model(rows[:, i : i + 1], **pass_cache(cache)).logits for i in range(290, 300)], dim=1)
        return logits, cache.stats()

    together, stats = decode(ids)
    alone = [decode(ids[row : row + 1]) for row in range(2)]
    torch.testing.assert_close(together, torch.cat([logits for logits, _ in alone]), rtol=1e-4, atol=1e-4)
    assert 0 < stats.bulk_read_bytes == sum(each.bulk_read_bytes for _, each in alone)
