"""The `prose` tasks: what their documents hold and ask, how long they are, how they are scored, and one run."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install qada-cache[eval])")

import needle  # noqa: E402
from lm_eval.api.task import ConfigurableTask  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

import qada_cache  # noqa: E402
from eval.shared import language_model  # noqa: E402
from qada_cache.lm_eval import QAdALM, startup  # noqa: E402
from qada_cache.lm_eval.tasks.prose import prose, questions  # noqa: E402
from qada_cache.lm_eval.tasks.prose.questions import ADJECTIVES, KINDS, NOUNS  # noqa: E402

startup.install()  # for an environment in which the package is not installed

FOLDER = Path(qada_cache.__file__).parent / "lm_eval" / "tasks" / "prose"
NEEDLES = {  # keys in the text, numbers of each, keys asked for
    "prose_niah": (1, 1, 1),
    "prose_niah_multikey_4": (4, 1, 1),
    "prose_niah_multikey_16": (16, 1, 1),
    "prose_niah_multivalue": (1, 4, 1),
    "prose_niah_multiquery": (4, 1, 4),
}
TASKS = [*NEEDLES, "prose_vt", "prose_cwe", "prose_fwe", "prose_icl"]
LENGTHS = (1024, 4096)
TOKENIZER = {"pretrained": str(needle.FOLDER)}


def tasks(**metadata: Any) -> dict[str, ConfigurableTask]:
    """The tasks by name; not those of all lm-eval, which take seconds to find."""
    metadata = {**TOKENIZER, "max_seq_lengths": LENGTHS, "documents": 4, **metadata}
    return TaskManager(include_path=FOLDER, include_defaults=False, metadata=metadata).load("qada_prose")["tasks"]


@pytest.fixture(scope="module")
def loaded() -> dict[str, ConfigurableTask]:
    return tasks()


def documents(task: ConfigurableTask) -> list[dict[str, Any]]:
    return list(task.test_docs())


def prompt(task: ConfigurableTask, document: dict[str, Any], **options: Any) -> str:
    return task.fewshot_context(document, 0, gen_prefix=task.doc_to_prefix(document), **options)


def test_the_group_has_the_tasks(loaded: dict[str, ConfigurableTask]) -> None:
    assert list(loaded) == TASKS
    assert all(len(documents(task)) == 4 * len(LENGTHS) for task in loaded.values())


@pytest.mark.parametrize("name", TASKS)
def test_prompts_fill_the_length_and_leave_room_for_the_answer(loaded: dict[str, ConfigurableTask], name: str) -> None:
    task, tokenizer = loaded[name], needle.load_tokenizer()
    answer = task.config.generation_kwargs["max_gen_toks"]
    assert task.config.dataset_kwargs["answer_tokens"] == answer
    for document in documents(task):
        used = len(tokenizer(prompt(task, document), verbose=False).input_ids) + answer
        assert 0.95 * document["max_length"] <= used <= document["max_length"]


def test_room_is_kept_for_the_chat_template(tmp_path: Path) -> None:
    tokenizer = needle.load_tokenizer()
    tokenizer.chat_template = (
        "the system says: the grass is green. {% for message in messages %}the {{ message.role }} says: "
        "{{ message.content }} {% endfor %}{% if add_generation_prompt %}the assistant says:{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    task = tasks(pretrained=str(tmp_path), max_seq_lengths=[1024])["prose_niah"]

    def template(messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, continue_final_message=True
        )

    for document in documents(task):
        chat = prompt(task, document, apply_chat_template=True, chat_template=template)
        assert chat.endswith(f"says: {document['gen_prefix']}")
        assert 0.95 * 1024 <= len(tokenizer(chat, verbose=False).input_ids) + 16 <= 1024


@pytest.mark.parametrize("name", NEEDLES)
def test_needles_are_in_the_text_and_answers_are_what_is_asked(loaded: dict[str, ConfigurableTask], name: str) -> None:
    keys, values, asked = NEEDLES[name]
    for document in documents(loaded[name]):
        facts = re.findall(r"One of the special magic numbers for (\S+-\S+) is: (\d{7})\.\s", document["input"])
        assert len(facts) == len(set(facts)) == keys * values
        assert len({key for key, _ in facts}) == keys
        question = document["input"].rsplit("\n", 1)[1]
        queries = re.findall(r"[a-z]+-[a-z]+", question)
        assert re.findall(r"[a-z]+-[a-z]+", document["gen_prefix"]) == queries
        assert len(queries) == asked
        assert Counter(document["outputs"]) == Counter(value for key, value in facts if key in queries)
        verb = "are" if keys * values > 1 and asked * values > 1 else "is"
        assert document["gen_prefix"].endswith(f" mentioned in the provided text {verb}")


def test_needles_lie_between_sentences_at_all_depths(loaded: dict[str, ConfigurableTask]) -> None:
    text = 2 * "".join(questions.load().words)  # a passage may begin again where the text ends
    depths: list[float] = []
    for document in documents(loaded["prose_niah_multikey_16"]):
        passage = document["input"].split("\n", 1)[1].rsplit("\n", 1)[0]
        parts = re.split(r"\s*One of the special magic numbers for \S+ is: \d{7}\.\s*", passage)
        for part in filter(None, parts[:-1]):
            after = text[text.index(part) + len(part) :]
            assert re.search("[.!?:][\"')\u2019\u201d]*$", part) or re.match(r"\s*\n\s*\n", after), part[-50:]
        assert parts[-1] in text
        depths += [match.start() / len(passage) for match in re.finditer("One of the special", passage)]
    assert min(depths) < 0.1
    assert max(depths) > 0.9


def test_documents_are_repeatable_and_differ(loaded: dict[str, ConfigurableTask]) -> None:
    again, more, other = tasks(), tasks(documents=6, max_seq_lengths=[1024]), tasks(seed=1, max_seq_lengths=[1024])
    for name, task in loaded.items():
        rows = documents(task)
        assert rows == documents(again[name])
        assert rows[:4] == documents(more[name])[:4]  # whatever their number
        assert all(ours["input"] != theirs["input"] for ours, theirs in zip(rows, documents(other[name]), strict=False))
        assert len({document["input"] for document in rows}) == len(rows)
    begins = [document["input"].split("\n", 1)[1][:200] for document in documents(more["prose_niah"])]
    assert len(set(begins)) == len(begins)


def test_variables_form_a_chain(loaded: dict[str, ConfigurableTask]) -> None:
    for document in documents(loaded["prose_vt"]):
        example, question = document["input"].split("\n\nMemorize and track", 1)
        value = re.findall(r"assigned the value (\d{5}) in the text above\.$", question)[0]
        names = document["outputs"]
        said = re.findall(r"VAR (\w{5}) = (?:VAR )?(\w{5})", question)
        assert said == list(zip(names, [value, *names[:-1]], strict=True))
        assert value in document["gen_prefix"]
        solved = re.findall(r"VAR (\w{3}) =", example)
        assert example.endswith("they are: " + " ".join(solved))


def test_common_and_frequent_words_are_the_most_frequent(loaded: dict[str, ConfigurableTask]) -> None:
    for document in documents(loaded["prose_cwe"]):
        listed = document["input"].rsplit("often.\n", 1)[1].split("\nQuestion")[0]
        counts = Counter(re.findall(r"\d+\. ([a-z]+)", listed))
        assert {word for word, _ in counts.most_common(10)} == set(document["outputs"])
        ninth, tenth, eleventh = (count for _, count in counts.most_common(11)[8:])
        assert ninth == tenth >= 2 * eleventh
        assert not [word for word in counts for common in document["outputs"] if common in word and common != word]
    for document in documents(loaded["prose_fwe"]):
        counts = Counter(document["input"].split("coded words. ", 1)[1].split("\nQuestion")[0].split())
        assert [word for word, _ in counts.most_common(4)] == ["...", *document["outputs"]]


def test_labels_are_known_from_the_examples_alone(loaded: dict[str, ConfigurableTask]) -> None:
    kinds = {word: kind for kind, words in KINDS.items() for word in words.split()}
    meant = set()
    for document in documents(loaded["prose_icl"]):
        examples = re.findall(r"Word: (\w+)\nLabel: (\d+)\n", document["input"])
        asked = document["input"].rsplit("Word: ", 1)[1]
        labels = {(kinds[word], label) for word, label in examples}
        assert len(labels) == len({kind for kind, _ in labels}) == len({label for _, label in labels}) == len(KINDS)
        assert document["outputs"] == [dict(labels)[kinds[asked]]]
        assert asked not in dict(examples)
        assert document["gen_prefix"] == "Label:"
        meant |= labels
    assert len(meant) > 2 * len(KINDS)  # a kind's label is another one in every document


def test_word_lists_have_no_doubles() -> None:
    for words in (ADJECTIVES.split(), NOUNS.split(), " ".join(KINDS.values()).split()):
        assert len(set(words)) == len(words)
    assert len({len(words.split()) for words in KINDS.values()}) == 1


def test_scores_by_hand() -> None:
    document = {"outputs": ["1234567", "7654321", "ABC", "none"], "max_length": 512}
    assert prose.process_results(document, ["It is 1234567, and\n7654321 abc."]) == {"512": 0.75}
    assert prose.process_results(document, ["123456 7"]) == {"512": 0.0}
    assert prose.process_results({**document, "outputs": ["7"]}, ["1234567"]) == {"512": 1.0}


def test_another_text_and_what_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Town {number} is old. It has a wall, it is said." for number in range(200)), "utf-8")
    asked = {"form": "needles", "answer_tokens": 16, "max_seq_lengths": [600], "documents": 3, **TOKENIZER}
    for document in prose.dataset(**asked, text=str(text))["test"]:
        assert "It has a wall" in document["input"]
    (longer,) = prose.dataset(**{**asked, "max_seq_lengths": [8000], "documents": 1}, text=str(text))["test"]
    assert longer["input"].count("Town 7 is old.") > 1  # a text that is too short starts again
    with pytest.raises(OSError, match=r"nothing\.txt"):
        prose.dataset(**asked, text=str(tmp_path / "nothing.txt"))
    short = tmp_path / "short.txt"
    short.write_text("Too short.", "utf-8")
    with pytest.raises(ValueError, match="2 words are too few"):
        prose.dataset(**asked, text=str(short))
    with pytest.raises(ValueError, match="set larger max_seq_lengths"):
        prose.dataset(**{**asked, "max_seq_lengths": [40]})
    with pytest.raises(ValueError, match="no tokenizer to measure lengths with"):
        prose.dataset(form="needles", answer_tokens=16)
    with pytest.raises(ValueError, match="too few different words"):
        prose.dataset(**{**asked, "form": "common_words"}, text=str(text))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("max_seq_lengths", value) for value in (4096, "4096", ["1024"], [])),
        *(("documents", value) for value in ("8", 0, -1)),
        ("text", ""),
    ],
)
def test_wrong_metadata_is_named(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{option} is ") + ".*got " + re.escape(repr(value))):
        prose.dataset(form="needles", answer_tokens=16, **TOKENIZER, **{option: value})


def test_the_tokenizer_is_loaded_as_by_lm_eval(tmp_path: Path) -> None:
    """From the subfolder and revision that the model's arguments name."""
    needle.load_tokenizer().save_pretrained(tmp_path / "inner")
    model = {"pretrained": str(tmp_path), "subfolder": "inner"}
    assert prose.make_ruler(model)(questions.Question("the old farmer", "walks", [])) == 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prose, "load_tokenizer", lambda *name, **given: asked.append(given) or needle.load_tokenizer())
        asked: list[dict[str, Any]] = []
        prose.make_ruler({**model, "revision": 1.0})  # as lm-eval parses revision=1.0
    assert asked == [{"subfolder": "inner", "revision": "1.0", "trust_remote_code": False}]


def test_a_list_is_longer_than_there_are_words() -> None:
    """The ten are still the most common by far, and the others of no great number each."""
    words = [f"{letter}{number}" for letter in "abcd" for number in range(10)]
    for size in (30, 300, 3000):
        question = questions.list_words(Random(0), size, words, often=30, seldom=3)
        counts = Counter(re.findall(r"\d+\. (\w+)", question.prompt)).most_common()
        assert {word for word, _ in counts[:10]} == set(question.answers)
        assert counts[9][1] >= 2 * counts[10][1] - 1
        assert sum(count for _, count in counts[10:]) == size


def test_fitting_takes_few_measurements() -> None:
    """A question is fitted into a room with few measurements, though its tokens do not grow evenly with its size, and
    with fewer still if the size of a similar document is known."""
    measured = []

    def make(size: int) -> questions.Question:
        return questions.Question("a " * int(3 * size + 40 * (size % 7) + 25), "", [])

    def measure(question: questions.Question) -> int:
        measured.append(1)
        return len(question.prompt) // 2

    for room in (1000, 5000, 100_000):
        measured.clear()
        question, size = prose.fit(make, measure, room, prose.SMALLEST)
        assert 0.95 * room <= measure(question) <= room
        assert len(measured) < 15
        measured.clear()
        assert prose.fit(make, measure, room, size)[1] >= size
        assert len(measured) <= 3
    with pytest.raises(ValueError, match="has no more tokens"):
        prose.fit(lambda size: make(8), measure, 1000, 8)


def test_a_run_from_documents_to_scores() -> None:
    lm = QAdALM(str(needle.FOLDER), device="cpu")
    manager = TaskManager(
        include_path=FOLDER,
        include_defaults=False,
        metadata={**TOKENIZER, "max_seq_lengths": [1000, 1024], "documents": 2},
    )
    results = lm_eval.simple_evaluate(lm, tasks=["prose_niah"], task_manager=manager, bootstrap_iters=1)
    found = results["results"]["prose_niah"]
    assert found["1000,none"] == found["1024,none"] == 0.0  # the model has no words for numbers
    assert found["1024_stderr,none"] == 0.0
    assert 0.0 < found["cache_sparsity,none"] <= 1.0


def test_a_gguf_files_tokenizer_measures() -> None:
    try:
        where = language_model.find_source("smollm2")
    except ValueError as error:
        pytest.skip(str(error))
    pytest.importorskip("gguf", reason="gguf is not installed")
    model = {"pretrained": where["pretrained_model_name_or_path"], "gguf_file": where["gguf_file"]}
    measure = prose.make_ruler(model)
    (document,) = prose.dataset(form="needles", answer_tokens=16, max_seq_lengths=[2048], documents=1, **model)["test"]
    used = measure(questions.Question(document["input"], document["gen_prefix"], []))
    assert 0.95 * 2048 <= used + 16 <= 2048
