"""Decodes fields of messages in CDR, ROS 1, JSON and Protobuf, and pictures in them.

The definition of a type that a log contains is parsed, but never turned into code: a walker moves over the bytes of a
message and decodes only the fields that are wanted.
"""

from __future__ import annotations

import base64
import functools
import importlib
import json
import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np

from ...core.errors import CorruptDataError, FormatError, UsageError, did_you_mean
from ...core.format.contracts import Array
from ..files.images import ImageForm, decode_image, image_form

Buffer: TypeAlias = bytes | memoryview
Path: TypeAlias = tuple[str | int | slice, ...]
"""Names of nested fields, and numbers or ranges of elements of lists: `("poses", 0, "position")`."""
_Walk: TypeAlias = Callable[[Buffer, int], tuple[Any, int]]
"""Reads the value at an offset of a buffer; returns it and the offset after it."""

_SIZES = {
    "bool": 1, "byte": 1, "octet": 1, "char": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4,
    "uint32": 4, "int64": 8, "uint64": 8, "float32": 4, "float64": 8,
}  # fmt: skip
_CODES = {
    "bool": "?", "byte": "B", "octet": "B", "char": "B", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H",
    "int32": "i", "uint32": "I", "int64": "q", "uint64": "Q", "float32": "f", "float64": "d",
}  # fmt: skip
_TIME = "builtin_interfaces/msg/Time"
_STAMPS = (("header", "stamp"), ("timestamp",), ("stamp",))
"""Paths of fields with the time of measurement, whose seconds and nanoseconds have one of the pairs of names below."""
_SECONDS = (("sec", "nanosec"), ("sec", "nsec"), ("secs", "nsecs"), ("seconds", "nanos"))
_JOINTS = ("joint_names",)
_NAMES = ("name", "names", *_JOINTS)
_PLAIN = frozenset({"header", "layout", "timestamp", "stamp", "structure_needs_at_least_one_member"})
"""Names of fields that describe a message, and are not its value."""
_MOST_NESTED = 32
_MOST_SHOWN = 24


@dataclass(frozen=True, slots=True)
class Schema:
    """The type of the messages of a topic.

    Attributes:
        name: the name of the type.
        message: the encoding of messages, such as `cdr`.
        definition: the language of the definition, such as `ros2msg`.
        data: the definition.
    """

    name: str
    message: str
    definition: str
    data: bytes


@dataclass(frozen=True, slots=True)
class _Type:
    """A type of ROS.

    `kind` is the name of a type of numbers, `string`, `struct` (with `fields`), `array` (of `count` times `item`) or
    `sequence` (of any number of `item`).
    """

    kind: str
    item: _Type | None = None
    count: int = 0
    fields: tuple[tuple[str, _Type], ...] = ()

    @property
    def text(self) -> str:
        """The type as it is written in a definition."""
        if self.item is not None:
            return f"{self.item.text}[{self.count or ''}]"
        return self.kind


class Codec:
    """Decodes the messages of one topic; `what` names the topic in errors.

    Raises FormatError for an unknown encoding, and for a definition that is missing or cannot be parsed.
    """

    def __init__(self, schema: Schema, what: str) -> None:
        self.schema, self.what = schema, what

    def fields(self, sample: Buffer) -> dict[str, str]:
        """Return the type of each field by its dotted name, from the definition or the message `sample`."""
        raise NotImplementedError

    def chosen(self, paths: Sequence[Path]) -> Callable[[Buffer], list[Any]]:
        """Return a function that decodes some fields of a message.

        Its values are numbers, arrays, bytes, text, lists, and dicts of fields by name.
        """
        raise NotImplementedError

    @property
    def is_assumed(self) -> bool:
        """Whether the log lacks the definition, so that the one common to all distributions of ROS 2 is used."""
        return False

    @property
    def is_defined(self) -> bool:
        """Whether a definition fixes the order of fields; without one, it may differ between messages."""
        return True

    def require_whole(self, sample: Buffer) -> None:
        """Raise CorruptDataError for a message whose length does not agree with its definition."""


def codec_of(schema: Schema, what: str) -> Codec:
    """Return the codec for a schema; `what` names the topic. FormatError for an encoding that is not supported."""
    if schema.message in {"cdr", "ros1"}:
        return _RosCodec(schema, what)
    if schema.message == "json":
        return _JsonCodec(schema, what)
    if schema.message == "protobuf":
        return _ProtobufCodec(schema, what)
    raise FormatError(
        f"{what} has messages in the encoding {schema.message or '(none is stated)'}",
        hint="cdr, ros1, json and protobuf are read",
    )


def damaged(what: str, why: object) -> NoReturn:
    """Raise CorruptDataError for a message that cannot be decoded; `what` names its topic."""
    raise CorruptDataError(f"{what}: a message cannot be decoded: {' '.join(str(why).split())[:120]}")


# ROS ----------------------------------------------------------------------------------------------------


class _RosCodec(Codec):
    """Decodes CDR and ROS 1, where fields follow each other; CDR aligns numbers to their size."""

    def __init__(self, schema: Schema, what: str) -> None:
        super().__init__(schema, what)
        self._type = _ros_type(schema, what)

    @property
    def is_assumed(self) -> bool:
        return not self.schema.data.strip()

    def fields(self, sample: Buffer) -> dict[str, str]:
        return dict(_flat_type(self._type, ""))

    def chosen(self, paths: Sequence[Path]) -> Callable[[Buffer], list[Any]]:
        wanted: dict[str, Any] = {}
        for path in paths:
            node = wanted
            for name in (part for part in path if isinstance(part, str)):
                node = node.setdefault(name, {})
            node[""] = True
        for path in paths:
            _require_field(self._type, path, self)
        by_order = {order: self._walker(order, wanted) for order in ("<>" if self.schema.message == "cdr" else "<")}
        has_head = self.schema.message == "cdr"
        takers = [self._taker(path) for path in paths]

        def decode(data: Buffer) -> list[Any]:
            try:
                if has_head:
                    value, _ = by_order[_byte_order(data, self.what)](data[4:], 0)
                else:
                    value, _ = by_order["<"](data, 0)
            except (struct.error, IndexError, ValueError) as error:  # UnicodeDecodeError is a ValueError
                damaged(self.what, error)
            return [take(value) for take in takers]

        return decode

    def _taker(self, path: Path) -> Callable[[Any], Any]:
        if len(path) == 1 and isinstance(path[0], str):  # the usual case; `_require_field` has checked the name
            return operator.itemgetter(path[0])
        return functools.partial(_taken, path=path, what=self.what)

    def _walker(self, order: str, wanted: Mapping[str, Any]) -> _Walk:
        return _struct_walker(self._type, order, wanted, aligned=self.schema.message == "cdr", whole="" in wanted)

    def require_whole(self, sample: Buffer) -> None:
        head = 4 if self.schema.message == "cdr" else 0
        order = _byte_order(sample, self.what) if head else "<"
        try:
            _, end = self._walker(order, {"": True})(sample[head:], 0)
        except (struct.error, IndexError, ValueError) as error:
            damaged(self.what, error)
        left = len(sample) - head - end
        if left < 0 or left > (3 if head else 0):
            raise CorruptDataError(
                f"{self.what}: a message has {len(sample):,} bytes, and {self.schema.name} as the log defines it has "
                f"{end + head:,}: the definition is wrong, or the log is damaged"
            )


def _byte_order(data: Buffer, what: str) -> str:
    if len(data) < 4 or data[0] != 0 or data[1] > 1:
        begin = bytes(data[:2]).hex() or "nothing"
        damaged(what, f"it begins with {begin}, expected plain CDR, which begins with 0000 or 0001")
    return "<" if data[1] else ">"


def _ros_type(schema: Schema, what: str) -> _Type:
    """Parse the definition of a schema; FormatError if it is missing or cannot be parsed."""
    named = {"ros2msg": "msg", "ros1msg": "msg", "ros2idl": "idl"}
    if not schema.data.strip():
        return _standard_type(schema.name, what)
    if schema.definition not in named:
        raise FormatError(
            f"{what}: its type is defined in {schema.definition or 'an unknown language'}",
            hint="ros2msg, ros1msg and ros2idl are read",
        )
    types, name = _parsed_types(schema.data, schema.name, named[schema.definition], what)
    return _resolved(types, name, what, ros1=schema.message == "ros1")


@functools.lru_cache(maxsize=256)
def _standard_type(name: str, what: str) -> _Type:
    """Return the type that all distributions of ROS 2 have under a name; FormatError if they differ or have none."""
    from rosbags.typesys import Stores, get_typestore

    found = set()
    for store in Stores:
        if store.value.startswith("ros2") and name in (types := get_typestore(store).fielddefs):
            found.add(_resolved(types, name, what, ros1=False))
    if len(found) != 1:
        why = "and distributions of ROS 2 define it differently" if found else "and ROS 2 has no type of that name"
        raise FormatError(
            f"{what}: the log has no definition of the type {name or 'of its messages'}, {why}",
            hint="record with the packages of all messages installed, or convert the bag with ros2 bag convert there",
        )
    return found.pop()


@functools.lru_cache(maxsize=256)
def _parsed_types(data: bytes, name: str, language: str, what: str) -> tuple[Mapping[str, Any], str]:
    from rosbags.typesys import get_types_from_idl, get_types_from_msg

    try:
        text = data.decode()
        found: dict[str, Any] = {}
        if language == "msg":
            found.update(get_types_from_msg(text, name))
        else:
            parts = text.split(f"{'=' * 80}\n") if text.startswith("=" * 80) else [f"\n{text}"]
            for part in parts:
                if idl := part.partition("\n")[2]:
                    found.update(get_types_from_idl(idl))
    except (MemoryError, UsageError):
        raise
    except Exception as error:  # the parsers raise exceptions of any type for text that is not a definition
        why = " ".join(str(error).split())[:80]
        raise FormatError(f"{what}: the definition of {name} cannot be read ({type(error).__name__}: {why})") from error
    full = next((one for one in found if one in {name, name.replace("/", "/msg/", 1)}), None)
    if full is None:
        raise FormatError(f"{what}: the definition in the log does not define {name}")
    return found, full


def _resolved(types: Mapping[str, Any], name: str, what: str, *, ros1: bool, depth: int = 0) -> _Type:
    """Build a type with the types of all its fields."""
    if depth > _MOST_NESTED:
        raise FormatError(f"{what}: its type contains itself, or is nested more than {_MOST_NESTED} deep")
    if name in {_TIME, "builtin_interfaces/msg/Duration"} and (ros1 or name not in types):
        signed = "uint32" if ros1 and name == _TIME else "int32"
        second = "int32" if ros1 and name != _TIME else "uint32"
        return _Type("struct", fields=(("sec", _Type(signed)), ("nanosec", _Type(second))))
    if name not in types:
        raise FormatError(f"{what}: the log does not define the type {name}, which the messages contain")

    def of(described: Any) -> _Type:
        node, value = int(described[0]), described[1]
        if node == 1:
            kind = value[0] if isinstance(value, tuple) else value
            return _Type(kind)
        if node == 2:
            return _resolved(types, value, what, ros1=ros1, depth=depth + 1)
        return _Type("array" if node == 3 else "sequence", of(value[0]), int(value[1]) if node == 3 else 0)

    return _Type("struct", fields=tuple((field, of(described)) for field, described in types[name][1]))


def _flat_type(of: _Type, prefix: str) -> Iterator[tuple[str, str]]:
    for name, one in of.fields:
        if one.kind == "struct":
            yield from _flat_type(one, f"{prefix}{name}.")
        elif one.item is not None and one.item.kind == "struct":
            yield from _flat_type(one.item, f"{prefix}{name}[0].")
        else:
            yield f"{prefix}{name}", one.text


def _require_field(of: _Type, path: Path, codec: Codec) -> None:
    """Raise UsageError unless a type has the fields of a path."""
    for part in path:
        if isinstance(part, str):
            found = dict(of.fields).get(part)
            if found is None:
                raise unknown_field(codec.what, path, dict(_flat_type(_ros_type(codec.schema, codec.what), "")))
            of = found
        elif of.item is None:
            raise UsageError(f"{codec.what}: {path_text(path)} takes an element of a {of.kind}, expected a list")
        else:
            of = of.item


def unknown_field(what: str, path: Path, known: Iterable[str]) -> UsageError:
    """Return the error for a field that messages do not have."""
    names, text = list(known), path_text(path)
    more = f", … ({len(names)} in all)" if len(names) > _MOST_SHOWN else ""
    return UsageError(
        f"{what} has no field {text!r}{did_you_mean(text, names)}",
        hint=f"its fields are {', '.join(names[:_MOST_SHOWN])}{more}",
    )


def _walker(of: _Type, order: str, wanted: Mapping[str, Any] | None, *, aligned: bool) -> _Walk:
    """Return a function that reads a value of a type.

    `wanted` maps the names of wanted fields to the same for their fields; the key `""` stands for all fields. None
    means that the value is skipped: the function then returns None for it.
    """
    if of.kind == "struct":
        return _struct_walker(of, order, wanted, aligned=aligned)
    if of.item is not None:
        return _list_walker(of, order, wanted, aligned=aligned)
    if of.kind == "string":
        return _string_walker(order, aligned=aligned, kept=wanted is not None)
    if of.kind not in _SIZES:

        def refuse(data: Buffer, at: int) -> tuple[Any, int]:
            raise FormatError(f"messages have a field of type {of.kind}, which is not read")

        return refuse
    size = _SIZES[of.kind]
    align = size if aligned else 1
    unpack = struct.Struct(order + _CODES[of.kind]).unpack_from
    kind = np.dtype(_numpy_name(of.kind)).type
    if wanted is None:

        def skip(data: Buffer, at: int) -> tuple[Any, int]:
            return None, -(-at // align) * align + size

        return skip

    def number(data: Buffer, at: int) -> tuple[Any, int]:
        at = -(-at // align) * align
        return kind(unpack(data, at)[0]), at + size

    return number


def _numpy_name(kind: str) -> str:
    return {"byte": "uint8", "octet": "uint8", "char": "uint8"}.get(kind, kind)


def _struct_walker(
    of: _Type, order: str, wanted: Mapping[str, Any] | None, *, aligned: bool, whole: bool = True
) -> _Walk:
    """Return a function that reads a struct to its end or, without `whole`, only up to the last wanted field."""
    every = wanted is not None and "" in wanted
    parts: list[tuple[str, _Walk]] = []
    last = 0
    for name, one in of.fields:
        inner = {"": True} if every else (wanted or {}).get(name)
        parts.append((name if inner is not None else "", _walker(one, order, inner, aligned=aligned)))
        last = len(parts) if inner is not None else last
    used = parts if whole else parts[:last]

    def read(data: Buffer, at: int) -> tuple[Any, int]:
        found: dict[str, Any] = {}
        for name, walk in used:
            value, at = walk(data, at)
            if name:
                found[name] = value
        return found, at

    return read


def _list_walker(of: _Type, order: str, wanted: Mapping[str, Any] | None, *, aligned: bool) -> _Walk:
    item = of.item
    assert item is not None
    count_of = struct.Struct(order + "I").unpack_from
    fixed, kept = of.count, wanted is not None
    is_array = of.kind == "array"
    if item.kind in _SIZES:
        size = _SIZES[item.kind]
        align = size if aligned else 1
        dtype = np.dtype(_numpy_name(item.kind)).newbyteorder(">" if order == ">" else "<")
        is_bytes = item.kind in {"uint8", "byte", "octet", "char"} and not is_array

        def numbers(data: Buffer, at: int) -> tuple[Any, int]:
            count = fixed
            if not is_array:
                at = -(-at // 4) * 4 if aligned else at
                count = count_of(data, at)[0]
                at += 4
            if count:
                at = -(-at // align) * align
            end = at + count * size
            if end > len(data):
                raise ValueError(f"a list of {count:,} numbers is longer than the message")
            if not kept:
                return None, end
            return data[at:end] if is_bytes else np.frombuffer(data, dtype, count, at), end

        return numbers
    walk = _walker(item, order, wanted, aligned=aligned)
    is_names = item.kind == "string" and kept and not is_array
    latest: tuple[Buffer, list[Any]] = b"", []

    def values(data: Buffer, at: int) -> tuple[Any, int]:
        nonlocal latest
        count = fixed
        if not is_array:
            at = -(-at // 4) * 4 if aligned else at
            begin = at
            # names of joints are equal in all messages: equal bytes are not decoded again
            if is_names and latest[1] and data[at : at + len(latest[0])] == latest[0]:
                return latest[1], at + len(latest[0])
            count = count_of(data, at)[0]
            at += 4
        if count > len(data) - at:
            raise ValueError(f"a list of {count:,} values is longer than the message")
        found = []
        for _ in range(count):
            value, at = walk(data, at)
            found.append(value)
        if is_names:
            latest = bytes(data[begin:at]), found
        return found, at

    return values


def _string_walker(order: str, *, aligned: bool, kept: bool) -> _Walk:
    count_of = struct.Struct(order + "I").unpack_from

    def text(data: Buffer, at: int) -> tuple[Any, int]:
        at = -(-at // 4) * 4 if aligned else at
        count = count_of(data, at)[0]
        at += 4
        end = at + count
        if end > len(data):
            raise ValueError(f"a text of {count:,} bytes is longer than the message")
        if not kept:
            return None, end
        used = bytes(data[at : end - 1] if aligned and count else data[at:end])
        return used.decode(), end

    return text


# JSON and Protobuf --------------------------------------------------------------------------------------


class _JsonCodec(Codec):
    """Decodes JSON objects, without a schema."""

    @property
    def is_defined(self) -> bool:
        return False

    def _load(self, data: Buffer) -> Any:
        try:
            return json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            damaged(self.what, error)

    def fields(self, sample: Buffer) -> dict[str, str]:
        return dict(_flat_value(self._load(sample), ""))

    def chosen(self, paths: Sequence[Path]) -> Callable[[Buffer], list[Any]]:
        def decode(data: Buffer) -> list[Any]:
            value = self._load(data)
            return [_taken(value, path, self.what) for path in paths]

        return decode


class _ProtobufCodec(Codec):
    """Decodes Protobuf messages by the FileDescriptorSet in the log."""

    def __init__(self, schema: Schema, what: str) -> None:
        super().__init__(schema, what)
        if schema.definition != "protobuf" or not schema.data:
            raise FormatError(f"{what}: the log has no definition of the type {schema.name or 'of its messages'}")
        factory = importlib.import_module("mcap_protobuf.decoder").DecoderFactory()
        stated = importlib.import_module("mcap.records").Schema(
            id=1, name=schema.name, encoding=schema.definition, data=schema.data
        )
        try:
            self._parse = factory.decoder_for("protobuf", stated)
        except (MemoryError, UsageError):
            raise
        except Exception as error:  # three libraries raise exceptions of any type for damaged bytes
            why = " ".join(str(error).split())[:80]
            raise FormatError(f"{what}: the definition of {schema.name} cannot be read ({why})") from error

    def _load(self, data: Buffer) -> Any:
        try:
            return self._parse(bytes(data))
        except (MemoryError, UsageError):
            raise
        except Exception as error:
            damaged(self.what, error)

    def fields(self, sample: Buffer) -> dict[str, str]:
        return dict(_flat_descriptor(self._load(sample).DESCRIPTOR, "", 0))

    def chosen(self, paths: Sequence[Path]) -> Callable[[Buffer], list[Any]]:
        def decode(data: Buffer) -> list[Any]:
            value = self._load(data)
            return [_taken(value, path, self.what) for path in paths]

        return decode


def _flat_value(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat_value(inner, f"{prefix}.{name}" if prefix else name)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        yield from _flat_value(value[0], f"{prefix}[0]")
    elif isinstance(value, list):
        yield prefix, f"{_json_kind(value[0]) if value else 'any'}[]"
    else:
        yield prefix, _json_kind(value)


def _json_kind(value: Any) -> str:
    kinds = {bool: "bool", int: "float64", float: "float64", str: "string"}
    return kinds.get(type(value), "any")


def _flat_descriptor(of: Any, prefix: str, depth: int) -> Iterator[tuple[str, str]]:
    for field in of.fields:
        name = f"{prefix}{field.name}"
        many = _is_repeated(field)
        if field.message_type is not None:
            if depth < 8:
                yield from _flat_descriptor(field.message_type, f"{name}[0]." if many else f"{name}.", depth + 1)
        else:
            yield name, f"{_protobuf_kind(field)}{'[]' if many else ''}"


def _is_repeated(field: Any) -> bool:
    found = getattr(field, "is_repeated", None)  # a property since Protobuf 6.31
    return bool(field.label == field.LABEL_REPEATED if found is None else found)


_PROTOBUF = {1: "int32", 2: "int64", 3: "uint32", 4: "uint64", 5: "float64", 6: "float32", 7: "bool", 8: "int32"}
"""NumPy's name for each C++ type of Protobuf; 8 is an enum."""


def _protobuf_kind(field: Any) -> str:
    if field.cpp_type in _PROTOBUF:
        return _PROTOBUF[field.cpp_type]
    return "uint8[]" if field.type == field.TYPE_BYTES else "string"


# Fields -------------------------------------------------------------------------------------------------


def _taken(value: Any, path: Path, what: str) -> Any:
    """Return the value at a path in a decoded message."""
    for part in path:
        if isinstance(part, str):
            value = _member(value, part, path, what)
        elif isinstance(part, slice):
            value = value[part]
        elif not hasattr(value, "__len__") or isinstance(value, str | Mapping):
            raise FormatError(f"{what}: {path_text(path)} takes an element of a value that is not a list")
        elif part >= len(value):
            raise FormatError(f"{what}: a message has {len(value)} elements in {path_text(path)}")
        else:
            value = value[part]
    return value


def _member(value: Any, name: str, path: Path, what: str) -> Any:
    if isinstance(value, Mapping):
        if name not in value:
            raise unknown_field(what, path, dict(_flat_value(value, "")))
        return value[name]
    descriptor = getattr(value, "DESCRIPTOR", None)
    if descriptor is None:
        raise unknown_field(what, path, ())
    field = descriptor.fields_by_name.get(name)
    if field is None:
        raise unknown_field(what, path, dict(_flat_descriptor(descriptor, "", 0)))
    found = getattr(value, name)
    if field.message_type is None and not _is_repeated(field):
        return np.dtype(kind).type(found) if (kind := _PROTOBUF.get(field.cpp_type)) else found
    if field.message_type is None and field.cpp_type in _PROTOBUF:
        return np.array(found, _PROTOBUF[field.cpp_type])
    if field.message_type is not None and not _is_repeated(field) and not value.HasField(name):
        raise FormatError(f"{what}: a message lacks {name}, which is part of {path_text(path)}")
    return found


def path_text(path: Path) -> str:
    """Write a path as it appears in the option `map`."""
    text = ""
    for part in path:
        if isinstance(part, str):
            text += f".{part}" if text else part
        elif isinstance(part, slice):
            text += f"[{'' if part.start is None else part.start}:{'' if part.stop is None else part.stop}]"
        else:
            text += f"[{part}]"
    return text


def parse_path(text: str) -> Path:
    """Parse a path such as `position[0:6]` or `transform.translation.x`; UsageError for text that is not a path."""
    found: list[str | int | slice] = []
    for part in text.split("."):
        name, bracket, rest = part.partition("[")
        if not name and not (bracket and not found):
            raise UsageError(f"{text!r} is not the name of a field", hint="like position, data[0:6] or twist.linear.x")
        if name:
            found.append(name)
        while bracket:
            inside, closed, rest = rest.partition("]")
            low, colon, high = inside.partition(":")
            if not closed or not all(one.isdecimal() for one in ((low, high) if colon else (low,)) if one or not colon):
                raise UsageError(f"{text!r} is not the name of a field", hint="elements are like data[3] or data[0:6]")
            found.append(slice(int(low or 0), int(high) if high else None) if colon else int(low))
            if rest and not rest.startswith("["):
                raise UsageError(f"{text!r} is not the name of a field", hint="like poses[0].position")
            bracket, rest = rest[:1], rest[1:]
    return tuple(found)


def numbers_of(value: Any, what: str) -> Array:
    """Return a number, a list of numbers, or a struct of them as one array; fields of a struct are concatenated.

    Raises FormatError for text, for lists of structs or of lists, and for bools beside numbers.
    """
    if isinstance(value, np.ndarray | np.generic):
        found = np.asarray(value)
        return found.astype(found.dtype.newbyteorder("="), copy=False)
    if isinstance(value, bytes | bytearray | memoryview):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, bool):
        return np.asarray(value)
    if isinstance(value, int | float):
        if isinstance(value, int) and abs(value) > 1 << 53:
            raise FormatError(f"{what} is {value}, a whole number above 2**53, which float64 cannot hold exactly")
        return np.asarray(float(value))
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if kinds == {float} or kinds == {bool}:
        return np.array(value)
    parts = list(_parts_of(value, what))
    if not parts:
        return np.zeros(0)
    if len({one.dtype.kind == "b" for one in parts}) > 1:
        raise FormatError(f"{what} has truth values next to numbers: name one of them")
    return np.concatenate([one.reshape(-1) for one in parts])


def _parts_of(value: Any, what: str) -> Iterator[Array]:
    if isinstance(value, str) or value is None:
        raise FormatError(f"{what} is {'text' if value is not None else 'null'}, expected numbers")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in _PLAIN:
                yield numbers_of(inner, f"{what}.{name}")
        return
    descriptor = getattr(value, "DESCRIPTOR", None)
    if descriptor is not None:
        for field in (one for one in descriptor.fields if one.name not in _PLAIN):
            yield numbers_of(_member(value, field.name, (field.name,), what), f"{what}.{field.name}")
        return
    if not hasattr(value, "__iter__"):
        raise FormatError(f"{what} is {type(value).__name__}, expected numbers")
    for inner in value:
        if isinstance(inner, Mapping) or hasattr(inner, "DESCRIPTOR"):
            raise FormatError(f"{what} is a list of structs: take an element of it, like [0]")
        one = numbers_of(inner, what)
        if one.shape:
            raise FormatError(f"{what} is a list of lists: take an element of it, like [0]")
        yield one


def keys_of(value: Any, name: str = "") -> Iterator[str]:
    """Yield the dotted name of each number in a JSON object, in the order of `numbers_of`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _PLAIN:
                yield from keys_of(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        yield from (f"{name}[{at}]" for at in range(len(value)))
    else:
        yield name


def value_path(fields: Mapping[str, str], path: Path, what: str) -> Path:
    """Complete a path in a map that names only a topic or a struct: return the path of its only field with a value.

    A struct whose fields are all numbers is itself a value. Raises UsageError if several fields are possible.
    """
    prefix = path_text(tuple(0 if isinstance(part, int) else part for part in path))
    inside = [name for name in fields if not prefix or name == prefix or name.startswith((f"{prefix}.", f"{prefix}["))]
    if inside == [prefix]:
        return path
    if not inside:
        if path and not isinstance(path[-1], str) and value_path(fields, path[:-1], what) == path[:-1]:
            return path
        raise unknown_field(what, path, fields)
    named = {name: name[len(prefix) :].removeprefix(".") for name in inside}
    tops = dict.fromkeys(short.partition(".")[0].partition("[")[0] for short in named.values())
    values = [top for top in tops if top not in _PLAIN]
    if len(values) == 1:
        return value_path(fields, (*path, values[0]), what)
    used = [name for name, short in named.items() if short.partition(".")[0] in values]
    if used and all("[]" not in fields[name] and "[" not in named[name] and fields[name] != "string" for name in used):
        return path
    listed = ", ".join(named[name] for name in used)
    raise UsageError(f"{what}: {prefix or 'its messages'} can mean several fields", hint=f"name one of {listed}")


def names_path(fields: Mapping[str, str], path: Path) -> Path | None:
    """Return the path of the field that names the elements of a list, such as joints; None if there is none.

    For a list inside an element of another list, only `joint_names` counts, as for the points of a `JointTrajectory`:
    other names may belong to the outer elements.
    """
    if not path_text(path):
        return None
    is_inner = any(not isinstance(part, str) for part in path)
    for depth in range(len(path) - 1, -1, -1):
        for name in _JOINTS if is_inner else _NAMES:
            made = (*path[:depth], name)
            found = path_text(tuple(0 if isinstance(part, int) else part for part in made))
            if fields.get(found, "").startswith("string[") and found != path_text(path):
                return made
    return None


def stamp_paths(fields: Mapping[str, str]) -> tuple[Path, Path] | None:
    """Return the paths of the seconds and nanoseconds of measurement; None if messages have no such stamp."""
    for path in _STAMPS:
        for seconds, nanos in _SECONDS:
            both = tuple(".".join((*path, one)) for one in (seconds, nanos))
            if all(one in fields for one in both):
                return (*path, seconds), (*path, nanos)
    return None


# Pictures -----------------------------------------------------------------------------------------------

_RAW = {
    "rgb8": ("uint8", 3, (0, 1, 2)), "bgr8": ("uint8", 3, (2, 1, 0)), "rgba8": ("uint8", 4, (0, 1, 2, 3)),
    "bgra8": ("uint8", 4, (2, 1, 0, 3)), "mono8": ("uint8", 1, (0,)), "8uc1": ("uint8", 1, (0,)),
    "rgb16": ("uint16", 3, (0, 1, 2)), "bgr16": ("uint16", 3, (2, 1, 0)), "mono16": ("uint16", 1, (0,)),
    "16uc1": ("uint16", 1, (0,)), "16sc1": ("int16", 1, (0,)), "32fc1": ("float32", 1, (0,)),
    "64fc1": ("float64", 1, (0,)),
}  # fmt: skip
"""For each encoding of images in ROS, the element type, the number of channels, and their order for RGB."""
_RAW_FIELDS = ("height", "width", "encoding", "step", "data")
_DEPTH_HEAD = 12
_DEEP_COLOURS = (b"\x10\x02", b"\x10\x04", b"\x10\x06")
"""Bit depth and colour type of PNG files that Pillow would silently cut to 8 bits."""


@dataclass(frozen=True, slots=True)
class PictureKind:
    """How messages contain pictures, as `raw` pixels, `file` (JPEG or PNG) or `video` packets, and in which fields."""

    kind: str
    paths: tuple[Path, ...]


def picture_kind(fields: Mapping[str, str], path: Path) -> PictureKind | None:
    """Return the form of pictures if the fields below `path` are a picture; None for anything else."""
    prefix = path_text(path)
    prefix = f"{prefix}." if prefix else ""
    inside = {name.removeprefix(prefix): kind for name, kind in fields.items() if name.startswith(prefix)}
    if all(name in inside for name in _RAW_FIELDS):
        more = ("is_bigendian",) if "is_bigendian" in inside else ()
        return PictureKind("raw", tuple((*path, name) for name in (*_RAW_FIELDS, *more)))
    kind = next((name for name in ("format", "encoding") if inside.get(name) == "string"), None)
    if kind is not None and inside.get("data") in {"uint8[]", "string", "byte[]"}:
        return PictureKind("file", ((*path, kind), (*path, "data")))
    return None


def picture_bytes(values: Sequence[Any], what: str) -> tuple[str, bytes]:
    """Return the stated format, and the bytes of an image file or a packet of video."""
    stated, data = str(values[0]), values[1]
    if isinstance(data, str):
        try:
            data = base64.b64decode(data, validate=True)
        except ValueError as error:
            damaged(what, error)
    data = bytes(data)
    if "compresseddepth" in stated.lower():
        if stated.lower().startswith("32fc1"):
            raise FormatError(f"{what}: its pictures are {stated!r}, quantised inverse depth, which is not supported")
        data = data[_DEPTH_HEAD:]
    if data.startswith(b"\x89PNG") and data[24:26] in _DEEP_COLOURS:
        raise FormatError(f"{what}: its pictures are PNG with 16 bits per colour ({stated}), which is not supported")
    return stated, data


def raw_form(values: Sequence[Any], what: str) -> ImageForm:
    """Return the form of a raw picture; FormatError for an encoding that is not supported."""
    encoding = str(values[2])
    found = _RAW.get(encoding.lower())
    if found is None:
        why = "is not supported"
        if encoding.lower().startswith("bayer"):
            why = "is a sensor's mosaic: convert it to rgb8 first, as image_proc does"
        elif encoding.upper().startswith("8UC"):
            why = "does not state the order of the channels"
        raise FormatError(f"{what}: the encoding {encoding!r} {why}", hint=f"supported are {', '.join(_RAW)}")
    return ImageForm(found[0], (int(values[0]), int(values[1]), found[1]))


def raw_pixels(values: Sequence[Any], form: ImageForm, what: str) -> Array:
    """Return the pixels `[height, width, channels]` of a raw picture, with colours in the order RGB."""
    if (found := raw_form(values, what)) != form:
        raise changed_size(what, found, form)
    height, width, channels = form.shape
    step, data = int(values[3]), values[4]
    if isinstance(data, str):
        data = picture_bytes(("", data), what)[1]
    dtype = np.dtype(form.dtype).newbyteorder(">" if len(values) > 5 and values[5] else "<")
    row = width * channels * dtype.itemsize
    if step < row or (height and len(data) < step * (height - 1) + row):
        raise CorruptDataError(
            f"{what}: a picture of {width} x {height} {values[2]} has {len(data):,} bytes in steps of {step}"
        )
    pixels = np.frombuffer(data, np.uint8)
    if step != row:
        pixels = np.concatenate([pixels[at * step : at * step + row] for at in range(height)])
    shaped = pixels[: height * row].view(dtype).reshape(form.shape).astype(form.dtype, copy=False)
    order = _RAW[str(values[2]).lower()][2]
    return shaped if order == tuple(range(channels)) else np.ascontiguousarray(shaped[:, :, list(order)])


def file_pixels(data: bytes, form: ImageForm, what: str) -> Array:
    """Decode a JPEG or PNG of this form; FormatError for another size."""
    if (found := image_form(data, what)) != form:
        raise changed_size(what, found, form)
    return decode_image(data, form, what)


def changed_size(what: str, found: ImageForm, form: ImageForm) -> FormatError:
    """Return the error for pictures of different sizes on one topic."""
    return FormatError(
        f"{what}: its pictures change from {form} to {found}",
        hint="convert the parts of the log with equal sizes to separate datasets, or leave the topic out",
    )
