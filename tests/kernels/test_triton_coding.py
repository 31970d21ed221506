"""Triton's kernels that code keys as they are stored, against torch's definition, interpreted and on a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from quick_cases import mark_rest_slow
from small_sketch import small_sketch
from torch import Tensor

from qada_cache.kernels import coding as dispatch
from qada_cache.kernels.coding import Coder, choose_coder, find_coding_fault
from qada_cache.sketch import Layout, codec, count_segments
from qada_cache.sketch.codec import Sketch, list_fields
from qada_cache.sketch.coded import RecordLayout, code_tokens, estimate_keys

pytest.importorskip("triton", reason="triton is not installed: pip install triton", exc_type=ModuleNotFoundError)
from steps import DEVICES, interpreter

from qada_cache.kernels.triton import coding, decoding, deriving, recording
from qada_cache.kernels.triton.kernels import INTERPRETED

SEGMENT = 32
ROWS, HEADS, BEFORE, BEHIND = 3, 2, 2, 90  # rows of a sketch; segments in front; room for tokens behind
OF_TOKENS = "codes", "scales"


@pytest.fixture(autouse=True)
def small_segments() -> Iterator[None]:
    with small_sketch(40, SEGMENT):
        yield


def make_keys(tokens: int, dim: int, dtype: torch.dtype, rows: int = 1) -> tuple[Tensor, Tensor]:
    """Keys `[rows, HEADS, tokens, dim]` whose channels differ as a model's do, and query energies. Means of segments
    lie on numbers of bfloat16: halfway between two, sums in another order give another centre."""
    made = torch.Generator().manual_seed(dim + tokens)
    spread, middle = torch.randn(2, 1, HEADS, 1, dim, generator=made)
    keys = torch.randn(rows, HEADS, tokens, dim, generator=made)
    for segment in range(count_segments(tokens)):
        own = keys[
            :, :, segment * SEGMENT : (segment + 1) * SEGMENT if segment < count_segments(tokens) - 1 else tokens
        ]
        own -= own.mean(dim=-2, keepdim=True)
    keys = keys * spread.exp() + (3 * middle).bfloat16()
    return keys.to(dtype), (2 * torch.randn(HEADS, dim, generator=made)).exp()


def code(
    keys: Tensor, energies: Tensor | None, layout: Layout, *, row: int = 1, before: int = BEFORE, device: str = "cpu"
) -> dict[str, Tensor]:
    """Code keys of rows from `row` on, behind `before` segments; return the sketch's new parts on the host. Asserts
    that the kernels changed nothing else."""
    rows, tokens = len(keys), keys.shape[2]
    fields = list_fields(layout.dim, 8, layout.count, before * SEGMENT + tokens + BEHIND).items()
    made = {name: torch.full((ROWS, HEADS, *shape), 77, dtype=kind, device=device) for name, (kind, shape) in fields}
    given = keys.to(device), None if energies is None else energies.to(device)
    coding.code_segments(Sketch(**made), slice(row, row + rows), before, *given)
    found = {}
    for name, tensor in made.items():
        rest = tensor.cpu()
        if name in ("units", "centres", "order", "weights", "mean_squares"):
            place = (slice(row, row + rows), slice(None), slice(before, before + count_segments(tokens)))
        elif name in OF_TOKENS:
            place = (slice(row, row + rows), ..., slice(before * SEGMENT, before * SEGMENT + tokens))
        else:
            assert (rest == 77).all(), name
            continue
        found[name] = rest[place].clone()
        rest[place] = 77
        assert (rest == 77).all(), f"{name} of other tokens"
    return found


def find_error(keys: Tensor, made: dict[str, Tensor], energies: Tensor, layout: Layout) -> float:
    """The squared error of scores, summed over tokens, that the sketch has for queries of these energies."""
    off = keys.float() - estimate_keys(made, layout)
    return float((off.square() * energies[:, None]).sum())


@DEVICES
@pytest.mark.parametrize(
    ("dim", "bits", "dtype", "tokens"),
    mark_rest_slow(
        [
            (64, 1.5, torch.float32, 2 * SEGMENT + 30),
            (128, 1.5, torch.bfloat16, 2 * SEGMENT + 7),  # whose last segment is longer than the others
            (128, 4, torch.float16, SEGMENT),
            (80, 2, torch.float16, SEGMENT + 27),
            (96, 4, torch.bfloat16, 17),
            (256, 1, torch.float32, SEGMENT + 21),
            (256, 2, torch.bfloat16, 39),
            (24, 0.5, torch.float32, 3 * SEGMENT),
        ],
        4,
    ),
)
@pytest.mark.parametrize("known", [True, False])
def test_codes_are_those_of_torch(
    dim: int, bits: float, dtype: torch.dtype, tokens: int, known: bool, device: str
) -> None:
    """Codes equal torch's, except for ties that sums in another order break in another way."""
    keys, energies = make_keys(tokens, dim, dtype, rows=2)
    layout = Layout.from_bits(dim, bits)
    assert layout is not None
    expected = codec.quantize_segments(keys, energies.expand(2, -1, -1) if known else None, layout)
    found = code(keys, energies if known else None, layout, device=device)
    for name, one in expected.items():
        assert (found[name].dtype, found[name].shape) == (one.dtype, one.shape), name
        if one.is_floating_point():
            close = 1 / 128 if one.dtype == torch.bfloat16 else 1e-3
            torch.testing.assert_close(
                found[name], one, rtol=close, atol=0, msg=lambda text, name=name: f"{name}: {text}"
            )
        else:
            assert (found[name] == one).float().mean() >= 0.995, name
    assert find_error(keys, found, energies, layout) <= 1.0005 * find_error(keys, expected, energies, layout)


@DEVICES
@pytest.mark.parametrize("factor", [1e-14, 1e-19, 3e-20, 1e-21, 1e-30, 1e-40, 0.0])
def test_small_keys(factor: float, device: str) -> None:
    """However small keys are, nothing of their codes is infinite or not a number."""
    keys, energies = make_keys(SEGMENT + 20, 64, torch.float32)
    layout = Layout.from_bits(64, 4)
    assert layout is not None
    keys = keys * factor
    for known in (energies, None):
        found = code(keys, known, layout, device=device)
        expected = codec.quantize_segments(keys, None if known is None else known.expand(1, -1, -1), layout)
        assert all(part.isfinite().all() for part in found.values())
        off, least = ((keys - estimate_keys(made, layout)).double().square().sum() for made in (found, expected))
        assert off <= 1.01 * least or factor == 1e-40  # the interpreter has other bfloat16 for subnormal numbers


@DEVICES
def test_what_else_there_is_changes_nothing(device: str) -> None:
    """The same tokens, alone or among others, in other strides, at other addresses, to the bit."""
    tokens, dim = 2 * SEGMENT + 20, 32
    keys, energies = make_keys(tokens, dim, torch.bfloat16, rows=2)
    layout = Layout.from_bits(dim, 1.5)
    assert layout is not None
    alone = code(keys[:1], energies, layout, device=device)
    between = keys.transpose(1, 2).contiguous().transpose(1, 2)
    unaligned = torch.empty(keys.numel() + 1, dtype=keys.dtype, device=device)[1:].view_as(keys).copy_(keys)
    segment = keys[:1, :, SEGMENT : 2 * SEGMENT]
    for given, mine, row, before, first, stop in (
        (keys, 0, 1, BEFORE, 0, tokens),
        (keys.flip(0), 1, 0, 0, 0, tokens),
        (between, 0, 0, 1, 0, tokens),
        (unaligned, 0, 1, BEFORE, 0, tokens),
        (segment, 0, 2, 3, SEGMENT, 2 * SEGMENT),
    ):
        found = code(given, energies, layout, row=row, before=before, device=device)
        for name, one in alone.items():
            if name in OF_TOKENS:
                one = one[..., first:stop]
            elif stop < tokens:
                one = one[:, :, first // SEGMENT : stop // SEGMENT]
            assert torch.equal(found[name][mine : mine + 1], one), name


@DEVICES
def test_keys_that_do_not_differ(device: str) -> None:
    """Channels, or all of a key, that are the same in every token: nothing is divided by 0."""
    keys, energies = make_keys(SEGMENT, 32, torch.float32)
    keys[..., 3:20] = 1.0
    keys[:, 1] = -2.0
    layout = Layout.from_bits(32, 2)
    assert layout is not None
    expected = codec.quantize_segments(keys, energies[None], layout)
    found = code(keys, energies, layout, device=device)
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-3, atol=0)


@DEVICES
@pytest.mark.parametrize(
    ("dim", "value_dim", "bits", "length"),
    [
        (128, 64, 1.5, 20 * SEGMENT + 9),
        (80, 96, 2, 50),
        (64, 8, 1, 40 * SEGMENT),
        (96, 256, 4, SEGMENT + 17),
        (256, 80, 1.5, 3 * SEGMENT),
    ],
)
def test_what_follows_is_that_of_torch(dim: int, value_dim: int, bits: float, length: int, device: str) -> None:
    """The fields that are derived from segments equal torch's, for two rows of three; the other is left alone."""
    layout, made = Layout.from_bits(dim, bits), torch.Generator().manual_seed(dim)
    assert layout is not None
    shapes = list_fields(dim, value_dim, layout.count, length + BEHIND)
    kept = {name: torch.zeros(ROWS, HEADS, *shape, dtype=kind) for name, (kind, shape) in shapes.items()}
    segments, shape = count_segments(length), kept["order"].shape
    kept["order"][:] = torch.rand(shape, generator=made).argsort(dim=-1)
    kept["weights"][:] = torch.randn(shape, generator=made).exp()
    kept["mean_squares"][:] = torch.randn(shape[:-1], generator=made).exp()
    covariance = torch.randn(ROWS, HEADS, value_dim, dim, generator=made) * torch.randn(dim, generator=made).exp()
    covariance[..., 3] = 0.0
    there = {name: tensor.to(device, copy=True) for name, tensor in kept.items()}
    deriving.derive(Sketch(**there), slice(1, 3), length, covariance.to(device))
    used = {name: kept[name][1:, :, :segments] for name in ("units", "order", "weights", "mean_squares")}
    expected = codec.average_channels(used, layout, length) | codec.round_slopes(covariance[1:])
    for name, tensor in there.items():
        assert torch.equal(tensor[:1].cpu(), kept[name][:1]), name
        if name not in expected:
            assert torch.equal(tensor.cpu(), kept[name]), name
        elif name == "slopes":
            assert (tensor[1:].cpu() == expected[name]).float().mean() > 0.999
        else:
            torch.testing.assert_close(tensor[1:].cpu(), expected[name], rtol=1e-5, atol=0)


@DEVICES
@pytest.mark.parametrize("following", [2 * SEGMENT, SEGMENT // 4, SEGMENT + SEGMENT // 4 - 1])
@pytest.mark.parametrize(
    ("dim", "value_dim", "bits", "rung", "dtype"),
    [
        (128, 64, 1.5, 8, torch.bfloat16),
        (64, 128, 1, 4, torch.bfloat16),
        (80, 40, 2, 8, torch.float16),
        (24, 8, 4, 8, torch.float32),
        (96, 80, 4, 4, torch.float32),
        pytest.param(256, 256, 1.5, 4, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_records_are_those_of_torch(
    dim: int, value_dim: int, bits: float, rung: int, dtype: torch.dtype, following: int, device: str
) -> None:
    """Records of some segments of one row equal torch's: of two closed segments, or of the last, of any length."""
    keys, energies = make_keys(SEGMENT + following, dim, dtype, rows=ROWS)
    values, _ = make_keys(SEGMENT + following, value_dim, dtype, rows=ROWS)
    layout, records = Layout.from_bits(dim, bits), RecordLayout.from_bits(dim, value_dim, rung)
    assert layout is not None
    assert records is not None
    sketch, weights = Sketch.of(keys, values, energies.expand(ROWS, -1, -1), layout), energies.sqrt()
    own, rest, first = slice(1, 2), slice(SEGMENT, None), 1
    made = {name: tensor[own] for name, tensor in sketch.to_tensors().items()}
    made |= {name: made[name][..., rest] for name in OF_TOKENS}
    made |= {name: made[name][:, :, first:] for name in ("units", "centres", "order", "weights")}
    given = keys[own, :, rest], values[own, :, rest]
    expected = code_tokens(*given, estimate_keys(made, layout), weights, records)
    there = sketch.map(lambda tensor: tensor.to(device))
    told = (*(part.to(device) for part in given), weights.to(device), records)
    found = recording.code_records(there, own, first, *told).cpu()
    stride = records.find_stride(torch.device(device))
    assert (found.dtype, found.shape) == (torch.uint8, (*expected.shape[:3], stride))
    assert (found[..., : expected.shape[3]] == expected).float().mean() > 0.999


@interpreter
def test_a_trial_tells_what_is_wrong() -> None:
    layout = Layout.from_bits(32, 1)
    assert layout is not None

    def swapped(sketch: Sketch, rows: slice, first: int, keys: Tensor, energies: Tensor | None) -> None:
        coding.code_segments(sketch, rows, first, keys.flip(-2), energies)

    def earlier(sketch: Sketch, rows: slice, first: int, keys: Tensor, *rest: Any) -> Tensor:
        return recording.code_records(sketch, rows, first, keys.roll(1, -2), *rest)

    def shorter(sketch: Sketch, rows: slice, length: int, covariance: Tensor) -> None:
        deriving.derive(sketch, rows, length - 1, covariance)

    def later(records: Tensor, *given: Any, **told: Any) -> tuple[Tensor, ...]:
        return decoding.decode_tokens(records.roll(1, 2), *given, **told)

    right = Coder(coding.code_segments, deriving.derive, recording.code_records, decoding.decode_tokens)
    for plain, off, wrong in (
        (False, "decisions", ({"code": swapped}, {"record": earlier})),
        (True, "it is off", ({"derive": shorter}, {"decode": later})),
    ):
        told = torch.device("cpu"), torch.float32, layout, 24, plain
        assert find_coding_fault(right, *told) is None
        assert all(off in str(find_coding_fault(right._replace(**change), *told)) for change in wrong)


def test_torch_codes_where_triton_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, cpu = Layout.from_bits(32, 1), torch.device("cpu")
    assert layout is not None
    assert choose_coder("auto", cpu, torch.float32, layout, 20, plain=True) is None
    monkeypatch.setattr(dispatch, "AUTO_DEVICES", ("cpu",))
    dispatch._find_coder.cache_clear()
    found = choose_coder("auto", cpu, torch.float32, layout, 20, plain=True)
    made = coding.code_segments, deriving.derive, recording.code_records, decoding.decode_tokens
    assert found == (made if INTERPRETED else None)
    assert choose_coder("auto", cpu, torch.float64, layout, 20, plain=True) is None
    assert choose_coder("torch", cpu, torch.float32, layout, 20, plain=True) is None
