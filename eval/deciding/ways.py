"""Ways of deciding to try side by side: those of `QAdACache`, and some that it does not have."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from eval.deciding.tokens import REST
from qada_cache import KeyMoments
from qada_cache.attention import decide
from qada_cache.criterion import gaussian_log_bulk, score_moments
from qada_cache.kernels import query_adaptive
from qada_cache.kernels.query_adaptive import Step
from qada_cache.state.layer import QAdALayer
from qada_cache.state.options import TOKEN_THRESHOLD
from qada_cache.storage.store import TokenStore

FEW = (0.1, 0.3, 0.6, 0.9)
MOST = (0.1, 0.3, 0.6, 0.8, 0.9)
RULES = ("any", "head", "mean")
BOTH = ("current+random-tokens", "current+random-words")
PROMPTS = ("random-words", "random-tokens", "wiki", "single-word")
DEFAULT_THETA = TOKEN_THRESHOLD  # of `QAdACache`
ECONOMICAL = 12.0
TRIMMED = 0.05  # the share of keys that trimmed moments leave out


@dataclass(frozen=True)
class Way:
    """One way of deciding.

    Args:
        criterion: "qada", "oracle", "static", "dense", "local"; or "evicted" or "quantized", as other methods do.
        moments: for "qada", and for the query energies of a sketch: those of `QAdACache`, or one of `experiments`.
        rule: a group rule of `QAdACache`; or "all", a group is long-context if all of its heads are; or "mean", if the
            mean of their local shares is below the threshold.
        threshold: tau; for "static" alpha, the share of heads made local; nothing to "dense" and "local".
        read: what a long-context head reads: "" for everything, or as in `tokens.split`; or what another method keeps.
    """

    criterion: str
    moments: str = ""
    rule: str = "any"
    threshold: float = 0.0
    read: str = ""


def few_ways() -> list[Way]:
    """Sinks and window, the default at several thresholds, the paper's rule and the oracle: to compare models by."""
    ours = [Way("qada", BOTH[0], "any", tau) for tau in (0.5, 0.6, 0.7, 0.8, 0.9)]
    others = [Way("qada", "current", "any", tau) for tau in (0.6, 0.7, 0.8, 0.9)]
    return [Way("local"), *ours, *others, Way("qada", "current", "head", 0.6), Way("oracle", "", "any", 0.6)]


def all_ways() -> list[Way]:
    """Every way that there is something to learn from, the few first."""
    ways = [*few_ways(), *(Way("qada", "current", "any", tau) for tau in FEW)]
    ways += [Way("qada", "current", rule, tau) for rule in RULES[1:] for tau in MOST]
    ways += [Way("oracle", "", rule, tau) for rule in RULES for tau in MOST]
    ways += [Way("qada", prompt, rule, tau) for prompt in PROMPTS[:2] for rule in RULES for tau in FEW]
    ways += [Way("qada", prompt, "any", tau) for prompt in PROMPTS[2:] for tau in FEW]
    ways += [Way("qada", moments, "all", 0.6) for moments in (*PROMPTS[:2], "current")]
    ways += [Way("qada", name, "any", tau) for name in (*BOTH, "trimmed") for tau in FEW]
    ways += [Way("qada", name, "any", tau) for name in ("corrected by head", "corrected by layer") for tau in MOST[2:]]
    ways += [Way("static", "", "any", alpha) for alpha in (0.3, 0.5, 0.6, 0.7, 0.8)]
    return list(dict.fromkeys(ways))


def token_ways(*, few: bool = False, own: bool = False) -> list[Way]:
    """Reading some of the tokens, in those heads that the default calls long-context, or in every head.

    The `few` are compared on every model; `own` are the default and the economical setting alone.
    """

    def product(theta: float, bits: int = 2, threshold: float = 0.95, rule: str = "any") -> Way:
        return Way("qada", BOTH[0], rule, threshold, f"sketch of {bits} bits, {theta}")

    shares = [Way("dense", read="true, 0.05")]
    default = [product(DEFAULT_THETA), product(ECONOMICAL)]
    if own:
        return default
    default.append(product(ECONOMICAL, threshold=0.7))
    # The Gaussian's part: no head is local; or each query head decides for itself whether it looks at the sketch.
    default += [Way("dense", BOTH[0], read=f"sketch of 2 bits, {DEFAULT_THETA}"), product(DEFAULT_THETA, rule="head")]
    if few:
        return [*default, *shares]
    default += [product(theta) for theta in (1.0, 2.0, 3.0, 8.0)] + [product(DEFAULT_THETA, threshold=0.8)]
    default += [product(theta, bits) for bits in (1, 4) for theta in (2.0, DEFAULT_THETA)]
    every = [Way("dense", BOTH[0], read=f"sketch of 2 bits and {rest}, {DEFAULT_THETA}") for rest in REST]
    more = {"true": (0.1,), "2 bits": (0.05, 0.1), "pages of 16": (0.05, 0.1)}
    shares += [Way("dense", read=f"{kind}, {share}") for kind, found in more.items() for share in found]
    return [*default, *every, *shares]


def peer_ways() -> list[Way]:
    """Other methods: a share of the bulk's tokens that each keeps, and everything in few bits."""
    methods, shares = ("SnapKV", "ExpectedAttention", "TOVA", "KeyDiff"), (0.05, 0.1, 0.2)
    evicted = [Way("evicted", read=f"{method}, {share}") for method in methods for share in shares]
    return [*evicted, *(Way("quantized", read=f"{bits} bits") for bits in (4, 2))]


@dataclass
class Knowledge:
    """What ways of deciding know beforehand; some need nothing of it.

    Attributes:
        moments: of other prompts, by name.
        errors: mean of `log A_bulk` less the current prompt's estimate of it `[layers, heads]`, on other texts.
        local_share: how often the oracle called a head local there `[layers, heads]`.
    """

    moments: dict[str, KeyMoments] = field(default_factory=dict)
    errors: Tensor | None = None
    local_share: Tensor | None = None


def trimmed(original: Callable, layer: QAdALayer, store: TokenStore, step: Step, geometry: Any) -> Tensor:
    """The current prompt's estimate without its greatest keys: those furthest from their mean."""
    keys = store.bulk.keys[:, :, : store.bulk.lengths[0]].float()
    distance = (keys - keys.mean(dim=2, keepdim=True)).norm(dim=-1)
    kept = distance <= distance.quantile(1 - TRIMMED, dim=-1, keepdim=True)
    weight = (kept / kept.sum(dim=-1, keepdim=True)).unsqueeze(-1)
    mean = (keys * weight).sum(dim=2)
    centred = keys - mean.unsqueeze(2)
    covariance = torch.matmul((centred * weight).mT, centred)
    found = score_moments(step.packed.float(), mean, covariance, scaling=step.rule.scaling)
    mean, variance = (part.view_as(step.scores[..., 0]) for part in found)
    return gaussian_log_bulk(mean, variance, geometry.bulk_tokens.unsqueeze(2))


def corrected(errors: Tensor) -> Callable:
    """The current prompt's estimate and the error that is usual for the head, `errors` `[layers, heads]`."""

    def estimate(original: Callable, layer: QAdALayer, store: TokenStore, step: Step, geometry: Any) -> Tensor:
        found = original(layer, store, step, geometry)
        return found + errors[layer.index].view(1, *found.shape[1:3], 1)

    return estimate


def experiments(known: Knowledge) -> dict[str, Callable]:
    """Estimates of `log A_bulk` that `QAdACache` does not have, by name."""
    made: dict[str, Callable] = {"trimmed": trimmed}
    if known.errors is not None:
        by_layer = known.errors.mean(dim=1, keepdim=True).expand_as(known.errors)
        made |= {"corrected by head": corrected(known.errors), "corrected by layer": corrected(by_layer)}
    return made


@contextmanager
def deciding(way: Way, known: Knowledge) -> Iterator[None]:
    """Make caches that are used inside decide in a way that they cannot be asked for."""
    estimate = experiments(known).get(way.moments)
    original, together = decide.estimate, query_adaptive.group_decision
    alone = query_adaptive.long_context
    shares: list[Tensor] = []

    def replaced(*args: Any, **kwargs: Any) -> Tensor:
        return estimate(original, *args, **kwargs) if estimate else original(*args, **kwargs)

    def remembered(log_local: Tensor, log_bulk: Tensor, limit: float) -> Tensor:
        shares[:] = [torch.sigmoid(log_local - log_bulk)]
        return alone(log_local, log_bulk, limit)

    def agreed(flags: Tensor, rule: str) -> Tensor:
        if way.rule == "all":
            return flags.all(dim=2, keepdim=True).expand_as(flags)
        if way.rule == "mean":
            return (shares.pop().mean(dim=2, keepdim=True) < way.threshold).expand_as(flags)
        return together(flags, rule)

    with (
        mock.patch.object(decide, "estimate", replaced),
        mock.patch.object(query_adaptive, "long_context", remembered),
        mock.patch.object(query_adaptive, "group_decision", agreed),
    ):
        yield
