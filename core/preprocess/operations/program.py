"""Programs: sequences of operations, their binding to the fields of a dataset, and the processor that runs them.

A program is made from options, from the TOML of a pipeline file, or from the JSON of a manifest.
"""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import sys
import tomllib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy as np

from ...declarations import OPERATION_OPTIONS
from ...engine.tasks import error_text
from ...errors import DatasetNotFoundError, UsageError, did_you_mean
from ...format import fs
from ...format.contracts import StepReader
from ...format.documents import load_json, toml_value
from ...format.episodes import EpisodeTable
from ...format.files import digest_bytes
from ...format.manifest import MANIFEST, Manifest, Provenance
from ...options import PathLike
from ...ted.schema import NEXT, NEXT_REWARD, Field, Key, key_name
from ..processor import Block, Context, EpisodeTexts, LoadedProcessor, Processor
from . import built_in
from .base import BoundOperation, Discount, EpisodeChoice, Fields, LazyBatch, Operation, RowOperation, texts_of
from .built_in import BoundNormalize, Constants, Episodes, Measured, NormalizeFields

OPERATIONS: dict[str, type[Operation]] = {
    option.name: getattr(import_module(module) if module else built_in, name)
    for option in OPERATION_OPTIONS
    if option.target is not None
    for module, _, name in [option.target.rpartition(":")]
}
"""The built-in operations by name, in the order in which their options are applied."""


def find_operation(name: str) -> type[Operation] | None:
    """Return the operation with a name, built-in or from the entry points `rbtool.operations`; None if there is none.

    UsageError if an entry point is not an `Operation` with that name.
    """
    if name in OPERATIONS:
        return OPERATIONS[name]
    from importlib.metadata import entry_points  # takes 10 ms, and built-in operations do not need it

    for entry in entry_points(group="rbtool.operations", name=name):
        found = entry.load()
        if not (isinstance(found, type) and issubclass(found, Operation) and getattr(found, "name", "") == name):
            raise UsageError(f"{entry.value} is not an operation with the name {name!r}")
        return found
    return None


@dataclass(frozen=True)
class Program:
    """A sequence of operations. Those that choose episodes come first, because they use the source's episode table.

    UsageError for another order, and for normalisations that one pass cannot measure: those before and after another
    operation.
    """

    operations: tuple[Operation, ...]

    def __post_init__(self) -> None:
        if not self.operations:
            raise UsageError("there are no operations, expected at least one")
        for before, after in zip(self.operations, self.operations[1:], strict=False):
            if isinstance(after, EpisodeChoice) and not isinstance(before, EpisodeChoice):
                raise UsageError(
                    f"{after.name} comes after {before.name}; it chooses by the episodes of the source and comes first"
                )
        unmeasured = [place for place, operation in enumerate(self.operations) if _is_unmeasured(operation)]
        between = self.operations[unmeasured[0] : unmeasured[-1]] if unmeasured else ()
        if other := [operation.name for operation in between if not isinstance(operation, NormalizeFields)]:
            raise UsageError(
                f"normalize comes before and after {other[0]}, but one pass measures the rows that reach the first: "
                "let all normalize follow one another"
            )

    @property
    def choices(self) -> tuple[EpisodeChoice, ...]:
        """The operations that choose episodes."""
        return tuple(operation for operation in self.operations if isinstance(operation, EpisodeChoice))

    @property
    def on_rows(self) -> tuple[RowOperation, ...]:
        """The operations on rows."""
        return tuple(operation for operation in self.operations if isinstance(operation, RowOperation))

    @property
    def unmeasured(self) -> tuple[NormalizeFields, ...]:
        """The normalisations whose constants must still be measured on the rows that reach them."""
        return tuple(o for o in self.operations if isinstance(o, NormalizeFields) and _is_unmeasured(o))

    def of_episodes(self, episodes: Episodes) -> Program:
        """Return the program with `episodes` in place of its own choices by number."""
        return replace(self, operations=(episodes, *(o for o in self.operations if not isinstance(o, Episodes))))

    def describe(self) -> list[dict[str, Any]]:
        """Return the program as JSON."""
        return [operation.describe() for operation in self.operations]

    def selects(self, table: EpisodeTable) -> Any:
        """Return the rows of the episode table that are used, None for all; UsageError if none is left."""
        if not self.choices:
            return None
        keep = np.ones(len(table), bool)
        for choice in self.choices:
            keep &= choice.keeps(table)
        if not keep.any():
            choices = " and ".join(str(list(choice.describe().values())[-1]) for choice in self.choices)
            raise UsageError(f"none of {len(table):,} episodes is left by {choices}")
        return np.flatnonzero(keep)

    def settled(self, reader: StepReader) -> Program:
        """Return the program with arguments completed from the dataset, see `Operation.settled`."""
        found: list[Operation] = []
        for operation in self.operations:
            found.append(operation.settled(reader, found))
        return replace(self, operations=(*found,))

    def with_measurements(self, measured: Sequence[Measured]) -> Program:
        """Return the program with the constants of its normalisations."""
        states = iter(measured)
        found = tuple(
            operation.with_measurements(next(states))
            if isinstance(operation, NormalizeFields) and _is_unmeasured(operation)
            else operation
            for operation in self.operations
        )  # fmt: skip
        return replace(self, operations=found)


def _is_unmeasured(operation: Operation) -> bool:
    return isinstance(operation, NormalizeFields) and not operation.constants


class BoundProgram:
    """A program bound to the fields of a dataset.

    Creating it raises UsageError for operations that do not fit the fields, before any row is read. Then it is known
    which fields each operation needs, from the last one back to the source: only those are read and computed.
    """

    def __init__(self, program: Program, fields: Iterable[Field], source: Path | None = None) -> None:
        self.source = Fields.of(fields, source)
        self._steps: list[BoundOperation] = []
        self._seen: set[Key] = set()
        after = self.source
        for place, operation in enumerate(program.on_rows):
            step = _bound(operation, after, program.on_rows[place + 1 :])
            if isinstance(step, BoundNormalize) and not step.measured:
                self._refuse_twice(step)
            self._steps.append(step)
            after = step.after
        self.after = after
        if not after.by_key:
            raise UsageError("no field is left, expected at least one")
        self._wanted = _backwards(self._steps, frozenset(after.by_key))
        self._measuring = [step for step in self._steps if isinstance(step, BoundNormalize) and not step.measured]
        self._first = self._steps.index(self._measuring[0]) if self._measuring else 0
        looked_at = frozenset(key for step in self._measuring for key in step.looks_at)
        self._wanted_to_measure = _backwards(self._steps[: self._first], looked_at)

    def _refuse_twice(self, step: BoundNormalize) -> None:
        if twice := self._seen & step.looks_at:
            first = min(twice, key=lambda key: (key[0] == NEXT, key))
            raise UsageError(f"normalize has {key_name(first)!r} twice, expected once")
        self._seen |= step.looks_at

    @property
    def reads(self) -> frozenset[Key]:
        """The fields of the source that blocks must have: for `measure` if constants are missing, else for `run`."""
        return self._wanted_to_measure[0] if self._measuring else self._wanted[0]

    @property
    def row_bytes(self) -> int:
        """The size of a row in memory where it is largest."""
        return max((step.row_bytes for step in self._steps), default=0)

    def run(self, block: Block) -> Block:
        """Apply all operations to the rows of a block."""
        batch = self._batch(block, self._wanted[0])
        for step, wanted in zip(self._steps, self._wanted[1:], strict=True):
            step.apply(batch, wanted)
        return batch.block([key for key in self.after.by_key if key in batch.columns])

    def measure(self, block: Block) -> list[Measured]:
        """Apply the operations before the unmeasured normalisations; return the statistics for each of these."""
        batch = self._batch(block, self._wanted_to_measure[0])
        for step, wanted in zip(self._steps[: self._first], self._wanted_to_measure[1:], strict=True):
            step.apply(batch, wanted)
        return [step.measure(batch) for step in self._measuring]

    def merged(self, measured: Iterable[Sequence[Measured]]) -> list[Measured]:
        """Merge the statistics of all blocks, in order."""
        totals = [step.nothing() for step in self._measuring]
        for found in measured:
            for total, part in zip(totals, found, strict=True):
                for name, (moments, sketch) in part.items():
                    total[name][0].merge(moments)
                    known = total[name][1]
                    if known is not None and sketch is not None:
                        known.merge(sketch)
        return totals

    def _batch(self, block: Block, wanted: frozenset[Key]) -> LazyBatch:
        return LazyBatch.of(block, {key: self.source[key].name for key in wanted})


def _bound(operation: RowOperation, fields: Fields, later: Sequence[RowOperation]) -> BoundOperation:
    try:
        return operation.bind(fields)
    except UsageError:
        named = _texts_of(operation)
        maker = next((o for o in later if o.makes in named and not fields.has_name(str(o.makes))), None)
        if maker is None:
            raise
        raise UsageError(
            f"{operation.name} names {maker.makes!r}, which {maker.name} makes only after it",
            hint="write the operations in the right order into a file for --pipeline: --show-pipeline prints a draft",
        ) from None


def _texts_of(operation: RowOperation) -> set[str]:
    """Return the texts among the arguments of an operation: they may be names of fields."""
    values = [part for value in asdict(operation).values() for part in (value if isinstance(value, tuple) else [value])]
    return {value for value in values if isinstance(value, str)}


def _backwards(steps: Sequence[BoundOperation], wanted: frozenset[Key]) -> list[frozenset[Key]]:
    """Return the fields that are needed before each step, and `wanted`, those that are needed after the last step."""
    found = [wanted]
    for step in reversed(steps):
        found.append(step.needs(found[-1]))
    return found[::-1]


class ProgramProcessor(Processor):
    """Applies a program. The result does not depend on how the rows are divided into blocks.

    UsageError for operations that do not fit the fields.

    While `needs_measuring`, `reads` returns the fields that `measure` needs; for the processor that `with_measurements`
    returns, those that `apply` needs.

    Args:
        program: the operations.
        fields: the fields of the dataset.
        remarks: further notes for the manifest of the result.
        asked: the program before its constants were measured; default: `program`.
        source: the folder of the dataset.
    """

    unit = "step"
    edits_rows = False

    def __init__(
        self,
        program: Program,
        fields: Iterable[Field],
        remarks: tuple[str, ...] = (),
        asked: Program | None = None,
        source: Path | None = None,
    ) -> None:
        self.program = program
        self._remarks = remarks
        self._asked = program if asked is None else asked
        self._fields = tuple(fields)
        self._source = source
        self._bound = BoundProgram(program, self._fields, source)
        self.row_bytes = self._bound.row_bytes
        self.whole_episodes = any(operation.whole_episodes for operation in program.on_rows)
        self.needs_measuring = bool(program.unmeasured)
        kinds = [(operation.makes_rows, operation.drops_rows) for operation in program.on_rows]
        self.keeps_ends = (True, False) in kinds and all(not drops for _, drops in kinds)

    def __reduce__(self) -> tuple[Any, ...]:
        # The bound program contains functions that cannot be pickled.
        return ProgramProcessor, (self.program, self._fields, self._remarks, self._asked, self._source)

    def portable(self) -> ProgramProcessor:
        for operation in self.program.operations:
            try:
                pickle.dumps(operation)
            except Exception as error:
                raise UsageError(
                    f"{operation.name} cannot be sent to worker processes: {error_text(error)}",
                    hint="use num_workers=0 to run it in this process, or define its class at the top of a module",
                ) from error
        return self

    @property
    def label(self) -> str:
        return ", ".join(dict.fromkeys(operation.name for operation in self.program.operations))

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields of the result, including their roles; known before a row is read."""
        return tuple(self._bound.after)

    @property
    def rescaled(self) -> frozenset[Key]:
        named = (operation.rescales for operation in self.program.on_rows)
        return frozenset(tuple(name.split(".")) for name in named if name is not None)

    def notes(self, fields: Sequence[Field], result: Sequence[Field]) -> tuple[str, ...]:
        """Return notes on the result, except on fields that were left out."""
        return (*self._remarks, *(note for operation in self.program.on_rows for note in operation.notes))

    def load(self, context: Context) -> LoadedProcessor:
        return _LoadedProgram(BoundProgram(self.program, context.fields, self._source))

    def arguments(self) -> dict[str, Any]:
        """Return the program as it was requested, and the measured constants, if any."""
        measured = [
            [part.describe() for part in known.constants]
            for asked, known in zip(self._asked.operations, self.program.operations, strict=True)
            if isinstance(known, NormalizeFields) and known != asked
        ]
        return {"operations": self._asked.describe(), **({"constants": measured} if measured else {})}

    def is_described(self) -> bool:
        return not self._foreign

    @property
    def _foreign(self) -> list[type[Operation]]:
        """The classes of the operations of other packages, whose code may change between two runs."""
        return [kind for o in self.program.operations if (kind := type(o)) is not OPERATIONS.get(o.name)]

    def fingerprint(self) -> str:
        try:
            sources = [inspect.getsource(sys.modules[kind.__module__]) for kind in self._foreign]
        except (OSError, TypeError, KeyError):  # without the source code, no two runs are known to be equal
            return uuid.uuid4().hex
        return digest_bytes("\n".join(sources).encode()) if sources else ""

    def keeps_rows(self) -> bool:
        return not any(operation.drops_rows or operation.makes_rows for operation in self.program.on_rows)

    def reads(self, fields: Sequence[Field]) -> frozenset[Key]:
        return BoundProgram(self.program, fields, self._source).reads

    def selects(self, episodes: EpisodeTable) -> Any:
        if all(field.key != NEXT_REWARD for field in self._fields):
            # Without rewards, returns are unknown, not 0.
            episodes = replace(episodes, total_reward=np.full(len(episodes), np.nan))
        return self.program.selects(episodes)

    def documents(self, documents: Mapping[str, bytes]) -> Mapping[str, bytes]:
        for operation in self.program.on_rows:
            documents = operation.documents(documents)
        return documents

    def texts(self, numbers: Sequence[int], texts: EpisodeTexts) -> EpisodeTexts:
        for operation in self.program.on_rows:
            texts = operation.texts(numbers, texts)
        return texts

    def with_measurements(self, measured: Iterable[Any]) -> Processor:
        known = self.program.with_measurements(self._bound.merged(measured))
        return ProgramProcessor(known, self._fields, self._remarks, self._asked, self._source)

    def left_out(self, fields: Sequence[Field], result: Sequence[Field]) -> Mapping[str, Any]:
        """Return the names of the fields whose values are lost; fields that were renamed or joined are not."""
        return self._bound.after.lost(fields)


class _LoadedProgram(LoadedProcessor):
    def __init__(self, bound: BoundProgram) -> None:
        self._bound = bound

    def apply(self, block: Block) -> Block:
        return self._bound.run(block)

    def measure(self, block: Block) -> Any:
        return self._bound.measure(block)


Made = TypeVar("Made")

_TABLE = "operation"
_KIND = "name"


def program_of(
    operations: Mapping[str, Any] | None = None,
    pipeline: PathLike | None = None,
    replay: PathLike | None = None,
    *,
    replay_filters: bool = False,
) -> Program:
    """Make a program from the options of operations, from a pipeline file, or from the manifest of a dataset.

    Args:
        operations: names of options, with `-` or `_`, and their values: a text, or a list of texts if the option may be
            repeated; for rename, cast, cat, resize and normalize also a mapping, for clip-reward a pair. Options that
            are None, False or empty count as not given. Operations are applied in the order of `OPERATIONS`.
        pipeline: a pipeline file. Of the options, only `episodes` can be combined with it, and is applied first.
        replay: a dataset or its manifest, whose last step is repeated. `episodes` can be combined with it as well.
        replay_filters: also repeat the operations of `replay` that chose episodes and rows.

    Raises:
        UsageError: more than one of the three is given, or none; or operations are invalid.
    """
    if replay_filters and not replay:
        raise UsageError("--replay-filters needs --replay, which was not given")
    given = given_operations(operations)
    written = pipeline is not None or replay is not None
    ways = [
        *(["operations"] if given.keys() - ({"episodes"} if written else set()) else []),
        *(["pipeline"] if pipeline else []),
        *(["replay"] if replay else []),
    ]
    if len(ways) > 1:
        hint = "of the operations, only --episodes can be combined with them"
        raise UsageError(f"{' and '.join(ways)} are set, expected one of them", hint=hint)
    if written:
        program = (
            pipeline_program(Path(pipeline))
            if pipeline
            else replayed_program(Path(replay or ""), filters=replay_filters)
        )
        return program.of_episodes(Episodes(",".join(texts_of(given["episodes"], "episodes")))) if given else program
    for name in given:
        if name not in OPERATIONS and name != "gamma":
            raise UsageError(
                f"there is no operation {name!r}{did_you_mean(name, OPERATIONS)}",
                hint=f"there are {', '.join(OPERATIONS)}",
            )
    discount = Discount(given.get("gamma"))
    asked = (kind.from_option(given[name], discount) for name, kind in OPERATIONS.items() if name in given)
    program = Program(tuple(operation for operations in asked for operation in operations))
    if not discount.used:
        *first, last = (option.name for option in OPERATION_OPTIONS if option.discounted)
        raise UsageError(f"gamma is set, expected with an operation that discounts: {', '.join(first)} or {last}")
    return program


def given_operations(operations: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options that are given, with `-` in their names."""
    return {name.replace("_", "-"): value for name, value in (operations or {}).items() if _is_given(value)}


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and not (isinstance(value, list | tuple | Mapping) and not value)


def program_of_documents(documents: Sequence[Any], origin: str) -> Program:
    """Make a program from JSON; UsageError for invalid operations, in which `origin` names the program."""
    found = tuple(
        operation_of(document, f"{origin}: operation {number}") for number, document in enumerate(documents, start=1)
    )
    return _with_origin(lambda: Program(found), origin)


def operation_of(document: Any, origin: str, kind: type[Operation] | None = None) -> Operation:
    """Make an operation from JSON; `kind` is its class, by default the class with its name."""
    if not isinstance(document, Mapping) or not isinstance(document.get(_KIND), str):
        raise UsageError(f"{origin} has no name, expected one of {', '.join(OPERATIONS)}")
    name = document[_KIND]
    kind = kind or find_operation(name)
    if kind is None:
        raise UsageError(
            f"{origin} is {name!r}, which does not exist{did_you_mean(name, OPERATIONS)}",
            hint=f"there are {', '.join(OPERATIONS)}",
        )
    arguments = {key: value for key, value in document.items() if key != _KIND}
    return _made(kind, arguments, f"{origin} ({name})")


def _made(kind: type[Made], arguments: Mapping[str, Any], origin: str) -> Made:
    parts = {part.name: part for part in dataclasses.fields(kind)}  # type: ignore[arg-type]
    types = get_type_hints(kind)
    for key in arguments:
        if key not in parts:
            known = f"it takes {', '.join(parts)}" if parts else "it takes nothing"
            raise UsageError(f"{origin} has {key!r}, which is unknown{did_you_mean(key, parts)}", hint=known)
    for part in parts.values():
        if part.default is dataclasses.MISSING and part.name not in arguments:
            raise UsageError(f"{origin} lacks {part.name!r}")
    given = {key: _value(value, types[key], f"{origin} has {key}") for key, value in arguments.items()}
    return _with_origin(lambda: kind(**given), origin)


def _value(value: Any, kind: Any, place: str) -> Any:
    """Check one argument and convert it to the type of its field."""
    if kind == tuple[Constants, ...]:
        return tuple(_made(Constants, part, place) for part in _listed(value, dict, "tables", place))
    if kind == tuple[str, ...]:
        return tuple(_listed(value, str, "texts", place))
    if kind == tuple[float, ...]:
        return tuple(float(number) for number in _listed(value, (int, float), "numbers", place))
    if kind == tuple[int, ...]:
        return tuple(_listed(value, int, "whole numbers", place))
    wanted, words = _SCALARS[str(getattr(kind, "__args__", (kind,))[0])]
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise UsageError(f"{place} = {_short(value)}, expected {words}")
    return float(value) if wanted == (int, float) else value


_SCALARS: dict[str, tuple[Any, str]] = {
    str(str): (str, "a text"),
    str(int): (int, "a whole number"),
    str(float): ((int, float), "a number"),
    str(bool): (bool, "true or false"),
}


def _listed(value: Any, kind: Any, words: str, place: str) -> list[Any]:
    good = isinstance(value, list) and all(isinstance(part, kind) and not isinstance(part, bool) for part in value)
    if not good:
        raise UsageError(f"{place} = {_short(value)}, expected a list of {words}")
    return list(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _with_origin(make: Callable[[], Made], origin: str) -> Made:
    """Call `make`, and put `origin` in front of the message of a UsageError."""
    try:
        return make()
    except UsageError as error:
        raise UsageError(f"{origin}: {error.message}", hint=error.hint) from None


def pipeline_program(path: str | Path) -> Program:
    """Read a pipeline file: `[[operation]]` tables in the order in which they are applied.

    Raises:
        DatasetNotFoundError: the file does not exist.
        UsageError: its content is invalid.
    """
    place = fs.expanded(path)
    try:
        document = tomllib.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DatasetNotFoundError(f"{path} not found, expected a pipeline file") from None
    except OSError as error:
        raise UsageError(f"the pipeline {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the pipeline {path} is not TOML: {error}") from error
    for key in document:
        if key != _TABLE:
            raise UsageError(
                f"{path} has {key!r}, which is unknown{did_you_mean(key, [_TABLE])}",
                hint="write [[operation]] tables",
            )
    tables = document.get(_TABLE)
    if not isinstance(tables, list) or not tables:
        raise UsageError(f"{path} has no operations, expected [[operation]] tables")
    return program_of_documents(tables, str(path))


def pipeline_text(program: Program) -> str:
    """Write a program as a pipeline file; reading it gives the same program."""
    tables = []
    for document in program.describe():
        lines = [f"{key} = {toml_value(value)}" for key, value in document.items()]
        tables.append("\n".join([f"[[{_TABLE}]]", *lines]))
    return "\n\n".join(tables) + "\n"


def replayed_program(path: PathLike, *, filters: bool = False) -> Program:
    """Return the program that made a dataset, from its manifest; `path` is the manifest or the folder of the dataset.

    Measured constants are included. Operations that chose episodes and rows were meant for the original dataset; they
    are included only with `filters`. UsageError if the dataset was not made by operations, or only by left-out ones.
    """
    documents, constants = _documents_of(path)
    kept = [document for document in documents if filters or not _chooses(document)]
    if documents and not kept:
        raise UsageError(
            f"{path} was made only by choosing episodes and rows, which is not repeated",
            hint="add --replay-filters to repeat it",
        )
    return program_of_documents(_with_constants(kept, constants), str(path))


def replayed_frames(path: PathLike) -> int | None:
    """Return the `num_frames` that the dataset at `path` was made with; None if all steps were used."""
    frames = _last_step(path).arguments.get("num_frames")
    return frames if type(frames) is int else None


def filters_left_out(path: PathLike) -> tuple[str, ...]:
    """Return a note on the choices of episodes and rows that `replayed_program` leaves out without `filters`."""
    chosen = [
        " ".join(str(value) for value in ("--" + str(document[_KIND]), *(document[k] for k in document if k != _KIND)))
        for document in _documents_of(path)[0]
        if _chooses(document)
    ]
    frames = replayed_frames(path)
    chosen += [] if frames is None else [f"--num-frames {frames}"]
    left = ", ".join(chosen)
    if not left:
        return ()
    return (f"the replay leaves out the choice of episodes and rows: {left} (--replay-filters repeats it)",)


def _chooses(document: Any) -> bool:
    return isinstance(document, dict) and _is_choice(document.get(_KIND))


def _is_choice(name: Any) -> bool:
    """Whether an operation chooses episodes or rows, and does nothing else."""
    kind = (find_operation(name) if isinstance(name, str) else None) or Operation
    drops = issubclass(kind, RowOperation) and kind.drops_rows and kind.makes is RowOperation.makes
    return drops or issubclass(kind, EpisodeChoice)


def _documents_of(path: PathLike) -> tuple[list[Any], list[Any]]:
    """Return the operations that made a dataset, and the constants that were measured for them."""
    last = _last_step(path)
    documents = last.arguments.get("operations")
    if not isinstance(documents, list):
        made = last.arguments.get("function", "a function")
        raise UsageError(f"{path} was made by {made}; only operations can be replayed", hint="name it with --fn")
    constants = last.arguments.get("constants")
    return documents, constants if isinstance(constants, list) else []


def _last_step(path: PathLike) -> Provenance:
    """Return the step that made a dataset; UsageError if it was not `preprocess`."""
    manifest = manifest_at(path)
    last = manifest.provenance[-1] if manifest.provenance else None
    if last is None or last.verb != "preprocess":
        made = "does not say how it was made" if last is None else f"was made by {last.verb}"
        raise UsageError(f"{path} {made}, expected a dataset that preprocess made")
    return last


def _with_constants(documents: list[Any], measured: list[Any]) -> list[Any]:
    """Add the measured constants to the normalisations that have none, in order."""
    rest = iter(measured)
    return [
        {**document, "constants": next(rest, [])} if _lacks_constants(document) else document for document in documents
    ]


def _lacks_constants(document: Any) -> bool:
    return isinstance(document, dict) and document.get(_KIND) == NormalizeFields.name and "constants" not in document


def different_past(path: PathLike, manifest: Manifest) -> tuple[str, ...]:
    """Return a note if the two datasets were preprocessed differently before the step that is replayed.

    `path` is the dataset whose last step is replayed on the dataset of `manifest`. A replay applies only the last step,
    and its constants fit only rows that went through the same steps before.
    """
    theirs, ours = _made_before(manifest_at(path).provenance[:-1]), _made_before(manifest.provenance)
    if theirs == ours:
        return ()
    before, here = _joined_steps(theirs), _joined_steps(ours)
    return (f"{path} had gone through {before} before, this dataset through {here}: scales may differ",)


def _joined_steps(steps: Sequence[str]) -> str:
    return ", then ".join(steps) or "nothing"


def _made_before(provenance: Sequence[Provenance]) -> list[str]:
    """Return for each `preprocess` step the operations or the function that changed values; choices do not count."""
    found = []
    for step in provenance:
        if step.verb == "preprocess":
            documents = step.arguments.get("operations")
            names = [part.get(_KIND) for part in documents or () if isinstance(part, dict)]
            changing = [str(name) for name in names if not _is_choice(name)]
            if changing or not names:
                found.append(", ".join(changing) or str(step.arguments.get("function")))
    return found


def manifest_at(path: PathLike) -> Manifest:
    """Read a manifest; `path` is the file, or the folder of the dataset."""
    place = fs.expanded(path)
    if place.is_file():
        return Manifest.from_dict(load_json(place), str(place))
    if place.exists():
        return Manifest.load(place)
    raise DatasetNotFoundError(f"{path} not found, expected a dataset or its {MANIFEST}")
