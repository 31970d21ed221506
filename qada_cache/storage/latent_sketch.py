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
    """Values are the first channels of the keys; there are none where nobody selects, and then the open segment is read
    as the model made it, and not coded. Where moments of the keys are kept, they have the covariance of values too."""

    codes_open = False
    moments: RunningMoments | None = None
    # What errors of keys count, float32 `[1, dim]`, where values are channels of them; None: all count alike.
    error_energies: Tensor | None = None

    @property
    def value_dim(self) -> int:
        """Channels of a value."""
        return self.tensors.mean_value.shape[2]

    def take_energies(self, errors: Tensor | None) -> None:
        """Have these `error_energies`, if there are any."""
        if errors is not None and len(errors):
            self.error_energies = errors.to(self.mean_key.device, copy=True)

    @property
    def record_energies(self) -> Tensor | None:
        """Channels that no query looks at may be values."""
        return self.error_energies

    def move(self, device: torch.device) -> None:
        """As `BulkSketch`."""
        super().move(device)
        self.take_energies(self.error_energies)

    @property
    def record(self) -> dict[str, Any]:
        """As `BulkSketch`."""
        return {**super().record, "error_energies": self.error_energies}

    def restore(self, record: dict[str, Any], bulk: Bulk) -> None:
        """As `BulkSketch`."""
        self.error_energies = None if record["error_energies"] is None else torch.empty_like(self.mean_key[0])
        super().restore(record, bulk)

    @torch.inference_mode(False)  # as in `BulkSketch.__init__`
    def follow(self, moments: RunningMoments | None, value_dim: int, bulk: Bulk) -> None:
        """Go by these moments of the bulk's keys, or without any. Have values of `value_dim`, or of more if it has; of
        none, nobody selects."""
        opens, self.codes_open = value_dim > 0 and not self.codes_open, value_dim > 0
        if opens:
            self._code_open(bulk)
        if moments is not None:
            self.covariance = self.covariance[:, :, :0].clone()
        elif self.moments is not None:
            self.mean_key = self.moments.mean.clone()
            self.covariance = self.moments.covariance[:, :, : self.value_dim].clone()
        self.moments = moments
        if self.value_dim < value_dim:  # tokens were coded, and nobody selected among them
            self._correlate_anew(value_dim, bulk)

    def take_moments(self, rows: slice) -> None:
        """Moments of rows of equal length have changed."""
        if self.moments is not None and (length := self.lengths[rows.start]):
            self._derive(rows, length)

    def _code_open(self, bulk: Bulk) -> None:
        for row, length in enumerate(self.lengths):
            if length:
                self._reserve(bulk)
                own, start = slice(row, row + 1), find_segment_start(length)
                keys, values = bulk.read(own, slice(None), start, length)
                bulk.code_open(own, keys, values, self._code(own, keys, start, length))

    def _correlate_anew(self, value_dim: int, bulk: Bulk) -> None:
        kept, (batch, kv_heads, dim) = self.tensors.to_tensors(), self.mean_key.shape
        self.mean_key = torch.zeros_like(self.mean_key)
        new = self.mean_key.new_zeros
        if self.moments is None:
            self.covariance = new(batch, kv_heads, value_dim, dim)
        fields = list_fields(dim, value_dim, self.layout.count, capacity=0)
        for name in ("mean_value", "slopes", "slope_units"):
            kept[name] = new(batch, kv_heads, *fields[name][1], dtype=fields[name][0])
        self.tensors = Sketch(**kept)
        for row, length in enumerate(self.lengths):
            own = slice(row, row + 1)
            for first, end in bulk.cut_spans(row, heads=kv_heads) if length else ():
                self._correlate(own, *bulk.read(own, slice(None), first, end), first)
            if length:
                self._derive(own, length)

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
