"""lm-eval's model arguments `cache=...` and `cache_*=...` as `QAdACache`'s keywords."""

import inspect
from typing import Any

from qada_cache import QAdACache, StaticHeads

CRITERIA = {"qada": "gaussian", "oracle": "oracle", "static": "static", "local": "local", "dense": "dense"}
# `QAdACache`'s own keywords, so that an option added there is one here; the criterion is what `cache=` names.
KEYWORDS = tuple(
    name
    for name, parameter in inspect.signature(QAdACache).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in ("config", "criterion")
)


def split_arguments(cache: Any, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split model arguments into keywords of `QAdACache` and those of `HFLM`.

    Args:
        cache: "qada", "oracle", "static", "local" or "dense".
        arguments: all others; those that start with `cache_` are the cache's, but for transformers' `cache_dir`.

    Raises:
        ValueError: an unknown `cache` or `cache_*`, or `cache_heads` missing or out of place.
        FileNotFoundError: `cache_heads` is not there.
    """
    if cache not in CRITERIA:
        raise ValueError(f"unknown cache={cache}: use one of {', '.join(CRITERIA)}")
    ours = {name for name in arguments if name.startswith("cache_") and name != "cache_dir"}
    rest = {name: value for name, value in arguments.items() if name not in ours}
    options = {name.removeprefix("cache_"): arguments[name] for name in sorted(ours)}
    for name in options:
        if name not in (*KEYWORDS, "heads"):
            known = ", ".join(f"cache_{keyword}" for keyword in (*KEYWORDS, "heads"))
            raise ValueError(f"unknown cache_{name}={options[name]}: use one of {known}")
    heads = options.pop("heads", None)
    if (cache == "static") != (heads is not None):
        raise ValueError("cache=static needs cache_heads=FILE, written by StaticHeads.save, and only it takes one")
    criterion = CRITERIA[cache] if heads is None else StaticHeads.load(heads)
    return {"criterion": criterion, **options}, rest
