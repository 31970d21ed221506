"""Which implementation stores a token and estimates `log A_bulk` by moments: on a GPU Triton's kernel, launched before
the decode kernels and once tried there; else torch."""

import functools
import logging
from typing import Protocol

import torch
from torch import Tensor

from ..said_once import warn_once
from .choice import AUTO_DEVICES
from .decode_reference import find_log_bulk
from .operands import Query
from .reference import find_fault

logger = logging.getLogger(__name__)
BATCH, KV_HEADS, COLUMNS = 2, 3, 9  # sizes of a trial


class Storer(Protocol):
    """`triton.storing.Storer`, made of near buffers and the number of query heads."""

    def store(self, query: Query, place: int | Tensor) -> None:
        """Write `query.unstored` into column `place`. If there are `query.moments`, set `query.log_bulk` by them."""


def make_storer(kernels: str, near_keys: Tensor, near_values: Tensor, heads: int) -> Storer | None:
    """The `Storer` for these buffers, those of `Operands`, before Triton's decode kernel reads them; None if torch has
    to store tokens. `heads` are query heads. `kernels` is "auto" or "triton"."""
    device, dim, value_dim = near_keys.device, near_keys.shape[3], near_values.shape[3]
    if near_keys.dtype != near_values.dtype or (kernels == "auto" and device.type not in AUTO_DEVICES):
        return None
    from .triton import storing as triton_storing

    group = heads // near_keys.shape[1]
    if kernels == "auto" and (
        (fault := find_storing_fault(
            triton_storing.Storer, device, near_keys.dtype, group=group, dim=dim, value_dim=value_dim
        )) is not None
    ):  # fmt: skip
        warn_once(logger, f"tokens are stored on {device} by torch's operations, not by Triton's kernel: {fault}")
        return None
    return triton_storing.Storer(near_keys, near_values, heads)


@functools.cache
def find_storing_fault(
    make: type, device: torch.device, dtype: torch.dtype, *, group: int, dim: int, value_dim: int
) -> str | None:
    """The fault of a `triton.storing.Storer` on this device, as `reference.find_fault` says it, with a random token. It
    is computed once a process."""
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    states, scaling = draw(BATCH, KV_HEADS * group, 1, dim).to(dtype), 1 / dim
    new = [draw(BATCH, KV_HEADS, 1, size).to(dtype) for size in (dim, value_dim)]
    near = [draw(BATCH, KV_HEADS, COLUMNS, size).to(dtype) for size in (dim, value_dim)]
    # Moments of one prompt for all rows, and of one for each row. Each estimate is the larger one in some heads.
    moments = [
        (draw(rows * KV_HEADS, 1, dim), draw(rows * KV_HEADS, dim, dim), 7 + draw(rows, 1, 1, 1)) for rows in (1, BATCH)
    ]
    log_bulk = find_log_bulk(Query(states, scaling, moments=moments), KV_HEADS)
    expected = [part.clone() for part in near]
    for buffer, part in zip(expected, new, strict=True):
        buffer[:, :, 4:5] = part

    def compute() -> tuple[Tensor, ...]:
        buffers = [part.to(device) for part in near]
        query = Query(states.to(device), scaling, unstored=(new[0].to(device), new[1].to(device)))
        query.moments = [(mean.to(device), spread.to(device), count.to(device)) for mean, spread, count in moments]
        make(*buffers, KV_HEADS * group).store(query, 4)
        assert query.log_bulk is not None
        return tuple(part.cpu() for part in (query.log_bulk, *buffers))

    return find_fault(compute, (log_bulk, *expected))
