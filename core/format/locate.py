"""Finds datasets by name or path, and readers, sources and export formats by name.

A file of unknown format can often be converted all the same: `Overview` describes its columns and proposes options.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from platformdirs import user_cache_path

from ..declarations import declared, from_leaf, source_example
from ..errors import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError, UsageError, did_you_mean, nearest
from ..options import PathLike
from ..progress import redact
from . import fs
from .contracts import FoundSteps
from .converter import Reader, Sink, Source, safe_id
from .documents import decode, json_file, load_json
from .files import open_regular, reading_from, refuse_pointer, understood
from .manifest import HIDDEN, Manifest, Request, has_manifest
from .staging import mend

_QUICK_BYTES, _MOST_FILES = 64 << 20, 10_000
"""The most bytes and files that are examined for a hint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnView:
    """A column of a table: `rows` of `shape`.

    `key` is the TED key that is proposed for it, and `why` the reason why it cannot be mapped; both may be "".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: int
    key: str
    why: str


@dataclass(frozen=True, slots=True)
class Overview:
    """The columns of a file and a proposal to convert it: `format` reads it with `options`; `file` describes its kind.

    `options`, fields of `ReaderOptions`, are guessed from common names; parts to be filled in are in capitals. `doubts`
    are sentences about points that the names leave open. `bytes` is the size of all files.
    """

    file: str
    format: str
    columns: tuple[ColumnView, ...]
    options: Mapping[str, Any]
    doubts: tuple[str, ...]
    bytes: int


class OptionNeededError(FormatError):
    """A file of `format` lacks information that the user has to give by `options`, which have parts to fill in."""

    def __init__(self, file: Path, what: str, *, hint: str, format: str, options: Mapping[str, Any]) -> None:
        super().__init__(f"{file} {what}", hint=hint)
        self._file, self._format, self._options = file, format, options

    def overview(self) -> Overview | None:
        """Return the columns of the file, with the missing information as a doubt; None for a file without a table."""
        found = overview_of(self._file)
        return found and replace(found, format=self._format, options=self._options, doubts=(self.message,))


def overview_of(path: Path, files: str | None = None) -> Overview | None:
    """Examine a file with the formats that are never detected, such as `table`; None if they cannot read it either.

    `files` is a pattern for the files of a folder. Raises FormatError and CorruptDataError for a damaged file.
    """
    for one in declared():
        if one.overview is None:
            continue
        module, _, name = one.overview.partition(":")
        with understood(path):
            found: Overview | None = getattr(importlib.import_module(f"{one.package}.{module}"), name)(path, files)
        if found is not None:
            return found
    return None


def convert_command(path: PathLike, overview: Overview) -> str:
    """Return the command line that an overview proposes."""
    words = ["rbtool", "convert", os.fspath(path), "DEST", "--from", overview.format]
    for name, value in overview.options.items():
        values: Sequence[Any] = value if isinstance(value, list) else [value]
        for one in values:
            words += [f"--{name.replace('_', '-')}", *([] if one is True else [str(one)])]
    return shlex.join(words)


def conversion_hint(path: Path) -> str:
    """Return a hint on how to convert a file of unknown format; "" without an idea. Never raises."""
    try:
        files = [path] if path.is_file() else itertools.islice(path.rglob("*"), _MOST_FILES + 1)
        sizes = [file.stat().st_size for file in files]
        if sum(sizes) > _QUICK_BYTES or len(sizes) > _MOST_FILES:
            return f"if it is a table, rbtool inspect {shlex.quote(str(path))} shows its columns"
        found = overview_of(path)
    except (RbtoolError, OSError):
        return ""
    if found is None:
        return ""
    doubts = f" ({'; '.join(found.doubts)})" if found.doubts else ""
    return f"its columns can be mapped: {convert_command(path, found)}{doubts}"


HUB = "hf"
"""The folder in the storage root, and the prefix of the names, of datasets that were downloaded from a hub."""
_WILD = frozenset("*?[")
_NAMED = re.compile(r"(?P<source>[a-z][a-z0-9_-]*):(?P<id>[^:\\].*)")


def storage_root(root: PathLike | None = None) -> Path:
    """Folder that holds `<source>/<id>`: the argument, else `RBTOOL_HOME`, else the platform's cache folder.

    UsageError for a user without a home folder, and so without a cache folder.
    """
    try:
        return fs.expanded(root or os.environ.get("RBTOOL_HOME") or _cache_folder()).absolute()
    except UsageError as error:
        error.hint = "set RBTOOL_HOME, or name the folder: --root DIR"
        raise


def _cache_folder() -> Path:
    try:
        return user_cache_path("rbtool", appauthor=False)
    except RuntimeError:  # no home folder: older versions of platformdirs leave the ~ in it
        return Path("~/.cache/rbtool")


def streams_folder(root: PathLike | None = None) -> Path:
    """The folder below the storage root that keeps shards of streams, each stream in a folder of its own."""
    return storage_root(root) / ".streams"


def known_root(root: PathLike | None = None) -> Path | None:
    """Return the storage root, or None for a user without a home folder, for callers that can do without it."""
    try:
        return storage_root(root)
    except UsageError:
        return None


def dataset_folder(request: Request, root: Path) -> Path:
    """Return the folder of a request: its bare id for the whole, latest dataset, `<id>@<8 hex>` for anything else."""
    name = safe_id(request.id) if request.whole else f"{safe_id(request.id)}@{request.identity().split(':')[1][:8]}"
    return root / request.source / name


def require_apart(source: Path, destination: Path) -> None:
    """Raise UsageError for a destination that is the source, is inside it or contains it: sources are never edited."""
    one, other = source.resolve(), destination.resolve()
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise UsageError(
            f"the destination {destination} and the source {source} overlap",
            hint="choose a destination outside the source",
        )


def is_hub_address(name: str) -> bool:
    """Return whether a name begins like the address of a dataset on a hub, `hf://OWNER/NAME`."""
    return name.startswith(f"{HUB}://")


def find_dataset(name: PathLike, root: PathLike | None = None) -> Path:
    """Find a dataset by what a user types: an existing path, `source:id`, or `hf://OWNER/NAME` of a downloaded one.

    Records the time of use of a dataset in the storage root. Raises DatasetNotFoundError.
    """
    if isinstance(name, str) and is_hub_address(name):
        return _downloaded(from_leaf("hub_address").parse(name), root)
    path = fs.expanded(name)
    mend(path)
    if path.exists():
        _mark_use(path, root)
        return path
    if "://" in os.fspath(name):
        address = redact(os.fspath(name))
        raise UsageError(
            f"{address} is a URL, expected a path or a stored dataset like {source_example()}:ID",
            hint=f"rbtool inspect --streaming {shlex.quote(address)} reads one where it is; copy a bucket with "
            "aws s3 sync or gcloud storage rsync",
        )
    named = _NAMED.fullmatch(os.fspath(name))
    if named is None:
        hint = (
            _stored_like(os.fspath(name), known_root(root), alike=False)
            or _path_like(path)
            or _stored_like(os.fspath(name), known_root(root))
            or f"name an existing path, or a dataset like {source_example()}:ID"
        )
        raise DatasetNotFoundError(f"{path} not found", hint=hint)
    folder = storage_root(root) / named["source"] / safe_id(named["id"])
    mend(folder)
    if not has_manifest(folder):
        hint = _parts_of(folder, named["source"], named["id"]) or _how_to_get(named[0], storage_root(root))
        raise DatasetNotFoundError(f"{name} is not in {storage_root(root)}", hint=hint)
    _mark_use(folder, root)
    return folder


def find_source(name: PathLike, root: PathLike | None, format: str | None) -> tuple[Path, dict[str, str]]:
    """Find a source as `find_dataset` does, or by a pattern if `format` reads several files; return path and options.

    `runs/*.csv` is the folder `runs` with the option `files` set to `*.csv`.
    """
    parts = fs.expanded(name).parts
    wild = next((at for at, part in enumerate(parts) if not _WILD.isdisjoint(part)), None)
    if wild is None or format not in reader_names() or os.path.lexists(fs.expanded(name)):
        return find_dataset(name, root), {}
    if "files" not in reader_class(format).option_names:
        return find_dataset(name, root), {}
    return find_dataset(Path(*parts[:wild]), root), {"files": "/".join(parts[wild:])}


def _downloaded(address: Any, root: PathLike | None) -> Path:
    """Find a dataset that was downloaded from a hub and not converted."""
    folder = dataset_folder(address.request, storage_root(root))
    mend(folder)
    if not has_manifest(folder):
        fetch = f"fetch it with: rbtool download {shlex.quote(str(address))}"
        raise DatasetNotFoundError(f"{address} is not in {storage_root(root)}", hint=fetch)
    _mark_use(folder, root)
    return folder


def last_use(folder: Path) -> float | None:
    """When the dataset in `folder` was last opened by its name or path, in seconds since the epoch; None if unknown."""
    try:
        return (folder / HIDDEN).stat().st_mtime
    except OSError:
        return None


def _mark_use(path: Path, root: PathLike | None) -> None:
    """Record the time of use as the modification time of the folder `.rbtool`, which no digest covers."""
    store = known_root(root)
    if store is not None and has_manifest(path) and store.resolve() in path.resolve().parents:
        with contextlib.suppress(OSError):  # a disk that cannot be written to
            fs.touch(path / HIDDEN)


def _parts_of(folder: Path, source: str, name: str) -> str:
    """Return a hint with the stored variants (chosen episodes, other layouts) of a dataset that is not stored whole."""
    parts = sorted(path.name for path in folder.parent.glob("*@*") if path.name.startswith(f"{folder.name}@"))
    inside = f"{source}:{name.rpartition('/')[0]}/" if "/" in name else f"{source}:"
    return "parts of it are: " + ", ".join(f"{inside}{part}" for part in parts) if parts else ""


def _how_to_get(name: str, root: Path) -> str:
    known, (source, _, id) = source_names(), name.partition(":")
    if source == HUB:
        return _stored_like(name, root) or f"fetch it with: rbtool download {shlex.quote(f'{HUB}://{id}')}"
    if source not in known:
        return f"there is no source {source!r} here{did_you_mean(source, known) or ';'} known: {', '.join(known)}"
    return _stored_like(name, root) or f"fetch it with: rbtool download {source} {shlex.quote(id.partition('@')[0])}"


def _stored_like(name: str, root: Path | None, *, alike: bool = True) -> str:
    """Return a hint with a stored dataset whose name ends with `name`, or with another version of it; "" without one.

    With `alike`, similar names are suggested if no source is given, or if they are nearly equal; paths never are.
    """
    if root is None or name.startswith((".", "/", "~")):
        return ""
    stored = sorted(folder.relative_to(root).as_posix() for folder in _dataset_folders(root))
    words = name.replace(":", "/", 1).strip("/")
    near = [one for one in stored if f"/{one}".endswith(f"/{words}")]
    near = near or [one for one in stored if f"/{_family(one)}".endswith(f"/{_family(words)}")]
    if alike and not near and ":" not in name:
        near = [one for one in stored if one.partition("/")[2] == _near_id(words, stored)]
    if alike and not near:
        near = [one for one in stored if one == nearest(words, stored, cutoff=_SLIP, whole=True)]
    return f"did you mean {near[0].replace('/', ':', 1)}, which is stored?" if near and "/" in near[0] else ""


def _path_like(path: Path) -> str:
    """Return a hint with the entry of the same folder whose name is nearest; "" if none is similar."""
    if not _WILD.isdisjoint(str(path)):
        return "patterns are for inspect and check, and, with --from table, for files of one table; name one dataset"
    with contextlib.suppress(OSError):
        names = [entry.name for entry in itertools.islice(path.parent.iterdir(), _NAMES_COMPARED)]
        if near := nearest(path.name, names, cutoff=0.75, whole=True):
            return f"did you mean {shlex.quote(str(path.with_name(near)))}?"
    return ""


def _family(name: str) -> str:
    return re.sub(r"-v\d+$", "", name)


def _near_id(words: str, stored: Iterable[str]) -> str:
    """Find the nearest id; the source, which many names share, is not compared."""
    sources = {one.partition("/")[0] for one in stored}
    source, _, rest = words.partition("/")
    return nearest(rest if source in sources and rest else words, [one.partition("/")[2] for one in stored])


def _dataset_folders(root: Path) -> Iterator[Path]:
    for folder, names, _ in os.walk(root):
        here = Path(folder)
        names[:] = sorted(name for name in names if not name.startswith("."))
        if has_manifest(here):
            names.clear()
            yield here


def stored_datasets(root: Path) -> Iterator[tuple[Path, Manifest | Exception]]:
    """Yield every dataset below the root with its manifest, or with the error of reading it."""
    for here in _dataset_folders(root):
        try:
            yield here, Manifest.load(here)
        except (ValueError, OSError) as error:
            yield here, error


_Contract = TypeVar("_Contract")
_LOOKED_AT = 64
"""How many entries of a folder of unknown format are examined."""
_DEPTH = 3
"""How deep datasets are searched for in such a folder: ids like D4RL/door/human-v2 have three parts."""
_SHOWN = 3
_NAMES_COMPARED = 4096
_SLIP = 0.9
"""The least similarity, from 0 to 1, of a misspelt name; high, since other tasks of a source have similar names."""


def _targets(kind: Literal["reader", "source", "sink", "steps"]) -> dict[str, str]:
    from importlib.metadata import entry_points  # takes 10 ms, which other commands need not wait for

    built_in = {one.name: target for one in declared() if (target := one.target(kind)) is not None}
    plugged = _plugged(entry_points, f"rbtool.{kind.removesuffix('s')}s", tuple(sys.path))
    return built_in | {name: target for name, target in plugged if name not in built_in}


@functools.lru_cache(maxsize=8)
def _plugged(find: Callable[..., Any], group: str, path: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the names and targets that installed packages declare; cached, since it takes 20 ms to read."""
    return sorted({entry.name: entry.value for entry in find(group=group)}.items())


def _load(target: str, contract: type[_Contract]) -> type[_Contract]:
    module, _, attribute = target.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if not (isinstance(found, type) and issubclass(found, contract)):
        raise FormatError(f"{target} is not a {contract.__name__}")
    return found


def reader_names() -> list[str]:
    """Return the names of all formats that can be read: rbtool's first, then those that installed packages add."""
    return list(_targets("reader"))


def reader_class(name: str) -> type[Reader]:
    """Load the reader of one format."""
    targets = _targets("reader")
    if name not in targets:
        raise FormatError(f"no reader for format {name!r}; there are {', '.join(sorted(targets))}")
    return _load(targets[name], Reader)  # type: ignore[type-abstract]  # only asked for subclasses


def source_names() -> list[str]:
    """Return the names of all sources: rbtool's first, then those that installed packages add."""
    return list(_targets("source"))


def source_class(name: str) -> type[Source]:
    """Load the source of that name; UsageError for an unknown one."""
    targets = _targets("source")
    if name not in targets:
        meant = did_you_mean(name, targets)
        raise UsageError(f"source {name!r} is unknown{meant}", hint=f"known: {', '.join(sorted(targets))}")
    return _load(targets[name], Source)  # type: ignore[type-abstract]


def sink_names() -> list[str]:
    """Return the names of all formats that can be written: rbtool's first, then those that installed packages add."""
    return list(_targets("sink"))


def sink_class(name: str) -> type[Sink]:
    """Load the sink of an export format; UsageError for an unknown one."""
    targets = _targets("sink")
    if name not in targets:
        raise UsageError(f"there is no format {name!r} to export to", hint=f"choose from {', '.join(targets)}")
    return _load(targets[name], Sink)  # type: ignore[type-abstract]


def find_steps(path: Path) -> type[FoundSteps] | None:
    """Return the class that reads the TED steps at `path`, such as an export; None for other files and folders."""
    classes = (_load(target, FoundSteps) for target in dict.fromkeys(_targets("steps").values()))  # type: ignore[type-abstract]
    return next((one for one in classes if one.recognises(path)), None)


_TABLES = frozenset({"csv", "hdf5", "h5", "npz", "npy", "parquet"})


def open_source(
    path: Path, *, format: str | None = None, final_step: str = "auto", options: Mapping[str, Any] | None = None
) -> Reader:
    """Open a dataset in whatever known format is at `path`, recognised by its content unless `format` names it.

    See `Reader` for the other arguments. UsageError for an unknown format.
    """
    if not path.exists():
        raise DatasetNotFoundError(f"{path} not found")
    if format is not None:
        known = reader_names()
        if format not in known:
            meant = "; tables are of format 'table'" if format in _TABLES else did_you_mean(format, known)
            raise UsageError(f"format {format!r} is unknown{meant}", hint=f"known: {', '.join(known)}")
        try:
            return reader_class(format)(path, final_step=final_step, options=options)
        except FormatError as error:
            if (other := recognised(path)) not in {None, format}:
                error.hint = f"the content is in format {other}: leave out --from"
            raise
    name = recognised(path)
    if name is None:
        refuse_empty(path)
        _require_readable(path)
        refuse_pointers(path)
        raise FormatError(
            f"{path}: unknown format; supported: {', '.join(reader_names())}",
            hint=inside_hint(path) or _named_hint(options or {}) or conversion_hint(path),
        )
    return reader_class(name)(path, final_step=final_step, options=options)


def _named_hint(options: Mapping[str, Any]) -> str:
    """Return the hint to name a format, if options are given that belong to a format that is never detected."""
    given = options.keys() & {"map", "episode_key", "files"}
    return "add --from table: the meaning of columns cannot be detected" if given else ""


def recognised(path: Path) -> str | None:
    """Return the format of the file or folder at `path`, by its content; None if it is unknown."""
    return next((name for name in reader_names() if reader_class(name).recognises(path)), None)


def _require_readable(path: Path) -> None:
    """Read a little of some files of an unknown format; OSError for the first that cannot be read."""
    files = [path] if path.is_file() else (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    for file in filter(Path.is_file, itertools.islice(files, _LOOKED_AT)):
        descriptor = open_regular(file)
        try:
            with reading_from(file):
                os.pread(descriptor, 1, 0)
        finally:
            os.close(descriptor)


def refuse_empty(path: Path) -> None:
    """Raise an error for an empty path.

    CorruptDataError for an empty file, which a failed download or copy may leave; DatasetNotFoundError for an empty
    folder.
    """
    if path.is_dir() and not any(path.iterdir()):
        raise DatasetNotFoundError(f"{path} is an empty folder, expected a dataset or a checkpoint")
    if path.is_file() and not path.stat().st_size:
        raise CorruptDataError(f"{path} is an empty file", hint="copy or fetch the file again")


def refuse_pointers(path: Path) -> None:
    """Raise CorruptDataError for a pointer of git-lfs, or a folder with such files."""
    with contextlib.suppress(OSError):
        files = [path] if path.is_file() else itertools.islice(sorted(path.iterdir()), _LOOKED_AT)
        for file in files:
            if file.is_file():
                refuse_pointer(file)


def dataset_around(file: Path) -> tuple[str, Path] | None:
    """Return the format and the folder of the raw dataset to which a file belongs; None if it belongs to none.

    The folder is the parent or the grandparent, and its reader has to list the file: other files may lie there, too.
    """
    for folder in reversed(file.parents[:2]):
        if (name := recognised(folder)) is not None:
            with contextlib.suppress(RbtoolError, OSError), reader_class(name)(folder) as reader:
                if any(part.samefile(file) for part in reader.files()):
                    return name, folder
    return None


def inside_hint(folder: Path) -> str:
    """Return a hint with datasets inside a folder, or a raw dataset in a known format; "" if there is none."""
    level = [folder]
    with contextlib.suppress(OSError):
        for _ in range(_DEPTH):
            inside = (entry for one in level if one.is_dir() for entry in sorted(one.iterdir()))
            level = [entry for entry in itertools.islice(inside, _LOOKED_AT) if entry.name[0] != "."]
            if ours := [shlex.quote(str(entry)) for entry in level if has_manifest(entry)]:
                shown = ", ".join(ours[:_SHOWN])
                return f"datasets in it: {shown}{', …' if len(ours) > _SHOWN else ''}"
            for entry in level:
                if (name := recognised(entry)) is not None:
                    return f"{shlex.quote(str(entry))} in it is in format {name}"
    return ""


@dataclass(frozen=True, slots=True)
class Resolution:
    """The dataset that the words `asked` mean, and how it was found.

    `exact`: they are its id. `latest`: they lack only the version. `words`: its name is another with the same words.
    """

    asked: str
    id: str
    how: Literal["exact", "latest", "words"]


def substitution_text(asked: str, taken: str, *, before: bool = False) -> str:
    """Return the note that a dataset with another name is used, or was used `before` when it was fetched."""
    return f"{asked} not found; {'used' if before else 'using'} {taken}"


class _Known(NamedTuple):
    id: str
    how: Literal["exact", "latest", "words"]


class KnownNames:
    """Remembers to which datasets words led, in `<root>/<source>/.names.json`. A damaged file counts as empty."""

    def __init__(self, root: Path, source: str) -> None:
        self._root = root
        self.path = root / source / ".names.json"

    def get(self, asked: str) -> Resolution | None:
        """Return the dataset to which `asked` led before; None if it is not known."""
        try:
            found = decode(_Known, self._read().get(asked), str(self.path))
            return Resolution(asked, safe_id(found.id), found.how)
        except (FormatError, UsageError):
            return None

    def put(self, found: Resolution) -> None:
        """Remember to which dataset words led."""
        if self.get(found.asked) != found:
            names = dict(sorted({**self._read(), found.asked: {"id": found.id, "how": found.how}}.items()))
            fs.replace_file_below(self._root, self.path, json_file(names))

    def _read(self) -> dict[str, Any]:
        try:
            found = load_json(self.path)
        except (OSError, FormatError):
            return {}
        return found if isinstance(found, dict) else {}


def stored_name(path: Path, root: Path) -> str:
    """Return the name of a path below the root: `source:id`, or the path itself if it has only one part."""
    source, *rest = path.relative_to(root).parts or ("",)
    return f"{source}:{'/'.join(rest)}" if rest else str(path)


def fits(name: str, pattern: str | None) -> bool:
    """Return whether `source:id` matches a pattern: a shell pattern if it contains one of `*?[`, else a substring.

    A pattern may omit the source. Case is ignored.
    """
    if pattern is None:
        return True
    name, pattern = name.lower(), pattern.lower()
    if not set(pattern) & set("*?["):
        return pattern in name
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition(":")[2], pattern)
