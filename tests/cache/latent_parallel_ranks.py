"""One process of `torchrun`, for test_latent_parallel.py: what caches of models that are split over processes do."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from pathlib import Path
from unittest import mock

import latent_parallel_scene as scene
import torch
from ranks import refusal, report
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from qada_cache import KeyMoments, PrefixStore, QAdACache
from qada_cache.key_moments import defaults

torch.set_num_threads(1)
warnings.simplefilter("error", FutureWarning)  # of what the next transformers removes
folder, *kinds = sys.argv[1:]
rank = int(os.environ["RANK"])
os.environ["QADA_HOME"] = str(Path(folder, f"home-{rank}"))  # as on hosts of their own
found = {}

for kind in kinds:
    settings = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(Path(folder, kind), distributed_config=settings, dtype=torch.float32)
    own = found[kind] = scene.read_exactly(model)
    if kind == scene.INDEXED:
        continue
    own |= scene.decide(model, KeyMoments.load(Path(folder, f"moments-{kind}.safetensors")))
    collected = KeyMoments.collect(model, prompt="random-tokens", tokens=200, progress=False)
    collected.save(Path(folder, f"moments-{kind}-{rank}.safetensors"))
    own["collections"] = []
    for lost in (False, False, True):
        if lost and rank == 1:
            defaults._remembered.clear()
            shutil.rmtree(Path(folder, "home-1", "moments"))
        with mock.patch.object(KeyMoments, "collect", wraps=KeyMoments.collect) as counted:
            cache = QAdACache(model, criterion="gaussian")
        own["collections"].append(counted.call_count)
    own["config"] = refusal(lambda model=model: QAdACache(config=model.config))
    path = Path(folder, "none.safetensors")
    own["refused"] = [
        refusal(lambda cache=cache, path=path: cache.save(path)),
        refusal(lambda model=model, path=path: QAdACache.load(path, model)),
        refusal(lambda model=model: PrefixStore(Path(folder, "store")).cache(model, scene.text())),
    ]
settings = DistributedConfig(tp_plan="auto")
odd = AutoModelForCausalLM.from_pretrained(Path(folder, "odd"), distributed_config=settings, dtype=torch.float32)
found["odd"] = refusal(lambda: QAdACache(odd))
report(folder, found)
torch.distributed.destroy_process_group()
