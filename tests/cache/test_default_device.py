"""torch's default device is the user's: a cache lies where its model does, whatever that is."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

import needle
import pytest
import torch
from models import SMALL, generate, logits_of, prompt, tiny
from scenarios import small_buffers
from small_sketch import small_sketch
from stand_in import accelerator
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import KeyMoments, QAdACache, StaticHeads, files, prepare
from qada_cache.key_moments import defaults
from qada_cache.profile import profile
from qada_cache.tuned_choice import Thresholds
from qada_cache.tuning.measuring import cut, measure

TOKENS = 6
HOST = torch.device("cpu")
Found = list[Any]  # tensors, and figures


class Given(NamedTuple):
    """The models, inputs and folder of a use, made before a default device is set."""

    model: PreTrainedModel
    needles: PreTrainedModel
    ids: Tensor
    mask: Tensor
    folder: Path


def both(use: Callable[[Given], Found], folder: Path) -> tuple[Found, Found]:
    """The results of a use with "meta" as the default device, whose tensors hold nothing, and with the CPU. Each run
    has models of its own, and no kept moments."""
    found = []
    for device in ("meta", "cpu"):
        shutil.rmtree(files.find_home() / defaults.FOLDER, ignore_errors=True)
        given = Given(tiny(), needle.load_model(), *prompt(90, 61), folder)
        with torch.device(device):
            found.append(use(given))
    return found[0], found[1]


def decoding(given: Given, **options: Any) -> Found:
    """The verbs of a cache, in small buffers that are flushed and grown often."""
    found: Found = []

    def read(cache: QAdACache, ids: Tensor, mask: Tensor) -> Tensor:
        output = generate(given.model, ids, cache, attention_mask=mask, tokens=TOKENS)
        stats = cache.stats()
        found.extend((logits_of(output), output.sequences, stats.local_share, stats.kv_local_share))
        found.extend((stats.bulk_read_bytes, stats.sketch_read_bytes, stats.device_layers))
        found.extend((stats.device_bytes, stats.host_bytes, *([] if stats.audit is None else astuple(stats.audit))))
        return output.sequences

    cache = QAdACache(given.model, **SMALL, **options)
    sequences = read(cache, given.ids, given.mask)
    cache.crop(1 - TOKENS)
    twin, fork = copy.deepcopy(cache), cache.fork(threshold=0.5)
    cache.save(given.folder / "cache.safetensors")
    loaded = QAdACache.load(given.folder / "cache.safetensors", given.model)
    ids, mask = (torch.cat([part, torch.ones_like(given.ids[:, :7])], dim=1) for part in (given.ids, given.mask))
    for each in (cache, twin, fork, loaded):
        sequences = read(each, ids, mask)
    cache.crop(-30)
    cache.reorder_cache(torch.tensor([1, 0], device=HOST))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([True, False, True, False], device=HOST))
    seen = cache.get_seq_length()
    read(cache, sequences[:, : seen + 3].flip(0), mask[:, : seen + 3].flip(0))
    cache.reset()
    read(cache, ids[:1, -40:], mask[:1, -40:])
    return found


def coded(given: Given) -> Found:
    return decoding(given, bulk_bits=8)


def whole_heads(given: Given) -> Found:
    return decoding(given, moments="current", token_threshold=0, update_moments=False, kernels="torch")


def offloaded(given: Given) -> Found:
    with accelerator():
        return decoding(given, offloading=True, device_budget=0.4, token_threshold=1e-3, audit_every=3)


def static_heads(given: Given) -> Found:
    oracle, path = QAdACache(given.model, criterion="oracle", **SMALL), given.folder / "heads.safetensors"
    generate(given.model, given.ids, oracle, attention_mask=given.mask, tokens=TOKENS)
    StaticHeads.from_oracle(oracle.stats().local_share, alpha=0.5).save(path)
    return [(heads := StaticHeads.load(path)).long_context, *decoding(given, criterion=heads)]


@pytest.mark.parametrize("use", [coded, whole_heads, offloaded, static_heads])
def test_a_cache_does_the_same(use: Callable, tmp_path: Path) -> None:
    with small_buffers(), small_sketch(6, 16):
        there, here = both(use, tmp_path)
    assert len(here) > 50
    torch.testing.assert_close(there, here, rtol=0, atol=0, equal_nan=True)


def collected(given: Given) -> Found:
    found: Found = []
    words, path = " ".join(random.Random(0).choices(needle.NOISE, k=300)), given.folder / "moments.safetensors"
    for kind, scheme in (("random-words", "auto"), ("random-tokens", "spread"), (given.ids[0], "prompt")):
        text = words if kind == "random-words" else None
        read, tokenizer = (given.needles, needle.load_tokenizer()) if text else (given.model, None)
        chosen = {"scheme": scheme, "tokens": 90, "text": text, "progress": False}
        moments = KeyMoments.collect(read, tokenizer, kind, **chosen)
        moments.save(path)
        found += [moments.mean, moments.covariance, moments.query_energies, *KeyMoments.load(path).at(1000)]
    return found


def commands(given: Given) -> Found:
    """The figures that `qada tune` and `qada profile` measure."""
    tokenizer, words = needle.load_tokenizer(), " ".join(random.Random(0).choices(needle.NOISE, k=2800))
    prepare(given.needles, tokenizer)
    pieces = cut(words, tokenizer, count=2, tokens=1300, following=3)
    found: Found = [*pieces[0], *pieces[1]]
    for figures in measure(given.needles, pieces[0], [Thresholds(1.0)]):
        found += [figures.kl, figures.top1, figures.bytes_read]
    for each in profile(given.needles, pieces[0].prompt, new_tokens=3, chunk=512):
        found += [each.read_share, *each.layers, *(held for _, *held in each.tokens)]
    return found


@pytest.mark.parametrize("use", [collected, commands])
def test_nor_does_anything_else_differ(use: Callable, tmp_path: Path) -> None:
    there, here = both(use, tmp_path)
    torch.testing.assert_close(there, here, rtol=0, atol=0)


def test_nor_do_tokens_that_lm_eval_scores(tmp_path: Path) -> None:
    scoring = pytest.importorskip("qada_cache.lm_eval.scoring", reason="needs lm-eval")
    there, here = both(lambda given: [*scoring.pad([[1, 2], [3]], HOST, side="left")], tmp_path)
    torch.testing.assert_close(there, here, rtol=0, atol=0)
