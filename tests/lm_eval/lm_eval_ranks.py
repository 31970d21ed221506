"""One of two processes of `accelerate launch`: prints what lm-eval reports, for test_lm_eval.py.

On GPUs HFLM takes its rank from accelerate; without any it leaves that out, so it is done here.
"""

import json
import sys

import lm_eval
import torch
from lm_eval.tasks import TaskManager

from qada_cache.lm_eval import QAdALM

torch.set_num_threads(1)
pretrained, tasks = sys.argv[1:]
lm = QAdALM(pretrained, device="cpu")
lm._rank, lm._world_size = lm.accelerator.process_index, lm.accelerator.num_processes
results = lm_eval.simple_evaluate(
    model=lm,
    tasks=["tiny_choice", "tiny_perplexity"],
    task_manager=TaskManager(include_path=tasks, include_defaults=False),
    bootstrap_iters=0,
    log_samples=False,
)
if results is not None:
    print("RESULTS", json.dumps([lm._rank, lm._world_size, results["results"]]))
