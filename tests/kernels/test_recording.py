"""Records that the compiled kernel makes, and whole bulks of them, decoded by it."""

from collections.abc import Iterator

import pytest
import record_reference
import torch
from compilers import needs_compiler
from models import prompt as words
from models import tiny
from test_instruction_sets import SETS

from qada_cache import QAdACache
from qada_cache.kernels.cpu import building, prompt, recording
from qada_cache.sketch import Layout, count_closed, count_segments
from qada_cache.sketch.codec import Sketch
from qada_cache.sketch.coded import RecordLayout, code_tokens, estimate_keys, find_query_weights
from qada_cache.storage import coded_bulk
from qada_cache.versions import pass_cache

TOKENS = 1300
pytestmark = needs_compiler


# Each is a build. The widest vectors are those that sizes may not fill.
SIZES = [(64, 64, 1.5, 8), (80, 48, 4, 4), (136, 24, 0.5, 8)]
BUILDS = [(size, processor) for processor in list(SETS)[-1:] for size in SIZES]
BUILDS += [(size, processor) for size, processor in zip(SIZES[1:], list(SETS)[:-1], strict=False)]
LAYOUTS = [(1, 2), (2, 3), (0, 1)]  # two dimensions of keys change places in memory; models lay them as the first one
EVERY = pytest.mark.parametrize(("size", "built_for"), BUILDS, indirect=["built_for"])


@pytest.fixture
def built_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not SETS[request.param] <= prompt.read_instructions():
        pytest.skip("the processor cannot run it")
    own = f"-march={request.param}"
    monkeypatch.setattr(building, "FLAGS", tuple(own if f.endswith("=native") else f for f in building.FLAGS))
    recording.build_coder.cache_clear()
    yield
    recording.build_coder.cache_clear()


@EVERY
def test_equals_float64(size: tuple[int, int, float, int], built_for: None) -> None:
    """Spans that begin and end anywhere, of some heads and rows."""
    dim, value_dim, bits, rung = size
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
        found = recording.decode_records(records[at][:, :, span], part, weights[at[1]], records_layout, **told_of)
        assert found is not None
        residual, value = (one[span] for one in expected[rows][heads])
        key = told[rows][heads][span] + residual / weights[heads].double()
        for one, true in zip(found, (key, value), strict=True):
            torch.testing.assert_close(one[0, 0].double(), true, rtol=1e-6, atol=2e-6 * float(true.abs().max()))
    every, at = {"first": 0, "segments": segments}, (slice(0, 1), slice(1, 2))
    part = sketch.map(lambda tensor: tensor[at])
    together = recording.decode_records(records, sketch, weights, records_layout, **every)
    alone = recording.decode_records(records[at], part, weights[1:2], records_layout, **every)
    assert together is not None
    assert alone is not None
    torch.testing.assert_close(together[0][0, 1], alone[0][0, 0], rtol=0, atol=0)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_records_are_those_of_torch(size: tuple[int, int, float, int], dtype: torch.dtype, built_for: None) -> None:
    """Records equal torch's, except for numbers near the middle of two levels. Spans begin and end at segments."""
    dim, value_dim, bits, rung = size
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(2, 3, TOKENS, size, generator=generator).to(dtype) for size in (dim, value_dim))
    values[0, 0, 7], keys[0, 0, 9], values[0, 1, 3, 0] = 0, 0, torch.nan
    energies, layout = torch.rand(3, dim, generator=generator), Layout.from_bits(dim, bits)
    records_layout = RecordLayout.from_bits(dim, value_dim, rung)
    assert layout is not None
    assert records_layout is not None
    sketch, weights = Sketch.of(keys, values, energies, layout), find_query_weights(energies, dim, keys.device)
    predicted = estimate_keys(sketch.to_tensors(), layout)
    expected, segments = code_tokens(keys, values, predicted, weights, records_layout), count_segments(TOKENS)
    closed = count_closed(TOKENS)
    for (start, stop), (one, other) in zip(((0, closed), (closed, TOKENS), (512, TOKENS)), LAYOUTS, strict=True):
        parts = [part.transpose(one, other).contiguous().transpose(one, other) for part in (keys, values)]
        parts = [part[:, :, start:stop] for part in parts]
        found = recording.code_records(*parts, sketch, weights, records_layout, first=start, segments=segments)
        assert found is not None
        scales = (part[..., :4].contiguous().view(torch.bfloat16) for part in (found, expected[:, :, start:stop]))
        torch.testing.assert_close(*scales, rtol=2**-7, atol=0, equal_nan=True)
        alike = (found == expected[:, :, start:stop]).float()
        assert float(alike.mean()) > 0.999
        assert float(alike[..., -2:].mean()) > 0.999


@pytest.mark.parametrize("bits", [8, 4])
@torch.inference_mode()
def test_long_turns_are_those_of_torch(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn longer than a window reads whole bulks, of rows that differ in length; torch decodes them without it."""
    model, (ids, mask) = tiny(head_dim=32), words(2000, 1400)
    cache = QAdACache(model, bulk_bits=bits, moments="current")
    model(ids, attention_mask=mask, **pass_cache(cache))
    turn, calls = words(130, seed=3)[0].repeat(2, 1), []
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


def test_what_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no kernel can be built, `code_records` returns None for torch to compute, and raises nothing."""
    monkeypatch.setattr(building, "find_compiler", lambda: "/no/compiler")
    recording.build_coder.cache_clear()
    layout = RecordLayout.from_bits(64, 64, 8)
    assert layout is not None
    assert recording.build_coder(layout) is None
    sketch = Sketch.of(*torch.randn(2, 1, 1, 1300, 64), None, Layout.from_bits(64, 1.5))
    told = sketch, torch.ones(64), layout
    assert recording.code_records(*torch.randn(2, 1, 1, 20, 64), *told, first=0, segments=2) is None
    recording.build_coder.cache_clear()
