"""Long-context heads that read selected tokens, in a whole layer: what is kept, chosen, read and counted."""

import copy
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from harness import LOCAL, WINDOW, Driver, Inputs, make_shared
from models import forced, tiny
from pair import Pair
from scenarios import MIXED, SCENARIOS, play, small_buffers
from sketch_reference import BITS, estimates, half_variance, log_shares, unread
from small_sketch import small_sketch
from stand_in import accelerator
from torch import Tensor
from transformers import DynamicCache

from qada_cache import QAdACache, StaticHeads
from qada_cache.kernels import query_adaptive
from qada_cache.sketch import selection
from qada_cache.state.layer import QAdALayer
from qada_cache.storage import reading
from qada_cache.versions import pass_cache

SCALING = 0.25
EVERY = StaticHeads(torch.ones(1, 4, dtype=torch.bool))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bulks of a few tokens have a sketch; few estimates are held at once."""
    monkeypatch.setattr(query_adaptive, "BLOCK_SCORES", 200)
    monkeypatch.setattr(selection, "NOISE_SHARE", 0.0)  # the other limit alone decides who reads all
    with small_buffers(), small_sketch():
        yield


@pytest.mark.parametrize(
    ("scenario", "options", "offloading"),
    [
        *((scenario, {"criterion": EVERY}, False) for scenario in SCENARIOS),
        *((scenario, {"group_rule": "any"}, False) for scenario in MIXED),
        *((scenario, {"criterion": EVERY}, True) for scenario in MIXED),
    ],
)
def test_reading_all_tokens_equals_reference(scenario: str, options: dict[str, Any], offloading: bool) -> None:
    """`Pair` also compares the sketch with one made anew of the reference's keys, after every call."""
    with small_sketch(6, 16), accelerator() if offloading else nullcontext():  # of several segments
        pair = play(scenario, token_threshold=1e-30, offloading=offloading, **options)
    assert pair.layer.store.sketch is not None
    assert int(pair.layer.counters.sketch_read_bytes) > 0


def filled(tokens: int = 90, batch: int = 2, **options: Any) -> tuple[Driver, Inputs]:
    """A layer that holds so many tokens, one of them already decoded."""
    options = {"criterion": EVERY, "token_threshold": 1.0, "threshold": 0.5} | options
    driver, inputs = Driver(QAdALayer(make_shared(**options), 0)), Inputs(3)
    driver(*inputs(tokens, batch), None, scaling=SCALING)
    driver(*inputs(1, batch), None, scaling=SCALING)
    return driver, inputs


def ask(driver: Driver, call: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return driver(*call, None, scaling=SCALING)[0]


@pytest.mark.parametrize("energies", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_equals_float64(bits: float, energies: bool) -> None:
    """One decoded token: exact over what is near and what is selected, and an estimate of the rest."""
    made = torch.rand(1, 2, 16, generator=torch.Generator().manual_seed(1)) if energies else None
    driver, inputs = filled(sketch_bits=bits, query_energies=made)
    call = inputs(1)
    out = ask(driver, call)[:, :, 0].double()
    store = driver.layer.store
    length, near = store.bulk.lengths[0], slice(0, store.sinks + store.end)
    read = 0
    for row, kv in itertools.product(range(2), range(2)):
        query = call[2][row, 2 * kv : 2 * kv + 2, 0].double()
        coded: dict[str, Any] = {"query": query, "sketch": store.sketch.tensors[row, kv], "scaling": SCALING}
        found = estimates(**coded, length=length)
        scores = SCALING * query @ store.near_keys[row, kv, near].double().mT
        shares = log_shares(estimates=found, log_buffer=scores.logsumexp(dim=1), bulk_tokens=store.lengths[row] - LOCAL)
        wanted = (shares >= 0).any(dim=0)
        rest, stead = unread(**coded, estimates=found, read=wanted)
        keys, values = (buffer[row, kv, :length][wanted].double() for buffer in (store.bulk.keys, store.bulk.values))
        values = torch.cat([store.near_values[row, kv, near].double(), values])
        for head in range(2):
            every = torch.cat([scores[head], SCALING * keys @ query[head], rest[head, None]])
            expected = every.softmax(dim=0) @ torch.cat([values, stead[head, None]])
            torch.testing.assert_close(out[row, 2 * kv + head], expected, rtol=1e-5, atol=1e-5)
        read += int(wanted.sum())
    assert 0 < read < 4 * length


def test_each_query_chooses_for_itself() -> None:
    """A short turn at once and token by token, as long as no pending token is flushed in between."""
    driver, inputs = filled()
    turn = inputs(5)
    one_by_one = copy.deepcopy(driver.layer)
    together = ask(driver, turn)
    alone = Driver(one_by_one, module=driver.module)
    parts = [ask(alone, tuple(t[:, :, i : i + 1] for t in turn)) for i in range(5)]
    assert one_by_one.store.flushed == driver.layer.store.flushed
    torch.testing.assert_close(torch.cat(parts, dim=2), together, rtol=1e-5, atol=1e-5)


def test_what_several_queries_read_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether all of them choose at once, or one after the other as their estimates would take too much memory."""
    driver, inputs = filled()
    turn, twin = inputs(WINDOW), Driver(copy.deepcopy(driver.layer), module=driver.module)
    apart = ask(driver, turn)
    monkeypatch.setattr(query_adaptive, "BLOCK_SCORES", 1 << 22)
    torch.testing.assert_close(ask(twin, turn), apart, rtol=1e-5, atol=1e-5)
    counted = [int(each.layer.counters.bulk_read_bytes) for each in (driver, twin)]
    assert counted[0] == counted[1] > 0


@pytest.mark.parametrize("budget", [0, 1.0])
def test_offloaded_equals_on_device(budget: int | float) -> None:
    """The same tokens are read, from the host or within a budget."""
    results = []
    for offloading in (False, True):
        with accelerator() if offloading else nullcontext():
            driver, inputs = filled(offloading=offloading, device_budget=budget if offloading else 0)
            outputs = [ask(driver, inputs(tokens)) for tokens in (1, 5, 1, 30, 1, WINDOW, 1, 1)]
            counters, bulk = driver.layer.counters, driver.layer.store.bulk
            results.append((outputs, counters.sketch_read_bytes, counters.bulk_read_bytes))
    (expected, *counted), (outputs, *found) = results
    torch.testing.assert_close(outputs, expected, rtol=1e-6, atol=1e-6)
    assert found == counted
    assert min(found) > 0
    assert bulk.offloaded == (not budget)


def test_what_is_not_chosen_is_not_read() -> None:
    """A bulk whose tokens are nan but for the chosen ones."""
    driver, inputs = filled(token_threshold=3.0)
    call, spied = inputs(1), []
    original = reading.gather_parts
    twin = Driver(copy.deepcopy(driver.layer), module=driver.module)

    def spy(bulk: Any, wanted: Any) -> Any:
        spied.extend(wanted)
        return original(bulk, wanted)

    with mock.patch.object(reading, "gather_parts", spy):
        expected = ask(twin, call)
    store = driver.layer.store
    for head, tokens in spied:
        unread = torch.ones(store.bulk.capacity, dtype=torch.bool)
        unread[tokens] = False
        for buffer in (store.bulk.keys, store.bulk.values):
            buffer[head][unread] = torch.nan
    assert spied
    assert torch.equal(ask(driver, call), expected)
    bytes_read = 2 * 16 * 4 * sum(len(tokens) for _, tokens in spied)
    assert driver.layer.counters.bulk_read_bytes - (twin.layer.counters.bulk_read_bytes - bytes_read) == bytes_read


@pytest.mark.parametrize("offloading", [False, True])
def test_what_is_too_rough_is_read_whole(offloading: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV head reads its whole bulk for a query that finds its sketch too rough; for other queries it selects."""
    for tokens in (1, 5):
        outputs, sketch_read_bytes = [], []
        with accelerator() if offloading else nullcontext():
            for limit, token_threshold in ((torch.inf, 0.5), (None, 0.5), (0.0, 0.5), (torch.inf, 1e-30)):
                driver, inputs = filled(batch=1, token_threshold=token_threshold, offloading=offloading)
                call, held = inputs(tokens, 1), driver.layer.store.sketch
                if limit is None:
                    kwargs: dict[str, Any] = {"length": held.lengths[0], "scaling": SCALING}
                    by_head = call[2][0].unflatten(0, (2, 2))  # [kv_heads, group, queries, dim]
                    halves = torch.stack(
                        [half_variance(query=by_head[kv], sketch=held.tensors[0, kv], **kwargs) for kv in (0, 1)]
                    ).amax(dim=1)  # [kv_heads, queries]
                    limit = float(halves.flatten().sort().values[:2].mean())  # all but one are above it
                    rough = halves > limit
                monkeypatch.setattr(selection, "UNRELIABLE", limit)
                before = int(driver.layer.counters.sketch_read_bytes)
                outputs.append(ask(driver, call).unflatten(1, (2, 2))[0])  # [kv_heads, group, queries, dim]
                sketch_read_bytes.append(int(driver.layer.counters.sketch_read_bytes) - before)
        selected, mixed, whole, all_asked = outputs
        torch.testing.assert_close(whole, all_asked, rtol=1e-5, atol=1e-5)
        assert rough.sum() == rough.numel() - 1
        for head, query in itertools.product(range(2), range(tokens)):
            expected = (whole if rough[head, query] else selected)[head, :, query]
            torch.testing.assert_close(mixed[head, :, query], expected, rtol=1e-6, atol=1e-6)
        assert (whole - selected).abs().amax(dim=(1, 3)).min() > 1e-3
        assert sketch_read_bytes[0] == sketch_read_bytes[3] == 2 * sketch_read_bytes[1] > sketch_read_bytes[2] == 0


def test_stats_and_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: sketch bytes of every flagged head, the bytes of what was chosen, and what it missed."""
    monkeypatch.setattr(selection, "UNRELIABLE", torch.inf)
    model = tiny("llama")
    ids = torch.randint(0, model.config.vocab_size, (2, 150), generator=torch.Generator().manual_seed(0))
    heads = StaticHeads(torch.ones(model.config.num_hidden_layers, model.config.num_attention_heads, dtype=torch.bool))
    sizes = {"sink_tokens": 4, "local_tokens": 20, "moments": "current", "criterion": heads}
    missed, shares = [], []
    for token_threshold in (1e-30, 1.0, 1e9):
        cache = QAdACache(model, **sizes, token_threshold=token_threshold, audit_every=1)
        with torch.no_grad():
            model(ids[:, :140], **pass_cache(cache))
            for token in range(140, 150):
                model(ids[:, token : token + 1], **pass_cache(cache))
        stats = cache.stats()
        store = cache.layers[0].store
        head_bytes = 2 * store.near_keys.shape[3] * store.near_keys.element_size()
        lengths = [120 + step for step in range(1, 11)]  # at most: some are pending still
        heads = len(stats.layers) * 2 * store.near_keys.shape[1]
        assert 0 < stats.dense_bulk_bytes <= heads * head_bytes * sum(lengths)
        # A word and a scale a token; a centre, an order, weights and a unit a segment; noise, variances, a mean value,
        # slopes and their units a head.
        once = (2 + 1 + 2) * 8 + 4 + 4 * 8 + 4 * 8 + 4 * 8 + 8 * 4 + 4 * 8
        assert stats.sketch_read_bytes == stats.dense_bulk_bytes // head_bytes * (4 + 1) + 10 * heads * once
        assert stats.read_share == (stats.bulk_read_bytes + stats.sketch_read_bytes) / stats.dense_bulk_bytes
        missed.append(stats.audit.missed)
        shares.append(stats.read_share)
    assert missed[0] < 1e-6 < missed[1] < missed[2]
    assert shares[0] > 1 > shares[1] > shares[2] == stats.sketch_read_bytes / stats.dense_bulk_bytes


@pytest.mark.parametrize("exact", [{"threshold": 1.0}, {"criterion": "dense"}, {"criterion": "oracle"}])
def test_asking_for_everything_reads_all(exact: dict[str, Any]) -> None:
    pair = Pair(**{"criterion": "gaussian", "token_threshold": 5.0} | exact)
    inputs = Inputs()
    for tokens in (60, 1, 1, 3):
        pair.update(*inputs(tokens))
    assert pair.layer.store.sketch is None


def test_keys_of_no_whole_blocks_are_read_whole() -> None:
    pair, inputs = Pair(criterion=EVERY, token_threshold=5.0, sketch_bits=1), Inputs(dim=12)
    for tokens in (60, 1, 1, 3):
        pair.update(*inputs(tokens))
    assert pair.layer.store.sketch is None


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_peaked_heads_read_all(kernels: str) -> None:
    """Errors of many nats, a hundredth of the scores' variance: the highest estimate is not the highest score."""
    model = tiny("llama", max_position_embeddings=4096)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data.mul_(30)
    text = torch.randint(1, model.config.vocab_size, (1, 2006), generator=torch.Generator().manual_seed(0))
    calls = [2000, *[1] * 6]
    cache = QAdACache(model, moments="current", kernels=kernels)
    got, wanted = (forced(model, text, calls, used)[:, -6:] for used in (cache, DynamicCache(config=model.config)))
    log_wanted, log_got = wanted.double().log_softmax(-1), got.double().log_softmax(-1)
    assert (log_wanted.exp() * (log_wanted - log_got)).sum(-1).mean() < 1e-6
