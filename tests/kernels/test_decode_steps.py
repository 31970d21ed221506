"""The fused decode step against float64: the torch reference, the CPU's kernel, Triton's, interpreted and on a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decode_scene import Scene, step_of
from quick_cases import mark_rest_slow
from record_scene import RecordScene
from small_sketch import small_sketch
from stand_in import without_waiting
from step_buffers import RAGGED, SINKS, WINDOW
from steps import EVERY, OF_TRITON, ON_GPU, Path, run, small_splits, take_row

from qada_cache.kernels import triton as triton_decode


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Rows of few tokens have a sketch, and are split."""
    with small_sketch(40, 128), small_splits(*Scene.splits):
        yield


DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Each dtype with dimensions that fill blocks, and with such that do not; every pair is a build.
SIZES = [
    *((64, 24, dtype) for dtype in DTYPES),
    *((128, 128, torch.bfloat16), (96, 80, torch.float32)),
    *((32, 32, torch.float32), (64, 64, torch.float32), (256, 256, torch.float16), (96, 80, torch.bfloat16)),
]


@EVERY
@pytest.mark.parametrize(("dim", "value_dim", "dtype"), mark_rest_slow(SIZES, 5))
def test_dtypes_and_dimensions(path: Path, dim: int, value_dim: int, dtype: torch.dtype) -> None:
    scene = Scene(bulk=[(111, 9), (63, 0), (1, 1)], short=(2,), dim=dim, value_dim=value_dim, dtype=dtype)
    assert run(path, scene, threshold=scene.threshold()).mixed


@EVERY
@pytest.mark.parametrize(("group", "group_rule"), [(1, "head"), (4, "head"), (3, "any"), (7, "any")])
def test_groups(path: Path, group: int, group_rule: str) -> None:
    scene = Scene(group=group, dtype=torch.bfloat16)
    assert run(path, scene, threshold=scene.threshold(group_rule), group_rule=group_rule).mixed


@EVERY
@pytest.mark.parametrize(("bits", "group_rule"), [(0, "head"), (1.5, "any")])
def test_learned_sinks(path: Path, bits: float, group_rule: str) -> None:
    """They count for local heads, for whole bulks, and for what is selected and unread; padding sees nothing else."""
    told: dict[str, Any] = {"bits": bits, "group": 3, "dtype": torch.bfloat16, "learned_sinks": True}
    scene = Scene(bulk=[(111, 9), (63, 0), (1, 1)], short=(2,), padding=(3,), **told)
    assert run(path, scene, threshold=scene.threshold(group_rule), group_rule=group_rule).mixed
    without = Scene(bulk=scene.bulk, short=(2,), padding=(3,), **told | {"learned_sinks": False})
    assert without.threshold(group_rule) < scene.threshold(group_rule)


@OF_TRITON
@pytest.mark.parametrize(("group", "bits"), [(7, 0), (7, 1.5), (8, 1.5)])
def test_groups_and_heads_that_fill_no_block(path: Path, group: int, bits: float) -> None:
    """With those of other tests, every kernel has met groups of 1, 3, 4, 7 and 8, and heads of 64, 80, 96, 128, 256."""
    scene = Scene(bulk=[(111, 9), (63, 0)], short=(2,), group=group, dim=80, dtype=torch.bfloat16, bits=bits)
    flags = run(path, scene, threshold=scene.threshold()).flags
    assert flags.any()
    assert not flags.all()


@EVERY
@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_a_mass_that_is_no_number(path: Path, threshold: float) -> None:
    """It says as little as infinity: the bulk is read, unless every head is local."""
    scene, (function, device) = Scene(), path
    arguments = scene.arguments(device) | scene.decision_arguments(device, threshold=threshold)
    arguments["log_bulk"][0, 1] = torch.nan
    expected = scene.flags(threshold=threshold)
    expected[0, 1] = threshold > 0
    out, flags = function(*step_of(**arguments))
    assert torch.equal(flags.cpu(), expected)
    scene.check(out.cpu(), expected)


@EVERY
@pytest.mark.parametrize(("threshold", "group_rule"), [(0.0, "any"), (1.0, "head")])
def test_thresholds_at_the_ends(path: Path, threshold: float, group_rule: str) -> None:
    flags = run(path, Scene(), threshold=threshold, group_rule=group_rule).flags
    assert flags[: len(RAGGED)].all() if threshold else not flags.any()


@EVERY
@pytest.mark.parametrize(("threshold", "group_rule"), [(0.4, "any"), (1.0, "head")])
def test_static_heads(path: Path, group_rule: str, threshold: float) -> None:
    table = torch.tensor([[True, False, True], [False, False, True], [True, True, True]])
    scene = Scene(group=3, kv_heads=3, dtype=torch.bfloat16)
    run(path, scene, threshold=threshold, group_rule=group_rule, criterion=table)


@EVERY
@pytest.mark.parametrize(("criterion", "group_rule"), [("dense", "any"), ("local", "head")])
def test_one_sided_criteria(path: Path, criterion: str, group_rule: str) -> None:
    flags = run(path, Scene(), threshold=0.0, group_rule=group_rule, criterion=criterion).flags
    assert flags[: len(RAGGED)].all() if criterion == "dense" else not flags.any()


@EVERY
def test_padding_queries(path: Path) -> None:
    """A row that sits the step out reads no bulk; one of them has no token at all."""
    scene = Scene(bulk=[(63, 5), (63, 5), (111, 0)], short=(2, 0), padding=(1, 4))
    flags = run(path, scene, threshold=1.0).flags
    assert flags[0].all()
    assert not flags[1].any()


@EVERY
@pytest.mark.parametrize("bulk", [[(111, 3)] * 2, [(257, 0)], [(0, 5)] * 3])
def test_rows_alike(path: Path, bulk: list[tuple[int, int]]) -> None:
    """One mask and one length stand for all rows; a bulk that is all pending, in buffers of a few columns."""
    scene = Scene(bulk=bulk, short=())
    assert scene.rows.local.shape[0] == 1
    run(path, scene, threshold=1.0)
    run(path, scene, threshold=scene.threshold())


@EVERY
def test_nothing_stored_yet(path: Path) -> None:
    """Bulk buffers without room: nothing may be launched over them."""
    run(path, Scene(bulk=[], short=(2, SINKS + WINDOW)), threshold=1.0)
    scene = Scene(bulk=[(0, 5)], short=())
    scene.stored = [t[:, :, :0] for t in scene.stored]
    assert run(path, scene, threshold=1.0).flags.all()


OF_RECORDS: dict[str, Any] = {"bulk": [(201, 5), (39, 1), (290, 0)], "bits": 2}
OF_EACH_KIND = pytest.mark.parametrize(
    ("kind", "sizes"),
    [(Scene, {}), (Scene, {"bits": 2}), (RecordScene, OF_RECORDS)],
    ids=["whole heads", "selected tokens", "records"],
)


@OF_TRITON
@OF_EACH_KIND
def test_splits_do_not_matter(
    path: Path, kind: type[Scene], sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, outputs = kind(**{"bulk": [(111, 9), (63, 0), (1, 1)], "short": ()} | sizes), []
    threshold = scene.threshold()
    for tokens, most in ((1000, 128), (1, 7)) if sizes is OF_RECORDS else ((1000, 128), (16, 128), (50, 128), (1, 7)):
        for name in ("MAX_SPLITS", "SELECTED_SPLITS"):
            monkeypatch.setattr(triton_decode.sizing, name, most)
        outputs.append(run(path, scene, threshold=threshold, splits=(tokens, scene.splits[1])).out)
    for out in outputs[1:]:
        torch.testing.assert_close(out, outputs[0], rtol=1e-5, atol=1e-6)


@OF_TRITON
@OF_EACH_KIND
def test_rows_do_not_matter(path: Path, kind: type[Scene], sizes: dict[str, Any]) -> None:
    """A row alone gives what it gives in a batch, to the bit, if a device runs the programs of all rows at once: splits
    depend on the capacity, which is kept."""
    scene, (function, device) = kind(**sizes), path
    given = scene.step_arguments(device, threshold=scene.threshold())
    with small_splits(*scene.splits):
        whole = function(*step_of(**given))
        for row in range(scene.batch):
            out, flags = function(*step_of(**take_row(given, row)))
            assert torch.equal(out[0], whole[0][row])
            assert torch.equal(flags[0], whole[1][row])


# -- what only a GPU can show -------------------------------------------------------------------------------------


@ON_GPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [0, 2])
def test_bulk_in_pinned_memory(path: Path, dtype: torch.dtype, bits: int) -> None:
    """Read in place, without the host waiting for anything."""
    scene = Scene(dim=128, dtype=dtype, bits=bits)
    torch.cuda.synchronize()
    assert run(path, scene, pin=True, threshold=scene.threshold()).mixed


@ON_GPU
@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize(
    ("kind", "sizes", "token_threshold"),
    [(Scene, {}, None), (Scene, {"bits": 2}, None), (RecordScene, OF_RECORDS, None), (RecordScene, OF_RECORDS, 0.0)],
)
def test_graph_capture_without_synchronisation(
    path: Path, kind: type[Scene], sizes: dict[str, Any], token_threshold: float | None, pin: bool
) -> None:
    """Captured on rows without a bulk; replayed on all of it."""
    scene = kind(dim=128, dtype=torch.bfloat16, **sizes)
    arguments = scene.step_arguments("cuda", token_threshold, pin=pin, threshold=scene.threshold())
    call = step_of(**arguments)
    expected = path[0](*call)  # compiles, too
    lengths, pending = arguments["bulk_lengths"].clone(), arguments["pending"].clone()
    arguments["bulk_lengths"].zero_()
    arguments["pending"].zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with without_waiting():
        path[0](*call)
        with torch.cuda.graph(graph):
            out, flags = path[0](*call)
    graph.replay()
    assert not flags.any()
    arguments["bulk_lengths"].copy_(lengths)
    arguments["pending"].copy_(pending)
    graph.replay()
    assert torch.equal(flags, expected[1])
    assert torch.equal(out, expected[0])


@ON_GPU
def test_addresses_beyond_32_bits(path: Path) -> None:
    """The second row lies more than 2^31 elements after the first, and its last token as far behind its first."""
    tokens, dim = 2**24 + 2**10, 128
    if torch.cuda.mem_get_info()[0] < 4 * 2 * 2 * tokens * dim:
        pytest.skip("needs about 20 GiB of free device memory")
    keys = torch.zeros(2, 1, tokens, dim, dtype=torch.bfloat16, device="cuda")
    values = torch.zeros_like(keys)
    keys[1, 0, -1], values[1, 0, -1] = 10.0, 3.0
    near = torch.zeros(2, 1, 4, dim, dtype=torch.bfloat16, device="cuda")
    call = step_of(
        query=torch.full((2, 1, 1, dim), 10.0, dtype=torch.bfloat16, device="cuda"),
        near_keys=near, near_values=near, bulk_keys=keys, bulk_values=values,
        local=torch.ones(1, 1, 1, 4, dtype=torch.bool, device="cuda"),
        pending=torch.zeros(1, 1, 1, 4, dtype=torch.bool, device="cuda"),
        bulk_lengths=torch.tensor([5, tokens], device="cuda"),
        bulk_tokens=torch.tensor([5, tokens], device="cuda")[:, None, None],
        decided=torch.ones(1, 1, 1, dtype=torch.bool, device="cuda"),
        scaling=1.0, logit_threshold=0.0, log_bulk=torch.full((1, 1, 1, 1), torch.inf, device="cuda"),
    )  # fmt: skip
    out, _ = path[0](*call)
    assert (out[0] == 0).all()
    assert (out[1] == 3).all()
