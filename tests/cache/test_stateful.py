"""Random sequences of everything a cache can be asked to do, compared with the reference after every step.

Some of them are offloaded, with the host standing in for the accelerator, and a budget for heads to stay on it.

Two layers of one `QAdACache`, so that what layers share (the mask read once, the geometry of a call, the copy of a
whole cache) is shared as in a model.
"""

import copy
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import WINDOW, FakeAttention, Inputs, make_config
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pair import Pair, stored_tokens
from scenarios import left_padded, poisoned_padding, small_buffers
from small_sketch import small_sketch
from stand_in import accelerator
from stateful import walks
from torch import Tensor

from qada_cache import KeyMoments, QAdACache, StaticHeads
from qada_cache.files import private_map

LONGEST = 120  # tokens a row; the reference takes its time


def other_prompt() -> KeyMoments:
    """Moments of two layers, for bulks from one token on and from 32."""
    keys = torch.stack([Inputs(seed)(50, 2)[0] for seed in (77, 78)])  # [lengths, layers, kv_heads, tokens, dim]
    centred = keys - keys.mean(dim=-2, keepdim=True)
    return KeyMoments(
        keys.mean(dim=-2), centred.mT @ centred / 50, lengths=(1, 32), model_type="llama", prompt="test", tokens=50
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "gaussian": {},
    "frozen": {"update_moments": False},
    "any": {"group_rule": "any"},
    "two-prompts": {"moments": ("current", other_prompt())},
    "oracle-any": {"criterion": "oracle", "group_rule": "any"},
    "dense": {"criterion": "dense"},
    "static": {"criterion": StaticHeads(torch.tensor([[True, False], [False, True]]))},
    "tokens": {"token_threshold": 1e-30},  # every token is chosen, so that outputs are the reference's
    "static-tokens": {
        "criterion": StaticHeads(torch.tensor([[True, False], [True, True]])),
        "token_threshold": 1e-30,
        "sketch_bits": 4,
    },
}


class CacheMachine(RuleBasedStateMachine):
    """The rules; each ends in a comparison of both layers."""

    def __init__(self) -> None:
        super().__init__()
        self.environment = ExitStack()

    def teardown(self) -> None:
        self.environment.close()

    @initialize(
        options=st.sampled_from(sorted(OPTIONS)),
        batch=st.integers(1, 3),
        seed=st.integers(0, 2**16),
        prompt=st.integers(1, 50),
        padding=st.sampled_from(["none", "left", "holes"]),
        budget=st.sampled_from([None, 0, 8_000, 0.4, 1.0]),
        shared=st.booleans(),
    )
    def build(
        self,
        options: str,
        batch: int,
        seed: int,
        prompt: int,
        padding: str,
        budget: int | float | None,
        shared: bool,
    ) -> None:
        if budget is not None:
            self.environment.enter_context(accelerator())
        if shared:  # with copies and files, however little there is
            self.environment.enter_context(mock.patch.object(private_map, "WORTH", 0))
        self.environment.enter_context(small_sketch(6, 16))  # of several segments
        self.config, self.inputs, self.batch = make_config(2), Inputs(seed), batch
        self.generator = torch.Generator().manual_seed(seed)
        cache = QAdACache(
            config=self.config,
            threshold=0.15,
            sink_tokens=3,
            local_tokens=11,
            device_budget=budget or 0,
            **({"moments": "current", "token_threshold": 0.0} | OPTIONS[options]),
        )
        self.modules = [FakeAttention(self.config, groups=2, layer_idx=index) for index in range(2)]
        self.pairs = [
            Pair(layer=layer, module=module) for layer, module in zip(cache.layers, self.modules, strict=True)
        ]
        self.cache = cache
        self.update(prompt, padding)

    @property
    def length(self) -> int:
        return self.pairs[0].reference.length

    def update(self, tokens: int, padding: str) -> None:
        valid = None
        if padding == "left" or (padding == "holes" and not self.length):
            lengths = torch.randint(1, tokens + 1, (self.batch,), generator=self.generator).tolist()
            valid = left_padded(lengths, tokens)
        elif padding == "holes":
            valid = torch.rand(self.batch, tokens, generator=self.generator) < 0.6
        fill = torch.nan if self.length else 50.0  # the first call is the model's own: see `scenarios.left_padding`
        mask = self.pairs[0].next_mask(self.batch, tokens, valid)
        with small_buffers():
            for pair in self.pairs:
                tensors = self.inputs(tokens, self.batch)
                tensors = tensors if valid is None else poisoned_padding(tensors, valid, fill)
                pair.update(*tensors, valid, mask=mask)

    # Rules that change no row's count of tokens come back often; long turns less so.
    @precondition(lambda self: self.length + WINDOW <= LONGEST)
    @rule(tokens=st.integers(1, WINDOW), padding=st.sampled_from(["none", "none", "left", "holes"]))
    def short_turn(self, tokens: int, padding: str) -> None:
        self.update(tokens, padding)

    @precondition(lambda self: self.length + 3 <= LONGEST)
    @rule(steps=st.integers(1, 3))
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self.update(1, "none")

    @precondition(lambda self: self.length + 40 <= LONGEST)
    @rule(tokens=st.integers(WINDOW + 1, 40), padding=st.sampled_from(["none", "left", "holes"]))
    def long_turn(self, tokens: int, padding: str) -> None:
        self.update(tokens, padding)

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, min(self.length, 15)) | st.integers(0, self.length), label="tokens removed")
        self.cache.crop(-count)
        for pair in self.pairs:
            pair.reference.crop(count)

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        rows = st.integers(0, self.batch - 1)
        index = torch.tensor(data.draw(st.lists(rows, min_size=self.batch, max_size=self.batch), label="rows"))
        self.cache.reorder_cache(index)
        for pair in self.pairs:
            pair.reference.reorder(index)

    @precondition(lambda self: self.length and self.batch == 1)
    @rule(count=st.integers(2, 3))
    def repeat(self, count: int) -> None:
        self.cache.batch_repeat_interleave(count)
        for pair in self.pairs:
            pair.reference.repeat(count)
        self.batch *= count

    @precondition(lambda self: self.length and self.batch > 1)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        keep = data.draw(st.sets(st.integers(0, self.batch - 1), min_size=1), label="rows")
        keep = torch.tensor([row in keep for row in range(self.batch)])
        self.cache.batch_select_indices(keep)
        for pair in self.pairs:
            pair.reference.select_rows(keep)
        self.batch = int(keep.sum())

    def adopt(self, cache: QAdACache) -> None:
        self.cache = cache
        for pair, layer in zip(self.pairs, cache.layers, strict=True):
            pair.driver.layer = layer

    @precondition(lambda self: self.length and self.length + WINDOW <= LONGEST)
    @rule(tokens=st.integers(1, WINDOW))
    def branch(self, tokens: int) -> None:
        """A copy goes on by itself, as the reference does; then the original does, as if there were no copy."""
        original, pairs = self.cache, self.pairs
        before = self.snapshot()
        self.pairs = [copy.copy(pair) for pair in pairs]
        for pair in self.pairs:
            pair.driver = copy.copy(pair.driver)
            for name in ("reference", "tally", "local_heads", "local_groups"):
                setattr(pair, name, copy.deepcopy(getattr(pair, name)))
        self.adopt(copy.deepcopy(original))
        assert self.cache._shared.model.config is self.config
        self.update(tokens, "none")
        self.cache.crop(-(tokens + 1))
        self.cache, self.pairs = original, pairs
        torch.testing.assert_close(self.snapshot(), before, rtol=0, atol=0)

    @rule()
    def save_and_load(self) -> None:
        before = self.snapshot()
        with tempfile.TemporaryDirectory() as folder, small_buffers():
            path = Path(folder) / "cache.safetensors"
            self.cache.save(path)
            self.adopt(QAdACache.load(path, config=self.config))
        torch.testing.assert_close(self.snapshot(), before, rtol=0, atol=0)

    @precondition(lambda self: self.length > 60)
    @rule(batch=st.integers(1, 3))
    def reset(self, batch: int) -> None:
        self.cache.reset()
        for pair in self.pairs:
            pair.reset()
        self.batch = batch

    def snapshot(self) -> list[list[tuple[Tensor, Tensor]]]:
        return [stored_tokens(layer.store) if layer.store else [] for layer in self.cache.layers]

    @invariant()
    def equals_reference(self) -> None:
        for pair in getattr(self, "pairs", []):
            pair.check_state()
        if hasattr(self, "cache"):
            stats = self.cache.stats()
            assert stats.tokens == self.length
            assert stats.decisions == max(pair.decisions for pair in self.pairs)


TestCache = CacheMachine.TestCase
TestCache.settings = walks(50)
