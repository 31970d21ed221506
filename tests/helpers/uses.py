"""Uses of a cache as users have them: functions of a model, its cache and a folder for files that return the last
logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from models import forced, generate, logits_of, prompt
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import QAdACache

Use = Callable[[PreTrainedModel, QAdACache, Path], Tensor]


def one_shot(model: PreTrainedModel, cache: QAdACache, folder: Path) -> Tensor:
    return logits_of(generate(model, prompt(90)[0], cache, tokens=30))


def chunked(model: PreTrainedModel, cache: QAdACache, folder: Path) -> Tensor:
    """A prompt in chunks longer than the window, which stream the bulk; then a second turn in chunks."""
    generate(model, prompt(90)[0], cache, tokens=30, prefill_chunk_size=25)
    return forced(model, prompt(70)[0].to(model.device), [25, 25, 1], cache)


def padded(model: PreTrainedModel, cache: QAdACache, folder: Path) -> Tensor:
    ids, mask = prompt(90, 41, 10)
    return logits_of(generate(model, ids, cache, tokens=30, attention_mask=mask.to(model.device)))


def beams(model: PreTrainedModel, cache: QAdACache, folder: Path) -> Tensor:
    return logits_of(generate(model, prompt(90)[0], cache, tokens=20, num_beams=3))


def cropped(model: PreTrainedModel, cache: QAdACache, folder: Path) -> Tensor:
    """Crops into pending tokens, then into the bulk, each followed by generating again."""
    text = generate(model, prompt(90)[0], cache, tokens=20).sequences
    cache.crop(-5)
    text = generate(model, text[:, :110], cache, tokens=5).sequences
    cache.crop(-40)
    return logits_of(generate(model, text[:, :80], cache, tokens=20))


def rows(model: PreTrainedModel, cache: QAdACache, folder: Path) -> Tensor:
    """Rows are repeated, reordered and dropped, each followed by generating."""
    generate(model, prompt(90)[0], cache, tokens=6)
    cache.batch_repeat_interleave(3)
    ids = prompt(105, 105, 105)[0]
    generate(model, ids, cache, tokens=6)
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    cache.batch_select_indices(torch.tensor([0, 2]))
    return logits_of(generate(model, prompt(120, 120)[0], cache, tokens=6))


def copied_and_saved(model: PreTrainedModel, cache: QAdACache, folder: Path) -> Tensor:
    """A copy, the original and a cache loaded from its file go on independently, with the same logits."""
    text = generate(model, prompt(90)[0], cache, tokens=20).sequences
    twin = copy.deepcopy(cache)
    cache.save(folder / "cache.safetensors")
    loaded = QAdACache.load(folder / "cache.safetensors", model)
    assert loaded.options.device_budget == cache.options.device_budget
    outputs = [logits_of(generate(model, text, each, tokens=20)) for each in (twin, cache, loaded)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    return outputs[0]


def used_again(model: PreTrainedModel, cache: QAdACache, folder: Path) -> Tensor:
    generate(model, prompt(60, 60)[0], cache, tokens=20)
    cache.reset()
    stats = cache.stats()
    assert (stats.device_layers, stats.bulk_read_bytes, stats.device_bytes) == (0, 0, 0)
    return one_shot(model, cache, folder)
