"""The commands of the documents: the programs they name take their arguments, and options named in passing exist."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser
from documents import DOCUMENTS, FENCED, ROOT, spans
from torch.distributed.run import get_args_parser as torchrun_parser
from transformers.cli import transformers

from qada_cache.key_moments.defaults import CURRENT, split_sources
from qada_cache.names import PROMPTS
from qada_cache.serving import FOLDER

FOREIGN = {"--include_path": "lm_eval"}  # options that are named in order to say that they are not needed


@dataclass(frozen=True)
class Command:
    """One command of a document, and whether it is in a block of code, where it has to be complete."""

    document: str
    line: str
    whole: bool

    @property
    def words(self) -> list[str]:
        words = shlex.split(self.line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        return words


def commands() -> Iterator[Command]:
    for document, text in DOCUMENTS.items():
        for language, block in FENCED.findall(text):
            if language == "sh":
                lines = block.replace("\\\n", " ").splitlines()
                yield from (Command(document, line, True) for line in lines if shlex.split(line, comments=True))
        for span in spans(text):
            if re.match(r"(python -m|pip|make|qada|lm_eval) ", span):
                yield Command(document, span, False)


class Parsed(Exception):  # noqa: N818  # no error
    """Stops a command once it has read its arguments."""


def read_by(words: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """Start the program that a command names, with its very arguments, until it has read them; the parser that did.

    Raises:
        SystemExit: it does not take them.
    """
    parse, readers = argparse.ArgumentParser.parse_args, []

    def stopped(self: argparse.ArgumentParser, *args: object, **keywords: object) -> None:
        readers.append(self)
        raise Parsed(parse(self, *args, **keywords))  # type: ignore[arg-type]

    if words[0] == "qada":
        from qada_cache.__main__ import main
    elif words[0] == "lm_eval":
        pytest.importorskip("lm_eval", reason="the command line is lm-eval's")
        from lm_eval.__main__ import cli_evaluate as main
    else:
        for needed in ("lm_eval", "matplotlib"):
            pytest.importorskip(needed, reason="some commands need it")
        main = importlib.import_module(words[0]).main
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stopped)
        patch.setattr(sys, "argv", words)
        with pytest.raises(Parsed):
            main()
    return readers[0]


def option_strings(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a parser and of its subcommands."""
    found = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            found = found.union(*map(option_strings, action.choices.values()))
    return found


def eval_parser(name: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The parser of one of eval's commands."""
    required = {command: ["--out", "t"] for command in ("trials", "sweep", "heads", "convert")}
    required |= {"codes": ["rungs", "--out", "t"], "figures": ["draw"], "latency": ["prompt"], "memory": ["held"]}
    required |= {"overhead": ["step"], "prompts": ["loss"], "reuse": ["copies"]}
    return read_by([f"eval.{name}", *required.get(name, [])], monkeypatch)


def program(words: list[str]) -> list[str] | None:
    """A command as the program that reads its arguments, and these; None for one that is checked in other ways."""
    if words[:2] == ["python", "-m"] and words[2].startswith("eval."):
        return words[2:]
    if words[:3] == ["python", "-m", "qada_cache.lm_eval"]:
        return ["lm_eval", *words[3:]]
    if words[:2] == ["accelerate", "launch"]:
        launched = launch_command_parser().parse_args(words[2:])
        return [launched.training_script, *launched.training_script_args]
    if words[0] == "torchrun" and (launched := torchrun_parser().parse_args(words[1:])).module:
        return [launched.training_script, *launched.training_script_args]
    return words if words[0] in ("qada", "lm_eval") else None


COMMANDS = list(commands())


def test_there_are_commands() -> None:
    """The patterns above find what they are to find."""
    found = {command.document for command in COMMANDS if program(command.words)}
    documents = {"README.md", *(f"docs/{name}.md" for name in ("choosing", "lm-eval", "measuring", "options", "speed"))}
    assert documents - found <= {"README.md"}  # `make` is its only one
    assert sum(program(command.words) is not None for command in COMMANDS) > 30


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.document}: {command.line[:70]}")
def test_command(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments are read without a complaint by the program it names."""
    words = command.words
    if match := re.fullmatch(r'\w+=\$\(python -c "(.*)"\)', command.line):
        ast.parse(match[1])
    elif words[0] == "make":
        rules = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "eval/tables.mk"))
        named = {word for word in words[1:] if "=" not in word and word != "tables/NAME"}
        assert named <= {
            target for line in re.findall(r"^(\w[\w./ -]*):", rules, re.MULTILINE) for target in line.split()
        }
    elif words[0] == "torchrun" and "-m" not in words:
        assert torchrun_parser().parse_args(words[1:]).training_script.endswith(".py")
    elif words[:2] == ["pip", "install"]:
        named = set(re.findall(r"\.\[(\w+)\]", command.line))
        extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert all(re.search(rf"^{extra} = \[", extras, re.MULTILINE) for extra in named)
    elif words[:3] == ["python", "-m", "pytest"]:
        (file,) = [word for word in words if word.endswith(".py")]
        assert words[words.index("-k") + 1] in (ROOT / file).read_text(encoding="utf-8")
    elif words[0] == "transformers":
        transformers.app.commands[words[1]].make_context(words[1], words[2:]).close()
    elif words[:2] == ["cp", "-r"]:
        assert (Path(FOLDER) / words[2].removeprefix("$ours/")).is_dir()
    else:
        called = program(words)
        assert called is not None, f"an unknown program: {words}"
        if not command.whole and (len(called) == 1 or called[1:] == ["..."]):  # named, not called
            if called[0].startswith("eval."):
                assert callable(importlib.import_module(called[0]).main)
        elif not command.whole and called[0] == "qada" and len(called) == 2:
            with pytest.raises(SystemExit) as stopped:
                read_by([*called, "--help"], monkeypatch)
            assert stopped.value.code == 0
        else:
            read_by(called, monkeypatch)


def test_wrong_options_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for line in ("eval.sweep --out t.csv --no-such-option", "qada profile --model m --no-such-option", "eval.trials"):
        with pytest.raises(SystemExit) as stopped:
            read_by(line.split(), monkeypatch)
        assert stopped.value.code == 2


def values(command: Command, option: str) -> list[str]:
    """The values that a command gives an option."""
    words = command.words
    if option not in words:
        return []
    rest = words[words.index(option) + 1 :]
    end = next((place for place, word in enumerate(rest) if word.startswith("-")), len(rest))
    return [value for word in rest[:end] for value in word.split(",")]


def test_tasks_and_moments_exist(all_tasks: Any) -> None:
    """Names that commands take without asking when they read their arguments."""
    known = {*all_tasks.all_tasks, "prose", "code", "chat"}  # the last three are tasks of eval.trials
    called = [command for command in COMMANDS if program(command.words)]
    for command in called:
        assert not (unknown := set(values(command, "--tasks")) - known), f"{command}: {unknown}"
        for moments in values(command, "--moments"):
            assert split_sources(moments)[1] in (None, *PROMPTS) or moments == CURRENT, command
    assert sum(len(values(command, "--tasks")) for command in called) > 20
    named = {span for span in spans(DOCUMENTS["docs/lm-eval.md"]) if re.match(r"(qada|prose|long|needle)_\w+$", span)}
    assert len(named) > 12
    assert named <= known


def test_model_arguments_are_options_of_a_cache() -> None:
    """`cache=` and `cache_*=` of lm-eval's documents."""
    options = pytest.importorskip("qada_cache.lm_eval", reason="needs lm-eval")
    text = DOCUMENTS["docs/lm-eval.md"]
    assert set(re.findall(r"[,`\[]cache=(\w+)", text)) <= set(options.CRITERIA)
    named = set(re.findall(r"[,`\[](cache_\w+)=", text))
    assert {"cache_threshold", "cache_moments", "cache_heads"} <= named <= {*options.KEYWORDS}


def test_options_named_in_passing_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--option` in a sentence is an option of one of our commands, or of lm-eval's."""
    known = set(FOREIGN)
    for path in sorted((ROOT / "eval").glob("*.py")):
        known |= option_strings(eval_parser(path.stem, monkeypatch))
    known |= option_strings(read_by(["qada", "moments", "--model", "m", "--out", "f"], monkeypatch))
    known |= {option for parameter in transformers.app.commands["serve"].params for option in parameter.opts}
    known |= option_strings(read_by(["lm_eval", "run", "--tasks", "wikitext"], monkeypatch))
    for document, text in DOCUMENTS.items():
        for span in spans(text):
            for option in re.findall(r"(?:^|\s)(--[\w-]+)", span):
                assert option in known, f"{document}: `{span}`"


def test_every_command_of_eval_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files right in `eval` are commands, and docs/measuring.md has them all, and all of their parts."""
    for path in (ROOT / "eval").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "def main(" in text, f"{path.name} is no command"
        parts = [
            f" {part}"
            for action in eval_parser(path.stem, monkeypatch)._actions
            if isinstance(action, argparse._SubParsersAction)
            for part in action.choices
        ]
        for part in parts or [""]:
            assert f"python -m eval.{path.stem}{part}" in DOCUMENTS["docs/measuring.md"]
