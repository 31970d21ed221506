"""The host's work to store tokens on a GPU: torch's operations and Triton's launches. Both store the same."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from operations import Operations
from small_sketch import small_sketch
from stand_in import Copies, accelerator
from torch import Tensor

from qada_cache.kernels import coding, copying, correlating
from qada_cache.sketch import find_segment_start
from qada_cache.storage import TokenStore
from qada_cache.storage.placement import Placement

pytest.importorskip("triton", reason="triton is not installed: pip install triton", exc_type=ModuleNotFoundError)
from qada_cache.kernels.triton import launching
from qada_cache.kernels.triton.coding import code_segments
from qada_cache.kernels.triton.correlating import take_in as triton_take_in
from qada_cache.kernels.triton.decoding import decode_tokens
from qada_cache.kernels.triton.deriving import derive
from qada_cache.kernels.triton.kernels import INTERPRETED
from qada_cache.kernels.triton.recording import code_records

DIM, VALUE_DIM, HEADS, SINKS, WINDOW = 32, 16, 2, 3, 20
PROMPT, DECODED = 300, 200
VIEWS = {
    *("alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "squeeze", "t", "transpose"),
    *(
        "split_with_sizes",
        "unbind",
        "unsqueeze",
        "view",
        "_unsafe_view",
        "_reshape_alias",
        "empty",
        "empty_like",
        "new_empty",
    ),
}  # which launch nothing


@pytest.fixture(autouse=True)
def small_segments() -> Iterator[None]:
    with small_sketch(40, 64):
        yield


@pytest.fixture
def triton_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels store and code tokens, as on a GPU after their trials."""
    for module in (coding, copying, correlating):
        monkeypatch.setattr(module, "AUTO_DEVICES", ("cpu",))
    monkeypatch.setattr(copying, "_agrees", lambda *_: True)
    monkeypatch.setattr(correlating, "_find_kernel", lambda *_: triton_take_in)
    coder = coding.Coder(code_segments, derive, code_records, decode_tokens)
    monkeypatch.setattr(coding, "_find_coder", lambda *_: coder)


def make_tokens(count: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, HEADS, count, dim, generator=made) for dim in (DIM, VALUE_DIM))
    return (keys + keys[:, :, :1]).to(torch.bfloat16), values.to(torch.bfloat16)


def make_store(keys: Tensor, values: Tensor, bulk_bits: int, *, offloading: bool = False) -> TokenStore:
    sizes = {"sinks": SINKS, "window": WINDOW, "bulk_bits": bulk_bits}
    store = TokenStore(keys, values, offloading=offloading, placement=Placement(0), layer=0, **sizes)
    store.keep_moments(track=True, update=True)
    store.keep_sketch(2, torch.arange(1.0, 1 + HEADS * DIM).view(HEADS, DIM), select=True)
    return store


def fill(keys: Tensor, values: Tensor, bulk_bits: int, *, offloading: bool = False) -> TokenStore:
    """A prompt, and then token after token."""
    store = make_store(keys, values, bulk_bits, offloading=offloading)
    store.absorb(keys[:, :, :PROMPT], values[:, :, :PROMPT], None)
    for token in range(PROMPT, keys.shape[2]):
        store.append(keys[:, :, token : token + 1], values[:, :, token : token + 1], None)
    return store


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("offloading", [False, True])
@pytest.mark.parametrize("bulk_bits", [16, 8])
def test_both_store_alike(bulk_bits: int, offloading: bool, request: pytest.FixtureRequest) -> None:
    keys, values = make_tokens(PROMPT + DECODED)
    stores = [fill(keys, values, bulk_bits)]
    request.getfixturevalue("triton_codes")
    with accelerator() if offloading else nullcontext():
        stores.append(fill(keys, values, bulk_bits, offloading=offloading))
        stores[1].bulk.synchronize()
    bulks = [store.bulk for store in stores]
    moments = [store.moments for store in stores]
    assert moments[0] is not None
    assert moments[1] is not None
    torch.testing.assert_close(moments[1].mean, moments[0].mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moments[1].covariance, moments[0].covariance, rtol=1e-5, atol=1e-5)
    for one, other in zip(*(bulk.tensors for bulk in bulks), strict=True):
        stored = slice(0, bulks[0].stored[0])
        assert (one[:, :, stored] == other[:, :, stored]).float().mean() > 0.99
    expected, found = (bulk.sketch for bulk in bulks)
    assert expected is not None
    assert found is not None
    assert found.lengths == expected.lengths > [PROMPT]
    for name, one in expected.record.items():
        other = found.record[name]
        if isinstance(one, Tensor) and one.is_floating_point():
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5)
        elif isinstance(one, Tensor):
            assert (other == one).float().mean() > 0.99, name
    for name in ("noise", "variances", "slope_units"):
        one, other = (getattr(sketch.tensors, name) for sketch in (expected, found))
        torch.testing.assert_close(other, one, rtol=1e-3, atol=0)


def list_launches(work: Operations) -> list[str]:
    """Names of the operations that take a launch."""
    return [name for each in work.called if (name := each.overloadpacket.__name__) not in VIEWS]


@pytest.mark.usefixtures("triton_codes")
@pytest.mark.parametrize(("bulk_bits", "of_records"), [(16, []), (8, ["record_kernel"])])
def test_a_flush_takes_few_launches(bulk_bits: int, of_records: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of Triton's kernels; each of torch's operations takes the host some 25 microseconds."""
    launched: list[str] = []
    monkeypatch.setattr(launching.Launches, "launch", lambda _, kernel, *__: launched.append(kernel.__name__))
    keys, values = make_tokens(PROMPT + DECODED)
    store = make_store(keys, values, bulk_bits)
    with Operations() as work:
        store.absorb(keys[:, :, :PROMPT], values[:, :, :PROMPT], None)
    of_segments = ["describe_kernel", "code_kernel", "scale_kernel"]
    of_moments = ["correlate_kernel", "merge_kernel"]  # of values and keys, then of keys
    # Closed segments, then the open one.
    every = [*[*of_segments, *of_records] * 2, *of_moments, "derive_kernel", *of_moments]
    assert launched == every
    operations = list_launches(work)
    assert len(operations) + len(launched) <= 40, operations
    steps = []
    for token in range(PROMPT, PROMPT + DECODED):
        launched.clear()
        with Operations() as work:
            store.append(keys[:, :, token : token + 1], values[:, :, token : token + 1], None)
        operations = list_launches(work)
        steps.append((len(operations) + len(launched), operations, list(launched)))
    most = max(steps)
    assert most[0] <= 45, most[1]
    assert most[2] == every
    assert sum(count > 2 for count, *_ in steps) == 1  # 128 tokens and more at once


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("bulk_bits", [16, 8, 4])
def test_what_a_flush_brings_back_from_the_host(bulk_bits: int, device: str, copies: Copies) -> None:
    """A flush of a bulk in few bits reads nothing from the host, as its open segment lies on the device. One in 16 bits
    reads the open segment's tokens, head by head, since they are coded again."""
    keys, values = make_tokens(PROMPT + DECODED)
    store = make_store(keys, values, bulk_bits, offloading=True)
    store.absorb(keys[:, :, :PROMPT], values[:, :, :PROMPT], None)
    known = store.bulk.lengths[0]
    opened = known - find_segment_start(known)
    copies.count = copies.bytes = 0
    for token in range(PROMPT, PROMPT + DECODED):
        store.append(keys[:, :, token : token + 1], values[:, :, token : token + 1], None)
        if store.bulk.lengths[0] > known:
            break
    assert store.bulk.lengths[0] > known
    assert opened > 0
    assert copies.bytes == (HEADS * opened * (DIM + VALUE_DIM) * keys.element_size() if bulk_bits == 16 else 0)
    assert (copies.count > 0) == (bulk_bits == 16)
