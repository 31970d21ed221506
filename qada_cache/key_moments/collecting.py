"""The forward passes that key moments come from."""

import hashlib
import inspect
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..kernels.reference import suspend_autocast
from ..models import check_loaded, find_full_attention_layers, find_inputs_device, picks_blocks, unwrap_model
from ..models.plain import make_plain
from ..models.sharding import HeadShard, find_shard
from ..models.shared_keys import find_readers
from ..names import PROMPTS, SCHEMES
from .observing import observe_queries, read_keys
from .prompts import choose_prompt, make_ids
from .rotation import AS_KNOWN, Rotation, change_as_known, find_growing_parameters, find_rotations, read_rope_settings
from .running import RunningMoments

if TYPE_CHECKING:
    from . import KeyMoments

TOKENS = 1024
PROBE_TOKENS = 4
SHORTEST_PREFIX = 256
CHUNK_TOKENS = 512  # of one forward pass
LONGEST_SPREAD = 131072  # longer bulks get the moments of this one
# Weight of an error of values, relative to an error of scores that changes the output as much. Chosen on a text of one
# model that was converted to latent attention, and tried on a second.
VALUE_WEIGHT = 4.0
LEFT = "with functions"  # key of `KeyMoments.origin`: names of functions that the copy still calls, see `make_plain`


class QueryEnergies:
    """Accumulates the mean square of each channel of the queries that attend to a layer's keys, during a forward pass;
    an observer of `observe_queries`."""

    def __init__(self, readers: Mapping[int, int]) -> None:
        """`readers`, of `find_readers`: by layer, the layer whose keys its queries attend to."""
        self.readers = readers
        self.sums: dict[int, Tensor] = {}
        self.tokens: Counter[int] = Counter()
        self.values: dict[int, tuple[Tensor, float]] = {}  # of layers of latents, see `observe_queries`

    def __call__(self, layer: int, query: Tensor) -> None:
        """Add a layer's queries `[batch, heads, tokens, dim]`."""
        squares = query.detach().float().square().sum(dim=(0, 2)).cpu().double()  # [heads, dim]
        layer = self.readers.get(layer, layer)
        self.sums[layer] = squares + self.sums.get(layer, 0)
        self.tokens[layer] += query.shape[0] * query.shape[2]

    def gather(
        self, keys: dict[int, Tensor], layers: int, rotations: dict[int, Rotation], shard: HeadShard
    ) -> Tensor | None:
        """Query energies float32 `[layers, kv_heads, dim]`: means over a KV head's query heads and over each rotary
        pair. None if the queries of a layer that has `keys` were not observed, or do not fit its heads.

        Models of latents have `[layers, 2, dim]`. Row 0 are the query energies. Channels of latents are values, too, so
        an error `e` of a channel changes a score by `scaling q e`, and the output by its share of the values. Row 1
        weighs both, in units of energies."""
        most, widest = _find_greatest(keys)
        energies = torch.zeros(layers, (1 + bool(self.values)) * most, widest, dtype=torch.float32, device="cpu")
        seen = [index for index in keys.keys() & self.sums.keys() if self._fit(index, keys[index])]
        if not shard.holds_everywhere(len(seen) == len(keys)):
            return None
        for index, layer_keys in keys.items():  # in the same order in all processes
            _, heads, _, dim = layer_keys.shape
            mean = (self.sums[index] / self.tokens[index]).unflatten(0, (heads, -1)).mean(dim=1)
            mean = shard.average_queries(mean)
            _, partners = rotations.get(index, Rotation(dim)).by_dim
            energies[index, :heads, :dim] = (mean + mean[:, partners]) / 2
            if index in self.values:
                norms, scaling = self.values[index]
                norms = shard.average_queries(norms)
                variances = layer_keys[..., : len(norms)].double().flatten(0, 2).var(dim=0, correction=0)
                energies[index, 1] = energies[index, 0]
                if (spread := scaling**2 * float(norms @ variances)) > 0:  # else the values are all alike
                    energies[index, 1, : len(norms)] += VALUE_WEIGHT * norms / spread
        return shard.gather(energies, 1)

    def _fit(self, layer: int, keys: Tensor) -> bool:
        """Whether a layer's observed queries have the channels of its keys, and a multiple of their heads."""
        sums = self.sums[layer]
        return not len(sums) % keys.shape[1] and sums.shape[1] == keys.shape[3]


def collect(
    cls: "type[KeyMoments]",
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    prompt: str | Tensor = "random-words",
    *,
    tokens: int | None = None,
    seed: int = 0,
    text: str | None = None,
    scheme: str = "auto",
    sink_tokens: int = 16,
    progress: bool = True,
) -> "KeyMoments":
    """Moments of a model's keys on a prompt, from forward passes over `tokens` tokens.

    The keys of the first `sink_tokens` tokens are left out: they are never part of a bulk, and a sink's key is
    unlike all others.

    Args:
        model: any decoder that a `QAdACache` serves.
        tokenizer: the model's. Without it, or with one that does not know our article's words, "random-words" and
            "single-word" become "random-tokens" and "single-token", and `prompt` of the result says so.
        prompt: "random-words" (the paper's most robust choice), "wiki", "single-word", "random-tokens",
            "single-token", a text, or token ids; see `prompts.make_ids`.
        tokens: how many to read; 1,024 if not given, or as many as the token ids, our article or the model's
            positions are.
        seed: of everything random.
        text: for "random-words", "wiki" and "single-word", instead of the article that comes with this package.
        scheme: "analytic": keys turned back to position 0, averaged later over the positions of any bulk. "spread":
            the same tokens read at positions spread over bulks of doubling length, without knowledge of the model's
            positions. "prompt", the paper's: keys as they are read, for bulks of up to `tokens`. "auto": analytic
            if the rotation of every layer was found, else spread.
        sink_tokens: see above.
        progress: whether to show a progress bar.

    Raises:
        ValueError: an argument outside its range, a prompt too short, scheme "analytic" without a known rotation,
            no layer with keys for a QAdACache, or weights that were never loaded.
    """
    model = unwrap_model(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"key moments are collected from a transformers model, got {type(model).__name__}")
    check_loaded(model)
    if isinstance(tokenizer, Tensor):
        raise TypeError("token ids are the prompt, not the tokenizer: give prompt=...")
    if scheme not in SCHEMES:
        raise ValueError(f"unknown scheme {scheme!r}: use one of {', '.join(SCHEMES)}")
    config = model.config.get_text_config(decoder=True)
    managed = find_full_attention_layers(DynamicCache(config=config), config)
    if not managed:
        raise ValueError(f"{config.model_type} has no full-attention layers, so there are no key moments to collect")
    shard = find_shard(model, config, managed)
    layers, longest, rope = config.num_hidden_layers, _find_longest(model, config), read_rope_settings(config)
    kind = choose_prompt(prompt, tokenizer, text) if isinstance(prompt, str) and prompt in PROMPTS else "custom"
    # Our article is long enough, except with a tokenizer that puts several words into a token: then all of it is read.
    fewer = tokens is None and text is None and kind != "custom"
    if tokens is None:
        tokens = prompt.numel() if isinstance(prompt, Tensor) else min(TOKENS, longest)
    # The moments serve runs without dropout, gradients, autocast and hooks. Other threads may call the model meanwhile.
    with make_plain(model) as (plain, left), torch.no_grad(), suspend_autocast(find_inputs_device(model)):
        chosen = prompt if kind == "custom" else kind
        ids = make_ids(chosen, model=plain, tokenizer=tokenizer, tokens=tokens, seed=seed, text=text, fewer=fewer)
        _check_same(shard, kind, ids)
        tokens, bulk = len(ids), len(ids) - sink_tokens
        if bulk <= 0:
            raise ValueError(f"tokens ({tokens}) must exceed sink_tokens ({sink_tokens}), whose keys are left out")
        checked: dict[str, bool] = {}
        growing = any(find_growing_parameters(rope, layer) for layer in range(layers))
        if growing:  # a model keeps the frequencies of its longest text until it reads a short one
            read_keys(plain, ids[None, :1], None, chunk=1, done=lambda tokens: None)
        scheme, rotations = _choose_scheme(plain, scheme, ids, shard, managed)
        if growing and scheme == "analytic":
            checked[AS_KNOWN] = change_as_known(plain, ids.unique()[:PROBE_TOKENS], len(ids), rotations, rope, shard)
            read_keys(plain, ids[None, :1], None, chunk=1, done=lambda tokens: None)
        lengths = _choose_lengths(scheme, bulk, min(longest - sink_tokens, LONGEST_SPREAD))
        passes, prefixes = (lengths, [bulk]) if scheme == "spread" else ([bulk], lengths)
        # If frequencies depend on the sequence's length, each chunk would get other ones.
        chunk = tokens if growing else CHUNK_TOKENS
        grid: list[tuple[Tensor, Tensor]] = []
        energies = QueryEnergies(find_readers(config))
        hidden = not progress or shard.rank > 0
        with tqdm(
            total=tokens * len(passes), desc=f"key moments ({kind})", unit="token", leave=False, delay=1, disable=hidden
        ) as bar:
            for length in passes:
                first = torch.arange(sink_tokens, dtype=torch.int64, device="cpu")
                spread = (
                    torch.linspace(0, length - 1, bulk, dtype=torch.float32, device="cpu").round().long() + sink_tokens
                )
                # Contiguous positions are left to the model: not every one takes them as an argument.
                positions = None if length == bulk else torch.cat([first, spread])[None]
                with observe_queries(plain, energies, energies.values):
                    keys = read_keys(plain, ids[None], positions, chunk=chunk, done=bar.update)
                if scheme == "analytic":
                    back = -torch.arange(tokens, dtype=torch.int64, device="cpu")
                    keys = {index: rotations[index].rotate(rotated.double(), back) for index, rotated in keys.items()}
                grid += [_take_moments(keys, slice(sink_tokens, sink_tokens + prefix), layers) for prefix in prefixes]
    name = getattr(model.config, "_name_or_path", "")
    mean, covariance = (shard.gather(torch.stack(moments), 2) for moments in zip(*grid, strict=True))
    analytic = scheme == "analytic"
    return cls(
        query_energies=energies.gather(keys, layers, rotations, shard),
        mean=mean,
        covariance=covariance,
        lengths=() if analytic else tuple(lengths),
        # Rotations do not turn channels that pad a layer's keys to the most channels of any.
        rotations=tuple(
            replace(rotations.get(layer, Rotation(mean.shape[-1])), dim=mean.shape[-1]) for layer in range(layers)
        )
        * analytic,
        model_type=config.model_type,
        prompt=kind,
        tokens=tokens,
        sink_tokens=sink_tokens,
        rope=rope,
        origin={
            "model": os.path.basename(os.path.normpath(name)) if os.path.isdir(name) else name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "scheme": scheme,
            "seed": seed,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            **({LEFT: left} if left else {}),
            **checked,
        },
    )


def _find_longest(model: PreTrainedModel, config: PreTrainedConfig) -> int:
    """How many tokens the model has positions for. RoBERTa and its kin count positions from the padding token's on."""
    longest = getattr(config, "max_position_embeddings", None) or LONGEST_SPREAD
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            longest = min(longest, module.num_embeddings - module.padding_idx - 1)
    return longest


def _check_same(shard: HeadShard, kind: str, ids: Tensor) -> None:
    """Raise ValueError, in every process, if they would read different prompts: each has a tokenizer of its own."""
    digest = hashlib.sha256(f"{kind} {ids.tolist()}".encode()).digest()
    read = shard.gather_all(torch.tensor([list(digest)], dtype=torch.int64, device="cpu"), 0)
    if not read.eq(read[0]).all():
        raise ValueError(
            "the processes that share this model would read different prompts: give each the same prompt, tokenizer, "
            "tokens and seed"
        )


def _choose_scheme(
    model: PreTrainedModel, scheme: str, ids: Tensor, shard: HeadShard, managed: list[int]
) -> tuple[str, dict[int, Rotation]]:
    """The scheme, "auto" resolved, and rotations by layer; all managed layers have one if it is "analytic"."""
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    takes_positions &= not picks_blocks(model.config.get_text_config(decoder=True))
    probed: dict[int, Rotation | None] = dict.fromkeys(managed)
    if takes_positions and scheme in ("auto", "analytic"):
        probed = find_rotations(model, ids.unique()[:PROBE_TOKENS], len(ids), shard)
    rotations = {index: rotation for index, rotation in probed.items() if rotation is not None}
    if scheme == "analytic" and len(rotations) < len(probed):
        raise ValueError(
            f"how layers {sorted(probed.keys() - rotations.keys())} of {model.config.model_type} turn their keys with "
            'position was not found out: use scheme="spread"'
        )
    if scheme == "auto":
        scheme = "analytic" if len(rotations) == len(probed) else "spread"
    return "prompt" if scheme == "spread" and not takes_positions else scheme, rotations


def _choose_lengths(scheme: str, tokens: int, longest: int) -> list[int]:
    """The bulk lengths to take moments for, from a prompt with `tokens` tokens of bulk."""
    lengths = [tokens]
    while scheme == "spread" and 2 * lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    while scheme == "prompt" and lengths[0] // 2 >= SHORTEST_PREFIX:
        lengths.insert(0, lengths[0] // 2)
    return lengths


def _take_moments(keys: dict[int, Tensor], part: slice, layers: int) -> tuple[Tensor, Tensor]:
    """Mean `[layers, kv_heads, dim]` and covariance `[layers, kv_heads, dim, dim]` of the keys of these tokens; zeros
    for layers that have none, and for heads and channels that they lack."""
    heads, dim = _find_greatest(keys)
    running = RunningMoments(layers, heads, dim, torch.device("cpu"))
    for index, layer_keys in keys.items():
        selected, missing = layer_keys[:, :, part], (heads - layer_keys.shape[1], dim - layer_keys.shape[3])
        padded = pad(selected, (0, missing[1], 0, 0, 0, missing[0])) if any(missing) else selected
        running.update(slice(index, index + 1), padded)
    return running.mean, running.covariance


def _find_greatest(keys: dict[int, Tensor]) -> tuple[int, int]:
    """The most KV heads, and the most channels, of layers' keys `[batch, kv_heads, tokens, dim]`."""
    heads, dims = zip(*(layer_keys.shape[1::2] for layer_keys in keys.values()), strict=True)
    return max(heads), max(dims)
