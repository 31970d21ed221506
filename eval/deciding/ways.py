"""Ways of deciding and of reading to try side by side: those of `QAdACache`, and others to compare with."""

from dataclasses import dataclass

from qada_cache.criterion import GROUP_RULES
from qada_cache.state.shared import SKETCH_BITS, TOKEN_THRESHOLD

FEW = (0.1, 0.3, 0.6, 0.9)
MOST = (0.1, 0.3, 0.6, 0.8, 0.9)
BOTH = ("current+random-tokens", "current+random-words")
PROMPTS = ("random-words", "random-tokens", "wiki", "single-word")
DEFAULT_THETA = TOKEN_THRESHOLD  # of `QAdACache`
ECONOMICAL = 12.0


@dataclass(frozen=True)
class Way:
    """One way of deciding.

    Args:
        criterion: "qada", "oracle", "dense", "local"; or "evicted" or "quantized", as other methods do.
        moments: for "qada", and for the query energies of a sketch.
        rule: a group rule of `QAdACache`.
        threshold: tau; nothing to "dense" and "local".
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
    ways += [Way("qada", "current", "head", tau) for tau in MOST]
    ways += [Way("oracle", "", rule, tau) for rule in GROUP_RULES for tau in MOST]
    ways += [Way("qada", prompt, rule, tau) for prompt in PROMPTS[:2] for rule in GROUP_RULES for tau in FEW]
    ways += [Way("qada", moments, "any", tau) for moments in (*PROMPTS[2:], *BOTH) for tau in FEW]
    return list(dict.fromkeys(ways))


def token_ways(*, few: bool = False, own: bool = False) -> list[Way]:
    """Reading some of the tokens, in those heads that the default calls long-context, or in every head.

    The `few` are compared on every model; `own` are the default and the economical setting alone.
    """

    def product(theta: float, bits: float = SKETCH_BITS, threshold: float = 0.95, rule: str = "any") -> Way:
        return Way("qada", BOTH[0], rule, threshold, f"sketch of {bits} bits, {theta}")

    shares = [Way("dense", read="true, 0.05")]
    default = [product(DEFAULT_THETA), product(ECONOMICAL, threshold=0.7)]
    if own:
        return default
    default.append(product(ECONOMICAL))
    # The Gaussian's part: no head is local; or each query head decides for itself whether it looks at the sketch.
    default += [Way("dense", BOTH[0], read=product(DEFAULT_THETA).read), product(DEFAULT_THETA, rule="head")]
    if few:
        return [*default, *shares]
    default += [product(theta) for theta in (1.0, 2.0, 3.0, 8.0)] + [product(DEFAULT_THETA, threshold=0.8)]
    default += [product(theta, bits) for bits in (1, 2) for theta in (2.0, DEFAULT_THETA)]
    more = {"true": (0.1,), "pages of 16": (0.05, 0.1)}
    shares += [Way("dense", read=f"{kind}, {share}") for kind, found in more.items() for share in found]
    return [*default, *shares]


def peer_ways() -> list[Way]:
    """Other methods: a share of the bulk's tokens that each keeps, and everything in few bits."""
    methods, shares = ("SnapKV", "ExpectedAttention", "TOVA", "KeyDiff"), (0.05, 0.1, 0.2)
    evicted = [Way("evicted", read=f"{method}, {share}") for method in methods for share in shares]
    return [*evicted, *(Way("quantized", read=f"{bits} bits") for bits in (4, 2))]
