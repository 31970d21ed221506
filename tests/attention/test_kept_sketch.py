"""The sketch of a layer: where it is kept, and that it is of the tokens alone."""

from pathlib import Path

import pytest
import torch
from harness import Driver, Inputs, make_shared
from models import tiny
from stand_in import accelerator
from test_token_choice import EVERY, ask, filled, small  # noqa: F401 - a fixture
from torch import Tensor

from qada_cache import QAdACache, sketch
from qada_cache.state.layer import QAdALayer
from qada_cache.storage import TokenStore
from qada_cache.versions import pass_cache


def test_device_bytes_are_as_computed() -> None:
    """Offloaded: sinks, window and sketch, and nothing that grows faster."""
    with accelerator():
        driver, _ = filled(tokens=300, offloading=True)
        held, capacity = driver.layer.store.sketch, driver.layer.store.bulk.capacity
        kept = held.tensors
        assert (*kept.codes.shape, *kept.scales.shape) == (2, 2, 1, capacity, 2, 2, capacity)
        tokens, segments = capacity * (4 + 1), 1 * (5 * 16 + 4)  # 300 tokens are one segment
        read = 4 * 16 + 4 * 16 + 4 * 16 + 16 * 8 + 4 * 16  # noise, variances, mean value, slopes and their units
        made_of = 4 + 4 * 16 + 4 * 16 * 16  # mean square, mean key, covariance
        assert held.nbytes == 2 * 2 * (tokens + segments + read + made_of)
        assert kept.count_read_bytes(300) == 300 * (4 + 1) + segments + read


def test_file_keeps_the_sketch(tmp_path: Path) -> None:
    model = tiny("llama")
    ids = torch.randint(0, model.config.vocab_size, (1, 120), generator=torch.Generator().manual_seed(0))
    cache = QAdACache(model, sink_tokens=4, local_tokens=20, moments="current", threshold=0.99, token_threshold=1.0)
    with torch.no_grad():
        model(ids, **pass_cache(cache))
        cache.save(tmp_path / "cache.safetensors")
        loaded = QAdACache.load(tmp_path / "cache.safetensors", model)
        assert loaded.options.token_threshold == 1.0
        for mine, theirs in zip(cache.layers, loaded.layers, strict=True):
            for name, value in mine.store.sketch.record.items():
                kept = theirs.store.sketch.record[name]
                assert torch.equal(kept, value) if isinstance(value, Tensor) else kept == value
        logits = [model(ids[:, :1], **pass_cache(one)).logits for one in (cache, loaded)]
    assert torch.equal(*logits)


def test_fork_makes_or_drops_the_sketch() -> None:
    """A fork that begins or ceases to select tokens answers as a cache that did, or did not, from the start."""
    model = tiny("llama")
    ids = torch.randint(0, model.config.vocab_size, (1, 120), generator=torch.Generator().manual_seed(0))
    sizes = {"sink_tokens": 4, "local_tokens": 20, "moments": "current", "threshold": 0.99}
    whole, some = (QAdACache(model, **sizes, token_threshold=theta) for theta in (0.0, 1.0))
    with torch.no_grad():
        for cache in (whole, some):
            model(ids, **pass_cache(cache))
        forked = whole.fork(token_threshold=1.0), some.fork(token_threshold=0.0)
        assert forked[1].layers[0].store.sketch is None
        logits = [model(ids[:, :1], **pass_cache(one)).logits for one in (some, forked[0], whole, forked[1])]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(logits[3], logits[2])


def played(calls: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[list[Tensor], TokenStore]:
    """Outputs of a new layer that is given these calls, and what it holds then."""
    driver = Driver(QAdALayer(make_shared(criterion=EVERY, token_threshold=1.0, threshold=0.5), 0))
    outputs = [ask(driver, call) for call in calls]
    return outputs, driver.layer.store


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_does_not_depend_on_the_default_dtype(default: torch.dtype) -> None:
    """Outputs and sketch do not depend on torch's default dtype, which users may set."""
    inputs = Inputs(3)
    calls = [inputs(tokens) for tokens in (90, 1, 1)]
    expected = played(calls)[0]
    sketch._spread.cache_clear()
    torch.set_default_dtype(default)
    try:
        outputs, store = played(calls)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.cat(outputs, dim=2), torch.cat(expected, dim=2))
    kept = store.sketch.tensors
    assert kept.units.dtype == kept.mean_value.dtype == store.sketch.covariance.dtype == torch.float32
    assert kept.noise.dtype == torch.float32
    assert kept.centres.dtype == kept.weights.dtype == torch.bfloat16
    assert kept.slopes.dtype == torch.int8
    assert kept.slope_units.dtype == torch.float32


def test_is_the_same_under_autocast() -> None:
    """As after a fork, a crop or a load, which are outside of it."""
    inputs = Inputs(3)
    calls = [inputs(tokens) for tokens in (90, 1, 40)]
    expected = played(calls)[1].sketch.record
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = played(calls)[1].sketch.record
    for name in ("codes", "scales", "units", "centres", "order", "weights", "mean_squares"):
        assert torch.equal(found[name], expected[name])
