"""Many questions about one document: it is read once, each question goes to a copy, and later runs find it on disk.

For example:

    python examples/many_questions.py --document FILE "What is a sink?" "What is the bulk?"
"""

import argparse
import copy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qada_cache import PrefixStore

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--document", type=Path, default=Path("docs/tour.md"))
parser.add_argument("--new-tokens", type=int, default=32)
parser.add_argument("questions", nargs="+")
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
document = tokenizer(options.document.read_text(encoding="utf-8"), return_tensors="pt").input_ids

store = PrefixStore()
cache = store.cache(model, document)  # all but the last token, if an earlier run has read it
found = cache.get_seq_length()
with torch.no_grad():
    model(document[:, found:], cache=cache, logits_to_keep=1)
store.keep(cache, document)
print(f"{found} of {document.shape[1]} tokens were stored")

for question in options.questions:
    asked = tokenizer(f"\n{question}\n", add_special_tokens=False, return_tensors="pt").input_ids
    ids, own = torch.cat([document, asked], dim=1), copy.deepcopy(cache)  # copies share the memory of the document
    out = model.generate(ids, attention_mask=torch.ones_like(ids), cache=own, max_new_tokens=options.new_tokens)
    print(f"{question} {tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)}")
