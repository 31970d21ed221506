"""The arguments of one call of one layer, for torch and for all kernels, and their checks.

`Query` has the model's queries, `Rows` the tokens that queries see of every row, `Operands` the layer's tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..sketch import BLOCK, count_closed
from ..sketch.codec import Sketch, list_fields
from ..sketch.coded import Records
from .border import OperandError, check_tensor, describe

PENDING_SHARE = 4  # see `Rows.own_log_tokens`
Moments = tuple[Tensor, Tensor, Tensor]  # as `gaussian_log_bulk` takes them: mean, covariance and `log_tokens`


@dataclass(eq=False)
class Query:
    """The model's queries in one call of one layer, and how they are scored."""

    states: Tensor  # `[batch, heads, queries, dim]`
    scaling: float  # of the scores
    softcap: float | None = None  # as for `reference.partial_attention`; no kernel caps scores
    sink_logits: Tensor | None = None  # learned, `[heads]`: one more score a head, of a token whose value is zero
    valid: Tensor | None = None  # bool `[batch, queries]` on the host, False for padding; None without padding
    # Which of the call's tokens each query sees, bool `[batch or 1, queries, queries]` on the device; None: causal.
    visible: Tensor | None = None
    # `log A_bulk`, float32 `[batch or 1, kv_heads, group, queries or 1]`; nan has the effect of infinity. None: it is
    # computed from the whole bulk ("oracle"), which no kernel does, or by `moments`.
    log_bulk: Tensor | None = None
    # Moments of one prompt or two, of all rows or of each. Without `log_bulk`, a kernel estimates it by these, for one
    # query a row.
    moments: Sequence[Moments] = ()
    # Each row's new key and value `[batch, kv_heads, 1, *]`. The CPU's kernel first writes them into the last column.
    unstored: tuple[Tensor, Tensor] | None = None


@dataclass(eq=False)
class Rows:
    """The tokens that the queries of a pass see in each row, for all layers; `rows` is 1 if all rows are equal.
    OperandError, if the tensors do not fit each other, or a length is negative.

    A query's tokens are its local ones (sinks and window, itself included) and its bulk, which is the first
    `bulk_lengths` tokens of the bulk buffers and the `pending` columns of the near buffers.
    """

    local: Tensor  # bool `[rows, 1, queries, columns]`, of the first columns of the near buffers
    pending: Tensor  # bool `[rows, 1, queries, columns]`; no column is both local and pending
    bulk_tokens: Tensor  # int64 `[rows, 1, queries]`, the paper's `T_bulk` of each query
    bulk_lengths: Tensor  # int64 `[rows]`: bulk tokens in the bulk buffers, which are not pending
    decided: Tensor  # bool `[rows, 1, queries]`, False for a padding query, whose output is finite and unused
    decisions: int = 0  # number of (row, query) pairs of the whole batch that are `decided` and have a bulk
    dense_tokens: int = 0  # tokens in the stored bulks of rows with such a query, over the whole batch
    # Bulk tokens, rounded for another prompt's moments (`rotation.round_length`): of queries that are decided about,
    # each once, ascending; of each row's last query, one for all rows if they agree.
    query_moment_lengths: tuple[int, ...] = ()
    row_moment_lengths: tuple[int, ...] = ()
    queries: int = field(init=False)  # of each row
    columns: int = field(init=False)  # of the near buffers
    device: torch.device = field(init=False)
    number: int = field(init=False)  # rows of the tensor that has most
    longest: int | None = field(init=False, default=None)  # greatest of `bulk_lengths`; None on a GPU
    longest_open: int = field(init=False, default=0)  # most tokens of a row outside of closed segments
    derived: Any = field(init=False, default=None, repr=False)  # a kernel's own preparations of these rows
    split: dict[Any, "Rows"] = field(init=False, default_factory=dict, repr=False)  # rows of a query each, by `turn.py`

    def __post_init__(self) -> None:
        (self.queries, self.columns), self.device = self.local.shape[2:], self.local.device
        named = {part.name: getattr(self, part.name) for part in fields(self)[:5]}
        self.number = max(map(len, named.values()))
        masks, of_queries = (torch.bool, (1, self.queries, self.columns)), (1, self.queries)
        wanted = {
            **{"local": masks, "pending": masks, "bulk_tokens": (torch.int64, of_queries)},
            **{"bulk_lengths": (torch.int64, ()), "decided": (torch.bool, of_queries)},
        }
        for name, tensor in named.items():
            dtype, shape = wanted[name]
            fits = (tensor.dtype, tuple(tensor.shape[1:]), tensor.device) == (dtype, shape, self.device)
            fits = fits and len(tensor) in (1, self.number)
            if not fits or (tensor.dim() == 4 and tensor.stride(3) != 1):
                kind = str(dtype).removeprefix("torch.")
                raise OperandError(
                    name, describe(tensor), f"{kind} {[self.number, *shape]} or {[1, *shape]} on {self.device}"
                )
        if self.bulk_lengths.is_cpu:
            lengths = self.bulk_lengths.tolist()
            self.longest, self.longest_open = max(lengths), max(length - count_closed(length) for length in lengths)
            if min(lengths) < 0:
                raise OperandError("bulk_lengths", lengths, "of tokens, which are not negative")

    def __deepcopy__(self, memo: dict) -> "Rows":
        return self  # it is immutable

    @cached_property
    def log_tokens(self) -> Tensor:
        """The logarithm of `bulk_tokens`, float32 `[rows, 1, 1, queries]`; `-inf` without a bulk."""
        return self.bulk_tokens.unsqueeze(2).float().log()

    @cached_property
    def own_log_tokens(self) -> Tensor:
        """As `log_tokens`, but `+inf` where more than one in `PENDING_SHARE` of a bulk is pending: too many for moments
        of stored keys to stand for. Such a bulk is short, and is read."""
        pending = self.bulk_tokens - self.bulk_lengths.view(-1, 1, 1)
        return self.log_tokens.masked_fill((PENDING_SHARE * pending > self.bulk_tokens).unsqueeze(2), torch.inf)


def _describe_query(query: Query) -> tuple[Any, ...]:
    """The properties of a query on which a kernel's preparations in `Operands.bound` depend."""
    states, mass, sinks = query.states, query.log_bulk, query.sink_logits
    kind = states.shape, states.dtype, states.device, query.scaling, _describe_part(mass), _describe_part(sinks)
    return (*kind, *map(_describe_part, chain(*query.moments))) if query.moments else kind


def _describe_part(part: Tensor | None) -> tuple[Any, ...] | None:
    return None if part is None else (part.shape, part.dtype, part.device, part.is_contiguous())


@dataclass(eq=False)
class Operands:
    """A layer's tokens, how its heads decide and select, and its counters. All fields stay the same until the version
    of the layer's storage changes.

    Columns of the near buffers that no query sees, tokens past `Rows.bulk_lengths`, and the bulk buffers of KV heads
    without a flagged head are not read and may hold anything, nan included.
    """

    near_keys: Tensor  # `[batch, kv_heads, columns or more, dim]`, in the dtype of queries, as all keys and values
    near_values: Tensor  # `[batch, kv_heads, columns or more, value_dim]`
    bulk_keys: Tensor  # `[batch, kv_heads, capacity, dim]`; with `records` those that follow closed segments
    bulk_values: Tensor  # `[batch, kv_heads, capacity, value_dim]`; all values may be the first channels of their keys
    logit_threshold: float  # as for `criterion.find_long_context`
    group_rule: str = "head"  # as for `criterion.decide_for_groups`
    token_threshold: float = 0.0  # as for `sketch.selection.select_tokens`
    # The sketch of the bulk's keys, with room for as many tokens. With it, a KV head reads the tokens of
    # `select_tokens` if the bulk has `MIN_TOKENS` or more. A group reads all tokens if one of its long-context heads
    # finds the sketch unreliable (`find_unreliable`), and so does every group without a sketch.
    sketch: Sketch | None = None
    # With a sketch, bulks of `MIN_TOKENS` or more may lie in records. Without a token threshold, nothing is selected
    # then.
    records: Records | None = None
    bulk_read_bytes: Tensor | None = None  # int64 `[]`: the needed bytes of the bulk are added to it
    sketch_read_bytes: Tensor | None = None  # int64 `[]`: the needed bytes of the sketch are added to it
    # int32 `[rows, kv_heads, 2 + capacity]`, for needed bytes if there are no counters: of a head's sketch, and of each
    # token; without a sketch, the place of the first token has those of a head that is read whole. Queries that share a
    # row write the same numbers.
    marks: Tensor | None = None
    checked_for: tuple[Any, ...] = field(default=(), init=False, repr=False)  # the kind of the last call's query
    bound: Any = field(default=None, init=False, repr=False)  # a kernel's own preparations for such queries

    @property
    def kv_heads(self) -> int:
        """The number of KV heads of the layer."""
        return self.near_keys.shape[1]

    @property
    def shares_keys(self) -> bool:
        """Whether values are the first channels of keys, where these lie."""
        return is_shared(self.near_keys, self.near_values) and is_shared(self.bulk_keys, self.bulk_values)

    @property
    def decodes(self) -> bool:
        """Whether records hold keys alone. Kernels decode these, as values are channels of them."""
        return self.records is not None and self.shares_keys


def is_shared(keys: Tensor, values: Tensor) -> bool:
    """Whether values `[batch, heads, tokens, value_dim]` are the first channels of the keys, where these lie."""
    return values.shape[3] < keys.shape[3] and values.stride() == keys.stride() and values.data_ptr() == keys.data_ptr()


def check(query: Query, rows: Rows, layer: Operands, *, shares: bool = False) -> None:
    """Raise OperandError unless all tensors of a step have the sizes, dtypes and layout that a kernel derives from the
    query. If it `shares` rows, a row of the layer may be that of several neighbouring queries.

    A layer is checked once for all queries of one kind. `Rows` checks itself.
    """
    kind = _describe_query(query)
    if layer.checked_for != kind:
        layer.checked_for, layer.bound = (), None
        _check_layer(query, layer, shares)
    batch = query.states.shape[0]
    if rows.number not in (1, batch) or rows.queries != 1 or rows.device != query.states.device:
        raise OperandError("local", describe(rows.local), f"of {batch} rows or 1, and of one query, as the queries are")
    if rows.columns > layer.near_keys.shape[2]:
        raise OperandError("local", describe(rows.local), f"of {layer.near_keys.shape[2]} columns at most")
    if rows.longest is not None:
        room, needed = layer.bulk_keys.shape[2], rows.longest
        if layer.records is not None:
            assert layer.sketch is not None
            most = min(layer.records.tensor.shape[2], count_closed(layer.sketch.scales.shape[2]))
            if count_closed(rows.longest) > most:
                raise OperandError("bulk_lengths", rows.longest, f"of {most} tokens in records at most")
            if rows.longest > layer.sketch.scales.shape[2]:
                raise OperandError("scales", describe(layer.sketch.scales), f"of {rows.longest} tokens or more")
            needed, room = rows.longest_open, min(room, layer.records.open.shape[2])
        if needed > room:
            raise OperandError("bulk_lengths", needed, f"at most {room}, as the bulk has room for")
    layer.checked_for = kind


def _check_layer(query: Query, layer: Operands, shares: bool) -> None:
    """Raise OperandError unless `log_bulk`, learned sinks and the layer's own tensors are of shapes, dtypes and layout
    that kernels expect."""
    states, mass = query.states, query.log_bulk
    batch, heads, queries, dim = states.shape
    kv_heads, value_dim, device = layer.kv_heads, layer.near_values.shape[3], states.device
    if queries != 1 or not kv_heads or heads % kv_heads:
        raise OperandError("query", describe(states), f"of one token and a multiple of {kv_heads} heads")
    shape = batch, kv_heads, heads // kv_heads, 1
    stored_rows = len(layer.near_keys) if shares and batch % max(1, len(layer.near_keys)) == 0 else batch
    fits = mass is not None and (mass.dtype, mass.device) == (torch.float32, device) and mass.is_contiguous()
    wrong = mass is None or not fits or tuple(mass.shape) not in (shape, (1, *shape[1:]))
    if wrong and (mass is not None or not query.moments):
        found = None if mass is None else describe(mass)
        raise OperandError("log_bulk", found, f"float32 {list(shape)} or {[1, *shape[1:]]} on {device}, contiguous")
    if (sinks := query.sink_logits) is not None:
        fits = sinks.is_floating_point() and sinks.is_contiguous() and sinks.device == device
        if not fits or tuple(sinks.shape) != (heads,):
            raise OperandError("sink_logits", describe(sinks), f"floats {[heads]} on {device}, contiguous")
    for near, place in (("near", device), ("bulk", layer.bulk_keys.device)):
        tokens = getattr(layer, f"{near}_keys").shape[2]
        for name, size in ((f"{near}_keys", dim), (f"{near}_values", value_dim)):
            check_tensor(
                name, getattr(layer, name), states.dtype, (stored_rows, kv_heads, tokens, size), place, packed=1
            )
    counters = ("bulk_read_bytes", "sketch_read_bytes")
    expected: list[tuple[str, Tensor | None, torch.dtype, tuple[int, ...], torch.device]]
    expected = [(name, getattr(layer, name), torch.int64, (), device) for name in counters]
    for mean, covariance, log_tokens in query.moments:
        rows, lengths = 1 if len(mean) == kv_heads else batch, 1 if len(log_tokens) == 1 else batch
        expected.append(("mean", mean, torch.float32, (rows * kv_heads, 1, dim), device))
        expected.append(("covariance", covariance, torch.float32, (rows * kv_heads, dim, dim), device))
        expected.append(("log_tokens", log_tokens, torch.float32, (lengths, 1, 1, 1), device))
    if layer.sketch is not None:
        capacity, words = layer.sketch.scales.shape[2], layer.sketch.codes.shape[2]
        if dim % BLOCK or not 0 < words <= dim // BLOCK:
            raise OperandError("codes", describe(layer.sketch.codes), f"of 1 to {dim // BLOCK} words")
        room = layer.bulk_keys.shape[2] if (records := layer.records) is None else 0
        if records is not None:
            size, recorded = records.layout.find_stride(device), records.tensor.shape[2]
            following = records.open.shape[2]
            place = device if records.tensor.device == device else torch.device("cpu")
            expected.append(("records", records.tensor, torch.uint8, (stored_rows, kv_heads, recorded, size), place))
            expected.append(
                ("open_records", records.open, torch.uint8, (stored_rows, kv_heads, following, size), device)
            )
            expected.append(("record_weights", records.weights, torch.float32, (kv_heads, dim), device))
        if capacity < room:
            raise OperandError("scales", describe(layer.sketch.scales), f"of {room} tokens or more")
        for name, (dtype, shape) in list_fields(dim, value_dim, words, capacity).items():
            expected.append((name, getattr(layer.sketch, name), dtype, (stored_rows, kv_heads, *shape), device))
    for name, part, dtype, wanted, place in expected:
        if part is not None:
            check_tensor(name, part, dtype, wanted, place)
