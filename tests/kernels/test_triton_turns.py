"""Several tokens in one call by Triton's kernels: each as the reference computes it alone, and counted once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from decode_scene import Scene, step_of
from models import SMALL, prompt, tiny
from operations import Operations
from record_scene import RecordScene
from small_sketch import small_sketch

from qada_cache import QAdACache, sketch
from qada_cache.kernels import decode_reference
from qada_cache.kernels.operands import Operands, Query, Rows
from qada_cache.storage import row_tensors
from qada_cache.versions import pass_cache

pytest.importorskip("triton", reason="triton is not installed: pip install triton", exc_type=ModuleNotFoundError)
from steps import interpreter, small_splits

from qada_cache.kernels.triton import turn
from qada_cache.kernels.triton.turn import fused_turn


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Rows of few tokens have a sketch, in segments, and are split."""
    with small_sketch(40, 64), small_splits(64, scan=32), mock.patch.object(row_tensors, "GRANULE", 8):
        yield


def make_turn(scene: Scene, queries: int) -> tuple[Query, Rows, Operands]:
    """The arguments of a turn of `queries` tokens, the newest of a scene's rows. Each sees the tokens before it. One
    token of the first row is padding."""
    made = torch.Generator().manual_seed(queries)
    query, rows, layer = step_of(**scene.step_arguments("cpu", None if scene.sketched_rows() else 1.0))
    noise = torch.randn(*query.states.shape[:2], queries, scene.dim, generator=made)
    states = (query.states + 0.5 * noise).to(scene.dtype)
    assert query.log_bulk is not None
    mass = query.log_bulk - 2.5 + 3 * torch.randn(*query.log_bulk.shape[:3], queries, generator=made)
    batch, columns = scene.batch, rows.columns
    later = torch.arange(queries - 1, -1, -1).clamp(max=6)[:, None]
    seen = torch.arange(columns) < columns - later
    local, pending = (mask.expand(batch, 1, queries, columns) & seen for mask in (rows.local, rows.pending))
    decided = rows.decided.expand(batch, 1, queries).clone()
    decided[0, 0, queries // 2] = False
    tokens = rows.bulk_tokens.expand(batch, 1, queries)
    told = local, pending, tokens, rows.bulk_lengths, decided
    return Query(states, query.scaling, log_bulk=mass), Rows(*told), layer


def one_by_one(query: Query, rows: Rows, layer: Operands) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """The reference's outputs and decisions, query by query; bytes of the tokens that any query reads; and bytes of the
    sketch, each counted once for every query that reads it."""
    layer = replace(layer, bulk_read_bytes=None, sketch_read_bytes=torch.zeros((), dtype=torch.int64))
    found, read = [], set[tuple[int, int, int]]()  # rows, heads, tokens

    def gather(
        layer: Operands, row: int, head: int, tokens: torch.Tensor, gather: Any = decode_reference._gather
    ) -> Any:
        read.update((row, head, token) for token in tokens.tolist())
        return gather(layer, row, head, tokens)

    for at in range(query.states.shape[2]):
        one = slice(at, at + 1)
        assert query.log_bulk is not None
        asked = replace(query, states=query.states[:, :, one], log_bulk=query.log_bulk[..., one].contiguous())
        told = rows.local[:, :, one], rows.pending[:, :, one], rows.bulk_tokens[..., one], rows.bulk_lengths
        with mock.patch.object(decode_reference, "_gather", gather):
            found.append(decode_reference.decode_step(asked, Rows(*told, rows.decided[..., one]), layer))
    recorded = [layer.records is not None and length >= sketch.MIN_TOKENS for length in rows.bulk_lengths.tolist()]
    held = (layer.bulk_keys,) if layer.shares_keys else (layer.bulk_keys, layer.bulk_values)
    token = sum(part.shape[3] * part.element_size() for part in held)
    record = 0 if layer.records is None else layer.records.layout.size
    nbytes = sum(record if recorded[row] else token for row, _, _ in read)
    outs, flags = zip(*found, strict=True)
    assert layer.sketch_read_bytes is not None
    return torch.cat(outs, dim=2), torch.cat(flags, dim=3), nbytes, int(layer.sketch_read_bytes)


CASES: list[Any] = [
    (2, 1, {"bits": 1.5, "dim": 64}),
    (5, 3, {"bits": 2, "dtype": torch.bfloat16}),
    (5, 4, {"bits": 2, "value_dim": 24, "bulk": [(39, 5)]}),  # no sketch yet
    (3, 7, {"bits": 2, "rung": 8}),
    (16, 1, {"bits": 1, "rung": 4, "kv_heads": 1}),
    pytest.param(112, 1, {"bits": 2, "bulk": [(41, 9)], "kv_heads": 1}, marks=pytest.mark.slow),
    (4, 2, {}),  # whole heads
    (3, 18, {"kv_heads": 1, "dim": 72, "value_dim": 64, "shared": True}),  # in parts, as many share a key
    (2, 9, {"bits": 2, "rung": 8, "kv_heads": 1, "dim": 72, "value_dim": 64, "shared": True}),
]


@interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in Triton's interpreter
@pytest.mark.parametrize(("queries", "group", "sizes"), CASES)
def test_turns_are_their_tokens_one_by_one(
    queries: int, group: int, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn equals its tokens decoded one by one, computed at once or in blocks, the last of which begins early."""
    sizes = {"bulk": [(85, 5), (44, 0)], "short": ()} | sizes
    scene = (RecordScene if "rung" in sizes else Scene)(group=group, **sizes)
    query, rows, layer = make_turn(scene, queries)
    expected, decided, read_bytes, of_sketches = one_by_one(query, rows, layer)
    assert decided.any()
    assert not decided.all()
    rough = {torch.bfloat16: 2e-2}.get(scene.dtype, 2e-4 if "rung" not in sizes else 2e-3)
    tokens = layer.bulk_keys.shape[2] if layer.sketch is None else layer.sketch.scales.shape[2]
    counts = []
    for at_once in (queries, 2)[: 1 if queries > 5 else 2]:
        monkeypatch.setattr(turn, "BLOCK_SCORES", at_once * scene.batch * scene.kv_heads * group * tokens)
        read, sketch_read = (torch.zeros((), dtype=torch.int64) for _ in range(2))
        found, flags = fused_turn(query, rows, replace(layer, bulk_read_bytes=read, sketch_read_bytes=sketch_read))
        assert torch.equal(flags, decided)
        torch.testing.assert_close(found, expected, rtol=rough, atol=rough)
        counts.append((int(read), int(sketch_read)))
    assert len(set(counts)) == 1
    assert counts[0][0] == read_bytes > 0
    assert of_sketches / queries <= counts[0][1] <= of_sketches


@interpreter
@pytest.mark.parametrize("bits", [16, 8])
@torch.inference_mode()
def test_a_turn_in_a_cache(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that differ, with padding in the turn: outputs, decisions and bytes of torch; then a token by itself."""
    monkeypatch.setitem(os.environ, "QADA_KERNELS", "auto")
    model, (ids, mask) = tiny(num_hidden_layers=1, head_dim=32), prompt(130, 90)
    more = torch.cat([mask, mask.new_tensor([[1, 1, 0, 1], [0, 1, 1, 1]])], dim=1)
    ids = torch.cat([ids, ids[:, 3:7]], dim=1)
    options = {"moments": "current", "threshold": 0.1, "token_threshold": 0.7, "bulk_bits": bits, **SMALL}
    cache = QAdACache(model, kernels="torch", **options)
    model(ids[:, :130], attention_mask=mask, **pass_cache(cache))
    turns: list[int] = []
    monkeypatch.setattr(
        turn,
        "attend_to_turn",
        lambda *given, old=turn.attend_to_turn: turns.append(given[1].states.shape[2]) or old(*given),
    )
    logits, stats = [], []
    for kernels in ("torch", "triton"):
        twin = cache.fork(kernels=kernels)
        turned = model(ids[:, 130:], attention_mask=more, **pass_cache(twin)).logits[more[:, 130:].bool()]
        one = torch.cat([more, more.new_ones(2, 1)], dim=1)
        logits.append(torch.cat([turned, model(ids[:, :1], attention_mask=one, **pass_cache(twin)).logits[:, 0]]))
        stats.append(twin.stats())
    assert turns == [4]
    torch.testing.assert_close(*logits, rtol=1e-2 if bits == 8 else 1e-3, atol=1e-2 if bits == 8 else 1e-3)
    for name in ("decisions", "bulk_read_bytes", "sketch_read_bytes", "dense_bulk_bytes"):
        assert getattr(stats[0], name) == getattr(stats[1], name) > 0, name
    assert torch.equal(stats[0].local_share, stats[1].local_share)


LAUNCH_NOTHING = {"empty_like", "new_empty", "_unsafe_view"}  # beside views


@pytest.mark.parametrize("kv_heads", [1, 6])
@pytest.mark.parametrize(("queries", "blocks"), [(2, 1), (112, 1), (112, 4)])
def test_what_a_turn_costs_the_host(
    queries: int, blocks: int, kv_heads: int, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three launches and two operations a block, however many tokens and heads; and nothing comes to the host."""
    scene = Scene(bulk=[(203, 5), (131, 0)], short=(), bits=2, kv_heads=kv_heads)
    query, rows, layer = make_turn(scene, queries)
    assert layer.sketch is not None
    room = scene.batch * scene.kv_heads * scene.group * layer.sketch.scales.shape[2]
    monkeypatch.setattr(turn, "BLOCK_SCORES", queries // blocks * room)
    fused_turn(query, rows, layer)
    launched.clear()
    with Operations() as found:  # of the pass's next layer
        fused_turn(query, rows, layer)
    assert [name for name, _ in launched] == blocks * ["local_kernel", "estimate_kernel", "selected_kernel"]
    parts = 2 * ["clone"] * blocks + 2 * ["cat"] * (blocks > 1)
    computed = (each.overloadpacket.__name__ for each in found.called if not each.is_view)
    names = [name for name in computed if name not in LAUNCH_NOTHING]
    assert sorted(names) == sorted([*parts, "zeros", "sum", "sum", "add_", "add_"])
