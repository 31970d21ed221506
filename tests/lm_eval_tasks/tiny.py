"""Documents of the tiny tasks: needle texts of different lengths, asked about with answers of different lengths."""

from datasets import Dataset, Split

from qada_cache.needle import make_prompt
from qada_cache.needle.words import SENTENCES, VALUES


def documents(**metadata) -> dict[str, Dataset]:
    made = []
    for seed, tokens in enumerate((700, 400, 550)):
        prompt = make_prompt(tokens=tokens, facts=16, questions=2, seed=seed)
        for question, answer in zip(prompt.questions, prompt.answers, strict=True):
            wrong = [value for value in VALUES if value not in prompt.answers][seed]
            # Two that share all but their last word, one of one word, one longer than the window of the tests.
            choices = [f"{answer} . the", f"{answer} . {wrong}", wrong, f"{wrong} {' '.join(SENTENCES[0] * 4)}"]
            made.append({"context": prompt.context, "question": question, "choices": choices})
    return {"test": Dataset.from_list(made, split=Split.TEST)}
