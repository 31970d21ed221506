"""Models split over processes, but not by heads, are refused when the cache is built: ranks would wait, or heads be
mixed up. Those that are split by heads are in tests/cache/test_tensor_parallel.py and test_latent_parallel.py.
"""

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
from qada_cache.versions import pass_cache


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A device mesh of this process alone."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def refused(model: PreTrainedModel, found: str) -> None:
    kind = model.config.model_type
    message = rf"this {kind} model is split over processes \({found}\).*load it .*or use transformers.DynamicCache"
    for moments in ("current", "random-words"):  # nothing is collected either, which other ranks would have to join
        with pytest.raises(NotImplementedError, match=message):
            QAdACache(model, moments=moments, **SMALL)
    with pytest.raises(NotImplementedError, match=message):
        KeyMoments.collect(model, progress=False)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("family", "changes", "processes", "found"),
    [
        (
            "llama",
            {},
            2,
            r"every process has all heads of model.layers.0.self_attn.q_proj, or .*",
        ),  # the plan is not kept
        ("olmo2", {}, 2, r"every process has all heads of model.layers.0.self_attn.q_proj, or .*"),  # they are gathered
        ("phi3", {}, 2, r"layers 0, 1 make keys by no projection of their own"),
        ("deepseek_v2", {}, 2, r"every process has all weights"),
        ("llama", {}, 4, r"2 KV heads and 4 query heads have no 4 equal parts"),
        ("llama", {"num_attention_heads": 6, "hidden_size": 48}, 4, r"2 KV heads and 6 query heads have no 4 .*"),
    ],
)
def test_tensor_parallel(family: str, changes: dict[str, int], processes: int, found: str) -> None:
    model = tiny(family, **changes)
    model._tp_size = processes
    refused(model, rf"tensor parallelism over {processes}, where {found}")


def test_tensor_parallel_over_one() -> None:
    model = tiny()
    model._tp_size = 1  # which splits nothing
    with torch.no_grad():
        model(prompt(40)[0], **pass_cache(QAdACache(model, **SMALL)))


@pytest.mark.usefixtures("mesh")
def test_pipeline_parallel() -> None:
    model = tiny()
    model.model.layers[1] = torch.nn.Identity()  # as transformers does with layers of other processes
    refused(model, "pipeline parallelism: layers 1 are not in this one")
    model.model.layers = model.model.layers[:1]  # as torch.distributed.pipelining has it done by hand
    refused(model, "pipeline parallelism: layers 1 are not in this one")


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
        model(prompt(40)[0], **pass_cache(cache))
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
