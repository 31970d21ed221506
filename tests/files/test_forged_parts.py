"""Key moments and tables of heads whose numbers were altered, in files of their own and in a cache's: refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import SMALL, prompt, tiny

from qada_cache import KeyMoments, QAdACache, StaticHeads
from qada_cache.cache_file import KIND
from qada_cache.files import tensor_file
from qada_cache.versions import pass_cache


def test_moments_that_are_none(tmp_path: Path) -> None:
    """Forged moments of another prompt in a cache's file are refused."""
    model, path = tiny(), tmp_path / "file"
    cache = QAdACache(model, moments="random-tokens", **SMALL)
    cache.save(path)
    tensors, state = tensor_file.read(path, KIND)
    layout = state["moments"]["rotations"][0][0]
    other: list[dict[str, Any]] = [{"rotations": [[layout, place]] * 2} for place in (7, -1, 0.0, False, None)]
    other += [{name: value} for name in state["moments"] for value in (3.5, "x", None, [[]], {"x": 1})]
    other += [{"frequencies": [[value] * 4]} for value in (float("inf"), float("nan"), "1", None, 10**400)]
    of_kind = {"rope_type": "dynamic", "rope_theta": 1e4}
    other += [{"rope": {"rope_parameters": each}} for each in (3, [], of_kind, of_kind | {"factor": "x"})]
    other += [{name: -1} for name in ("tokens", "sink_tokens")]
    other += [{name: 3} for name in ("mean", "_placed", "query_energies", "unknown")]
    for changed in [*other, {"rotations": []}, {"lengths": [5]}]:
        if changed in ({"model_type": "x"}, {"prompt": "x"}, {"origin": {"x": 1}}, {"frequencies": [[]]}):
            continue  # which moments of others may have
        forged = {**state, "moments": {**state["moments"], **changed}}
        tensor_file.write(path, KIND, tensors, forged)
        with pytest.raises(ValueError, match="file cannot be loaded: "):
            QAdACache.load(path, model)
        alone = {name: tensors[name] for name in tensors if name.startswith("moments.")}
        tensor_file.write(path, "qada-moments", alone, forged["moments"])
        with pytest.raises(ValueError, match=f"{path} cannot be loaded: "):
            KeyMoments.load(path)
    for name in alone:
        less = {other: alone[other] for other in alone if other != name}
        for forged in (less, less | {name: alone[name].double()}, less | {name: alone[name].long()}):
            tensor_file.write(path, "qada-moments", forged, state["moments"])
            if name in forged or "energies" not in name:
                with pytest.raises(ValueError, match="KeyMoments"):
                    KeyMoments.load(path)


@pytest.mark.parametrize("bits", [16, 8])
@torch.no_grad()
def test_an_order_that_repeats_channels(bits: int, tmp_path: Path) -> None:
    """An order with repeated or unknown channels is refused: kernels would write outside their memory by it."""
    model, path = tiny(max_position_embeddings=2048), tmp_path / "file"
    cache = QAdACache(model, moments="current", bulk_bits=bits)
    model(prompt(1300)[0], **pass_cache(cache))
    cache.save(path)
    tensors, state = tensor_file.read(path, KIND)
    names = [name for name in tensors if name.endswith("order")]
    assert len(names) == 2
    for name in names:
        for channel in (tensors[name][..., 1], torch.full_like(tensors[name][..., 1], 200)):
            forged = tensors[name].clone()
            forged[..., 0] = channel
            tensor_file.write(path, KIND, tensors | {name: forged}, state)
            with pytest.raises(ValueError, match=r"file cannot be loaded: .* an order that lacks channels"):
                QAdACache.load(path, model)


def test_a_table_of_heads_that_is_none(tmp_path: Path) -> None:
    tables = [{}, {"other": torch.ones(2, 4).bool()}, {"static_heads": torch.ones(2, 4)}]
    for tensors in [*tables, {"static_heads": torch.ones(4).bool()}]:
        tensor_file.write(tmp_path / "file", "qada-heads", tensors, {})
        with pytest.raises(ValueError, match="file does not hold a table of heads"):
            StaticHeads.load(tmp_path / "file")
