"""Bulks with a sketch, and bulks of records, in a fused decode step, against float64: by the torch reference and by
every kernel."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from compilers import needs_compiler
from decode_scene import Scene, step_of
from quick_cases import mark_rest_slow
from record_scene import RecordScene
from sketch_reference import BITS
from small_sketch import small_sketch
from steps import COMPILED, EVERY, GPU, KERNEL, REFERENCE, Path, interpreter, run, small_splits
from torch import Tensor

from qada_cache.kernels import cpu, decode_reference, operands
from qada_cache.kernels import triton as triton_decode
from qada_cache.kernels.choice import choose_kernel
from qada_cache.kernels.cpu.compiled_decode import fused_parts
from qada_cache.kernels.operands import OperandError
from qada_cache.kernels.triton.turn import fused_turn
from qada_cache.sketch import Layout, coded, selection
from qada_cache.sketch.codec import Sketch

BULK: dict[type[Scene], list[tuple[int, int]]] = {
    Scene: [(257, 5), (0, 1), (63, 0), (39, 9), (111, 70)],
    RecordScene: [(777, 5), (39, 1), (1153, 0)],
}
EACH_KIND = pytest.mark.parametrize("kind", BULK)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows of few tokens have a sketch, and are split; four query heads of a group are merged at once."""
    monkeypatch.setattr(triton_decode.sizing, "PART_BYTES", 2048)
    with small_sketch(40), small_splits(*Scene.splits):
        yield


SIZES = [  # of each dtype with each dimension there are cases without a sketch
    (64, 64, torch.float32),
    (128, 128, torch.bfloat16),
    (96, 80, torch.bfloat16),
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


# Sizes that fill blocks and such that do not, words and bytes, one, two and three terms of weights.
SIZES_OF_RECORDS = [
    (64, 64, torch.float32, 1.5, 1, 8),
    (64, 64, torch.bfloat16, 1.5, 3, 4),
    (128, 128, torch.bfloat16, 2, 4, 8),
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
@pytest.mark.parametrize(("dim", "value_dim", "dtype", "bits", "group", "rung"), mark_rest_slow(SIZES_OF_RECORDS, 5))
def test_records(
    path: Path, dim: int, value_dim: int, dtype: torch.dtype, bits: float, group: int, rung: int, selects: bool
) -> None:
    """Of a row that lies in records, and of a short one."""
    sizes = {"dim": dim, "value_dim": value_dim, "dtype": dtype, "bits": bits, "group": group, "rung": rung}
    step = run(path, RecordScene(bulk=[(777, 9), (39, 0)], short=(2,), kv_heads=1, **sizes), **{} if selects else ALL)
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
    """As latents are: one key for all heads, whose first channels are the value."""
    sizes = {"kv_heads": 1, "group": group, "dim": dim, "value_dim": value_dim, "shared": True}
    scene = Scene(bulk=[(257, 5), (39, 9), (63, 0)], dtype=dtype, bits=2 if selects else 0, **sizes)
    asked = scene.token_threshold(0.1) if selects else None
    step = run(path, scene, token_threshold=asked, threshold=scene.threshold())
    assert not selects or 0.02 < step.share < 0.8


@pytest.mark.parametrize("path", [REFERENCE, COMPILED])
@pytest.mark.parametrize("selects", [True, False])
@pytest.mark.parametrize(
    ("dim", "value_dim", "group", "dtype", "rung"),
    [(72, 64, 9, torch.float32, 8), (72, 64, 9, torch.bfloat16, 4), (576, 512, 16, torch.bfloat16, 8)],
)
def test_values_in_keys_of_records(
    path: Path, dim: int, value_dim: int, group: int, dtype: torch.dtype, rung: int, selects: bool
) -> None:
    """Likewise, where the channels are decoded."""
    sizes = {"kv_heads": 1, "group": group, "dim": dim, "value_dim": value_dim, "shared": True}
    scene = RecordScene(bulk=[(769, 5), (0, 1), (63, 0), (1324, 70)], dtype=dtype, bits=1.5, rung=rung, **sizes)
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


@EVERY
def test_rows_of_several_segments(path: Path) -> None:
    """Of one to three; the last ones of 572, 640 and 300 tokens, beside a row without a sketch."""
    bulk = [(572, 5), (511 + 129, 3), (512 + 639, 0), (30, 2), (1324, 9)]
    scene = Scene(bulk=bulk, short=(), dim=64, value_dim=24, dtype=torch.bfloat16, bits=2)
    for row, (tokens, _) in enumerate(bulk):  # what a segment is coded by is not what another is
        for part in (scene.keys[row][:, 3 : 3 + tokens], scene.stored[0][row, :, :tokens]):
            part[:, 512:] *= torch.linspace(0.5, 2, 64)
            part[:, 512:] += torch.linspace(-1, 1, 64)
    scene._make_sketch(scene.stored[0].shape[2], torch.Generator())
    step = run(path, scene)
    assert len(step.selected) == 8
    assert 0.05 < step.share < 0.7


@EVERY
def test_values_that_follow_keys(path: Path) -> None:
    """What stands for tokens lies far from the mean value, which is 0, by as much as each query says."""
    scene = Scene(bulk=[(257, 0)], short=(), bits=2)
    keys = scene.keys[0] - scene.keys[0][:, 3:260].mean(dim=1, keepdim=True)
    scene.values[0][:, 3:260] = scene.stored[1][0, :, :257] = keys.flip(2)[:, 3:260]
    scene._make_sketch(scene.stored[0].shape[2], torch.Generator())
    assert run(path, scene, token_threshold=1e9).share == 0


@EVERY
@EACH_KIND
def test_padding_queries(path: Path, kind: type[Scene]) -> None:
    run(path, kind(bulk=BULK[kind], padding=(0, 3), bits=2), token_threshold=1.0)


@EVERY
def test_rows_alike(path: Path) -> None:
    run(path, Scene(bulk=[(111, 3)] * 2, short=(), bits=2))


@EVERY
def test_one_key_that_outweighs_all(path: Path) -> None:
    """It is read, and by a head that reads hardly anything else; so is nothing where sinks and window have it all."""
    scene = Scene(bulk=[(257, 0)], short=(), group=1, bits=2)
    scene.keys[0][:, 100] = 6 * scene.query[0, :, 0]
    scene.stored[0][0, :, 100 - 3] = scene.keys[0][:, 100]
    scene._make_sketch(scene.stored[0].shape[2], torch.Generator())
    for tokens in run(path, scene, token_threshold=2.0).selected.values():
        assert tokens[100 - 3]
        assert tokens.sum() < 10


@EVERY
def test_the_rest_is_a_sum_of_its_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys that are read, estimates are far above their scores: a difference of these sums would be of rounding."""
    monkeypatch.setattr(selection, "UNRELIABLE", torch.inf)
    scene = Scene(bulk=[(257, 0)], short=(), group=1, bits=1)
    for head in range(2):
        scene.query[0, head] *= 3
        query = scene.query[0, head, 0]
        heavy = query / (scene.scaling * query.square().sum()) * torch.linspace(99, 101, 50)[:, None]
        scene.keys[0][head, 100:150] = scene.stored[0][0, head, 100 - 3 : 150 - 3] = heavy
    scene._make_sketch(scene.stored[0].shape[2], torch.Generator())
    for head in range(2):
        assert scene.estimates(0, head).max() > 101 + 20  # by more than 2 ** 24 times
    for tokens in run(path, scene, token_threshold=1e-4).selected.values():
        assert tokens.nonzero()[:, 0].tolist() == list(range(100 - 3, 150 - 3))


@EVERY
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in Triton's interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("buffer", [0, 1])
def test_what_is_not_finite_shows(path: Path, buffer: int, bad: float) -> None:
    """A key or value that is not a number, read or not, is in the centre, the codes, or the mean value."""
    function, device = path
    for token in (5, 200):
        scene = Scene(bulk=[(257, 3)], short=(), bits=2)
        (scene.values if buffer else scene.keys)[0][1, 3 + token, 7] = bad
        scene.stored[buffer][0, 1, token, 7] = bad
        scene._make_sketch(scene.stored[0].shape[2], torch.Generator())
        out, _ = function(*step_of(**scene.step_arguments(device, 1.0, criterion="dense")))
        assert out[0].isfinite().all(-1).flatten().tolist() == [True] * 2 + [False] * 2


@pytest.mark.parametrize(
    ("path", "heavy"),
    [
        pytest.param(*path.values, heavy, marks=path.marks, id=f"{path.id}, {heavy}")
        for path in (REFERENCE, COMPILED, KERNEL, GPU)
        for heavy in (("nowhere", "where sampled", "elsewhere") if path is COMPILED else ("nowhere",))
    ],
)
def test_long_rows(path: Path, heavy: str) -> None:
    """The compiled kernel drops tokens by a sample of the scores, which may mislead it, but must not its result."""
    scene, span, sampled = Scene(bulk=[(5100, 3)], short=(), kv_heads=1, bits=2), 64, 15
    spans = 5100 // span
    sample = torch.zeros(5100, dtype=torch.bool)
    for i in range(sampled):
        first = (2 * i + 1) * spans // (2 * sampled) * span
        sample[first : first + span] = True
    if heavy != "nowhere":
        marked = sample if heavy == "where sampled" else ~sample
        for keys in (scene.keys[0][0, 3 : 3 + 5100], scene.stored[0][0, 0, :5100]):
            keys[marked] += 0.7 * scene.query[0, :, 0].mean(dim=0)
        scene._make_sketch(scene.stored[0].shape[2], torch.Generator())
    assert 0.05 < run(path, scene, token_threshold=scene.token_threshold(0.1)).share < 0.3


@EVERY
@pytest.mark.parametrize(
    ("kind", "group", "group_rule"),
    [(Scene, 1, "head"), (Scene, 4, "head"), (Scene, 3, "any"), (RecordScene, 1, "head"), (RecordScene, 4, "head")],
)
def test_a_sketch_that_is_too_rough(
    path: Path, kind: type[Scene], group: int, group_rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is read by the groups of which a long-context head has a query that is too long for it, and by no other."""
    scene = kind(bulk=BULK[kind], group=group, dtype=torch.bfloat16, bits=2)
    decision = {"threshold": scene.threshold(group_rule), "group_rule": group_rule}
    cut, reliable = scene.rough_for_some(scene.flags(**{"criterion": "gaussian"} | decision))
    monkeypatch.setattr(selection, "UNRELIABLE", cut)
    monkeypatch.setattr(selection, "NOISE_SHARE", 0.0)
    assert len(run(path, scene, token_threshold=1.0, **decision).selected) == reliable > 0


@pytest.mark.parametrize("path", [KERNEL])
@pytest.mark.parametrize(("dim", "copied", "step"), [(128, (), 32), (80, (), 4), (80, ("cpu",), 32)])
def test_where_records_lie(
    path: Path, dim: int, copied: tuple[str, ...], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a bus or behind it, and at multiples of how many bytes."""
    monkeypatch.setattr(triton_decode.sizing, "COPIED", copied)
    monkeypatch.setitem(coded.STRIDES, "cpu", step)
    sizes = {"dim": dim, "value_dim": dim, "dtype": torch.bfloat16, "bits": 1.5, "group": 4}
    run(path, RecordScene(bulk=[(777, 9), (39, 0)], short=(2,), kv_heads=1, **sizes))


def apart(tensor: Tensor) -> Tensor:
    return torch.stack([tensor] * 2, dim=-1)[..., 0]


# In each of the ways that a kernel would read something else, or elsewhere.
WRONG: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "codes": [Tensor.long, lambda t: t[:, :1], lambda t: t[..., :200], lambda t: t[:, :, :0], lambda t: t.to("meta")],
    "scales": [Tensor.char, Tensor.half, lambda t: t[:, :, 1:], lambda t: t[:-1], lambda t: t.to("meta")],
    "units": [Tensor.double, lambda t: t[:, :, :0], lambda t: t[:-1], lambda t: t.to("meta")],
    "centres": [Tensor.float, lambda t: t[..., 1:], lambda t: t[:, :, :0], lambda t: t[:-1], lambda t: t.to("meta")],
    "weights": [Tensor.float, lambda t: t[..., 1:], lambda t: t[:, :, :0], lambda t: t[:, :1], lambda t: t.to("meta")],
    "order": [Tensor.int, lambda t: t[..., 1:], lambda t: t[:, :, :0], lambda t: t[:, :1], lambda t: t.to("meta")],
    "variances": [Tensor.double, lambda t: t[..., 1:], lambda t: t[:, :1], lambda t: t.to("meta")],
    "noise": [Tensor.double, lambda t: t[..., 1:], lambda t: t[:, :1], lambda t: t.to("meta")],
    "mean_value": [Tensor.double, lambda t: t[..., 1:], lambda t: t[:, :1], lambda t: t.to("meta")],
    "slopes": [Tensor.float, lambda t: t[..., 1:], lambda t: t[:, :, 1:], lambda t: t.to("meta")],
    "slope_units": [Tensor.double, lambda t: t[..., 1:], lambda t: t[:, :1], lambda t: t.to("meta")],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_sketch_of_something_else_is_refused(name: str) -> None:
    given = Scene(bulk=BULK[Scene], bits=2).step_arguments("cpu", 1.0, criterion="dense")
    operands.check(*step_of(**given))
    for change in (*WRONG[name], apart):
        wrong = replace(given["sketch"], **{name: change(getattr(given["sketch"], name))})
        with pytest.raises(OperandError, match="cannot read these tensors as those of one layer"):
            operands.check(*step_of(**given | {"sketch": wrong}))


@pytest.mark.parametrize("path", [COMPILED, KERNEL, GPU])
def test_what_records_and_sketch_do_not_hold_is_refused(path: Path) -> None:
    """By every kernel, before it reads."""
    function, device = path
    given = RecordScene(bulk=[(1100, 9), (900, 0)], short=(), bits=2).step_arguments(device, 1.0, criterion="dense")
    records, sketch = given["records"], given["sketch"]
    parts = {"codes": sketch.codes[..., :1040].clone(), "scales": sketch.scales[..., :1040].clone()}
    shortened = replace(sketch, **parts)  # which ends in the open segment
    for name, bad in (
        ("units", {"sketch": replace(sketch, units=sketch.units.double())}),
        ("records", {"records": replace(records, tensor=records.tensor[..., 1:])}),
        ("records", {"records": replace(records, tensor=records.tensor.to("meta"))}),
        ("open_records", {"records": replace(records, open=records.open[:, :1].clone())}),
        ("record_weights", {"records": replace(records, weights=records.weights.double())}),
        ("scales", {"sketch": shortened}),
        ("bulk_lengths is 1100", {"records": replace(records, tensor=records.tensor[:, :, :500].clone())}),
        ("bulk_lengths is 588", {"records": replace(records, open=records.open[:, :, :587].clone())}),
        ("bulk_lengths is 588", {n: given[n][:, :, :587].clone() for n in ("bulk_keys", "bulk_values")}),
    ):
        with pytest.raises(OperandError, match=name):
            function(*step_of(**given | bad))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("deviation", [3, 4, 5, 6, 8, 12, 16])
def test_scores_far_apart(bits: float, deviation: float) -> None:
    """Attention that lies on few tokens is found, or all is read because the sketch cannot tell which."""
    made = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 1, 2100, 64, generator=made) for _ in range(2))
    near = torch.zeros(1, 1, 1, 64)
    query = deviation * torch.randn(1, 8, 1, 64, generator=made)
    given: dict[str, Any] = {"query": query, "near_keys": near, "near_values": near, "scaling": 64**-0.5}
    given |= {"bulk_keys": keys, "bulk_values": values, "bulk_lengths": torch.tensor([2100])}
    given |= {"local": torch.ones(1, 1, 1, 1, dtype=torch.bool), "pending": torch.zeros(1, 1, 1, 1, dtype=torch.bool)}
    given |= {"decided": torch.ones(1, 1, 1, dtype=torch.bool), "bulk_tokens": torch.full((1, 1, 1), 2100)}
    given["log_bulk"] = torch.full((1, 1, 8, 1), torch.inf)
    given["logit_threshold"] = 0.0
    coded = Sketch.of(keys, values, None, Layout.from_bits(64, bits))
    calls = (step_of(**given, sketch=one, token_threshold=1.0) for one in (None, coded))
    whole, some = (decode_reference.decode_step(*call)[0] for call in calls)
    assert (some - whole).norm() < 0.1 * whole.norm()
