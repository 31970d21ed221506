"""A decode step over bulks in records, for kernels and their reference."""

from dataclasses import dataclass
from typing import Any

import torch
from decode_scene import Scene
from record_reference import decoded, predicted
from step_buffers import SINKS
from torch import Tensor

from qada_cache.sketch import count_closed
from qada_cache.sketch.coded import RecordLayout, Records, code_tokens, fit_records

NOTHING = 255  # each byte of records that must not be read: scales of such bytes are nan


@dataclass
class RecordScene(Scene):
    """As `Scene`. Rows with a sketch have their bulk in records, and `keys` and `values` are decoded from these, in
    float64."""

    rung: int = 8
    rounding = 2e-5  # queries meet the sketch's codes in 16 bits
    splits = 100, 32

    def __post_init__(self) -> None:
        super().__post_init__()
        value_dim, made = self.stored[1].shape[3], torch.Generator().manual_seed(3)
        found = RecordLayout.from_bits(self.dim, 0 if self.shared else value_dim, self.rung)
        assert found is not None
        self.layout, self.weights = found, 0.2 + 2 * torch.rand(self.kv_heads, self.dim, generator=made)
        self.closed = [count_closed(count) for count in self.counts]
        room = max(count - closed for count, closed in zip(self.counts, self.closed, strict=True)) + 5
        self.records, self.open_records = (
            torch.full((self.batch, self.kv_heads, tokens, self.layout.size), NOTHING, dtype=torch.uint8)
            for tokens in (max(self.closed) + 11, room)
        )
        keys, values = self.stored
        self.stored = [torch.full((*part.shape[:2], room, part.shape[3]), torch.nan).to(part) for part in self.stored]
        if self.shared:
            self.stored[1] = self.stored[0][..., :value_dim]
        self.keys, self.values = ([part.double() for part in parts] for parts in (self.keys, self.values))
        for row, (count, closed) in enumerate(zip(self.counts, self.closed, strict=True)):
            if row not in self.sketched_rows():
                for held, part in zip(self.stored, (keys, values), strict=True):
                    held[row, :, :count] = part[row, :, :count]
                continue
            for head in range(self.kv_heads):
                known = predicted(self.sketch[row, head], count)
                given = keys[row, head, :count], values[row, head, :count, : self.layout.value_dim]
                made_of = code_tokens(*given, known.float(), self.weights[head], self.layout)
                self.records[row, head, :closed] = made_of[:closed]
                self.open_records[row, head, : count - closed] = made_of[closed:]
                bits = {"key_bits": self.layout.key_bits, "value_bits": self.layout.value_bits}
                weighed, sums = decoded(made_of, dim=self.dim, value_dim=self.layout.value_dim, **bits)
                tokens = slice(SINKS, SINKS + count)
                self.keys[row][head, tokens] = known + weighed / self.weights[head].double()
                self.values[row][head, tokens] = self.keys[row][head, tokens, :value_dim] if self.shared else sums

    def place(self, device: str) -> None:
        """Give the records the stride that they have on `device`."""
        stride = self.layout.find_stride(torch.device(device))
        self.records, self.open_records = (fit_records(each, stride) for each in (self.records, self.open_records))

    def record_arguments(self, device: str, *, pin: bool = False) -> dict[str, Any]:
        """The argument `records` of `step_of`, on `device`; with `pin`, closed segments are in pinned memory."""
        self.place(device)
        held = self.records.pin_memory() if pin else self.records.to(device)
        return {"records": Records(held, self.open_records.to(device), self.weights.to(device), self.layout)}

    def forget_unneeded(self, flags: Tensor, selected: dict[tuple[int, int], Tensor] | None = None) -> int:
        """As `Scene`."""
        wanted, needed = flags.any(2)[..., 0], 0
        for row, (count, closed) in enumerate(zip(self.counts, self.closed, strict=True)):
            for head in range(self.kv_heads):
                every = torch.full((count,), bool(wanted[row, head]))
                read = (selected or {}).get((row, head), every)
                if row in self.sketched_rows():
                    self.records[row, head, :closed][~read[:closed]] = NOTHING
                    self.open_records[row, head, : count - closed][~read[closed:]] = NOTHING
                    needed += int(read.sum()) * self.records.shape[3]
                    continue
                for held in self.stored[: 1 if self.shared else 2]:
                    held[row, head, :count][~read] = torch.nan
                    needed += held[row, head, :count][read].nbytes
        return needed

    def sketch_read_bytes(self, selected: dict[tuple[int, int], Tensor], flags: Tensor) -> int:
        """Bytes of the sketch that are read: by every KV head with a flagged head. Heads that read whole bulks decode
        keys by it, too."""
        wanted = flags.any(2)[..., 0]
        read = [(row, head) for row in self.sketched_rows() for head in range(self.kv_heads) if wanted[row, head]]
        return super().sketch_read_bytes({at: torch.ones(self.counts[at[0]]) for at in read}, flags)

    def step_arguments(
        self, device: str = "cpu", token_threshold: float | None = None, *, pin: bool = False, **decision: Any
    ) -> dict[str, Any]:
        """As `Scene`. With `pin`, closed segments are in pinned memory. At a `token_threshold` of 0 heads read whole
        bulks."""
        return super().step_arguments(device, token_threshold, **decision) | self.record_arguments(device, pin=pin)
