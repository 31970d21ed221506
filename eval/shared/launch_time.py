"""What a decode step of a layer costs the host: `python -m eval.overhead launch`, best with OMP_NUM_THREADS=1.

No GPU is used. A step passes through 32 layers as a model does it: `QAdACache.update`, then the attention function,
which stores the token, estimates the bulk's attention, and launches Triton's kernels. Triton binds arguments, finds
what it has compiled and calls a launcher, as on a GPU; the launcher is a stand-in that does nothing. Torch's operations
compute, on a CPU and on tensors so small that this is hardly more than their calls. So a table lacks what a driver does
for each launch, here and beside it.

`host_us` is a step's time over its layers; steps that move tokens to the bulk are none of them. `graph_us` is that of a
replayed step, which is the default on a GPU, with a graph that launches nothing. `dynamic_us` is what DynamicCache
takes for the same token, `update` and transformers' attention by `scaled_dot_product_attention` over a few tokens. All
three are CPU time of the one thread, medians of steps in turn. `launches` (Triton's), `operations` (torch's, views
apart) and `allocations` are of a layer behind the first. `sketch` is as in `triton-resources.csv`.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from statistics import median
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from eval.shared.compiling import SKETCHES
from qada_cache import KeyMoments, QAdACache
from qada_cache.decode_graph import DecodeGraph
from qada_cache.decode_graph.capturing import GRAPHS
from qada_cache.kernels import choice
from qada_cache.versions import CACHE

LAYERS, KV_HEADS, GROUP, DIM = 32, 2, 4, 32
PROMPT = 1500  # tokens: enough for a sketch
CONTEXT = 16  # tokens of DynamicCache
MOST_STEPS = 100  # fewer than from one flush to the next


class Launcher:
    """Launches nothing. `launched` has, of each time, the kernel's name and its arguments, constants included."""

    launched: ClassVar[list[tuple[str, tuple[Any, ...]]]] = []

    def __init__(self, source: Any, _metadata: Any) -> None:
        self._name = source.fn.__name__

    def __call__(self, *given: Any) -> None:
        """Nine of `given` come before the kernel's arguments: grid, stream, and what the launcher is told."""
        self.launched.append((self._name, given[9:]))


# What Triton asks of a device before it launches a kernel: here of compute capability 9.0.
DRIVER = SimpleNamespace(
    launcher_cls=Launcher,
    get_current_device=lambda: 0,
    get_current_stream=lambda _device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    utils=SimpleNamespace(
        get_device_properties=lambda _device: {"max_shared_mem": 227 * 1024},
        load_binary=lambda *_: ("module", "function", 0, 0, 1024),
    ),
)


class NoGraph:
    """Stands in for a CUDA graph: what is captured is computed once, and a replay does nothing."""

    def __init__(self, _device: torch.device) -> None:
        pass

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """As `CudaGraph`."""
        yield

    def replay(self) -> None:
        """As `CudaGraph`."""


class Operations(TorchDispatchMode):
    """Counts torch's operations that compute something, and results that lie in new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = self.allocated = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        given, made = (
            {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
            for tree in ((args, kwargs), found)
        )
        self.computed += not (function.is_view or "empty" in function.name())
        self.allocated += bool(made - given)
        return found


class Layer(nn.Module):
    """What attention functions read of a model's attention."""

    is_causal = True

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.num_key_value_groups = config, index, GROUP


class Decoder(nn.Module):
    """The layers of a model, without anything between their attentions."""

    def __init__(self, config: LlamaConfig, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.layers, self.attend = nn.ModuleList(Layer(config, index) for index in range(LAYERS)), attend
        self.cache: Any = None
        self.token = make_tokens(1)
        self.hidden = torch.ones(1, 1, DIM, device="cpu")
        self.counted: dict[int, TorchDispatchMode] = {}  # by layer
        self.eval()

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> BaseModelOutputWithPast:
        """A decode step, or a prompt, of random tokens."""
        tokens = self.token if input_ids.shape[1] == 1 else make_tokens(input_ids.shape[1])
        for index, layer in enumerate(self.layers):
            with self.counted[index] if index in self.counted else contextlib.nullcontext():
                self.pass_through(layer, index, *tokens)
        return BaseModelOutputWithPast(last_hidden_state=self.hidden)

    def pass_through(self, layer: Layer, index: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """One layer's part."""
        keys, values = self.cache.update(keys, values, index)
        self.attend(layer, query, keys, values, None, dropout=0.0, scaling=DIM**-0.5)


def make_tokens(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values of one row."""
    heads, size = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS), {"dtype": torch.bfloat16, "device": "cpu"}
    query, keys, values = (torch.randn(1, each, count, DIM, **size) for each in heads)
    return query, keys, values


def make_config() -> LlamaConfig:
    """Of a model with such layers."""
    config = LlamaConfig(
        num_hidden_layers=LAYERS, num_attention_heads=KV_HEADS * GROUP, num_key_value_heads=KV_HEADS, head_dim=DIM,
        hidden_size=KV_HEADS * GROUP * DIM,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return config


def make_ours(bits: float, rung: int) -> Decoder:
    """With a cache of default options but for the bulk's bits, filled with a prompt, whose kernels are bound."""
    config, shape = make_config(), (1, LAYERS, KV_HEADS, DIM)
    size = {"dtype": torch.float32, "device": "cpu"}
    covariance = torch.eye(DIM, **size).expand(*shape, DIM).contiguous()
    told = torch.zeros(shape, **size), covariance, (1,), config.model_type, "custom", PROMPT
    moments = KeyMoments(*told, query_energies=torch.ones(shape[1:], **size))
    options = {"bulk_bits": rung} if bits else {"bulk_bits": rung, "token_threshold": 0.0}
    cache = QAdACache(config=config, moments=moments, kernels="triton", **options)
    decoder = Decoder(config, ALL_ATTENTION_FUNCTIONS["sdpa"])
    decoder.cache = cache
    for tokens in (PROMPT, 1, 1):
        decoder(torch.zeros(1, tokens, dtype=torch.int64, device="cpu"))
    return decoder


def make_step(decoder: Decoder, graph: DecodeGraph | None) -> Callable[[], object]:
    """A decode step of it: by a graph, or computed."""
    told = {"input_ids": torch.zeros(1, 1, dtype=torch.int64, device="cpu"), CACHE: decoder.cache, "use_cache": True}
    if graph is None:
        return lambda: decoder.forward(**told)
    return lambda: graph.run(decoder.cache, decoder, decoder.forward, told)


def make_dynamic_step() -> tuple[Callable[[], object], Callable[[], object]]:
    """As `make_step`, by DynamicCache; and what has its context as before, to be called first."""
    decoder, token = Decoder(make_config(), sdpa_attention_forward), torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    context = torch.zeros(1, KV_HEADS, CONTEXT, DIM, dtype=torch.bfloat16, device="cpu")

    def renew() -> None:
        decoder.cache = DynamicCache()
        for index in range(LAYERS):
            decoder.cache.update(context, context, index)

    return lambda: decoder(token), renew


def measure(compute: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Microseconds of a step, over its layers, without what comes `before`."""
    Launcher.launched.clear()
    before()
    begin = time.thread_time()
    compute()
    return 1e6 * (time.thread_time() - begin) / LAYERS


@torch.no_grad()
def measure_row(sketch: str, steps: int) -> dict[str, Any]:
    """A row of the table."""
    ours, replayed, graph = make_ours(*SKETCHES[sketch]), make_ours(*SKETCHES[sketch]), DecodeGraph(asked=True)
    computed_step, replayed_step, dynamic_step = make_step(ours, None), make_step(replayed, graph), make_dynamic_step()
    operations = Operations()
    ours.counted[1] = operations
    Launcher.launched.clear()
    computed_step()
    launches = len(Launcher.launched) / LAYERS
    ours.counted.clear()
    for _ in range(4):  # as ever, rehearsed, captured, compared
        replayed_step()
    assert graph._compared, graph.failed
    each = (computed_step,), (replayed_step,), dynamic_step
    found = [[measure(*step) for step in each] for _ in range(steps)]
    host, by_graph, dynamic = (median(times) for times in zip(*found, strict=True))
    return {
        "sketch": sketch,
        "launches": f"{launches:g}",
        "operations": operations.computed,
        "allocations": operations.allocated,
        "host_us": f"{host:.0f}",
        "graph_us": f"{by_graph:.1f}",
        "dynamic_us": f"{dynamic:.0f}",
        "over_dynamic": f"{host / dynamic:.2f}",
        "graph_over_dynamic": f"{by_graph / dynamic:.2f}",
    }


def measure_rows(steps: int) -> list[dict[str, Any]]:
    """A row for each sketch."""
    driver.set_active(DRIVER)
    # As on a GPU: Triton's kernels serve tensors that lie on a CPU here, and graphs hold their launches.
    with (
        mock.patch.object(choice, "explain_unsupported", return_value=None),
        mock.patch.dict(GRAPHS, {"cpu": NoGraph}),
    ):
        return [measure_row(sketch, steps) for sketch in SKETCHES]
