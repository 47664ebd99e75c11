"""Strict JSON documents: parsing, writing, and decoding into frozen dataclasses; and values of TOML.

NaN and Infinity literals are refused; such numbers are the strings "nan", "inf" and "-inf". The annotations of a
dataclass are the schema that its document must meet."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import reprlib
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import FormatError, SchemaError, UsageError
from ..ted.schema import NEXT, Field, numpy_dtype
from .files import digest_bytes, read_regular

_DEPTH = 100


def plain(value: Any) -> Any:
    """Convert `value` to the types of strict JSON: finite numbers, strings, lists, string-keyed objects."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def float_from_json(value: float | str | None) -> float | None:
    """Undo what `plain` does to a number that is not finite."""
    return float(value) if isinstance(value, str) else value


def dump_json(value: Any, *, indent: int | None = None, sort_keys: bool = False) -> str:
    """Write a value as one strict JSON document.

    Lone surrogates, which represent the bytes of a path that is not UTF-8, are written as escapes: the document is
    always UTF-8, and reading it restores them.
    """
    text = json.dumps(plain(value), indent=indent, sort_keys=sort_keys, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Two halves of one character become that character, as a parser takes them.
        whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        text = whole.encode(errors="backslashreplace").decode()
    return text


def toml_value(value: Any) -> str:
    """Write text, a number, a flag, or lists and tables of them as a value of TOML.

    UsageError for text that is not Unicode, such as a path that is not UTF-8: TOML cannot hold it.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{value!r} is not UTF-8, which a TOML file cannot hold") from None
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {toml_value(part)}' for key, part in value.items())} }}"
    return repr(value) if not isinstance(value, bool) else str(value).lower()


def newer_version(origin: str, version: object, known: int, what: str = "version") -> FormatError:
    """Return the error for a document of an unknown version; `known` is the newest known one."""
    return FormatError(
        f"{origin} has {what} {version}, this rbtool reads up to {known}",
        hint="upgrade with: pip install --upgrade rbtool",
    )


def document_digest(document: Mapping[str, Any], entry: str) -> str:
    """Return the digest of a document without the entry that holds the digest."""
    rest = {key: value for key, value in document.items() if key != entry}
    return digest_bytes(dump_json(rest, sort_keys=True).encode())


def dump_with_digest(document: Mapping[str, Any]) -> tuple[str, str]:
    """Write a document and add its digest as the entry `digest`; return the text and the digest."""
    text = dump_json(document, sort_keys=True)
    digest = digest_bytes(text.encode())
    return f'{text[:-1]}, "digest": "{digest}"}}', digest


def json_file(value: Any) -> bytes:
    """Write a value as the contents of a JSON file that people read."""
    return (dump_json(value, indent=1) + "\n").encode()


def load_json(path: Path) -> Any:
    """Read a JSON file, or raise FormatError that names it."""
    return parse_json(read_regular(path), str(path))


def parse_json(data: bytes | str, origin: str) -> Any:
    """Read a JSON document that nests 100 levels at most, or raise FormatError that names its origin."""
    try:
        text = data if isinstance(data, str) else data.decode()
        value = json.loads(text)
    except ValueError as error:
        raise FormatError(f"{origin} is not JSON: {error}") from error
    except RecursionError:
        raise _too_deep(origin) from None
    # A document cannot nest deeper than it has brackets, so that counting them suffices for most.
    if text.count("[") + text.count("{") > _DEPTH:
        _require_shallow(value, origin)
    return value


def _require_shallow(value: Any, origin: str) -> None:
    """Raise FormatError for a document that nests so deeply that recursive functions would exhaust the stack."""
    level: list[Any] = [value]
    for _ in range(_DEPTH):
        level = [
            part
            for outer in level
            if isinstance(outer, list | dict)
            for part in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(part, list | dict)
        ]
        if not level:
            return
    raise _too_deep(origin)


def _too_deep(origin: str) -> FormatError:
    return FormatError(f"{origin} nests deeper than {_DEPTH} levels: no document of this kind does")


T = TypeVar("T")
_Decoder: TypeAlias = Callable[[Any], Any]

NOT_IN_JSON = {"json": False}
"""Metadata of a dataclass field that is not an entry of the document."""

_LARGEST = 1 << 63
_DIMENSIONS = 60
"""The most dimensions of a row: NumPy allows 64, of which rows, batches and lanes take some."""
_PARTS = 50
"""The most parts of a key, since each of them is a folder."""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """A condition beyond the type, in `Annotated[type, Check(...)]`; `expected` describes it in error messages."""

    expected: str
    holds: Callable[[Any], bool]


class _Mismatch(Exception):
    def __init__(self, expected: str, found: Any) -> None:
        super().__init__(expected)
        self.expected = expected
        self.found = found
        self.place: list[str] = []


def decode(kind: type[T], document: Any, origin: str, error: type[FormatError] = FormatError) -> T:
    """Create a dataclass or a named tuple, `kind`, from a parsed JSON document; undeclared entries are ignored.

    Field types may be numbers, text, booleans, None, `Any`, `Literal`, unions, tuples, mappings with text as keys, and
    nested dataclasses and named tuples. Floats are numbers, or the words `nan`, `inf` and `-inf`. Raises `error` for a
    document that does not match; it names `origin`, the place in the document and the expected value.
    """
    wanted: Any = kind
    try:
        found: T = _decoder(wanted)(document)
    except _Mismatch as odd:
        place = "".join(odd.place).lstrip(".")
        what = f"{reprlib.repr(odd.found)} as {place}" if place else reprlib.repr(odd.found)
        raise error(f"{origin} has {what}, expected {odd.expected}") from None
    return found


@functools.cache
def _decoder(kind: Any) -> _Decoder:
    if kind is Any:
        return lambda value: value
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _checked(parts[0], kind.__metadata__)
    if origin is Literal:
        return _literal(parts)
    if origin in {Union, types.UnionType}:
        return _union(parts)
    if origin is tuple:
        return _tuple(parts)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(parts)
    return _record(kind)


def _plain(expected: str, *kinds: type) -> _Decoder:
    def plain(value: Any) -> Any:
        if type(value) not in kinds:
            raise _Mismatch(expected, value)
        return value

    return plain


def _float(value: Any) -> float:
    known = value in ("nan", "inf", "-inf") if isinstance(value, str) else type(value) in {int, float}
    if not known:
        raise _Mismatch("a number", value)
    try:
        return float(float_from_json(value) or 0.0)
    except OverflowError:
        raise _Mismatch("a number of double precision", 0) from None


_PLAIN: dict[Any, _Decoder] = {
    int: _plain("a whole number", int),
    str: _plain("text", str),
    bool: _plain("true or false", bool),
    type(None): _plain("null", type(None)),
    float: _float,
}


def _checked(kind: Any, checks: tuple[Any, ...]) -> _Decoder:
    inner = _decoder(kind)

    def checked(value: Any) -> Any:
        found = inner(value)
        for check in checks:
            if not check.holds(found):
                raise _Mismatch(check.expected, value)
        return found

    return checked


def _literal(words: tuple[Any, ...]) -> _Decoder:
    expected = f"one of {', '.join(map(str, words))}"

    def literal(value: Any) -> Any:
        if not isinstance(value, str | int) or value not in words:
            raise _Mismatch(expected, value)
        return value

    return literal


def _union(kinds: tuple[Any, ...]) -> _Decoder:
    inner = [_decoder(kind) for kind in kinds if kind is not type(None)]
    nullable = type(None) in kinds

    def union(value: Any) -> Any:
        if nullable and value is None:
            return None
        for number, decoder in enumerate(inner, 1):
            try:
                return decoder(value)
            except _Mismatch:
                if number == len(inner):
                    raise
        return None

    return union


def _tuple(kinds: tuple[Any, ...]) -> _Decoder:
    endless = len(kinds) == 2 and kinds[1] is Ellipsis
    inner = [_decoder(kind) for kind in kinds if kind is not Ellipsis]

    def decoded(value: Any) -> Any:
        if not isinstance(value, list | tuple) or not (endless or len(value) == len(inner)):
            raise _Mismatch("a list" if endless else f"a list of {len(inner)}", value)
        decoders = inner * len(value) if endless else inner
        return tuple(
            _placed(decoder, part, f"[{number}]")
            for number, (decoder, part) in enumerate(zip(decoders, value, strict=True))
        )

    return decoded


def _mapping(kinds: tuple[Any, ...]) -> _Decoder:
    inner = _decoder(kinds[1])

    def mapping(value: Any) -> dict[str, Any]:
        _require_object(value)
        return {name: _placed(inner, part, f".{name}") for name, part in value.items()}

    return mapping


def _record(kind: Any) -> _Decoder:
    hints = get_type_hints(kind, include_extras=True)
    if dataclasses.is_dataclass(kind):
        parts = [part for part in dataclasses.fields(kind) if part.init and part.metadata.get("json", True)]
        needed = {
            part.name
            for part in parts
            if part.default is dataclasses.MISSING and part.default_factory is dataclasses.MISSING
        }
        names = [part.name for part in parts]
    elif hasattr(kind, "_fields"):
        names = list(kind._fields)
        needed = set(names) - kind._field_defaults.keys()
    else:
        raise TypeError(f"{kind} cannot be decoded from JSON")
    decoders = {name: _decoder(hints[name]) for name in names}

    def record(value: Any) -> Any:
        _require_object(value)
        missing = next((name for name in names if name in needed and name not in value), None)
        if missing is not None:
            raise _Mismatch(f"an object with {missing}", value)
        return kind(**{name: _placed(decoders[name], value[name], f".{name}") for name in names if name in value})

    return record


def _require_object(value: Any) -> None:
    if not isinstance(value, dict):
        raise _Mismatch("an object", value)


def _placed(decoder: _Decoder, value: Any, place: str) -> Any:
    try:
        return decoder(value)
    except _Mismatch as odd:
        odd.place.insert(0, place)
        raise


def is_sound_array(dtype: str, shape: tuple[int, ...]) -> bool:
    """Return whether an array can have this type, which has to be known, and this shape, which has to fit in memory."""
    try:
        size = numpy_dtype(dtype).itemsize * math.prod(max(1, length) for length in shape)
    except SchemaError:
        return False
    return all(length >= 0 for length in shape) and size < _LARGEST and len(shape) <= _DIMENSIONS


def is_sound_field(field: Field) -> bool:
    """Return whether a dataset can have this leaf: its array is possible, and its key has 1 to 50 non-empty parts."""
    known = is_sound_array(field.dtype, field.shape)
    return known and 0 < len(field.key) <= _PARTS and field.key != (NEXT,) and all(map(_is_text, field.key))


def _is_text(part: str) -> bool:
    """Return whether this is non-empty Unicode text, as names of files and of tensors have to be."""
    try:
        return len(part.encode()) > 0
    except UnicodeEncodeError:
        return False


Count: TypeAlias = Annotated[int, Check("a count", lambda number: 0 <= number < _LARGEST)]
SOUND_FIELD = Check("the key, the type and the shape of a leaf", is_sound_field)
FieldEntry: TypeAlias = Annotated[Field, SOUND_FIELD]


def written_time(seconds: float | None = None) -> str:
    """Return a time as ISO 8601 text in UTC, to the second: now, or the given seconds after the start of 1970."""
    utc = datetime.UTC
    time = datetime.datetime.now(utc) if seconds is None else datetime.datetime.fromtimestamp(seconds, utc)
    return time.isoformat(timespec="seconds")
