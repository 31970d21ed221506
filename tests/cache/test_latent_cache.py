"""Caches of latents: what they hold, their copies, files and stored prompts, and passes that go wrong."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from latents import assert_near, check_copies_files_crops_and_rows
from models import LATENT, SMALL, dynamic, exact, forced, generate, logits_of, prompt, tiny, tiny_like
from transformers import PreTrainedModel

from qada_cache import PrefixStore, QAdACache
from qada_cache.attention import latent
from qada_cache.attention.latent import LatentLayer
from qada_cache.versions import pass_cache


@pytest.fixture(params=LATENT)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny(request.param)


def test_a_token_is_stored_once(model: PreTrainedModel) -> None:
    cache, plain = exact(model), dynamic(model)
    for each in (cache, plain):
        forced(model, prompt(600)[0], [599, 1], each)
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        assert isinstance(layer, LatentLayer)
        held, none = layer.store.copy_tokens(slice(0, 1), 0, 600)
        assert torch.equal(held[:, :, :599], torch.cat([other.keys, other.values], dim=-1)[:, :, :599])
        assert none.shape == (1, 1, 600, 0)
        assert layer.store.bulk.token_bytes == held[0, 0, 0].nbytes
    used = sum(layer.store.bulk.nbytes for layer in cache.layers)
    assert used <= 1.5 * sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)  # with room to grow


def test_copies_files_crops_and_rows(model: PreTrainedModel, tmp_path: Path) -> None:
    for each in check_copies_files_crops_and_rows(model, tmp_path):
        assert all(layer.reads_weight for layer in each.layers)


def test_a_file_of_other_latents_is_refused(tmp_path: Path) -> None:
    model, other = tiny("deepseek_v3"), tiny("deepseek_v3", kv_lora_rank=12)
    cache = exact(model)
    forced(model, prompt(50)[0], [50], cache)
    cache.save(tmp_path / "cache")
    with pytest.raises(ValueError, match="its kv_lora_rank is 16, this model's is 12"):
        QAdACache.load(tmp_path / "cache", config=other.config)


def test_stored_prompts(tmp_path: Path) -> None:
    model, store = tiny("deepseek_v3", max_position_embeddings=2048), PrefixStore(tmp_path / "store")
    document = prompt(600)[0]
    first, second = (torch.cat([document, prompt(20, seed=seed)[0]], dim=1) for seed in (7, 8))
    cache = store.cache(model, first, **SMALL)
    out = generate(model, first, cache, tokens=4)
    store.keep(cache, out.sequences)
    cache = PrefixStore(store.folder).cache(model, second, **SMALL)
    assert cache.get_seq_length() == 600
    got, wanted = generate(model, second, cache), generate(model, second, dynamic(model))
    assert torch.equal(got.sequences, wanted.sequences)
    torch.testing.assert_close(logits_of(got), logits_of(wanted), rtol=0, atol=1e-3)


@pytest.mark.parametrize("bits", [16, 8])
def test_stored_prompts_of_which_heads_select(bits: int, tmp_path: Path) -> None:
    """A text goes on behind a stored prompt as behind one that was read."""
    model, store = tiny("deepseek_v3", max_position_embeddings=2048, initializer_range=0.2), PrefixStore(tmp_path)
    options = {"criterion": "gaussian", "moments": "current", "token_threshold": 2.0, "bulk_bits": bits, **SMALL}
    document, question = prompt(1300)[0], prompt(20, seed=8)[0]
    cache = store.cache(model, document, **options)
    forced(model, document, [1300], cache)
    store.keep(cache, document)
    ids, found = torch.cat([document, question], dim=1), []
    for each in (PrefixStore(store.folder).cache(model, ids, **options), cache):
        assert each.get_seq_length() == 1300
        found.append(generate(model, ids, each).sequences)
        assert 0 < each.stats().bulk_read_bytes < each.stats().dense_bulk_bytes
    assert torch.equal(*found)


def test_an_interrupted_pass_leaves_other_caches_alone(model: PreTrainedModel) -> None:
    """A pass that is interrupted between `update` and attention leaves other caches alone, though only the thread tells
    whose keys come next."""
    ids = prompt(60)[0]
    cache = exact(model)
    forced(model, ids, [50], cache)  # twice: 50 tokens, and 10
    wanted = [forced(model, ids, split, dynamic(model)) for split in ([60], [50, 10], [1])]
    module = model.model.layers[1].self_attn
    broken = module.kv_b_proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forced(model, ids[:, :10], [10], cache)
    broken.remove()
    for split, one in zip(([60], [50, 10], [1]), wanted, strict=True):
        assert torch.equal(forced(model, ids, split, dynamic(model)), one)
        assert torch.equal(forced(model, ids, split, None) if split == [60] else one, one)
    with pytest.raises(RuntimeError, match="did not come back to its attention function"):
        forced(model, ids[:, :1], [1], cache)
    cache.reset()
    assert_near(model, forced(model, ids, [50, 9, 1], cache), wanted[0])
    assert not latent._expanding


def test_nothing_is_held_of_a_cache_that_is_gone() -> None:
    cache = exact(tiny("deepseek_v3"))
    cache.update(torch.zeros(1, 1, 3, 16), torch.zeros(1, 1, 3, 8), 0)
    assert latent._expanding
    del cache
    gc.collect()
    assert not latent._expanding


def test_another_models_cache_is_refused() -> None:
    model = tiny("deepseek_v3")
    cache = exact(tiny_like(model, torch.float32))
    with pytest.raises(RuntimeError, match="this QAdACache was built for another model"):
        forced(model, prompt(40)[0], [40], cache)
    cache = exact(model)
    forced(model, prompt(40)[0], [40], cache)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="serves inference only"):
        model(prompt(3)[0], **pass_cache(cache))
