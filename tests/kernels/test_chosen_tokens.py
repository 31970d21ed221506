"""Reading chosen tokens in a fused decode step, against float64: by the torch reference and by every kernel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decode_scene import Scene
from test_triton import COMPILED, GPU, KERNEL, REFERENCE, Path
from torch import Tensor

from qada_cache.kernels import decode_reference, sketch
from qada_cache.kernels.cpu import compiled, compiled_decode
from qada_cache.kernels.triton import decode as triton_decode

EVERY = pytest.mark.parametrize("path", [REFERENCE, COMPILED, KERNEL, GPU])
BULK = [(257, 5), (0, 1), (63, 0), (39, 9), (111, 70)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of few tokens have a sketch, and are split."""
    monkeypatch.setattr(sketch, "MIN_TOKENS", 40)
    monkeypatch.setattr(compiled, "SPLIT_TOKENS", 50)
    monkeypatch.setattr(triton_decode, "SPLIT_TOKENS", 100)
    monkeypatch.setattr(triton_decode, "SCAN_TOKENS", 16)


def run(path: Path, scene: Scene, *, token_threshold: float, **decision: Any) -> dict[tuple[int, int], Tensor]:
    """Compute, and compare flags, outputs and bytes read with float64's; tokens that are not to be read are nan."""
    function, device = path
    flags = scene.flags(**{"criterion": "dense"} | decision)
    chosen = scene.chosen(flags, token_threshold)
    needed = scene.forget_unneeded(flags, chosen)
    arguments = scene.arguments(device) | {"criterion": "dense", "threshold": 0.5} | decision
    arguments |= scene.sketch_arguments(device, token_threshold)
    if arguments["criterion"] == "gaussian":
        arguments |= scene.moment_arguments(device)
    out, found = function(**arguments)
    assert torch.equal(found.cpu(), flags)
    scene.check(out.cpu(), flags, chosen)
    assert arguments["pulled"].item() == needed
    token_bytes = scene.codes.shape[3] + scene.scales.element_size()
    assert arguments["sketched"].item() == sum(len(tokens) for tokens in chosen.values()) * token_bytes
    return chosen


def share(chosen: dict[tuple[int, int], Tensor]) -> float:
    """Of the tokens of sketched heads, how many are read."""
    return float(torch.cat(list(chosen.values())).float().mean())


@EVERY
@pytest.mark.parametrize("bits", sketch.BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (32, 64), (128, 128), (96, 80), (256, 256)])
def test_dtypes_dimensions_bits(path: Path, dim: int, value_dim: int, dtype: torch.dtype, bits: int) -> None:
    scene = Scene(bulk=[(111, 9), (63, 0), (39, 1)], short=(2,), dim=dim, value_dim=value_dim, dtype=dtype, bits=bits)
    assert 0.05 < share(run(path, scene, token_threshold=scene.token_threshold())) < 0.7


@EVERY
@pytest.mark.parametrize(
    ("group", "group_rule"), [(1, "head"), (4, "head"), (7, "head"), (16, "head"), (3, "any"), (4, "any"), (8, "any")]
)
def test_decided_heads(path: Path, group: int, group_rule: str) -> None:
    """Only long-context heads ask for tokens, and what one asks for all of them read."""
    scene = Scene(bulk=BULK, group=group, dtype=torch.bfloat16, bits=2)
    decision = {"criterion": "gaussian", "threshold": scene.threshold(group_rule), "group_rule": group_rule}
    chosen = run(path, scene, token_threshold=scene.token_threshold(), **decision)
    assert 0.02 < share(chosen) < 0.8


@EVERY
def test_from_no_token_to_all(path: Path) -> None:
    for token_threshold, expected in ((1e-30, 1.0), (1e9, 0.0)):
        assert share(run(path, Scene(bulk=BULK, bits=2), token_threshold=token_threshold)) == expected


@EVERY
def test_nothing_stands_for_what_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mean value."""
    monkeypatch.setattr(sketch, "REST_WEIGHT", 1e-300)  # that of the expected outputs
    function, device = path
    scene = Scene(bulk=BULK, bits=2)
    without = (lambda **given: function(**given | {"mean_value": None})), device
    run(without, scene, token_threshold=scene.token_threshold())


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
    chosen = run(path, scene, token_threshold=2.0)
    for tokens in chosen.values():
        assert tokens[100 - 3]
        assert tokens.sum() < 10


@EVERY
def test_the_rest_is_a_sum_of_its_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys that are read, estimates are far above their scores: a difference of these sums would be of rounding."""
    monkeypatch.setitem(sketch.MAX_SPREAD, 1, torch.inf)
    scene = Scene(bulk=[(257, 0)], short=(), group=1, bits=1)
    for head in range(2):
        scene.query[0, head] *= 3
        query = scene.query[0, head, 0]
        heavy = query / (scene.scaling * query.square().sum()) * torch.linspace(99, 101, 50)[:, None]
        scene.keys[0][head, 100:150] = scene.stored[0][0, head, 100 - 3 : 150 - 3] = heavy
    scene._make_sketch(scene.stored[0].shape[2], torch.Generator())
    for head in range(2):
        assert scene.estimates(0, head).max() > 101 + 25
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
        out, _ = function(**arguments, criterion="dense", threshold=0.5)
        assert out[0].isfinite().all(-1).flatten().tolist() == [True] * 2 + [False] * 2


@EVERY
@pytest.mark.parametrize("heavy", ["nowhere", "where sampled", "elsewhere"])
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
    chosen = run(path, scene, token_threshold=scene.token_threshold(0.1))
    assert 0.05 < share(chosen) < 0.3


@EVERY
@pytest.mark.parametrize(("group", "group_rule"), [(1, "head"), (4, "head"), (3, "any")])
def test_a_sketch_that_is_too_rough(path: Path, group: int, group_rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is read by the groups of which a long-context head has a query that is too long for it, and by no other."""
    scene = Scene(bulk=BULK, group=group, bits=2)
    decision = {"criterion": "gaussian", "threshold": scene.threshold(group_rule), "group_rule": group_rule}
    flags = scene.flags(**decision)
    spreads = [
        float(scene.half_variance(row, head)[flags[row, head]].max())
        for row in scene.sketched_rows() for head in range(2) if flags[row, head].any()
    ]  # fmt: skip
    low, high = sorted(spreads)[len(spreads) // 2 - 1 :][:2]
    monkeypatch.setitem(sketch.MAX_SPREAD, 2, (low + high) / 2)
    assert len(run(path, scene, token_threshold=1.0, **decision)) == len(spreads) // 2 > 0


# In each of the ways that a kernel would read something else, or elsewhere.
WRONG = {
    "codes": [Tensor.char, lambda t: t[:, :1], lambda t: t[..., :7], lambda t: t[:, :, :200], lambda t: t.to("meta")],
    "scales": [Tensor.half, lambda t: t[:, :, 1:], lambda t: t[:-1], lambda t: t.to("meta")],
    "centre": [Tensor.double, lambda t: t[..., 1:], lambda t: t[:-1], lambda t: t.mT.contiguous().mT, lambda t: None],
    "mean_square": [Tensor.double, lambda t: t[:, 1:], lambda t: t.mT.contiguous().mT, lambda t: None],
    "mean_value": [Tensor.double, lambda t: t[..., 1:], lambda t: t[:, :1], lambda t: t.mT.contiguous().mT],
}


@pytest.mark.parametrize("function", [compiled_decode.fused_decode, triton_decode.fused_decode])
@pytest.mark.parametrize("name", WRONG)
def test_refuses_a_sketch_of_something_else(name: str, function: Callable) -> None:
    scene = Scene(bulk=BULK, bits=2)
    given = scene.arguments("cpu") | scene.sketch_arguments("cpu", 1.0)
    for change in WRONG[name]:
        with pytest.raises(ValueError, match="cannot read these tensors as those of one layer"):
            function(**given | {name: change(given[name])}, threshold=0.5, criterion="dense")


def test_refuses_codes_that_lie_apart() -> None:
    scene = Scene(bulk=BULK, bits=2)
    given = scene.arguments("cpu") | scene.sketch_arguments("cpu", 1.0)
    for name in ("codes", "scales"):
        wrong = torch.stack([given[name]] * 2, dim=3)[:, :, :, 0]
        with pytest.raises(ValueError, match="do not lie one after the other"):
            compiled_decode.fused_decode(**given | {name: wrong}, threshold=0.5, criterion="dense")
    with pytest.raises(ValueError, match="do not lie one after the other"):
        triton_decode.fused_decode(**given | {"scales": wrong}, threshold=0.5, criterion="dense")


@pytest.mark.parametrize("bits", sketch.BITS)
@pytest.mark.parametrize("deviation", [3, 4, 5, 6, 8, 12, 16])
def test_scores_far_apart(bits: int, deviation: float) -> None:
    """Attention that lies on few tokens is found, or all is read because the sketch cannot tell which."""
    made = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 1, 2100, 64, generator=made) for _ in range(2))
    near = torch.zeros(1, 1, 1, 64)
    query = deviation * torch.randn(1, 8, 1, 64, generator=made)
    centre = keys[:, :, :256].mean(dim=2)
    given: dict[str, Any] = {"query": query, "near_keys": near, "near_values": near, "scaling": 64**-0.5}
    given |= {"bulk_keys": keys, "bulk_values": values, "bulk_lengths": torch.tensor([2100])}
    given |= {"local": torch.ones(1, 1, dtype=torch.bool), "staged": torch.zeros(1, 1, dtype=torch.bool)}
    given |= {"decided": torch.ones(1, dtype=torch.bool), "criterion": "dense", "threshold": 0.5}
    codes, scales = sketch.encode(keys, centre, bits)
    coded = {"codes": codes, "scales": scales, "centre": centre, "mean_value": values.mean(dim=2)}
    coded["mean_square"] = scales.float().square().mean(dim=2)
    whole, some = (decode_reference.fused_decode(**given | more)[0] for more in ({}, {**coded, "token_threshold": 1.0}))
    assert (some - whole).norm() < 0.1 * whole.norm()
