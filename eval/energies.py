"""Whose queries may say how keys are coded: `python -m eval.energies`.

    python -m eval.energies --model FILE.gguf --lengths 3072 --out energies.csv

Prose is read exactly, and its keys are coded by query energies of several prompts. For the queries of the tokens that
follow, estimated scores are compared with the true ones: the variance, over the tokens of the bulk, of what an estimate
is off by, in squared nats; the mean over queries, heads and layers, and the mean of the layer where it is greatest.
"""

import argparse
import sys
from collections import defaultdict
from itertools import islice

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.shared.deciding import PROMPTS, follow, prefill
from eval.shared.language_model import DEFAULT, HELP, check_loading, label, load
from eval.shared.tables import align, new_file, write
from eval.shared.texts import Document, read_prose
from eval.trials import make_exact_cache
from qada_cache import KeyMoments
from qada_cache.kernels.choice import resolve_kernels
from qada_cache.kernels.operands import Query
from qada_cache.kernels.query_adaptive import group_queries
from qada_cache.machine import describe_machine
from qada_cache.sketch import Layout
from qada_cache.sketch.codec import estimate_scores
from qada_cache.state import SKETCH_BITS
from qada_cache.state.layer import QAdALayer
from qada_cache.state.observation import Observation
from qada_cache.storage import TokenStore
from qada_cache.storage.bulk_sketch import BulkSketch

ALIKE, OTHER, SAME = "all channels alike", "other prose", "the same prose"
Energies = dict[str, Tensor | None]  # query energies `[layers, kv_heads, dim]` by their source; None: all alike


def collect_energies(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: dict[str, str | Tensor]
) -> Energies:
    """Query energies of prompts: names, or token ids."""
    return {
        name: KeyMoments.collect(model, tokenizer, prompt, progress=False).query_energies
        for name, prompt in prompts.items()
    }


def measure_errors(store: TokenStore, query: Query, bits: float, energies: Tensor | None) -> float:
    """Mean over one layer's queries and heads of the variance, over tokens, of what estimates are off by."""
    bulk, length = store.bulk, store.bulk.lengths[0]
    keys, values = bulk.read(slice(0, 1), slice(None), 0, length)
    sketch = BulkSketch(keys, values, Layout.from_bits(keys.shape[3], bits), energies, resolve_kernels(None))
    sketch.append_from(bulk, slice(0, 1))
    found = []
    for head, queries in enumerate(group_queries(query, keys.shape[1])[0].float()):
        estimates = estimate_scores(queries, sketch.tensors[0, head], length, scaling=query.scaling)
        found.append((estimates - query.scaling * queries @ keys[0, head].float().mT).var(dim=-1))
    return float(torch.stack(found).mean())


def measure(model: PreTrainedModel, document: Document, energies: Energies, bits: float) -> dict[str, list[float]]:
    """By the source of the energies, `measure_errors` of every layer."""
    found = defaultdict(list)

    cache = make_exact_cache(model)
    served = [layer for layer in cache.layers if isinstance(layer, QAdALayer)]
    places = {layer.index: place for place, layer in enumerate(served)}

    def note(seen: Observation) -> None:
        place = places[seen.layer]
        for name, known in energies.items():
            found[name].append(
                measure_errors(served[place].store, seen.query, bits, None if known is None else known[place])
            )

    prefill(model, document, cache)
    cache.observer = note
    follow(model, document, cache)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.energies", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--model", default=DEFAULT, help=HELP)
    add("--lengths", type=int, nargs="+", default=[3072], help="tokens (default: %(default)s)")
    add("--documents", type=int, default=3, help="of each length (default: %(default)s)")
    add("--bits", type=float, default=SKETCH_BITS, help="of a value, on average (default: %(default)s)")
    add("--out", type=new_file, required=True, help="CSV table, added to if it exists")
    options = parser.parse_args(arguments)
    with check_loading(parser):
        model, tokenizer = load(options.model)
    for length in options.lengths:
        *documents, other = islice(read_prose(tokenizer, length=length, following=64), options.documents + 1)
        named = {name: name for name in PROMPTS} | {OTHER: other.text[0]}
        known = {ALIKE: None} | collect_energies(model, tokenizer, named)
        found = defaultdict(list)
        for document in tqdm(documents, unit="text"):
            energies = known | collect_energies(model, tokenizer, {SAME: document.text[0]})
            for name, errors_by_layer in measure(model, document, energies, options.bits).items():
                found[name].append(errors_by_layer)
        layers = {name: torch.tensor(each).mean(dim=0) for name, each in found.items()}
        rows = [
            {
                "model": label(options.model), "length": length, "bits": options.bits, "energies": name,
                "mean_variance": f"{each.mean():.3f}", "greatest_of_a_layer": f"{each.max():.3f}",
                "documents": len(documents),
            }
            for name, each in layers.items()
        ]  # fmt: skip
        write(options.out, rows, add=True, machine=describe_machine())
        print(align(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
