"""rbtool: offline-RL datasets in one clear form, fast to train from.

One function a verb (`rbtool.convert`, `rbtool.inspect`, …) does what the command line does and returns the
document that `--json` prints. Importing rbtool imports no torch: each name below loads its module when first used.
"""

from __future__ import annotations

import os
import sys


def _leave_current_folder() -> None:
    """Take the current folder off the import path where `python -m rbtool` put it: a `json.py` there would run.

    It stays where this package itself was found there. Called before anything is imported that may lie there.
    """
    here = os.getcwd()  # noqa: PTH109  # pathlib may not be loaded yet
    started = sys.orig_argv[-len(sys.argv)] if sys.argv[:1] == ["-m"] else ""
    ours = started == __name__ or (started.startswith("-") and started.endswith(f"m{__name__}"))
    if ours and sys.path[:1] == [here] and not sys.flags.safe_path and os.path.dirname(__path__[0]) != here:  # noqa: PTH120
        del sys.path[0]


_leave_current_folder()

import importlib  # noqa: E402
from collections.abc import Iterable  # noqa: E402
from typing import Any  # noqa: E402

from .core import __version__  # noqa: E402, F401


def _declared() -> tuple[dict[str, str], dict[str, str]]:
    """Read `__init__.pyi`: the module of each name, and the names that have another one in their module."""
    homes: dict[str, str] = {}
    renamed: dict[str, str] = {}
    with open(f"{__file__.removesuffix('c')}i", encoding="utf-8") as stub:  # see above
        for line in stub:
            words = line.split()
            if words[:1] == ["from"]:
                homes[words[-1]] = words[1]
            elif words[1:2] == ["="]:
                renamed[words[0]] = words[2]
    return homes, renamed


_HOMES, _RENAMED = _declared()

__all__ = sorted({*_HOMES} - {*_RENAMED.values()})  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    attribute = _RENAMED.get(name, name)
    if attribute not in _HOMES or name in _RENAMED.values():
        if not name.startswith("_") and _DeepPaths.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f".{name}", __name__)
        from .core.torchrl_names import MISSING

        why = f": {MISSING[name]}" if name in MISSING else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{why}")
    home = _HOMES[attribute]
    if home == ".core.verbs":
        found = importlib.import_module(f"{home}.{name}", __name__)
    else:
        found = getattr(importlib.import_module(home, __name__), attribute)
    globals()[name] = found
    return found


def __dir__() -> Iterable[str]:
    return sorted({*__all__, *_RENAMED})


def _own_module(inner: str) -> Any:
    """The spec of a module of `rbtool.converters`; None if this installation lacks it."""
    from importlib.util import find_spec

    try:
        return find_spec(f".converters.{inner}", __name__)
    except ModuleNotFoundError:
        return None


class _DeepPaths:
    """Finds TorchRL's modules, such as `rbtool.data.replay_buffers.samplers`; each offers all names of rbtool.

    So code that imports from TorchRL's deep paths changes one word. Type checkers do not see these modules:
    `rbtool migrate` makes `from rbtool import …` of such imports. `rbtool.adapters` and the modules in it are those of
    `rbtool.converters.adapters`.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of such a module, None for any other; called after all other finders."""
        package, _, inner = name.partition(".")
        if package != __name__:
            return None
        from importlib.machinery import ModuleSpec

        from .core.torchrl_names import MODULES

        known = not MODULES.isdisjoint({f"torchrl.{inner}", f"torchrl.data.{inner}"})
        known = known or (inner.startswith("adapters") and _own_module(inner) is not None)
        return ModuleSpec(name, _DeepPaths, is_package=True) if known else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: Any) -> None:
        """Leave it to Python."""

    @staticmethod
    def exec_module(module: Any) -> None:
        """Give a module what it offers."""
        inner = module.__name__.removeprefix(f"{__name__}.")
        if inner.startswith("adapters."):
            sys.modules[module.__name__] = importlib.import_module(f".converters.{inner}", __name__)
        elif inner == "adapters":
            own = importlib.import_module(f".converters.{inner}", __name__)
            module.__doc__, module.__all__ = own.__doc__, own.__all__
            module.__getattr__, module.__dir__ = lambda name: getattr(own, name), lambda: own.__all__
        else:
            module.__getattr__, module.__dir__, module.__all__ = __getattr__, __dir__, __all__


sys.meta_path.append(_DeepPaths)  # type: ignore[arg-type]
