"""The startup hook: stock lm-eval's command in a fresh environment, and processes that have nothing to do with it."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import needle
import pytest
from ranks import launch

REPOSITORY = Path(__file__).parents[2]
needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed (pip install qada-cache[eval])"
)


class Environment:
    """A virtual environment that holds nothing but qada-cache, and runs commands."""

    def __init__(self, folder: Path, *install: str) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin" / "python"
        self.site_packages = next(folder.glob("lib/python*/site-packages"))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python, "install", "-q"]
        self.borrow()  # the build backend
        offline = ["--no-index", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, *offline, *install], check=True, capture_output=True, text=True)
        self.give_back()

    def borrow(self) -> None:
        """Let it import what the environment of the tests has; `.pth` files there are not run."""
        (self.site_packages / "zz_borrowed.pth").write_text(sysconfig.get_path("purelib"))

    def give_back(self) -> None:
        (self.site_packages / "zz_borrowed.pth").unlink()

    def run(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        # Kernels are not the subject, and take longer to build than all else that is run here.
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "QADA_KERNELS": "torch"}
        return subprocess.run(
            [self.python, *arguments],
            env={**os.environ, **offline, **variables},
            capture_output=True,
            text=True,
            cwd=self.folder,
            timeout=300,
        )

    def code(self, code: str, **variables: str) -> str:
        """Run `python -c code`; return what it prints. Asserts that it succeeds, with nothing on stderr."""
        run = self.run("-c", code, **variables)
        assert (run.returncode, run.stderr) == (0, "")
        return run.stdout.strip()


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """qada-cache from a wheel; neither torch nor lm-eval, so that qada_cache itself cannot be imported."""
    return Environment(tmp_path_factory.mktemp("bare") / "venv", str(REPOSITORY))


@pytest.fixture(scope="module", params=["wheel", pytest.param("editable", marks=pytest.mark.slow)])
def fresh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """qada-cache as a user installs it, with lm-eval and torch."""
    install = [str(REPOSITORY)] if request.param == "wheel" else ["--editable", str(REPOSITORY)]
    environment = Environment(tmp_path_factory.mktemp(request.param) / "venv", *install)
    environment.borrow()
    return environment


def documented(program: str) -> tuple[dict[str, str], list[str]]:
    """Variables and words of the command of docs/several-devices.md that starts this program."""
    text = (REPOSITORY / "docs" / "several-devices.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if program in line and "lm_eval" in line]
    words = shlex.split(line)
    start = words.index(program)
    return dict(word.split("=", 1) for word in words[:start]), words[start:]


TASKS = Path(__file__).with_name("tiny_tasks")
HELPERS = str(Path(needle.__file__).parents[1])  # what these tasks import
NEEDLE = ["--limit", "4", "--include_path", str(TASKS), "--metadata", '{"max_seq_lengths": [1024]}']


@needs_lm_eval
def test_the_literal_command(fresh: Environment, tmp_path: Path) -> None:
    console_script = Path(sysconfig.get_path("scripts")) / "lm_eval"
    arguments = f"pretrained={needle.FOLDER},cache=qada,cache_local_tokens=64,cache_moments=random-words"
    command = ["--model", "hf", "--model_args", arguments, *NEEDLE, "--output_path", str(tmp_path)]
    run = fresh.run(console_script, *command, "--tasks", "needle,prose_niah", PYTHONPATH=HELPERS, QADA_KERNELS="auto")
    assert run.returncode == 0, run.stderr
    (file,) = tmp_path.rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    assert "cache_kv_sparsity,none" in results["prose_niah"]  # the package's own task, found by its name
    metrics = results["needle"]
    assert metrics["exact_match,none"] == 1.0
    assert 0.0 < metrics["cache_kv_sparsity,none"] <= metrics["cache_sparsity,none"] < 1.0
    for name in ("sparsity", "kv_sparsity", "read_share", "bulk_read_bytes", "device_bytes"):
        assert metrics[f"cache_{name},none"] > 0
        assert f"|cache_{name}" in run.stdout
    assert metrics["cache_host_bytes,none"] == 0  # of texts this short the default codes nothing


@needs_lm_eval
@pytest.mark.parametrize("fresh", ["wheel"], indirect=True)
def test_two_processes_score_and_count_as_one(fresh: Environment, tmp_path: Path) -> None:
    """The documented command, with our model and tasks; of documents in an odd number, so that some are repeated."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from qada_cache.lm_eval import QAdALM

    lm = QAdALM(str(needle.FOLDER), device="cpu", cache_local_tokens=64, cache_kernels="torch")
    tasks = {"tasks": ["tiny_choice", "tiny_perplexity"], "limit": 3}
    manager = TaskManager(include_path=TASKS, include_defaults=False)
    alone = lm_eval.simple_evaluate(lm, task_manager=manager, bootstrap_iters=0, **tasks)["results"]

    variables, command = documented("torchrun")
    own = {
        "ruler_vt": "tiny_choice,tiny_perplexity",
        "pretrained=meta-llama/Llama-3.1-8B-Instruct,cache=qada": f"pretrained={needle.FOLDER},cache=qada"
        ",cache_local_tokens=64,cache_kernels=torch",
    }
    assert own.keys() <= set(command)
    command = [own.get(word, word) for word in command[1:]] + ["--limit", "3"]
    command += ["--include_path", str(TASKS), "--output_path", str(tmp_path)]
    at_exit = "lambda: print('groups left:', getattr(sys.modules.get('torch.distributed'), 'is_initialized', bool)())"
    (tmp_path / "sitecustomize.py").write_text(f"import atexit, sys\natexit.register({at_exit})\n")
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), HELPERS])
    said = launch("torch.distributed.run", *command, python=fresh.python, **variables)
    assert "groups left: True" not in said  # gloo's threads abort a process that ends before them
    assert said.count("groups left: False") >= 2
    (file,) = tmp_path.rglob("results_*.json")  # one process reports
    together = json.loads(file.read_text())["results"]
    assert together.keys() == alone.keys() == set(tasks["tasks"])
    for task, metrics in alone.items():
        assert 0 < metrics["cache_kv_sparsity,none"] < 1
        for name in metrics.keys() - {"cache_device_bytes,none"}:  # each process keeps moments of its own lengths
            value = metrics[name]
            same = pytest.approx(value) if isinstance(value, float) else value
            assert "stderr" in name or together[task][name] == same, (task, name)


@needs_lm_eval
@pytest.mark.parametrize("fresh", ["wheel"], indirect=True)
def test_the_module_needs_no_hook(fresh: Environment) -> None:
    arguments = f"pretrained={needle.FOLDER},cache=local,cache_sink_tokens=4"
    command = ["--model", "hf", "--model_args", arguments, *NEEDLE, "--tasks", "needle"]
    run = fresh.run("-m", "qada_cache.lm_eval", *command, QADA_LM_EVAL_HOOK="0", PYTHONPATH=HELPERS)
    assert run.returncode == 0, run.stderr
    assert "|cache_sparsity" in run.stdout


@needs_lm_eval
def test_processes_that_would_each_run_all_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a launcher's are on CPUs, unless accelerate is told that they compute there."""
    from qada_cache.lm_eval import QAdALM

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"every process would run all requests.*ACCELERATE_USE_CPU=true"):
        QAdALM(str(needle.FOLDER), device="cpu")


@needs_lm_eval
@pytest.mark.parametrize("fresh", ["wheel"], indirect=True)
def test_hflm_without_cache_is_untouched(fresh: Environment) -> None:
    code = f"""
import sys
from lm_eval.models.huggingface import HFLM
def state():
    return {{name: value for name, value in vars(HFLM).items() if name != "__new__"}}
before = state()
lm = HFLM({str(needle.FOLDER)!r}, device="cpu")
assert type(lm) is HFLM and "qada_cache" not in sys.modules
lm = HFLM({str(needle.FOLDER)!r}, device="cpu", cache="qada")
assert type(lm).__mro__[1] is HFLM and type(lm).__name__ == "QAdALM"
assert state() == before
assert HFLM.__module__ == "lm_eval.models.huggingface"
assert type(sys.modules[HFLM.__module__].__loader__).__name__ == "SourceFileLoader"
import lm_eval.models  # the name of its own, in lm-eval's registry
from lm_eval.api.registry import get_model
assert get_model("hf-qada") is type(lm) and get_model("hf") is HFLM
"""
    run = fresh.run("-c", code)
    assert run.returncode == 0, run.stderr


def test_an_interpreter_without_lm_eval_starts_as_ever(bare: Environment) -> None:
    loaded = "import sys; print(*sorted(sys.modules))"
    without = set(bare.code(loaded, QADA_LM_EVAL_HOOK="0").split())
    assert set(bare.code(loaded).split()) - without == {"_qada_cache_startup"}
    assert bare.code("import sys; print(len(sys.meta_path))", QADA_LM_EVAL_HOOK="0") == "3"
    code = """
import importlib.util
assert importlib.util.find_spec("lm_eval") is None
try:
    import lm_eval.models.huggingface
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert bare.code(code) == "lm_eval"


def test_the_wheel_has_every_task(bare: Environment) -> None:
    def tasks(folder: Path) -> set[str]:
        files = (folder / "qada_cache" / "lm_eval" / "tasks").rglob("*")
        return {file.relative_to(folder).as_posix() for file in files if file.suffix in (".yaml", ".py")}

    assert tasks(bare.site_packages) == tasks(REPOSITORY)
    assert "qada_cache/lm_eval/tasks/long_few_shot/long_gsm8k.yaml" in tasks(REPOSITORY)


def test_starting_costs_less_than_a_millisecond(bare: Environment) -> None:
    code = """
import time
start = time.perf_counter()
import _qada_cache_startup
_qada_cache_startup.install()
print(time.perf_counter() - start)
"""
    assert min(float(bare.code(code, QADA_LM_EVAL_HOOK="0")) for _ in range(9)) < 1e-3


@pytest.fixture
def other_lm_eval(tmp_path: Path) -> str:
    """The folder of a package by the name of lm_eval, of another version: its modules hold other things."""
    package = tmp_path / "lm_eval"
    (package / "models").mkdir(parents=True)
    (package / "tasks").mkdir()
    for name in ("__init__", "models/__init__", "tasks/__init__", "tasks/manager"):
        (package / f"{name}.py").write_text("")
    (package / "models" / "huggingface.py").write_text(
        "class HFLM:\n    def __init__(self, pretrained, **kwargs):\n        self.kwargs = kwargs\n"
    )
    return str(tmp_path)


def test_other_lm_evals_and_other_finders(bare: Environment, other_lm_eval: str) -> None:
    code = """
import sys

class Old:  # a finder of before Python 3.4
    def find_module(self, name, path=None):
        return None

class Loader:  # one that takes no attributes
    __slots__ = ("inner",)
    def __init__(self, inner):
        self.inner = inner
    def create_module(self, spec):
        return self.inner.create_module(spec)
    def exec_module(self, module):
        self.inner.exec_module(module)

class Other:  # one that finds lm_eval's modules itself, before the path finder does
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("lm_eval.models.huggingface", "lm_eval.tasks.manager"):
            import importlib.machinery
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            spec.loader = Loader(spec.loader)
            return spec

sys.meta_path[1:1] = [Old(), Other]
import lm_eval.models, lm_eval.tasks.manager
from lm_eval.models.huggingface import HFLM
assert HFLM("x", dtype="auto").kwargs == {"dtype": "auto"}
try:
    HFLM("x", cache="qada")  # asked for by name, what is missing is said
except ModuleNotFoundError as error:
    print(error.name)
"""
    run = bare.run("-W", "ignore", "-c", code, PYTHONPATH=other_lm_eval)
    assert (run.returncode, run.stderr, run.stdout.strip()) == (0, "", "lm_eval.evaluator")  # which this one lacks
