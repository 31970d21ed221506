"""Latent attention: layers that cache one latent a token (`models/latent.py`), and attention over all of these.

The module expands what `update` returns, and only then calls attention. So `update` returns the new tokens alone, and
the layer that they are of is found by the thread and by the rotary channels, which end the keys as they are.

Cached tokens are not expanded for a few queries: with `q' = [q_nope W_k | q_rotary]` a score is `q' [latent | rotary]`,
one key for all heads, and the output `W_v` times the softmax average of the latents, which are channels of the keys.
"""

import threading
import weakref
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import merge_partials, partial_attention
from ..kernels.operands import Query
from ..kernels.reference import TOLERANCE
from ..models.latent import (
    LatentSizes,
    Projections,
    ask_projections,
    expand,
    has_latents,
    is_plain,
    read_projections,
)
from ..sketch.coded import RUNGS
from ..state import BULK_BITS, THRESHOLD, TOKEN_THRESHOLD, Options
from ..state.layer import QAdALayer
from ..storage import TokenStore
from ..storage.coded_bulk import CodedBulk
from ..storage.reading import stream
from .absorbed import attend_to_parts

EXPANDED = 1 << 24  # numbers of keys and values of a block, 64 MiB in float32
MIN_BLOCK = 256  # tokens
PROBED = 4  # tokens of a module's first call, whose keys and values are made again
QUANTISED = 0.05  # tolerance for modules that may round what they are given, by all of it

# Options that say what is read, or how, and what they may be where everything is read.
_EVERYTHING: dict[str, tuple[Any, ...]] = {
    "threshold": (THRESHOLD, 1.0),
    "criterion": ("gaussian", "dense"),
    "token_threshold": (TOKEN_THRESHOLD, 0.0),
    "bulk_bits": (BULK_BITS, *RUNGS),
    "prefill_threshold": (0.0,),
    "audit_every": (0,),
    "kernels": ("auto", "torch"),
    "cuda_graph": (None, False),
}

# By thread, the layer whose new tokens its module is expanding.
_expanding: dict[int, "weakref.ref[LatentLayer]"] = {}


def read_everything(options: Options, model_type: str) -> Options:
    """These options as layers of latents follow them, which read everything: of the criterion "dense".
    NotImplementedError, if they ask for something else."""
    for name, allowed in _EVERYTHING.items():
        value = getattr(options, name)
        if not any(value is one or value == one for one in allowed):
            raise NotImplementedError(
                f"QAdACache reads all tokens of latent attention, which {model_type} has, and {name}={value!r} "
                f"asks for something else: leave out {name}, or give {' or '.join(map(repr, allowed))}"
            )
    return replace(options, criterion="dense", current_moments=False, other_moments=None, query_energies=None)


class LatentLayer(QAdALayer):
    """One layer of latents: its store has one KV head, with keys `[latent | rotary]` and values of no channels."""

    def reset(self) -> None:
        """Drop all tokens and counters."""
        super().reset()
        self.checked: Any = None  # weak reference to the module that `check_module` took last
        self.reads_weight = False  # whether its weight is laid out as projections are, if nothing else counts

    @property
    def sizes(self) -> LatentSizes:
        """Channels of a token."""
        assert self.shared.model.latents is not None
        return self.shared.model.latents

    @property
    def adaptive_tokens(self) -> int:
        """None: all is read exactly."""
        return 0

    def _keep_by_options(self, store: TokenStore) -> None:
        """A sketch, if tokens lie in few bits behind it. Triton has no code for tokens without values."""
        # As every step reads all of a bulk, it may be copied for every 64th token.
        store.bulk.growth = CodedBulk.growth
        if store.record_layout is not None:
            kernels = "auto" if store.near_keys.is_cpu and self.options.kernels != "torch" else "torch"
            store.keep_sketch(self.options.sketch_bits, None, select=False, kernels=kernels)

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
        """As `QAdALayer`: what was joined, whatever the module made of it."""
        return None if self.incoming is None else (self.incoming, self.incoming[..., :0])

    def _makes(self, module: nn.Module, key: Tensor) -> bool:
        """Whether these keys `[batch, heads, tokens, nope + rope]` are of the new tokens: they end in rotary channels.
        On other devices than CPUs, which would be waited for, the first keys of a text are looked at."""
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
            made = [_add(wide @ part.mT, bias) for part, bias in ((by.keys, by.key_bias), (by.values, by.value_bias))]
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
    """Whether there is such a layer, in any thread: `torch.compile` can look that up."""
    return len(_expanding) > 0


class LatentAttention:
    """Exact attention of one call over the cached tokens of a layer."""

    def __init__(self, layer: LatentLayer, store: TokenStore, query: Query, value_dim: int) -> None:
        """`value_dim` is that of the output, more than the module's values have if attention is given padded ones."""
        assert layer.bound_module is not None
        self.layer, self.store, self.query = layer, store, query
        self.module, self.value_dim = layer.bound_module(), value_dim
        self.nope = query.states.shape[3] - layer.sizes.rope
        self.told: dict[str, Any] = {
            "scaling": query.scaling,
            "softcap": query.softcap,
            "kernels": layer.options.kernels,
        }

    def attend(self, rows: slice, states: Tensor) -> tuple[Tensor, Tensor]:
        """`out` `[rows, heads, queries, value_dim]` float32 and `lse` of queries `[rows, heads, queries, nope + rope]`
        of rows alike, as `partial_attention` returns them."""
        past = self.store.lengths[rows.start]
        absorbed = self.query.softcap is None and self._is_cheaper_absorbed(past, states.shape[2])
        return self._attend_absorbed(rows, states) if absorbed else self._attend_expanded(rows, states)

    @cached_property
    def by_weight(self) -> bool:
        """Whether projections are there to be read."""
        return self.layer.reads_weight and is_plain(self.module)

    @cached_property
    def projections(self) -> Projections:
        """The module's."""
        sizes, heads = self.layer.sizes, self.query.states.shape[1]
        if self.by_weight:
            return read_projections(self.module, sizes, heads, self.nope)
        return ask_projections(self.module, sizes, self.nope, self.store.near_keys)

    def _is_cheaper_absorbed(self, past: int, queries: int) -> bool:
        """By multiplications for a head, of queries that read so many tokens."""
        rank, rope = self.layer.sizes
        expansion = rank * (self.nope + self.value_dim)  # of one token, or of one query's absorption
        asked = 0 if self.by_weight or "projections" in vars(self) else rank * expansion
        absorbed = queries * (past * (2 * rank + rope) + expansion) + asked
        return absorbed <= past * (expansion + queries * (self.nope + rope + self.value_dim))

    def _attend_absorbed(self, rows: slice, states: Tensor) -> tuple[Tensor, Tensor]:
        grouped = self._absorb(states)
        out = grouped.new_zeros(*grouped.shape[:3], self.layer.sizes.rank, dtype=torch.float32)
        lse = out.new_full(out.shape[:-1], -torch.inf)
        parts = attend_to_parts(
            self.store, rows, grouped, self.layer.sizes.rank, scaling=self.query.scaling, kernels=self.told["kernels"]
        )
        for at, *far, nbytes in parts:
            out[at], lse[at] = merge_partials(out[at], lse[at], *far)
            self.layer.counters.streamed_bytes += nbytes
        return self._project(out, lse, states)

    def _absorb(self, states: Tensor) -> Tensor:
        """Queries that meet latents as they are: `[rows, 1, heads * queries, rank + rope]`, in the dtype of these."""
        own, rotary = states.split((self.nope, self.layer.sizes.rope), dim=-1)
        own = own.to(self.projections.keys.dtype)
        absorbed = torch.cat((own @ self.projections.keys, rotary.to(own)), dim=-1)
        return absorbed.reshape(len(states), 1, -1, absorbed.shape[3]).to(self.store.near_keys.dtype)

    def _project(self, out: Tensor, lse: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """What `attend` returns, from averages of latents `[rows, 1, heads * queries, rank + rope]` and their `lse`, of
        what `_absorb` made of `states`."""
        by, shape = self.projections, states.shape[:3]
        own_out = out[..., : self.layer.sizes.rank].view(*shape, -1).to(by.values.dtype)
        found = (by.values @ own_out.mT).mT  # in this order, as else torch copies weights of 16 bits first
        lse = lse.view(shape)
        if by.key_bias is not None:
            own = states[..., : self.nope].to(by.keys.dtype)
            lse = lse + self.query.scaling * (own.float() @ by.key_bias.float().unsqueeze(-1)).squeeze(-1)
        return self._pad(_add(found, by.value_bias).float()), lse

    def _attend_expanded(self, rows: slice, states: Tensor) -> tuple[Tensor, Tensor]:
        out = states.new_zeros(*states.shape[:3], self.value_dim, dtype=torch.float32)
        lse = out.new_full(out.shape[:-1], -torch.inf)
        block = max(MIN_BLOCK, EXPANDED // (states.shape[1] * (states.shape[3] + self.value_dim)))

        def take(at: slice, latents: Tensor) -> None:
            for latent in latents.split(block, dim=2):
                keys, values = expand(self.module, *latent.split(self.layer.sizes, dim=-1))
                keys, values = keys.to(states), self._pad(values.to(states))
                far = partial_attention(states[at], keys, values, **self.told)
                out[at], lse[at] = merge_partials(out[at], lse[at], *far)

        for keys, _ in self.store.view_near(rows):
            if keys.shape[2]:
                take(slice(None), keys)
        for part in stream(self.store.bulk, rows):
            take(slice(part.rows.start - rows.start, part.rows.stop - rows.start), part.keys)
            self.layer.counters.streamed_bytes += part.bulk_read_bytes
        return out, lse

    def _pad(self, values: Tensor) -> Tensor:
        """With as many channels as the output has."""
        return nn.functional.pad(values, (0, self.value_dim - values.shape[-1]))


def _add(made: Tensor, bias: Tensor | None) -> Tensor:
    """`[batch, heads, tokens, dim]` with a bias `[heads, dim]`."""
    return made if bias is None else made + bias.unsqueeze(-2)


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
