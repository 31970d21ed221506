"""Reading selected tokens in a fused decode step, against float64: by the torch reference and by every kernel."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from decode_scene import Scene, step_of
from quick_cases import mark_rest_slow
from record_scene import RecordScene
from sketch_reference import BITS
from small_sketch import small_sketch
from test_triton import COMPILED, GPU, KERNEL, REFERENCE, Path
from torch import Tensor

from qada_cache.kernels import cpu, decode_reference
from qada_cache.kernels import triton as triton_decode
from qada_cache.kernels.choice import choose_kernel
from qada_cache.kernels.cpu import compiled_decode
from qada_cache.kernels.cpu.building import has_compiler
from qada_cache.kernels.cpu.compiled_decode import fused_parts
from qada_cache.sketch import Layout, selection
from qada_cache.sketch.codec import Sketch

COMPILED_ONLY = pytest.mark.skipif(not has_compiler(), reason="needs a compiler")
EVERY = pytest.mark.parametrize("path", [REFERENCE, COMPILED, KERNEL, GPU])
BULK = [(257, 5), (0, 1), (63, 0), (39, 9), (111, 70)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows of few tokens have a sketch, and are split; four query heads of a group are merged at once."""
    monkeypatch.setattr(cpu, "THREAD_TOKENS", 50)
    small = {
        "SPLIT_TOKENS": 100,
        "ESTIMATE_TOKENS": 100,
        "SELECTED_TOKENS": 100,
        "SCAN_TOKENS": 16,
        "SCAN_RUN": 4,
        "PART_BYTES": 2048,
    }
    for name, value in small.items():
        monkeypatch.setattr(triton_decode.sizing, name, value)
    with small_sketch(40):
        yield


def run(path: Path, scene: Scene, *, token_threshold: float, **decision: Any) -> dict[tuple[int, int], Tensor]:
    """Compute, and compare flags, outputs and bytes read with float64's; tokens that are not to be read are nan.

    On a CPU by one thread, which does a few heads at a time, and by so many that heads are split.
    """
    function, device = path
    flags = scene.flags(**{"criterion": "dense"} | decision)
    selected = scene.selected(flags, token_threshold)
    needed = scene.forget_unneeded(flags, selected)
    for threads in (1, 16) if function is compiled_decode.fused_decode else (1,):
        arguments = scene.arguments(device) | scene.decision_arguments(device, **{"criterion": "dense"} | decision)
        arguments |= scene.sketch_arguments(device, token_threshold)
        with mock.patch.object(torch, "get_num_threads", lambda threads=threads: threads):
            out, found = function(*step_of(**arguments))
        assert torch.equal(found.cpu(), flags)
        scene.check(out.cpu(), flags, selected)
        assert arguments["bulk_read_bytes"].item() == needed
        assert arguments["sketch_read_bytes"].item() == scene.sketch_read_bytes(selected)
    return selected


def share(selected: dict[tuple[int, int], Tensor]) -> float:
    """Of the tokens of sketched heads, how many are read."""
    return float(torch.cat(list(selected.values())).float().mean())


SIZES = [  # of each dtype with each dimension there are cases without a sketch
    (64, 64, torch.float32),
    (128, 128, torch.bfloat16),
    (96, 80, torch.bfloat16),
    (32, 64, torch.float16),
    (256, 256, torch.float16),
    (512, 64, torch.float32),  # more channels than a byte numbers
]
# Two of the numbers of bits for each of the sizes, every one with several.
SIZES_AND_BITS = [(*size, BITS[(index + more) % len(BITS)]) for index, size in enumerate(SIZES) for more in (0, 2)]


@EVERY
@pytest.mark.parametrize(("dim", "value_dim", "dtype", "bits"), mark_rest_slow(SIZES_AND_BITS, 6))
def test_dtypes_dimensions_bits(path: Path, dim: int, value_dim: int, dtype: torch.dtype, bits: float) -> None:
    scene = Scene(bulk=[(111, 9), (63, 0), (39, 1)], short=(2,), dim=dim, value_dim=value_dim, dtype=dtype, bits=bits)
    assert 0.05 < share(run(path, scene, token_threshold=scene.token_threshold())) < 0.7


@EVERY
@pytest.mark.parametrize(("group", "group_rule"), [(7, "head"), (16, "head"), (3, "any")])
def test_decided_heads(path: Path, group: int, group_rule: str) -> None:
    """Only long-context heads ask for tokens, and what one asks for all of them read."""
    scene = Scene(bulk=BULK, group=group, dtype=torch.bfloat16, bits=2)
    decision = {"criterion": "gaussian", "threshold": scene.threshold(group_rule), "group_rule": group_rule}
    asked = 0.1 if group > 8 else 0.2  # by each head; all of what one asks for is read
    selected = run(path, scene, token_threshold=scene.token_threshold(asked), **decision)
    assert 0.02 < share(selected) < 0.8


@pytest.mark.parametrize("path", [REFERENCE, COMPILED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_in_keys(path: Path, dtype: torch.dtype) -> None:
    """As latents are: one key for all heads, whose first channels are the value."""
    sizes = {"kv_heads": 1, "group": 9, "dim": 72, "value_dim": 64, "shared": True}
    scene = Scene(bulk=[(257, 5), (39, 9), (63, 0)], dtype=dtype, bits=2, **sizes)
    decision = {"criterion": "gaussian", "threshold": scene.threshold()}
    assert 0.02 < share(run(path, scene, token_threshold=scene.token_threshold(0.1), **decision)) < 0.8


@COMPILED_ONLY
@pytest.mark.parametrize("kind", [Scene, RecordScene])
def test_more_heads_than_a_kernel_takes(kind: type[Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are parts, each of which decides and selects as if it were alone; what several read counts once."""
    scene = kind(bulk=[(257, 5)], short=(), kv_heads=1, group=20, dim=72, value_dim=64, shared=True, bits=2)
    theta = scene.token_threshold(0.1)
    told = scene.arguments("cpu") | scene.decision_arguments(threshold=scene.threshold())
    told |= scene.record_arguments("cpu") if isinstance(scene, RecordScene) else {}
    query, rows, layer = step_of(**told | scene.sketch_arguments("cpu", theta))
    monkeypatch.setattr(cpu, "MIN_TOKENS", 200)
    call = query.states, layer.bulk_keys, layer.bulk_values, "gaussian", "auto"
    assert choose_kernel(*call, records=layer.records) is fused_parts
    found, flags = fused_parts(query, rows, layer)
    read = torch.zeros(257, dtype=torch.bool)
    for part in (slice(0, 10), slice(10, 20)):
        own = replace(query, states=query.states[:, part], log_bulk=query.log_bulk[:, :, part].contiguous())
        wanted, decided = decode_reference.decode_step(
            own, rows, replace(layer, bulk_read_bytes=None, sketch_read_bytes=None)
        )
        torch.testing.assert_close(found[:, part], wanted, atol=1e-5, rtol=1e-5)
        assert torch.equal(flags[:, :, part], decided)
        read |= (scene.log_shares(0, 0)[part] >= math.log(theta))[decided[0, 0, :, 0]].any(dim=0)
    assert layer.bulk_read_bytes == read.sum() * (layer.records.layout.size if layer.records else 72 * 4)
    assert layer.sketch_read_bytes == scene.sketch_read_bytes({(0, 0): read})
    assert 0.02 < read.float().mean() < 0.9


@EVERY
def test_from_no_token_to_all(path: Path) -> None:
    for token_threshold, expected in ((1e-30, 1.0), (1e9, 0.0)):
        assert share(run(path, Scene(bulk=BULK, bits=2), token_threshold=token_threshold)) == expected


@EVERY
def test_rows_of_several_segments(path: Path) -> None:
    """Of one to three; the last ones of 572, 640 and 300 tokens, beside a row without a sketch."""
    bulk = [(572, 5), (511 + 129, 3), (512 + 639, 0), (30, 2), (1324, 9)]
    scene = Scene(bulk=bulk, short=(), dim=24, dtype=torch.bfloat16, bits=2)
    for row, (tokens, _) in enumerate(bulk):  # what a segment is coded by is not what another is
        for part in (scene.keys[row][:, 3 : 3 + tokens], scene.stored[0][row, :, :tokens]):
            part[:, 512:] *= torch.linspace(0.5, 2, 24)
            part[:, 512:] += torch.linspace(-1, 1, 24)
    scene._make_sketch(scene.stored[0].shape[2], torch.Generator())
    selected = run(path, scene, token_threshold=scene.token_threshold())
    assert len(selected) == 8
    assert 0.05 < share(selected) < 0.7


@EVERY
def test_values_that_follow_keys(path: Path) -> None:
    """What stands for tokens lies far from the mean value, which is 0, by as much as each query says."""
    scene = Scene(bulk=[(257, 0)], short=(), bits=2)
    keys = scene.keys[0] - scene.keys[0][:, 3:260].mean(dim=1, keepdim=True)
    scene.values[0][:, 3:260] = scene.stored[1][0, :, :257] = keys.flip(2)[:, 3:260]
    scene._make_sketch(scene.stored[0].shape[2], torch.Generator())
    assert share(run(path, scene, token_threshold=1e9)) == 0


@EVERY
def test_padding_queries_and_rows_alike(path: Path) -> None:
    run(path, Scene(bulk=BULK, padding=(0, 3), bits=2), token_threshold=1.0)
    scene = Scene(bulk=[(111, 3)] * 2, short=(), bits=2)
    run(path, scene, token_threshold=scene.token_threshold())


@EVERY
def test_one_key_that_outweighs_all(path: Path) -> None:
    """It is read, and by a head that reads hardly anything else; so is nothing where sinks and window have it all."""
    scene = Scene(bulk=[(257, 0)], short=(), group=1, bits=2)
    scene.keys[0][:, 100] = 6 * scene.query[0, :, 0]
    scene.stored[0][0, :, 100 - 3] = scene.keys[0][:, 100]
    scene._make_sketch(scene.stored[0].shape[2], torch.Generator())
    selected = run(path, scene, token_threshold=2.0)
    for tokens in selected.values():
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
    for tokens in run(path, scene, token_threshold=1e-4).values():
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
        arguments = scene.arguments(device) | scene.sketch_arguments(device, 1.0)
        out, _ = function(*step_of(**arguments, **scene.decision_arguments(device, criterion="dense")))
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
    selected = run(path, scene, token_threshold=scene.token_threshold(0.1))
    assert 0.05 < share(selected) < 0.3


@EVERY
@pytest.mark.parametrize(("group", "group_rule"), [(1, "head"), (4, "head"), (3, "any")])
def test_a_sketch_that_is_too_rough(path: Path, group: int, group_rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is read by the groups of which a long-context head has a query that is too long for it, and by no other."""
    scene = Scene(bulk=BULK, group=group, dtype=torch.bfloat16, bits=2)
    decision = {"criterion": "gaussian", "threshold": scene.threshold(group_rule), "group_rule": group_rule}
    flags = scene.flags(**decision)
    cut, reliable = scene.rough_for_some(flags)
    monkeypatch.setattr(selection, "UNRELIABLE", cut)
    monkeypatch.setattr(selection, "NOISE_SHARE", 0.0)
    assert len(run(path, scene, token_threshold=1.0, **decision)) == reliable > 0


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


@pytest.mark.parametrize("function", [compiled_decode.fused_decode, triton_decode.fused_decode])
@pytest.mark.parametrize("name", WRONG)
def test_refuses_a_sketch_of_something_else(name: str, function: Callable) -> None:
    scene = Scene(bulk=BULK, bits=2)
    given = scene.arguments("cpu") | scene.sketch_arguments("cpu", 1.0) | scene.decision_arguments(criterion="dense")
    for change in (*WRONG[name], apart):
        wrong = replace(given["sketch"], **{name: change(getattr(given["sketch"], name))})
        with pytest.raises(ValueError, match="cannot read these tensors as those of one layer"):
            function(*step_of(**given | {"sketch": wrong}))


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
