"""Observations are compared with float64: masses, decisions and reads. An observer changes nothing."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import LOCAL, SINKS, WINDOW, Driver, Inputs, make_shared, transformers_mask
from models import SMALL, prompt, tiny
from reference import bulk_indices, local_indices, log_mass, log_masses
from scenarios import small_buffers
from small_sketch import small_sketch
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import QAdACache
from qada_cache.sketch import selection
from qada_cache.state.layer import QAdALayer
from qada_cache.state.observation import Observation
from qada_cache.versions import pass_cache

SIZES = {"sink_tokens": SINKS, "local_tokens": LOCAL}
CALLS = (40, 1, 1, 3, WINDOW, 1, 20, *[1] * 25)
SCALING = 0.25

Told = tuple[Observation, Tensor]  # with the true log A_bulk, which is known during the call alone


def observed_calls(*, padded: bool, **options: Any) -> Iterator[tuple[list[Told], list[Tensor], Tensor, Tensor, Any]]:
    """A layer used call by call: what was told of each, every row's real keys, the queries, which are real, flags."""
    layer, told = QAdALayer(make_shared(**options), 0), list[Told]()
    layer.shared.observer = lambda seen: told.append((seen, seen.true_log_bulk.clone()))
    driver, inputs, generator = Driver(layer), Inputs(), torch.Generator().manual_seed(4)
    history, kept = torch.empty(2, 0, dtype=torch.bool), [torch.empty(2, 0, 16)] * 2
    for tokens in CALLS:
        keys, values, queries = inputs(tokens)
        valid = torch.rand(2, tokens, generator=generator) < (0.8 if padded else 1.1)
        history = torch.cat([history, valid], dim=1)
        told.clear()
        _, local = driver(keys, values, queries, transformers_mask(history, tokens), scaling=SCALING)
        kept = [torch.cat([kept[row], keys[row][:, valid[row]]], dim=1) for row in range(2)]
        yield told, kept, queries, valid, local


@pytest.mark.parametrize("criterion", ["gaussian", "oracle"])
@pytest.mark.parametrize("padded", [False, True])
def test_masses_and_decisions_equal_float64(padded: bool, criterion: str) -> None:
    compared = 0
    with small_buffers():
        for told, kept, queries, valid, local in observed_calls(padded=padded, criterion=criterion):
            assert len(told) == (local is not None)  # once a query-adaptive call; exact ones decide nothing
            if local is None:
                continue
            ((seen, true),) = told
            assert seen.layer == 0
            assert torch.equal(seen.flags.flatten(1, 2), ~local)
            assert torch.equal(seen.query.states, queries)
            for row, place in valid.nonzero().tolist():
                position = kept[row].shape[1] - 1 - int(valid[row, place + 1 :].sum())
                bulk_tokens = len(bulk_indices(position, **SIZES))
                assert int(seen.rows.bulk_tokens.expand(2, -1, -1)[row, 0, place]) == bulk_tokens
                if not bulk_tokens:
                    continue
                told_by = {"query": queries[row, :, place], "keys": kept[row], "position": position, **SIZES}
                stored = {"stored": seen.bulk_lengths[row], "frozen_count": seen.bulk_lengths[row]}
                oracle = log_masses(scaling=SCALING, criterion="oracle", **told_by)
                by = log_masses(scaling=SCALING, criterion="gaussian", **told_by, **stored)
                by = oracle if criterion == "oracle" else by
                expected = [
                    [masses[0] for masses in oracle],
                    *([masses[1] for masses in each] for each in (oracle, by)),
                ]
                log_bulk = seen.log_bulk.expand(2, -1, -1, queries.shape[2])
                found = [part.flatten(1, 2)[row, :, place].double() for part in (seen.log_local, true, log_bulk)]
                torch.testing.assert_close(torch.stack(found), torch.tensor(expected).double(), rtol=1e-4, atol=1e-4)
                compared += 1
    assert compared > 30


@pytest.mark.parametrize(("theta", "rough"), [(0.0, False), (1.0, False), (1.0, True)])
@pytest.mark.parametrize("padded", [False, True])
def test_reads_account_for_what_was_read(
    padded: bool, theta: float, rough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that heads are said to have read have, in float64, the mass that was read; also if some queries of a head
    find the sketch too rough and read all, and others choose."""
    if rough:
        monkeypatch.setattr(selection, "NOISE_SHARE", 0.0)
        monkeypatch.setattr(selection, "UNRELIABLE", 0.125)
    wholes, chosens, both, shares = 0, 0, 0, []
    with small_buffers(), small_sketch(6, 32):
        for told, kept, queries, valid, local in observed_calls(padded=padded, token_threshold=theta):
            for seen, _ in told if local is not None else ():
                wholes += sum(map(sum, seen.whole))
                chosens += len(seen.chosen)
                both += sum(seen.whole[one.row][one.head] for one in seen.chosen)
                assert all(int(one.tokens.max()) < seen.bulk_lengths[one.row] for one in seen.chosen if len(one.tokens))
                for row, place in valid.nonzero().tolist():
                    position = kept[row].shape[1] - 1 - int(valid[row, place + 1 :].sum())
                    near, far = local_indices(position, **SIZES), bulk_indices(position, **SIZES)
                    stored = [*range(SINKS, SINKS + seen.bulk_lengths[row])]
                    for head in range(queries.shape[1]):
                        read = set(near)
                        if bool(seen.flags.flatten(1, 2)[row, head, place]):
                            read |= set(far) - set(stored)  # pending ones
                            picked = tokens_read(seen, row, head, place)
                            read |= {SINKS + token for token in picked}
                            shares.append(len(picked) / max(1, len(stored)))
                        expected = log_mass(
                            query=queries[row, head, place], keys=kept[row][head // 2, sorted(read)], scaling=SCALING
                        )
                        found = float(seen.read_lse.flatten(1, 2)[row, head, place])
                        assert found == pytest.approx(float(expected), abs=1e-4)
    assert (wholes > 20) if theta == 0 else (chosens > 20)
    assert bool(both) == rough
    assert max(shares) <= 1
    assert theta == 0 or min(shares) < 0.9


def tokens_read(seen: Observation, row: int, head: int, place: int) -> set[int]:
    """The tokens of the stored bulk that one query of one query head read."""
    for one in seen.chosen:
        if (one.row, one.head) == (row, head // 2) and place in (queries := one.queries.tolist()):
            return set(one.tokens[one.seen[queries.index(place)]].tolist())
    return set(range(seen.bulk_lengths[row])) if seen.whole[row] and seen.whole[row][head // 2] else set()


def generate(model: PreTrainedModel, cache: QAdACache) -> tuple[Tensor, ...]:
    return model.generate(
        prompt(150)[0], **pass_cache(cache), max_new_tokens=12, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    ).logits  # fmt: skip


def test_to_observe_changes_nothing() -> None:
    """Outputs are those of torch's kernels, counts and audits those of a cache without an observer."""
    model, calls = tiny(), list[int]()
    options: dict[str, Any] = {"threshold": 0.4, "moments": "current", "audit_every": 3, **SMALL}
    plain, watched = (QAdACache(model, kernels=kernels, **options) for kernels in ("torch", "auto"))
    watched.observer = lambda seen: calls.append(seen.layer)
    expected, found = generate(model, plain), generate(model, watched)
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert calls == [*range(len(watched.layers))] * 11
    ours, theirs = watched.stats(), plain.stats()
    assert ours.bulk_read_bytes == theirs.bulk_read_bytes > 0
    assert torch.equal(ours.local_share, theirs.local_share)
    assert ours.audit == theirs.audit
    assert ours.audit.read_bytes > 0


def test_an_audit_and_an_observer_read_the_truth_once() -> None:
    model = tiny(num_hidden_layers=1)
    caches = [QAdACache(model, moments="current", audit_every=1, **SMALL) for _ in range(2)]
    truths = list[Tensor]()
    caches[1].observer = lambda seen: truths.append(seen.true_log_bulk)
    for cache in caches:
        generate(model, cache)
    assert len(truths) == 11
    assert caches[0].stats().audit == caches[1].stats().audit


def test_copies_are_not_observed_and_none_ends_it() -> None:
    model, calls = tiny(), list[Observation]()
    cache = QAdACache(model, moments="current", **SMALL)
    assert cache.observer is None
    cache.observer = calls.append
    generate(model, cache)
    told = len(calls)
    assert told
    twin = cache.fork()
    assert twin.observer is None
    assert cache.observer is not None
    ids = prompt(1)[0]
    with torch.no_grad():
        model(ids, **pass_cache(twin))
        assert len(calls) == told
        cache.observer = None
        model(ids, **pass_cache(cache))
    assert len(calls) == told
    with pytest.raises(RuntimeError, match="is over: ask for true_log_bulk in the observer itself"):
        _ = calls[0].true_log_bulk


def test_what_an_observer_raises_interrupts_the_pass() -> None:
    model, seen = tiny(), list[Observation]()
    cache = QAdACache(model, moments="current", **SMALL)
    generate(model, cache)

    def fail(one: Observation) -> None:
        seen.append(one)
        raise ZeroDivisionError

    cache.observer = fail
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        model(prompt(1)[0], **pass_cache(cache))
    with torch.no_grad(), pytest.raises(RuntimeError, match="interrupted"):
        model(prompt(1)[0], **pass_cache(cache))
    with pytest.raises(RuntimeError, match="is over: ask for true_log_bulk in the observer itself"):
        _ = seen[0].true_log_bulk


def test_wrong_observer() -> None:
    with pytest.raises(TypeError, match="observer must be None or a function of one Observation, got int"):
        QAdACache(tiny(), moments="current").observer = 1
