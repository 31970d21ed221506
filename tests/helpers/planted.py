"""Replaces Triton's decode kernel by the reference with one planted mistake, which comparisons have to notice."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_scene import QUERY, ROWS, step_of
from torch import Tensor

from qada_cache.kernels import decode_reference
from qada_cache.kernels.operands import Operands, Query, Rows
from qada_cache.sketch.codec import Sketch

Changed = Callable[[dict[str, Any]], dict[str, Any]]


def plant(
    monkeypatch: pytest.MonkeyPatch,
    change: Changed,
    after: Callable[[Tensor, Tensor], Any] | None = None,
    seen: list[dict[str, Any]] | None = None,
) -> None:
    """Replace the kernel by the reference. `change` is applied to its arguments first, `after` to its results; `seen`
    collects the arguments of calls."""

    def kernel(*call: Any) -> Any:
        kwargs = flat(*call)
        if seen is not None:
            seen.append(kwargs)
        found = decode_reference.decode_step(*step_of(**change(dict(kwargs))))
        return found if after is None else after(*found)

    monkeypatch.setattr("qada_cache.kernels.triton.fused_decode", kernel)


def flat(query: Query, rows: Rows, layer: Operands) -> dict[str, Any]:
    """The arguments from which `step_of` would make these three, without those that are None."""
    kwargs = {"query": query.states} | {name: getattr(query, name) for name in QUERY}
    kwargs |= {name: getattr(rows, name) for name in ROWS} | vars(layer)
    return {name: part for name, part in kwargs.items() if part is not None and name not in ("bound", "checked_for")}


def changed(**changes: Callable[[Any], Any]) -> Changed:
    """A change of the arguments that are named, by these functions."""
    return lambda kwargs: kwargs | {name: change(kwargs[name]) for name, change in changes.items() if name in kwargs}


def resketched(**changes: Callable[[Tensor], Tensor]) -> Changed:
    """A change of the sketch's fields that are named, by these functions."""

    def change(sketch: Sketch) -> Sketch:
        return replace(sketch, **{name: one(getattr(sketch, name)) for name, one in changes.items()})

    return changed(sketch=change)


def recoded(change: Callable[[Tensor], Tensor]) -> Changed:
    """A change of the bytes of closed segments' records."""
    return changed(records=lambda records: replace(records, tensor=change(records.tensor.clone())))


def with_bytes(start: int, stop: int, byte: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor[..., start:stop] = byte
        return tensor

    return change


def without_column(mask: Tensor) -> Tensor:
    mask = mask.clone()
    mask[0, 0, 0, mask[0, 0, 0].nonzero()[-1]] = False
    return mask


# By name: a planted mistake, and a text of the error by which the comparison reports it.
WRONG: dict[str, tuple[Changed, str]] = {
    "a token too few": (changed(bulk_lengths=lambda lengths: lengths - 1), "off by"),
    "a token too many": (changed(bulk_lengths=lambda lengths: lengths + 1), "off by nan"),
    "a local token too few": (changed(local=without_column), "off by"),
    "a pending token too few": (changed(pending=without_column), "off by"),
    "scaled otherwise": (changed(scaling=lambda scaling: 1.1 * scaling), "off by"),
    "padding decides": (changed(decided=torch.ones_like), "decisions"),
    "each head for itself": (changed(group_rule=lambda _: "head"), "decisions"),
    "all of a group": (changed(group_rule=lambda _: "any"), "decisions"),
    "all read": (changed(logit_threshold=lambda _: math.inf), "decisions"),
    "none reads": (changed(logit_threshold=lambda _: -math.inf), "decisions"),
    "another's mass": (changed(log_bulk=lambda masses: masses.flip(1)), "decisions"),
    "keys for values": (lambda kwargs: kwargs | {"bulk_values": kwargs["bulk_keys"]}, "off by"),
    "bytes not counted": (
        lambda kwargs: kwargs | {"bulk_read_bytes": torch.zeros_like(kwargs["bulk_read_bytes"])},
        "counts",
    ),
}
WRONG_SKETCHES: dict[str, tuple[Changed, str]] = {
    "nothing for the rest": (resketched(mean_value=torch.zeros_like, slopes=torch.zeros_like), "off by"),
    "the mean for the rest": (resketched(slopes=torch.zeros_like), "off by"),
    "more tokens chosen": (changed(token_threshold=lambda share: share / 8), "off by"),
    "times the weights": (resketched(weights=torch.reciprocal), "off by"),
    "no centres": (resketched(centres=torch.zeros_like), "off by"),
    "one segment for another": (resketched(units=lambda units: units.flip(2)), "off by"),
    "an unreliable sketch": (resketched(noise=torch.zeros_like), "off by"),
    "all tokens read": (
        lambda kwargs: kwargs | ({"token_threshold": 0.0} if "records" in kwargs else {"sketch": None}),
        "off by",
    ),
    "codes not counted": (
        lambda kwargs: kwargs | {"sketch_read_bytes": torch.zeros_like(kwargs["sketch_read_bytes"])},
        "counts",
    ),
}
# Records of 32 channels have 4 bytes of scales, a key's planes of 16 and 4 bytes, and a value's of 16 and 8.
WRONG_RECORDS: dict[str, tuple[Changed, str]] = {
    "no residuals": (recoded(with_bytes(0, 2, 0)), "off by"),
    "a plane of keys": (recoded(with_bytes(20, 24, 0)), "off by"),
    "a plane of values": (recoded(with_bytes(40, 48, 0)), "off by"),
    "keys' scales for values'": (recoded(lambda tensor: tensor[..., [0, 1, 0, 1, *range(4, 48)]]), "off by"),
    "one token for another": (recoded(lambda tensor: tensor.roll(1, dims=2)), "off by"),
    "one head for another": (recoded(lambda tensor: tensor.roll(1, dims=1)), "off by"),
    "no weights": (
        changed(records=lambda records: replace(records, weights=torch.ones_like(records.weights))),
        "off by",
    ),
}
