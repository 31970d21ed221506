"""A change of tensors that are checked and bound for a layer's steps is noticed, and no freed memory is read."""

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from compilers import needs_compiler
from decode_scene import ROWS, Scene, step_of
from torch import Tensor

from qada_cache.kernels import decode_reference, operands
from qada_cache.kernels.cpu import compiled_decode
from qada_cache.kernels.operands import OperandError, Operands, Query, Rows
from qada_cache.sketch.codec import Sketch

BULK = [(1100, 5), (63, 0)]


def arguments(**options: Any) -> dict[str, Any]:
    """The arguments of `step_of` for an ordinary layer with a sketch."""
    scene = Scene(bulk=BULK, short=(2,), bits=2, **options)
    return scene.step_arguments("cpu", 1.0, threshold=scene.threshold())


def on_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def swapped(tensor: Tensor) -> Tensor:
    """The same, in another layout."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def other(part: Any) -> Any:
    """Something of the same shape that says something else, at another place."""
    if isinstance(part, Sketch):
        return part.map(other)
    if isinstance(part, Tensor):
        return torch.where(part.isfinite(), part * 2, part) if part.is_floating_point() else part.clone()
    return 0.7 * part


PARTS = ("near_keys", "near_values", "bulk_keys", "bulk_values", "sketch", "bulk_read_bytes", "sketch_read_bytes")
RULE = ("logit_threshold", "token_threshold")
KINDS = ("scaling",)  # of the query, which is of another kind then
STEPS = ("query", "log_bulk", "local", "bulk_lengths", "decided")


@needs_compiler
@pytest.mark.parametrize("name", PARTS + RULE + KINDS + STEPS)
def test_what_is_different_is_bound_anew(name: str) -> None:
    """The second step differs in one thing, and its answer from the first's in what the reference's does."""
    first = arguments()
    query, rows, layer = step_of(**first)
    compiled_decode.fused_decode(query, rows, layer)
    bound = layer.bound
    second = first | {name: other(first[name])}
    if name == "local":
        second["local"][0, :1] = False
    if name == "bulk_lengths":
        second["bulk_lengths"][:2] -= 40
        second["bulk_tokens"] = first["bulk_tokens"].clone()
        second["bulk_tokens"][:2] -= 40
    if name == "decided":
        second["decided"] = torch.tensor([False, True, True])[:, None, None]
    counted = {part: second[part].zero_() for part in ("bulk_read_bytes", "sketch_read_bytes")}
    query, rows, again = step_of(**second)
    used = layer if name in STEPS + KINDS else again
    out, flags = compiled_decode.fused_decode(query, rows, used)
    found = {part: int(count) for part, count in counted.items()}
    counted = {part: count.zero_() for part, count in counted.items()}
    wanted, wanted_flags = decode_reference.decode_step(*step_of(**second))
    assert torch.equal(flags, wanted_flags)
    assert torch.allclose(out, wanted, rtol=1e-4, atol=1e-5)
    assert found == {part: int(count) for part, count in counted.items()}
    assert (used.bound is bound) == (name in STEPS)


# By argument of a step: changes after which a kernel would read other numbers, or other memory.
WRONG: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "query": [Tensor.double, lambda t: t[..., :16], lambda t: t[:-1], lambda t: t.repeat(1, 2, 2, 1), on_meta],
    "near_keys": [Tensor.half, lambda t: t[..., :16], lambda t: t[:, :1], on_meta, lambda t: t[:-1]],
    "near_values": [Tensor.half, lambda t: t[:, :, 1:], lambda t: t.mT.contiguous().mT],
    "bulk_keys": [Tensor.half, lambda t: t[:, :, 1:], lambda t: t[:-1], on_meta],
    "bulk_values": [Tensor.half, lambda t: t[..., :16], lambda t: t.mT.contiguous().mT],
    "log_bulk": [Tensor.double, lambda t: t[:-1], lambda t: t[:, :, :1], on_meta, swapped],
    "local": [Tensor.int, lambda t: t[..., 1:], lambda t: t.repeat(2, 1, 1, 1)],
    "pending": [Tensor.int, lambda t: t[..., 1:]],
    "bulk_tokens": [Tensor.int, lambda t: t[:-1]],
    "bulk_lengths": [Tensor.int, lambda t: t[:-1], lambda t: t + 10**6, lambda t: t - 10**6],
    "decided": [Tensor.int, lambda t: t.repeat(5, 1, 1)],
    "columns": [lambda t: t.repeat(1, 1, 1, 2)],
    "rows": [on_meta],
    "bulk": [lambda t: t[:, :, 50:]],
}
TOGETHER = {"columns": ("local", "pending"), "rows": ROWS, "bulk": ("bulk_keys", "bulk_values")}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_do_not_agree_are_refused(name: str) -> None:
    """The check that all kernels share, and the CPU's kernel, refuse them, whatever is bound for the layer."""
    first = arguments()
    query, rows, layer = step_of(**first)
    operands.check(query, rows, layer)
    names = TOGETHER.get(name, (name,))
    of_layer = {part.name for part in fields(Operands)} & {*names}
    for change in WRONG[name]:
        wrong = first | {part: change(first[part]) for part in names}
        for refuse in (operands.check, compiled_decode.fused_decode):
            with pytest.raises(OperandError, match="cannot read these tensors as those of one layer"):
                refuse(*step_of(**wrong))
        if not of_layer:
            with pytest.raises(OperandError, match="cannot read these tensors as those of one layer"):
                operands.check(*step_of(**wrong)[:2], layer)
    operands.check(query, rows, layer)


@pytest.mark.parametrize(
    ("change", "found", "wanted"),
    [
        ({"bulk_values": torch.half}, "bulk_values is float16", "not torch.float32 ["),
        ({"log_bulk": torch.double}, "log_bulk is float64", "not float32 ["),
        ({"decided": torch.int}, "decided is int32", "not bool ["),
    ],
)
def test_an_error_names_the_tensor(change: dict[str, torch.dtype], found: str, wanted: str) -> None:
    """The error says the tensor's dtype, and the one that it should have."""
    given = arguments()
    given |= {name: given[name].to(dtype) for name, dtype in change.items()}
    with pytest.raises(OperandError, match=f"{re.escape(found)}.*{re.escape(wanted)}"):
        operands.check(*step_of(**given))


def test_other_strides_are_not_the_compiled_kernels() -> None:
    given = arguments()
    for name in ("near_keys", "bulk_values"):
        shape = given[name].shape
        wrong = given | {name: torch.zeros(*shape[:2], 2 * shape[2], shape[3])[:, :, ::2]}
        with pytest.raises(OperandError, match=f"{name} is .* of strides .*, the last 2 dimensions contiguous"):
            compiled_decode.fused_decode(*step_of(**wrong))


@needs_compiler
def test_sizes_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that are laid out otherwise than C++ takes them are refused when the kernel is loaded."""

    class Longer(compiled_decode.Decode):
        _fields_ = (("more", compiled_decode.ctypes.c_int64),)

    monkeypatch.setattr(compiled_decode, "Decode", Longer)
    with pytest.raises(RuntimeError, match=r"attention\.cpp has a Longer of"):
        compiled_decode.fused_decode(*step_of(**arguments()))


def test_only_kernels_that_say_so_share_a_row() -> None:
    """A layer of one row, asked by two, would be read out of bounds by all others."""
    near, one = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 1, 4, dtype=torch.bool)
    query = Query(torch.zeros(2, 2, 1, 8), 1.0, log_bulk=torch.zeros(2, 1, 2, 1))
    counts = torch.zeros(1, 1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    rows = Rows(one, one, *counts, torch.zeros(1, 1, 1, dtype=torch.bool))
    with pytest.raises(OperandError, match="near_keys"):
        operands.check(query, rows, Operands(near, near, near, near, 0.0))
    operands.check(query, rows, Operands(near, near, near, near, 0.0), shares=True)
