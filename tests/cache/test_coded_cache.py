"""`bulk_bits`: a model decodes by what records say, whichever way they are held, and every byte is counted."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from models import SMALL, prompt, tiny
from stand_in import accelerator
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from qada_cache import QAdACache
from qada_cache.kernels.cpu import compiled_decode, compiler
from qada_cache.serving.memory import estimate_bytes
from qada_cache.storage.bulk import Bulk
from qada_cache.storage.coded_bulk import CodedBulk
from qada_cache.versions import pass_cache

PROMPT, TOKENS = 1900, 12
DENSE: dict[str, Any] = {"criterion": "dense"}
SELECTING: dict[str, Any] = {"threshold": 0.3, "moments": "current"}


def told_of(mask: Tensor, tokens: int) -> dict[str, Tensor]:
    """A model's arguments for padding, as `generate` makes them: the mask, and positions of the last `tokens`."""
    return {"attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -tokens:]}


@torch.no_grad()
def follow(model: PreTrainedModel, cache: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits of tokens that are given one by one, `[batch, tokens, vocabulary]`."""
    found, seen = [], cache.get_seq_length()
    for index in range(ids.shape[1]):
        told = {} if mask is None else told_of(mask[:, : seen + index + 1], 1)
        found.append(model(ids[:, index : index + 1], **told, **pass_cache(cache)).logits)
    return torch.cat(found, dim=1)


@torch.no_grad()
def filled(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, **options: Any) -> QAdACache:
    cache = QAdACache(model, **{**SMALL, **options})
    model(ids, **({} if mask is None else told_of(mask, ids.shape[1])), **pass_cache(cache))
    return cache


def uncoded(
    model: PreTrainedModel, cache_in_few: QAdACache, ids: Tensor, *, coded: bool = True, **options: Any
) -> QAdACache:
    """A cache in 16 bits that holds what the other one's records say; of its open segment only if that is `coded`."""
    cache = filled(model, ids, bulk_bits=16, **options)
    for ours, theirs in zip(cache.layers, cache_in_few.layers, strict=True):
        length = theirs.store.bulk.lengths[0]
        said = theirs.store.bulk.read(slice(0, 1), slice(None), 0, length, coded=coded)
        for held, part in zip(ours.store.bulk.tensors, said, strict=True):
            assert not torch.equal(held[:, :, :length], part)
            held[:, :, :length] = part
    return cache


@pytest.mark.parametrize("bits", [8, 4])
def test_all_is_read_as_stored(bits: int) -> None:
    """DynamicCache's logits over the tokens that records say."""
    model, ids = tiny(dtype=torch.float64), prompt(PROMPT + TOKENS)[0]
    cache, stock = filled(model, ids[:, :PROMPT], **DENSE, bulk_bits=bits), DynamicCache(config=model.config)
    for layer in cache.layers:
        store = layer.store
        bulk = store.bulk.read(slice(0, 1), slice(None), 0, store.bulk.lengths[0], coded=True)
        assert bulk[0].dtype == torch.float64
        sinks, recent = store.view_near(slice(0, 1))
        stock.update(*(torch.cat(each, dim=2) for each in zip(sinks, bulk, recent, strict=True)), layer.index)
    given = ids[:, PROMPT:]
    wanted, found = follow(model, stock, given), follow(model, cache, given)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)  # attention sums in float32
    length, dim = cache.layers[0].store.bulk.lengths[0], 8
    assert cache.layers[0].store.bulk.stored == [1536]
    records = {8: 16, 4: 12}[bits]  # bytes: 4 of scales, and 11 or 8 bits of 8 channels
    assert cache.stats().bulk_read_bytes == 2 * 2 * TOKENS * length * records
    assert cache.stats().dense_bulk_bytes == 2 * 2 * TOKENS * length * 2 * 8 * dim


def test_selected_tokens_are_read_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selected tokens are read as by a cache that holds the decoded ones. Each costs its record, in closed segments and
    in the open one."""
    model, ids = tiny(), prompt(PROMPT + TOKENS)[0]
    cache = filled(model, ids[:, :PROMPT], bulk_bits=8, kernels="torch", **SELECTING)
    wanted, read = uncoded(model, cache, ids[:, :PROMPT], kernels="torch", **SELECTING), [0, 0]
    decode = CodedBulk.decode

    def counted(bulk: CodedBulk, rows: slice, heads: slice, tokens: Any, stored: Any, *, coded: bool) -> Any:
        found = decode(bulk, rows, heads, tokens, stored, coded=coded)
        each = found[0].shape[1]
        read[0] += stored[0].shape[2] * each
        read[1] += (found[0].shape[2] - stored[0].shape[2]) * each
        return found

    monkeypatch.setattr(CodedBulk, "decode", counted)
    given = ids[:, PROMPT:]
    torch.testing.assert_close(follow(model, cache, given), follow(model, wanted, given), rtol=1e-4, atol=1e-4)
    ours, theirs = cache.stats(), wanted.stats()
    assert 0 < ours.sketch_read_bytes == theirs.sketch_read_bytes
    assert sum(read) * 64 == theirs.bulk_read_bytes
    assert min(read) > 0
    assert sum(read) * 16 == ours.bulk_read_bytes


def test_bytes_held() -> None:
    model, ids = tiny(), prompt(PROMPT)[0]
    for offloading in (True, False):
        cache = filled(model, ids, bulk_bits=4, offloading=offloading)
        plain = filled(model, ids, bulk_bits=16, offloading=offloading)
        bulks = [layer.store.bulk for layer in cache.layers]
        records = sum(bulk.tensors[0].nbytes for bulk in bulks)
        assert records <= 2 * 2 * 12 * 1536 * 33 / 32 + 2 * 2 * 12 * 256
        beside = sum(held.nbytes for bulk in bulks for held in bulk.beside)
        assert beside == 2 * 2 * 352 * (64 + 12)  # 349 tokens, and their records
        ours, theirs = cache.stats(), plain.stats()
        assert ours.host_bytes == (records if offloading else 0)
        held, sketches = ours.device_bytes + ours.host_bytes, sum(bulk.sketch.nbytes for bulk in bulks)
        others = theirs.device_bytes + theirs.host_bytes
        others -= sum(layer.store.bulk.nbytes + layer.store.sketch.nbytes for layer in plain.layers)
        assert held == others + records + beside + sketches


def test_rows_of_unlike_lengths() -> None:
    """Each as if it were alone: with more records or fewer, with none yet, with no bulk."""
    model, (ids, mask) = tiny(), prompt(1900, 1200, 700, 12)
    more = prompt(*[6] * 4, seed=3)[0]
    whole = torch.cat([mask, torch.ones(4, 6, dtype=mask.dtype)], dim=1)
    cache = filled(model, ids, mask, **DENSE, bulk_bits=8)
    assert cache.layers[0].store.bulk.stored == [1536, 1024, 0, 0]
    found = follow(model, cache, more, whole)
    for row, length in enumerate((1900, 1200, 700, 12)):
        alone = filled(model, ids[row : row + 1, -length:], **DENSE, bulk_bits=8)
        wanted = follow(model, alone, more[row : row + 1])
        torch.testing.assert_close(found[row], wanted[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("budget", [0, 1.0])
@pytest.mark.parametrize("options", [DENSE, SELECTING], ids=["dense", "selecting"])
def test_offloaded(options: dict[str, Any], budget: float) -> None:
    """Records are what is copied, unless they are placed; outputs are those of a bulk that is read in place."""
    model, ids = tiny(), prompt(PROMPT + TOKENS)[0]
    given = ids[:, PROMPT:]
    wanted = follow(model, filled(model, ids[:, :PROMPT], bulk_bits=8, kernels="torch", **options), given)
    with accelerator() as copies:
        cache = filled(model, ids[:, :PROMPT], bulk_bits=8, device_budget=budget, **options)
        found = follow(model, cache, given)
        stats = cache.stats()
        assert (copies.bytes == 0) == bool(budget)
        assert stats.device_layers == (2 if budget else 0)
        if options is DENSE and not budget:
            assert copies.bytes == 2 * 2 * 1536 * 16 * TOKENS
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_long_turns_read_records() -> None:
    """A turn of more than a window: full attention over the cache as stored."""
    model, ids = tiny(), prompt(PROMPT + 200)[0]
    cache = filled(model, ids[:, :PROMPT], bulk_bits=8, **SELECTING)
    plain = uncoded(model, cache, ids[:, :PROMPT], coded=False, **SELECTING)
    with torch.no_grad():
        found, wanted = (model(ids[:, PROMPT:], **pass_cache(each)).logits for each in (cache, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    length = PROMPT - 20
    assert cache.stats().streamed_bytes == 2 * 2 * (1536 * 16 + (length - 1536) * 64)


def test_heads_without_records_keep_16_bits() -> None:
    """Keys of 12 channels."""
    model, ids = tiny(head_dim=12), prompt(1300)[0]
    cache, plain = (filled(model, ids[:, :1200], bulk_bits=bits, **DENSE) for bits in (8, 16))
    assert type(cache.layers[0].store.bulk) is Bulk
    assert torch.equal(follow(model, cache, ids[:, 1200:1203]), follow(model, plain, ids[:, 1200:1203]))


@pytest.mark.parametrize(
    ("given", "error"), [(5, ValueError), (2, ValueError), (8.0, TypeError), ("8", TypeError), (True, TypeError)]
)
def test_bits_that_are_none(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="bulk_bits must be"):
        QAdACache(tiny(), bulk_bits=given, moments="current")


@pytest.mark.parametrize("options", [SELECTING, DENSE], ids=["selecting", "dense"])
@pytest.mark.parametrize("bits", [8])
def test_the_compiled_kernel_answers_like_torch(bits: int, options: dict[str, Any]) -> None:
    """The compiled kernel's logits differ from torch's by less than 1 % of the difference between few bits and 16: it
    rounds queries to 16 bits."""
    model, ids = tiny(), prompt(PROMPT + TOKENS)[0]
    found, wanted, exact = (
        filled(model, ids[:, :PROMPT], bulk_bits=how, kernels=kernels, **options)
        for how, kernels in ((bits, "auto"), (bits, "torch"), (16, "torch"))
    )
    with mock.patch.object(compiled_decode, "fused_decode", wraps=compiled_decode.fused_decode) as kernel:
        logits = [follow(model, cache, ids[:, PROMPT:]) for cache in (found, wanted, exact)]
    assert kernel.call_count == 2 * TOKENS
    # Tokens at the edge of what is selected may differ, and then one answer does.
    off, coded = (float((one - logits[1]).norm(dim=-1).median()) for one in (logits[0], logits[2]))
    assert off < 0.01 * coded
    ours, theirs = found.stats(), wanted.stats()
    assert 0 < ours.bulk_read_bytes == pytest.approx(theirs.bulk_read_bytes, rel=0.01)
    assert ours.sketch_read_bytes == theirs.sketch_read_bytes > 0


@pytest.mark.usefixtures("default_bits")
def test_none_is_8_where_a_kernel_reads_records() -> None:
    """`bulk_bits` None is 8 on a CPU with query energies, if a kernel selects tokens; otherwise it is 16."""
    model = tiny()
    for bits, options in (
        (8, {}),
        (16, {"moments": "current"}),  # without energies, though they are kept by now
        (16, {"kernels": "torch"}),
        (16, {"token_threshold": 0.0}),
        (16, {"criterion": "dense"}),
        (16, {"threshold": 1.0}),
        (4, {"bulk_bits": 4, "threshold": 1.0}),
    ):
        assert QAdACache(model, **options).options.bulk_bits == bits
    assert QAdACache(config=model.config).options.bulk_bits == 16


@pytest.mark.usefixtures("default_bits")
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {}),
        ("llama", {"dtype": torch.float64}),
        ("llama", {"num_attention_heads": 32, "num_key_value_heads": 1, "hidden_size": 32, "head_dim": 8}),
        ("llama", {"head_dim": 12}),
    ],
    ids=["caps scores", "float64", "large groups", "odd heads"],
)
def test_where_no_kernel_decodes_none_is_16(family: str, changes: dict[str, Any]) -> None:
    options = QAdACache(tiny(family, **changes), **SMALL).options
    assert options.query_energies is not None
    assert options.bulk_bits == 16


@pytest.mark.usefixtures("default_bits")
def test_none_is_8_of_latents_among_which_heads_select() -> None:
    odd = {"kv_lora_rank": 12, "qk_rope_head_dim": 12}
    assert QAdACache(tiny("deepseek_v3"), criterion="gaussian").options.bulk_bits == 8
    assert QAdACache(tiny("deepseek_v3", **odd), criterion="gaussian").options.bulk_bits == 16
    assert QAdACache(tiny("deepseek_v3")).options.bulk_bits == 16


@pytest.mark.usefixtures("default_bits")
def test_without_a_compiler_none_is_16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    assert QAdACache(tiny()).options.bulk_bits == 16


def test_memory_that_a_call_is_expected_to_take() -> None:
    """Records and a sketch, and the last tokens as they are."""
    model = tiny(head_dim=64)
    plain, coded = (estimate_bytes(model, 100_000, 0, bits) for bits in (16, 4))
    assert plain == 100_000 * 2 * 2 * 1.5 * 2 * 64 * 4
    assert 100_000 * 2 * 2 * (68 + 13) < coded < 0.25 * plain
    assert estimate_bytes(tiny(head_dim=12), 1000, 0, 4) == estimate_bytes(tiny(head_dim=12), 1000, 0)
