"""Absorbed queries of latent attention, and the latents of a layer's storage, part by part.

All heads' queries attend to one key, whose first channels are the value. A kernel for latents does so, and decodes
those in few bits as it reads them. Without a kernel torch does.
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
    """Attention of `queries` `[rows, 1, queries, dim]` to all tokens of rows of equal length, part by part. Yields the
    part's slice of these rows, its `out` `[part's rows, 1, queries, rank]` and `lse`, as of
    `partial_attention`, and the bytes of the bulk that were read."""

    every, bulk, tokens = slice(0, rows.stop - rows.start), store.bulk, store.lengths[rows.start]

    def attend(at: slice, latents: Tensor) -> tuple[Tensor, Tensor]:
        if kernels != "torch" and compiled.serves_latents(queries, latents, rank, tokens):
            layout = store.record_layout
            partial = compiled.attend_latents(queries[at], latents, rank, scaling=scaling, layout=layout)
            if partial is not None:
                return partial
        return attend_to_latents(queries[at], latents, rank, scaling=scaling, kernels=kernels)

    for keys, _ in store.view_near(rows):
        yield every, *attend(every, keys), 0
    partial = None
    if kernels != "torch" and isinstance(bulk, CodedBulk):
        partial = _attend_to_records(bulk, rows, queries, rank, scaling, kernels)
    if partial is None:
        for part in stream(bulk, rows):
            at = slice(part.rows.start - rows.start, part.rows.stop - rows.start)
            yield at, *attend(at, part.keys), part.bulk_read_bytes
        return
    stored = bulk.stored[rows.start]
    uncoded = bulk.lengths[rows.start] - stored
    yield every, *partial, every.stop * stored * bulk.stored_token_bytes
    yield every, *attend(every, bulk.keys[rows, :, :uncoded]), every.stop * uncoded * bulk.token_bytes


def _attend_to_records(
    bulk: CodedBulk, rows: slice, queries: Tensor, rank: int, scaling: float, kernels: str
) -> tuple[Tensor, Tensor] | None:
    """`out` and `lse` of queries to the tokens of closed segments; None without a kernel, or without such tokens."""
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
    sketch = bulk.sketch.tensors.map(lambda tensor: tensor[rows])
    segments = count_segments(bulk.sketch.count_coded(bulk.lengths[rows.start]))
    coded = records.tensor[rows, :, :stored]
    return kernel(queries, coded, sketch, records.weights, records.layout, rank, scaling=scaling, segments=segments)
