"""Small data of our own in the shape of the data sets that the shipped tasks download."""

from __future__ import annotations

from typing import Any

from datasets import Dataset


def squad_row(number: int) -> dict[str, Any]:
    context = f"The tower of town {number} is of stone. It was built by the mason's {number} sons."
    return {"context": context, "question": f"Who built tower {number}?", "answers": {"text": [f"{number} sons"]}}


def gsm8k_row(number: int) -> dict[str, Any]:
    answer = f"Both hold 1 + {number} = <<1+{number}={number + 1}>>{number + 1}.\n#### {number + 1:,}"
    return {"question": f"A bag holds 1 pear, a box {number}. How many hold both?", "answer": answer}


def mbpp_row(number: int) -> dict[str, Any]:
    tests = [f"assert add_{number}({value}) == {value + number}" for value in (1, 2, 3)]
    code = f"def add_{number}(value):\r\n    return value + {number} "
    return {"text": f"Write a function that adds {number}.", "code": code, "test_list": tests}


GSM8K_TEST, MBPP_TEST = ([row(number) for number in range(1000, 1008)] for row in (gsm8k_row, mbpp_row))
SQUAD = [squad_row(number) for number in range(90)]


def load_dataset(path: str, name: str | None = None, *, split: str | None = None) -> Any:
    """Instead of `datasets.load_dataset`: small data under the names and splits of the real."""
    rows = {
        ("openai/gsm8k", "main"): {"train": [gsm8k_row(number) for number in range(20)], "test": GSM8K_TEST},
        ("google-research-datasets/mbpp", "full"): {
            "prompt": [mbpp_row(number) for number in range(10)],
            "test": MBPP_TEST,
        },
        ("rajpurkar/squad", None): {"validation": SQUAD},
    }[path, name]
    splits = {split: Dataset.from_list(part) for split, part in rows.items()}
    return splits[split] if split else splits


class HotpotQA:
    """Instead of the download that RULER makes: forty questions, three texts each."""

    @staticmethod
    def raise_for_status() -> None:
        pass

    @staticmethod
    def json() -> list[dict[str, Any]]:
        texts = [[f"Town {number}", [f"Town {number} is old. ", "It has a tower. " * 3]] for number in range(120)]
        return [
            {"question": f"Is town {number} old?", "answer": "yes", "context": texts[3 * number : 3 * number + 3]}
            for number in range(40)
        ]
