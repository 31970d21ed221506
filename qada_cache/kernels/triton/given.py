"""The tensors of a layer that every step is launched with, in the order of the kernels' arguments."""

from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from ...sketch.codec import Sketch
from ..operands import Operands

# Of a sketch, what queries are prepared by, and what keys are decoded by.
CODING = "noise", "variances", "centres", "order", "weights", "slopes", "slope_units"
FIT = "centres", "order", "weights"
find_coding, NO_CODING = attrgetter(*CODING), (None,) * len(CODING)
find_fit, NO_FIT = attrgetter(*FIT), (None,) * (len(FIT) + 1)


class Given(NamedTuple):
    """Parts of the arguments, each of neighbours, found once for all steps that share the same memory."""

    shared: dict[str, Tensor]  # that memory
    near: tuple[Tensor | None, ...]  # of `local_kernel`, from here on
    near_parts: tuple[Tensor | None, ...]
    queries: tuple[Tensor | None, ...]
    codes: tuple[Tensor | None, ...]  # of `estimate_kernel`
    estimates: tuple[Tensor | None, ...]
    tokens: tuple[Tensor | None, ...]  # of `selected_kernel`
    counted: tuple[Tensor | None, ...]
    selected: tuple[Tensor | None, ...]
    bulk: tuple[Tensor | None, ...]  # of `bulk_kernel`
    merged: tuple[Tensor | None, ...]
    done: Tensor | None  # of both

    @classmethod
    def find(
        cls, shared: dict[str, Tensor], layer: Operands, sketch: Sketch | None, arrived: Tensor, errors: Tensor | None
    ) -> "Given":
        """Those of a layer, whose `sketch` there is room for, None without. `arrived` and `errors` are its kernels'."""
        get, records = shared.get, layer.records
        parts, lse, done, tokens = get("parts"), get("lse"), get("done"), get("tokens")
        prepared, along, turned = get("prepared"), get("along"), get("turned")
        estimates, sums = get("estimates"), get("sums")
        counters = (layer.bulk_read_bytes, None) if sketch is None else (None, layer.sketch_read_bytes)
        codes = () if sketch is None else (prepared, sketch.codes, sketch.scales, sketch.units)
        coding = NO_CODING if sketch is None else find_coding(sketch)
        recorded = (None, None) if records is None else (records.tensor, records.open)
        weights = None if records is None else records.weights
        mean_value = None if sketch is None else sketch.mean_value
        fit = NO_FIT if not layer.decodes or sketch is None else (*find_fit(sketch), weights)
        near: tuple[Tensor | None, ...] = (layer.near_keys, layer.near_values)
        bulk: tuple[Tensor | None, ...] = (layer.bulk_keys, layer.bulk_values)
        if layer.shares_keys:  # of which kernels take the values
            near, bulk = (near[0], None), (bulk[0], None)
        return cls(
            shared=shared,
            near=near,
            near_parts=(get("near"), get("near_lse"), arrived, parts, lse),
            queries=(done, *counters, tokens, prepared, along, turned, errors, *coding, weights),
            codes=codes,
            estimates=(tokens, estimates, sums),
            tokens=(turned, *codes, *bulk, *recorded, *fit),
            counted=(layer.bulk_read_bytes, tokens),
            selected=(
                estimates, sums, get("index"), get("unpacked"), parts, lse, get("unread"), mean_value, along,
            ),
            bulk=bulk,
            merged=(parts, lse),
            done=done,
        )  # fmt: skip
