"""Latent attention whose heads decide and select tokens, where a criterion asks for it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from latents import assert_near, dynamic
from models import LATENT, forced, prompt, tiny
from small_sketch import small_sketch
from stand_in import accelerator
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import KeyMoments, QAdACache
from qada_cache.kernels import cpu
from qada_cache.key_moments.collecting import VALUE_WEIGHT, QueryEnergies
from qada_cache.key_moments.observing import observe_queries, read_keys
from qada_cache.models import attention_table
from qada_cache.models.sharding import UNSHARDED

SPLIT = [200, 1, 5, 1]  # tokens: a prompt, then single ones and a short turn
OPTIONS = {"criterion": "gaussian", "moments": "current", "local_tokens": 20, "sink_tokens": 4, "bulk_bits": 16}
BITS = pytest.mark.parametrize("bits", [16, 8, 4])


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Rows of few tokens have a sketch."""
    with small_sketch(40, 64):
        yield


@pytest.fixture(params=LATENT)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny model whose scores lie far apart."""
    return tiny(request.param, initializer_range=0.2)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("options", [{"token_threshold": 1e-30}, {"token_threshold": 0.0}, {"criterion": "oracle"}])
def test_who_selects_all_reads_what_others_read(model: PreTrainedModel, kernels: str, options: dict[str, Any]) -> None:
    """With thresholds so near 1 that no head is local."""
    ids, mask = prompt(sum(SPLIT) + 20, 131)
    wanted = forced(model, ids, SPLIT, dynamic(model), mask)
    cache = QAdACache(model, **{**OPTIONS, "threshold": 1 - 1e-9, "kernels": kernels, **options})
    got = forced(model, ids, SPLIT, cache, mask)
    real = mask.bool()
    assert_near(model, got[real], wanted[real])
    stats = cache.stats()
    assert stats.steps > 20
    assert stats.bulk_read_bytes == stats.dense_bulk_bytes > 0
    assert (stats.sketch_read_bytes > 0) == ("token_threshold" in options and options["token_threshold"] > 0)


@pytest.mark.parametrize(("bits", "off"), [(8, 0.05), (4, 0.1)])
def test_few_bits_of_all_tokens(model: PreTrainedModel, bits: int, off: float) -> None:
    """Who selects all reads the records that others read, which say nearly what the model made, of latents that no
    query looks at too."""
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.weight.data.view(4, 16, 16)[:, :8] = 0
    moments = KeyMoments.collect(model, prompt="random-tokens", tokens=200, progress=False)
    assert moments.query_energies is not None
    assert not moments.query_energies[:, 0, :16].any()
    assert (moments.query_energies[:, 1, :16] > 0).all()
    ids = prompt(sum(SPLIT))[0]
    wanted, found = forced(model, ids, SPLIT, dynamic(model)), []
    kinds: list[dict[str, Any]] = [{"token_threshold": 1e-30}, {"token_threshold": 0.0}, {"criterion": "oracle"}]
    for options in kinds:
        told = {**OPTIONS, "moments": ("current", moments), "threshold": 1 - 1e-9, "bulk_bits": bits, **options}
        cache = QAdACache(model, **told)
        found.append(forced(model, ids, SPLIT, cache))
        assert cache.stats().bulk_read_bytes < 0.7 * cache.stats().dense_bulk_bytes
    for got in found[1:]:
        assert_near(model, got, found[0])
    assert 0 < (found[0] - wanted).norm() < off * wanted.norm()


@BITS
def test_few_tokens_say_nearly_the_same(model: PreTrainedModel, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels and torch agree on outputs, wherever the bulk lies, and bytes of latents that are read count once."""
    if bits == 8:
        monkeypatch.setattr(cpu, "MIN_TOKENS", 64)  # for which the compiled kernel is built
    ids = prompt(390)[0]
    kinds: dict[str, dict[str, Any]] = {"auto": {}, "torch": {"kernels": "torch"}, "offloaded": {"kernels": "torch"}}
    kinds |= {"local": {"criterion": "local"}, "all": {"criterion": "dense"}}
    found, read = {}, {}
    for kind, options in kinds.items():
        with accelerator() if kind == "offloaded" else nullcontext():
            cache = QAdACache(model, **{**OPTIONS, "token_threshold": 2.0, "bulk_bits": bits, **options})
            found[kind] = forced(model, ids, [380, 1], cache)[:, 380:]
        read[kind] = (stats := cache.stats()).bulk_read_bytes
        if kind not in ("local", "all"):
            assert 0.02 < read[kind] / stats.dense_bulk_bytes < 0.7
    assert_near(model, found["offloaded"], found["torch"])
    assert read["offloaded"] == read["torch"]
    off, missed = ((found[kind] - found["all"]).norm() for kind in ("auto", "local"))
    assert off < 0.3 * missed
    # Sums in another order turn a code now and then, a slope of 16 bits, or whether a token at the cut is read.
    assert (found["auto"] - found["torch"]).norm() < 1e-3 * missed
    assert read["auto"] == pytest.approx(read["torch"], rel=1e-3)


@torch.no_grad()
def test_moments_are_of_latents(model: PreTrainedModel) -> None:
    """Keys that turn at their end, and queries that meet them: scores are those of the model's own queries and keys."""
    moments = KeyMoments.collect(model, prompt="random-tokens", tokens=200, progress=False)
    assert moments.shape == (2, 1, 24)
    layouts = {"deepseek_v2": "interleaved at the end", "deepseek_v3": "half at the end"}
    assert {rotation.layout for rotation in moments.rotations} == {layouts[model.config.model_type]}
    ids = prompt(30)[0]
    absorbed, scores = dict[int, Tensor](), dict[int, Tensor]()

    def note(base: Any, module: Any, query: Tensor, key: Tensor, *given: Any, **kwargs: Any) -> Any:
        scores[module.layer_idx] = query @ key.mT
        return base(module, query, key, *given, **kwargs)

    attention_table.place(note)
    try:
        with observe_queries(model, absorbed.__setitem__):
            held = read_keys(model, ids, None, chunk=30, done=lambda tokens: None)
    finally:
        attention_table.displace(note)
    for layer, wanted in scores.items():
        torch.testing.assert_close(absorbed[layer] @ held[layer].mT, wanted)
    assert moments.query_energies is not None
    assert (moments.query_energies > 0).all()
    energies = QueryEnergies({})
    with observe_queries(model, energies, energies.values):
        held = read_keys(model, ids, None, chunk=30, done=lambda tokens: None)
    gathered = energies.gather(held, 2, {}, UNSHARDED)
    assert gathered is not None
    for index, layer in enumerate(model.model.layers):  # what a channel counts as a value, too
        norms = layer.self_attn.kv_b_proj.weight.view(4, 16, 16)[:, 8:].square().sum(dim=(0, 1))
        share = norms / (norms @ held[index][0, 0, :, :16].var(dim=0, correction=0))
        wanted = absorbed[index].square().mean(dim=(0, 1, 2))
        torch.testing.assert_close(gathered[index, 0], wanted)
        wanted[:16] += VALUE_WEIGHT * share / layer.self_attn.scaling**2
        torch.testing.assert_close(gathered[index, 1], wanted)
    cache = QAdACache(model, **{**OPTIONS, "moments": ("current", moments), "token_threshold": 2.0})
    forced(model, prompt(230)[0], SPLIT, cache)
    assert torch.equal(cache.layers[1].store.sketch.energies.cpu(), moments.query_energies[1, :1])


@BITS
def test_copies_files_and_crops(model: PreTrainedModel, bits: int, tmp_path: Path) -> None:
    """All go on as one; a fork that reads everything does, and one of it selects again."""
    ids, moments = prompt(260)[0], "current"
    if bits == 8:  # behind energies of queries, and of errors
        moments = ("current", KeyMoments.collect(model, prompt="random-tokens", tokens=60, progress=False))
    cache = QAdACache(model, **OPTIONS | {"bulk_bits": bits, "moments": moments}, token_threshold=2.0)
    forced(model, ids[:, :230], SPLIT, cache)
    cache.save(tmp_path / "cache")
    dense = cache.fork(criterion="dense")
    others = [copy.deepcopy(cache), dense.fork(criterion="gaussian", moments=moments)]
    others += [QAdACache.load(tmp_path / "cache", model), cache, dense]
    found = []
    for each in others:
        each.crop(-60)
        found.append(forced(model, ids[:, 170:], [59, 1], each))
    for each, got in zip(others[1:-1], found[1:-1], strict=True):
        assert torch.equal(got, found[0])
        assert (each.layers[1].store.sketch.error_energies is not None) == (bits == 8)
    if bits == 16:
        assert_near(model, found[-1], forced(model, ids, [260], dynamic(model))[:, 170:])
    assert not torch.equal(found[-1], found[0])


def test_a_fork_that_selects_among_what_was_read_whole(model: PreTrainedModel) -> None:
    """It takes the covariance of values and keys from the records, nearly as who selected from the first."""
    ids, options = prompt(330)[0], {**OPTIONS, "bulk_bits": 8, "token_threshold": 2.0, "threshold": 1 - 1e-9}
    dense, cache = QAdACache(model, **options | {"criterion": "dense"}), QAdACache(model, **options)
    for each in (dense, cache):
        forced(model, ids[:, :320], [320], each)
    fork = dense.fork(criterion="gaussian", token_threshold=2.0, threshold=1 - 1e-9)
    twins = [each.fork(update_moments=False) for each in (fork, cache)]  # with covariances of their own
    found = [forced(model, ids[:, 320:], [1], each) for each in (fork, cache, *twins, dense)]
    for one, other in ((0, 1), (0, 2), (1, 3)):
        assert (found[one] - found[other]).norm() < 0.03 * found[4].norm()
    assert 0 < fork.stats().bulk_read_bytes < 0.7 * fork.stats().dense_bulk_bytes


def test_what_is_not_served_says_so() -> None:
    model = tiny("deepseek_v3")
    said = "selects tokens of latent attention, .* prefill_threshold=1.0 .* leave out prefill_threshold, or give"
    with pytest.raises(NotImplementedError, match=said):
        QAdACache(model, **OPTIONS, prefill_threshold=1.0)
