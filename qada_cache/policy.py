"""What a QAdACache was asked to do, validated once, and the per-call work its layers share."""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .criterion import CRITERIA, GROUP_RULES, StaticHeads
from .key_moments.key_moments import KeyMoments
from .progress import Progress
from .storage.geometry import Geometry, call_geometry
from .storage.padding import Padding
from .storage.residents import Residents, check_budget


@dataclass(eq=False)
class Policy:
    """Options of one cache; see `QAdACache` for their meaning and units. Layers hold it by reference."""

    threshold: float
    sink_tokens: int
    local_tokens: int
    criterion: str | StaticHeads
    current_moments: bool  # whether the prompt being read gives moments
    other_moments: KeyMoments | None  # those of another prompt
    update_moments: bool
    offloading: bool
    model_type: str
    group_rule: str = "any"
    audit_every: int = 0
    device_budget: int | float | str = 0
    served: tuple[int, ...] = ()  # the layers that share this policy
    config: Any = None  # of the model served, compared by identity
    dtype: torch.dtype | None = None  # of the model, as far as it is known
    model: Any = None  # weak reference to it, if the cache was given one
    residents: Residents = field(init=False, repr=False)  # heads that lie on the device as well
    progress: Progress = field(default_factory=Progress, repr=False)
    _mask: tuple[Any, Any, tuple[Padding, Tensor | None]] | None = field(default=None, repr=False)
    _geometry: tuple[Any, Geometry] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, (int, float)):
            raise TypeError(f"threshold must be a number in [0, 1], got {type(self.threshold).__name__}")
        if not 0.0 <= self.threshold <= 1.0:  # also refuses nan
            raise ValueError(f"threshold must be in [0, 1], got {self.threshold}")
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
        for name in ("update_moments", "offloading"):
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
        self.residents = Residents(self.device_budget)

    @property
    def window(self) -> int:
        """Tokens of the sliding window, the query's own included."""
        return self.local_tokens - self.sink_tokens

    @property
    def tracks_moments(self) -> bool:
        """Whether layers keep running moments of the prompt being read."""
        return self.criterion == "gaussian" and self.current_moments

    def padding_after(
        self, padding: Padding, mask: Tensor | None, *, batch: int, seen: int, queries: int
    ) -> tuple[Padding, Tensor | None]:
        """`Padding.after`, once per mask: every layer of a forward pass is handed the same tensor."""
        if mask is None:
            return padding.after(mask, batch=batch, seen=seen, queries=queries)
        call = (padding, batch, seen, queries)
        if self._mask is None or self._mask[0]() is not mask or self._mask[1] != call:
            self._mask = (weakref.ref(mask), call, padding.after(mask, batch=batch, seen=seen, queries=queries))
        return self._mask[2]

    def geometry(
        self,
        *,
        lengths: list[int],
        flushed: list[int],
        end: int,
        queries: int,
        valid: Tensor | None,
        device: torch.device,
    ) -> Geometry:
        """`geometry.call_geometry`, once per call: layers move in lockstep, so the first one's serves them all."""
        # By content, not identity: a layer whose state differs must get its own masks.
        key = (tuple(lengths), tuple(flushed), end, queries, None if valid is None else valid.numpy().tobytes(), device)
        if self._geometry is None or self._geometry[0] != key:
            made = call_geometry(
                lengths=lengths,
                flushed=flushed,
                end=end,
                queries=queries,
                valid=valid,
                sinks=self.sink_tokens,
                window=self.window,
                device=device,
            )
            self._geometry = (key, made)
        return self._geometry[1]
