"""Torch's fused operators are tried before they are used: what is wrong is found out, said once, and not used."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parts import DTYPES, SCALING, check, tensors
from torch import Tensor

from qada_cache import kernels
from qada_cache.kernels import partial_attention
from qada_cache.kernels.reference import find_fault
from qada_cache.said_once import warn_once

PLAIN = kernels.OPERATORS["cpu"][0]
Attend = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def nothing_tried(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Kernels are chosen, and warnings given, as if no other test had run; later tests begin anew, too."""
    kernels._choose_operator.cache_clear()
    warn_once.cache_clear()
    yield
    kernels._choose_operator.cache_clear()


def plant(monkeypatch: pytest.MonkeyPatch, *operators: Attend, device: str = "cpu", workers: int = 1) -> list[int]:
    """Replace the device's operators by these; return the number of calls of each, which grows with calls."""
    calls = [0] * len(operators)

    def counted(place: int, attend: Attend) -> Attend:
        def call(*args: Any) -> tuple[Tensor, Tensor]:
            calls[place] += 1
            return attend(*args)

        return call

    made = (
        SimpleNamespace(
            name=f"planted_{place}", attend=counted(place, attend), serves=PLAIN.serves, workers=lambda _: workers
        )
        for place, attend in enumerate(operators)
    )
    monkeypatch.setitem(kernels.OPERATORS, device, tuple(made))
    return calls


def in_base_two(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = PLAIN.attend(query, key, value, scaling, causal)
    return out, lse * 1.442695


def with_its_own_scale(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool
) -> tuple[Tensor, Tensor]:
    return PLAIN.attend(query, key, value, query.shape[3] ** -0.5, causal)


def without_the_last_token(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool
) -> tuple[Tensor, Tensor]:
    if not causal:
        key, value = key[:, :, :-1], value[:, :, :-1]
    return PLAIN.attend(query, key, value, scaling, causal)


def without_the_first_token(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool
) -> tuple[Tensor, Tensor]:
    if not causal:
        key, value = key[:, :, 1:], value[:, :, 1:]
    return PLAIN.attend(query, key, value, scaling, causal)


def never_causal(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    return PLAIN.attend(query, key, value, scaling, False)


def beyond_the_end(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Reads a block too much of a larger buffer, as one that rounds the number of tokens up."""
    if not causal:
        key, value = (
            part.as_strided((*part.shape[:2], part.shape[2] + 5, part.shape[3]), part.stride()) for part in (key, value)
        )
    return PLAIN.attend(query, key, value, scaling, causal)


def in_other_shapes(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = PLAIN.attend(query, key, value, scaling, causal)
    return out, torch.nn.functional.pad(lse, (0, 32 - lse.shape[2] % 32))


def broken(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    raise RuntimeError("no kernel image is available\nfor this device")


WRONG = {
    in_base_two: "off by",
    with_its_own_scale: "off by",
    without_the_last_token: "off by",
    without_the_first_token: "off by",
    never_causal: "off by",
    beyond_the_end: "off by nan",
    in_other_shapes: r"not torch.float32 [1, 2, 5]",
    broken: "it raised RuntimeError: no kernel image is available",
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_operator_is_not_used(
    wrong: Attend, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain torch computes instead, which is said once for a dtype and head size."""
    calls = plant(monkeypatch, wrong)
    query, key, value = tensors(3, 63, dtype=dtype)
    for _ in range(2):
        found = partial_attention(query, key, value, scaling=SCALING)
        check(found, query, key, value, torch.ones(1, 1, 3, 63, dtype=torch.bool))
    tried = calls[0]
    assert 1 <= tried <= 2
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert f"torch's planted_0 is not used on cpu for {dtype} and head dimensions 16 and 16" in said[0]
    assert WRONG[wrong] in said[0]
    assert "\n" not in said[0]
    partial_attention(*tensors(3, 63, dtype=dtype), scaling=SCALING)
    assert calls[0] == tried


def test_the_next_operator_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    calls = plant(monkeypatch, broken, PLAIN.attend)
    query, key, value = tensors(3, 63)
    found = partial_attention(query, key, value, scaling=SCALING)
    check(found, query, key, value, torch.ones(1, 1, 3, 63, dtype=torch.bool))
    assert calls == [1, 3]
    assert "planted_0" in caplog.text


def test_what_torch_does_not_offer_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other head sizes for values, on a CPU: nothing is wrong, so nothing is said."""
    calls = plant(monkeypatch, broken)
    query, key, value = tensors(3, 63, value_dim=24)
    partial_attention(query, key, value, scaling=SCALING)
    assert calls == [0]
    assert not caplog.records


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 64, 128, 256])
def test_the_right_one_is_tried_once(dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = plant(monkeypatch, PLAIN.attend)
    device = torch.device("cpu")
    assert kernels._choose_operator(device, dtype, dim, dim) is not None
    assert calls == [2]
    assert kernels._choose_operator(device, dtype, dim, dim) is not None
    assert calls == [2]


@pytest.mark.parametrize("workers", [7, 132])
def test_the_way_of_a_decode_step_is_tried(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys split among the processors of a GPU, as many as that."""
    calls = plant(monkeypatch, PLAIN.attend, workers=workers)
    assert kernels._choose_operator(torch.device("cpu"), torch.bfloat16, 64, 64) is not None
    assert calls == [3]  # the parts, the tokens left over, and causally


def test_out_of_memory_says_nothing_of_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    full = [True]

    def attend(*args: Any) -> tuple[Tensor, Tensor]:
        if full[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return PLAIN.attend(*args)

    plant(monkeypatch, attend)
    query, key, value = tensors(3, 63)
    with pytest.raises(torch.OutOfMemoryError):
        partial_attention(query, key, value, scaling=SCALING)
    full[0] = False
    assert kernels.find_operator(query, key, value) is not None


def test_other_defaults_and_random_numbers_are_the_users() -> None:
    """Neither the default dtype and device nor the state of the generator has a part in a trial."""
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert kernels._choose_operator(torch.device("cpu"), torch.bfloat16, 32, 32) is not None
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_wrong_in_words() -> None:
    one, whole = torch.ones(2), torch.arange(2)
    assert find_fault(lambda: (one, whole), (one, whole)) is None
    assert "decisions or counts" in str(find_fault(lambda: (one, whole + 1), (one, whole)))
    assert find_fault(lambda: (one, whole), (one + 0.01, whole)) == (
        "it is off by 0.01 from the same computation in plain torch"
    )
    assert "torch.int64 [2], not torch.float32 [2]" in str(find_fault(lambda: (whole,), (one,)))
    assert "off by nan" in str(find_fault(lambda: (one * torch.nan,), (one,)))


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_operators_of_a_gpu_have_these_signatures(place: int, causal: bool) -> None:
    """Torch's fused operators for GPUs give outputs and log-sum-exps of the expected shapes, which torch finds without
    a GPU."""
    query, key, value = (torch.empty(2, 3, 40, 64, dtype=torch.float16, device="meta") for _ in range(3))
    if not causal:
        query = query[:, :, :5]
    out, lse = kernels.OPERATORS["cuda"][place].attend(query, key, value, SCALING, causal)
    assert (out.shape, lse.shape) == (query.shape, query.shape[:3])
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize("place", [pytest.param(0, marks=on_gpu), pytest.param(1, marks=on_gpu)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_operators_of_a_gpu(place: int, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on its own, where torch offers it."""
    operator = kernels.OPERATORS["cuda"][place]
    monkeypatch.setitem(kernels.OPERATORS, "cuda", (operator,))
    made = [torch.randn(1, 2, tokens, dim).to(dtype) for tokens in (4, 5000, 5000)]
    there = [tensor.cuda() for tensor in made]
    if not operator.serves(*there):
        pytest.skip("torch does not offer it for these")
    assert kernels.find_operator(*there) is not None
    out, lse = kernels.partial_attention(*there, scaling=SCALING)
    check((out.cpu(), lse.cpu()), *made, torch.ones(1, 1, 4, 5000, dtype=torch.bool))
