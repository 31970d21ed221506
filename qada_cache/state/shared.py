"""Objects that the layers of one cache share."""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from ..key_moments.sharding import WHOLE, HeadShard
from ..storage.forward_pass import ForwardPass
from ..storage.residents import Residents
from .options import Options
from .progress import Progress


@dataclass(frozen=True, eq=False)
class ServedModel:
    """The model that a cache is for.

    Attributes:
        model_type: its decoder's.
        config: its decoder's, compared by identity.
        whole_config: the model's; `config` is a part of it, or the same.
        dtype: the model's; None if the cache was built with a config alone.
        reference: to the model; None likewise.
        layers: indices of the full-attention layers, served by the cache itself.
        shard: this process's part of their heads.
    """

    model_type: str
    config: Any = None
    whole_config: Any = None
    dtype: torch.dtype | None = None
    reference: "weakref.ref[PreTrainedModel] | None" = None
    layers: tuple[int, ...] = ()
    shard: HeadShard = WHOLE

    def __deepcopy__(self, memo: dict) -> "ServedModel":
        return self  # a copied config would not be the model's

    def get(self) -> PreTrainedModel | None:
        """The model itself, if the cache was given it and it is still there."""
        return None if self.reference is None else self.reference()


@dataclass(eq=False)
class Shared:
    """One object that a cache and all its layers refer to.

    Attributes:
        options: the cache's.
        model: the one served.
        forward_pass: padding and masks, computed once a pass.
        progress: how far the pass under way has come.
        residents: heads that lie on the device as well.
    """

    options: Options
    model: ServedModel
    forward_pass: ForwardPass = field(init=False, repr=False)
    progress: Progress = field(default_factory=Progress, repr=False)
    residents: Residents = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.forward_pass = ForwardPass(self.options.sink_tokens, self.options.window)
        self.residents = Residents(self.options.device_budget)
