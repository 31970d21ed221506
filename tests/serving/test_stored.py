"""Conversations that a store keeps: found when memory has none as long, by other processes too."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from calling import DECIDING, EXACT, NEW, Reads, Stop, StoppingStreamer, ours, said, stock
from latents import INDEXED, make_indexed
from models import tiny
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import PrefixStore, QAdACache
from qada_cache.attention.indexed import IndexedLayer
from qada_cache.models import identity
from qada_cache.serving import counters
from qada_cache.serving.conversations import find_conversations


def forget(model: PreTrainedModel) -> None:
    """Forget all conversations in memory, as at a process's end."""
    find_conversations(model).forget()


@pytest.mark.parametrize("options", [EXACT, DECIDING], ids=["exact", "deciding"])
def test_a_conversation_after_a_restart(
    model: PreTrainedModel, reads: Reads, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Each turn in a process of its own gives what one cache gives that is carried through them."""
    carried, ids = QAdACache(model, **options), said(300)
    for turn in range(3):
        wanted = stock(model, ids, carried)
        reads.clear()
        assert torch.equal(ours(model, ids, options, conversations_store=tmp_path), wanted)
        assert reads.first() == (8 if turn else 300)
        forget(model)
        ids = said(wanted, 7)
    found = counters(model)
    assert (found["requests"], found["continued"], found["restored"]) == (3, 0, 2)
    assert found["cached_tokens"] == found["prompt_tokens"] - 300 - 2 * 8
    assert PrefixStore(tmp_path).stats().segments == 2


def test_what_is_in_memory_is_not_read_from_a_file(model: PreTrainedModel, tmp_path: Path) -> None:
    ids = said(300)
    for _ in range(3):
        ids = said(ours(model, ids, conversations_store=tmp_path), 7)
    found = counters(model)
    assert (found["continued"], found["restored"]) == (2, 0)


def test_the_longer_one_counts(model: PreTrainedModel, reads: Reads, tmp_path: Path) -> None:
    """A conversation that had to go, and another in memory that begins alike."""
    start = said(100)
    long = ours(model, said(start, 200), conversations_store=tmp_path)
    forget(model)
    ours(model, start, conversations_store=tmp_path)
    reads.clear()
    ours(model, said(long, 7), conversations_store=tmp_path)
    assert reads.first() == 8


def test_a_client_that_goes_leaves_the_prompt(model: PreTrainedModel, reads: Reads, tmp_path: Path) -> None:
    ids = said(300)
    with pytest.raises(Stop):
        ours(model, ids, conversations_store=tmp_path, streamer=StoppingStreamer(3))
    forget(model)
    reads.clear()
    ours(model, ids, conversations_store=tmp_path)
    assert reads.first() == 1


def test_owners_of_stored_conversations(model: PreTrainedModel, reads: Reads, tmp_path: Path) -> None:
    def read(ids: Tensor, **options: Any) -> int:
        reads.clear()
        ours(model, ids, conversations_store=tmp_path, one_user=False, **options)
        forget(model)
        return reads.first()

    ids = said(300)
    assert read(ids) == read(ids) == 300
    assert PrefixStore(tmp_path).stats().segments == 0
    assert read(ids, conversation_key="mine") == 300
    assert read(ids, conversation_key="yours") == 300
    assert read(ids) == 300
    assert read(ids, conversation_key="mine") == 1


def test_the_folder_keeps_turns_in_the_users_store(model: PreTrainedModel, reads: Reads) -> None:
    """The folder's `generate.py` keeps turns in the user's store by default; in Python `serving.generate` does so only
    if asked."""
    ids = said(300)
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False}
    from qada_cache import serving

    for _ in range(2):
        serving.generate(ids, model=model, cache_options=EXACT, **settings)
    assert PrefixStore().stats().segments == 0
    store = PrefixStore()
    ours(model, ids, conversations_store=store)
    forget(model)
    reads.clear()
    model.generate(ids, custom_generate=serving.FOLDER, trust_remote_code=True, cache_options=EXACT, **settings)
    assert reads.first() == 1
    assert store.stats().segments == 2


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "gemma4"])
def test_models_whose_layers_cannot_be_cropped(family: str, tmp_path: Path) -> None:
    """A turn, an edit near the end and a turn after a restart begin at the last states, which count as kept bytes."""
    model = tiny(family)
    reads, first = Reads(model), ours(model, said(300), conversations_store=tmp_path)
    (kept,) = find_conversations(model)._kept
    snapshots = kept.cache._shared.snapshots
    assert counters(model)["bytes"] == kept.bytes == sum(map(sum, kept.cache.layer_bytes())) + snapshots.nbytes
    assert snapshots.nbytes > 0
    edited = first.clone()
    edited[0, -5] += 1
    for text, read in ((first, 10), (edited, NEW + 9)):
        reads.clear()
        ids = said(text, 9)
        got = ours(model, ids, conversations_store=tmp_path)
        assert torch.equal(got, stock(model, ids, None))
        assert reads.first() == read
    forget(model)
    ids = said(got, 9)
    reads.clear()
    assert torch.equal(ours(model, ids, conversations_store=tmp_path), stock(model, ids, None))
    assert reads.first() == 10


@pytest.mark.parametrize("kind", INDEXED)
def test_models_with_an_indexer(kind: str, tmp_path: Path) -> None:
    """A turn and an edit after restarts."""
    model, ids = make_indexed(kind, index_n_heads=64), said(300)
    reads = Reads(model)
    for read in (300, 10, NEW + 9):
        reads.clear()
        got = ours(model, ids, conversations_store=tmp_path)
        assert torch.equal(got, stock(model, ids, None))
        assert reads.first() == read
        forget(model)
        ids = said(got, 9) if read == 300 else got.index_fill(1, torch.tensor([got.shape[1] - NEW - 9]), 96)
    assert counters(model)["restored"] == 2


def test_an_indexer_whose_mask_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A conversation is not stored if an indexer's mask is unknown, as in a compiled model; a warning says so."""
    monkeypatch.delattr(IndexedLayer, "get_mask_sizes")
    model, ids = make_indexed("DeepseekV32"), said(40)
    assert torch.equal(ours(model, ids, conversations_store=tmp_path), stock(model, ids, None))
    assert "conversations are not stored: PrefixStore keeps no caches with padding" in caplog.text
    assert counters(model)["conversations"] == 1


def test_models_without_full_attention(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("mistral_sliding")
    caplog.set_level(logging.WARNING)
    assert torch.equal(ours(model, said(40), conversations_store=tmp_path), stock(model, said(40), None))
    assert "conversations are not stored: PrefixStore keeps no prompts of mistral" in caplog.text


@pytest.mark.parametrize("options", [{}, EXACT], ids=["default", "exact"])
def test_weights_are_sampled_once_before_a_turn_and_once_after_it(
    model: PreTrainedModel, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that goes on with a conversation in memory, and one that reads it from the store."""
    ids = said(ours(model, said(300), options, conversations_store=tmp_path), 7)
    sampled: list[int] = []
    read = identity._read_values
    monkeypatch.setattr(identity, "_read_values", lambda weights: sampled.append(len(weights)) or read(weights))
    for continued in (1, 1):
        ids = said(ours(model, ids, options, conversations_store=tmp_path), 7)
        assert len(sampled) == 2
        assert counters(model)["continued"] == continued
        sampled.clear()
        forget(model)
    assert counters(model)["restored"] == 1


def test_a_store_that_is_none(model: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match="conversations_store must be"):
        ours(model, said(20), conversations_store=7)
