"""Time of a short turn, or of a draft, behind a text that was read before: `python -m eval.turns`.

    python -m eval.turns --model smollm2 --tokens 6000 --turns 1 4 16 64 112 --out eval/results

Every cache reads the text, and then the turns behind it one after the other, as in a chat: each is one call of so many
tokens, `--rounds` times. All caches see the same tokens. The least of a turn's times counts. At most a window of tokens
(112 by default) is read query-adaptively, token by token; more are exact.
"""

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from eval.shared.timing import load_model, make_timing_parser, report, wait
from eval.shared.workloads import draw_tokens
from qada_cache import QAdACache, restore_attention
from qada_cache.versions import pass_cache


@torch.inference_mode()
def time_turns(
    model: PreTrainedModel, cache: Cache, ids: torch.Tensor, *, tokens: int, turns: list[int], bar: tqdm
) -> list[float]:
    """Seconds of each of `turns`, calls of so many tokens, behind the first `tokens` of `ids` `[1, *]`."""
    model(ids[:, :tokens], **pass_cache(cache), logits_to_keep=1)
    first = model(ids[:, tokens : tokens + 1], **pass_cache(cache)).logits  # what is built at a first call is there
    assert torch.isfinite(first).all()
    at, seconds = tokens + 1, []
    for turn in turns:
        wait(model.device)
        begin = time.perf_counter()
        model(ids[:, at : at + turn], **pass_cache(cache))
        wait(model.device)
        seconds.append(time.perf_counter() - begin)
        at += turn
        bar.update()
    return seconds


def measure(model: PreTrainedModel, ids: torch.Tensor, *, tokens: int, turns: list[int], rounds: int) -> list[dict]:
    """A row for every turn and method."""
    config, many = model.config, turns * (rounds + 1)  # of which the first ones build kernels
    methods: dict[str, Callable[[], Cache]] = {
        "DynamicCache": lambda: DynamicCache(config=config),
        "StaticCache": lambda: StaticCache(config=config, max_cache_len=tokens + 1 + sum(many)),
        "QAdACache": lambda: QAdACache(model),
    }
    best: dict[tuple[str, int], float] = {}
    with tqdm(total=len(methods) * len(many), unit="turn") as bar:
        for name, make in methods.items():
            bar.set_postfix_str(name)
            restore_attention(model)
            gc.collect()
            seconds = time_turns(model, make(), ids, tokens=tokens, turns=many, bar=bar)
            for turn, took in zip(many[len(turns) :], seconds[len(turns) :], strict=True):
                best[name, turn] = min(took, best.get((name, turn), took))
    return [
        {
            "method": name,
            "tokens": tokens,
            "turn": turn,
            "turn_ms": f"{1e3 * took:.1f}",
            "over_dynamic": f"{took / best['DynamicCache', turn]:.2f}",
            "over_static": f"{took / best['StaticCache', turn]:.2f}",
        }
        for (name, turn), took in best.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = make_timing_parser("turns", __doc__ or "", table="turns-MODEL-DEVICE.csv")
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[6000], help="of the text (default: %(default)s)")
    add("--turns", type=int, nargs="+", default=[1, 4, 16, 64, 112], help="tokens of each (default: %(default)s)")
    add("--rounds", type=int, default=3, help="times that every turn is measured (default: %(default)s)")
    options = parser.parse_args(arguments)
    if min(options.turns) < 1 or options.rounds < 1:
        parser.error("--turns and --rounds: 1 or more")
    behind = 1 + sum(options.turns) * (options.rounds + 1)
    model, _, tokenizer = load_model(parser, options, tokens=max(options.tokens) + behind)
    try:
        ids = draw_tokens(model, tokenizer, max(options.tokens) + behind, seed=options.seed)[None]
    except ValueError as error:
        parser.error(f"--tokens: {error}")
    told: dict[str, Any] = {"turns": options.turns, "rounds": options.rounds}
    rows = [row for tokens in options.tokens for row in measure(model, ids, tokens=tokens, **told)]
    report(options, rows, "turns")
    return 0


if __name__ == "__main__":
    sys.exit(main())
