"""What the layers of one cache share: its options, the model served, the progress of a pass."""

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..criterion import CRITERIA, GROUP_RULES, StaticHeads
from ..kernels import choice
from ..key_moments import KeyMoments
from ..key_moments.defaults import CURRENT, MomentsSource, sources
from ..key_moments.models import UNSHARDED, HeadShard
from ..sketch import MAX_BITS, MIN_BITS
from ..storage.geometry import ForwardPass
from ..storage.residents import Residents, check_budget

THRESHOLD, TOKEN_THRESHOLD = 0.95, 4.4  # the defaults of models without a tuned setting
SKETCH_BITS = 1.5


@dataclass(frozen=True, eq=False)
class Options:
    """Options of one cache; see `QAdACache` for their meaning and units, and for what is raised."""

    threshold: float
    sink_tokens: int
    local_tokens: int
    criterion: str | StaticHeads
    update_moments: bool
    offloading: bool
    group_rule: str = "any"
    audit_every: int = 0
    device_budget: int | float | str = 0
    kernels: str = "auto"
    token_threshold: float = TOKEN_THRESHOLD
    sketch_bits: float = SKETCH_BITS
    moments: MomentsSource = CURRENT  # as asked for
    current_moments: bool = True  # whether these include the moments of the prompt being read
    other_moments: KeyMoments | None = None  # those of another prompt that they include
    query_energies: Tensor | None = None  # of the model [layers, kv_heads, dim], None if they are not known
    tuned: bool = False  # whether `threshold` and `token_threshold` are those that `qada tune` kept of the model

    def __post_init__(self) -> None:
        number = (int, float)
        limits: dict[str, tuple[Any, str, float, float, str]] = {
            "threshold": (number, "a number in [0, 1]", 0.0, 1.0, "be in [0, 1]"),
            "token_threshold": (number, "a number", 0.0, sys.float_info.max, "be finite and not negative"),
            "sketch_bits": (number, "a number", MIN_BITS, MAX_BITS, f"be from {MIN_BITS} to {MAX_BITS}"),
            **dict.fromkeys(("sink_tokens", "local_tokens", "audit_every"), (int, "an int", 0, inf, "not be negative")),
            **dict.fromkeys(("update_moments", "offloading", "tuned"), (bool, "a bool", False, True, "")),
        }
        for name, (kinds, kind, least, most, allowed) in limits.items():
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
        check_budget(self.device_budget)
        choice.resolve_kernels(self.kernels)
        sources(self.moments)

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
    def tracks_moments(self) -> bool:
        """Whether layers keep running moments of the prompt being read."""
        return self.criterion == "gaussian" and self.current_moments


@dataclass(frozen=True, eq=False)
class ManagedModel:
    """The model that a cache is for."""

    model_type: str  # its decoder's
    config: Any = None  # its decoder's, compared by identity
    whole_config: Any = None  # the model's; `config` is a part of it, or the same
    dtype: torch.dtype | None = None  # the model's; None if the cache was built with a config alone
    get: Callable[[], PreTrainedModel | None] = lambda: None  # the model, weakly; None likewise, or if it is gone
    layers: tuple[int, ...] = ()  # indices of the full-attention layers, served by the cache itself
    shard: HeadShard = UNSHARDED  # this process's part of their heads

    def __deepcopy__(self, memo: dict) -> "ManagedModel":
        return self  # a copied config would not be the model's


@dataclass
class Progress:
    """How far a pass has come. A layer makes a call for its keys and some for each of its states, in an order of its
    own; the same call again belongs to another pass."""

    reached: int = -1  # the layer that called last; -1 before the first call
    calls: set[Hashable] | None = field(default_factory=set)  # of that layer in this pass; None: it has made all
    # Of that layer's states (`watched._versions`), at its first call; the states that layers before it wrote in this
    # pass, by kind of layer.
    versions: dict[Hashable, int] = field(default_factory=dict)
    written: dict[Hashable, set[Hashable]] = field(default_factory=dict)
    changing: str = ""  # the verb ("crop") that all layers are going through, one after the other; empty: none

    def is_first_call(self, layer: int, event: Hashable) -> bool:
        """Whether this is the first call of the layer in its pass."""
        return self.calls is None or layer != self.reached or event in self.calls

    def rewind_to(self, layer: int) -> None:
        """Forget calls of later layers; this one has made all its calls in this pass."""
        self.reached, self.calls = layer, None


class Shared:
    """One object that a cache and all its layers refer to."""

    def __init__(self, options: Options, model: ManagedModel) -> None:
        self.options, self.model = options, model
        self.progress = Progress()
        self.forward_pass = ForwardPass(options.sink_tokens, options.window)
        self.residents = Residents(options.device_budget)
