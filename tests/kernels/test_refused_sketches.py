"""Sketches and records of something else than the bulk: refused before any kernel reads them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_scene import Scene, step_of
from record_scene import RecordScene
from steps import COMPILED, GPU, KERNEL, Path
from test_selected_tokens import BULK
from torch import Tensor

from qada_cache.kernels import operands
from qada_cache.kernels.operands import OperandError

pytestmark = pytest.mark.usefixtures("short_rows")


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


@pytest.mark.usefixtures("whole_segments")
@pytest.mark.parametrize("path", [COMPILED, KERNEL, GPU])
def test_what_records_and_sketch_do_not_hold_is_refused(path: Path) -> None:
    """Every kernel refuses records and sketches of wrong shapes, dtypes or devices before it reads them. On a GPU
    it looks at no lengths: the host would wait for them."""
    function, device = path
    given = RecordScene(bulk=[(1100, 9), (900, 0)], short=(), bits=2).step_arguments(device, 1.0, criterion="dense")
    records, sketch = given["records"], given["sketch"]
    parts = {"codes": sketch.codes[..., :1040].clone(), "scales": sketch.scales[..., :1040].clone()}
    shortened = replace(sketch, **parts)  # which ends in the open segment
    refused: list[tuple[str, dict[str, Any]]] = [
        ("units", {"sketch": replace(sketch, units=sketch.units.double())}),
        ("records", {"records": replace(records, tensor=records.tensor[..., 1:])}),
        ("records", {"records": replace(records, tensor=records.tensor.to("meta"))}),
        ("open_records", {"records": replace(records, open=records.open[:, :1].clone())}),
        ("record_weights", {"records": replace(records, weights=records.weights.double())}),
    ]
    by_length: list[tuple[str, dict[str, Any]]] = [
        ("scales", {"sketch": shortened}),
        ("bulk_lengths is 1100", {"records": replace(records, tensor=records.tensor[:, :, :500].clone())}),
        ("bulk_lengths is 588", {"records": replace(records, open=records.open[:, :, :587].clone())}),
        ("bulk_lengths is 588", {n: given[n][:, :, :587].clone() for n in ("bulk_keys", "bulk_values")}),
    ]
    for name, bad in refused + (by_length if device == "cpu" else []):
        with pytest.raises(OperandError, match=name):
            function(*step_of(**given | bad))
