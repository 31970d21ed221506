"""A cache layer and the float64 reference, which get the same calls and are compared after each."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from harness import Driver, FakeAttention, make_shared, transformers_mask
from reference import Moments, averaged_moments, log_local_fraction, log_masses, rotary_matrix
from reference_layer import ReferenceLayer
from rounding import error_budget
from sketch_reference import is_same_but_for_ties, slopes_of
from torch import Tensor

from qada_cache import KeyMoments, StaticHeads
from qada_cache.sketch.codec import average_channels, quantize_segments
from qada_cache.state.layer import QAdALayer
from qada_cache.storage import TokenStore, bulk_sketch


@dataclass
class Tally:
    """Counts of a run's decisions, by which a test asserts that it compared something."""

    local: int = 0
    long_context: int = 0
    skipped: int = 0  # decisions that differ from the reference's by rounding
    exact: int = 0  # calls, not decisions


class Pair:
    """A layer and its reference, given the same calls and compared after each.

    Args:
        options: those of `Options` that differ from `OPTIONS`.
        scaling: multiplies the scores.
        layer: the package's layer, if it exists already (in a `QAdACache`, say).
        module: as for `Driver`.
        heads, kv_heads: query heads and key-value heads.
    """

    def __init__(
        self,
        *,
        scaling: float = 0.25,
        heads: int = 4,
        kv_heads: int = 2,
        layer: QAdALayer | None = None,
        module: FakeAttention | None = None,
        **options: Any,
    ) -> None:
        layer = QAdALayer(make_shared(**options), 0) if layer is None else layer
        self.groups, self.scaling = heads // kv_heads, scaling
        self.driver = Driver(layer, groups=self.groups, module=module)
        self.reference = ReferenceLayer(scaling=scaling, **reference_options(layer, heads=heads))
        self.mask_form = lambda mask: mask  # converts masks of calls on a filled cache, to 2-D or floats, say
        self.tally = Tally()
        self.decisions, self.local_heads, self.local_groups = 0, None, None

    @property
    def layer(self) -> QAdALayer:
        """The package's layer."""
        return self.driver.layer

    def update(
        self,
        keys: Tensor,
        values: Tensor,
        queries: Tensor,
        valid: Tensor | None = None,
        *,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Give both one call, and compare outputs, decisions and state. Returns the layer's outputs `[batch, heads,
        tokens, dim]`.

        `valid` is bool `[batch, tokens]`, None without padding. `mask` is a result of `next_mask`, for tests that give
        several layers the very same tensor.
        """
        count, reference = keys.shape[2], self.reference
        mask = self.next_mask(keys.shape[0], count, valid) if mask is None else mask
        mask = None if mask is None else mask.to(keys.device)
        outputs, flags = self.driver(keys, values, queries, mask, scaling=self.scaling)
        expected, local, has_bulk = reference.update(keys, values, queries, valid, moments_of=self._moments_of)

        assert outputs.dtype == queries.dtype
        assert outputs.shape == (*queries.shape[:3], values.shape[-1])
        real = torch.ones(keys.shape[0], count, dtype=torch.bool) if valid is None else valid
        wrong = torch.zeros_like(local)
        if flags is None:
            assert not local.any(), "the layer was exact where the reference was not"
            self.tally.exact += 1
        else:
            wrong = (flags != local) & real[:, None]
            self._check_flags(wrong, queries)
            self._count(flags & real[:, None], has_bulk)
        lowp = reference.naive_outputs(queries.cpu(), local, queries.dtype, valid)
        compared = (real[:, None] & ~wrong).unsqueeze(-1)
        difference = (outputs.cpu().double() - expected).masked_fill(~compared, 0.0).abs()
        deviations = reference.deviations(queries.cpu(), local, valid)
        budget = error_budget(reference64=expected, lowp=lowp, deviations=deviations)
        assert difference.max() <= budget, f"off by {difference.max():.3g}, budget {budget:.3g}"
        self.check_state()
        return outputs

    def _moments_of(self, row: int) -> dict[str, int]:
        """The numbers of tokens that a row's own moments cover, `frozen_count`, and that storage has moved out of the
        near buffer, `stored`. Moments cover all stored tokens, or frozen ones the bulk of the last exact call."""
        stored = self.layer.store.bulk.lengths[row]
        frozen = stored if self.layer.options.update_moments else self.reference.frozen_counts[row]
        return {"frozen_count": frozen, "stored": stored}

    def next_mask(self, batch: int, count: int, valid: Tensor | None) -> Tensor | None:
        """The mask of a next call with `count` tokens, of which `valid` are real. None: no mask is needed."""
        valid = torch.ones(batch, count, dtype=torch.bool) if valid is None else valid
        history = torch.tensor(self.reference.history, dtype=torch.bool).reshape(batch, -1)
        mask = transformers_mask(torch.cat([history, valid], dim=1), count)
        return mask if mask is None or not history.numel() else self.mask_form(mask)

    def _check_flags(self, wrong: Tensor, queries: Tensor) -> None:
        """Assert that flags which differ from the reference's, `wrong`, are so close that rounding decides."""
        reference, asked = self.reference, self.layer.options
        told = ("criterion", "moments", "current")
        options = {name: reference.options[name] for name in told if name in reference.options}
        for row, index in wrong.any(dim=1).nonzero().tolist():
            after = sum(reference.history[row][len(reference.history[row]) - queries.shape[2] + index + 1 :])
            masses = log_masses(
                query=queries[row, :, index].cpu(), keys=reference.keys[row], scaling=self.scaling,
                position=reference.lengths[row] - after - 1, **reference.sizes, **options,
                **self._moments_of(row),
            )  # fmt: skip
            for head in wrong[row, :, index].nonzero()[:, 0].tolist():
                assert 0 < asked.threshold < 1
                heads = slice(head, head + 1)
                if asked.group_rule != "head":
                    heads = slice(head - head % self.groups, head - head % self.groups + self.groups)
                # The fused kernel's log-sum-exp is coarser in half precision, see test_kernels.py.
                rounding = 1e-5 if queries.dtype == torch.float32 else 1e-4
                slack = rounding * (1 + max(abs(log_mass) for masses_of in masses[heads] for log_mass in masses_of))
                fractions = [math.exp(log_local_fraction(log_local=a, log_bulk=b)) for a, b in masses[heads]]
                close = min(abs(fraction / asked.threshold - 1) for fraction in fractions)
                assert close < slack, f"row {row}, query {index}, head {head}"
                self.tally.skipped += 1

    def _count(self, local: Tensor, has_bulk: Tensor) -> None:
        decided = has_bulk[:, None] & torch.ones_like(local)
        self.tally.local += int((local & decided).sum())
        self.tally.long_context += int((~local & decided).sum())
        if self.local_heads is None:
            self.local_heads = torch.zeros(local.shape[1], dtype=torch.int64)
            self.local_groups = torch.zeros(local.shape[1] // self.groups, dtype=torch.int64)
        self.decisions += int(has_bulk.sum())
        self.local_heads += (local & decided).sum(dim=(0, 2))
        self.local_groups += (local & decided).unflatten(1, (-1, self.groups)).all(dim=2).sum(dim=(0, 2))

    def check_state(self) -> None:
        """Assert that the layer's tokens, lengths and counters equal the reference's, and moments up to rounding."""
        layer, reference = self.layer, self.reference
        assert layer.seen == layer.get_seq_length() == reference.length
        if layer.store is None:
            return
        assert layer.store.lengths == reference.lengths
        assert layer.counters.decisions == self.decisions
        if layer.counters.record["local_heads"] is not None:
            assert torch.equal(layer.counters.record["local_heads"].flatten().cpu(), self.local_heads)
            assert torch.equal(layer.counters.record["local_groups"].cpu(), self.local_groups)
        for row, (keys, values) in enumerate(stored_tokens(layer.store)):
            assert torch.equal(keys.double(), reference.keys[row])
            assert torch.equal(values.double(), reference.values[row])
        if layer.store.moments is not None:
            for row in range(layer.store.batch):
                self._check_moments(row)

        if layer.store.sketch is not None:
            self._check_sketch()

    def _check_sketch(self) -> None:
        """Assert that every row with a long enough bulk has a sketch, equal to one coded anew from its tokens alone."""
        store, energies = self.layer.store, self.layer.options.query_energies
        known, energies = store.sketch, None if energies is None else energies[self.layer.index]
        kept = known.tensors.to_tensors()
        for row, length in enumerate(store.bulk.lengths):
            assert known.lengths[row] == (length if length >= bulk_sketch.MIN_TOKENS else 0)
            if known.lengths[row]:
                bulk = slice(store.sinks, store.sinks + length)
                keys, values = (tokens[row][:, bulk] for tokens in (self.reference.keys, self.reference.values))
                if keys.device == store.near_keys.device:
                    made = {name: part[0] for name, part in known.code_keys(keys[None].to(known.dtype)).items()}
                else:
                    made = quantize_segments(keys, energies, known.layout)
                made |= average_channels(made, known.layout, length)
                # Another device, or a kernel for it, adds in another order than a CPU, so bits may differ.
                same = torch.equal if keys.device == store.near_keys.device else is_same_but_for_ties
                for name, one in made.items():
                    found = kept[name][row].cpu()
                    found = found[..., :length] if name == "codes" else found[:, : one.shape[1]]
                    assert same(found, one), f"{name} of row {row} are not those of its tokens"
                mean = values.mean(dim=1, keepdim=True)
                slopes = (values - mean).mT @ (keys - keys.mean(dim=1, keepdim=True)) / length
                for found, true in ((kept["mean_value"], mean[:, 0]), (known.covariance, slopes)):
                    torch.testing.assert_close(found[row].cpu().double(), true, rtol=1e-5, atol=1e-5)
                units = kept["slope_units"][row].cpu().double().unsqueeze(-2)
                assert ((slopes_of(kept["slopes"][row].cpu()) * units - slopes).abs() <= 0.5 * units + 2e-5).all()

    def _check_moments(self, row: int) -> None:
        moments, reference = self.layer.store.moments, self.reference
        bulk = self.layer.store.bulk.lengths[row]
        expected = bulk if self.layer.options.update_moments else reference.frozen_counts[row]
        assert moments.count[row] == expected
        mean, covariance = reference.moments(row, count=expected)
        for name, found, true in (
            ("mean", moments.mean, mean),
            ("covariance", moments.covariance, covariance),
        ):
            error = float((found[row].cpu().double() - true).abs().max())
            assert error <= 1e-5 * max(1.0, float(true.abs().max())), f"{name} of row {row} is off by {error:.3g}"

    def crop(self, count: int) -> None:
        self.layer.crop(-count)
        self.reference.crop(count)
        self.check_state()

    def reset(self) -> None:
        self.layer.reset()
        self.reference.reset()
        self.decisions, self.local_heads, self.local_groups = 0, None, None
        self.check_state()


def reference_options(layer: QAdALayer, *, heads: int) -> dict[str, Any]:
    """The arguments of `ReferenceLayer` that follow from the layer's options."""
    asked = layer.options
    options = {
        name: getattr(asked, name)
        for name in ("threshold", "sink_tokens", "local_tokens", "update_moments", "group_rule")
    }
    options["criterion"] = asked.criterion
    if isinstance(asked.criterion, StaticHeads):
        table = asked.criterion.long_context[layer.index]
        options["criterion"] = table.repeat_interleave(heads // len(table))  # the table has KV heads
    if asked.other_moments is not None:
        options["current"] = asked.current_moments
        options["moments"] = kept_moments(asked.other_moments, layer.index)
    return options


def kept_moments(moments: KeyMoments, layer: int) -> Callable[[int], Moments]:
    """A function from a number of bulk tokens to another prompt's moments for them: mean `[kv_heads, dim]`, covariance
    `[kv_heads, dim, dim]`. As the cache does, it rounds the number up to a multiple of 64."""

    @lru_cache
    def of_length(bulk_tokens: int) -> Moments:
        length = max(1, -(-bulk_tokens // 64)) * 64
        if not moments.rotations:
            index = max([index for index, known in enumerate(moments.lengths) if known <= length], default=0)
            return moments.mean[index, layer].double(), moments.covariance[index, layer].double()
        rotation = moments.rotations[layer]
        turns = [
            rotary_matrix(dim=rotation.dim, frequencies=rotation.frequencies, layout=rotation.layout, position=position)
            for position in range(moments.sink_tokens, moments.sink_tokens + length)
        ]
        return averaged_moments(mean=moments.mean[0, layer], covariance=moments.covariance[0, layer], turns=turns)

    return of_length


def stored_tokens(store: TokenStore) -> list[tuple[Tensor, Tensor]]:
    """Keys and values `[kv_heads, tokens, dim]` of each row on the host, read from the buffers themselves."""
    rows = []
    store.bulk.synchronize()
    for row, (length, gone) in enumerate(zip(store.lengths, store.flushed, strict=True)):
        stored, stop = store.bulk.lengths[row], store.sinks + store.end
        assert stored == max(gone - store.sinks, 0)
        sinks, recent = slice(0, min(gone, store.sinks)), slice(stop - (length - gone), stop)
        buffers = (store.near_keys, store.bulk.keys), (store.near_values, store.bulk.values)
        rows.append(
            tuple(
                torch.cat([near[row, :, sinks].cpu(), bulk[row, :, :stored].cpu(), near[row, :, recent].cpu()], dim=1)
                for near, bulk in buffers
            )
        )
    return rows
