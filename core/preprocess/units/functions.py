"""References to user functions, and the processor that applies one to steps, rows or episodes."""

from __future__ import annotations

import builtins
import difflib
import importlib
import os
import pickle
import shlex
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from importlib.util import decode_source
from pathlib import Path
from typing import Any, TypeAlias, get_args

import cloudpickle

from ...errors import UsageError
from ...format import digest_file, fs, read_regular
from ..failures import error_text
from ..processor import Context, LoadedProcessor, Processor, Unit
from .fingerprints import fingerprint_of
from .modules import imported_modules, only_from

__all__ = [
    "ChunkFunction",
    "FileFunction",
    "FunctionProcessor",
    "GivenFunction",
    "ModuleFunction",
    "PickledFunction",
    "find_function",
]

Loaded: TypeAlias = Callable[[Any], Any]

_IN_PROCESS = "say num_workers=0 to run it in this process, or put it into a file and name it FILE.py:NAME"


class ChunkFunction(ABC):
    """A function by reference. `label` is how people name it; loading it may run the user's code."""

    label: str

    @abstractmethod
    def load(self) -> Loaded:
        """Return the function itself, or raise UsageError."""

    def inputs(self) -> dict[str, str]:
        """Digests of the files that decide what the function does; empty where they are not known."""
        return {}

    def fingerprint(self) -> str:
        """Tell a function without `inputs` apart from others of its name, as far as that can be seen; else empty."""
        return ""

    def user_modules(self) -> frozenset[str]:
        """Top-level names of the modules that `inputs` covers; a run has to import them anew."""
        return frozenset()

    def portable(self) -> ChunkFunction:
        """Return an equal reference that can be pickled."""
        return self


@dataclass(frozen=True, slots=True)
class FileFunction(ChunkFunction):
    """`FILE.py:NAME`. The file is run anew at each load, with its own folder on the import path."""

    path: Path
    name: str

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"{self.path.name}:{self.name}"

    def inputs(self) -> dict[str, str]:
        """Digests of the file and of those below its folder that its import statements lead to.

        Not covered, so that a change there goes unnoticed: what the file imports without such a statement
        (`importlib.import_module`, a changed `sys.path`), what is installed elsewhere, and files it reads.
        """
        files = (self.path, *imported_modules(self.path).values())
        return {Path(os.path.relpath(file, self.path.parent)).as_posix(): digest_file(file) for file in files}

    def user_modules(self) -> frozenset[str]:
        """Top-level names of the modules below the file's folder that its import statements lead to."""
        return frozenset(name.partition(".")[0] for name in imported_modules(self.path))

    def load(self) -> Loaded:
        folder = str(self.path.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        module = types.ModuleType(f"preprocess_{self.path.stem}")
        module.__file__ = str(self.path)
        sys.modules[module.__name__] = module  # dataclasses and pickle look their module up
        importlib.invalidate_caches()  # a module beside it may be younger than what the import system remembers
        try:
            code = compile(decode_source(read_regular(self.path)), str(self.path), "exec")
            builtins.exec(code, module.__dict__)
        except Exception as error:
            raise UsageError(f"{self.path} cannot be imported: {error_text(error)}") from error
        return _attribute(module, self.name, str(self.path))


@dataclass(frozen=True, slots=True)
class ModuleFunction(ChunkFunction):
    """`module:name`, of an installed module or one in `folder`, from which nothing else is imported."""

    module: str
    name: str
    folder: Path

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"{self.module}:{self.name}"

    def load(self) -> Loaded:
        try:
            with only_from(self.folder, self.module.partition(".")[0]):
                module = importlib.import_module(self.module)
        except Exception as error:
            raise UsageError(
                f"module {self.module} cannot be imported: {error_text(error)}", hint=self._beside(error)
            ) from error
        return _attribute(module, self.name, f"module {self.module}")

    def _beside(self, error: Exception) -> str:
        """Say how a module that it misses, and that is in the folder too, is found."""
        missed = error.name if isinstance(error, ModuleNotFoundError) else None
        file = self.folder.joinpath(*self.module.split(".")).with_suffix(".py")
        found = missed and PathFinder.find_spec(missed.partition(".")[0], [str(self.folder)])
        if not found or not file.is_file():
            return ""
        place = shlex.quote(f"{file.relative_to(self.folder)}:{self.name}")
        return f"name the file, which also makes the modules in its folder importable: {place}"


@dataclass(frozen=True, slots=True)
class GivenFunction(ChunkFunction):
    """A callable at hand."""

    function: Loaded

    @property
    def label(self) -> str:  # type: ignore[override]
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return f"{getattr(self.function, '__module__', None) or type(self.function).__module__}:{name}"

    def load(self) -> Loaded:
        return self.function

    def fingerprint(self) -> str:
        """A digest of the function's code and of what it encloses."""
        return fingerprint_of(self.function)

    def portable(self) -> ChunkFunction:
        """Pickle the function: by its name where workers can import it, else with its code and what it encloses."""
        try:
            return PickledFunction(self.label, cloudpickle.dumps(self.function), self.fingerprint())
        except Exception as error:
            raise UsageError(
                f"{self.label} cannot be sent to worker processes: {error_text(error)}", hint=_IN_PROCESS
            ) from error


@dataclass(frozen=True, slots=True)
class PickledFunction(ChunkFunction):
    """A callable that this very run pickled; no pickle is ever read from a file."""

    label: str
    data: bytes
    made_of: str = ""

    def fingerprint(self) -> str:
        """That of the function which was pickled."""
        return self.made_of

    def load(self) -> Loaded:
        try:
            function: Loaded = pickle.loads(self.data)
        except Exception as error:
            raise UsageError(
                f"{self.label} does not load in a worker process: {error_text(error)}", hint=_IN_PROCESS
            ) from error
        return function


def find_function(function: Loaded | str) -> ChunkFunction:
    """Understand a callable, `FILE.py:NAME` or `module:name`, without running any of the user's code.

    UsageError for what is none of these, and for a file that is not there.
    """
    if callable(function):
        return GivenFunction(function)
    place, _, name = str(function).rpartition(":")
    if not place or not name or "\0" in place:
        hint = "write it like FILE.py:NAME or module:name"
        raise UsageError(f"the function {function!r} is not understood", hint=hint)
    if not place.endswith(".py"):
        return ModuleFunction(place, name, Path.cwd())
    path = fs.expanded(place).absolute()
    if not path.is_file():
        raise UsageError(f"there is no file {place}, which should hold the function {name!r}")
    return FileFunction(path, name)


def _attribute(module: types.ModuleType, name: str, place: str) -> Loaded:
    found: Any = module
    for part in name.split("."):
        known: Mapping[str, Any] = vars(found) if hasattr(found, "__dict__") else {}
        if not hasattr(found, part):
            raise UsageError(f"{place} has no function {name!r}{_near(part, known)}")
        found = getattr(found, part)
    if not callable(found):
        kind = type(found).__name__
        article = "an" if kind[0] in "aeiouAEIOU" else "a"
        raise UsageError(f"{name!r} in {place} is {article} {kind}, a function is expected")
    loaded: Loaded = found
    return loaded


def _near(part: str, known: Mapping[str, Any]) -> str:
    functions = [name for name, value in known.items() if callable(value) and not name.startswith("__")]
    near = difflib.get_close_matches(part, functions, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    own = [name for name in functions if getattr(known[name], "__module__", None) == known.get("__name__")]
    return f"; it has {', '.join(own)}" if own else ""


@dataclass(frozen=True)
class FunctionProcessor(Processor):
    """A function by reference, and what one call of it sees.

    `unit` `step`: K rows at once, `[K]`, and it returns any number of rows. `row`: one row, `[]`, and it returns one.
    `episode`: a whole episode, `[T]`, and it returns any number of rows. `vmap` is for unit `row`: True puts all rows
    of a block through `torch.vmap`, False calls the function row by row, None lets `probe` decide.

    UsageError for a unit that there is not, and for `vmap` with another unit than `row`.
    """

    function: ChunkFunction
    unit: Unit = "step"
    vmap: bool | None = None
    whole_episodes: bool = field(init=False, default=False)
    needs_probing: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise UsageError(f"unit {self.unit!r} is not known; known are {', '.join(get_args(Unit))}")
        if self.vmap and self.unit != "row":
            raise UsageError(f"vmap is for functions of one row, and the unit is {self.unit}", hint="say unit row")
        object.__setattr__(self, "whole_episodes", self.unit == "episode")
        object.__setattr__(self, "needs_probing", self.unit == "row" and self.vmap is None)

    @property
    def label(self) -> str:
        """The function, as people name it."""
        return self.function.label

    def load(self, context: Context) -> LoadedProcessor:
        """Load the function; UsageError where that cannot be done."""
        from .batch import EpisodeUnit, StepUnit
        from .row import RowUnit
        from .user_function import UserFunction  # whoever only describes the work needs no torch

        function = UserFunction(self.label, self.function.load())
        if self.unit == "row":
            return RowUnit(function, context.seed, self.vmap)
        return (StepUnit if self.unit == "step" else EpisodeUnit)(function, context.seed)

    def arguments(self) -> dict[str, Any]:
        """The function's name and the unit; for unit `row` whether it runs under vmap, None while that is open."""
        vmap = {"vmap": self.vmap} if self.unit == "row" else {}
        return {"function": self.label, "unit": self.unit, **vmap}

    def inputs(self) -> dict[str, str]:
        """Digests of the file of the function and of what it imports from its folder; empty for other functions."""
        return self.function.inputs()

    def keeps_rows(self) -> bool:
        """True for functions of a single row."""
        return self.unit == "row"

    def fingerprint(self) -> str:
        """A digest of what a callable is made of, as far as it can be seen; empty for other functions."""
        return self.function.fingerprint()

    def portable(self) -> Processor:
        """Return an equal work that can be pickled."""
        return replace(self, function=self.function.portable())

    def user_modules(self) -> frozenset[str]:
        """Top-level names of the modules beside the function's file that a run has to import anew."""
        return self.function.user_modules()

    def with_probe(self, answer: bool) -> Processor:
        """Return the work that runs under vmap or not."""
        return replace(self, vmap=answer)
