"""One decode step, and the float64 reference's decisions, selection and outputs for it."""

import itertools
import math
from typing import Any

import torch
from reference import decide, is_local, log_local_fraction, log_mass, log_masses
from reference import visible_tokens as visible
from rounding import deviation, error_budget, naive_attention
from sketch_reference import estimates, half_variance, is_unreliable, log_shares, sketch_bytes, unread
from step_buffers import SINKS, WINDOW, StepBuffers
from torch import Tensor

from qada_cache.criterion import logit
from qada_cache.kernels.operands import Operands, Query, Rows

SIZES = {"sink_tokens": SINKS, "local_tokens": SINKS + WINDOW}


QUERY, ROWS = ("scaling", "log_bulk", "sink_logits"), ("local", "pending", "bulk_tokens", "bulk_lengths", "decided")


def step_of(**kwargs: Any) -> tuple[Query, Rows, Operands]:
    """The three arguments of a kernel, from the fields of all three; `query` is the tensor of queries."""
    query = Query(kwargs.pop("query"), **{name: kwargs.pop(name, None) for name in QUERY})
    return query, Rows(**{name: kwargs.pop(name) for name in ROWS}), Operands(**kwargs)


def within_widest_gap(ranked: list[float], least: float) -> float:
    """The middle of the widest gap between neighbours of sorted numbers, which must be wider than `least`."""
    gap, middle = max((high - low, (high + low) / 2) for low, high in itertools.pairwise(ranked))
    assert gap > least
    return middle


class Scene(StepBuffers):
    """`StepBuffers` with the float64 reference's decisions, selection and outputs."""

    def _queries(self, row: int, head: int) -> Tensor:
        return self.query[row, head * self.group : (head + 1) * self.group, 0]

    def _head_kwargs(self, row: int, head: int) -> dict[str, Any]:
        """Arguments of `sketch_reference`'s functions for one KV head: queries `[group, dim]`, sketch and length."""
        kwargs = {"query": self._queries(row, head), "sketch": self.sketch[row, head]}
        return kwargs | {"length": self.counts[row], "scaling": self.scaling}

    def estimates(self, row: int, head: int) -> Tensor:
        """`sketch_reference.estimates` of one KV head's bulk: scores `[group, tokens]`."""
        return estimates(**self._head_kwargs(row, head))

    def log_shares(self, row: int, head: int) -> Tensor:
        """`sketch_reference.log_shares` of one KV head's bulk `[group, tokens]`."""
        keys = self.keys[row][head]
        near = torch.cat([keys[:SINKS], keys[SINKS + self.counts[row] :]])
        masses = [log_mass(query=one, keys=near, scaling=self.scaling) for one in self._queries(row, head)]
        buffer = self._with_sinks(torch.tensor(masses, dtype=torch.float64), head)
        return log_shares(estimates=self.estimates(row, head), log_buffer=buffer, bulk_tokens=sum(self.bulk[row]))

    def _with_sinks(self, masses: Tensor, head: int) -> Tensor:
        """Log masses `[group]` of a KV head's queries, with learned sinks added."""
        if self.sink_logits is None:
            return masses
        return torch.logaddexp(masses, self.sink_logits[head * self.group : (head + 1) * self.group].double())

    def token_threshold(self, share: float = 0.2) -> float:
        """A `token_threshold` at which query heads select about this `share` of the bulk, far enough from every token's
        share that rounding decides about none."""
        ranked = sorted(
            value for row in self.sketched_rows() for head in range(self.kv_heads)
            for value in self.log_shares(row, head).flatten().tolist()
        )  # fmt: skip
        middle = ranked[int((1 - 1.5 * share) * len(ranked)) : int((1 - 0.5 * share) * len(ranked))]
        return math.exp(within_widest_gap(middle, least=1e-4))

    def selected(self, flags: Tensor, token_threshold: float) -> dict[tuple[int, int], Tensor]:
        """The tokens of a sketched bulk that KV heads with a flagged head read, by row and head: bool `[tokens]`.

        Heads whose sketch is unreliable are left out: they read all.
        """
        return {
            (row, head): (self.log_shares(row, head) >= math.log(token_threshold))[flags[row, head, :, 0]].any(dim=0)
            for row in self.sketched_rows() for head in range(self.kv_heads)
            if flags[row, head].any()
            and not is_unreliable(**self._head_kwargs(row, head))[flags[row, head, :, 0]].any()
        }  # fmt: skip

    def half_variance(self, row: int, head: int) -> Tensor:
        """`sketch_reference.half_variance` of one KV head's bulk `[group]`."""
        return half_variance(**self._head_kwargs(row, head))

    def rough_for_some(self, flags: Tensor) -> tuple[float, int]:
        """A value of `UNRELIABLE` at which the sketch is reliable for half of the KV heads with a flagged head, and how
        many that half is."""
        spreads = sorted(
            float(self.half_variance(row, head)[flags[row, head, :, 0]].max())
            for row in self.sketched_rows() for head in range(self.kv_heads) if flags[row, head].any()
        )  # fmt: skip
        half = len(spreads) // 2
        return sum(spreads[half - 1 : half + 1]) / 2, half

    def sketch_read_bytes(self, selected: dict[tuple[int, int], Tensor], flags: Tensor) -> int:
        """Bytes of the sketch that are read to make the selection `selected`."""
        sizes = {"dim": self.dim, "value_dim": self.stored[1].shape[3], "bits": self.bits}
        return sum(sketch_bytes(len(tokens), **sizes) for tokens in selected.values())

    def decision_arguments(
        self, device: str = "cpu", *, threshold: float = 0.5, group_rule: str = "head", criterion: Any = "gaussian"
    ) -> dict[str, Any]:
        """The arguments of `step_of` that decide: log_bulk float32 `[batch, kv_heads, group, 1]`, the threshold's logit
        and the group rule. The keywords are as for `reference.decide`."""
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
        """All arguments of `step_of`. With a sketch tokens are selected, by default about a fifth of them."""
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
        """(log A_local, log A_bulk) of each query head of a row: `log_masses`, with learned sinks in A_local."""
        masses = log_masses(criterion="gaussian", **self._decision(row))
        local = torch.tensor([log_local for log_local, _ in masses], dtype=torch.float64).split(self.group)
        local = torch.cat([self._with_sinks(part, head) for head, part in enumerate(local)])
        return [(mass, log_bulk) for mass, (_, log_bulk) in zip(local.tolist(), masses, strict=True)]

    def threshold(self, group_rule: str = "head") -> float:
        """A `threshold` at which about half of the heads are local, far enough from every head's fraction that rounding
        decides about none."""
        shares = []
        for row in self.decided_rows():
            masses = self.masses(row)
            share = torch.tensor([log_local_fraction(log_local=a, log_bulk=b) for a, b in masses], dtype=torch.float64)
            grouped = share.exp().unflatten(0, (self.kv_heads, self.group))
            shares += {"head": grouped, "any": grouped.amin(1)}[group_rule].flatten().tolist()
        return within_widest_gap(sorted(shares)[len(shares) // 4 : -(len(shares) // 4)], least=1e-3)

    def flags(self, **decision: Any) -> Tensor:
        """The reference's decisions, bool `[batch, kv_heads, group, 1]`, True = long-context; `decision` is as for
        `reference.decide`."""
        flags = torch.zeros(self.batch, self.kv_heads * self.group, dtype=torch.bool)
        for row in self.decided_rows():
            if self.sink_logits is None:
                flags[row] = ~decide(**self._decision(row), **decision)
                continue
            local = [is_local(log_local=a, log_bulk=b, threshold=decision["threshold"]) for a, b in self.masses(row)]
            flags[row] = ~decide(**self._decision(row), **decision | {"criterion": ~torch.tensor(local)})
        return flags.view(self.batch, self.kv_heads, self.group, 1)

    def check(self, out: Tensor, flags: Tensor, selected: dict[tuple[int, int], Tensor] | None = None) -> None:
        """Assert that `out` `[batch, heads, 1, value_dim]` is within `error_budget` of float64, under these decisions
        and this selection."""
        assert out.dtype == self.dtype
        assert out.isfinite().all()
        for row, (keys, values, length) in enumerate(zip(self.keys, self.values, self.lengths, strict=True)):
            if not length:
                continue
            local = ~flags[row].flatten()
            mask = visible(local=local, position=length - 1, tokens=length, **SIZES)
            # The substitute for the tokens that are not read: log of its weight, and its value.
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
