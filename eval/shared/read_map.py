"""Which tokens of a document each KV head read while an answer was given: recorded, and drawn as a map."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel

from eval.shared.conversation import Form
from eval.shared.drawing import make_canvas
from eval.shared.texts import Turn
from qada_cache import QAdACache
from qada_cache.state.layer import QAdALayer
from qada_cache.state.observation import Observation
from qada_cache.versions import pass_cache

ANSWER_TOKENS = 8
COLUMNS = 1000  # of the map at most: further tokens share one, which shows the most that any of them was read


@contextmanager
def count_reads(cache: QAdACache) -> Iterator[dict[int, Tensor]]:
    """Count the calls that read each token of the bulk, by layer: int64 `[kv_heads, tokens]`; one row.

    Sinks and window are read by every call and are not counted.
    """
    stores = {layer.index: layer.store for layer in cache.layers if isinstance(layer, QAdALayer) and layer.store}
    counts = {
        index: torch.zeros(
            store.near_keys.shape[1],
            store.lengths[0] + store.near_keys.shape[2],  # as many more may follow
            dtype=torch.int64,
        )
        for index, store in stores.items()
    }

    def count(seen: Observation) -> None:
        for head, wanted in enumerate(seen.whole[0]):
            counts[seen.layer][head, : seen.bulk_lengths[0]] += int(wanted)
        for chosen in seen.chosen:
            counts[seen.layer][chosen.head, chosen.tokens.cpu()] += 1

    cache.observer = count
    try:
        yield counts
    finally:
        cache.observer = None


@torch.no_grad()
def answer(model: PreTrainedModel, cache: QAdACache, question: list[int]) -> tuple[Tensor, Tensor]:
    """Ask a cache that holds a document; greedily.

    Returns:
        The answer's first `ANSWER_TOKENS` tokens, int64; and how many of them read each token of the document, by KV
        head from the first layer on, int64 `[heads, tokens]`. Sinks and window are left out.
    """
    twin = cache.fork()
    tokens, sinks = twin.get_seq_length(), twin.options.sink_tokens
    asked = torch.tensor([question], device=model.device)
    if len(question) > 1:
        model(asked[:, :-1], **pass_cache(twin))
    given, ids = [], asked[:, -1:]
    with count_reads(twin) as counts:
        for _ in range(ANSWER_TOKENS):
            ids = model(ids, **pass_cache(twin)).logits[:, -1:].argmax(dim=-1)
            given.append(int(ids))
    bulk = max(0, tokens - sinks)  # some layers have room for more tokens, or for fewer
    parts = (torch.nn.functional.pad(counts[index], (sinks, bulk - counts[index].shape[1])) for index in sorted(counts))
    return torch.tensor(given), torch.cat(list(parts))


def draw_map(reads: Tensor, *, facts: list[int], asked: int | None, title: str) -> Figure:
    """The map of `reads` `[heads, tokens]`; `facts` are their tokens, `asked` one of them."""
    heads, tokens = reads.shape
    each = -(-tokens // COLUMNS)
    padded = torch.nn.functional.pad(reads, (0, -tokens % each))
    most = padded.unflatten(1, (-1, each)).amax(dim=2)
    figure, ((axes,),) = make_canvas(width=9.0, height=4.6)
    shown = axes.imshow(
        np.sqrt(most.numpy()), aspect="auto", interpolation="nearest", cmap="Blues", vmin=0,
        vmax=float(np.sqrt(ANSWER_TOKENS)), extent=(0, tokens, heads, 0),
    )  # fmt: skip
    bar = figure.colorbar(shown, ax=axes, ticks=[float(np.sqrt(count)) for count in (0, 1, 2, 4, 8)])
    bar.ax.set_yticklabels(["0", "1", "2", "4", "8"])
    bar.set_label("tokens of the answer that read it")
    for place in facts:
        chosen = place == asked
        axes.axvline(place, color="crimson" if chosen else "grey", linewidth=1.0, linestyle=":")
        axes.annotate(
            "the fact" if chosen else "", (place, 0), xytext=(0, 3), textcoords="offset points", fontsize=8,
            color="crimson", ha="center",
        )  # fmt: skip
    axes.set(xlabel="token of the document (dotted: planted facts)", ylabel="KV head, from the first layer on")
    axes.set_title(title, fontsize=9, pad=14)
    return figure


def draw(
    model: PreTrainedModel,
    form: Form,
    opening: list[int],
    turns: list[Turn],
    cache: QAdACache,
    *,
    name: str,
    path: Path,
) -> None:
    """Ask for the first fact, or what was asked first, again, and write what each KV head reads of the document.

    Args:
        model, form, opening, turns: as for `converse`.
        cache: that the chat was held with.
        name: of the model, for the title.
        path: of the PNG.
    """
    turn = next((turn for turn in turns if turn.fact), turns[0])
    if chat := cache.get_seq_length() - len(opening):
        cache.crop(-chat)
    given, reads = answer(model, cache, form.make_turn(turn, after=None))
    places = {turn.fact: form.find_token(turn.fact, opening) for turn in turns if turn.fact}
    said = " ".join(form.tokenizer.decode(given, skip_special_tokens=True).split())
    title = shorten(f"{name}: {turn.question} {turn.begun} ... {said}", 120)
    facts = [place for place in places.values() if place is not None]
    figure = draw_map(reads, facts=facts, asked=places.get(turn.fact), title=title)
    figure.savefig(path, metadata={"Software": None})
