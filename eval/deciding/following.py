"""What follows a document, with a cache that holds its text: forced, or generated, and compared with full attention."""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.texts.documents import Document
from qada_cache import QAdACache
from qada_cache.tuning.measuring import compared

SPARE = 8  # tokens that an answer may have beside the expected ones: quotation marks, a word or two


@torch.no_grad()
def prefill(model: PreTrainedModel, document: Document, cache: QAdACache) -> None:
    """Read what `cache` lacks of the text, exactly."""
    left = document.text[:, cache.get_seq_length() :]
    if left.shape[1]:
        model(left.to(model.device), past_key_values=cache, logits_to_keep=1)


@torch.no_grad()
def follow(model: PreTrainedModel, document: Document, cache: QAdACache, *, at_once: bool = True) -> Tensor:
    """Log-probabilities `[tokens, vocabulary]` of what follows a prompt that `cache` holds.

    The question in one call; the rest with it, or token by token, as in decoding: the queries of one call share the
    tokens that they read.
    """
    ids, question = document.following.to(model.device), document.question
    parts = [ids] if at_once else [ids[:, :question], *ids[:, question:].split(1, dim=1)]
    logits = [model(part, past_key_values=cache).logits[0] for part in parts if part.shape[1]]
    return torch.cat(logits)[question - 1 :].float().log_softmax(dim=-1)


def compare(full: Tensor, found: Tensor) -> dict[str, str]:
    """Log-probabilities `[tokens, vocabulary]` of a way against those of full attention."""
    kl, same = compared(full, found)
    return {"tokens": str(len(full)), "kl": f"{kl:.6f}", "top1": f"{same:.4f}", "same": str(int(same == 1))}


def generate(model: PreTrainedModel, document: Document, cache: QAdACache) -> Tensor:
    """An answer `[1, tokens]`, greedily, somewhat longer than the right one."""
    ids = document.prompt.to(model.device)
    most = document.answer.shape[1] + SPARE
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=most, do_sample=False
    )
    return out[:, ids.shape[1] :].cpu()


def spoken(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, document: Document, cache: QAdACache
) -> tuple[Document, bool]:
    """The document with full attention's own answer, up to the expected one if that is in it, and whether it is.

    `cache` holds all of the prompt but its question, and reads everything.
    """
    said = generate(model, document, cache)
    for tokens in range(1, said.shape[1] + 1):
        if document.expected in tokenizer.decode(said[0, :tokens]):
            return replace(document, answer=said[:, :tokens]), True
    return replace(document, answer=said), False
