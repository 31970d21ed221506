"""lm-eval's scores with transformers' cache and with this one, and what was read for them.

For example:

    python examples/scores.py --model ID_OR_PATH --tasks prose_niah prose_vt --tokens 4096 --documents 8
"""

import argparse

import lm_eval
import torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--tasks", nargs="+", default=["prose_niah"])
parser.add_argument("--tokens", type=int, default=4096, help="of each prompt")
parser.add_argument("--documents", type=int, default=8, help="of each task")
options = parser.parse_args()

for cache in (None, "qada"):  # the argument `cache` is this package's; lm-eval finds it by itself
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": options.model, "dtype": "auto", **({"cache": cache} if cache else {})},
        device="cuda" if torch.cuda.is_available() else "cpu",
        tasks=options.tasks,
        metadata={"max_seq_lengths": [options.tokens], "documents": options.documents},
        bootstrap_iters=0,
    )
    for task, found in results["results"].items():
        score = found[f"{options.tokens},none"]
        read = found.get("cache_read_share,none", 1.0)
        share = read if isinstance(read, str) else f"{read:.0%}"  # of contexts without a stored part it is "N/A"
        print(f"{cache or 'DynamicCache'}: {task} {score:.2f}, {share} of the context's bytes read")
