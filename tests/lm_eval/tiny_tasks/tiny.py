"""Documents of the tiny tasks: needle texts of different lengths, asked about with answers of different lengths."""

from datasets import Dataset, Split
from needle import SENTENCES, VALUES, make_prompt


def documents(**metadata) -> dict[str, Dataset]:
    made = []
    for seed, tokens in enumerate((700, 400, 550, 300)):
        prompt = make_prompt(tokens=tokens, facts=16, questions=1, seed=seed)
        answer = prompt.answers[0]
        wrong = next(value for value in VALUES if value != answer)
        # Two that share all but their last word, one of one word, one longer than the window that the tests ask for.
        choices = [f"{answer} . the", f"{answer} . {wrong}", wrong, f"{wrong} {' '.join(SENTENCES[0] * 4)}"]
        made.append({"context": prompt.context, "question": prompt.questions[0], "choices": choices})
    return {"test": Dataset.from_list(made, split=Split.TEST)}
