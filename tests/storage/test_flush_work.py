"""What storing tokens on a GPU costs the host: torch's operations and Triton's launches; and that both store alike."""

from collections.abc import Iterator

import pytest
import torch
from operations import Operations
from small_sketch import small_sketch
from stand_in import Copies
from torch import Tensor

from qada_cache.kernels import coding
from qada_cache.sketch import find_segment_start
from qada_cache.storage import TokenStore
from qada_cache.storage.placement import Placement

pytest.importorskip("triton", reason="triton is not installed: pip install triton", exc_type=ModuleNotFoundError)
from qada_cache.kernels.triton import launching
from qada_cache.kernels.triton.coding import code_segments
from qada_cache.kernels.triton.decoding import decode_tokens
from qada_cache.kernels.triton.deriving import derive
from qada_cache.kernels.triton.kernels import INTERPRETED
from qada_cache.kernels.triton.recording import code_records

DIM, VALUE_DIM, HEADS, SINKS, WINDOW = 32, 16, 2, 3, 20
PROMPT, DECODED = 300, 200
VIEWS = {
    *("alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "squeeze", "t", "transpose"),
    *("unbind", "unsqueeze", "view", "_unsafe_view", "_reshape_alias", "empty", "empty_like", "new_empty"),
}  # which launch nothing


@pytest.fixture(autouse=True)
def small_segments() -> Iterator[None]:
    with small_sketch(40, 64):
        yield


@pytest.fixture
def triton_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, once the kernels have been tried there."""
    monkeypatch.setattr(coding, "AUTO_DEVICES", ("cpu",))
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


def fill(keys: Tensor, values: Tensor, bulk_bits: int) -> TokenStore:
    """A prompt, and then token after token."""
    store = make_store(keys, values, bulk_bits)
    store.absorb(keys[:, :, :PROMPT], values[:, :, :PROMPT], None)
    for token in range(PROMPT, keys.shape[2]):
        store.append(keys[:, :, token : token + 1], values[:, :, token : token + 1], None)
    return store


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("bulk_bits", [16, 8])
def test_both_store_alike(bulk_bits: int, request: pytest.FixtureRequest) -> None:
    keys, values = make_tokens(PROMPT + DECODED)
    bulks = [fill(keys, values, bulk_bits).bulk]
    request.getfixturevalue("triton_codes")
    bulks.append(fill(keys, values, bulk_bits).bulk)
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
    """Four of Triton's kernels; each of torch's operations takes the host some 25 microseconds."""
    launched: list[str] = []
    monkeypatch.setattr(launching.Launches, "launch", lambda _, kernel, *__: launched.append(kernel.__name__))
    keys, values = make_tokens(PROMPT + DECODED)
    store = make_store(keys, values, bulk_bits)
    with Operations() as work:
        store.absorb(keys[:, :, :PROMPT], values[:, :, :PROMPT], None)
    of_segments = ["describe_kernel", "code_kernel", "scale_kernel"]
    both = [*of_segments, *of_records] * 2  # closed segments, then the open one
    assert launched == [*both, "derive_kernel"]
    operations = list_launches(work)
    assert len(operations) + len(launched) <= 50, operations
    steps = []
    for token in range(PROMPT, PROMPT + DECODED):
        launched.clear()
        with Operations() as work:
            store.append(keys[:, :, token : token + 1], values[:, :, token : token + 1], None)
        operations = list_launches(work)
        steps.append((len(operations) + len(launched), operations, list(launched)))
    most = max(steps)
    assert most[0] <= 55, most[1]
    assert most[2] == [*both, "derive_kernel"]
    assert sum(count > 2 for count, *_ in steps) == 1  # 128 tokens and more at once


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("bulk_bits", [16, 8, 4])
def test_what_a_flush_brings_back_from_the_host(bulk_bits: int, device: str, copies: Copies) -> None:
    """Of a bulk in few bits nothing, as its open segment lies on the device. Of one in 16 bits the tokens of the open
    segment, head by head, since they are coded again."""
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
