"""A tokenizer of bytes with a chat template, which can encode any text."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def tokenizer(*, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a byte and two special ones, `<|start|>` and `<|end|>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=whole, clean_up_tokenization_spaces=False)
    made.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>"]})
    made.chat_template = template
    return made
