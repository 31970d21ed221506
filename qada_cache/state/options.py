"""Options of a QAdACache, validated once."""

import sys
from dataclasses import dataclass

from torch import Tensor

from ..criterion import CRITERIA, GROUP_RULES, StaticHeads
from ..kernels import choice
from ..key_moments import KeyMoments
from ..key_moments.defaults import CURRENT, Moments, sources
from ..sketch import LEAST_BITS, MOST_BITS
from ..storage.residents import check_budget

TOKEN_THRESHOLD = 4.4  # the default of models without a tuned setting
SKETCH_BITS = 1.5


@dataclass(frozen=True, eq=False)
class Options:
    """Options of one cache; see `QAdACache` for their meaning and units, and for what is raised.

    Attributes:
        moments: as asked for.
        current_moments: whether these include the moments of the prompt being read.
        other_moments: the moments of another prompt that they include, None if they include none.
        query_energies: of the model `[layers, kv_heads, dim]`, None if they are not known.
        tuned: whether `token_threshold` is the one that `qada tune` kept of the model.
    """

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
    moments: Moments = CURRENT
    current_moments: bool = True
    other_moments: KeyMoments | None = None
    query_energies: Tensor | None = None
    tuned: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, (int, float)):
            raise TypeError(f"threshold must be a number in [0, 1], got {type(self.threshold).__name__}")
        if not 0.0 <= self.threshold <= 1.0:  # also refuses nan
            raise ValueError(f"threshold must be in [0, 1], got {self.threshold}")
        if isinstance(self.token_threshold, bool) or not isinstance(self.token_threshold, (int, float)):
            raise TypeError(f"token_threshold must be a number, got {type(self.token_threshold).__name__}")
        if not 0.0 <= self.token_threshold <= sys.float_info.max:  # also refuses nan, and ints that no float holds
            raise ValueError(f"token_threshold must be finite and not negative, got {self.token_threshold}")
        bits = self.sketch_bits
        if isinstance(bits, bool) or not isinstance(bits, (int, float)):
            raise TypeError(f"sketch_bits must be a number, got {type(bits).__name__}")
        if not LEAST_BITS <= bits <= MOST_BITS:  # also refuses nan
            raise ValueError(f"sketch_bits must be from {LEAST_BITS} to {MOST_BITS}, got {bits}")
        for name in ("sink_tokens", "local_tokens", "audit_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if self.local_tokens <= self.sink_tokens:
            raise ValueError(
                f"local_tokens ({self.local_tokens}) counts sinks and window together, so it must exceed "
                f"sink_tokens ({self.sink_tokens})"
            )
        for name in ("update_moments", "offloading", "tuned"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {type(getattr(self, name)).__name__}")
        if isinstance(self.criterion, str):
            if self.criterion not in CRITERIA:
                raise ValueError(
                    f"unknown criterion {self.criterion!r}: use one of {', '.join(CRITERIA)}, or StaticHeads"
                )
        elif not isinstance(self.criterion, StaticHeads):
            raise TypeError(f"criterion must be a str or StaticHeads, got {type(self.criterion).__name__}")
        if self.group_rule not in GROUP_RULES:
            raise ValueError(f"unknown group_rule {self.group_rule!r}: use one of {', '.join(GROUP_RULES)}")
        check_budget(self.device_budget)
        choice.requested(self.kernels)
        sources(self.moments)

    def __deepcopy__(self, memo: dict) -> "Options":
        return self  # nothing in it ever changes, moments and tables of heads included

    @property
    def window(self) -> int:
        """Tokens of the sliding window, the query's own included."""
        return self.local_tokens - self.sink_tokens

    @property
    def chooses_tokens(self) -> bool:
        """Whether a long-context head reads some of its tokens, and not all."""
        some = self.criterion == "gaussian" and self.threshold < 1.0
        return self.token_threshold > 0.0 and (some or isinstance(self.criterion, StaticHeads))

    @property
    def kept_bits(self) -> float | None:
        """Bits a value of the sketch that layers keep; None: they keep none."""
        return self.sketch_bits if self.chooses_tokens else None

    @property
    def tracks_moments(self) -> bool:
        """Whether layers keep running moments of the prompt being read."""
        return self.criterion == "gaussian" and self.current_moments
