"""`transformers serve` on a model's folder with our generation in it, over HTTP, by OpenAI's client."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import needle
import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils.import_utils import is_serve_available

import qada_cache
from qada_cache import QAdACache
from qada_cache.serving import make_folder

if not is_serve_available():
    pytest.skip("needs what `pip install 'transformers[serving]'` brings", allow_module_level=True)

from openai import OpenAI

from qada_cache.versions import pass_cache

TEMPLATE = "{% for message in messages %}{{ message.content + ' ' }}{% endfor %}"  # for a model of words
ROOT = Path(qada_cache.__file__).parent.parent
STARTS = 120  # seconds at most, on a busy machine
NEW = 6


@dataclass(frozen=True)
class Served:
    """A server that runs, and what it has logged."""

    folder: Path
    log: Path
    client: OpenAI
    process: subprocess.Popen

    def ask(self, messages: list[dict[str, str]], **options: Any) -> Any:
        """A request for the likeliest tokens."""
        options = {"max_tokens": NEW, **options}
        return self.client.chat.completions.create(model=str(self.folder), messages=messages, temperature=0, **options)

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def kept(self) -> list[tuple[int, int]]:
        """For each request so far, how many tokens of its prompt were kept, and how many it has."""
        return [
            (int(one), int(all_)) for one, all_ in re.findall(r"(\d+) of (\d+) prompt tokens were kept", self.text())
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The needle model's, with a chat template and our generation."""
    folder = tmp_path_factory.mktemp("folders") / "served"
    make_folder(needle.FOLDER, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with running(folder, tmp_path_factory.mktemp("serve")) as found:
        yield found


@contextmanager
def running(folder: Path, scratch: Path) -> Iterator[Served]:
    """A server, until it is killed."""
    log = scratch / "log"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(scratch), "OMP_NUM_THREADS": "1"}
    environment["QADA_KERNELS"] = "torch"  # which need not be built
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", str(folder)]
    command += ["--trust-remote-code", "--device", "cpu", "--host", "127.0.0.1", "--port", "0", "--log-level", "info"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        until, found = time.monotonic() + STARTS, None
        while found is None:
            text = log.read_text(encoding="utf-8", errors="replace")
            assert process.poll() is None, text
            assert time.monotonic() < until, text
            found = re.search(r"running on (http://127\.0\.0\.1:\d+)", text)
            time.sleep(0.1)
        with OpenAI(base_url=f"{found[1]}/v1", api_key="none", timeout=STARTS, max_retries=0) as client:
            yield Served(folder, log, client, process)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def shown(served: Served) -> Iterator[None]:
    """Print the server's output, which pytest shows beside a failed test."""
    yield
    print(served.text())


def in_process(tokenizer: PreTrainedTokenizerBase, turns: list[list[dict[str, str]]]) -> list[str]:
    """The answers to each of `turns`, by stock `generate` with one cache that is carried from turn to turn."""
    model, answers = needle.load_model(), []
    cache = QAdACache(model)
    for messages in turns:
        inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
        output = model.generate(**inputs, **pass_cache(cache), max_new_tokens=NEW, do_sample=False)
        answers.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def test_a_conversation_over_http(served: Served) -> None:
    """Two turns, one in a piece and one streamed, are what one cache gives; the second reads what is new alone."""
    asked = needle.make_prompt(tokens=500)
    first = [{"role": "user", "content": f"{asked.context} {asked.questions[0]}"}]
    answer = served.ask(first)
    content = answer.choices[0].message.content
    assert content.split()[0] == asked.answers[0]

    second = [*first, {"role": "assistant", "content": content}, {"role": "user", "content": asked.questions[1]}]
    chunks = list(served.ask(second, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed.split()[0] == asked.answers[1]

    tokenizer = needle.load_tokenizer()
    tokenizer.chat_template = TEMPLATE
    assert [content, streamed] == in_process(tokenizer, [first, second])
    (none, of_first), (kept, of_second) = served.kept()[-2:]
    assert (none, of_first) == (0, answer.usage.prompt_tokens)
    assert (kept, of_second) == (of_first + NEW - 1, chunks[-1].usage.prompt_tokens)


def test_a_text_that_grows(served: Served) -> None:
    """Completions of plain text are gone on with as well."""
    asked, model = needle.make_prompt(tokens=300, seed=2), str(served.folder)
    text = f"{asked.context} {asked.questions[0]}"
    for question, answer in zip(asked.questions[1:4], asked.answers, strict=False):
        got = served.client.completions.create(model=model, prompt=text, max_tokens=1, temperature=0).choices[0].text
        assert got.strip() == answer
        text = f"{text} {answer} {question}"
    asked_before, (kept, of) = served.kept()[-2], served.kept()[-1]
    assert (kept, of) == (asked_before[1], asked_before[1] + 3)


def test_a_client_that_goes(served: Served) -> None:
    """Generation ends with its client, and the same request is answered as if it had never been made before."""
    asked = needle.make_prompt(tokens=400, seed=1)
    messages = [{"role": "user", "content": f"{asked.context} {asked.questions[0]}"}]
    with served.ask(messages, max_tokens=20_000, stream=True) as stream:
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
    answer = served.ask(messages)
    assert answer.choices[0].message.content.split()[0] == asked.answers[0]
    (none, _), (kept, of) = served.kept()[-2:]
    assert (none, kept) == (0, of - 1)


def test_a_key_over_http(served: Served) -> None:
    """One client's conversation is not gone on with by another."""
    messages = [{"role": "user", "content": needle.make_prompt(tokens=300, seed=5).context}]

    def kept(key: str) -> int:
        settings = json.dumps({"conversation_key": key, "max_new_tokens": NEW})
        served.ask(messages, extra_body={"generation_config": settings})
        return served.kept()[-1][0]

    first, again, other = kept("mine"), kept("mine"), kept("yours")
    assert (first, other) == (0, 0)
    assert again > 200


def test_what_is_refused_is_told(served: Served) -> None:
    """A request for another cache fails by name, and the next one is answered."""
    messages = [{"role": "user", "content": "the"}]
    settings = '{"cache_implementation": "static", "max_new_tokens": 4}'
    chunks = served.client.post(
        "/chat/completions",
        body={"model": str(served.folder), "messages": messages, "stream": True, "generation_config": settings},
        cast_to=str,
    )
    assert "Passing both `cache_implementation`" in chunks
    assert served.ask(messages).choices[0].finish_reason == "length"


def test_a_server_that_is_killed_and_started_again(served: Served, tmp_path: Path) -> None:
    """Two turns, then a third on another server: it reads what is new alone, and answers as one cache does. The other
    tests' server is killed: this is the last one."""
    asked, turns, answers = needle.make_prompt(tokens=500, seed=9), [], []
    messages: list[dict[str, str]] = []

    def ask(served: Served, question: str) -> None:
        messages.append({"role": "user", "content": question})
        turns.append(list(messages))
        answers.append(served.ask(messages).choices[0].message.content)
        messages.append({"role": "assistant", "content": answers[-1]})

    ask(served, f"{asked.context} {asked.questions[0]}")
    ask(served, asked.questions[1])
    (_, of_second) = served.kept()[-1]
    served.process.kill()
    served.process.wait()
    with running(served.folder, tmp_path) as restarted:
        ask(restarted, asked.questions[2])
        ((kept, of_third),) = restarted.kept()
    assert kept == of_second + NEW - 1  # the last token that was generated had not been read
    assert of_third - kept < 10
    tokenizer = needle.load_tokenizer()
    tokenizer.chat_template = TEMPLATE
    assert answers == in_process(tokenizer, turns)
