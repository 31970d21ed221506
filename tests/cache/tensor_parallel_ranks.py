"""One process of `torchrun`, for test_tensor_parallel.py: what caches of a model that is split over processes do."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import needle
import torch
from ranks import refusal, report
from tensor_parallel_scene import NEW, SIZES, TOKENS, found_by, heads_table, text
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.distributed import DistributedConfig

from qada_cache import KeyMoments, QAdACache, StaticHeads, prepare
from qada_cache.key_moments import defaults
from qada_cache.versions import pass_cache

torch.set_num_threads(1)
warnings.simplefilter("error", FutureWarning)  # of what the next transformers removes
folder, file = sys.argv[1:]
rank = int(os.environ["RANK"])
os.environ["QADA_HOME"] = str(Path(folder, f"home-{rank}"))  # as on hosts of their own
model = AutoModelForCausalLM.from_pretrained(
    needle.FOLDER, distributed_config=DistributedConfig(tp_plan="auto"), dtype=torch.float32
)
found = {}

found["dynamic"] = model.generate(text(), **pass_cache(DynamicCache(config=model.config)), **TOKENS)[0, -NEW:].tolist()
found["exact"] = found_by(model, gather=True, threshold=1.0, moments="current")
found["file"] = found_by(model, gather=True, moments=file)
found["heads"] = found_by(model, gather=True, criterion=StaticHeads(heads_table()))

collected = KeyMoments.collect(model, progress=False)
collected.save(Path(folder, f"moments-{rank}.safetensors"))


def collections(build: Callable[[], object]) -> int:
    """How often this process collects moments while the cache is built."""
    with mock.patch.object(KeyMoments, "collect", wraps=KeyMoments.collect) as counted:
        build()
    return counted.call_count


def forget() -> None:
    defaults._remembered.clear()


forget()
shutil.rmtree(Path(folder, f"home-{rank}", "moments"))  # the static heads' cache has collected them, too
found["collections"] = [collections(lambda: prepare(model, **SIZES))]
found["collections"].append(collections(lambda: QAdACache(model, **SIZES)))
forget()
found["collections"].append(collections(lambda: QAdACache(model, **SIZES)))
if rank == 1:
    forget()
    shutil.rmtree(Path(folder, "home-1", "moments"))
found["collections"].append(collections(lambda: QAdACache(model, **SIZES)))

found["default"] = found_by(model, gather=True, audit_every=1)
found["compiled"] = found_by(model, gather=True, kernels="auto")
cache = QAdACache(model, **SIZES)
found["own"] = found_by(model, gather=False)
found["save"] = refusal(lambda: cache.save(Path(folder, f"cache-{rank}.safetensors")))
found["load"] = refusal(lambda: QAdACache.load(Path(folder, f"cache-{rank}.safetensors"), model))
found["config"] = refusal(lambda: QAdACache(config=model.config, moments="current", **SIZES))
with mock.patch.object(model.config, "distributed_config", None):  # as of a model that was split by other means
    config_only = QAdACache(config=model.config, moments="current", **SIZES)
    found["split"] = refusal(lambda: model.generate(text(), **pass_cache(config_only), **TOKENS))
for name, split in {
    "phi3": {"tp_size": 2},
    "one_kv_head": {"tp_size": 2},
    "llama": {"pp_size": 2},
    "qwen3": {"fsdp_size": 2},
}.items():
    settings = DistributedConfig(**split)
    other = AutoModelForCausalLM.from_pretrained(Path(folder, name), distributed_config=settings, dtype=torch.float32)
    found[name] = refusal(lambda model=other: QAdACache(model, **SIZES))
report(folder, found)
torch.distributed.destroy_process_group()
