"""Random faults of files and disks, in stores of caches of every kind: the answer is right, and the text can be kept
again.

The caches read everything, so an answer depends on the tokens alone; in few bits also on where reading goes on, as
later tokens read what was coded before.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from latents import INDEXED, make_indexed
from models import SMALL, prompt, tiny
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import PrefixStore, QAdACache, files
from qada_cache.prefix_store.naming import Name
from qada_cache.state.layer import QAdALayer
from qada_cache.storage.coded_bulk import CodedBulk
from qada_cache.versions import pass_cache

EVERY = 128  # tokens between snapshots
KINDS = {  # the family, bits of the bulk, tokens: few bits need a segment that closes
    "as made": ("llama", 16, 600),
    "8 bits": ("llama", 8, 1250),
    "4 bits": ("llama", 4, 1250),
    "sliding": ("gemma3", 16, 330),
    "linear": ("qwen3_next", 16, 330),
    "sliding, 4 bits": ("gemma3", 4, 1250),
    "linear, 8 bits": ("qwen3_next", 8, 1250),
    "indexer, 4 bits": ("HYV4", 4, 1250),
}


@dataclass
class Scene:
    """A text that a cache has read, and a folder where it is stored, which is not to be changed."""

    model: PreTrainedModel
    text: Tensor
    options: dict[str, Any]
    whole: QAdACache
    folder: Path
    found: int  # tokens of it that an undamaged store gives
    answers: dict[int, Tensor]  # by the tokens that were not read again

    def ask(self, store: PrefixStore) -> tuple[QAdACache, int]:
        cache = store.cache(self.model, self.text, **self.options)
        return cache, cache.get_seq_length()

    @torch.no_grad()
    def read(self, cache: QAdACache) -> Tensor:
        """The next token's logits."""
        return self.model(self.text[:, cache.get_seq_length() :], **pass_cache(cache)).logits[0, -1]

    def find_answer(self, held: int) -> Tensor:
        """The answer of one process that crops its cache to `held` tokens and reads the rest."""
        if held not in self.answers:
            cache = copy.deepcopy(self.whole)
            cache.crop(held - self.text.shape[1])
            self.answers[held] = self.read(cache)
        return self.answers[held]


def open_store(folder: Path) -> PrefixStore:
    return PrefixStore(folder, snapshot_tokens=EVERY)


@functools.cache
def make_scene(kind: str, folder: Path) -> Scene:
    family, bits, tokens = KINDS[kind]
    make = make_indexed if family in INDEXED else tiny
    model, text = make(family, max_position_embeddings=2048), prompt(tokens)[0]
    options = {"threshold": 1.0, "moments": "current", "bulk_bits": bits, "kernels": "torch", **SMALL}
    store = open_store(folder)
    whole = store.cache(model, text, **options)
    scene = Scene(model, text, options, whole, folder, 0, {})
    scene.answers[0] = scene.read(whole)
    assert store.keep(whole, text) == tokens
    scene.found = scene.ask(open_store(folder))[1]
    assert scene.found == tokens - (1 if family in ("llama", *INDEXED) else EVERY)
    layer = next(layer for layer in whole.layers if isinstance(layer, QAdALayer))
    assert (isinstance(layer.store.bulk, CodedBulk) and layer.store.bulk.stored[0] > 0) is (bits < 16)
    return scene


Chance = random.Random


def leave(path: Path, chance: Chance, _: Scene) -> None:
    """No fault."""


def cut(path: Path, chance: Chance, _: Scene) -> None:
    file = choose(path, chance)
    file.write_bytes(file.read_bytes()[: chance.randrange(file.stat().st_size)])


def flip(path: Path, chance: Chance, _: Scene) -> None:
    file = choose(path, chance)
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def lose(path: Path, chance: Chance, _: Scene) -> None:
    choose(path, chance).unlink()


def mix(path: Path, chance: Chance, _: Scene) -> None:
    """Copy one file's content over another file."""
    shutil.copyfile(choose(path, chance), path / "other")
    (path / "other").rename(choose(path, chance))


def fill(path: Path, chance: Chance, scene: Scene) -> None:
    """A disk has no room for all files."""
    write, left = files.write, [chance.randrange(len(list(path.iterdir())))]

    def write_some(*given: Any, **told: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        write(*given, **told)

    shutil.rmtree(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write", write_some)
        open_store(path).keep(scene.whole, scene.text)


def kill(path: Path, chance: Chance, scene: Scene) -> None:
    """A process is killed while it writes a file: an unfinished one is left, and none after it."""
    fill(path, chance, scene)
    file = choose(scene.folder, chance)
    part = file.read_bytes()[: chance.randrange(file.stat().st_size)]
    (path / f".{file.name[:100]}.{chance.randbytes(8).hex()}{files.UNFINISHED}").write_bytes(part)


FAULTS: tuple[Callable[[Path, Chance, Scene], None], ...] = (cut, flip, flip, cut, lose, mix, fill, kill)


def choose(path: Path, chance: Chance) -> Path:
    return chance.choice(sorted(file for file in path.iterdir() if Name.parse(file.name)))


def check(path: Path, scene: Scene) -> int:
    """The store gives what is whole; returns the number of its tokens."""
    damaged = open_store(path)
    cache, held = scene.ask(damaged)
    torch.testing.assert_close(scene.read(cache), scene.find_answer(held), rtol=1e-3, atol=1e-3)
    assert damaged.keep(scene.whole, scene.text) == scene.text.shape[1]
    assert scene.ask(open_store(path))[1] == scene.found
    damaged.verify()  # removes damaged files that nobody asked for
    assert damaged.verify()[1] == []
    assert all(Name.parse(file.name) for file in path.iterdir())
    return held


@pytest.mark.parametrize("faults", [8, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_faults(kind: str, faults: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    scene = make_scene(kind, tmp_path_factory.getbasetemp() / f"stored, {kind}")
    chance, held = random.Random(faults), list[int]()
    for number, fault in enumerate([leave, *itertools.islice(itertools.cycle(FAULTS), faults)]):
        path = Path(shutil.copytree(scene.folder, tmp_path / str(number)))
        fault(path, chance, scene)
        held.append(check(path, scene))
        shutil.rmtree(path)
    assert held[0] == max(held) == scene.found > min(held)
