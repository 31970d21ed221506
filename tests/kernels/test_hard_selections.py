"""Tokens selected where a sketch, a row or its scores make it hard: against float64, by every kernel."""

from typing import Any
from unittest import mock

import pytest
import torch
from decode_scene import Scene, step_of
from record_scene import RecordScene
from sketch_reference import BITS
from steps import COMPILED, EVERY, GPU, KERNEL, REFERENCE, Path, run
from test_selected_tokens import BULK, EACH_KIND

from qada_cache.kernels import decode_reference
from qada_cache.sketch import Layout, selection
from qada_cache.sketch.codec import Sketch

pytestmark = pytest.mark.usefixtures("short_rows")


@EVERY
def test_rows_of_several_segments(path: Path) -> None:
    """Rows have one to three segments, the last ones of 143, 32, 159 and 75 tokens, beside a row without a sketch."""
    bulk = [(143, 5), (128 + 32, 3), (128 + 159, 0), (30, 2), (331, 9)]
    scene = Scene(bulk=bulk, short=(), dim=64, value_dim=24, dtype=torch.bfloat16, bits=2)
    for row, (tokens, _) in enumerate(bulk):  # what a segment is coded by is not what another is
        for part in (scene.keys[row][:, 3 : 3 + tokens], scene.stored[0][row, :, :tokens]):
            part[:, 128:] *= torch.linspace(0.5, 2, 64)
            part[:, 128:] += torch.linspace(-1, 1, 64)
    scene._make_sketch(scene.stored[0].shape[2], torch.Generator())
    step = run(path, scene)
    assert len(step.selected) == 8
    assert 0.05 < step.share < 0.7


@EVERY
def test_values_that_follow_keys(path: Path) -> None:
    """The substitute for unread tokens depends on the query, and lies far from their mean value, which is 0."""
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
    scene = Scene(bulk=[(257, 0)], short=(), group=1, dtype=torch.bfloat16, bits=2)
    scene.keys[0][:, 100] = 6 * scene.query[0, :, 0]
    scene.stored[0][0, :, 100 - 3] = scene.keys[0][:, 100]
    scene._make_sketch(scene.stored[0].shape[2], torch.Generator())
    for tokens in run(path, scene, token_threshold=2.0).selected.values():
        assert tokens[100 - 3]
        assert tokens.sum() < 10


@EVERY
def test_one_key_that_is_much_longer_than_the_others(path: Path) -> None:
    """Half the variance of its estimate's error is limited, and that of no other key."""
    scene = Scene(bulk=[(257, 0)], short=(), bits=2)
    scene.query *= 3
    scene.keys[0][:, 100] *= 12
    scene.stored[0][0, :, 100 - 3] = scene.keys[0][:, 100]
    scene._make_sketch(scene.stored[0].shape[2], torch.Generator())
    with mock.patch("sketch_reference.MOST", torch.inf):
        without = [scene.estimates(0, head) for head in range(2)]
    lower = torch.stack([without[head] - scene.estimates(0, head) for head in range(2)]) > 0.1
    assert lower[:, :, 97].any()
    assert lower.float().mean() < 0.02
    run(path, scene, token_threshold=scene.token_threshold(0.2))


@EVERY
@pytest.mark.usefixtures("whole_segments")
def test_the_rest_is_a_sum_of_its_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mass of unread tokens is summed by itself. Estimates of keys that are read are far above their scores here,
    so that a difference of sums of estimates would be mere rounding."""
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
    """A key or value that is not finite shows in outputs, whether it is read or not: through the centre, the codes or
    the mean value. The sketch of an infinite key is unreliable, so all tokens are read: then a query whose score for
    this key is -inf has a finite output."""
    function, device = path
    for token in (5, 200):
        scene = Scene(bulk=[(257, 3)], short=(), bits=2)
        (scene.values if buffer else scene.keys)[0][1, 3 + token, 7] = bad
        scene.stored[buffer][0, 1, token, 7] = bad
        scene._make_sketch(scene.stored[0].shape[2], torch.Generator())
        out, _ = function(*step_of(**scene.step_arguments(device, 1.0, criterion="dense")))
        away = scene.query[0, 2:, 0, 7] * bad == -torch.inf
        seen = away.tolist() if buffer == 0 else [False] * 2
        assert out[0].isfinite().all(-1).flatten().tolist() == [True] * 2 + seen


@EVERY
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in Triton's interpreter
def test_a_pending_token_whose_scores_are_not_finite(path: Path) -> None:
    """A score of -inf has no weight, even if it is the only one of its columns."""
    (function, device), scene = path, Scene(bulk=[(257, 1)], short=())
    (column,) = scene.rows.pending[0, 0, 0].nonzero().flatten().tolist()
    scene.query[..., 7], scene.near[0][0, :, column, 7] = 1, -torch.inf
    out, _ = function(*step_of(**scene.step_arguments(device, criterion="dense")))
    expected, _ = decode_reference.decode_step(*step_of(**scene.step_arguments(criterion="dense")))
    assert expected.isfinite().all()
    torch.testing.assert_close(out.cpu(), expected)


@EVERY
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in Triton's interpreter
def test_a_sketch_whose_errors_are_no_numbers(path: Path) -> None:
    """As of scores whose squares exceed float32: all is read."""
    scene = Scene(bulk=[(257, 3)], short=(), bits=2)
    for part in (scene.sketch.units, scene.sketch.mean_squares, scene.sketch.noise):
        part[0, 1] = torch.nan
    assert list(run(path, scene, token_threshold=1.0, criterion="dense").selected) == [(0, 0)]


@pytest.mark.usefixtures("whole_segments")
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


@EVERY
def test_a_sketch_that_is_hopeless(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is read as well where errors are a small share of the scores' variance, but four times too large."""
    scene = Scene(bulk=BULK[Scene], group=4, dtype=torch.bfloat16, bits=2)
    decision = {"threshold": scene.threshold("head")}
    cut, reliable = scene.rough_for_some(scene.flags(**{"criterion": "gaussian"} | decision))
    monkeypatch.setattr(selection, "UNRELIABLE", cut / 4)
    monkeypatch.setattr(selection, "NOISE_SHARE", 1e9)
    assert len(run(path, scene, token_threshold=1.0, **decision).selected) == reliable > 0


@pytest.mark.usefixtures("whole_segments")
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
