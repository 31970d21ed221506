"""`generate()`: threshold 1 is DynamicCache, 0 is sinks and window, and batches do not matter. Its modes are those of
`test_generation_modes.py`."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import SMALL, assert_same, dynamic, exact, forced, generate, logits_of, prompt, rounding, tiny, tiny_like
from reference import local_indices
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from qada_cache import QAdACache


@pytest.fixture(params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny(attention=request.param)


SDPA = pytest.mark.parametrize("model", ["sdpa"], indirect=True)  # where it does not matter who attends to a prompt


@pytest.mark.parametrize("default_sizes", [True, False], ids=["16/128", "4/20"])
def test_turns_on_one_cache(model: PreTrainedModel, default_sizes: bool) -> None:
    ids = prompt(170)[0]
    caches = (dynamic(model), QAdACache(model, threshold=1.0) if default_sizes else exact(model))
    texts = [ids, ids]
    for length in (5, 1, 64, 150):  # short ones are query-adaptive, long ones exact; longer than 16 and than 112
        turn = prompt(length, seed=length)[0]
        outputs = [generate(model, text, cache, tokens=9) for text, cache in zip(texts, caches, strict=True)]
        assert_same(model, outputs[1], outputs[0])
        texts = [torch.cat([output.sequences, turn], dim=1) for output in outputs]


def test_padded_rows_equal_rows_alone(model: PreTrainedModel) -> None:
    ids, mask = prompt(150, 40, 19, 3)
    output = generate(model, ids, exact(model), attention_mask=mask)
    for row, length in enumerate(mask.sum(dim=-1).tolist()):
        alone = generate(model, ids[row : row + 1, -length:], exact(model))
        assert torch.equal(output.sequences[row, -24:], alone.sequences[0, -24:])


@SDPA
@pytest.mark.parametrize("lengths", [(9, 4), (70, 33), (70, 4)], ids=str)
def test_second_padded_turn(model: PreTrainedModel, lengths: tuple[int, ...]) -> None:
    """A turn padded on its left puts padding between the row's tokens."""
    ids, mask = prompt(150, 93)
    turn, turn_mask = prompt(*lengths, seed=2)
    outputs, alone = [], []
    for cache in (dynamic(model), exact(model)):
        first = generate(model, ids, cache, attention_mask=mask, tokens=10)
        text = torch.cat([first.sequences, turn], dim=1)
        seen = torch.cat([mask, torch.ones(2, 10, dtype=torch.long), turn_mask], dim=1)
        outputs.append(generate(model, text, cache, attention_mask=seen, tokens=20))
    assert_same(model, outputs[1], outputs[0])
    for row in range(2):
        real = text[row : row + 1][:, seen[row].bool()]
        alone.append(generate(model, real, exact(model), tokens=20).sequences[0, -20:])
    assert torch.equal(outputs[1].sequences[:, -20:], torch.stack(alone))


def test_copy_of_a_prefix(model: PreTrainedModel) -> None:
    ids = prompt(150)[0]
    prefix = exact(model)
    forced(model, ids, [150], prefix)
    for seed, length in ((3, 6), (4, 40)):
        text = torch.cat([ids, prompt(length, seed=seed)[0]], dim=1)
        wanted = generate(model, text, dynamic(model))
        assert_same(model, generate(model, text, copy.deepcopy(prefix)), wanted)
    assert prefix.get_seq_length() == 150


@SDPA
@pytest.mark.parametrize("removed", [0, 1, 15, 16, 17, 60, 140, 149, 170, 500])
def test_crop(model: PreTrainedModel, removed: int) -> None:
    ids, mask = prompt(150, 90)
    ids, mask = (
        torch.cat([first, last], 1) for first, last in ((ids, prompt(20, 20, seed=7)[0]), (mask, mask[:, -20:]))
    )
    wanted, got = dynamic(model), exact(model)
    for cache in (wanted, got):
        forced(model, ids, [150, 1], cache, mask)
        cache.crop(-removed)
    assert got.get_seq_length() == wanted.get_seq_length()
    kept = wanted.get_seq_length()
    text = torch.cat([ids[:, :kept], prompt(30, 30, seed=8)[0]], dim=1)
    seen = torch.cat([mask[:, :kept], torch.ones(2, 30, dtype=torch.long)], dim=1)
    outputs = [generate(model, text, cache, attention_mask=seen, tokens=8) for cache in (wanted, got)]
    assert_same(model, outputs[1], outputs[0])


@SDPA
@pytest.mark.parametrize(
    ("verb", "argument"),
    [
        ("batch_repeat_interleave", 2),
        ("batch_select_indices", torch.tensor([2, 0])),
        ("batch_select_indices", torch.tensor([False, True, False])),
        ("reorder_cache", torch.tensor([1, 1, 0])),
    ],
    ids=["repeat", "indices", "bools", "reorder"],
)
@pytest.mark.parametrize("lengths", [(150, 150, 150), (150, 93, 31)], ids=["equal", "padded"])
def test_rows_moved(model: PreTrainedModel, verb: str, argument: Any, lengths: tuple[int, ...]) -> None:
    ids, mask = prompt(*lengths)
    wanted, got = dynamic(model), exact(model)
    for cache in (wanted, got):
        forced(model, ids, [120, 1], cache, mask)
        getattr(cache, verb)(argument)
    rows = torch.arange(3).repeat_interleave(2) if verb == "batch_repeat_interleave" else torch.arange(3)[argument]
    text = torch.cat([ids[rows], prompt(*[7] * len(rows), seed=6)[0]], dim=1)
    seen = torch.cat([mask[rows], torch.ones(len(rows), 7, dtype=torch.long)], dim=1)
    outputs = [generate(model, text, cache, attention_mask=seen, tokens=8) for cache in (wanted, got)]
    assert_same(model, outputs[1], outputs[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("split", [[150, 1], [40, 30], [40, 9]], ids=str)
def test_low_precision(model: PreTrainedModel, dtype: torch.dtype, split: list[int]) -> None:
    """Against float32, no worse than twice DynamicCache; the same tokens wherever the gap is beyond that."""
    model = tiny(attention=model.config._attn_implementation, initializer_range=0.15)  # larger weights amplify errors
    ids = prompt(190)[0]
    wanted = forced(model, ids, [190], dynamic(model))
    low = copy.deepcopy(model).to(dtype)
    budget = 2 * (forced(low, ids, split, dynamic(low)) - wanted).abs().max()
    got = forced(low, ids, split, exact(low))
    assert got.dtype == dtype
    assert (got - wanted).abs().max() <= budget
    best = wanted.topk(2).values
    clear = best[..., 0] - best[..., 1] > 2 * budget
    assert clear.float().mean() > 0.2
    assert torch.equal(got.argmax(-1)[clear], wanted.argmax(-1)[clear])


def test_cache_outlives_inference_mode(model: PreTrainedModel) -> None:
    ids, cache = prompt(150)[0], exact(model)
    wanted = generate(model, ids, dynamic(model), tokens=60).sequences
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            ids = generate(model, ids.clone(), cache, tokens=20).sequences
    assert torch.equal(ids, wanted)


def adaptive_mask(tokens: int, split: list[int]) -> Tensor:
    """Bool `[1, 1, tokens, tokens]` for calls split as in `forced`: short ones, but the first, see sinks and window."""
    visible, start = torch.ones(tokens, tokens, dtype=torch.bool).tril(), split[0]
    for length in split[1:] + split[-1:] * tokens:
        for query in range(start, min(start + length, tokens)):
            if length <= SMALL["local_tokens"] - SMALL["sink_tokens"]:  # longer calls are exact
                visible[query] = False
                visible[query, sorted(local_indices(query, **SMALL))] = True
        start += length
    return visible[None, None]


@SDPA
@pytest.mark.parametrize("criterion", ["gaussian", "oracle", "local"])
@pytest.mark.parametrize("split", [[150, 1], [150, 7], [150, 16], [15, 16], [60, 9, 17, 40, 1]], ids=str)
def test_threshold_zero_is_sinks_and_window(model: PreTrainedModel, criterion: str, split: list[int]) -> None:
    ids = prompt(200)[0]
    with torch.no_grad():
        wanted = tiny_like(model, torch.float64)(ids, attention_mask=adaptive_mask(200, split), use_cache=False)
    cache = QAdACache(model, threshold=1.0 if criterion == "local" else 0.0, criterion=criterion, **SMALL)
    got = forced(model, ids, split, cache)
    budget = 4 * rounding(model, ids)
    assert (got - wanted.logits).abs().max() <= budget
    dense = forced(model, ids, split, dynamic(model))
    assert (got - dense).abs().max() > 100 * budget  # the long context matters to this model
    assert (cache.stats().sparsity, cache.stats().kv_sparsity) == (1.0, 1.0)
    assert (cache.stats().bulk_read_bytes > 0) == (criterion == "oracle")  # which reads everything to decide
    assert (cache.stats().streamed_bytes > 0) == (len(split) > 2)  # as the exact calls do


@SDPA
@pytest.mark.parametrize("criterion", ["gaussian", "oracle"])
def test_padded_batch_equals_its_rows_where_some_heads_are_local(model: PreTrainedModel, criterion: str) -> None:
    """Tokens, and which heads were local: the batch's tables are the sum of its rows' (invariant 3)."""
    ids, mask = prompt(150, 120, 70)
    sizes = {"sink_tokens": 4, "local_tokens": 90}  # for these heads a share of the masses that differs by head
    options = {"threshold": 0.4, "criterion": criterion, "moments": "current", **sizes}
    batch = QAdACache(model, **options)
    output = generate(model, ids, batch, attention_mask=mask, tokens=40)
    heads, kv_heads, decisions = 0, 0, 0
    for row, length in enumerate(mask.sum(dim=-1).tolist()):
        alone = QAdACache(model, **options)
        text = generate(model, ids[row : row + 1, -length:], alone, tokens=40).sequences
        assert torch.equal(output.sequences[row, -40:], text[0, -40:])
        stats = alone.stats()
        heads, kv_heads = heads + stats.local_share * stats.decisions, kv_heads + stats.kv_local_share * stats.decisions
        decisions += stats.decisions
    stats = batch.stats()
    assert stats.decisions == decisions
    assert 0.05 < stats.sparsity < 0.95
    torch.testing.assert_close(stats.local_share * decisions, heads)
    torch.testing.assert_close(stats.kv_local_share * decisions, kv_heads)


@pytest.mark.parametrize(
    ("chunk", "beams", "lengths"),
    [
        *((chunk, beams, (150, 93)) for chunk in (None, 65, 149) for beams in (1, 2)),
        *((50, 2, (150,)), (50, 1, (150, 93)), (70, 1, (150,)), (9, 2, (150,)), (9, 1, (150, 93))),
    ],
)
def test_every_chunk_of_a_prompt_is_exact(chunk: int | None, beams: int, lengths: tuple[int, ...]) -> None:
    """Also a last one within the window of 16: last chunks of 150, 50, 20, 10, 1 and 6 tokens."""
    model, (text, mask) = tiny(), prompt(*lengths)
    wanted = generate(model, text, DynamicCache(config=model.config), tokens=1, attention_mask=mask, num_beams=beams)
    cache = QAdACache(model, criterion="local", **SMALL)
    options = {"attention_mask": mask, "num_beams": beams, "prefill_chunk_size": chunk}
    got = generate(model, text, cache, tokens=1, **options)
    assert cache.stats().decisions == 0
    assert torch.allclose(logits_of(got), logits_of(wanted), atol=1e-4)


def test_chunks_end_with_the_prompt() -> None:
    """Tokens after it are decoded, and turns without `prefill_chunk_size` are read, as heads decide."""
    model, text = tiny(), prompt(150)[0]
    cache = QAdACache(model, criterion="local", **SMALL)
    first = generate(model, text, cache, tokens=5, prefill_chunk_size=70).sequences
    decoded = cache.stats().decisions
    assert decoded == 4
    generate(model, torch.cat([first, prompt(9, seed=2)[0]], dim=1), cache, tokens=1)
    assert cache.stats().decisions == decoded + 10


@pytest.mark.parametrize(("length", "counted"), [(10, ""), (19, ": query heads local 0.0%, KV heads local 0.0%")])
def test_statistics_of_short_texts(length: int, counted: str, model: PreTrainedModel) -> None:
    """Nothing is decided, or nothing is stored: no share of nothing is printed."""
    cache = exact(model)
    generate(model, prompt(length)[0], cache, tokens=3)
    assert str(cache.stats()).startswith(f"{length + 2} tokens, 2 adaptive steps{counted}; device ")


def test_printed_bytes_are_those_of_the_printed_share(model: PreTrainedModel) -> None:
    """The bulk's and the sketch's."""
    read = {"bulk_read_bytes": 1 << 20, "sketch_read_bytes": 3 << 20, "dense_bulk_bytes": 8 << 20}
    said = str(replace(exact(model).stats(), **read))
    assert ", 50.0% of the bulk's bytes read;" in said
    assert said.endswith(", read 4.0 MiB")
