"""The rows of one decode step, laid out in buffers as kernels take them."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qada_cache import sketch
from qada_cache.sketch import Layout, count_segments
from qada_cache.sketch.codec import Sketch, choose_order_dtype
from qada_cache.state.forward_pass import ForwardPass

SINKS, WINDOW = 3, 8
RAGGED = [(257, 5), (0, 1), (63, 0), (1, 9), (111, 70)]  # rows with a bulk: tokens stored in it, and tokens pending


@dataclass
class StepBuffers:
    """Rows of random tokens: one for each (stored, pending) of `bulk`, then one for each number of `short`, without a
    bulk.

    Buffers are nan outside the tokens in use. Rows in `padding` get a padding query. With `bits` there is a sketch of
    the stored keys. With `learned_sinks` each query head has one more local token, whose value is zero.
    """

    bulk: list[tuple[int, int]] = field(default_factory=lambda: list(RAGGED))
    short: tuple[int, ...] = (SINKS + WINDOW, 2)
    padding: tuple[int, ...] = ()
    group: int = 2
    kv_heads: int = 2
    dim: int = 32
    value_dim: int | None = None
    dtype: torch.dtype = torch.float32
    bits: float = 0
    learned_sinks: bool = False
    shared: bool = False  # whether values are views of the first channels of keys
    rounding = 0.0  # error to allow in units of the largest value, beyond that of the dtype
    splits = 100, 16  # as for `small_splits`: the longest row of `RAGGED` has three splits, shorter ones fewer

    def __post_init__(self) -> None:
        made = torch.Generator().manual_seed(self.dim + self.group)
        value_dim = self.dim if self.value_dim is None else self.value_dim
        self.flushed = [SINKS + stored if stored else 0 for stored, _ in self.bulk] + [0] * len(self.short)
        self.lengths = [SINKS + WINDOW + sum(tokens) for tokens in self.bulk] + list(self.short)
        self.batch, self.scaling = len(self.lengths), self.dim**-0.5
        heads = self.kv_heads * self.group
        self.query = (1.5 * torch.randn(self.batch, heads, 1, self.dim, generator=made)).to(self.dtype)
        self.keys, self.values = (
            [
                (shift + torch.randn(self.kv_heads, length, dim, generator=made)).to(self.dtype)
                for length in self.lengths
            ]
            for shift, dim in ((0.2, self.dim), (0.0, value_dim))
        )
        end = max(length - gone for length, gone in zip(self.lengths, self.flushed, strict=True))
        self.near, self.stored = [], []
        capacity = max(stored for stored, _ in self.bulk) + 7 if self.bulk else 0
        for tensors, dim in ((self.keys, self.dim), (self.values, value_dim)):
            near = torch.full((self.batch, self.kv_heads, SINKS + end + 4, dim), torch.nan, dtype=self.dtype)
            bulk = torch.full((self.batch, self.kv_heads, capacity, dim), torch.nan, dtype=self.dtype)
            for row, (tensor, length, gone) in enumerate(zip(tensors, self.lengths, self.flushed, strict=True)):
                sinks = min(gone, SINKS)
                near[row, :, :sinks] = tensor[:, :sinks]
                near[row, :, SINKS + end - (length - gone) : SINKS + end] = tensor[:, gone:]
                bulk[row, :, : max(gone - SINKS, 0)] = tensor[:, sinks:gone]
            self.near.append(near[:, :, : SINKS + end])  # a part of a larger buffer, as in the cache
            self.stored.append(bulk)
        if self.shared:
            self.values = [tensor[..., :value_dim] for tensor in self.keys]
            self.near[1], self.stored[1] = self.near[0][..., :value_dim], self.stored[0][..., :value_dim]
        valid = torch.ones(self.batch, 1, dtype=torch.bool)
        valid[list(self.padding)] = False
        self.real = (
            valid[:, None] if self.padding else valid[:1, None]
        )  # whether or not there is a bulk to decide about
        self.rows = ForwardPass(SINKS, WINDOW).find_rows(
            lengths=self.lengths, flushed=self.flushed, end=end, queries=1, valid=valid if self.padding else None,
            device=torch.device("cpu"),
        )  # fmt: skip
        self.counts = [max(gone - SINKS, 0) for gone in self.flushed]
        if self.bits:
            self._make_sketch(capacity, made)
        self.sink_logits = (2 + torch.randn(heads, generator=made)).to(self.dtype) if self.learned_sinks else None

    def _make_sketch(self, capacity: int, made: torch.Generator) -> None:
        heads, value_dim = (self.batch, self.kv_heads), self.stored[1].shape[3]
        segments = count_segments(capacity) if capacity else 0
        layout = Layout.from_bits(self.dim, self.bits)
        self.sketch = Sketch(
            codes=torch.randint(-(2**31), 2**31, (*heads, layout.count, capacity), generator=made).int(),
            scales=torch.randint(0, 256, (*heads, capacity), generator=made).byte(),
            units=torch.full((*heads, segments), torch.nan),
            centres=torch.full((*heads, segments, self.dim), torch.nan, dtype=torch.bfloat16),
            order=torch.full((*heads, segments, self.dim), self.dim - 1, dtype=choose_order_dtype(self.dim)),
            weights=torch.full((*heads, segments, self.dim), torch.nan, dtype=torch.bfloat16),
            mean_squares=torch.full((*heads, segments), torch.nan),
            noise=torch.full((*heads, self.dim), torch.nan),
            variances=torch.full((*heads, self.dim), torch.nan),
            mean_value=torch.full((*heads, value_dim), torch.nan),
            slopes=torch.full((*heads, value_dim, self.dim // 2), -128, dtype=torch.int8),
            slope_units=torch.full((*heads, self.dim), torch.nan),
        )
        energies = 0.1 + 3 * torch.rand(self.kv_heads, self.dim, generator=made).square()
        for row in self.sketched_rows():
            keys, values = (part[row][:, SINKS : SINKS + self.counts[row]] for part in (self.keys, self.values))
            for name, part in Sketch.of(keys, values, energies, layout).to_tensors().items():
                getattr(self.sketch, name)[row][tuple(map(slice, part.shape))] = part

    def sketched_rows(self) -> list[int]:
        """Rows whose tokens are selected."""
        return [row for row, count in enumerate(self.counts) if self.bits and count >= sketch.MIN_TOKENS]

    def sketch_arguments(self, device: str, token_threshold: float) -> dict[str, Any]:
        """The arguments of `step_of` that select tokens, on `device`."""
        placed = self.sketch.map(lambda tensor: tensor.to(device))
        sketch_read_bytes = torch.zeros((), dtype=torch.int64, device=device)
        return {"sketch": placed, "sketch_read_bytes": sketch_read_bytes, "token_threshold": token_threshold}

    def place(self, device: str) -> None:
        """Lay stored tokens out as on `device`; nothing to do for keys and values."""

    def arguments(self, device: str, *, pin: bool = False) -> dict[str, Any]:
        """The arguments of `step_of` on `device`, except those that decide or select; with `pin` the bulk is in pinned
        memory."""
        rows = self.rows
        placed = {
            "query": self.query,
            "near_keys": self.near[0],
            "near_values": self.near[1],
            "bulk_keys": self.stored[0],
            "bulk_values": self.stored[1],
            "local": rows.local,
            "pending": rows.pending,
            "bulk_tokens": rows.bulk_tokens,
            "bulk_lengths": rows.bulk_lengths,
            "decided": self.real,
            "bulk_read_bytes": torch.zeros((), dtype=torch.int64),
        }
        host = ("bulk_keys", "bulk_values") if pin else ()
        placed = {name: t.pin_memory() if name in host else t.to(device) for name, t in placed.items()}
        if self.shared:  # a copy of a view is none
            for name in ("near", "bulk"):
                placed[f"{name}_values"] = placed[f"{name}_keys"][..., : placed[f"{name}_values"].shape[3]]
        sinks = {} if self.sink_logits is None else {"sink_logits": self.sink_logits.to(device)}
        return placed | sinks | {"scaling": self.scaling}

    def forget_unneeded(self, flags: Tensor, selected: dict[tuple[int, int], Tensor] | None = None) -> int:
        """Fill with nan what must not be read: the bulk of KV heads without a flagged head, and tokens that are not
        `selected`. Returns the bytes that are left."""
        needed = 0
        for (row, head), tokens in (selected or {}).items():
            for buffer in self.stored:
                buffer[row, head, : self.counts[row]][~tokens] = torch.nan
        for row, head in (~flags.any(2)[..., 0]).nonzero().tolist():
            for buffer in self.stored:
                buffer[row, head] = torch.nan
        for row, head in flags.any(2)[..., 0].nonzero().tolist():
            read = (selected or {}).get((row, head), torch.ones(self.counts[row], dtype=torch.bool))
            held = self.stored[: 1 if self.shared else 2]
            needed += sum(t[row, head, : self.counts[row]][read].nbytes for t in held)
        return needed
