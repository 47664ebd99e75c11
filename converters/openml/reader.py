"""Reads and downloads tables of OpenML, each an ARFF file with its description: every row is an episode.

Each of the seven datasets defines how the columns are encoded as a vector of numbers and a label. ARFF is the text
format of OpenML: a header with attributes, then rows of values separated by commas. Tables are downloaded through
OpenML's JSON interface; neither scikit-learn nor pandas is needed.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from ...core.errors import CorruptDataError, DatasetNotFoundError, FormatError, NetworkError, UsageError, did_you_mean
from ...core.format import fs
from ...core.format.contracts import Array, SourceFacts
from ...core.format.converter import Advance, Ids, Note, RemoteDataset, RemoteFile
from ...core.format.documents import json_file, parse_json
from ...core.format.files import open_regular, read_regular
from ...core.format.manifest import Dropped
from ...core.remote.http import HttpSource
from ...core.remote.transport import matches, read_small, require_network
from ...core.stats import Moments
from ...core.ted.schema import Field, Key
from ..files.readers import RowReader

_BLOCK_BYTES = 1 << 20
_LONGEST_LINE = 4 << 20
_MOST_ATTRIBUTES = 10_000
_NUMBERS = frozenset({"numeric", "real", "integer"})
_ATTRIBUTE = re.compile(
    r"""@attribute\s+(?P<name>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s{]+)\s*(?P<type>\{.*\}|[A-Za-z]+.*)""",
    re.IGNORECASE | re.DOTALL,
)
_VALUE = re.compile(r"""\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|([^,'"]*))\s*(,|$)""", re.DOTALL)
_MISSING = ["?", " ?", "? ", " ? ", "\t?"]
"""The spellings of a missing value that occur, with blanks around it."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """A column: its name and its declared categories in their order, or None for a column of numbers."""

    name: str
    categories: tuple[str, ...] | None


class ArffFile:
    """An ARFF file with rows of numbers and categories; FormatError for other types and for sparse rows.

    `blocks` yields the columns of consecutive rows: numbers as float64, with NaN for missing ones, and categories as
    their positions in `Attribute.categories`, int64, with -1 for missing ones.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with os.fdopen(open_regular(path), "rb") as file:
            self.attributes, self._begin, self._line = _header(file, path)

    def blocks(self) -> Iterator[Mapping[str, Array]]:
        """Yield all rows in blocks; CorruptDataError for a row that does not match the header."""
        with os.fdopen(open_regular(self.path), "rb") as file:
            file.seek(self._begin)
            row = 0
            for batch in self._batches(file):
                yield {one.name: self._values(one, batch.column(at), row) for at, one in enumerate(self.attributes)}
                row += batch.num_rows

    def _batches(self, file: Any) -> Iterator[Any]:
        names = [str(number) for number in range(len(self.attributes))]
        kinds = [pa.float64() if one.categories is None else pa.string() for one in self.attributes]

        try:
            yield from arrow_csv.open_csv(
                pa.PythonFile(_WithoutComments(file), "r"),
                arrow_csv.ReadOptions(column_names=names, use_threads=False, block_size=_BLOCK_BYTES),
                arrow_csv.ParseOptions(quote_char="'", double_quote=False, escape_char="\\"),
                arrow_csv.ConvertOptions(
                    column_types=dict(zip(names, kinds, strict=True)), null_values=_MISSING, strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )  # fmt: skip
        except pa.ArrowInvalid as error:
            said = " ".join(str(error).split())[:200]
            raise CorruptDataError(
                f"{self.path}: the rows, which begin in line {self._line + 1:,}, cannot be read: {said}"
            ) from error

    def _values(self, attribute: Attribute, values: Any, row: int) -> Array:
        if attribute.categories is None:
            return np.asarray(values.to_numpy(zero_copy_only=False), np.float64)
        trimmed = pc.utf8_trim_whitespace(values)
        codes = pc.index_in(trimmed, value_set=pa.array(attribute.categories, pa.string()), skip_nulls=True)
        known = np.asarray(pc.fill_null(codes, -1).to_numpy(zero_copy_only=False), np.int64)
        odd = (known < 0) & ~np.asarray(values.is_null())
        if odd.any():
            at = int(odd.argmax())
            raise CorruptDataError(
                f"{self.path}: {attribute.name!r} is {values[at].as_py()!r} in row {row + at:,}, which is not among "
                f"the {len(attribute.categories)} categories in the header"
            )
        return known


class _WithoutComments(io.RawIOBase):
    """The remaining lines of a file, without comments."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        wanted = _BLOCK_BYTES if size is None or size < 0 else size
        while not self._left:
            lines = self._file.readlines(wanted)
            if not lines:
                return b""
            self._left = b"".join(line for line in lines if not line.lstrip().startswith(b"%"))
        given, self._left = self._left[:wanted], self._left[wanted:]
        return given


def _header(file: Any, path: Path) -> tuple[tuple[Attribute, ...], int, int]:
    """Read the attributes; return them, the offset of the rows in bytes, and the number of the line before them."""
    found: list[Attribute] = []
    for number in range(1, 10 * _MOST_ATTRIBUTES):
        raw = file.readline(_LONGEST_LINE)
        try:
            line = raw.decode().strip()
        except UnicodeDecodeError as error:
            raise CorruptDataError(f"{path}: line {number:,} is not UTF-8 text") from error
        word = line.split(None, 1)[0].lower() if line else ""
        if word == "@data":
            if not found:
                raise CorruptDataError(f"{path} has no @attribute before its rows")
            return tuple(found), file.tell(), number
        if word == "@attribute":
            found.append(_attribute(line, path, number))
            if found[-1].name in {one.name for one in found[:-1]}:
                raise CorruptDataError(f"{path}: line {number:,} has the attribute {found[-1].name!r} again")
        elif not raw or (line and not line.startswith("%") and word != "@relation"):
            break
    raise CorruptDataError(f"{path} is not an ARFF file, or was cut: its header does not end in @data")


def _attribute(line: str, path: Path, number: int) -> Attribute:
    match = _ATTRIBUTE.fullmatch(line)
    if match is None:
        raise CorruptDataError(f"{path}: line {number:,} is not an attribute: {line[:80]!r}")
    name, kind = _unquoted(match["name"]), match["type"].strip()
    if kind.startswith("{"):
        return Attribute(name, _categories(kind[1:-1], path, number))
    if kind.lower() not in _NUMBERS:
        raise FormatError(f"{path}: {name!r} is of type {kind[:40]!r}; numbers and categories are supported")
    return Attribute(name, None)


def _categories(text: str, path: Path, number: int) -> tuple[str, ...]:
    found: list[str] = []
    at = 0
    while at < len(text):
        match = _VALUE.match(text, at)
        if match is None or match.end() == at:
            raise CorruptDataError(
                f"{path}: line {number:,} has categories that cannot be read: {text[at : at + 40]!r}"
            )
        single, double, plain, _ = match.groups()
        quoted = single if single is not None else double
        found.append(plain.strip() if quoted is None else re.sub(r"\\(.)", r"\1", quoted).strip())
        at = match.end()
    if len(set(found)) < len(found) or not all(found):
        raise CorruptDataError(f"{path}: line {number:,} has a category twice, or an empty one")
    return tuple(found)


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text[0] in "'\"" else text


class UnknownTableError(DatasetNotFoundError, RuntimeError):
    """An unknown name of a dataset; also a RuntimeError, which TorchRL raises."""


@dataclass(frozen=True, slots=True)
class OpenmlDataset:
    """A dataset: a table of OpenML in a certain version, and its encoding.

    Attributes:
        id: the name of the dataset.
        table: the name of the table.
        version: the version of the table.
        one_hot: whether a column of categories becomes a column for each category, instead of one of codes.
        target: the column that becomes the label; None for OpenML's default target.
        complete: whether rows with a missing value are left out.
    """

    id: str
    table: str
    version: int
    one_hot: bool = False
    target: str | None = None
    complete: bool = False


DATASETS = {
    one.id: one
    for one in (
        OpenmlDataset("adult_num", "adult", 1, target="occupation", complete=True),
        OpenmlDataset("adult_onehot", "adult", 1, one_hot=True, target="occupation", complete=True),
        OpenmlDataset("covertype", "covertype", 3),
        OpenmlDataset("magic", "MagicTelescope", 1),
        OpenmlDataset("mushroom_num", "mushroom", 1),
        OpenmlDataset("mushroom_onehot", "mushroom", 1, one_hot=True),
        OpenmlDataset("shuttle", "shuttle", 1),
    )
}


def dataset_named(name: str) -> OpenmlDataset:
    """Return the dataset with a name; raise UnknownTableError for an unknown one."""
    if name not in DATASETS:
        raise UnknownTableError(
            f"openml has no dataset {name!r} with a known encoding{did_you_mean(name, DATASETS)}",
            hint=f"known: {', '.join(DATASETS)}; any other table can be converted with --from table",
        )
    return DATASETS[name]


MISSING_CATEGORY = "?"


@dataclass(frozen=True, slots=True)
class Categories:
    """The encoding of a column of categories.

    The values that occur are numbered in the order of their text; a missing value is a category of its own, after all
    others. `codes` has the code for each position in the header, the last one for missing values, and -1 for values
    that do not occur. `names` has the value of each code.
    """

    attribute: Attribute
    codes: Array
    names: tuple[str, ...]

    @classmethod
    def of(cls, attribute: Attribute, occurs: Array) -> Categories:
        """Number the values that occur; `occurs` has a flag for each position in the header, the last for missing."""
        texts = attribute.categories or ()
        order = sorted((text, at) for at, text in enumerate(texts) if occurs[at])
        codes = np.full(len(texts) + 1, -1, np.int64)
        for code, (_, at) in enumerate(order):
            codes[at] = code
        names = tuple(text for text, _ in order)
        if occurs[-1]:
            codes[-1] = len(names)
            names = (*names, MISSING_CATEGORY)
        return cls(attribute, codes, names)

    def encode(self, positions: Array) -> Array:
        """Return the codes of positions in the header, where -1 means missing."""
        return np.asarray(self.codes[positions])


@dataclass(frozen=True, slots=True)
class Scaled:
    """The encoding of a column of numbers: scaled to mean 0 and standard deviation 1; a constant is only centred."""

    attribute: Attribute
    mean: float
    std: float

    def encode(self, values: Array) -> Array:
        """Return the scaled values."""
        return np.asarray((values - self.mean) / (self.std or 1.0))


class Encoding:
    """The encoding of the rows of a file, which one pass over the file determines.

    `rows` is the number of rows that are kept, `left_out` the number of those that a dataset with `complete` leaves
    out, and `width` the length of a vector. Raises FormatError if the target is missing, has missing values or is not a
    category, and for missing numbers.
    """

    def __init__(self, file: ArffFile, dataset: OpenmlDataset, target: str, ignored: Sequence[str]) -> None:
        self._file, self._dataset = file, dataset
        names = [one.name for one in file.attributes]
        chosen = dataset.target or target
        if chosen not in names:
            raise FormatError(f"{file.path} has no column {chosen!r} for the label; it has {', '.join(names)}")
        left = {chosen, target, *ignored}
        self.dropped = tuple(name for name in names if name in left - {chosen})
        inputs = [one for one in file.attributes if one.name not in left]
        label = next(one for one in file.attributes if one.name == chosen)
        if label.categories is None:
            raise FormatError(f"{file.path}: the label {chosen!r} has numbers, expected categories")
        self.rows = self.left_out = 0
        self._used = [*inputs, label]
        occurs = {one.name: np.zeros(len(one.categories or ()) + 1, bool) for one in self._used}
        moments = {one.name: Moments(1) for one in inputs if one.categories is None}
        for block in self._kept_blocks(count=True):
            for one in self._used:
                if one.categories is None:
                    moments[one.name].merge(Moments.of(block[one.name].reshape(-1, 1)))
                else:
                    occurs[one.name][block[one.name]] = True
        if not self.rows:
            raise FormatError(f"{file.path} has no rows without missing values")
        self.columns = tuple(self._column(one, occurs[one.name], moments.get(one.name), file.path) for one in inputs)
        self.label = Categories.of(label, occurs[chosen])
        if occurs[chosen][-1]:
            raise FormatError(f"{file.path}: the label {chosen!r} is missing in some rows")
        self.width = sum(self._width(one) for one in self.columns)

    def _column(self, one: Attribute, occurs: Array, moments: Moments | None, path: Path) -> Categories | Scaled:
        if moments is None:
            return Categories.of(one, occurs)
        if moments.nan[0] or moments.infinite[0]:
            raise FormatError(f"{path}: {one.name!r} is missing or infinite in some rows, expected a number")
        return Scaled(one, float(moments.mean[0]), float(moments.std[0]))

    def _width(self, column: Categories | Scaled) -> int:
        return len(column.names) if self._dataset.one_hot and isinstance(column, Categories) else 1

    def _kept_blocks(self, *, count: bool = False) -> Iterator[Mapping[str, Array]]:
        """Yield the rows that are kept: for a dataset with `complete`, those without a missing value."""
        for block in self._file.blocks():
            rows = len(next(iter(block.values())))
            kept = np.ones(rows, bool)
            if self._dataset.complete:
                left = {*self.dropped}
                for one in self._file.attributes:
                    if one.name not in left:
                        kept &= ~np.isnan(block[one.name]) if one.categories is None else block[one.name] >= 0
            if count:
                self.rows += int(kept.sum())
                self.left_out += int(rows - kept.sum())
            if kept.any():
                yield {one.name: block[one.name][kept] for one in self._used}

    def encoded(self) -> Iterator[tuple[Array, Array]]:
        """Yield blocks of rows: vectors, float64 `[n, width]`, and labels, int64 `[n]`."""
        for block in self._kept_blocks():
            parts: list[Array] = []
            for column in self.columns:
                values = column.encode(block[column.attribute.name])
                if self._dataset.one_hot and isinstance(column, Categories):
                    parts.append(np.eye(len(column.names))[values])
                else:
                    parts.append(values.astype(np.float64).reshape(-1, 1))
            yield np.concatenate(parts, 1), self.label.encode(block[self.label.attribute.name])

    def to_dict(self) -> dict[str, Any]:
        """Return the constants of the encoding, with which vectors can be decoded, for the documents of the dataset."""
        columns: list[dict[str, Any]] = []
        for column in self.columns:
            name = column.attribute.name
            if isinstance(column, Scaled):
                columns.append({"name": name, "mean": column.mean, "std": column.std})
            else:
                how = "one-hot" if self._dataset.one_hot else "code"
                columns.append({"name": name, "encoding": how, "categories": list(column.names)})
        label = {"name": self.label.attribute.name, "categories": list(self.label.names)}
        return {"dataset": self._dataset.id, "columns": columns, "label": label, "rows_left_out": self.left_out}


DESCRIPTION = "description.json"
OBSERVATION: Key = ("observation",)
LABEL: Key = ("y",)


class OpenmlReader(RowReader):
    """Reads a folder with one ARFF file and `description.json`, OpenML's description of the table.

    `observation` is the encoded row, float64; `y` is the label as a number from 0, int64. The dataset has no actions
    and no rewards, because the bandit chooses a label and defines its reward. Every episode has one step, which is
    terminated, and no next observation. Folders are never detected: only `rbtool download openml ID` uses this reader.

    Options: `id` is the name of the dataset, which determines the encoding. Raises FormatError for other tables, and
    CorruptDataError for damaged files.
    """

    option_names = frozenset({"id"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return False, because the encoding of a table follows from the id alone."""
        return False

    def on_open(self) -> None:
        """Read the description and the header."""
        if "id" not in self.options:
            raise UsageError(
                f"{self.path}: the id of the dataset is missing", hint="fetch it with rbtool download openml ID"
            )
        self._dataset = dataset_named(str(self.options["id"]))
        self._description = description_in(read_regular(self.path / DESCRIPTION), str(self.path / DESCRIPTION))
        found = sorted(self.path.glob("*.arff"))
        if len(found) != 1:
            raise FormatError(f"{self.path} has {len(found)} ARFF files, expected one")
        self._file = ArffFile(found[0])
        self._encoding: Encoding | None = None

    def _encoded(self) -> Encoding:
        if self._encoding is None:
            target = str(self._description.get("default_target_attribute") or "")
            ignored = [*_names(self._description, "ignore_attribute"), *_names(self._description, "row_id_attribute")]
            self._encoding = Encoding(self._file, self._dataset, target, ignored)
        return self._encoding

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Read the file once, to determine its encoding, and return the facts."""
        found = self._encoded()
        progress(found.rows)
        notes = [
            "every row is an episode of one step, without action, reward and next observation: a contextual bandit",
            f"the label is {found.label.attribute.name}, a number for each of {len(found.label.names)} categories",
        ]
        if found.left_out:
            which = "1 row" if found.left_out == 1 else f"{found.left_out:,} rows"
            notes.append(f"{which} with a missing value left out")
        if licence := self._description.get("licence"):
            notes.append(f"licence of the data, as OpenML states it: {licence}")
        return SourceFacts(
            source="openml",
            id=self._dataset.id,
            fields=(
                (Field(OBSERVATION, "float64", (found.width,), "observation"), "step"),
                (Field(LABEL, "int64", (), "info"), "step"),
            ),
            episode_numbers=range(found.rows),
            steps=found.rows,
            renamed_keys={found.label.attribute.name: "y"},
            dropped_keys=tuple(
                Dropped(name, "it is neither the label nor an input, according to OpenML or the dataset")
                for name in found.dropped
            ),
            notes=tuple(notes),
            documents={
                DESCRIPTION: read_regular(self.path / DESCRIPTION),
                "encoding.json": json_file(found.to_dict()),
            },
            lengths=[1] * found.rows,
        )

    def row_blocks(self) -> Iterator[Mapping[Key, Array]]:
        """Yield the encoded rows with their labels."""
        for rows, labels in self._encoded().encoded():
            yield {OBSERVATION: rows, LABEL: labels}

    def files(self) -> list[Path]:
        """Return the table and its description."""
        return [self._file.path, self.path / DESCRIPTION]


def description_in(data: bytes, origin: str) -> dict[str, Any]:
    """Return OpenML's description of a table from a JSON document; FormatError for anything else."""
    document = parse_json(data, origin)
    found = document.get("data_set_description") if isinstance(document, dict) else None
    if not isinstance(found, dict):
        raise FormatError(f"{origin} is not OpenML's description of a table")
    return found


def _names(description: dict[str, Any], entry: str) -> list[str]:
    """Return the names in an entry, which is a list, or text with commas."""
    value = description.get(entry) or []
    return [str(one) for one in value] if isinstance(value, list) else [one.strip() for one in str(value).split(",")]


_URL = "OPENML_URL"
_DEFAULT = "https://api.openml.org"
_ADDRESS = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", re.ASCII)  # no password: addresses are recorded
_ANSWER_BYTES = 16 << 20
_MD5 = re.compile(r"[0-9a-f]{32}", re.ASCII)


class OpenmlSource(HttpSource):
    """Downloads from OpenML, or from the server in `OPENML_URL`, and compares tables with the md5 that it states."""

    name = "openml"
    namespaced = False

    def __init__(self) -> None:
        super().__init__()
        self._md5: dict[str, str] = {}
        """The md5 of each file, by path, whose size is not known before it is downloaded."""

    @property
    def remote(self) -> str:
        """The base URL, without a slash at the end; UsageError if the variable has another form."""
        named = os.environ.get(_URL) or _DEFAULT
        if not _ADDRESS.fullmatch(named):
            raise UsageError(
                f"{_URL} has {re.sub('//[^/]*@', '//…@', named)!r}, expected a base URL like {_DEFAULT}",
                hint=f"unset it for {_DEFAULT}",
            )
        return named.rstrip("/")

    def list_ids(self) -> Ids:
        """List the ids, which are part of this package, without a request."""
        return Ids(tuple(sorted(DATASETS)))

    def addresses(self, dataset_id: str) -> Mapping[str, Sequence[str]]:
        """Request the description of a table, and return the addresses of both."""
        file, description, _ = self._resolved(dataset_named(dataset_id))
        return {**file, **description}

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Request the description of a table, and the size of its file."""
        if revision is not None:
            raise UsageError(f"{self.remote} keeps no revisions", hint="leave out --revision")
        dataset = dataset_named(dataset_id)
        file, description, md5 = self._resolved(dataset)
        ((path, places),) = file.items()
        try:
            table = self.probe(path, places, md5)
        except NetworkError:
            table = self.probe(path, places)  # of unknown size: the md5 is compared after the download
            if table.size is not None or md5 is None:
                raise
            self._md5[path] = md5
        ((name, where),) = description.items()
        address = f"{self.remote}: {dataset.table}, version {dataset.version}"
        return RemoteDataset(dataset_id, address, None, (self.probe(name, where), table))

    def _resolved(self, dataset: OpenmlDataset) -> tuple[dict[str, list[str]], dict[str, list[str]], str | None]:
        """Return the addresses of the table and of its description, and the checksum of the table."""
        require_network(f"asking {urlsplit(self.remote).hostname}")
        number = self._number_of(dataset)
        where = f"{self.remote}/api/v1/json/data/{number}"
        found = description_in(read_small(self.transport, where, limit=_ANSWER_BYTES), where)
        if (found.get("name"), str(found.get("version"))) != (dataset.table, str(dataset.version)):
            raise FormatError(
                f"{where} describes {found.get('name')!r} in version {found.get('version')!r}, expected "
                f"{dataset.table!r} in version {dataset.version}"
            )
        md5 = found.get("md5_checksum")
        if md5 is not None and not (isinstance(md5, str) and _MD5.fullmatch(md5.lower())):
            raise FormatError(f"{where} states the md5 {md5!r}, expected 32 hexadecimal digits")
        places = (
            [f"{self.remote}/data/v1/download/{quote(str(found['file_id']), safe='')}"] if "file_id" in found else []
        )
        stated = found.get("url")
        if isinstance(stated, str) and re.match("https?://", stated):
            places.append(stated)
        if not places:
            raise FormatError(f"{where} does not state where the file is")
        checksum = None if md5 is None else f"md5:{md5.lower()}"
        return {f"{dataset.table}.arff": list(dict.fromkeys(places))}, {DESCRIPTION: [where]}, checksum

    def _number_of(self, dataset: OpenmlDataset) -> int:
        """Request the number of the table, which all other addresses need."""
        where = (
            f"{self.remote}/api/v1/json/data/list/data_name/{quote(dataset.table, safe='')}/limit/2/data_version/"
            f"{dataset.version}"
        )
        try:
            document: Any = parse_json(read_small(self.transport, where, limit=_ANSWER_BYTES), where)
        except NetworkError as error:
            if "412" in error.message:  # OpenML's status if no table is found
                raise DatasetNotFoundError(
                    f"{self.remote} has no table {dataset.table!r} in version {dataset.version}"
                ) from error
            raise
        try:
            listed = document["data"]["dataset"]
            numbers = [int(one["did"]) for one in listed if (one["name"], int(one["version"])) == _wanted(dataset)]
        except (TypeError, LookupError, ValueError) as error:
            raise FormatError(f"{where} is not OpenML's list of tables") from error
        if not numbers:
            raise DatasetNotFoundError(f"{self.remote} has no table {dataset.table!r} in version {dataset.version}")
        return numbers[0]

    def reader_options(self, dataset_id: str) -> Mapping[str, Any]:
        """Return the id, which determines the encoding."""
        return {"id": dataset_id}

    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Download the files to `folder`; CorruptDataError if the md5 of the table differs from OpenML's."""
        super().download(files, folder, progress, note)
        for file in files:
            path, md5 = folder / file.path, self._md5.get(file.path)
            if file.checksum is None and md5 is not None and not matches(path, path.stat().st_size, md5):
                fs.remove(path)
                raise CorruptDataError(
                    f"{file.path} does not have the {md5} that OpenML states, so it was removed", hint="try again later"
                )


def _wanted(dataset: OpenmlDataset) -> tuple[str, int]:
    return dataset.table, dataset.version
