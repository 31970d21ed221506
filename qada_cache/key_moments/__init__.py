"""Key moments of all layers of a model, from another prompt than the one being read, for bulks of any length."""

import os
import sys
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import huggingface_hub
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError
from torch import Tensor

from ..files import tensor_file
from ..forked import renew
from ..models.sharding import UNSHARDED, HeadShard
from . import collecting
from .rotation import AS_KNOWN, CPU, ROPE_SETTINGS, Rotation, find_growing_parameters, find_rotation_at

KIND = "qada-moments"
HUB = "hf://"
HUB_FILE = "moments.safetensors"
FLOAT64 = ("cpu", "cuda")  # devices that have it, and so average moments over positions themselves
_HEADER = ("lengths", "model_type", "prompt", "tokens", "sink_tokens", "rope", "origin")  # unchanged in a file
_KINDS = dict(zip(_HEADER, (list, str, str, int, int, dict, dict), strict=True)) | {
    "frequencies": list,
    "rotations": list,
}
# Caches in several threads may share moments. One lock for all, as locks cannot be copied.
_placing = renew(threading.Lock())


def _check_header(header: dict[str, Any]) -> None:
    """Raise ValueError unless a header from a file has the fields of `KeyMoments.to_header`, each of its kind."""
    kinds = {name: type(value) for name, value in header.items()}
    if kinds != _KINDS:
        wrong = sorted({str(name) for name, _ in kinds.items() ^ _KINDS.items()})
        raise ValueError(f"KeyMoments: {', '.join(wrong)} of its file are missing, unknown or of another kind")
    if any(type(pair) is not list or [*map(type, pair)] != [str, int] for pair in header["rotations"]):
        raise ValueError(f"KeyMoments: rotations must be pairs of a layout and an index, got {header['rotations']}")
    counts = [header["tokens"], header["sink_tokens"], *header["lengths"], *(at for _, at in header["rotations"])]
    if not {*map(type, counts)} <= {int} or min(counts) < 0:
        raise ValueError(f"KeyMoments: counts and indices must be ints and not negative, got {counts}")
    for frequency in (value for listed in header["frequencies"] for value in listed):
        if type(frequency) not in (int, float) or not abs(frequency) <= sys.float_info.max:
            raise ValueError(f"KeyMoments: a rotary frequency of {frequency}")
    if unknown := header["rope"].keys() - ROPE_SETTINGS:
        raise ValueError(f"KeyMoments: rotary settings {', '.join(sorted(unknown))} are unknown")


@dataclass(frozen=True, eq=False)
class KeyMoments:
    """Mean and covariance of every layer's keys, from another prompt (the paper's option 2).

    Made by `collect`. The moments of a bulk depend on its length, because keys turn with position: `at(length)` gives
    them for any. They are kept either as those of keys turned back to position 0, with the rotation of every layer, or
    for a list of lengths.

    Args:
        mean: `[lengths, layers, kv_heads, dim]` float32; zeros for layers that are not full attention, and for heads
            and channels that a layer has fewer of than another.
        covariance: `[lengths, layers, kv_heads, dim, dim]` float32, population covariance.
        lengths: of the first dim, ascending, in tokens of bulk; empty (first dim 1) with `rotations`.
        rotations: of every layer, if `mean` and `covariance` are of keys turned back to position 0; else empty.
        model_type: the `model_type` of the config.
        prompt: one of `prompts.PROMPTS`, or "custom".
        tokens: how many tokens were read.
        sink_tokens: first tokens left out; a bulk begins after as many.
        rope: the model's rotary settings (`rotation.read_rope_settings`).
        query_energies: `[layers, kv_heads, dim]` float32, mean squares of the channels of the queries, see
            `collecting.QueryEnergies`; None if unknown. Latents have `[layers, 2, dim]`: energies, weights of errors.
        origin: seed, dtype, model's name, library versions.

    Raises:
        ValueError: shapes that do not fit each other, nan or infinity, or lengths that do not ascend.
    """

    mean: Tensor
    covariance: Tensor
    lengths: tuple[int, ...]
    model_type: str
    prompt: str
    tokens: int
    rotations: tuple[Rotation, ...] = ()
    sink_tokens: int = 16
    rope: dict[str, Any] = field(default_factory=dict)
    query_energies: Tensor | None = None
    origin: dict[str, Any] = field(default_factory=dict)
    _placed: WeakValueDictionary[Any, Tensor] = field(default_factory=WeakValueDictionary, repr=False)

    collect = classmethod(collecting.collect)

    def __post_init__(self) -> None:
        shape = tuple(self.mean.shape)
        if len(shape) != 4 or self.covariance.shape != (*shape, shape[-1]):
            raise ValueError(
                "KeyMoments takes mean [lengths, layers, kv_heads, dim] and covariance [lengths, layers, kv_heads, "
                f"dim, dim], got {list(self.mean.shape)} and {list(self.covariance.shape)}"
            )
        if not (torch.isfinite(self.mean).all() and torch.isfinite(self.covariance).all()):
            raise ValueError(
                "KeyMoments: mean or covariance holds nan or infinity, as do keys that they were collected from: give "
                'others, or moments="current", which are of the prompt itself'
            )
        energies, fitting = self.query_energies, [shape[1:], *([(shape[1], 2, shape[3])] if shape[2] == 1 else [])]
        if energies is not None and (
            tuple(energies.shape) not in fitting or not torch.isfinite(energies).all() or (energies < 0).any()
        ):
            raise ValueError(
                f"KeyMoments: query energies must be finite, not negative and {list(shape[1:])}: give others, or "
                'moments="current", which are of the prompt itself'
            )
        if self.rotations:
            if self.lengths or shape[0] != 1 or [rotation.dim for rotation in self.rotations] != [shape[3]] * shape[1]:
                raise ValueError("KeyMoments with rotations take one for each layer, and no lengths")
        elif (
            len(self.lengths) != shape[0] or list(self.lengths) != sorted(set(self.lengths)) or self.lengths[:1] < (1,)
        ):
            raise ValueError(f"KeyMoments take {shape[0]} ascending lengths, got {list(self.lengths)}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(layers, kv_heads, dim)`."""
        return tuple(self.mean.shape[1:])  # type: ignore[return-value]  # it has four dimensions, checked when made

    @property
    def is_unchecked(self) -> bool:
        """Whether frequencies depend on the length, and an earlier version did not look whether the model has those of
        transformers' formula."""
        growing = any(find_growing_parameters(self.rope, layer) for layer in range(len(self.rotations)))
        return growing and AS_KNOWN not in self.origin

    def at(self, length: int) -> tuple[Tensor, Tensor]:
        """Moments of a bulk of `length` tokens: mean `[layers, kv_heads, dim]` and covariance `[..., dim, dim]`,
        float64 on the CPU.

        With `rotations` they are averaged over the bulk's positions. Otherwise they are those of the greatest of
        `lengths` up to `length`: moments of a shorter bulk do little harm, of a longer one much. A ValueError if
        `length` is below 1.
        """
        layers = [self._find_layer_at(layer, length) for layer in range(self.mean.shape[1])]
        return torch.stack([mean for mean, _ in layers]), torch.stack([covariance for _, covariance in layers])

    def _find_layer_at(self, layer: int, length: int, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
        """As `at`, of one layer, on `device` if there are rotations."""
        if length < 1:
            raise ValueError(f"moments are of a bulk of at least 1 token, got length {length}")
        if not self.rotations:
            index = max(0, bisect_right(self.lengths, length) - 1)
            return self.mean[index, layer].cpu().double(), self.covariance[index, layer].cpu().double()
        rotation = self.rotations[layer]
        if self.origin.get(AS_KNOWN, True):
            rotation = find_rotation_at(rotation, self.rope, layer, length)
        moments = self.mean[0, layer], self.covariance[0, layer]
        return rotation.average(*moments, first=self.sink_tokens, length=length, device=device)

    def find_layer(
        self,
        layer: int,
        lengths: Sequence[int],
        device: torch.device,
        shard: HeadShard = UNSHARDED,
        sizes: tuple[int | None, int | None] = (None, None),
    ) -> list[tuple[Tensor, Tensor]]:
        """Moments of one layer for bulks of these many tokens each, of the shard's heads: mean `[1, kv_heads, dim]` and
        covariance `[1, kv_heads, dim, dim]`, float32 on `device`. `sizes` are these two, if layers differ in them.

        They are made once for all callers that keep them (`of_layer.LayerMoments`), so any number of caches may take
        turns. Callers round lengths (`rotation.round_length`), so that few different ones are ever asked for.
        """
        by_length = []
        with _placing:
            for length in lengths:
                keys = [(name, layer, length, device, shard.rank, shard.size) for name in ("mean", "covariance")]
                mean, covariance = map(self._placed.get, keys)
                if mean is None or covariance is None:
                    heads, *dims = map(slice, (*sizes, sizes[1]))
                    found = self._find_layer_at(layer, length, device if device.type in FLOAT64 else CPU)
                    whole = zip(found, ((heads, *dims[:1]), (heads, *dims)), strict=True)
                    parts = (shard.take_own(moment)[part].float() for moment, part in whole)
                    mean, covariance = (moment.to(device).contiguous().unsqueeze(0) for moment in parts)
                    self._placed.update(zip(keys, (mean, covariance), strict=True))
                by_length.append((mean, covariance))
        return by_length

    @property
    def device_bytes(self) -> int:
        """Bytes of what callers of `find_layer` keep on devices, for all caches that share these moments."""
        with _placing:
            return sum(moment.nbytes for moment in self._placed.values())

    def to_tensors(self) -> dict[str, Tensor]:
        """The tensors of a file, under the names that `from_file` reads."""
        tensors = {"moments.mean": self.mean, "moments.covariance": self.covariance}
        return tensors if self.query_energies is None else tensors | {"moments.query_energies": self.query_energies}

    def to_header(self) -> dict[str, Any]:
        """All other fields of a file, JSON-able."""
        frequencies = list(dict.fromkeys(rotation.frequencies for rotation in self.rotations))
        return {
            **{name: getattr(self, name) for name in _HEADER},
            "frequencies": frequencies,  # layers share them
            "rotations": [[rotation.layout, frequencies.index(rotation.frequencies)] for rotation in self.rotations],
        }

    @classmethod
    def from_file(
        cls, tensors: dict[str, Tensor], header: dict[str, Any], path: str | os.PathLike | None = None
    ) -> "KeyMoments":
        """The inverse of `to_tensors` and `to_header`; a ValueError, which names the file's `path`, if they do not fit
        each other or are no moments."""
        named = "" if path is None else f"{path} cannot be loaded: "
        try:
            _check_header(header)
            mean, covariance = tensors["moments.mean"], tensors["moments.covariance"]
            energies, frequencies = tensors.get("moments.query_energies"), header["frequencies"]
            if any(tensor.dtype != torch.float32 for tensor in (mean, covariance, energies) if tensor is not None):
                raise ValueError("KeyMoments are float32")
            rotations = (Rotation(mean.shape[-1], tuple(frequencies[at]), layout) for layout, at in header["rotations"])
            fields = {name: header[name] for name in _HEADER} | {"lengths": tuple(header["lengths"])}
            found = cls(mean, covariance, rotations=tuple(rotations), query_energies=energies, **fields)
            for layer, rotation in enumerate(found.rotations):  # errors of its rotary settings come now, or never
                find_rotation_at(rotation, found.rope, layer, 1)
            return found
        except ValueError as error:
            raise ValueError(f"{named}{error}") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"{named}KeyMoments: a file of them does not hold this ({error!r})") from error

    def save(self, path: str | os.PathLike) -> None:
        """Write to one safetensors file, whole or not at all."""
        tensor_file.write(path, KIND, self.to_tensors(), self.to_header())

    @classmethod
    def load(cls, source: str | os.PathLike, *, revision: str | None = None) -> "KeyMoments":
        """Read a file of `save`, or a repository of the Hugging Face Hub by `push_to_hub`.

        Args:
            source: a path, or "hf://owner/name", a repository; nothing is asked of the network for a path.
            revision: of the repository: a branch, tag or commit.

        Raises:
            FileNotFoundError: there is no such file or repository.
            ValueError: the file is truncated, altered, not a moments file, or of another format.
        """
        path = os.fspath(source)
        if path.startswith(HUB):
            try:
                path = huggingface_hub.hf_hub_download(path.removeprefix(HUB), HUB_FILE, revision=revision)
            except LocalEntryNotFoundError as error:
                raise FileNotFoundError(f"no file at {path}, and the Hugging Face Hub cannot be reached") from error
            except (RepositoryNotFoundError, EntryNotFoundError) as error:
                missing = f"no {HUB_FILE} in a Hub repository of that name"
                raise FileNotFoundError(f"no file at {path}, and {missing}") from error
        elif revision is not None:
            raise ValueError(f"revision is for a repository of the Hub, {HUB}owner/name, and {path} is a path")
        elif not os.path.exists(path):
            raise FileNotFoundError(
                f"no {KIND} file at {path}, nor a prompt of that name; a repository of the Hugging Face Hub is "
                f"written {HUB}owner/name"
            )
        return cls.from_file(*tensor_file.read(path, KIND), path)

    def push_to_hub(self, repository: str, *, revision: str | None = None, private: bool | None = None) -> str:
        """Put the moments into the repository "owner/name" of the Hugging Face Hub, made if it does not exist.

        They are loaded from "hf://owner/name". Returns the address of the commit.
        """
        api, about = huggingface_hub.HfApi(), f"of {self.origin.get('model') or self.model_type}, {self.prompt}"
        api.create_repo(repository, exist_ok=True, private=private)
        with tempfile.TemporaryDirectory() as folder:
            self.save(path := os.path.join(folder, HUB_FILE))
            what: dict[str, Any] = {"path_or_fileobj": path, "path_in_repo": HUB_FILE, "repo_id": repository}
            return str(api.upload_file(**what, revision=revision, commit_message=f"Key moments {about}"))
