"""Absorbed queries of latent attention, and the latents of a layer's storage, part by part.

All heads' queries meet one key, whose first channels are the value: by a kernel of their own, which decodes latents of
few bits where it uses them; else by torch's operations.
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from ..kernels.cpu import latent as compiled
from ..kernels.latent_choice import attend_to_latents, find_recorded_attention
from ..sketch import count_segments
from ..storage import TokenStore
from ..storage.coded_bulk import CodedBulk
from ..storage.reading import stream

Part = tuple[slice, Tensor, Tensor, int]


def attend_to_parts(
    store: TokenStore, rows: slice, queries: Tensor, rank: int, *, scaling: float, kernels: str
) -> Iterator[Part]:
    """Of queries `[rows, 1, queries, dim]` to all tokens of rows alike: which of these rows a part is of, its `out`
    `[.., 1, queries, rank]` and `lse` as `partial_attention` returns them, and the bytes that were read of the bulk."""

    every, bulk, tokens = slice(0, rows.stop - rows.start), store.bulk, store.lengths[rows.start]

    def attend(at: slice, latents: Tensor) -> tuple[Tensor, Tensor]:
        if kernels != "torch" and compiled.serves_latents(queries, latents, rank, tokens):
            layout = store.record_layout
            found = compiled.attend_latents(queries[at], latents, rank, scaling=scaling, layout=layout)
            if found is not None:
                return found
        return attend_to_latents(queries[at], latents, rank, scaling=scaling, kernels=kernels)

    for keys, _ in store.view_near(rows):
        yield every, *attend(every, keys), 0
    found = None
    if kernels != "torch" and isinstance(bulk, CodedBulk):
        found = _attend_to_records(bulk, rows, queries, rank, scaling, kernels)
    if found is None:
        for part in stream(bulk, rows):
            at = slice(part.rows.start - rows.start, part.rows.stop - rows.start)
            yield at, *attend(at, part.keys), part.bulk_read_bytes
        return
    stored = bulk.stored[rows.start]
    beside = bulk.lengths[rows.start] - stored
    yield every, *found, every.stop * stored * bulk.stored_token_bytes
    yield every, *attend(every, bulk.keys[rows, :, :beside]), every.stop * beside * bulk.token_bytes


def _attend_to_records(
    bulk: CodedBulk, rows: slice, queries: Tensor, rank: int, scaling: float, kernels: str
) -> tuple[Tensor, Tensor] | None:
    """Of queries to the tokens of closed segments; None without a kernel, or without any."""
    records, stored = bulk.records, bulk.stored[rows.start]
    if records is None or not stored or bulk.offloaded:
        return None
    assert bulk.sketch is not None
    kernel: Callable[..., tuple | None] | None = compiled.attend_recorded_latents
    if not compiled.serves_latents(queries, bulk.keys, rank, bulk.lengths[rows.start]):
        layouts = bulk.sketch.layout, records.layout
        kernel = find_recorded_attention(queries, bulk.keys, rank, kernels, *layouts)
    if kernel is None:
        return None
    sketch = bulk.sketch.tensors.map(lambda held: held[rows])
    segments = count_segments(bulk.sketch.count_coded(bulk.lengths[rows.start]))
    held = records.tensor[rows, :, :stored]
    return kernel(queries, held, sketch, records.weights, records.layout, rank, scaling=scaling, segments=segments)
