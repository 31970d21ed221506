"""One decode step laid out in buffers, and the float64 reference's answer to it."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from reference import decide, is_local, log_local_fraction, log_mass, log_masses
from reference import visible_tokens as visible
from rounding import deviation, error_budget, naive_attention
from sketch_reference import estimates, half_variance, is_unreliable, log_shares, sketch_bytes, unread
from torch import Tensor

from qada_cache import sketch
from qada_cache.criterion import logit
from qada_cache.kernels.operands import Operands, Query, Rows
from qada_cache.sketch import Layout, count_segments
from qada_cache.sketch.codec import Sketch, choose_order_dtype
from qada_cache.state.forward_pass import ForwardPass

SINKS, WINDOW = 3, 8
SIZES = {"sink_tokens": SINKS, "local_tokens": SINKS + WINDOW}
RAGGED = [(257, 5), (0, 1), (63, 0), (1, 9), (111, 70)]  # of rows with a bulk (tokens in its buffers, tokens pending)


QUERY, ROWS = ("scaling", "log_bulk", "sink_logits"), ("local", "pending", "bulk_tokens", "bulk_lengths", "decided")


def step_of(**kwargs: Any) -> tuple[Query, Rows, Operands]:
    """What a kernel is told, by the fields of all three; `query` are the queries themselves."""
    query = Query(kwargs.pop("query"), **{name: kwargs.pop(name, None) for name in QUERY})
    return query, Rows(**{name: kwargs.pop(name) for name in ROWS}), Operands(**kwargs)


def within_widest_gap(ranked: list[float], least: float) -> float:
    gap, middle = max((high - low, (high + low) / 2) for low, high in itertools.pairwise(ranked))
    assert gap > least
    return middle


@dataclass
class Scene:
    """Rows of random tokens: of each of `bulk` (stored, pending), then one of each of `short` tokens, without a bulk.

    Whatever is not a token in use is nan. Rows in `padding` get a padding query. With `bits` there is a sketch of the
    stored keys. With `learned_sinks` each query head has one more local token, whose value is zero.
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
    shared: bool = False  # whether values are the first channels of keys, where these lie
    rounding = 0.0  # of scores, beyond that of the dtype
    splits = 100, 16  # as for `small_splits`: three of the longest row of `RAGGED`, whose last ones shorter rows lack

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
        """Of what `step_of` takes, what has tokens selected."""
        placed = self.sketch.map(lambda tensor: tensor.to(device))
        sketch_read_bytes = torch.zeros((), dtype=torch.int64, device=device)
        return {"sketch": placed, "sketch_read_bytes": sketch_read_bytes, "token_threshold": token_threshold}

    def _queries(self, row: int, head: int) -> Tensor:
        return self.query[row, head * self.group : (head + 1) * self.group, 0]

    def _head_kwargs(self, row: int, head: int) -> dict[str, Any]:
        """What `sketch_reference` is to know of a KV head."""
        kwargs = {"query": self._queries(row, head), "sketch": self.sketch[row, head]}
        return kwargs | {"length": self.counts[row], "scaling": self.scaling}

    def estimates(self, row: int, head: int) -> Tensor:
        """What `estimates` says of one KV head's bulk `[group, tokens]`."""
        return estimates(**self._head_kwargs(row, head))

    def log_shares(self, row: int, head: int) -> Tensor:
        """What `log_shares` says of it `[group, tokens]`."""
        keys = self.keys[row][head]
        near = torch.cat([keys[:SINKS], keys[SINKS + self.counts[row] :]])
        masses = [log_mass(query=one, keys=near, scaling=self.scaling) for one in self._queries(row, head)]
        buffer = self._with_sinks(torch.tensor(masses, dtype=torch.float64), head)
        return log_shares(estimates=self.estimates(row, head), log_buffer=buffer, bulk_tokens=sum(self.bulk[row]))

    def _with_sinks(self, masses: Tensor, head: int) -> Tensor:
        """Logs of masses `[group]` of a KV head's queries, with learned sinks."""
        if self.sink_logits is None:
            return masses
        return torch.logaddexp(masses, self.sink_logits[head * self.group : (head + 1) * self.group].double())

    def place(self, device: str) -> None:
        """Have what is stored lie as `device` has it."""

    def token_threshold(self, share: float = 0.2) -> float:
        """One by which a query head asks for about this share of the bulk, and no token by rounding."""
        ranked = sorted(
            value for row in self.sketched_rows() for head in range(self.kv_heads)
            for value in self.log_shares(row, head).flatten().tolist()
        )  # fmt: skip
        middle = ranked[int((1 - 1.5 * share) * len(ranked)) : int((1 - 0.5 * share) * len(ranked))]
        return math.exp(within_widest_gap(middle, least=1e-4))

    def selected(self, flags: Tensor, token_threshold: float) -> dict[tuple[int, int], Tensor]:
        """Of KV heads with a flagged head, by row and head: bool `[tokens]`, what they read of a sketched bulk.

        Without those that find the sketch unreliable.
        """
        return {
            (row, head): (self.log_shares(row, head) >= math.log(token_threshold))[flags[row, head, :, 0]].any(dim=0)
            for row in self.sketched_rows() for head in range(self.kv_heads)
            if flags[row, head].any()
            and not is_unreliable(**self._head_kwargs(row, head))[flags[row, head, :, 0]].any()
        }  # fmt: skip

    def half_variance(self, row: int, head: int) -> Tensor:
        """What `half_variance` says of it `[group]`."""
        return half_variance(**self._head_kwargs(row, head))

    def rough_for_some(self, flags: Tensor) -> tuple[float, int]:
        """What `UNRELIABLE` is to be for half of the KV heads with a flagged head to find the sketch reliable, and how
        many these are."""
        spreads = sorted(
            float(self.half_variance(row, head)[flags[row, head, :, 0]].max())
            for row in self.sketched_rows() for head in range(self.kv_heads) if flags[row, head].any()
        )  # fmt: skip
        half = len(spreads) // 2
        return sum(spreads[half - 1 : half + 1]) / 2, half

    def sketch_read_bytes(self, selected: dict[tuple[int, int], Tensor], flags: Tensor) -> int:
        """What is read of the sketch, where `selected` is."""
        sizes = {"dim": self.dim, "value_dim": self.stored[1].shape[3], "bits": self.bits}
        return sum(sketch_bytes(len(tokens), **sizes) for tokens in selected.values())

    def arguments(self, device: str, *, pin: bool = False) -> dict[str, Any]:
        """What `step_of` takes but for what decides, on `device`; the bulk in pinned memory if `pin`."""
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
        sinks = {} if self.sink_logits is None else {"sink_logits": self.sink_logits.to(device)}
        return placed | sinks | {"scaling": self.scaling}

    def decision_arguments(
        self, device: str = "cpu", *, threshold: float = 0.5, group_rule: str = "head", criterion: Any = "gaussian"
    ) -> dict[str, Any]:
        """Of what `step_of` takes, what decides: as for `reference.decide`."""
        log_bulk = torch.full((self.batch, self.kv_heads, self.group, 1), torch.inf)
        cut = 0.0
        if isinstance(criterion, Tensor):
            log_bulk = torch.where(criterion, torch.inf, -torch.inf)[None, :, :, None]  # one row for all
        elif criterion == "gaussian":
            cut = logit(threshold)
            for row in self.decided_rows():
                masses = log_masses(criterion="gaussian", **self._decision(row))
                log_bulk[row] = torch.tensor([mass for _, mass in masses]).view_as(log_bulk[row])
        elif criterion == "local":
            log_bulk = -log_bulk
        return {"log_bulk": log_bulk.to(device), "logit_threshold": cut, "group_rule": group_rule}

    def step_arguments(
        self, device: str = "cpu", token_threshold: float | None = None, *, pin: bool = False, **decision: Any
    ) -> dict[str, Any]:
        """All that `step_of` takes. Where there is a sketch, tokens are selected; by default about a fifth of them."""
        made = self.arguments(device, pin=pin) | self.decision_arguments(device, **decision)
        if not self.bits:
            return made
        return made | self.sketch_arguments(
            device, self.token_threshold() if token_threshold is None else token_threshold
        )

    def decided_rows(self) -> list[int]:
        """Rows with a bulk and a real query."""
        return [row for row in range(len(self.bulk)) if sum(self.bulk[row]) and row not in self.padding]

    def _decision(self, row: int) -> dict[str, Any]:
        given: dict[str, Any] = {
            "query": self.query[row, :, 0], "keys": self.keys[row], "position": self.lengths[row] - 1
        }  # fmt: skip
        return given | {"scaling": self.scaling} | SIZES

    def masses(self, row: int) -> list[tuple[float, float]]:
        """What the heads of a row compare, by `log_masses` and learned sinks."""
        masses = log_masses(criterion="gaussian", **self._decision(row))
        local = torch.tensor([log_local for log_local, _ in masses], dtype=torch.float64).split(self.group)
        local = torch.cat([self._with_sinks(part, head) for head, part in enumerate(local)])
        return [(mass, log_bulk) for mass, (_, log_bulk) in zip(local.tolist(), masses, strict=True)]

    def threshold(self, group_rule: str = "head") -> float:
        """One that calls about half of the heads local, and none by rounding."""
        shares = []
        for row in self.decided_rows():
            masses = self.masses(row)
            share = torch.tensor([log_local_fraction(log_local=a, log_bulk=b) for a, b in masses], dtype=torch.float64)
            grouped = share.exp().unflatten(0, (self.kv_heads, self.group))
            shares += {"head": grouped, "any": grouped.amin(1)}[group_rule].flatten().tolist()
        return within_widest_gap(sorted(shares)[len(shares) // 4 : -(len(shares) // 4)], least=1e-3)

    def flags(self, **decision: Any) -> Tensor:
        """Bool `[batch, kv_heads, group, 1]`, what the reference decides; `decision` as for `reference.decide`."""
        flags = torch.zeros(self.batch, self.kv_heads * self.group, dtype=torch.bool)
        for row in self.decided_rows():
            if self.sink_logits is None:
                flags[row] = ~decide(**self._decision(row), **decision)
                continue
            local = [is_local(log_local=a, log_bulk=b, threshold=decision["threshold"]) for a, b in self.masses(row)]
            flags[row] = ~decide(**self._decision(row), **decision | {"criterion": ~torch.tensor(local)})
        return flags.view(self.batch, self.kv_heads, self.group, 1)

    def forget_unneeded(self, flags: Tensor, selected: dict[tuple[int, int], Tensor] | None = None) -> int:
        """Make nan what is not read: the bulk of KV heads without a flagged head, tokens not `selected`; bytes left."""
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

    def check(self, out: Tensor, flags: Tensor, selected: dict[tuple[int, int], Tensor] | None = None) -> None:
        """`out` `[batch, heads, 1, value_dim]` against float64, by flags and `selected`, within `error_budget`."""
        assert out.dtype == self.dtype
        assert out.isfinite().all()
        for row, (keys, values, length) in enumerate(zip(self.keys, self.values, self.lengths, strict=True)):
            if not length:
                continue
            local = ~flags[row].flatten()
            mask = visible(local=local, position=length - 1, tokens=length, **SIZES)
            # What stands for the tokens that are not read: its weight, its value.
            rest = torch.full((len(local), 1), -torch.inf, dtype=torch.float64)
            stead = torch.zeros(len(local), values.shape[2], dtype=torch.float64)
            for head in range(self.kv_heads):
                if selected and (row, head) in selected:
                    group = slice(head * self.group, (head + 1) * self.group)
                    mask[group, SINKS : SINKS + self.counts[row]] &= (read := selected[row, head])
                    kwargs = self._head_kwargs(row, head)
                    del kwargs["length"]
                    weight, stead[group] = unread(**kwargs, estimates=self.estimates(row, head), read=read)
                    rest[group] = weight[:, None].masked_fill(local[group, None], -torch.inf)
            given = {"query": self.query[row][None], "keys": keys[None], "values": values[None]}
            given |= {"scaling": self.scaling, "mask": mask[None, :, None]}
            expected, lowp = (naive_attention(**given, dtype=dtype)[0, :, 0] for dtype in (torch.float64, self.dtype))
            near = [
                log_mass(query=query, keys=keys[head // self.group, seen], scaling=self.scaling)
                for head, (query, seen) in enumerate(zip(self.query[row, :, 0], mask, strict=True))
            ]
            read = torch.tensor(near, dtype=torch.float64)[:, None]
            if self.sink_logits is not None:
                share = torch.sigmoid(read - self.sink_logits.double()[:, None])
                expected, lowp = expected * share, (lowp.double() * share).to(self.dtype)
                read = torch.logaddexp(read, self.sink_logits.double()[:, None])
            if selected:
                share = torch.sigmoid(rest - read)
                expected = expected + share * (stead - expected)
                lowp = (lowp.double() + share * (stead - lowp.double())).to(self.dtype)
            error = (out[row, :, 0].double() - expected).abs().max()
            budget = error_budget(reference64=expected, lowp=lowp, deviations=deviation(**given))
            budget += self.rounding * float(values.abs().max())
            assert error <= budget, f"row {row} is off by {error:.3g}, budget {budget:.3g}"
