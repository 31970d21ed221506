"""The audit against float64: how often the decisions were right, and what they lost; and that it changes nothing."""

import math
from typing import Any

import pytest
import torch
from harness import LOCAL, SINKS, WINDOW, Driver, Inputs, make_shared, transformers_mask
from models import SMALL, prompt, tiny
from reference import bulk_indices, log_masses
from scenarios import small_buffers

from qada_cache import QAdACache, StaticHeads
from qada_cache.state.layer import QAdALayer
from qada_cache.versions import pass_cache

SIZES = {"sink_tokens": SINKS, "local_tokens": LOCAL}
CALLS = (40, 1, 1, 3, WINDOW, 1, 20, *[1] * 25)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"group_rule": "any"},
        {"criterion": "oracle"},
        {"criterion": StaticHeads(torch.tensor([[True, False, False, True]]))},
    ],
    ids=["gaussian", "any", "oracle", "static"],
)
@pytest.mark.parametrize("padded", [False, True])
def test_equals_float64(padded: bool, options: dict[str, Any]) -> None:
    layer = QAdALayer(make_shared(audit_every=1, **options), 0)
    driver, inputs, generator = Driver(layer), Inputs(), torch.Generator().manual_seed(4)
    history, kept = torch.empty(2, 0, dtype=torch.bool), [torch.empty(2, 0, 16)] * 2
    expected = torch.zeros(5, dtype=torch.float64)
    with small_buffers():
        for tokens in CALLS:
            keys, values, queries = inputs(tokens)
            valid = torch.rand(2, tokens, generator=generator) < (0.8 if padded else 1.1)
            history = torch.cat([history, valid], dim=1)
            _, local = driver(keys, values, queries, transformers_mask(history, tokens), scaling=0.25)
            for row in range(2):
                for token in valid[row].nonzero()[:, 0].tolist():
                    kept[row] = torch.cat([kept[row], keys[row, :, token : token + 1]], dim=1)
                    position = kept[row].shape[1] - 1
                    if local is None or not bulk_indices(position, **SIZES):
                        continue
                    masses = log_masses(
                        query=queries[row, :, token],
                        keys=kept[row],
                        position=position,
                        scaling=0.25,
                        criterion="oracle",
                        **SIZES,
                    )
                    for (log_local, log_bulk), is_local in zip(masses, local[row, :, token].tolist(), strict=True):
                        lost = 1 / (1 + math.exp(log_local - log_bulk))
                        needed = 1 - lost < layer.options.threshold
                        expected += torch.tensor([1, needed, needed and not is_local, not is_local, lost * is_local])
    assert layer.counters.audited is not None
    assert expected[1] > 20
    torch.testing.assert_close(layer.counters.audited[:4], expected[:4], rtol=0, atol=0)
    torch.testing.assert_close(layer.counters.audited[4], expected[4], rtol=1e-5, atol=1e-5)


def run(every: int, **options: Any) -> tuple[torch.Tensor, QAdACache]:
    model = tiny(num_hidden_layers=3)
    cache = QAdACache(model, threshold=0.2, audit_every=every, moments="current", group_rule="head", **SMALL, **options)
    out = model.generate(
        prompt(150)[0], **pass_cache(cache), max_new_tokens=31, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return torch.stack(out.logits), cache


def test_outputs_and_counters_stay_the_same() -> None:
    plain, unaudited = run(0)
    for every in (1, 4):
        logits, audited = run(every)
        assert torch.equal(logits, plain)
        ours, theirs = audited.stats(), unaudited.stats()
        assert torch.equal(ours.local_share, theirs.local_share)
        assert ours.bulk_read_bytes == theirs.bulk_read_bytes > 0
    assert unaudited.stats().audit is None


def test_layers_take_turns() -> None:
    """30 steps, an audit every 4: eight, of layers 0, 1, 2, 0, 1, 2, 0, 1; each reads one layer's bulk."""
    _, cache = run(4)
    audited = [int(layer.counters.audited[0]) for layer in cache.layers]
    assert audited == [3 * 4, 3 * 4, 2 * 4]  # of four heads each
    audit = cache.stats().audit
    assert audit is not None
    assert audit.decisions == 32
    stored = cache.layers[0].store.bulk.lengths[0]
    per_token = 2 * 2 * 8 * 4  # keys and values, heads, dims, bytes
    assert audit.read_bytes == 8 * stored * per_token  # no pending token was flushed meanwhile
    assert 0 < audit.needed < 32
    assert 0.0 <= audit.recall <= 1.0
    assert 0.0 <= audit.excess <= 1.0
    cache.reset()
    assert cache.stats().audit is None


def test_extremes() -> None:
    _, cache = run(1, criterion="oracle")
    audit = cache.stats().audit
    assert (audit.recall, audit.excess) == (1.0, 0.0)
    assert 0 < audit.missed < 1 - 0.2  # what a local head may lose
    _, cache = run(1, criterion="dense")
    assert cache.stats().audit.recall == 1.0
    assert cache.stats().audit.missed == pytest.approx(0.0, abs=1e-6)  # of what was read and what there is, rounded
    _, cache = run(1, criterion="local")
    audit = cache.stats().audit
    assert audit.recall == 0.0
    assert math.isnan(audit.excess)
    assert audit.missed > 0


def test_wrong_interval() -> None:
    for wrong, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="audit_every must"):
            QAdACache(tiny(), audit_every=wrong)
