"""One cache layer driven without a model: `update`, then the registered attention function, with a mask as
transformers builds it.
"""

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qada_cache.attention.forward import switch_on
from qada_cache.kernels import choice
from qada_cache.kernels.operands import Rows
from qada_cache.state import ManagedModel, Options, Shared
from qada_cache.state.counters import Counters
from qada_cache.state.layer import QAdALayer

SINKS, LOCAL = 3, 11  # small, so that a few dozen tokens reach every place a token can be
WINDOW = LOCAL - SINKS
OPTIONS = {
    "threshold": 0.15,  # decides about half of the calls of `Inputs` each way
    "sink_tokens": SINKS,
    "local_tokens": LOCAL,
    "criterion": "gaussian",
    "group_rule": "head",
    "current_moments": True,
    "other_moments": None,
    "update_moments": True,
    "offloading": False,
}


def make_config(layers: int = 1) -> LlamaConfig:
    """A Llama's config: two KV heads of two query heads each, 16 channels a head."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2
    )
    config._attn_implementation = "sdpa"
    return config


class FakeAttention(nn.Module):
    """Has the attributes of a transformers attention module that the attention function reads."""

    def __init__(self, config: LlamaConfig, *, groups: int, layer_idx: int = 0) -> None:
        super().__init__()
        self.config, self.num_key_value_groups, self.layer_idx = config, groups, layer_idx
        self.is_causal = True
        self.eval()


class Inputs:
    """Random keys, values and queries, the same for the same seed and the same sequence of calls.

    Scores have a standard deviation of about 1.5, so that heads differ in where their attention lies.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        value_dim: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads, self.dim, self.value_dim = heads, kv_heads, dim, value_dim
        self.dtype, self.device = dtype, device

    def __call__(self, tokens: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values, queries `[batch, heads, tokens, dim]` for one call."""
        keys, values, queries = (
            torch.randn(batch, heads, tokens, dim, generator=self.generator)
            for heads, dim in ((self.kv_heads, self.dim), (self.kv_heads, self.value_dim), (self.heads, self.dim))
        )
        made = keys + 0.5, values, 1.5 * queries  # keys have a mean, without which estimates of the bulk would be off
        return tuple(tensor.to(self.device, self.dtype) for tensor in made)


def transformers_mask(valid: Tensor, queries: int) -> Tensor | None:
    """The mask `sdpa_mask` builds from a 2-D mask `valid` bool `[batch, seen]`, for the last `queries` tokens."""
    seen = valid.shape[1]
    if valid.all() and queries in (1, seen):
        return None
    causal = torch.ones(queries, seen, dtype=torch.bool, device=valid.device).tril(seen - queries)
    return causal & valid[:, None, None, :]


def find_kernel(*call: Any) -> Any:
    """`choose_kernel` for a call, with the kernels that a cache built now would use."""
    return choice.choose_kernel(*call, choice.resolve_kernels(None))


def make_shared(**options: Any) -> Shared:
    """`Shared` state of a cache that manages layer 0 alone, with `OPTIONS` and these options."""
    asked = {"kernels": choice.resolve_kernels(None)} | OPTIONS | options
    return Shared(Options(**asked), ManagedModel("llama", layers=(0,)))


def new_layer(keys: Tensor, values: Tensor, **options: Any) -> QAdALayer:
    """An empty, offloaded layer 0 for tensors like these."""
    layer = QAdALayer(make_shared(offloading=True, **options), 0)
    layer.lazy_initialization(keys, values)
    return layer


class Driver:
    """Calls one `QAdALayer` as a model does.

    Args:
        layer: the layer to drive.
        groups: query heads of each key-value head.
        module: the attention module the calls come from; a new one by default.
    """

    def __init__(self, layer: QAdALayer, *, groups: int = 2, module: FakeAttention | None = None) -> None:
        if module is None:
            config = LlamaConfig()
            config._attn_implementation = "sdpa"
            switch_on(config)
            module = FakeAttention(config, groups=groups)
        self.layer, self.module = layer, module

    def __call__(
        self, keys: Tensor, values: Tensor, queries: Tensor, mask: Tensor | None, *, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Append keys and values to the layer and attend from the queries. Returns outputs `[batch, heads, tokens,
        dim]`, and bool flags `[batch, heads, tokens]`, True = local; None if the call was exact, without decisions.
        """
        seen = []
        original = Counters.count

        def spy(counters: Counters, flags: Tensor, rows: Rows, token_bytes: int) -> None:
            seen.append(flags)
            original(counters, flags, rows, token_bytes)

        with mock.patch.object(Counters, "count", spy), torch.no_grad():
            tagged, stored = self.layer.update(keys, values)
            attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
            outputs, weights = attention(self.module, queries, tagged, stored, mask, scaling=scaling, **kwargs)
        assert weights is None
        assert len(seen) <= 1
        return outputs.transpose(1, 2), ~seen[0].flatten(1, 2).cpu() if seen else None
