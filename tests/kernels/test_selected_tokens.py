"""Bulks with a sketch, and bulks of records, in a fused decode step, against float64: by the torch reference and by
every kernel."""

import math
from dataclasses import replace

import pytest
import torch
from compilers import needs_compiler
from decode_scene import Scene, step_of
from quick_cases import mark_rest_slow
from record_scene import RecordScene
from sketch_reference import BITS
from steps import COMPILED, EVERY, KERNEL, REFERENCE, Path, interpreter, run

from qada_cache.kernels import cpu, decode_reference
from qada_cache.kernels import triton as triton_decode
from qada_cache.kernels.choice import choose_kernel
from qada_cache.kernels.cpu.compiled_decode import fused_parts
from qada_cache.kernels.triton.turn import fused_turn
from qada_cache.sketch import coded

pytestmark = pytest.mark.usefixtures("short_rows")

BULK: dict[type[Scene], list[tuple[int, int]]] = {
    Scene: [(257, 5), (0, 1), (63, 0), (39, 9), (111, 70)],
    RecordScene: [(201, 5), (39, 1), (290, 0)],
}
EACH_KIND = pytest.mark.parametrize("kind", BULK)


SIZES = [  # of each dtype with each dimension there are cases without a sketch
    (64, 64, torch.float32),
    (128, 128, torch.bfloat16),
    (96, 80, torch.float32),
    (32, 64, torch.float16),
    (256, 256, torch.float16),
    (512, 64, torch.float32),  # more channels than a byte numbers
]
ALL = {"token_threshold": 0.0}  # are read of each head
# Two of the numbers of bits for each of the sizes, every one with several.
SIZES_AND_BITS = [(*size, BITS[(index + more) % len(BITS)]) for index, size in enumerate(SIZES) for more in (0, 2)]


@EVERY
@pytest.mark.parametrize(("dim", "value_dim", "dtype", "bits"), mark_rest_slow(SIZES_AND_BITS, 6))
def test_dtypes_dimensions_bits(path: Path, dim: int, value_dim: int, dtype: torch.dtype, bits: float) -> None:
    scene = Scene(bulk=[(111, 9), (63, 0), (39, 1)], short=(2,), dim=dim, value_dim=value_dim, dtype=dtype, bits=bits)
    assert 0.05 < run(path, scene).share < 0.7


# Sizes that fill blocks and such that do not, words and bytes, one, two and three terms of weights; other tests have
# records of bfloat16 at 8 bits, and those that select by 1.5 bits.
SIZES_OF_RECORDS = [
    (128, 128, torch.bfloat16, 2, 4, 4),
    (80, 96, torch.float16, 1, 3, 4),
    (96, 80, torch.float32, 4, 2, 8),
    (128, 128, torch.float32, 1.5, 7, 4),
    (80, 80, torch.bfloat16, 1.5, 8, 8),
    (24, 8, torch.float32, 3, 5, 8),
    (8, 16, torch.bfloat16, 2, 1, 4),
    (256, 64, torch.float16, 1.5, 3, 8),
    (256, 256, torch.float16, 1.5, 1, 8),
]


@EVERY
@pytest.mark.parametrize("selects", [True, False])
@pytest.mark.parametrize(("dim", "value_dim", "dtype", "bits", "group", "rung"), mark_rest_slow(SIZES_OF_RECORDS, 3))
def test_records(
    path: Path, dim: int, value_dim: int, dtype: torch.dtype, bits: float, group: int, rung: int, selects: bool
) -> None:
    """Rows in records, long and short, are read as float64 reads them."""
    sizes = {"dim": dim, "value_dim": value_dim, "dtype": dtype, "bits": bits, "group": group, "rung": rung}
    step = run(path, RecordScene(bulk=[(201, 9), (39, 0)], short=(2,), kv_heads=1, **sizes), **{} if selects else ALL)
    assert not selects or 0.05 < step.share < 0.9


RULES = (7, "head"), (4, "any")


@EVERY
@pytest.mark.parametrize(
    ("kind", "group", "group_rule", "asked"),
    [
        *((Scene, 7, "head", 0.2), (Scene, 16, "head", 0.1), (Scene, 3, "any", 0.2)),
        *((RecordScene, 1, "head", 0.1), *((RecordScene, *rule, asked) for rule in RULES for asked in (0.1, 0))),
    ],
)
def test_decided_heads(path: Path, kind: type[Scene], group: int, group_rule: str, asked: float) -> None:
    """Only long-context heads read: all, or tokens, so many for each head; what one asks for all of them read."""
    scene = kind(bulk=BULK[kind], group=group, dtype=torch.bfloat16, bits=2)
    decision = {"threshold": scene.threshold(group_rule), "group_rule": group_rule}
    step = run(path, scene, token_threshold=scene.token_threshold(asked) if asked else 0, **decision)
    assert not asked or 0.02 < step.share < 0.8


@pytest.mark.parametrize("path", [REFERENCE, COMPILED])
def test_large_groups_over_records(path: Path) -> None:
    test_decided_heads(path, RecordScene, 16, "head", 0.1)


@EVERY
@pytest.mark.parametrize("selects", [True, False])
@pytest.mark.parametrize(
    ("dim", "value_dim", "group", "dtype"),
    mark_rest_slow([(72, 64, 9, torch.bfloat16), (40, 24, 5, torch.float32), (576, 512, 16, torch.float16)], 2),
)
def test_values_in_keys(path: Path, dim: int, value_dim: int, group: int, dtype: torch.dtype, selects: bool) -> None:
    """Kernels read tokens like latents: one key for all heads, whose first channels are the value."""
    sizes = {"kv_heads": 1, "group": group, "dim": dim, "value_dim": value_dim, "shared": True}
    scene = Scene(bulk=[(257, 5), (39, 9), (63, 0)], dtype=dtype, bits=2 if selects else 0, **sizes)
    asked = scene.token_threshold(0.1) if selects else None
    step = run(path, scene, token_threshold=asked, threshold=scene.threshold())
    assert not selects or 0.02 < step.share < 0.8


@EVERY
@pytest.mark.parametrize("selects", [True, False])
@pytest.mark.parametrize(
    ("dim", "value_dim", "group", "dtype", "rung"),
    [(72, 64, 9, torch.bfloat16, 4), (576, 512, 16, torch.bfloat16, 8)],
)
def test_values_in_keys_of_records(
    path: Path, dim: int, value_dim: int, group: int, dtype: torch.dtype, rung: int, selects: bool
) -> None:
    """Values that are the first channels of keys are decoded from the keys' records."""
    sizes = {"kv_heads": 1, "group": group, "dim": dim, "value_dim": value_dim, "shared": True}
    bulk = [(193, 5), (0, 1), (63, 0)] + [(331, 70)] * (dim < 576)  # which the interpreter takes seconds for
    scene = RecordScene(bulk=bulk, dtype=dtype, bits=1.5, rung=rung, **sizes)
    asked = scene.token_threshold(0.1) if selects else 0
    step = run(path, scene, token_threshold=asked, threshold=scene.threshold())
    assert not selects or 0.02 < step.share < 0.8


@pytest.mark.parametrize(
    ("kind", "bulk", "kernels"),
    [
        *(
            pytest.param(kind, [(257, 5)], "auto", marks=needs_compiler, id=f"compiled, {kind.__name__}")
            for kind in BULK
        ),
        pytest.param(Scene, [(257, 5)], "triton", marks=interpreter, id="interpreter"),
        pytest.param(Scene, [(257, 5), (141, 0)], "triton", marks=interpreter, id="interpreter, two rows"),
        pytest.param(RecordScene, [(257, 5)], "triton", marks=interpreter, id="interpreter, records"),
    ],
)
def test_more_heads_than_a_kernel_takes(
    kind: type[Scene], bulk: list[tuple[int, int]], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are parts, each of which decides and selects as if it were alone; what several read counts once."""
    scene = kind(bulk=bulk, short=(), kv_heads=1, group=18, dim=72, value_dim=64, shared=True, bits=2)
    theta = scene.token_threshold(0.1)
    query, rows, layer = step_of(**scene.step_arguments("cpu", theta, threshold=scene.threshold()))
    monkeypatch.setattr(cpu, "MIN_TOKENS", 200)
    call = query.states, layer.bulk_keys, layer.bulk_values, "gaussian", kernels
    kernel = choose_kernel(*call, records=layer.records)
    assert kernel is {"auto": fused_parts, "triton": fused_turn}[kernels]
    found, flags = kernel(query, rows, layer)
    read = [torch.zeros(tokens, dtype=torch.bool) for tokens, _ in bulk]
    for part in (slice(0, 9), slice(9, 18)):
        own = replace(query, states=query.states[:, part], log_bulk=query.log_bulk[:, :, part].contiguous())
        wanted, decided = decode_reference.decode_step(
            own, rows, replace(layer, bulk_read_bytes=None, sketch_read_bytes=None)
        )
        torch.testing.assert_close(found[:, part], wanted, atol=1e-5, rtol=1e-5)
        assert torch.equal(flags[:, :, part], decided)
        for row, tokens in enumerate(read):
            tokens |= (scene.log_shares(row, 0)[part] >= math.log(theta))[decided[row, 0, :, 0]].any(dim=0)
    assert layer.bulk_read_bytes == torch.cat(read).sum() * (layer.records.layout.size if layer.records else 72 * 4)
    assert layer.sketch_read_bytes == scene.sketch_read_bytes({(row, 0): each for row, each in enumerate(read)}, flags)
    assert all(0.02 < tokens.float().mean() < 0.9 for tokens in read)


@EVERY
@EACH_KIND
@pytest.mark.parametrize(("token_threshold", "expected"), [(1e-30, 1.0), (1e9, 0.0)])
def test_from_no_token_to_all(path: Path, kind: type[Scene], token_threshold: float, expected: float) -> None:
    assert run(path, kind(bulk=BULK[kind], bits=2), token_threshold=token_threshold).share == expected


@pytest.mark.parametrize("path", [KERNEL])
@pytest.mark.parametrize(
    ("dim", "shared", "copied", "step"),
    [(128, False, (), 32), (80, False, (), 4), (80, False, ("cpu",), 32), (96, True, (), 32), (72, True, (), 4)],
)
def test_where_records_lie(
    path: Path, dim: int, shared: bool, copied: tuple[str, ...], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are read right on the device and behind a bus, at strides of multiples of several numbers of bytes."""
    monkeypatch.setattr(triton_decode.sizing, "COPIED", copied)
    monkeypatch.setitem(coded.STRIDES, "cpu", step)
    value_dim = dim - 8 if shared else dim
    sizes = {"dim": dim, "value_dim": value_dim, "dtype": torch.bfloat16, "bits": 1.5, "group": 4, "shared": shared}
    run(path, RecordScene(bulk=[(201, 9), (39, 0)], short=(2,), kv_heads=1, **sizes))
