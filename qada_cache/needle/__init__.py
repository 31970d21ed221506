"""The needle model: a 0.9M-parameter Llama for trying the cache on a CPU, without downloading anything.

It is a test model, trained for minutes on the synthetic text of `qada_cache.needle.tasks`. Its heads are local by
default and turn long-context for a question about something far away, as tests of the cache need. Training sees to
that: its last stages penalise far attention, and train the Gaussian estimate of it. So key moments of random words find
the heads that a question needs, and moments of the prompt itself mostly miss them. Measurements on this model are no
evidence about a real language model's quality.

    model, tokenizer = load_model(), load_tokenizer()
    prompt = make_prompt(tokens=4096)
    inputs = tokenizer(f"{prompt.context} {prompt.questions[0]}", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=1)   # its last token: prompt.answers[0]

Further questions go on the same sequence: the answer's token, then
`tokenizer(prompt.questions[1], add_special_tokens=False)`.
"""

from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from .tasks import NeedlePrompt, haystack, make_prompt, random_words, single_word

__all__ = [
    "NeedlePrompt",
    "haystack",
    "load_model",
    "load_tokenizer",
    "make_prompt",
    "random_words",
    "single_word",
]

FOLDER = Path(__file__).parent


def load_model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The needle model in evaluation mode, on the CPU: a test model, no evidence about a real model's quality."""
    return LlamaForCausalLM.from_pretrained(FOLDER, dtype=dtype, local_files_only=True).eval()


def load_tokenizer() -> PreTrainedTokenizerFast:
    """Its tokenizer: one token per word of `words.VOCABULARY`, `<s>` in front unless `add_special_tokens=False`."""
    return PreTrainedTokenizerFast.from_pretrained(FOLDER, local_files_only=True)
