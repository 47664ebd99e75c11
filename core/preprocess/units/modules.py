"""Modules of user code: the files that a file imports from its folder, and imports that leave no trace."""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator, Sequence
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
from pathlib import Path
from types import ModuleType

from ...format.digest import read_regular

_LOADERS = (
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)
_INSTALLED = frozenset(("dist-packages", "site-packages"))


def imported_modules(path: Path) -> dict[str, Path]:
    """Return the modules below the folder of `path` that its import statements reach, also indirectly; none is run.

    Statements inside functions count too. Names are looked up in that folder only, as if it were first on the import
    path. Imports by other means than a statement are not found.
    """
    folder, found, left = path.parent, {}, [(path, "")]
    looked_up: dict[str, ModuleSpec | None] = {}
    while left:
        file, package = left.pop()
        for name in _imports_of(file, package):
            for spec in _resolve(name, folder, looked_up):
                if spec.origin is not None and spec.name not in found:
                    found[spec.name] = Path(spec.origin)
                    left.append((found[spec.name], spec.parent or ""))
    return dict(sorted(found.items()))


def _imports_of(file: Path, package: str) -> Iterator[str]:
    """Yield the dotted names that the statements of a file may import; none for an invalid file."""
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
    """Yield the modules that importing a dotted name runs, outermost first; `*` is any submodule."""
    places, full = [str(folder)], ""
    for part in name.split("."):
        names = _submodules(places) if part == "*" else [part]
        specs = [spec for one in names if (spec := _find(f"{full}.{one}".lstrip("."), places, looked_up)) is not None]
        yield from specs
        if len(specs) != 1 or specs[0].submodule_search_locations is None:
            return  # a module that is no package has no submodules
        full, places = specs[0].name, list(specs[0].submodule_search_locations)


def _find(name: str, places: list[str], looked_up: dict[str, ModuleSpec | None]) -> ModuleSpec | None:
    if name not in looked_up:
        # New finders: those of the import system may have an outdated cache of the folder.
        found = (FileFinder(place, *_LOADERS).find_spec(name) for place in places)
        looked_up[name] = next((spec for spec in found if spec is not None), None)
    return looked_up[name]


def _submodules(places: list[str]) -> list[str]:
    names = {entry.name.partition(".")[0] for place in places for entry in Path(place).iterdir()}
    return sorted(name for name in names if name.isidentifier() and name not in ("__init__", "__pycache__"))


@contextlib.contextmanager
def only_from(folder: Path, name: str) -> Iterator[None]:
    """Import the module or package of one top-level name, and no other, from a folder as if it were first on the path.

    With the folder on the import path, later imports of `json` or `torch` would find its `json.py` or `torch.py`.
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
    def __init__(self, name: str, folder: Path, *, regular: bool) -> None:
        self._name = name
        self._folder = str(folder)
        self._regular = regular

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        found = PathFinder.find_spec(fullname, [self._folder], target)
        return found if found is not None and (found.loader is not None) == self._regular else None


class FreshModules:
    """Unloads modules of these top-level names, so that a run imports them again; `restore` undoes that.

    It also restores the import path. Installed modules and this package stay loaded.
    """

    def __init__(self, roots: frozenset[str]) -> None:
        self._roots = roots
        self._import_path = list(sys.path)
        self._set_aside = self._take()

    def restore(self) -> None:
        """Unload what was imported since, and restore the modules and the import path; may be called twice."""
        self._take()
        sys.modules.update(self._set_aside)
        sys.path[:] = self._import_path

    def _take(self) -> dict[str, ModuleType]:
        if not self._roots:
            return {}
        ours = {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] in self._roots}
        taken = {name: module for name, module in ours.items() if not _stays(sys.modules.get(name.partition(".")[0]))}
        for name in taken:
            del sys.modules[name]
        return taken


def _stays(module: ModuleType | None) -> bool:
    """Whether a module is installed, built in or part of this package."""
    if module is None:
        return False
    if module.__name__ == __name__.partition(".")[0] or module.__name__ in sys.stdlib_module_names:
        return True
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(not _INSTALLED.isdisjoint(Path(place).parts) for place in places if place)
