"""Tuning: measure once what settings cost your model on your text, then build every cache by the choice.

For example:

    python examples/tune.py --model ID_OR_PATH --text FILE --kl 0.005
"""

import argparse
import subprocess
import sys

from transformers import AutoModelForCausalLM

from qada_cache import QAdACache

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--text", help="a file; by default Python's help topics")
parser.add_argument("--kl", default="0.002", help="the budget: mean divergence from reading everything, in nats")
parser.add_argument("--tokens", default="4096", help="of each of the six pieces of text that are read")
options = parser.parse_args()

# The command `qada tune`: minutes. It prints the curve, and keeps a choice that other pieces of the text confirm.
command = [sys.executable, "-m", "qada_cache", "tune", options.model, "--kl", options.kl, "--tokens", options.tokens]
status = subprocess.run([*command, *(["--text", options.text] if options.text else [])], check=False).returncode
if status:
    sys.exit(status)  # nothing was kept, and a line said why

model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
cache = QAdACache(model, tuned=True)  # says so once if nothing was kept
print(f"threshold={cache.options.threshold}, token_threshold={cache.options.token_threshold}")
