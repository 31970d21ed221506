"""What keys and values in few bits lose: `python -m eval.codes`.

    python -m eval.codes rungs --model FILE.gguf --out eval/results/rungs-qwen2.5-coder-0.5b.csv
    python -m eval.codes energies --model FILE.gguf --lengths 3072 --out eval/results/energies.csv
    python -m eval.codes spreads --model FILE.gguf --lengths 3072 --out eval/results/spreads.csv

Prose is read exactly, once. `rungs` then codes its keys and values, all but sinks and window, in every way, and feeds
the tokens that follow to each with teacher forcing: KL divergence from full attention's next-token distributions, and
whether the likeliest token is the same, means over texts and their standard errors. `bytes` are a token's and KV
head's, scales and sketch included, `of_16_bits` these over the bytes of 16 bits a value.

`energies` codes the keys by query energies of several prompts. For the queries of the tokens that follow, estimated
scores are compared with the true ones: the variance, over the tokens of the bulk, of what an estimate is off by, in
squared nats; the mean over queries, heads and layers, and the mean of the layer where it is greatest.

`spreads` scales the channels of keys, and those of queries by the inverse, by factors whose logarithms have each of the
deviations `--spreads`. The model computes what it did. Caches with default options but for `bulk_bits` follow the text,
token by token, compared as in `rungs`.
"""

import argparse
import sys
from collections import defaultdict
from itertools import islice
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from eval.shared.deciding import compare, follow, format_with_error, make_exact_cache, prefill
from eval.shared.language_model import DEFAULT, HELP, check_loading, label, load
from eval.shared.peers import quantize
from eval.shared.scaled_keys import TYPES, follow_scaled
from eval.shared.tables import NEAR, make_parser, report, table_of, to_amount, to_count, to_length
from eval.shared.texts import Document, read_prose
from eval.shared.ways import PROMPTS
from qada_cache import KeyMoments
from qada_cache.kernels.operands import Query
from qada_cache.kernels.query_adaptive import group_queries
from qada_cache.sketch import MAX_BITS, MIN_BITS, Layout, coded, rotate
from qada_cache.sketch.codec import Sketch, estimate_scores, quantize_segments
from qada_cache.state import SKETCH_BITS
from qada_cache.state.layer import QAdALayer
from qada_cache.state.observation import Observation

FOLLOWING = 64  # tokens that are predicted of each text
SINKS = 16  # tokens, as a cache has them by default, and the rest of what it always reads:
WINDOW = NEAR - SINKS
SAME = "16"
# Keys and values: bits of the residual behind the sketch, and of values; "4 x 2" has two scales a token. Others' codes
# for both: groups of 32, rotated or not, and of 64 with a least value as transformers' QuantizedCache has them.
RUNGS = (
    *(("6", "8"), ("5", "6"), ("5", "5"), ("4", "6"), ("4", "5"), ("4", "4"), ("3", "4"), ("3", "3")),
    *((bits, SAME) for bits in ("6", "5", "4", "3")),
    *((SAME, bits) for bits in ("8", "6", "5", "4", "4 x 2", "3")),
    *((peer, peer) for peer in ("q8_0", "q8_0, rotated", "q4_0", "q4_0, rotated", "q4, 64")),
)
SPREADS = 0.0, 1.0, 1.5, 2.0
ALIKE, OTHER, SAME_TEXT = "all channels alike", "other prose", "the same prose"
Rung = tuple[str, str]
Energies = dict[str, Tensor | None]  # query energies `[layers, kv_heads, dim]` by their source; None: all alike


def round_groups(values: Tensor, bits: int) -> Tensor:
    """As llama.cpp's q8_0 and q4_0 have them: groups of 32 with a float16 scale; 4 bits reach one step further on the
    side of the greatest value."""
    parts = values.float().unflatten(-1, (-1, 32))
    greatest = parts.gather(-1, parts.abs().argmax(dim=-1, keepdim=True))
    scale = (greatest.abs() / 127 if bits == 8 else greatest / -8).half().float()
    code = torch.round(parts / torch.where(scale == 0, 1.0, scale)).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (code * scale).flatten(-2)


def round_as_coded(kind: str, given: Tensor, energies: Tensor | None = None) -> Tensor:
    """A layer's keys `[1, kv_heads, tokens, dim]` as a kind of code gives them, or its values, without `energies`."""
    dim = given.shape[-1]
    block = coded.find_block(dim)
    if kind == SAME:
        return given
    if kind == "q4, 64":
        return quantize(given, 4)
    if kind.endswith("rotated"):
        return rotate(round_groups(rotate(given, block), int(kind[1])), block)
    if kind[0] == "q":
        return round_groups(given, int(kind[1]))
    bits, _, groups = kind.partition(" x ")
    if energies is None:
        scale, code = coded.quantize_evenly(rotate(given, block).unflatten(-1, (int(groups or 1), -1)), int(bits))
        return rotate(((2 * code.float() - 2 ** int(bits) + 1) * scale.unsqueeze(-1)).flatten(-2), block)
    sketch = Layout.from_bits(dim, SKETCH_BITS)
    assert sketch is not None
    layout, weights = coded.RecordLayout(dim, dim, int(bits), 8), coded.find_query_weights(energies, dim, given.device)
    predicted = coded.estimate_keys(quantize_segments(given, energies[None], sketch), sketch)
    records = coded.code_tokens(given, given, predicted, weights, layout)
    return coded.decode_keys(records, predicted, weights, layout)


def count_bytes(rung: Rung, dim: int) -> float:
    """Of a token of one KV head, scales and the sketch's code included."""
    sketch = Layout.from_bits(dim, SKETCH_BITS)
    assert sketch is not None
    total = 0.0
    for kind, behind in zip(rung, (4 * sketch.count + 1, 0), strict=True):
        bits, _, groups = kind.partition(" x ")
        if kind == SAME:
            total += 2 * dim
        elif kind[0] == "q":  # a scale of 16 bits for 32 values, or two for 64
            total += dim * (int(kind[1]) + 0.5) / 8
        else:
            total += behind + dim * int(bits) / 8 + 2 * int(groups or 1)
    return total


def compare_rungs(model: PreTrainedModel, document: Document, energies: Tensor) -> dict[Rung, dict[str, str]]:
    """By rung, what `compare` finds of one text."""
    cache = DynamicCache(config=model.config)
    prefill(model, document, cache)
    parts = [SINKS, cache.get_seq_length() - SINKS - WINDOW, WINDOW]
    keys, values = ([getattr(layer, name).split(parts, dim=2) for layer in cache.layers] for name in ("keys", "values"))

    def follow_with(key_bulks: list[Tensor], value_bulks: list[Tensor]) -> Tensor:
        made = DynamicCache(config=model.config)
        for index, bulks in enumerate(zip(key_bulks, value_bulks, strict=True)):
            wholes = zip((keys[index], values[index]), bulks, strict=True)
            made.update(*(torch.cat([whole[0], bulk, whole[2]], dim=2) for whole, bulk in wholes), index)
        return follow(model, document, made)

    made_keys = {
        kind: [round_as_coded(kind, key[1], energies[index]) for index, key in enumerate(keys)]
        for kind in {kind for kind, _ in RUNGS}
    }
    made_values = {kind: [round_as_coded(kind, value[1]) for value in values] for kind in {kind for _, kind in RUNGS}}
    full = follow_with(made_keys[SAME], made_values[SAME])
    return {rung: compare(full, follow_with(made_keys[rung[0]], made_values[rung[1]])) for rung in tqdm(RUNGS)}


def measure_rungs(
    options: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int
) -> list[dict[str, Any]]:
    """A row for each rung."""
    energies = KeyMoments.collect(model, tokenizer, "random-tokens", progress=False).query_energies
    assert energies is not None
    pieces = (piece for piece in read_prose(tokenizer, length=length, following=FOLLOWING) if piece.index % 4 != 3)
    found = defaultdict(list)
    for document in islice(pieces, options.documents):
        for rung, row in compare_rungs(model, document, energies).items():
            found[rung].append(row)
    dim = energies.shape[-1]
    return [
        {
            "model": label(options.model), "length": length, "keys": rung[0], "values": rung[1],
            "bytes": f"{count_bytes(rung, dim):g}", "of_16_bits": f"{count_bytes(rung, dim) / (4 * dim):.3f}",
            "kl": format_with_error([float(row["kl"]) for row in each], 6),
            "top1": format_with_error([float(row["top1"]) for row in each], 3), "documents": len(each),
        }
        for rung, each in found.items()
    ]  # fmt: skip


def collect_energies(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: dict[str, str | Tensor]
) -> Energies:
    """Query energies of prompts: names, or token ids."""
    return {
        name: KeyMoments.collect(model, tokenizer, prompt, progress=False).query_energies
        for name, prompt in prompts.items()
    }


def find_errors(keys: Tensor, values: Tensor, query: Query, bits: float, energies: Tensor | None) -> float:
    """Mean over queries and heads of the variance, over tokens, of what estimates are off by. Keys and values
    `[1, kv_heads, tokens, dim]` are of a layer's bulk."""
    layout = Layout.from_bits(keys.shape[3], bits)
    assert layout is not None
    sketch, found = Sketch.of(keys, values, None if energies is None else energies[None], layout), []
    for head, queries in enumerate(group_queries(query, keys.shape[1])[0].float()):
        estimates = estimate_scores(queries, sketch[0, head], keys.shape[2], scaling=query.scaling)
        found.append((estimates - query.scaling * queries @ keys[0, head].float().mT).var(dim=-1))
    return float(torch.stack(found).mean())


def compare_energies(
    model: PreTrainedModel, document: Document, energies: Energies, bits: float
) -> dict[str, list[float]]:
    """By the source of the energies, `find_errors` of every layer."""
    cache, found = make_exact_cache(model), defaultdict(list)
    served = [layer for layer in cache.layers if isinstance(layer, QAdALayer)]
    places = {layer.index: place for place, layer in enumerate(served)}

    def note(seen: Observation) -> None:
        place = places[seen.layer]
        bulk = served[place].store.bulk
        keys, values = bulk.read(slice(0, 1), slice(None), 0, bulk.lengths[0])
        for name, known in energies.items():
            of_layer = None if known is None else known[place]
            found[name].append(find_errors(keys, values, seen.query, bits, of_layer))

    prefill(model, document, cache)
    cache.observer = note
    follow(model, document, cache)
    return found


def measure_energies(
    options: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int
) -> list[dict[str, Any]]:
    """A row for each source of energies."""
    *documents, other = islice(read_prose(tokenizer, length=length, following=FOLLOWING), options.documents + 1)
    named = {name: name for name in PROMPTS} | {OTHER: other.text[0]}
    known = {ALIKE: None} | collect_energies(model, tokenizer, named)
    found = defaultdict(list)
    for document in tqdm(documents, unit="text"):
        energies = known | collect_energies(model, tokenizer, {SAME_TEXT: document.text[0]})
        for name, errors_by_layer in compare_energies(model, document, energies, options.bits).items():
            found[name].append(errors_by_layer)
    layers = {name: torch.tensor(each).mean(dim=0) for name, each in found.items()}
    return [
        {
            "model": label(options.model), "length": length, "bits": options.bits, "energies": name,
            "mean_variance": f"{each.mean():.3f}", "greatest_of_a_layer": f"{each.max():.3f}",
            "documents": len(documents),
        }
        for name, each in layers.items()
    ]  # fmt: skip


def measure_spreads(
    options: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int
) -> list[dict[str, Any]]:
    """A row for each spread and number of bits."""
    documents = list(islice(read_prose(tokenizer, length=length, following=FOLLOWING), options.documents))
    return [
        {
            "model": label(options.model), "length": length, "spread": f"{spread:g}", "bits": bits,
            "kl": format_with_error([float(row["kl"]) for row in each], 4),
            "top1": format_with_error([float(row["top1"]) for row in each], 3),
            "read_share": f"{mean(row['read_share'] for row in each):.3f}", "documents": len(each),
        }
        for spread in options.spreads
        for bits, each in follow_scaled(model, documents, spread).items()
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = make_parser("codes", __doc__)
    parts = parser.add_subparsers(required=True, metavar="rungs|energies|spreads")
    for name, measure, documents, columns, summary in (
        ("rungs", measure_rungs, 4, ("keys", "of_16_bits"), "what a bulk in few bits loses, read whole"),
        ("energies", measure_energies, 3, ("energies", "mean_variance"), "whose queries may say how keys are coded"),
        ("spreads", measure_spreads, 2, ("spread", "read_share"), "what is lost where channels of keys differ"),
    ):
        add = (part := parts.add_parser(name, help=summary)).add_argument
        add("--model", default=DEFAULT, help=HELP)
        add("--lengths", type=to_length, nargs="+", default=[3072], help="tokens (default: %(default)s)")
        add("--documents", type=to_count, default=documents, help="of each length (default: %(default)s)")
        add("--out", type=table_of(*columns), required=True, help="CSV table, added to if it exists")
        part.set_defaults(measure=measure)
        if measure is measure_energies:
            add("--bits", type=float, default=SKETCH_BITS, help="of a value, on average (default: %(default)s)")
    add("--spreads", type=to_amount, nargs="+", default=SPREADS, help="deviations of logarithms (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not MIN_BITS <= getattr(options, "bits", SKETCH_BITS) <= MAX_BITS:
        parser.error(f"--bits must be from {MIN_BITS} to {MAX_BITS}")
    with check_loading(parser):
        model, tokenizer = load(options.model, tokens=max(options.lengths), latents=False)
    if options.measure is measure_spreads and model.config.model_type not in TYPES:
        parser.error(f"--model: keys of {' and '.join(TYPES)} can be scaled, not those of {model.config.model_type}")
    for length in options.lengths:
        if len(list(islice(read_prose(tokenizer, length=length, following=FOLLOWING), 2))) < 2:
            parser.error(f"--lengths: the text has no two pieces of {length} tokens")
        report(options.measure(options, model, tokenizer, length), options.out, add=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
