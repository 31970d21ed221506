"""Documents of `qada_context_free`: the prompts of RULER's HotpotQA task, asking for nothing that they hold.

The paper's probe: heads that read the long context only when they need it have no need of it here. Compare the sparsity
with that of `ruler_qa_hotpot`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from datasets import Dataset, Split
from lm_eval.tasks.ruler import common_utils, qa_utils

QUESTION = "Can you describe LLMs in a few sentences?"
PROMPTS = 500  # per length, as many as RULER has
ANSWER_TOKENS = 128  # within the length, as `max_gen_toks` in the YAML


def context_free_dataset(*, max_seq_lengths: Iterable[int], **model_arguments: Any) -> dict[str, Dataset]:
    """The split `test`: `input` and `gen_prefix` of every document, for RULER's first `PROMPTS` questions.

    `max_seq_lengths` are tokens of prompt and answer, from `--metadata`. The model arguments name the tokenizer.
    """
    tokenizer = common_utils.get_tokenizer(common_utils.resolve_tokenizer_name(model_arguments))
    questions, texts = qa_utils.read_hotpotqa()
    replaced = [{**question, "query": QUESTION} for question in questions[:PROMPTS]]
    given = {"docs": texts, "qas": replaced, "num_samples": len(replaced), "tokens_to_generate": ANSWER_TOKENS}
    made = (
        qa_utils.generate_samples(tokenizer=tokenizer, max_seq_length=tokens, **given) for tokens in max_seq_lengths
    )
    return {"test": Dataset.from_list([row for rows in made for row in rows], split=Split.TEST)}


def process_results(document: Mapping[str, Any], answers: Sequence[str]) -> dict[str, float]:
    """The number of words of the one answer."""
    return {"answer_words": float(len(answers[0].split()))}
