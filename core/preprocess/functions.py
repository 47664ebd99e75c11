"""User functions: references to them, the processor that applies one, and fingerprints of their code.

A fingerprint is a digest of a function's code and of everything that the code refers to. It is equal in every process.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copyreg
import functools
import hashlib
import importlib
import json
import os
import pickle
import shlex
import sys
import types
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import decode_source
from pathlib import Path
from typing import Any, TypeAlias, get_args

import cloudpickle
import numpy as np

from ..engine.tasks import error_text
from ..errors import UsageError, WrongKindError, did_you_mean
from ..format import fs
from ..format.files import digest_file, digest_text, read_regular
from ..ted.schema import Field
from .processor import Context, LoadedProcessor, Processor, Unit

_PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes, range)

_TENSORS = (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"))


def fingerprint_of(function: Any) -> str:
    """Return a digest of a callable's code, constants, defaults, closure and the globals that it uses, without calling
    it.

    Classes, and the classes of objects, are digested with their methods, attributes and base classes; classes of
    installed packages only by their names. Equal code and data give equal fingerprints in every process. The digest
    does not reflect changes in C code, in modules that the code uses, or in objects that cannot be pickled and keep
    their data outside of their attributes.
    """
    return _Digests().of(function).hex()


class _Digests:
    """Digests of values by their contents. Each value is visited once.

    A reference from a value to itself or to one that contains it is digested as the depth of that value, which ends the
    recursion.
    """

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, bytes]] = {}  # keeps a reference to the value, so that its id stays unique
        self._open: list[Any] = []  # the values that contain the current one, outermost first

    def of(self, value: Any) -> bytes:
        """Return the digest of a value."""
        kind = type(value)
        if kind in _PLAIN:
            return _digest(kind, [repr(value).encode("utf-8", "surrogatepass")])
        for depth, outer in enumerate(self._open):
            if outer is value:
                return _digest(kind, [str(depth).encode()])
        if id(value) not in self._done:
            self._open.append(value)
            if kind in (set, frozenset):
                parts = sorted(map(self.of, value))
            else:
                parts = [part if type(part) is _Raw else self.of(part) for part in _contents(value)]
            self._open.pop()
            self._done[id(value)] = value, _digest(kind, parts)
        return self._done[id(value)][1]


def _digest(kind: type, parts: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in (f"{kind.__module__}.{kind.__qualname__}".encode(), *parts):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


class _Raw(bytes):
    """Bytes that are digested without their type."""


def _contents(value: Any) -> Iterator[Any]:
    """Yield the values and raw bytes that a value consists of.

    The exact type decides: a subclass may override the methods that are called here with user code.
    """
    kind = type(value)
    if kind is types.CodeType:
        yield from (value.co_code, value.co_consts, value.co_names, value.co_varnames, value.co_flags)
    elif kind is types.FunctionType:
        yield from (value.__code__, value.__defaults__, value.__kwdefaults__, value.__closure__)
        yield from _globals_of(value.__code__, value.__globals__)
    elif kind is types.CellType:
        try:
            yield value.cell_contents
        except ValueError:
            yield None  # not filled yet
    elif kind is types.MethodType:
        yield from (value.__func__, value.__self__)
    elif kind is functools.partial:
        yield from (value.func, value.args, value.keywords)
    elif kind in (list, tuple):
        yield from value
    elif kind is dict:
        for key, item in value.items():
            yield from (key, item)
    elif kind is np.ndarray and not value.dtype.hasobject:
        yield from (str(value.dtype), value.shape, _Raw(np.ascontiguousarray(value).tobytes()))
    elif kind in (staticmethod, classmethod):
        yield value.__func__
    elif kind is property:
        yield from (value.fget, value.fset, value.fdel)
    elif isinstance(value, type):
        yield from _class(value)
    elif isinstance(value, types.ModuleType | types.BuiltinFunctionType):
        yield str(getattr(value, "__qualname__", None) or value.__name__)
    else:
        yield from _object(value)


def _globals_of(code: types.CodeType, known: dict[str, Any]) -> Iterator[Any]:
    """Yield the names and values of the globals that a function and the functions inside it use."""
    for name in code.co_names:
        if name in known:
            yield from (name, known[name])
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _globals_of(constant, known)


_NOT_OF_THE_CODE = {
    "__abstractmethods__", "__annotate_func__", "__annotations__", "__annotations_cache__", "__dict__", "__doc__",
    "__firstlineno__", "__module__", "__slotnames__", "__static_attributes__", "__weakref__", "_abc_impl",
}  # fmt: skip


def _class(kind: type) -> Iterator[Any]:
    """Yield the name of a class and, unless it is of an installed package, its bases and what its body defines."""
    yield kind.__qualname__
    if _is_installed(kind.__module__):
        return
    yield kind.__bases__
    for name, item in sorted(vars(kind).items()):  # decorators may add methods in the order of a set
        if name not in _NOT_OF_THE_CODE:
            function: Any = item.fget if type(item) is property else getattr(item, "__func__", item)
            yield from (name, function.__qualname__ if _comes_from_package(function) else item)


def _comes_from_package(function: Any) -> bool:
    """Whether a decorator or a base class of an installed package added this function to a class."""
    if not isinstance(function, types.FunctionType):
        return False
    return _is_installed(function.__globals__.get("__name__", "")) or _in_packages(function.__code__.co_filename)


@functools.cache
def _is_installed(module: str) -> bool:
    """Whether a module belongs to Python, to this package or to another installed package, not to the user's files."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == __name__.partition(".")[0]:
        return True
    return _in_packages(getattr(sys.modules.get(module), "__file__", None) or "")


def _in_packages(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _object(value: Any) -> Iterator[Any]:
    """Yield the type, the `__call__`, the attributes and other data of an object; for a dense tensor, its elements."""
    kind = type(value)
    if (kind.__module__, kind.__name__) in _TENSORS and value.device.type != "meta" and not value.is_sparse:
        yield from (str(value.dtype), tuple(value.shape))
        bits = value.detach().cpu().contiguous().resolve_conj().resolve_neg().view(-1)
        yield _Raw(bits.view(sys.modules["torch"].uint8).numpy().tobytes())
        return
    yield kind
    yield from (vars(base).get("__call__") for base in kind.__mro__[:-1])
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        attributes = None
    yield attributes
    if not attributes:
        yield from _reduced(value)


_REDUCERS = ("__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs_ex__", "__getnewargs__")


def _reduced(value: Any) -> Iterator[Any]:
    """Yield the data that an object has outside of its attributes, such as slots and the items of containers.

    These are the parts that pickle would store. Methods of users are not called: an object whose class defines how it
    is pickled has no such data. Nor has a generator of random numbers, whose state changes with every run.
    """
    kind = type(value)
    if kind.__module__.startswith("numpy.random.") or (kind.__module__, kind.__name__) == ("torch._C", "Generator"):
        return
    methods = (vars(base).get(name) for base in kind.__mro__ for name in _REDUCERS)
    if any(isinstance(method, types.FunctionType) and not _comes_from_package(method) for method in methods):
        return
    try:
        reduce = copyreg.dispatch_table.get(kind)
        found = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception:  # an object that cannot be pickled, such as a lock
        return
    if isinstance(found, tuple):
        yield from (list(part) if isinstance(part, Iterator) else part for part in found[1:])
    else:
        yield found


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
        """A digest of the code of a function that `inputs` does not cover; empty for all others."""
        return ""

    def user_modules(self) -> frozenset[str]:
        """Top-level names of the modules that `inputs` covers, which each run imports again."""
        return frozenset()

    def portable(self) -> ChunkFunction:
        """Return an equal reference that can be pickled."""
        return self


@dataclass(frozen=True, slots=True)
class FileFunction(ChunkFunction):
    """A function that is named `FILE.py:NAME`. Each load runs the file, with its folder on the import path."""

    path: Path
    name: str

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"{self.path.name}:{self.name}"

    def inputs(self) -> dict[str, str]:
        """Digests of the file and of the files below its folder that its import statements reach.

        They do not cover modules that are imported by other means (`importlib.import_module`, a changed `sys.path`),
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
    """A function that is named `module:name`. The module is installed or in `folder`.

    No other module is imported from `folder`.
    """

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

    def fingerprint(self) -> str:
        """A digest of the source files of the module and of the modules that it imports from its own package.

        No module is run. The digest is empty for modules of Python and of installed packages.
        """
        top = self.module.partition(".")[0]
        here = PathFinder.find_spec(top, [str(self.folder)])
        found = here if here is not None and here.loader is not None else PathFinder.find_spec(top) or here
        places = [*(found.submodule_search_locations or ()), found.origin] if found is not None else []
        if not places or _in_packages(str(places[0])) or top in sys.stdlib_module_names:
            return ""
        reached = reached_modules([self.module], Path(str(places[0])).parent)
        own = {name: digest_file(file) for name, file in reached.items() if name.partition(".")[0] == top}
        return digest_text(json.dumps(own))

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
        """The fingerprint of the function, see `fingerprint_of`."""
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
    """A callable that this run has pickled for its workers, with the fingerprint that it had."""

    label: str
    data: bytes
    digest: str = ""

    def fingerprint(self) -> str:
        """The fingerprint of the callable."""
        return self.digest

    def load(self) -> Loaded:
        try:
            # Safe: the bytes come from `GivenFunction.portable` in the parent process, not from a file.
            function: Loaded = pickle.loads(self.data)
        except Exception as error:
            raise UsageError(
                f"{self.label} does not load in a worker process: {error_text(error)}", hint=_IN_PROCESS
            ) from error
        return function


class CloudpickleWrapper:
    """Makes a function picklable, even a lambda or a closure, so that it can be sent to another process.

    The code of the function is pickled with it. The wrapper is called like the function. The name is TorchRL's.

    Args:
        fn: the function. A wrapper is returned unchanged.

    >>> import pickle
    >>> pickle.loads(pickle.dumps(CloudpickleWrapper(lambda number: number + 1)))(2)
    3
    """

    def __new__(cls, fn: Callable[..., Any]) -> CloudpickleWrapper:
        return fn if isinstance(fn, cls) else super().__new__(cls)

    def __init__(self, fn: Callable[..., Any]) -> None:
        if fn is self:
            return
        if not callable(fn):
            raise WrongKindError(f"expected a function, found a {type(fn).__name__}")
        self.fn = fn
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unwrapped, (type(self), cloudpickle.dumps(self.fn))


def _unwrapped(kind: type[CloudpickleWrapper], data: bytes) -> CloudpickleWrapper:
    return kind(pickle.loads(data))  # safe: only called while the user loads a pickle, which may run any code anyway


def find_function(function: Loaded | str) -> ChunkFunction:
    """Return a reference to a callable, or to a function named `FILE.py:NAME` or `module:name`.

    No user code runs. UsageError for anything else and for a missing file.
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

    - `step`: the function takes K rows, `[K]`, and returns any number of rows.
    - `row`: it takes one row, `[]`, and returns one row.
    - `episode`: it takes a whole episode, `[T]`, and returns any number of rows.

    `vmap` is for unit `row`. True: `torch.vmap` calls the function once for all rows of a block. False: the function is
    called row by row. None: `probe` decides between the two.

    UsageError for an unknown unit, and for `vmap` with another unit than `row`.
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
        from .units import EpisodeUnit, RowUnit, StepUnit, UserFunction

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
        """Name the leaves whose element type the function changed: often by accident, as by a factor in float64."""
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
        """Top-level names of the modules next to the function's file, which each run imports anew."""
        return self.function.user_modules()

    def with_probe(self, answer: bool) -> Processor:
        """Return the processor with `vmap` decided."""
        return replace(self, vmap=answer)


_LOADERS = (
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)
_INSTALLED = frozenset(("dist-packages", "site-packages"))


def imported_modules(path: Path) -> dict[str, Path]:
    """Return the modules below the folder of `path` that its import statements reach, directly or indirectly.

    No module is run. Statements inside functions count too. Names are looked up in that folder only, as if it were
    first on the import path. Modules that are imported without a statement are not found.
    """
    return reached_modules(_imports_of(path, ""), path.parent)


def reached_modules(names: Iterable[str], folder: Path) -> dict[str, Path]:
    """Return the modules below a folder that the import of some modules reaches, directly or indirectly, by name."""
    found: dict[str, Path] = {}
    left, looked_up = list(names), dict[str, ModuleSpec | None]()
    while left:
        for spec in _resolve(left.pop(), folder, looked_up):
            if spec.origin is not None and spec.name not in found:
                found[spec.name] = Path(spec.origin)
                left += _imports_of(found[spec.name], spec.parent or "")
    return dict(sorted(found.items()))


def _imports_of(file: Path, package: str) -> Iterator[str]:
    """Yield the dotted names that the import statements of a file may import; none for an invalid file."""
    if file.suffix not in SOURCE_SUFFIXES:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # shown when the file runs
            nodes = list(ast.walk(ast.parse(read_regular(file))))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # reported when the file runs
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, package)
            if base:
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _base(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    kept = parts[: len(parts) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])]) if package and kept else ""


def _resolve(name: str, folder: Path, looked_up: dict[str, ModuleSpec | None]) -> Iterator[ModuleSpec]:
    """Yield the modules that run when a dotted name is imported, outermost first. A part `*` is any submodule."""
    places, full = [str(folder)], ""
    for part in name.split("."):
        names = _submodules(places) if part == "*" else [part]
        specs = [spec for one in names if (spec := _find(f"{full}.{one}".lstrip("."), places, looked_up)) is not None]
        yield from specs
        if len(specs) != 1 or specs[0].submodule_search_locations is None:
            return  # only packages have submodules
        full, places = specs[0].name, list(specs[0].submodule_search_locations)


def _find(name: str, places: list[str], looked_up: dict[str, ModuleSpec | None]) -> ModuleSpec | None:
    if name not in looked_up:
        # Use new finders: the import system's may have an outdated cache of the folder.
        found = (FileFinder(place, *_LOADERS).find_spec(name) for place in places)
        looked_up[name] = next((spec for spec in found if spec is not None), None)
    return looked_up[name]


def _submodules(places: list[str]) -> list[str]:
    names = {entry.name.partition(".")[0] for place in places for entry in Path(place).iterdir()}
    return sorted(name for name in names if name.isidentifier() and name not in ("__init__", "__pycache__"))


@contextlib.contextmanager
def only_from(folder: Path, name: str) -> Iterator[None]:
    """Let imports find one top-level module or package in a folder, as if the folder were first on the import path.

    If the whole folder were on the import path, later imports of `json` or `torch` would find a `json.py` or `torch.py`
    in it.
    """
    finders = _OneModule(name, folder, regular=True), _OneModule(name, folder, regular=False)
    importlib.invalidate_caches()
    sys.meta_path.insert(0, finders[0])
    sys.meta_path.append(finders[1])  # a folder without `__init__.py` is searched after all modules on the import path
    try:
        yield
    finally:
        for finder in finders:
            sys.meta_path.remove(finder)


class _OneModule(MetaPathFinder):
    """Finds one top-level name in a folder: modules and packages if `regular`, else folders without `__init__.py`."""

    def __init__(self, name: str, folder: Path, *, regular: bool) -> None:
        self._name = name
        self._folder = str(folder)
        self._regular = regular

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        found = PathFinder.find_spec(fullname, [self._folder], target)
        return found if found is not None and (found.loader is not None) == self._regular else None


class FreshModules:
    """Unloads the modules below some top-level names, so that a run imports them again.

    `restore` puts back the unloaded modules and the import path. Installed modules and this package stay loaded.
    """

    def __init__(self, roots: frozenset[str]) -> None:
        self._roots = roots
        self._import_path = list(sys.path)
        self._set_aside = self._take()

    def restore(self) -> None:
        """Unload the modules imported since, and restore the former ones and the import path; may be called twice."""
        self._take()
        sys.modules.update(self._set_aside)
        sys.path[:] = self._import_path

    def _take(self) -> dict[str, types.ModuleType]:
        if not self._roots:
            return {}
        ours = {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] in self._roots}
        taken = {name: module for name, module in ours.items() if not _stays(sys.modules.get(name.partition(".")[0]))}
        for name in taken:
            del sys.modules[name]
        return taken


def _stays(module: types.ModuleType | None) -> bool:
    """Whether a module is installed, built in or part of this package."""
    if module is None:
        return False
    if module.__name__ == __name__.partition(".")[0] or module.__name__ in sys.stdlib_module_names:
        return True
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(not _INSTALLED.isdisjoint(Path(place).parts) for place in places if place)
