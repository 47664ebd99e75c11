"""`migrate`: change the imports of `torchrl.data` in Python files to imports of rbtool.

Only import statements, and names that are accessed through an imported module, are rewritten; every other byte stays.
Names that rbtool lacks are still imported from TorchRL.
"""

from __future__ import annotations

import ast
import difflib
import io
import os
import re
import stat
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from ..errors import DatasetNotFoundError, FormatError, not_installed
from ..format import fs
from ..format.files import read_regular
from ..options import takes
from ..results import Result, seconds_since
from ..torchrl_classes import MISSING, MODULES
from .options import MigrateOptions

if TYPE_CHECKING:
    import libcst as cst

_DATA = "torchrl.data"
_SUFFIXES = (".py", ".pyi")
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
_WIDTH = 100
_NAMED = re.compile(r"torchrl\.data\b[\w.]*")
_MENTION = re.compile(rb"torchrl\s*\.\s*data\b|\bfrom\s+torchrl\s+import\b|\bimport\s+torchrl\s+as\b")
# Names of rbtool that a star import of `torchrl.data` does not provide: TorchRL has transforms in `torchrl.envs`, and
# no verbs.
_OF_OTHERS = re.compile(r"\.core\.(verbs|transforms\.(base|keyed|video|windows))\b")


@dataclass(frozen=True, slots=True)
class MigrationNote:
    """A note on a line of a file; `line` counts in the file before it was changed.

    The kind is `stays` (rbtool lacks the name, which is still imported from TorchRL), `differs` (rbtool has the name,
    but it behaves differently) or `look` (the line has to be checked by hand).
    """

    line: int
    kind: Literal["stays", "differs", "look"]
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class MigratedFile:
    """A file that mentions `torchrl.data`. If `changed`, `names` come from rbtool now, and `diff` is the change.

    `error` states why a file could not be read, parsed or written; it is then unchanged.
    """

    path: Path
    changed: bool
    names: tuple[str, ...] = ()
    notes: tuple[MigrationNote, ...] = ()
    diff: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateResult(Result):
    """The changes, made or proposed (`dry_run`): the `files` with a change, a note or an error, of all `examined`."""

    kind: ClassVar[str] = "migrate"
    files: tuple[MigratedFile, ...]
    examined: int
    changed: int
    dry_run: bool
    seconds: float


@takes(MigrateOptions)
def migrate(asked: MigrateOptions) -> MigrateResult:
    """Change imports of `torchrl.data` in Python files to imports of rbtool.

    Names from any module below `torchrl.data` are imported from `rbtool`, under the same local names, and so are names
    that are accessed through a module, as in `import torchrl.data as d`. A star import is replaced by the names that
    the file uses. Names that rbtool lacks are still imported from TorchRL. A file is replaced atomically, and only if
    something changes. A file that cannot be parsed is left unchanged, and the others are still processed.

    Args:
        paths: a Python file or a folder, or several. For folders, all `.py` and `.pyi` files below, except those in
            hidden folders and virtual environments.
        dry_run: write nothing.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        The files with what was changed in each, and what is left to do by hand.

    Raises:
        DatasetNotFoundError: nothing is at one of the paths.
        UsageError: libcst is not installed.
    """
    _require_libcst()
    started, public = time.perf_counter(), _public_names()
    given = [asked.paths] if isinstance(asked.paths, str | os.PathLike) else asked.paths
    files = list(dict.fromkeys(file for path in given for file in _python_files(fs.expanded(path))))
    found: list[MigratedFile] = []
    asked.reporter.start("reading", len(files), "files")
    for file in files:
        found.append(_migrate_file(file, public, dry_run=asked.dry_run))
        asked.reporter.advance(1)
    asked.reporter.done()
    return MigrateResult(
        files=tuple(one for one in found if one.changed or one.notes or one.error),
        examined=len(files),
        changed=sum(one.changed for one in found),
        dry_run=asked.dry_run,
        seconds=seconds_since(started),
    )


def _require_libcst() -> None:
    try:
        import libcst  # noqa: F401
    except ImportError as error:
        raise not_installed("migrate needs libcst", "migrate", error) from error


def _public_names() -> Mapping[str, str]:
    """Return the module of each public name of rbtool."""
    homes: Mapping[str, str] = vars(sys.modules[__name__.partition(".")[0]])["_HOMES"]
    return homes


def _python_files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        if not path.exists():
            raise DatasetNotFoundError(f"{path} not found")
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in _SKIPPED and not Path(folder, name, "pyvenv.cfg").exists()
        )
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(_SUFFIXES))


def _migrate_file(path: Path, public: Mapping[str, str], *, dry_run: bool) -> MigratedFile:
    import libcst as cst

    try:
        source = read_regular(path)
        if not _MENTION.search(source):
            return MigratedFile(path, False)
        imports = _Imports(source, public)
        text = imports.changed()
    except cst.ParserSyntaxError as error:
        return MigratedFile(path, False, error=_fault(source, error.message))
    except (SyntaxError, UnicodeError, RecursionError) as error:
        return MigratedFile(path, False, error=f"it cannot be parsed: {error}")
    except OSError as error:
        return MigratedFile(path, False, error=f"it cannot be read: {error.strerror}")
    except FormatError:  # a FIFO, for example
        return MigratedFile(path, False, error="it is not a regular file")
    new = text.encode(imports.module.encoding)
    if new != source and not dry_run:
        place = path.resolve()  # a link stays one
        try:
            fs.replace_file(place, new, mode=stat.S_IMODE(place.stat().st_mode))
        except PermissionError as error:
            return MigratedFile(path, False, error=f"it cannot be written: {error.strerror}")
    before, after = (list(io.StringIO(one)) for one in (imports.module.code, text))
    return MigratedFile(
        path,
        new != source,
        names=tuple(sorted(imports.moved)),
        notes=tuple(sorted(imports.notes.values(), key=lambda note: note.line)),
        diff="".join(_unified(before, after, str(path))),
    )


def _fault(source: bytes, otherwise: str) -> str:
    """Return what is wrong with code. Python's own message is preferred: libcst may name the line before."""
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(source)
    except SyntaxError as error:
        return f"line {error.lineno} is not Python: {error.msg}"
    except ValueError as error:
        return f"it is not Python: {error}"
    return f"it cannot be parsed: {otherwise}"


def _unified(before: Sequence[str], after: Sequence[str], name: str) -> Iterator[str]:
    for line in difflib.unified_diff(before, after, name, name):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


class _Use(NamedTuple):
    """A use of a local name that an import has bound to a module: the expression `node` is `name` in `module`.

    If `name` is None, `node` is the module itself. After `import torchrl.data.replay_buffers as d`, the expression
    `d.samplers.SliceSampler(…)` is a use of `d`; its node ends with `SliceSampler`.
    """

    node: cst.Name | cst.Attribute
    module: str
    name: str | None


class _Imports:
    """The imports of `torchrl.data` in one file, and the edits that replace them.

    A local name of a module is bound to `rbtool` if rbtool has every name that is accessed through it. Otherwise its
    import stays, and the names that rbtool has are accessed through `rbtool` instead.
    """

    def __init__(self, source: bytes, public: Mapping[str, str]) -> None:
        from libcst import metadata, parse_module

        wrapper = metadata.MetadataWrapper(parse_module(source), unsafe_skip_copy=True)
        self.module = wrapper.module
        self._code = self.module.code.encode()
        self._spans = wrapper.resolve(metadata.ByteSpanPositionProvider)
        self._scopes = wrapper.resolve(metadata.ScopeProvider)
        self._parents = wrapper.resolve(metadata.ParentNodeProvider)
        self._from_import = metadata.QualifiedNameSource.IMPORT
        self._public = {name for name, home in public.items() if not home.startswith(".core.verbs")}
        self._starred = {name for name, home in public.items() if not _OF_OTHERS.match(home)}
        self._edits: list[tuple[int, int, str]] = []
        self._roots: set[str] = set()  # local names of `torchrl` itself
        self._bound: set[cst.CSTNode] = set()  # blocks with `import rbtool`
        self.moved: set[str] = set()
        self.notes: dict[str, MigrationNote] = {}

    def changed(self) -> str:
        """Return the text of the file after all edits."""
        import libcst as cst

        nodes = list(_walk(self.module))
        uses: dict[str, list[_Use]] = defaultdict(list)
        for node in nodes:
            if isinstance(node, cst.Name) and (use := self._use(node)):
                uses[node.value].append(use)
            elif isinstance(node, cst.SimpleString):
                self._look_at_string(node, uses)
        kept = {local for local, found in uses.items() if not all(map(self._moves, found))}
        moving = {local for local, found in uses.items() if any(use.name in self._public for use in found)}
        moving |= uses.keys() - kept
        for local, found in uses.items():
            for use in found:
                self._edit_use(local, use, kept)
        for node in nodes:
            if isinstance(node, cst.ImportFrom):
                self._edit_from(node, kept, moving)
            elif isinstance(node, cst.Import):
                self._edit_import(node, kept, moving)
        code = bytearray(self._code)
        for start, length, text in sorted(self._edits, reverse=True):
            code[start : start + length] = text.encode()
        return code.decode()

    # Names that are accessed through modules --------------------------------------------------------

    def _use(self, root: cst.Name) -> _Use | None:
        """Follow a chain of attributes that starts at the name `root`; None if that is not a module of TorchRL."""
        import libcst as cst

        scope = self._scopes.get(root)
        names = scope.get_qualified_names_for(root) if scope is not None else ()
        starts = {name.name for name in names if name.source is self._from_import} & {"torchrl", *MODULES}
        if not starts:
            return None
        node: cst.Name | cst.Attribute = root
        module, parent = starts.pop(), self._parents[root]
        if module == "torchrl":
            self._roots.add(root.value)
        while isinstance(parent, cst.Attribute) and parent.value is node:
            if f"{module}.{parent.attr.value}" not in MODULES:
                return _Use(parent, module, parent.attr.value)
            node, module, parent = parent, f"{module}.{parent.attr.value}", self._parents[parent]
        return _Use(node, module, None)

    def _moves(self, use: _Use) -> bool:
        """Return whether a use can refer to rbtool: to a module below `torchrl.data`, or a name that rbtool has."""
        return use.module != "torchrl" and (use.name is None or use.name in self._public)

    def _edit_use(self, local: str, use: _Use, kept: set[str]) -> None:
        if use.module == "torchrl":
            return
        if use.name is None:
            self._note(use.node, "look", use.module, f"{use.module} itself is used: check what is accessed through it")
        if local not in kept if use.name is None else self._taken(use.node, use.name, use.module):
            to = "rbtool" if local in self._roots or local in kept else local
            self._edit(use.node, f"{to}.{use.name}" if use.name else to)

    def _taken(self, node: cst.CSTNode, name: str, module: str) -> bool:
        """Return whether rbtool has a name; add a note if it has not, or if the name behaves differently."""
        if name not in self._public:
            why = MISSING.get(name, "rbtool has no such name")
            self._note(node, "stays", f"{module}.{name}", f"{module}.{name}: {why}")
            return False
        self.moved.add(name)
        if name in DIFFERENT:
            self._note(node, "differs", name, f"{name}: {DIFFERENT[name]}")
        return True

    def _look_at_string(self, node: cst.SimpleString, uses: dict[str, list[_Use]]) -> None:
        text = node.evaluated_value
        if isinstance(text, str) and _NAMED.fullmatch(text):
            import libcst as cst

            uses["torchrl"].append(_Use(cst.Name("torchrl"), "torchrl", None))  # the import stays
            self._note(node, "look", text, f"the text {text!r} is left unchanged")

    # Import statements -----------------------------------------------------------------------------

    def _edit_from(self, node: cst.ImportFrom, kept: set[str], moving: set[str]) -> None:
        import libcst as cst

        module = _dotted(node.module)
        if node.relative or (module != "torchrl" and module not in MODULES and not module.startswith(f"{_DATA}.")):
            return
        if isinstance(node.names, cst.ImportStar):
            if module != "torchrl":
                self._edit_star(node, module)
            return
        moved: list[cst.ImportAlias] = []
        stays: list[cst.ImportAlias] = []
        modules: list[cst.ImportAlias] = []
        for alias in node.names:
            name, local = _dotted(alias.name), _local(alias)
            if f"{module}.{name}" in MODULES:
                (stays if local in kept else modules).append(alias)
            elif module != "torchrl" and self._taken(alias, name, module):
                moved.append(alias)
            else:
                stays.append(alias)
        if len(moved) == len(node.names) and node.module is not None:
            self._edit(node.module, "rbtool")
            return
        bind = any(_local(alias) in moving and f"{module}.{_dotted(alias.name)}" in MODULES for alias in stays)
        if len(stays) == len(node.names) and not bind:
            return
        pieces = [_from(node, "rbtool", moved)] if moved else []
        pieces += [f"import rbtool as {_local(alias)}" for alias in modules]
        pieces += [_from(node, None, stays)] if stays else []
        self._edit_statement(node, pieces, bind=bind)

    def _edit_star(self, node: cst.ImportFrom, module: str) -> None:
        import libcst as cst

        unknown = {
            access.node.value
            for scope in {*self._scopes.values()}
            if scope is not None
            for access in scope.accesses
            if isinstance(access.node, cst.Name) and not access.referents and not access.node.value.startswith("__")
        }
        used, others = sorted(unknown & self._starred), sorted(unknown - self._starred)
        for name in used:
            self._taken(node, name, module)
        star = f"from {module} import *"
        if others:
            text = f"{star} stays, for names that rbtool lacks or that come from elsewhere: {', '.join(others)}"
        elif used:
            text = f"{star} became the names that this file uses; other files cannot import the rest from it any more"
        else:
            text = f"{star} became from rbtool import *; this file uses none of its names"
        self._note(node, "look", star, text)
        pieces = [star] if others else []
        pieces += [_names_from_rbtool(used)] if used else [] if others else ["from rbtool import *"]
        self._edit_statement(node, pieces, bind=False)

    def _edit_import(self, node: cst.Import, kept: set[str], moving: set[str]) -> None:
        stays, pieces, bind = [], [], False
        for alias in node.names:
            name, local = _dotted(alias.name), _local(alias)
            ours = name in MODULES
            if name.partition(".")[0] != "torchrl" or (alias.asname and not ours and name != "torchrl"):
                stays.append(alias)
            elif alias.asname and ours:
                if local in kept:
                    stays.append(alias)
                    bind = bind or local in moving
                else:
                    pieces.append(f"import rbtool as {local}")
            else:
                bind = bind or local in moving or (ours and local not in kept)
                if local in kept or not (ours or (name == "torchrl" and local in moving)):
                    stays.append(alias)
        if len(stays) == len(node.names) and not bind:
            return
        if stays:
            pieces.append(f"import {', '.join(_code(alias) for alias in stays)}")
        self._edit_statement(node, pieces, bind=bind)

    def _edit_statement(self, node: cst.Import | cst.ImportFrom, pieces: list[str], *, bind: bool) -> None:
        """Replace a statement by others; with `bind`, also add `import rbtool`, once in each block."""
        line_of = self._parents[node]
        block = self._parents[line_of]
        if not pieces or (bind and block not in self._bound):
            pieces.insert(0, "import rbtool")
            self._bound.add(block)
        start = self._spans[node].start
        indent = self._code[self._code.rfind(b"\n", 0, start) + 1 : start].decode()
        alone = not indent.strip() and len(getattr(line_of, "body", ())) == 1
        line = f"{self.module.default_newline}{indent}"
        if text := (line if alone else "; ").join(piece.replace("\n", line) for piece in pieces):
            self._edit(node, text)

    def _edit(self, node: cst.CSTNode, text: str) -> None:
        span = self._spans[node]
        self._edits.append((span.start, span.length, text))

    def _note(self, node: cst.CSTNode, kind: Literal["stays", "differs", "look"], name: str, text: str) -> None:
        """Add a note; notes with the same text are merged at the first of their lines."""
        line = self._code.count(b"\n", 0, self._spans[node].start) + 1
        if text not in self.notes or line < self.notes[text].line:
            self.notes[text] = MigrationNote(line, kind, name, text)


def _walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending += reversed(node.children)


def _dotted(name: cst.CSTNode | None) -> str:
    from libcst.helpers import get_full_name_for_node

    return (get_full_name_for_node(name) if name is not None else None) or ""


def _local(alias: cst.ImportAlias) -> str:
    """Return the name that an import binds."""
    return _dotted(alias.asname.name) if alias.asname else _dotted(alias.name).partition(".")[0]


def _code(node: cst.CSTNode) -> str:
    import libcst as cst

    bare = node.with_changes(comma=cst.MaybeSentinel.DEFAULT) if isinstance(node, cst.ImportAlias) else node
    return cst.Module([]).code_for_node(bare)


def _from(node: cst.ImportFrom, module: str | None, names: Sequence[cst.ImportAlias]) -> str:
    """Return an import of some of the names of `node`, with its formatting, from `module` or else the same module."""
    import libcst as cst

    assert not isinstance(node.names, cst.ImportStar)
    own, comma = names[-1].comma, node.names[-1].comma
    if isinstance(own, cst.Comma) and isinstance(comma, cst.Comma):
        after, end = own.whitespace_after, comma.whitespace_after
        if isinstance(after, cst.ParenthesizedWhitespace) and isinstance(end, cst.ParenthesizedWhitespace):
            comma = own.with_changes(whitespace_after=after.with_changes(last_line=end.last_line))  # with its comment
    changed = node.with_changes(names=[*names[:-1], names[-1].with_changes(comma=comma)])
    return _code(changed.with_changes(module=cst.Name(module)) if module else changed)


def _names_from_rbtool(names: Sequence[str]) -> str:
    line = f"from rbtool import {', '.join(names)}"
    return line if len(line) <= _WIDTH else "\n".join(["from rbtool import (", *(f"    {one}," for one in names), ")"])


DIFFERENT: Mapping[str, str] = {
    "Binary": "`space` is a BinaryBox with as many members as the spec; in TorchRL it is a CategoricalBox of 2",
    "Bounded": "with `dtype=torch.bool`, bounds are clipped to False and True and both values are drawn (TorchRL "
    "always draws True); bounds that the dtype cannot hold are refused; integers have a finite `cardinality()`",
    "Choice": "`cardinality()` and `enumerate()` count equal values once; TorchRL counts duplicates",
    "Composite": "assigning `device` moves the entries (in TorchRL it has no effect); a locked spec refuses `del` and "
    "`pop`; `get` of a missing key raises KeyError; `refine_names` keeps the names under an Ellipsis; an empty spec "
    "has one value",
    "HERReplayBuffer": "warns if no function computes terminations, because the stored flags then belong to the old "
    "goals",
    "History": "`append` and `extend` change only this object, not the one that it was indexed from; a chat template "
    "without a place for a role refuses that role (TorchRL drops the message)",
    "LazyMemmapStorage": "rows whose keys differ from those of the storage are refused unless `schema='open'`; a "
    "pickle of `rb[:]` contains the values (in TorchRL the name of the file); each row keeps its own text (in TorchRL "
    "all rows have the text of the first)",
    "LazyTensorStorage": "`extend` refuses rows whose keys differ from those of the storage unless `schema='open'`; a "
    "checkpoint keeps the text of each row (in TorchRL all rows have the text of the first); values that JSON cannot "
    "hold must be the same in all rows; the text of `rb[:]` is a copy",
    "LeRobotExperienceReplay": "the last step of a slice has its next row if that is stored; in TorchRL it is always "
    "NaN",
    "MCTSForest": "`get_tree` keeps the last step of a rollout, which TorchRL drops; an unknown root raises KeyError, "
    "not IndexError; `len` counts a step that several rollouts share once",
    "MultiStep": "takes done flags and rewards with additional dimensions; windows end before steps that "
    '`("collector", "mask")` leaves out; `"multi_step"` holds the flags of the last step of each window',
    "OpenVLAImagePreprocessor": "`backend='pil'` compresses images before it resizes them, like the other backends; "
    "in TorchRL it compresses them afterwards",
    "PrioritizedSampler": "grows with a warning if the storage is larger; TorchRL never draws the additional rows",
    "PrioritizedSliceSampler": "a `span` of a whole slice or more is refused",
    "NonTensor": "equality also compares shapes; with `batched`, a nested example has a datum for each element",
    "OneHot": "an index counts the dimension of categories, as in a value: `spec[..., 0]` raises IndexError; "
    "`reshape` and `unflatten` cannot change that dimension",
    "QueryModule": "`in_keys` is a list; the default `aggregator` is a SipHash, also with a `hash_module`",
    "RayReplayBuffer": "Ray is the only transport: `transport='distributed'` is refused; after `close()`, methods "
    "raise RuntimeError (in TorchRL errors of Ray)",
    "ReplayBuffer": "a transform added with `invert=True` changes written data by its own `forward`, if it has one "
    "(in TorchRL always by `_call`); `submit_update_if_present` returns when the update is done",
    "ReplayBufferEnsemble": "draws other elements than TorchRL for the same seed; `end_streams` is missing",
    "RobotDatasetMetadata": "statistics given as integers become float32",
    "Sequence": "also takes a ListStorage that holds tensordicts",
    "SliceSampler": "`span=k` leaves out up to k steps, as in PrioritizedSliceSampler (in TorchRL slices have at "
    "least k steps); a ListStorage of tensordicts and end flags with additional dimensions are accepted; `fragmented` "
    "is missing",
    "SliceSamplerWithoutReplacement": "batches have no gaps if trajectories are shorter than a slice",
    "Stacked": "specs of the same shape are stacked to a dense spec",
    "StackedComposite": "iterating yields keys, as in Composite; `unbind` returns a tuple; `reshape`, `encode` and "
    "all indices work",
    "StreamingSliceSampler": "only `add` and `extend` make windows; in TorchRL `mark_update` makes them, too",
    "TensorDictMap": "has `out_keys` even before the first write; a later value that lacks an entry is refused",
    "TensorDictMaxValueWriter": "`get_insert_index` only returns where `add` would write; in TorchRL it reserves the "
    "place",
    "TensorDictReplayBuffer": "`sample(0)` is refused",
    "TensorSpec": "`expand(-1)` keeps sizes other than 1; a list of True and False is a mask, as in torch",
    "Trajectory": "a trajectory of a buffer reads and transforms entries when they are used; a stack of several has "
    "no `length`",
    "Tree": "the root has a hash, and `vertices(key_type='hash')` uses hashes as keys",
    "UniformActionTokenizer": "bounds whose number differs from `action_dim` are refused; actions of half precision "
    "are not rounded further",
    "validate_vla_tensordict": "checks every instruction of a stack, and refuses text as actions",
}
"""Names that exist in TorchRL and rbtool and behave differently on purpose, and how they differ."""
