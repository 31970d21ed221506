"""Texts to be continued, code among them, tasks of lm-eval with answers, and a document with planted facts."""

import ast
import importlib.util
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qada_cache.tuning.measuring import read_default_text

PROSE, CODE, CHAT = "prose", "code", "chat"
SPARSE = ", sparse question"
LIBRARY = Path(sysconfig.get_path("stdlib"))
# Of many kinds, and long enough to be continued in their middle. Their wording changes from version to version.
MODULES = (
    *("argparse", "http.client", "zipfile", "configparser", "subprocess", "logging.handlers", "tarfile", "shutil"),
    *("email.message", "unittest.case", "urllib.request", "inspect", "asyncio.base_events", "statistics", "smtplib"),
    *("concurrent.futures.process", "dataclasses", "xmlrpc.client", "difflib", "multiprocessing.pool", "socketserver"),
    *("tempfile", "imaplib", "pathlib", "traceback", "http.cookiejar", "optparse", "pickle", "ftplib", "mailbox"),
)
# Whole topics of the Python language reference, in an order that reads as a document. Every Python has the reference;
# its topics and their wording change from version to version.
TOPICS = (
    *("objects", "execmodel", "import", "try", "calls", "function", "class", "numeric-types", "with", "raise"),
    *("naming", "async", "strings", "identifiers", "operator-summary", "attribute-access", "typesseq"),
)

_SHIPS = ("Aurora", "Meridian", "Petrel", "Halcyon")
_CAPTAINS = ("Helena Brandt", "Oscar Lindqvist", "Marta Silva", "Edwin Hale", "Ruth Calloway", "Jonas Weber")
_FESTIVALS = ("lantern", "kite", "puppet", "harvest")
_CITIES = ("Lisbon", "Oslo", "Nairobi", "Lima", "Kyoto", "Dublin", "Prague")
_TOWNS = ("Oakmere", "Brackwell", "Tilford", "Ashcombe")
_DATES = ("14 March 1897", "2 June 1911", "30 October 1854", "7 May 1923", "21 January 1876")
_BUILDINGS = ("harbor", "castle", "museum", "lighthouse")
_CLUBS, _ANIMALS = ("rowing", "chess", "cycling"), ("heron", "badger", "otter", "falcon")
_DISHES = ("grandmother's soup", "the baker's cake", "the winter tea")
_SPICES = ("saffron", "nutmeg", "ginger", "cardamom")


@dataclass(frozen=True)
class Document:
    """One text, and how it goes on.

    Args:
        task: `PROSE`, `CODE`, or an lm-eval task; `SPARSE` behind it if its question is read sparsely.
        length: tokens asked for.
        index: which of the task's documents.
        prompt: int64 `[1, tokens]`.
        answer: int64 `[1, tokens]`, what comes next; of a task, the answer that is right.
        expected: that answer as text; "" of what is to be continued.
        question: the last tokens of the prompt, so many, that are not read with the text but in a call of their own.
    """

    task: str
    length: int
    index: int
    prompt: Tensor
    answer: Tensor
    expected: str = ""
    question: int = 1

    @property
    def text(self) -> Tensor:
        """int64 `[1, tokens]`: the prompt without its question."""
        return self.prompt[:, : -self.question]

    @property
    def following(self) -> Tensor:
        """int64 `[1, tokens]`, fed after the text: the question, and the answer but for its last token."""
        return torch.cat([self.prompt[:, -self.question :], self.answer[:, :-1]], dim=1)


def make_question_dense(document: Document) -> Document:
    """The same, but its question is read exactly, as the text is: all but its last token, where every answer begins."""
    return replace(document, task=document.task.removesuffix(SPARSE), question=1)


def ask_as(document: Document, protocols: list[str]) -> list[Document]:
    """The document once for each of `protocols` that applies to it, the one that reads least of it exactly first."""
    if document.question == 1:
        return [document]
    by_protocol = {"sparse": document, "dense": make_question_dense(document)}
    return [by_protocol[protocol] for protocol in ("sparse", "dense") if protocol in protocols]


def is_continued(task: str) -> bool:
    """Whether documents of the task are pieces of text, rather than questions."""
    return task.partition(":")[0] in (PROSE, CODE)


def find_beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that begins a text, if the tokenizer puts one there."""
    return [index for index in tokenizer("").input_ids[:1] if index == tokenizer.bos_token_id]


def read_prose(
    tokenizer: PreTrainedTokenizerBase, *, length: int, following: int, text: Path | None = None
) -> Iterator[Document]:
    """Pieces of `length` tokens one after the other, and the `following` tokens after each; as many as the text has."""
    whole = text.read_text(encoding="utf-8") if text else read_default_text()
    ids = tokenizer(whole, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids
    begin = find_beginning(tokenizer)
    piece = length - len(begin) + following
    task = f"{PROSE}:{text.stem}" if text else PROSE
    for index in range(ids.shape[1] // piece):
        taken = torch.cat([torch.tensor([begin], dtype=torch.long), ids[:, index * piece : (index + 1) * piece]], dim=1)
        yield Document(task, length, index, taken[:, :length], taken[:, length:])


def read_task_documents(
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    count: int,
    manager: Any,
) -> Iterator[Document]:
    """The first documents of an lm-eval task, asked in its own words, and their answers.

    The last line of a prompt is its `question`, to be read sparsely. `manager` is lm-eval's `TaskManager`.

    Raises:
        ValueError: a document has several answers, which have no one order.
    """
    made = manager.load([task])["tasks"][task]
    made.build_all_requests(limit=count)
    for index, instance in enumerate(made.instances):
        target = made.doc_to_target(instance.doc)
        answers = [target] if isinstance(target, str) else target
        if len(answers) != 1:
            raise ValueError(f"{task} has {len(answers)} answers a document, and trials take one: use eval.sweep")
        asked = instance.args[0]
        text, newline, last = asked.rpartition("\n")
        told, question, answer = (
            tokenizer(part, return_tensors="pt", add_special_tokens=special, verbose=False).input_ids
            for part, special in ((text + newline, True), (last, False), (f" {answers[0].strip()}", False))
        )
        prompt = torch.cat([told, question], dim=1)  # the text is read before the question is known
        yield Document(task + SPARSE, length, index, prompt, answer, answers[0].strip(), question.shape[1])


def find_source(module: str) -> Path | None:
    """The file of a module of the standard library; None if it is none, or not written in Python."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # of a parent that is no package
        return None
    path = Path(spec.origin or "") if spec else Path()
    inside = path.suffix == ".py" and path.is_relative_to(LIBRARY) and "site-packages" not in path.parts
    return path if inside else None


def find_imports(module: str, text: str) -> Iterator[str]:
    """Modules that the source `text` of `module` imports, by their full names; some are names within modules."""
    package = module if (path := find_source(module)) and path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: 1 - node.level or None] if node.level else []
            whole = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{whole}.{alias.name}" for alias in node.names)
            yield whole


def show(path: Path) -> str:
    """A file under its name, as an editor would give it to a model."""
    return f"# {path.relative_to(LIBRARY).as_posix()}\n{path.read_text(encoding='utf-8')}\n\n"


def read_code(tokenizer: PreTrainedTokenizerBase, *, length: int, following: int) -> Iterator[Document]:
    """Beginnings of modules, `length` tokens with modules that they import before them, and the `following` tokens.

    What is imported directly stands nearest. A module is cut in its middle, or where it takes half of the tokens.
    """

    def encode(path: Path) -> list[int]:
        return tokenizer(show(path), add_special_tokens=False, verbose=False).input_ids

    begin = find_beginning(tokenizer)
    for index, module in enumerate(MODULES):
        if (path := find_source(module)) is None:
            continue
        ids = encode(path)
        own = min(length // 2, len(ids) // 2)
        front: list[int] = []
        met, queue = {path}, [(module, path)]
        while queue and len(front) < length - own - len(begin):
            name, file = queue.pop(0)
            for other in find_imports(name, file.read_text(encoding="utf-8")):
                if (found := find_source(other)) and found not in met:
                    met.add(found)
                    queue.append((other, found))
                    front = encode(found) + front
        room = length - own - len(begin)
        if own < following or len(front) < room:
            continue
        taken = torch.tensor([[*begin, *front[len(front) - room :], *ids[: own + following]]])
        yield Document(CODE, length, index, taken[:, :length], taken[:, length:])


@dataclass(frozen=True)
class Turn:
    """One question of a chat.

    Args:
        question: as the user asks it.
        begun: how the answer begins, written for the model: it goes on from there.
        fact: the sentence in the text that answers it, "" for questions of which nobody knows the right answer.
        expected: what a right answer contains, "" likewise.
    """

    question: str
    begun: str = ""
    fact: str = ""
    expected: str = ""

    def is_right(self, answer: str) -> bool:
        """Whether an answer has what is expected, in whatever case and line breaks, but not as part of a longer word
        or number."""
        words = r"\s+".join(map(re.escape, self.expected.split()))
        return bool(self.expected) and re.search(rf"(?<!\w){words}(?!\w)", answer, re.IGNORECASE) is not None


# Asked of the reference as well. Judged by nobody: what counts is whether every cache leads to the same answer.
ABOUT_THE_REFERENCE = (
    Turn("What is an object's identity, according to the text?", begun="According to the text, an object's identity"),
    Turn("What is garbage collection, according to the text?", begun="According to the text, garbage collection"),
)


def read_reference() -> str:
    """The default document: topics of the Python language reference."""
    from pydoc_data.topics import topics  # which some Pythons lack

    return "\n\n".join(topics[name].strip() for name in TOPICS if name in topics)


def draw_facts(seed: int) -> list[Turn]:
    """A fact of each kind with the question about it, in the order they are asked; names and values drawn by `seed`.

    One fact a kind: SmolLM2-135M mixes up two captains, whichever cache it has.
    """
    draw = random.Random(seed)
    building, code = draw.choice(_BUILDINGS), str(draw.randrange(10**6, 10**7))
    ship, captain = draw.choice(_SHIPS), draw.choice(_CAPTAINS)
    festival, city = draw.choice(_FESTIVALS), draw.choice(_CITIES)
    town, date = draw.choice(_TOWNS), draw.choice(_DATES)
    club, animal = draw.choice(_CLUBS), draw.choice(_ANIMALS)
    dish, spice = draw.choice(_DISHES), draw.choice(_SPICES)
    return [
        _make_turn(f"What is the access code of the {building}?", f"The access code of the {building} is", code),
        _make_turn(f"Who is the captain of the ship {ship}?", f"The captain of the ship {ship} is named", captain),
        _make_turn(
            f"In which city does the {festival} festival take place?",
            f"The {festival} festival takes place in the city of",
            city,
        ),
        _make_turn(f"When was the bridge at {town} opened?", f"The bridge at {town} was opened on", date),
        _make_turn(f"What is the mascot of the {club} club?", f"The mascot of the {club} club is the", animal),
        _make_turn(f"What is the secret ingredient of {dish}?", f"The secret ingredient of {dish} is", spice),
    ]


def _make_turn(question: str, begun: str, expected: str) -> Turn:
    return Turn(question, begun=begun, fact=f"{begun} {expected}.", expected=expected)


def plant(text: str, facts: list[str]) -> str:
    """`text` with the facts as paragraphs of their own, at even depths: each at the break between paragraphs (of
    short texts sentences, else words) that is nearest."""
    for pattern in (r"\n[ \t]*\n\s*", r"(?<=[.!?])\s+", r"\s+"):
        breaks = [match.span() for match in re.finditer(pattern, text)]
        if len(breaks) >= len(facts):
            break
    depths = [len(text) * (index + 1) // (len(facts) + 1) for index in range(len(facts))]
    parts, done = [], 0
    for depth, fact in zip(depths, facts, strict=True):
        left = [span for span in breaks if span[0] >= done]
        start, end = min(left, key=lambda span: abs(span[0] - depth), default=(len(text), len(text)))
        parts += [text[done:start], fact]
        done = end
    return "\n\n".join(part for part in [*parts, text[done:]] if part.strip())
