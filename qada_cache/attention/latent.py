"""Latent attention: layers that cache one latent a token (`models/latent.py`).

The module expands what `update` returns, and only then calls attention. So `update` returns the new tokens alone, and
the layer that they are of is found by the thread and by the rotary channels, which end the keys as they are.
"""

import threading
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..kernels.reference import TOLERANCE
from ..models.latent import (
    LatentSizes,
    add_bias,
    expand,
    has_indexers,
    has_latents,
    is_plain,
    read_projections,
)
from ..state import THRESHOLD, TOKEN_THRESHOLD, Options
from ..state.layer import QAdALayer
from ..storage import TokenStore
from ..storage.coded_bulk import CodedBulk

PROBED = 4  # newest tokens of a module's first call: their keys and values are computed again, to compare them
QUANTISED = 0.05  # allowed error of modules that may round their inputs, as a share of the norm

# Allowed values of options that say how tokens are read, and by which kernels.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "prefill_threshold": (0.0,),
    "kernels": ("auto", "torch"),
}
# Allowed values if heads decide.
_SELECTING = {"prefill_threshold": (0.0,)}
# Allowed values if no criterion was given, so that everything is read: the defaults, and those that say the same.
_EVERYTHING: dict[str, tuple[Any, ...]] = {
    "threshold": (THRESHOLD, 1.0),
    "criterion": ("gaussian", "dense"),
    "token_threshold": (TOKEN_THRESHOLD, 0.0),
    "audit_every": (0,),
    **_PLAIN,
}
# Allowed values if an indexer picks tokens, and a criterion was given.
_PICKED = _EVERYTHING | {"criterion": ("dense",)}

# By thread, the layer whose new tokens its module is expanding.
_expanding: dict[int, "weakref.ref[LatentLayer]"] = {}


def resolve_latent_options(options: Options, config: PreTrainedConfig, *, chosen: bool) -> Options:
    """These options as layers of latents follow them. Heads decide if the criterion was `chosen`, is not "dense", and
    no indexer picks tokens. Else the criterion is "dense", and all tokens are read. NotImplementedError, if the options
    ask for something else."""
    indexed = has_indexers(config)
    decides = chosen and not indexed and options.criterion != "dense" and options.threshold < 1.0
    if indexed:
        served = _PICKED if chosen else _EVERYTHING
    else:
        served = _SELECTING if decides else _PLAIN if chosen else _EVERYTHING
    for name, allowed in served.items():
        value = getattr(options, name)
        if not any(value is one or value == one for one in allowed):
            does = "selects tokens" if decides else "reads what the indexer picks" if indexed else "reads all tokens"
            others = "" if indexed or name in _PLAIN else ", or criterion='gaussian', by which heads decide"
            raise NotImplementedError(
                f"QAdACache {does} of latent attention, which {config.model_type} has, and {name}={value!r} "
                f"asks for something else: leave out {name}, or give {' or '.join(map(repr, allowed))}{others}"
            )
    if decides:
        return options
    return replace(options, criterion="dense", current_moments=False, other_moments=None, query_energies=None)


class LatentLayer(QAdALayer):
    """One layer of latents: its store has one KV head, with keys `[latent | rotary]` and values of no channels."""

    def reset(self) -> None:
        """Drop all tokens and counters."""
        super().reset()
        self.checked: Any = None  # weak reference to the module that `check_module` took last
        self.reads_weight = False  # whether that module's weight, read as projections, gives its keys and values

    @property
    def sizes(self) -> LatentSizes:
        """Channels of a token."""
        assert self.shared.model.latents is not None
        return self.shared.model.latents

    @property
    def adaptive_tokens(self) -> int:
        """As `QAdALayer` if heads decide. Else all is read exactly: 0, or 1 if a graph computes single tokens."""
        return super().adaptive_tokens if self.decides else int(self.by_plan)

    @property
    def decides(self) -> bool:
        """Whether heads decide, and tokens are selected."""
        return self.options.criterion != "dense"

    @property
    def by_plan(self) -> bool:
        """Whether single tokens are computed by a plan, in columns that are there from the start. A graph replays no
        other steps."""
        return self.decides or self.options.cuda_graph is True

    def _keep_by_options(self, store: TokenStore) -> None:
        """As `QAdALayer`, with little spare room. Unless heads decide, a sketch is kept for records alone."""
        # As steps read all of a bulk, it may be copied whenever it has grown by 1/64.
        store.bulk.growth = CodedBulk.growth
        store.shared_dim = self.sizes.rank if self.by_plan else 0
        energies = self.options.query_energies
        store.error_energies = None if energies is None else energies[self.index][1:]  # if there are any
        super()._keep_by_options(store)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """As `QAdALayer`. A layer without plans adds columns as they are needed."""
        super().lazy_initialization(key_states, value_states)
        if not self.by_plan:
            assert self.store is not None
            self.store.trim(self.options.window)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take in new latents `[batch, 1, tokens, rank]` and rotary channels (`rope`), and return them alone, without
        those before. NotImplementedError, if they have other sizes; RuntimeError as `QAdALayer`."""
        self._take_in(key_states, value_states)
        thread = threading.get_ident()
        _expanding[thread] = weakref.ref(self, lambda _: _expanding.pop(thread, None))
        return key_states, value_states

    def _take_in(self, latent: Tensor, rotary: Tensor) -> None:
        found, wanted = [(part.dim(), *part.shape[1::2]) for part in (latent, rotary)], self._expect(rotary)
        if found != [(4, 1, size) for size in wanted]:
            raise NotImplementedError(
                f"layer {self.index} of this {self.shared.model.model_type} model hands over tensors "
                f"{list(latent.shape)} and {list(rotary.shape)}, and its config says that it caches latents "
                f"[batch, 1, tokens, {wanted.rank}] and [batch, 1, tokens, {wanted.rope}]: use "
                "transformers.DynamicCache for this model"
            )
        joined = torch.cat((latent, rotary), dim=-1)
        super().update(joined, joined[..., :0])

    def _expect(self, rotary: Tensor) -> LatentSizes:
        """The sizes that new tokens are to have."""
        return self.sizes

    def find_new(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """As `QAdALayer`: the new latents with their rotary channels, whatever the module has expanded them to."""
        return None if self.incoming is None else (self.incoming, self.incoming[..., :0])

    def _makes(self, module: nn.Module, key: Tensor) -> bool:
        """Whether these keys `[batch, heads, tokens, nope + rope]` are of the new tokens: keys end in the rotary
        channels. Comparing waits for devices other than CPUs: there only the first keys of a text are compared."""
        assert self.incoming is not None
        rotary = self.incoming[..., self.sizes.rank :]
        if not has_latents(module) or (len(key), *key.shape[2:3]) != (len(rotary), *rotary.shape[2:3]):
            return False
        known = self.bound_module is not None and self.bound_module() is module and self.seen > key.shape[2]
        if known and key.device.type != "cpu":
            return True
        last = key[:, :1, :, -self.sizes.rope :]
        return torch.allclose(last, rotary.to(last), rtol=0, atol=0, equal_nan=True)

    def check_module(self, module: nn.Module, key: Tensor, value: Tensor) -> None:
        """Raise NotImplementedError, unless keys and values of this module's first call are what it expands latents to.
        Then note whether its weight says how."""
        assert self.incoming is not None
        if self.checked is not None and self.checked() is module:
            return
        latent, rotary = self.incoming[:, :, -PROBED:].split(self.sizes, dim=-1)
        wanted = key[:, :, -PROBED:], value[:, :, -PROBED:]
        plain = is_plain(module)
        if not _is_alike(expand(module, latent, rotary), wanted, None if plain else QUANTISED):
            raise NotImplementedError(
                f"this {self.shared.model.model_type} model attends to other keys or values than its expand_kv makes "
                "of the latents that it caches, which QAdACache does not support: use transformers.DynamicCache for "
                "this model"
            )
        self.reads_weight = False
        if plain:
            nope = key.shape[3] - self.sizes.rope
            by = read_projections(module, self.sizes, key.shape[1], nope)
            wide = latent.to(by.keys.dtype)
            made = [
                add_bias(wide @ part.mT, bias) for part, bias in ((by.keys, by.key_bias), (by.values, by.value_bias))
            ]
            self.reads_weight = _is_alike((made[0], made[1]), (wanted[0][..., :nope], wanted[1]), None)
        self.checked = weakref.ref(module)


def find_expanding_layer(module: nn.Module, key: Tensor) -> LatentLayer | None:
    """The layer whose new tokens this module has expanded to `key`; None, if it is another cache's call."""
    thread = threading.get_ident()
    layer = _expanding[thread]() if thread in _expanding else None
    if layer is None or layer.incoming is None or not layer._makes(module, key):
        return None
    del _expanding[thread]
    return layer


def is_expanding() -> bool:
    """Whether a module is expanding a layer's new tokens, in any thread: `torch.compile` can trace this."""
    return len(_expanding) > 0


def _is_alike(made: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], tolerance: float | None) -> bool:
    """Whether keys and values are the same but for rounding; `wanted` values may be padded."""
    for one, other in zip(made, wanted, strict=True):
        if one.shape[-1] > other.shape[-1]:
            return False
        one, other = one.float(), other[..., : one.shape[-1]].float()
        allowed = TOLERANCE.get(wanted[0].dtype, QUANTISED) if tolerance is None else tolerance
        if (one - other).nan_to_num().norm() > allowed * other.nan_to_num().norm():
            return False
    return True
