"""References to user functions, and the processor that applies one."""

from __future__ import annotations

import builtins
import importlib
import os
import pickle
import shlex
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from importlib.util import decode_source
from pathlib import Path
from typing import Any, TypeAlias, get_args

import cloudpickle

from ...errors import UsageError, did_you_mean
from ...format import fs
from ...format.digest import digest_file, read_regular
from ...ted.schema import Field
from ..failures import error_text
from ..processor import Context, LoadedProcessor, Processor, Unit
from .fingerprints import fingerprint_of
from .modules import imported_modules, only_from

Loaded: TypeAlias = Callable[[Any], Any]

_IN_PROCESS = "use num_workers=0 to run it in this process, or put it into a file and name it FILE.py:NAME"


class ChunkFunction(ABC):
    """A reference to a function. `label` is its name in messages; loading it may run user code."""

    label: str

    @abstractmethod
    def load(self) -> Loaded:
        """Return the function; UsageError where that fails."""

    def inputs(self) -> dict[str, str]:
        """Digests of the files that define the function; empty where they are not known."""
        return {}

    def fingerprint(self) -> str:
        """A digest that differs between functions of one name and without `inputs`; else empty."""
        return ""

    def user_modules(self) -> frozenset[str]:
        """Top-level names of the modules that `inputs` covers, which each run imports again."""
        return frozenset()

    def portable(self) -> ChunkFunction:
        """Return an equal reference that can be pickled."""
        return self


@dataclass(frozen=True, slots=True)
class FileFunction(ChunkFunction):
    """`FILE.py:NAME`. Each load runs the file, with its folder on the import path."""

    path: Path
    name: str

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"{self.path.name}:{self.name}"

    def inputs(self) -> dict[str, str]:
        """Digests of the file and of the files below its folder that its import statements reach.

        Changes elsewhere are not noticed: imports by other means (`importlib.import_module`, a changed `sys.path`),
        installed modules, and files that the function reads.
        """
        files = (self.path, *imported_modules(self.path).values())
        return {Path(os.path.relpath(file, self.path.parent)).as_posix(): digest_file(file) for file in files}

    def user_modules(self) -> frozenset[str]:
        """Top-level names of the modules below the file's folder that its import statements reach."""
        return frozenset(name.partition(".")[0] for name in imported_modules(self.path))

    def load(self) -> Loaded:
        folder = str(self.path.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        module = types.ModuleType(f"preprocess_{self.path.stem}")
        module.__file__ = str(self.path)
        sys.modules[module.__name__] = module  # for dataclasses and pickle
        importlib.invalidate_caches()  # a module in the folder may be newer than the import system's caches
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
                f"module {self.module} cannot be imported: {error_text(error)}", hint=self._hint(error)
            ) from error
        return _attribute(module, self.name, f"module {self.module}")

    def _hint(self, error: Exception) -> str:
        """How to import a module that is missing but exists in the same folder; empty for other errors."""
        missed = error.name if isinstance(error, ModuleNotFoundError) else None
        file = self.folder.joinpath(*self.module.split(".")).with_suffix(".py")
        found = missed and PathFinder.find_spec(missed.partition(".")[0], [str(self.folder)])
        if not found or not file.is_file():
            return ""
        place = shlex.quote(f"{file.relative_to(self.folder)}:{self.name}")
        return f"name the file, which also makes the modules in its folder importable: {place}"


@dataclass(frozen=True, slots=True)
class GivenFunction(ChunkFunction):
    """A callable object."""

    function: Loaded

    @property
    def label(self) -> str:  # type: ignore[override]
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return f"{getattr(self.function, '__module__', None) or type(self.function).__module__}:{name}"

    def load(self) -> Loaded:
        return self.function

    def fingerprint(self) -> str:
        """A digest of the function's code and its values, see `fingerprint_of`."""
        return fingerprint_of(self.function)

    def portable(self) -> ChunkFunction:
        """Pickle the function: by name where workers can import it, else with its code and closure."""
        try:
            return PickledFunction(self.label, cloudpickle.dumps(self.function), self.fingerprint())
        except Exception as error:
            raise UsageError(
                f"{self.label} cannot be sent to worker processes: {error_text(error)}", hint=_IN_PROCESS
            ) from error


@dataclass(frozen=True, slots=True)
class PickledFunction(ChunkFunction):
    """A callable that this run has pickled for its workers."""

    label: str
    data: bytes
    made_of: str = ""

    def fingerprint(self) -> str:
        """The fingerprint of the callable."""
        return self.made_of

    def load(self) -> Loaded:
        try:
            function: Loaded = pickle.loads(self.data)  # safe: from `GivenFunction.portable` in the parent, no file
        except Exception as error:
            raise UsageError(
                f"{self.label} does not load in a worker process: {error_text(error)}", hint=_IN_PROCESS
            ) from error
        return function


def find_function(function: Loaded | str) -> ChunkFunction:
    """Return the reference for a callable, `FILE.py:NAME` or `module:name`, without running user code.

    UsageError for anything else and for a missing file.
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
        raise UsageError(f"{name!r} in {place} is {article} {kind}, expected a function")
    loaded: Loaded = found
    return loaded


def _near(part: str, known: Mapping[str, Any]) -> str:
    functions = [name for name, value in known.items() if callable(value) and not name.startswith("__")]
    if meant := did_you_mean(part, functions):
        return meant
    own = [name for name in functions if getattr(known[name], "__module__", None) == known.get("__name__")]
    return f"; it has {', '.join(own)}" if own else ""


@dataclass(frozen=True)
class FunctionProcessor(Processor):
    """Applies a user function in one of three units.

    `step`: K rows, `[K]`, to any number of rows. `row`: one row, `[]`, to one row. `episode`: a whole episode, `[T]`,
    to any number of rows. `vmap` is for unit `row`: True calls the function once for all rows of a block with
    `torch.vmap`, False calls it row by row, None decides that with `probe`.

    UsageError for an unknown unit and for `vmap` with another unit than `row`.
    """

    function: ChunkFunction
    unit: Unit = "step"
    vmap: bool | None = None
    whole_episodes: bool = field(init=False, default=False)
    needs_probing: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise UsageError(f"unit {self.unit!r} is unknown; known: {', '.join(get_args(Unit))}")
        if self.vmap and self.unit != "row":
            raise UsageError(f"vmap is for functions of one row, and the unit is {self.unit}", hint="use unit row")
        object.__setattr__(self, "whole_episodes", self.unit == "episode")
        object.__setattr__(self, "needs_probing", self.unit == "row" and self.vmap is None)

    @property
    def label(self) -> str:
        """The function's name in messages."""
        return self.function.label

    def load(self, context: Context) -> LoadedProcessor:
        """Load the function; UsageError where that fails."""
        from .batch import EpisodeUnit, StepUnit
        from .row import RowUnit
        from .user_function import UserFunction  # describing the processor needs no torch

        function = UserFunction(self.label, self.function.load())
        if self.unit == "row":
            return RowUnit(function, context.seed, self.vmap)
        return (StepUnit if self.unit == "step" else EpisodeUnit)(function, context.seed)

    def arguments(self) -> dict[str, Any]:
        """The function's name and the unit; for unit `row` also `vmap`, None while it is not decided."""
        vmap = {"vmap": self.vmap} if self.unit == "row" else {}
        return {"function": self.label, "unit": self.unit, **vmap}

    def inputs(self) -> dict[str, str]:
        """Digests of the function's file and its imports from the same folder; empty for other functions."""
        return self.function.inputs()

    def notes(self, fields: Sequence[Field], result: Sequence[Field]) -> tuple[str, ...]:
        """Which element types the function changed, often unintended: a factor of float64 is enough."""
        before = {one.key: one.dtype for one in fields}
        changed = [
            f"{one.name} from {before[one.key]} to {one.dtype}"
            for one in result
            if before.get(one.key, one.dtype) != one.dtype
        ]
        return (f"{self.label} changes the element type of {', '.join(changed)}",) if changed else ()

    def keeps_rows(self) -> bool:
        """Whether the unit is `row`."""
        return self.unit == "row"

    def fingerprint(self) -> str:
        """The fingerprint of a callable; empty for other functions."""
        return self.function.fingerprint()

    def portable(self) -> Processor:
        """Return an equal processor that can be pickled."""
        return replace(self, function=self.function.portable())

    def user_modules(self) -> frozenset[str]:
        """Top-level names of the modules next to the function's file that each run imports again."""
        return self.function.user_modules()

    def with_probe(self, answer: bool) -> Processor:
        """Return the processor with `vmap` decided."""
        return replace(self, vmap=answer)
