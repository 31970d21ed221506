"""Models split over processes are refused when the cache is built: the other ranks would wait, or heads be mixed up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from models import SMALL, prompt, tiny
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from transformers import PreTrainedModel

from qada_cache import KeyMoments, QAdACache


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """Of this process alone."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def refused(model: PreTrainedModel, found: str) -> None:
    message = rf"llama model is split over processes \({found}\).*load it without .*or use transformers.DynamicCache"
    for moments in ("current", "random-words"):  # nothing is collected either, which other ranks would have to join
        with pytest.raises(NotImplementedError, match=message):
            QAdACache(model, moments=moments, **SMALL)
    with pytest.raises(NotImplementedError, match=message):
        KeyMoments.collect(model, progress=False)
    assert model.config._attn_implementation == "sdpa"


def test_tensor_parallel() -> None:
    model = tiny()
    model._tp_size = 2
    refused(model, "tensor parallelism over 2")
    model._tp_size = 1  # which splits nothing
    with torch.no_grad():
        model(prompt(40)[0], past_key_values=QAdACache(model, **SMALL))


def test_distributed_parameters(mesh: DeviceMesh) -> None:
    model = tiny()
    projection = model.model.layers[1].self_attn.q_proj
    projection.weight = torch.nn.Parameter(distribute_tensor(projection.weight.data, mesh, [Replicate()]))
    refused(model, "its parameters are DTensors")


def test_distributed_parameters_of_a_model_known_by_its_config(mesh: DeviceMesh) -> None:
    """There is no model to look at before its attention is called."""
    model = tiny()
    cache = QAdACache(config=model.config, moments="current", **SMALL)
    projection = model.model.layers[0].self_attn.o_proj  # comes after attention
    projection.weight = torch.nn.Parameter(distribute_tensor(projection.weight.data, mesh, [Replicate()]))
    with (
        torch.no_grad(),
        pytest.raises(NotImplementedError, match=r"split over processes \(its parameters are DTensors"),
    ):
        model(prompt(40)[0], past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_fully_sharded(mesh: DeviceMesh) -> None:
    model = tiny()
    fully_shard(model.model.layers[0], mesh=mesh)
    refused(model, "FSDP")


@pytest.mark.usefixtures("mesh")
def test_fully_sharded_by_wrapping() -> None:
    model = tiny()
    with pytest.warns(Warning, match="FSDP|NO_SHARD"):  # one process is nothing to it
        model.model.layers[0] = FullyShardedDataParallel(model.model.layers[0], device_id=torch.device("cpu"))
    refused(model, "FSDP")
