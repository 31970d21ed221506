"""Whole bulks of records, decoded by the compiled kernel."""

import platform
from collections.abc import Iterator

import pytest
import record_reference
import torch
from compilers import needs_compiler
from models import prompt, tiny
from test_instruction_sets import SETS, supported

from qada_cache import QAdACache
from qada_cache.kernels.cpu import building, decoding
from qada_cache.sketch import Layout, count_closed, count_segments
from qada_cache.sketch.codec import Sketch
from qada_cache.sketch.coded import RecordLayout, code_tokens, estimate_keys, find_query_weights
from qada_cache.storage import coded_bulk
from qada_cache.versions import pass_cache

TOKENS = 1300
pytestmark = needs_compiler


@pytest.fixture(params=SETS)
def built_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if platform.machine() not in ("x86_64", "AMD64") or not SETS[request.param] <= supported():
        pytest.skip("the processor cannot run it")
    monkeypatch.setattr(building, "FLAGS", tuple(f.replace("native", request.param) for f in building.FLAGS))
    decoding.build_decoder.cache_clear()
    yield
    decoding.build_decoder.cache_clear()


@pytest.mark.usefixtures("built_for")
@pytest.mark.parametrize(("dim", "value_dim", "bits", "rung"), [(64, 64, 1.5, 8), (80, 48, 4, 4), (136, 24, 0.5, 8)])
def test_equals_float64(dim: int, value_dim: int, bits: float, rung: int) -> None:
    """Spans that begin and end anywhere, of some heads and rows."""
    generator = torch.Generator().manual_seed(0)
    keys = 3 * torch.randn(2, 3, TOKENS, dim, generator=generator) + torch.randn(2, 3, 1, dim, generator=generator)
    values = torch.randn(2, 3, TOKENS, value_dim, generator=generator)
    energies = torch.rand(3, dim, generator=generator)
    layout, records_layout = Layout.from_bits(dim, bits), RecordLayout.from_bits(dim, value_dim, rung)
    assert layout is not None
    assert records_layout is not None
    sketch, weights = Sketch.of(keys, values, energies, layout), find_query_weights(energies, dim, keys.device)
    predicted = estimate_keys(sketch.to_tensors(), layout)
    closed, segments = count_closed(TOKENS), count_segments(TOKENS)
    records = code_tokens(keys, values, predicted, weights, records_layout)
    sizes = {name: getattr(records_layout, name) for name in ("dim", "value_dim", "key_bits", "value_bits")}
    expected = [[record_reference.decoded(head, **sizes) for head in row] for row in records]
    told = [[record_reference.predicted(sketch[row, head], TOKENS) for head in range(3)] for row in range(2)]
    for rows, heads, start, stop in ((0, 1, 0, closed), (1, 2, 509, 531), (0, 2, 3, 4), (1, 0, closed - 9, TOKENS)):
        at, span = (slice(rows, rows + 1), slice(heads, heads + 1)), slice(start, stop)
        part = sketch.map(lambda tensor, at=at: tensor[at])
        told_of = {"first": start, "segments": segments}
        found = decoding.decode_records(records[at][:, :, span], part, weights[at[1]], records_layout, **told_of)
        assert found is not None
        residual, value = (one[span] for one in expected[rows][heads])
        key = told[rows][heads][span] + residual / weights[heads].double()
        for one, true in zip(found, (key, value), strict=True):
            torch.testing.assert_close(one[0, 0].double(), true, rtol=1e-6, atol=2e-6 * float(true.abs().max()))
    every, at = {"first": 0, "segments": segments}, (slice(0, 1), slice(1, 2))
    part = sketch.map(lambda tensor: tensor[at])
    together = decoding.decode_records(records, sketch, weights, records_layout, **every)
    alone = decoding.decode_records(records[at], part, weights[1:2], records_layout, **every)
    assert together is not None
    assert alone is not None
    torch.testing.assert_close(together[0][0, 1], alone[0][0, 0], rtol=0, atol=0)


@pytest.mark.parametrize("bits", [8, 4])
@torch.inference_mode()
def test_long_turns_are_those_of_torch(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn longer than a window reads whole bulks, of rows that differ in length; torch decodes them without it."""
    model, (ids, mask) = tiny(head_dim=32), prompt(2000, 1400)
    cache = QAdACache(model, bulk_bits=bits, moments="current")
    model(ids, attention_mask=mask, **pass_cache(cache))
    turn, calls = prompt(130, seed=3)[0].repeat(2, 1), []
    original = coded_bulk.decode_records
    logits = []
    for decode in (
        lambda *given, **told: calls.append(told["first"]) or original(*given, **told),
        lambda *_, **__: None,
    ):
        monkeypatch.setattr(coded_bulk, "decode_records", decode)
        told = torch.cat([mask, torch.ones_like(turn)], dim=1)
        logits.append(model(turn, attention_mask=told, **pass_cache(cache.fork())).logits)
    assert len(calls) >= 2 * 2
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_what_torch_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be built there is one warning and no error."""
    monkeypatch.setattr(building, "find_compiler", lambda: "/no/compiler")
    decoding.build_decoder.cache_clear()
    layout = RecordLayout.from_bits(64, 64, 8)
    assert layout is not None
    assert decoding.build_decoder(layout) is None
    decoding.build_decoder.cache_clear()
