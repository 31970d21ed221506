"""A chat about a long document: the first question reads it, each later one reads what is new.

    python examples/chat.py --model ID_OR_PATH --document FILE

Then type a question a line.
"""

import argparse
import sys
from itertools import takewhile
from operator import eq
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from qada_cache import QAdACache

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--document", type=Path, default=Path("docs/tour.md"))
parser.add_argument("--new-tokens", type=int, default=200)
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
cache = QAdACache(model, progress=True)
messages, tokens = [], []  # the conversation; the token ids behind which the last answer ended

for question in map(str.strip, sys.stdin):
    said = question if messages else f"{options.document.read_text(encoding='utf-8')}\n\n{question}"
    messages.append({"role": "user", "content": said})
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompt = inputs["input_ids"][0].tolist()

    # A template may spell an answer in other tokens than the model did: the cache keeps what is the same.
    held = tokens[: cache.get_seq_length()]
    same = sum(takewhile(bool, map(eq, held, prompt)))
    if same < len(held):
        cache.crop(same - len(held))
    tokens = model.generate(**inputs, cache=cache, max_new_tokens=options.new_tokens)[0].tolist()

    answer = tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": answer})
    print(f"{answer}\n[{len(prompt) - same} of {len(prompt)} tokens were new]")
print(cache.stats())
