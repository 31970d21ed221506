"""Which of transformers' causal language models a cache serves, and what it says to the others.

    python -m eval.families --out eval/results/families.csv

Every model type is built with few and small layers and random weights, each in a process of its own. At `threshold=1`
its logits have to be those of `DynamicCache`, over a prompt, a second turn and single tokens.
"""

import argparse
import logging
import multiprocessing
import re
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES

from eval.models.tiny_configs import tiny_config
from eval.reporting.tables import plain, write
from qada_cache import QAdACache
from qada_cache.state.layer import QAdALayer

CALLS = (150, 9, 40, 1, 1, 1)  # tokens: a prompt, a short and a long second turn, and single ones
ROUNDING = 1e-4  # of the largest logit: float32's, many times over
LONGEST = 400  # characters of a message
VERDICTS = ("served", "nothing to do", "refused", "differs", "not run")


def logits(model: PreTrainedModel, cache: DynamicCache) -> torch.Tensor:
    """`[1, tokens, vocabulary]` of random tokens, in `CALLS`."""
    ids = torch.randint(5, 90, (1, sum(CALLS)), generator=torch.Generator().manual_seed(0))
    calls = (model(input_ids=part, past_key_values=cache, use_cache=True) for part in ids.split(CALLS, dim=1))
    return torch.cat([called.logits for called in calls], dim=1)


def built(model_type: str) -> tuple[PreTrainedModel, torch.Tensor]:
    """A tiny model, with weights large enough for attention to be peaked, and its logits through `DynamicCache`."""
    config: PreTrainedConfig = tiny_config(CONFIG_MAPPING[model_type])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1 and weight.is_floating_point():
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5)
    wanted = logits(model, DynamicCache(config=model.config))
    if not wanted.isfinite().all():
        raise ValueError("its own logits are not finite")
    return model, wanted


@torch.no_grad()
def verdict(model_type: str) -> dict[str, Any]:
    """The row of a model type."""
    row: dict[str, Any] = {"model_type": model_type, "verdict": "not run", "layers": "", "words": ""}
    try:
        model, wanted = built(model_type)
    except Exception as error:  # whatever a model raises that is not ours to judge: that is the finding
        return row | {"words": words(error)}
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("qada_cache").addHandler(handler)
    try:
        cache = QAdACache(model, threshold=1.0, sink_tokens=4, local_tokens=20, moments="current")
        ours = sum(isinstance(layer, QAdALayer) for layer in cache.layers)
        row["layers"] = f"{ours} of {len(cache.layers)}"
        error = float((logits(model, cache) - wanted).abs().max() / wanted.abs().max())
    except Exception as error:  # likewise
        return row | {"verdict": "refused", "words": words(error)}
    if error > ROUNDING:
        return row | {"verdict": "differs", "words": f"by {error:.1e} of the largest logit"}
    return row | {"verdict": "served" if ours else "nothing to do", "words": "; ".join(said)}


def words(error: Exception) -> str:
    """Its kind, and how what it says begins."""
    said = re.sub(r"\s+", " ", str(error)).strip()
    return f"{type(error).__name__}: {said if len(said) <= LONGEST else said[:LONGEST] + '...'}"


def _work(model_type: str, end: Connection) -> None:
    end.send(verdict(model_type))


def within(seconds: float, model_type: str) -> dict[str, Any]:
    """Its verdict, from a process that may crash, or take no longer than that."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_work, args=(model_type, there))
    process.start()
    there.close()
    found = {"model_type": model_type, "verdict": "not run", "layers": "", "words": f"not done in {seconds:.0f} s"}
    try:
        if here.poll(seconds):
            found = here.recv()
    except EOFError:
        process.join()
        found["words"] = f"its process ended with {process.exitcode}"
    process.kill()
    process.join()
    return found


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m eval.families", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--types", nargs="+", metavar="TYPE", default=sorted(TYPES), help="model types (default: all)")
    add("--seconds", type=float, default=60, help="that a model type may take (default: %(default)s)")
    add("--out", type=Path, help="the CSV file to write")
    options = parser.parse_args(arguments)
    if unknown := set(options.types) - set(TYPES):
        parser.error(f"--types: transformers has no causal language model {', '.join(sorted(unknown))}")
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = [within(options.seconds, model_type) for model_type in tqdm(options.types, disable=not sys.stderr.isatty())]
    print(plain([{name: row[name] for name in ("model_type", "verdict", "layers", "words")} for row in rows]))
    print(*(f"{sum(row['verdict'] == kind for row in rows)} {kind}" for kind in VERDICTS), sep=", ")
    if options.out:
        write(options.out, rows, transformers=transformers.__version__)


if __name__ == "__main__":
    main()
