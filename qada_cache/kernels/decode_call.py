"""The arguments of one decode step of one layer, for all kernels, and their checks before addresses are taken."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ..sketch import BLOCK
from ..sketch.codec import Sketch, sketch_fields


class OperandError(ValueError):
    """Tensors that a kernel would misread, or read out of bounds."""

    def __init__(self, tensors: tuple[Tensor | None, ...]) -> None:
        found = [(t.dtype, str(t.device), list(t.shape)) for t in tensors if t is not None]
        super().__init__(f"the kernel cannot read these tensors as those of one layer: {found}")


@dataclass(eq=False)
class Rows:
    """Which tokens the query of each row sees, for all layers of a pass; `rows` is 1 if all are alike. OperandError, if
    they do not fit each other, or a length is negative."""

    local: Tensor  # bool `[rows, columns]`, of the first columns of the local buffers
    pending: Tensor  # likewise, none of them local
    bulk_lengths: Tensor  # int64 `[rows]`
    decided: Tensor  # bool `[rows]`, False for a padding query: its heads are local, its output finite and unused
    columns: int = field(init=False)  # of the local buffers
    number: int = field(init=False)  # the greatest `rows`
    longest: int | None = field(init=False, default=None)  # length; None where to look would be to wait for the device
    bound: Any = field(init=False, default=None, repr=False)  # derived values of a kernel

    def __post_init__(self) -> None:
        masks, of_rows = (self.local, self.pending), (self.bulk_lengths, self.decided)
        parts = *masks, *of_rows
        self.number, self.columns = max(map(len, parts)), self.local.shape[1]
        fits = [part.dtype for part in parts] == [torch.bool, torch.bool, torch.int64, torch.bool]
        fits = fits and all(mask.shape[1:] == (self.columns,) and mask.stride(1) == 1 for mask in masks)
        fits = fits and all(part.dim() == 1 for part in of_rows)
        fits = fits and all(len(part) in (1, self.number) and part.device == self.local.device for part in parts)
        if fits and self.bulk_lengths.is_cpu:
            lengths = self.bulk_lengths.tolist()
            self.longest, fits = max(lengths), min(lengths) >= 0
        if not fits:
            raise OperandError(parts)


@dataclass(eq=False)
class Rule:
    """How a layer's heads decide and select; one object for as long as nothing of it changes."""

    scaling: float  # of the scores
    logit_threshold: float  # as for `criterion.long_context`
    group_rule: str = "head"  # as in `criterion.group_decision`
    token_threshold: float = 0.0  # as in `sketch.selection.select_tokens`
    softcap: float | None = None  # as for `reference.partial_attention`; no kernel caps scores


class Binding:
    """The checks and derived values of a layer's last call, for the next one, nearly always with the same tensors.

    It knows them by identity and keeps none of them. A copy of a layer has other tensors, and so begins with nothing.
    """

    def __init__(self) -> None:
        self.bound: Any = None  # what a kernel made of them; None once any of them is another
        # The selected kernel, None for none; the rule, and `log A_bulk` where nothing is estimated. Each is behind the
        # key it was made for.
        self.kernel: tuple[Any, Callable | None] | None = None
        self.rule: tuple[Any, Rule, Tensor] | None = None
        self._query: Any = None
        self._parts: list[Callable[[], Any]] = []

    def __deepcopy__(self, memo: dict) -> "Binding":
        return Binding()

    def matches(self, call: "DecodeCall") -> bool:
        """Whether the last checked call had the same tensors and rule, and a query like this one; else forget it."""
        same = self._query == (call.query.shape, call.query.dtype, call.query.device) and all(
            known() is part for known, part in zip(self._parts, call.parts(), strict=True)
        )
        if not same:
            self._query = self.bound = None
        return same

    def remember(self, call: "DecodeCall") -> None:
        """This call was checked."""
        self._query = call.query.shape, call.query.dtype, call.query.device
        self._parts = [(lambda: None) if part is None else weakref.ref(part) for part in call.parts()]


@dataclass(eq=False)
class DecodeCall:
    """One decode step of one layer, for every kernel: query-adaptive attention of one query token a row.

    A query's tokens are its local ones (sinks and window, itself included) and its bulk, which is the first
    `bulk_lengths` tokens of the bulk buffers and the `pending` columns of the local buffers. Columns of the local
    buffers that are neither, tokens past `bulk_lengths`, and the bulk buffers of KV heads without a flagged head are
    not read and may hold anything, nan included. "`batch` or 1" below means that one row may stand for all.
    """

    query: Tensor  # `[batch, heads, 1, dim]`; all tensors below share its dtype unless one is given
    local_keys: Tensor  # `[batch, kv_heads, columns or more, dim]`
    local_values: Tensor  # likewise, of `value_dim`
    bulk_keys: Tensor  # `[batch, kv_heads, capacity, dim]`
    bulk_values: Tensor  # likewise, of `value_dim`
    rows: Rows
    log_bulk: Tensor  # float32 `[batch or 1, kv_heads, group]`, `log A_bulk`; nan says as little as infinity
    rule: Rule
    # Of the bulk's keys, with room for as many tokens. With it, a KV head reads the tokens of `select_tokens` if the
    # bulk has `MIN_TOKENS` and more. A group reads all if one of its long-context heads finds the sketch `unreliable`,
    # and so does every group without a sketch.
    sketch: Sketch | None = None
    bulk_read_bytes: Tensor | None = None  # int64 `[]`: the needed bytes of the bulk are added to it
    sketch_read_bytes: Tensor | None = None  # int64 `[]`: likewise, of the sketch
    # int64 `[batch, kv_heads, 2]`, contiguous: the addresses of a resident head's keys and values, which lie token by
    # token as in the bulk buffers, at multiples of 16 bytes; 0 for a head to be read there.
    resident_pointers: Tensor | None = None
    resident_hit_bytes: Tensor | None = None  # int64 `[]`, with them: takes needed bytes of residents instead
    binding: Binding = field(default_factory=Binding)

    @classmethod
    def of(cls, **kwargs: Any) -> "DecodeCall":
        """A call by the fields of `Rows` and `Rule` beside its own."""
        taken = {kind: {part.name for part in fields(kind) if part.init} & kwargs.keys() for kind in (Rows, Rule)}
        rows, rule = ({name: kwargs.pop(name) for name in names} for names in taken.values())
        return cls(**kwargs, rows=Rows(**rows), rule=Rule(**rule))

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query.shape[1] // self.local_keys.shape[1]

    def parts(self) -> tuple[Any, ...]:
        """The parts that change with storage or options alone."""
        return (
            *(self.local_keys, self.local_values, self.bulk_keys, self.bulk_values, self.rule),
            *(self.sketch, self.bulk_read_bytes, self.sketch_read_bytes),
        )


def check(call: DecodeCall) -> None:
    """Raise OperandError unless a kernel that goes by the query's sizes and dtype reads within all tensors of a call.
    Parts of the layer's last call are known to be right, and rows, checked when they were made, have to fit the layer.
    """
    query, rows, log_bulk, binding = call.query, call.rows, call.log_bulk, call.binding
    known = binding.matches(call)
    if not (
        (known or _parts_fit(call))
        and (log_bulk.dtype, log_bulk.device) == (torch.float32, query.device)
        and log_bulk.shape[1:] == (call.local_keys.shape[1], call.group)
        and log_bulk.is_contiguous()
        and len(log_bulk) in (1, query.shape[0])
        and rows.number in (1, query.shape[0])
        and rows.columns <= call.local_keys.shape[2]
        and (rows.longest is None or rows.longest <= call.bulk_keys.shape[2])
        and rows.local.device == query.device
    ):
        kept = () if call.sketch is None else call.sketch.tensors().values()
        parts = (part for part in call.parts() if isinstance(part, Tensor))
        raise OperandError((query, log_bulk, rows.local, rows.bulk_lengths, rows.decided, *parts, *kept))
    if not known:
        binding.remember(call)


def _parts_fit(call: DecodeCall) -> bool:
    """Whether all parts but rows and `log_bulk` have the shapes, dtypes and layout that kernels expect there."""
    query = call.query
    batch, heads, queries, dim = query.shape
    kv_heads, value_dim = call.local_keys.shape[1], call.local_values.shape[3]
    if queries != 1 or not kv_heads or heads % kv_heads or call.local_keys.device != query.device:
        return False
    for keys, values in ((call.local_keys, call.local_values), (call.bulk_keys, call.bulk_values)):
        shape = (batch, kv_heads, keys.shape[2])
        fits = (tuple(keys.shape), tuple(values.shape)) == ((*shape, dim), (*shape, value_dim))
        fits = fits and keys.dtype == values.dtype == query.dtype and keys.stride(3) == values.stride(3) == 1
        if not fits or keys.device != values.device:
            return False
    # A tensor, and what it has to be.
    expected: list[tuple[Tensor | None, torch.dtype, tuple[int, ...]]]
    expected = [(counted, torch.int64, ()) for counted in (call.bulk_read_bytes, call.sketch_read_bytes)]
    if call.sketch is not None:
        capacity, words = call.sketch.scales.shape[2], call.sketch.codes.shape[2]
        if dim % BLOCK or not 0 < words <= dim // BLOCK or capacity < call.bulk_keys.shape[2]:
            return False
        fields = sketch_fields(dim, value_dim, words, capacity).items()
        expected += [(getattr(call.sketch, name), dtype, (batch, kv_heads, *shape)) for name, (dtype, shape) in fields]
    return all(
        (part.dtype, tuple(part.shape), part.device) == (dtype, shape, query.device) and part.is_contiguous()
        for part, dtype, shape in expected
        if part is not None
    )
