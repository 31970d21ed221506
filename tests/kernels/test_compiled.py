"""The kernel compiled for CPUs: against float64, and in a whole cache."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compilers import needs_compiler
from decode_scene import Scene, step_of
from drawn import make_moments
from harness import find_kernel
from parts import SCALING, check
from scenarios import play, small_buffers
from torch import Tensor

from qada_cache import kernels
from qada_cache.kernels import cpu, reference
from qada_cache.kernels.cpu import compiled_decode
from qada_cache.kernels.decode_reference import decode_step
from qada_cache.key_moments.running import flatten

# Each dtype, and each way that dimensions and queries fill a block; every pair is a build.
SIZES = [
    *((64, 24, 2, dtype) for dtype in cpu.ELEMENTS),
    *((32, 32, 1, torch.bfloat16), (80, 48, 7, torch.float16), (32, 32, 16, torch.bfloat16)),
    (8, 256, 5, torch.float32),
]


def tensors(dim: int, value_dim: int, queries: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Some heads of a larger buffer, nan wherever the kernel has no business."""
    generator = torch.Generator().manual_seed(tokens)
    query = 2 * torch.randn(2, 3, queries, dim, generator=generator)
    made = [query.to(dtype)]
    for size in (dim, value_dim):
        whole = torch.full((3, 5, tokens + 9, size), torch.nan, dtype=dtype)
        whole[1:, 1:4, :tokens] = torch.randn(2, 3, tokens, size, generator=generator).to(dtype)
        made.append(whole[1:, 1:4, :tokens])
    return made[0], made[1], made[2]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of keys is worth the kernel, and splitting."""
    monkeypatch.setattr(cpu, "MIN_TOKENS", 1)
    monkeypatch.setattr(cpu, "THREAD_TOKENS", 8)


@needs_compiler
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("dim", "value_dim", "queries", "dtype"), SIZES)
def test_equals_float64(
    dim: int, value_dim: int, queries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around the block size, one key, and more than a few blocks; by one thread, and by several of uneven parts."""
    for tokens in (1, 63, 64, 65, 500):
        query, key, value = tensors(dim, value_dim, queries, tokens, dtype)
        assert cpu.supports(query, key, value)
        for threads in (1, 5, 8):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            found = cpu.compiled_partial_attention(query, key, value, scaling=SCALING)
            assert found is not None
            check(found, query, key, value, torch.ones(1, 1, queries, tokens, dtype=torch.bool))


@needs_compiler
def test_threads_share_the_one_head_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its parts are rounded apart, it is not quite what one thread finds; there are heads enough for each thread."""
    scene, table = Scene(bulk=[(2000, 0)], short=(), kv_heads=8), torch.arange(8)[:, None].expand(8, 2) == 3
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        call = step_of(**scene.arguments("cpu"), **scene.decision_arguments(criterion=table))
        found.append(compiled_decode.fused_decode(*call)[0])
    assert not torch.equal(*found)
    torch.testing.assert_close(*found)


@needs_compiler
@pytest.mark.parametrize("bits", [0, 2])
def test_one_thread_does_little_work_alone(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread computes a small step alone, in the parts that several threads would compute: outputs are the same."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    scene, found = Scene(bulk=[(2000, 9)], short=(), bits=bits), []
    for products in (0, 2**60):
        monkeypatch.setattr(compiled_decode, "ALONE", products)
        call = scene.step_arguments("cpu", scene.token_threshold() if bits else None, criterion="dense")
        found.append(compiled_decode.fused_decode(*step_of(**call))[0])
    assert torch.equal(*found)


@needs_compiler
@pytest.mark.usefixtures("short")
def test_numbers_of_queries_share_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for each power of two serves calls of any number of queries."""
    built, original = set(), cpu.build_partial
    monkeypatch.setattr(cpu, "build_partial", lambda *sizes: built.add(sizes[3]) or original(*sizes))
    for queries in (2, 3, 4, 5):
        query, key, value = tensors(16, 16, queries, 70, torch.float32)  # of which caches ask for most
        found = cpu.compiled_partial_attention(query, key, value, scaling=SCALING)
        check(found, query, key, value, torch.ones(1, 1, queries, 70, dtype=torch.bool))
    assert built == {2, 4, 8}


@needs_compiler
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(bad: float) -> None:
    query, key, value = tensors(64, 64, 2, 200, torch.float32)
    for poisoned in (key, value):
        before = poisoned[1, 2, 150, 5].clone()
        poisoned[1, 2, 150, 5] = bad
        out, lse = cpu.compiled_partial_attention(query, key, value, scaling=SCALING)
        expected, expected_lse = reference.partial_attention(query, key, value, scaling=SCALING)
        assert out.isfinite().equal(expected.isfinite())
        assert lse.isfinite().equal(expected_lse.isfinite())
        assert not out.isfinite().all()
        poisoned[1, 2, 150, 5] = before


@needs_compiler
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("tokens", "infinite"), [(0, 0), (1, 1), (200, 150)])
def test_parts_whose_scores_are_not_finite(tokens: int, infinite: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of -inf alone, or without a token, have no weight, and are no reason for nan."""
    query, key, value = tensors(64, 64, 2, tokens, torch.float32)
    query[..., 5], key[:, :, :infinite, 5] = 1, -torch.inf
    expected, expected_lse = reference.partial_attention(query, key, value, scaling=SCALING)
    for threads in (1, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        out, lse = cpu.compiled_partial_attention(query, key, value, scaling=SCALING)
        torch.testing.assert_close(lse, expected_lse)
        assert out.isfinite().all()
        if infinite < tokens:
            torch.testing.assert_close(out, expected)


@needs_compiler
@pytest.mark.usefixtures("short")
def test_scores_far_apart() -> None:
    """Weights that vanish, and sums that a later, higher score makes vanish."""
    query, key, value = tensors(64, 64, 2, 200, torch.float32)
    for order in (key, key.flip(2)):
        ramp = torch.linspace(0, 40, 200)[None, None, :, None] * order.abs()
        found = cpu.compiled_partial_attention(query.abs(), ramp, value.contiguous(), scaling=SCALING)
        check(found, query.abs(), ramp, value, torch.ones(1, 1, 2, 200, dtype=torch.bool))


@pytest.fixture(params=[torch.bfloat16, torch.float64, "meta"], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[None]:
    """The user's own default dtype or device."""
    if isinstance(request.param, torch.dtype):
        torch.set_default_dtype(request.param)
        yield
        torch.set_default_dtype(torch.float32)
    else:
        with torch.device(request.param):
            yield


@needs_compiler
@pytest.mark.usefixtures("short")
def test_results_do_not_depend_on_torch_defaults(default: None) -> None:
    """The kernel writes float32 to the addresses that it is given: of anything else it would overrun the memory."""
    with torch.device("cpu"):
        query, key, value = tensors(64, 64, 2, 200, torch.float32)
    out, lse = cpu.compiled_partial_attention(query, key, value, scaling=SCALING)
    assert out.dtype == lse.dtype == torch.float32
    expected, expected_lse = reference.partial_attention(query, key, value, scaling=SCALING)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_admits_only_what_it_computes() -> None:
    query, key, value = tensors(64, 64, 4, 1024, torch.float32)
    assert cpu.supports(query, key, value)
    for wrong in (
        *((query.half(), key, value), (query, key.half(), value), (query, key, value.half())),
        *((query, key.to("meta"), value), (query, key, value.to("meta"))),
        tuple(tensor.to("meta") for tensor in (query, key, value)),
        (query.double(), key.double(), value.double()),
        *((query.repeat(1, 1, 5, 1), key, value), (query[:, :1], key, value)),
        *((query, key[:, :, 1:], value[:, :, 1:]), (query, key, value[:, :, :-1])),
        *((query, key.mT.contiguous().mT, value), (query, key, value[..., ::2])),
        (query, key[:, :, ::2], value[:, :, ::2]),
        *((query, key[..., :16], value), (query[..., :60], key[..., :60].contiguous(), value)),
    ):
        assert not cpu.supports(*wrong)


@needs_compiler
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("scenario", ["turns", "holes", "crops_with_padding", "rows"])
def test_cache_with_the_kernel_equals_reference(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token is decoded by `fused_decode`, a few by `compiled_partial_attention` over the bulk."""
    calls = {"fused_decode": 0, "compiled_partial_attention": 0}

    def spy(module: Any, name: str) -> None:
        original = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    spy(cpu, "compiled_partial_attention")
    spy(compiled_decode, "fused_decode")
    with small_buffers():
        pair = play(scenario)
    assert min(calls.values()) > 3
    assert pair.tally.local + pair.tally.long_context > 20


def test_chosen_for_a_long_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "build", lambda *_: object())
    query, bulk = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 1024, 16)
    assert find_kernel(query, bulk, bulk, "gaussian") is compiled_decode.fused_decode
    for refused in (
        (query, bulk[:, :, 1:], bulk, "gaussian"),
        (query, bulk, bulk, "oracle"),
        (query.double(), bulk.double(), bulk.double(), "gaussian"),
        (query.repeat(1, 10, 1, 1), bulk, bulk, "gaussian"),
    ):
        assert find_kernel(*refused) is None
    monkeypatch.setattr(cpu, "build", lambda *_: None)
    assert find_kernel(query, bulk, bulk, "gaussian") is None
    monkeypatch.setenv("QADA_KERNELS", "torch")
    assert find_kernel(query, bulk, bulk, "gaussian") is None


@needs_compiler
@pytest.mark.parametrize(("name", "used"), [("auto", 1), ("torch", 0)])
def test_chosen_by_name(name: str, used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(cpu, "compiled_partial_attention", lambda *_, **__: calls.append(name))
    query, key, value = tensors(64, 64, 4, 1100, torch.float32)
    kernels.partial_attention(query, key, value, scaling=SCALING, kernels=name)
    assert len(calls) == used


@needs_compiler
@pytest.mark.parametrize(
    "sizes",
    [
        {"dim": 32},
        {"dim": 80, "value_dim": 48, "group": 8, "dtype": torch.float16},
        {"dim": 32, "group": 16, "kv_heads": 1, "dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_estimates_by_moments(sizes: dict[str, Any]) -> None:
    """Each head decides as by float64's larger estimate of two prompts, one of all rows and one of each, to rounding:
    with a cut just above what it compares it needs its bulk, and just below it does not."""
    scene = Scene(bulk=[(90, 5), (63, 0)], short=(), **sizes)
    moments = [make_moments(rows, scene.kv_heads, scene.dim, seed=rows) for rows in (1, 2)]
    told = scene.arguments("cpu") | {"log_bulk": None, "group_rule": "head"}
    asked = [tuple(part.float() for part in (*flatten(*each[:2]), each[2].log())) for each in moments]
    for row in range(2):
        for head in range(scene.kv_heads * scene.group):
            query, of = scene.query[row, head, 0].double(), head // scene.group
            estimates, size = [], 1.0
            for mean, covariance, tokens in moments:
                own = min(row, len(mean) - 1)
                parts = (
                    scene.scaling * query @ mean[own, of],
                    scene.scaling**2 / 2 * query @ covariance[own, of] @ query,
                )
                estimates.append(float(tokens[own].log() + sum(parts)))
                size += float(sum(map(abs, parts)))
            compared = scene.masses(row)[head][0] - max(estimates)
            for cut, needed in ((compared + 2e-5 * size, True), (compared - 2e-5 * size, False)):
                step = step_of(**told, logit_threshold=cut)
                step[0].moments = asked
                for compute in (compiled_decode.fused_decode, decode_step):
                    assert bool(compute(*step)[1][row].flatten()[head]) is needed
