"""Prompts read by selection: ways of trying them, and whether they were read so.

A way's `read` says so in front of its bits: "sketch of 1.5 bits prefill 12 over 8, 4.4".
"""

from collections.abc import Sequence

from eval.shared.deciding import split
from eval.shared.ways import BOTH, DEFAULT_THETA, Way
from qada_cache import QAdACache
from qada_cache.state import SKETCH_BITS, THRESHOLD


def list_prompt_ways(thresholds: Sequence[float], *, bits: Sequence[int] = (16,)) -> list[Way]:
    """Prompts read at each `prefill_threshold`, for bulks of so many `bits`: what follows reads all of them, so that
    the prompt's part is seen alone, or reads by the default."""
    made = []
    for theta in thresholds:
        for each in bits:
            kind = f"sketch of {SKETCH_BITS} bits prefill {theta:g}" + ("" if each == 16 else f" over {each}")
            made.append(Way("dense", BOTH[0], read=f"{kind}, 0"))
            made.append(Way("qada", BOTH[0], "any", THRESHOLD, f"{kind}, {DEFAULT_THETA}"))
    return made


def find_prefill_threshold(tokens: str) -> float:
    """Of the prompt, for a way of reading; 0 if it does not say."""
    words = split(tokens)[0].split()
    return float(words[words.index("prefill") + 1]) if "prefill" in words else 0.0


def check_selected(cache: QAdACache) -> None:
    """Raise ValueError if a cache with a `prefill_threshold` has read its prompt exactly: a table would show an exact
    reading in its place."""
    stats, threshold = cache.stats(), cache.options.prefill_threshold
    if threshold > 0 and stats.prompt_read_pairs == stats.prompt_pairs:
        raise ValueError(
            f"--prefill {threshold:g} selected nothing: it takes prompts of 1,300 tokens, a model in float32 or "
            "bfloat16 and a CPU with AVX2 or NEON; --prefill 0 reads exactly"
        )
