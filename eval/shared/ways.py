"""Ways of deciding and of reading, by name: what `eval.trials` tries, and which of them a command asks for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qada_cache.criterion import GROUP_RULES
from qada_cache.state import SKETCH_BITS, TOKEN_THRESHOLD

FEW = (0.1, 0.3, 0.6, 0.9)
MOST = (0.1, 0.3, 0.6, 0.8, 0.9)
BOTH = ("current+random-tokens", "current+random-words")
PROMPTS = ("random-words", "random-tokens", "wiki", "single-word")
DEFAULT_THETA = TOKEN_THRESHOLD  # of `QAdACache`
ECONOMICAL, ITS_THRESHOLDS = 12.0, (0.7, 0.3)  # where three and where seven query heads share a key
OWN = "sketch"  # ways of reading that start so are the product's


@dataclass(frozen=True)
class Way:
    """One way of deciding.

    Args:
        criterion: "qada", "oracle", "dense", "local"; or "evicted" or "quantized", as other methods do.
        moments: for "qada", and for the query energies of a sketch.
        rule: a group rule of `QAdACache`.
        threshold: tau; nothing to "dense" and "local".
        read: what a long-context head reads: "" for everything, or as in `split`; or what another method keeps.
    """

    criterion: str
    moments: str = ""
    rule: str = "any"
    threshold: float = 0.0
    read: str = ""


def list_few_ways() -> list[Way]:
    """Sinks and window, the default at several thresholds, the paper's rule and the oracle: to compare models by."""
    ours = [Way("qada", BOTH[0], "any", tau) for tau in (0.5, 0.6, 0.7, 0.8, 0.9)]
    others = [Way("qada", "current", "any", tau) for tau in (0.6, 0.7, 0.8, 0.9)]
    return [Way("local"), *ours, *others, Way("qada", "current", "head", 0.6), Way("oracle", "", "any", 0.6)]


def list_all_ways() -> list[Way]:
    """Every way that there is something to learn from, the few first."""
    ways = [*list_few_ways(), *(Way("qada", "current", "any", tau) for tau in FEW)]
    ways += [Way("qada", "current", "head", tau) for tau in MOST]
    ways += [Way("oracle", "", rule, tau) for rule in GROUP_RULES for tau in MOST]
    ways += [Way("qada", prompt, rule, tau) for prompt in PROMPTS[:2] for rule in GROUP_RULES for tau in FEW]
    ways += [Way("qada", moments, "any", tau) for moments in (*PROMPTS[2:], *BOTH) for tau in FEW]
    return list(dict.fromkeys(ways))


def list_token_ways(*, few: bool = False, own: bool = False, bits: Sequence[int] = (16,)) -> list[Way]:
    """Reading some of the tokens, in those heads that the default calls long-context, or in every head.

    The `few` are compared on every model; `own` are the default and the economical settings alone, of bulks of so many
    `bits`.
    """

    def make_way(theta: float, bits: float = SKETCH_BITS, threshold: float = 0.95, rule: str = "any") -> Way:
        return Way("qada", BOTH[0], rule, threshold, f"sketch of {bits} bits, {theta}")

    shares = [Way("dense", read="true, 0.05")]
    default = [make_way(DEFAULT_THETA), *(make_way(ECONOMICAL, threshold=tau) for tau in ITS_THRESHOLDS)]
    if own:
        return [
            way if each == 16 else replace(way, read=way.read.replace(",", f" over {each},"))
            for each in bits
            for way in default
        ]
    default += [make_way(ECONOMICAL), make_way(16.0, threshold=0.4)]
    # The Gaussian's part: no head is local; or each query head decides for itself whether it looks at the sketch.
    default += [Way("dense", BOTH[0], read=make_way(DEFAULT_THETA).read), make_way(DEFAULT_THETA, rule="head")]
    if few:
        return [*default, *shares]
    default += [make_way(theta) for theta in (1.0, 2.0, 3.0, 8.0)] + [make_way(DEFAULT_THETA, threshold=0.8)]
    default += [make_way(theta, bits) for bits in (1, 2) for theta in (2.0, DEFAULT_THETA)]
    more = {"true": (0.1,), "pages of 16": (0.05, 0.1)}
    shares += [Way("dense", read=f"{kind}, {share}") for kind, found in more.items() for share in found]
    return [*default, *shares]


def list_peer_ways() -> list[Way]:
    """Other methods: a share of the bulk's tokens that each keeps, and everything in few bits."""
    methods, shares = ("SnapKV", "ExpectedAttention", "TOVA", "KeyDiff"), (0.05, 0.1, 0.2)
    evicted = [Way("evicted", read=f"{method}, {share}") for method in methods for share in shares]
    return [*evicted, *(Way("quantized", read=f"{bits} bits") for bits in (4, 2))]


def list_latent_ways() -> list[Way]:
    """Of latent attention, of which all heads share one key: the default over 16, 8 and 4 bits."""
    read = f"sketch of {SKETCH_BITS} bits{{}}, {DEFAULT_THETA}"
    return [Way("qada", BOTH[0], "any", 0.95, read.format(over)) for over in ("", " over 8", " over 4")]
