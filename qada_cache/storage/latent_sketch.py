"""The sketch of a bulk of latents, whose values are channels of its keys."""

from typing import Any

import torch
from torch import Tensor

from ..key_moments.running import RunningMoments
from ..sketch import find_segment_start
from ..sketch.codec import Sketch, list_fields, round_slopes
from .bulk import Bulk
from .bulk_sketch import BulkSketch


class LatentSketch(BulkSketch):
    """Values are the first channels of the keys. Without token selection they have no channels, and the open segment is
    not coded. If the store updates moments of the keys, the covariance of values is part of theirs."""

    codes_open = False
    moments: RunningMoments | None = None
    # Weights of channels in the error of a record's key, float32 `[1, dim]`, as values are channels of it; None: all
    # are equal.
    error_energies: Tensor | None = None

    @property
    def value_dim(self) -> int:
        """Channels of a value."""
        return self.tensors.mean_value.shape[2]

    def take_energies(self, errors: Tensor | None) -> None:
        """Set `error_energies`, unless `errors` is None or empty."""
        if errors is not None and len(errors):
            self.error_energies = errors.to(self.mean_key.device, copy=True)

    @property
    def record_energies(self) -> Tensor | None:
        """`error_energies`: a channel that no query weighs may be part of a value."""
        return self.error_energies

    def move(self, device: torch.device) -> None:
        """Move to another device."""
        super().move(device)
        self.take_energies(self.error_energies)

    @property
    def record(self) -> dict[str, Any]:
        """The fields of a file, by name."""
        return {**super().record, "error_energies": self.error_energies}

    def restore(self, record: dict[str, Any], bulk: Bulk) -> None:
        """The inverse of `record`; see `BulkSketch.restore`."""
        self.error_energies = None if record["error_energies"] is None else torch.empty_like(self.mean_key[0])
        super().restore(record, bulk)

    @torch.inference_mode(False)  # as in `BulkSketch.__init__`
    def follow(self, moments: RunningMoments | None, value_dim: int, bulk: Bulk) -> None:
        """Take the covariance from these moments of the bulk's keys, or compute it here if None. Values have at least
        `value_dim` channels from now on; with 0 nobody selects tokens."""
        opens, self.codes_open = value_dim > 0 and not self.codes_open, value_dim > 0
        if opens:
            self._code_open(bulk)
        if moments is not None:
            self.covariance = self.covariance[:, :, :0].clone()
        elif self.moments is not None:
            self.mean_key = self.moments.mean.clone()
            self.covariance = self.moments.covariance[:, :, : self.value_dim].clone()
        self.moments = moments
        if self.value_dim < value_dim:  # tokens were coded while nobody selected any
            self._correlate_anew(value_dim, bulk)

    def take_moments(self, rows: slice) -> None:
        """Moments of rows of equal length have changed."""
        if self.moments is not None and (length := self.lengths[rows.start]):
            self._derive(rows, length)

    def _code_open(self, bulk: Bulk) -> None:
        for row, length in enumerate(self.lengths):
            if length:
                self._reserve(bulk)
                rows, start = slice(row, row + 1), find_segment_start(length)
                keys, values = bulk.read(rows, slice(None), start, length)
                bulk.code_open(rows, keys, values, self._code(rows, keys, start, length))

    def _correlate_anew(self, value_dim: int, bulk: Bulk) -> None:
        """Compute means and covariance for values of `value_dim` channels, from all tokens of the bulk."""
        tensors, (batch, kv_heads, dim) = self.tensors.to_tensors(), self.mean_key.shape
        self.mean_key = torch.zeros_like(self.mean_key)
        new = self.mean_key.new_zeros
        if self.moments is None:
            self.covariance = new(batch, kv_heads, value_dim, dim)
        fields = list_fields(dim, value_dim, self.layout.count, capacity=0)
        for name in ("mean_value", "slopes", "slope_units"):
            tensors[name] = new(batch, kv_heads, *fields[name][1], dtype=fields[name][0])
        self.tensors = Sketch(**tensors)
        for row, length in enumerate(self.lengths):
            rows = slice(row, row + 1)
            for first, end in bulk.cut_spans(row, heads=kv_heads) if length and self.moments is None else ():
                self._correlate(rows, *bulk.read(rows, slice(None), first, end), first)
            if length:
                self._derive(rows, length)

    def _derive(self, rows: slice, length: int) -> None:
        if self.codes_open:
            super()._derive(rows, length)

    def _find_slopes(self, rows: slice) -> dict[str, Tensor]:
        if self.moments is None:
            return super()._find_slopes(rows)
        mean, covariance = (part[rows, :, : self.value_dim] for part in (self.moments.mean, self.moments.covariance))
        return {"mean_value": mean, **round_slopes(covariance)}

    def _correlate(self, rows: slice, keys: Tensor, values: Tensor, before: int) -> None:
        if self.moments is None:
            super()._correlate(rows, keys, keys[..., : self.value_dim], before)
