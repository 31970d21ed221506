"""Three post-import hooks, for `lm_eval --model hf --model_args ...,cache=qada` with stock lm-eval.

Installing the package puts this file into site-packages as `_qada_cache_startup`, outside the package. A `.pth` file
beside it has every interpreter call `install()`, unless QADA_LM_EVAL_HOOK=0. So this module imports nothing but `sys`
(not qada_cache, hence not torch). The hooks import qada_cache only for a model with a `cache` argument.
"""

import sys


class _Loader:
    """A module's own loader, except that `after(module)` runs when the module has been executed."""

    def __init__(self, inner, after):
        self.inner, self.after, self.create_module = inner, after, inner.create_module

    def exec_module(self, module):
        # Before its code runs: nobody is to find anything but the module's own loader.
        module.__loader__ = module.__spec__.loader = self.inner
        self.inner.exec_module(module)
        self.after(module)


class _Finder:
    """Finds nothing itself: has the other finders find the modules in `_AFTER`, and wraps their loaders."""

    is_qada_cache = True

    def find_spec(self, name, path=None, target=None):
        if name not in _AFTER:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, _AFTER[name])  # type: ignore[assignment]  # abc is not imported
        return spec


def _add_model(models):
    """After `lm_eval.models`: the name `hf-qada`."""
    registry = getattr(sys.modules.get("lm_eval.api.registry"), "model_registry", None)
    if registry is not None and "hf-qada" not in registry:
        registry.register("hf-qada", target="qada_cache.lm_eval:QAdALM")


def _teach_hflm(huggingface):
    """After `lm_eval.models.huggingface`: `HFLM(cache=...)` makes our subclass; without `cache` nothing changes."""
    hflm = getattr(huggingface, "HFLM", None)
    if hflm is None:
        return
    inherited = hflm.__new__

    def new(cls, *args, **kwargs):
        if cls is hflm and "cache" in kwargs:
            from qada_cache.lm_eval import QAdALM

            cls = QAdALM
        elif cls is hflm and any(name.startswith("cache_") and name != "cache_dir" for name in kwargs):
            from qada_cache.lm_eval import KEYWORDS

            if ours := [name for name in KEYWORDS if name in kwargs]:
                raise ValueError(f"{', '.join(ours)} without cache=: add cache=qada, which takes them")
        return inherited(cls) if inherited is object.__new__ else inherited(cls, *args, **kwargs)

    hflm.__new__ = staticmethod(new)


def _add_tasks(manager):
    """After `lm_eval.tasks.manager`: our tasks are found by name like lm-eval's own, which win over ours."""
    from importlib.util import find_spec
    from pathlib import Path

    index, package = getattr(manager, "TaskIndex", None), find_spec("qada_cache")
    if index is None or package is None:
        return
    build, defaults = index.build, Path(manager.__file__).parent
    ours = [Path(folder) / "lm_eval" / "tasks" for folder in package.submodule_search_locations or ()]

    def build_with_ours(paths, **kwargs):
        paths = list(paths)
        return build([*ours, *paths] if defaults in paths else paths, **kwargs)

    index.build = staticmethod(build_with_ours)


_AFTER = {
    "lm_eval.models": _add_model,
    "lm_eval.models.huggingface": _teach_hflm,
    "lm_eval.tasks.manager": _add_tasks,
}


def install():
    """Have lm-eval understand `cache=`, know `hf-qada` and find our tasks, once it is imported. Idempotent."""
    if any(getattr(finder, "is_qada_cache", False) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for name, after in _AFTER.items():
        if name in sys.modules:
            after(sys.modules[name])
