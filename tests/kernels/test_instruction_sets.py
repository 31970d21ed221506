"""The C++ kernels as processors without the newest vectors build them: the same results on every path."""

import platform
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compilers import needs_compiler
from decode_scene import Scene
from quick_cases import mark_rest_slow
from record_scene import RecordScene
from steps import COMPILED, run
from test_hard_selections import test_what_is_not_finite_shows as check_what_is_not_finite

from qada_cache.kernels import cpu
from qada_cache.kernels.cpu import building, prompt

pytestmark = [needs_compiler, pytest.mark.usefixtures("short_rows", "built_for")]

SETS = {
    "x86_64": {
        "x86-64": set(),
        "x86-64-v3": {"avx2", "fma"},
        "x86-64-v4": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    },
    "aarch64": {"armv8-a": {"asimd"}, "armv8.2-a+dotprod": {"asimd", "asimddp"}},
}.get(platform.machine(), {})


# The newest set is what processors of today build anyway.
@pytest.fixture(params=mark_rest_slow([(name,) for name in SETS], 2))
def built_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not SETS[request.param] <= prompt.read_instructions():
        pytest.skip("the processor cannot run it")
    # The source's code for each set is the subject, so -O1 is enough: -O3 takes long for the oldest sets.
    own = f"-march={request.param}"
    others = {"-march=native": own, "-mcpu=native": own, "-O3": "-O1"}
    flags = [others.get(flag, flag) for flag in building.FLAGS]
    monkeypatch.setattr(building, "FLAGS", tuple(flags))
    cpu.build.cache_clear()
    yield
    cpu.build.cache_clear()


@pytest.mark.parametrize(
    "sizes",
    mark_rest_slow(
        [({"bits": 2},), ({"dim": 96, "value_dim": 64, "group": 3, "dtype": torch.bfloat16, "bits": 4},)], 1
    ),
    ids=str,
)
def test_selected_tokens(sizes: dict[str, Any]) -> None:
    scene = Scene(bulk=[(257, 5), (63, 0), (39, 9)], short=(), **sizes)
    assert 0.05 < run(COMPILED.values[0], scene).share < 0.7


RECORDS: list[tuple[dict[str, Any]]] = [
    ({"dim": 80, "bits": 4, "dtype": torch.bfloat16, "group": 3, "rung": 4},),
    ({"dim": 72, "value_dim": 56, "bits": 2, "dtype": torch.bfloat16, "group": 9, "kv_heads": 1, "shared": True},),
    ({"dim": 64, "bits": 1.5, "group": 3},),
]


@pytest.mark.parametrize("selects", [True, False])
@pytest.mark.parametrize("sizes", mark_rest_slow(RECORDS, 2), ids=["records", "latents", "others"])
def test_records(sizes: dict[str, Any], selects: bool) -> None:
    scene = RecordScene(bulk=[(271, 5), (63, 0)], short=(), **sizes)
    run(COMPILED.values[0], scene, token_threshold=scene.token_threshold(0.1) if selects else 0.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(bad: float) -> None:
    check_what_is_not_finite(COMPILED.values[0], 0, bad)
