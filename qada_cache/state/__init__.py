"""State that the layers of one cache share: its options, the model served, the progress of a pass."""

import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..criterion import CRITERIA, GROUP_RULES, StaticHeads
from ..kernels import choice
from ..key_moments import KeyMoments
from ..key_moments.defaults import CURRENT, MomentsSource, split_sources
from ..models.latent import LatentSizes
from ..models.rope_deltas import RopeDeltas
from ..models.sharding import UNSHARDED, HeadShard
from ..reading_bar import ReadingBar
from ..sketch import MAX_BITS, MIN_BITS
from ..sketch.coded import RUNGS
from ..storage.placement import Placement, check_budget
from .forward_pass import ForwardPass
from .observation import Observer

THRESHOLD, TOKEN_THRESHOLD = 0.95, 4.4
SKETCH_BITS = 1.5
BULK_BITS = 16  # keys and values in the model's dtype, whatever its bits
DEFAULT_BITS = 8  # `bulk_bits` if the user gives none and a kernel reads records


class _Range(NamedTuple):
    """Allowed values of an option: types, least and greatest value, and both in words for errors."""

    kinds: Any
    kind: str
    least: float
    most: float
    allowed: str


_SHARE = _Range((int, float), "a number in [0, 1]", 0.0, 1.0, "be in [0, 1]")
_FINITE = _Range((int, float), "a number", 0.0, sys.float_info.max, "be finite and not negative")
_BITS = _Range((int, float), "a number", MIN_BITS, MAX_BITS, f"be from {MIN_BITS} to {MAX_BITS}")
_SINKS = _Range(int, "an int", 0, 2**16, "be from 0 to 65536")  # every layer has room for them from the start
_COUNT = _Range(int, "an int", 0, inf, "not be negative")
_FLAG = _Range(bool, "a bool", False, True, "")


def _describe_keyword(check: _Range | None = None, *, laid_out: bool = False, outputs: bool = True) -> dict[str, Any]:
    """Properties of a keyword of `QAdACache`: its check, and whether the layout of tokens, or outputs, depend on it."""
    return {"check": check, "laid_out": laid_out, "outputs": outputs}


@dataclass(frozen=True, eq=False)
class Options:
    """Options of one cache; see `QAdACache` for their meaning and units, and for what is raised."""

    threshold: float = field(default=THRESHOLD, metadata=_describe_keyword(_SHARE))
    sink_tokens: int = field(default=16, metadata=_describe_keyword(_SINKS, laid_out=True))
    local_tokens: int = field(default=128, metadata=_describe_keyword(_COUNT, laid_out=True))
    criterion: str | StaticHeads = field(default="gaussian", metadata=_describe_keyword())
    update_moments: bool = field(default=True, metadata=_describe_keyword(_FLAG))
    offloading: bool = field(default=True, metadata=_describe_keyword(_FLAG, laid_out=True, outputs=False))
    group_rule: str = field(default="any", metadata=_describe_keyword())
    audit_every: int = field(default=0, metadata=_describe_keyword(_COUNT, outputs=False))
    device_budget: int | float | str = field(default=0, metadata=_describe_keyword(laid_out=True, outputs=False))
    kernels: str = field(default="auto", metadata=_describe_keyword(outputs=False))
    progress: bool = field(default=False, metadata=_describe_keyword(_FLAG, outputs=False))
    cuda_graph: bool | None = field(default=None, metadata=_describe_keyword(outputs=False))
    token_threshold: float = field(default=TOKEN_THRESHOLD, metadata=_describe_keyword(_FINITE))
    sketch_bits: float = field(default=SKETCH_BITS, metadata=_describe_keyword(_BITS))
    bulk_bits: int = field(default=BULK_BITS, metadata=_describe_keyword(laid_out=True))
    prefill_threshold: float = field(default=0.0, metadata=_describe_keyword(_FINITE, laid_out=True))
    moments: MomentsSource = field(default=CURRENT, metadata=_describe_keyword())  # as the user gave it
    # The fields below are no keywords, except for `tuned`: they follow from the keywords and the model.
    current_moments: bool = True  # whether these include the moments of the prompt being read
    other_moments: KeyMoments | None = None  # those of another prompt that they include
    query_energies: Tensor | None = None  # float32 [layers, kv_heads, dim]; None if they are not known
    # Whether both thresholds, perhaps `bulk_bits` and `prefill_threshold` too, are those that `qada tune` kept.
    tuned: bool = field(default=False, metadata={"check": _FLAG})

    def __post_init__(self) -> None:
        checked = ((each.name, each.metadata.get("check")) for each in fields(self))
        for name, (kinds, kind, least, most, allowed) in ((name, check) for name, check in checked if check):
            value = getattr(self, name)
            if not isinstance(value, kinds) or isinstance(value, bool) is not (kinds is bool):
                raise TypeError(f"{name} must be {kind}, got {type(value).__name__}")
            if not least <= value <= most:  # also refuses nan, and ints that no float holds
                raise ValueError(f"{name} must {allowed}, got {value}")
        if self.local_tokens <= self.sink_tokens:
            raise ValueError(
                f"local_tokens ({self.local_tokens}) counts sinks and window together, so it must exceed "
                f"sink_tokens ({self.sink_tokens})"
            )
        if not isinstance(self.criterion, (str, StaticHeads)):
            raise TypeError(f"criterion must be a str or StaticHeads, got {type(self.criterion).__name__}")
        if isinstance(self.criterion, str) and self.criterion not in CRITERIA:
            raise ValueError(f"unknown criterion {self.criterion!r}: use one of {', '.join(CRITERIA)}, or StaticHeads")
        if self.group_rule not in GROUP_RULES:
            raise ValueError(f"unknown group_rule {self.group_rule!r}: use one of {', '.join(GROUP_RULES)}")
        if self.cuda_graph is not None and not isinstance(self.cuda_graph, bool):
            raise TypeError(f"cuda_graph must be a bool or None, got {type(self.cuda_graph).__name__}")
        if type(self.bulk_bits) is not int:
            raise TypeError(f"bulk_bits must be an int, got {type(self.bulk_bits).__name__}")
        if self.bulk_bits not in (BULK_BITS, *RUNGS):
            raise ValueError(f"bulk_bits must be {BULK_BITS} (as the model made it), 8 or 4, got {self.bulk_bits}")
        check_budget(self.device_budget)
        choice.resolve_kernels(self.kernels)
        split_sources(self.moments)

    def __deepcopy__(self, memo: dict) -> "Options":
        return self  # nothing in it ever changes, moments and tables of heads included

    @property
    def window(self) -> int:
        """Tokens of the sliding window, the query's own included."""
        return self.local_tokens - self.sink_tokens

    @property
    def selects_tokens(self) -> bool:
        """Whether a long-context head reads some of its tokens, and not all."""
        some = self.criterion == "gaussian" and self.threshold < 1.0
        return self.token_threshold > 0.0 and (some or isinstance(self.criterion, StaticHeads))

    @property
    def codes_tokens(self) -> bool:
        """Whether layers keep their bulk in few bits, if the channels of their heads allow records."""
        return self.bulk_bits != BULK_BITS

    @property
    def uses_moments(self) -> bool:
        """Whether heads decide by moments, or tokens are coded in the metric of their prompt's queries."""
        return self.criterion == "gaussian" or self.selects_tokens or self.codes_tokens

    @property
    def tracks_moments(self) -> bool:
        """Whether layers keep running moments of the prompt being read."""
        return self.criterion == "gaussian" and self.current_moments


_ASKED = {each.name: each.metadata for each in fields(Options) if "outputs" in each.metadata}
LAID_OUT = tuple(name for name, about in _ASKED.items() if about["laid_out"])  # the same in all copies of a cache
DECIDING = tuple(name for name in _ASKED if name not in LAID_OUT)  # the others: copies may differ
CONDITIONS = tuple(name for name, about in _ASKED.items() if about["outputs"])  # those that outputs depend on


@dataclass(frozen=True, eq=False)
class ManagedModel:
    """The model that a cache is for."""

    model_type: str  # its decoder's
    config: Any = None  # its decoder's, compared by identity
    whole_config: Any = None  # the model's; `config` is a part of it, or the same
    dtype: torch.dtype | None = None  # the model's; None if the cache was built with a config alone
    get: Callable[[], PreTrainedModel | None] = lambda: None  # returns the model, held weakly; None without one
    layers: tuple[int, ...] = ()  # indices of the full-attention layers, served by the cache itself
    readers: Mapping[int, int] = field(default_factory=dict)  # by reader, the layer whose keys it reads
    latents: LatentSizes | None = None  # if these layers cache latents
    window: int | None = None  # tokens of the sliding window, if layers have one that hides nothing from shorter texts
    shard: HeadShard = UNSHARDED  # this process's part of their heads

    def __deepcopy__(self, memo: dict) -> "ManagedModel":
        return self  # a copied config would not be the model's


@dataclass
class Visit:
    """Writes and calls of one of transformers' linear layers in a pass."""

    versions: dict[Hashable, int]  # `linear_states.count_writes` when the pass came to the layer
    calls: set[Hashable] = field(default_factory=set)
    expected: set[Hashable] = field(default_factory=set)  # of the last layer: states that earlier ones like it wrote


@dataclass
class Progress:
    """How far a pass over the layers, or a change of them, has come."""

    reached: int = -1  # the layer that called last; between passes the last of all, or -1 before the first pass
    first: int = -1  # the layer that calls first in a pass, or -1 before the first pass; `reset` keeps it
    # What layers are in the middle of: a verb ("crop") that all go through one after the other, or a pass that
    # transformers' own layer is taking tokens in from. Empty: nothing.
    changing: str = ""
    visits: dict[int, Visit] = field(default_factory=dict)  # in this pass, by layer

    def is_repeated(self, layer: int, call: Hashable) -> bool:
        """Whether this pass has made this call of a layer already, or gone past it: the call begins another pass."""
        if layer != self.reached:
            return layer < self.reached
        return layer not in self.visits or call in self.visits[layer].calls


class Shared:
    """One object that a cache and all its layers refer to."""

    def __init__(self, options: Options, model: ManagedModel) -> None:
        self.options, self.model = options, model
        self.progress = Progress()
        self.rope_deltas = RopeDeltas(model.get())
        self.forward_pass = ForwardPass(options.sink_tokens, options.window)
        self.placement = Placement(options.device_budget)
        self.observer: Observer | None = None
        self.snapshots: Any = None  # `Snapshots`, if any are kept
        self.bar = ReadingBar()

    def __getstate__(self) -> dict[str, Any]:  # for `copy.deepcopy`: nobody asked to observe the copy
        return vars(self) | {"observer": None}
