"""Exports to MCAP, for viewers of robot logs: a topic for each field, in Protobuf, and markers of episodes.

    /observation/state     observation.state at every step and after the last one, as rbtool.Float64s or similar
    /observation/image     pictures as PNG, in foxglove.CompressedImage
    /action, /info/NAME    values of a step, at the time of the step
    /reward                next.reward, at the time of the following step
    /episode               JSON: start with number and texts of an episode, stop with success if it is terminated

Steps are 1 / fps apart, and an episode begins one second after the end of the one before.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import SchemaError, UsageError
from ...core.format import fs
from ...core.format.contracts import Array
from ...core.format.videos import stated_fps
from ...core.progress import counted
from ...core.ted.schema import EPISODE, NEXT, NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED, Field, state_keys
from ..files.exports import RowSink
from .containers import first_bytes, library

_LIBRARY = "rbtool export"
_NS = 10**9
_BEGIN = 1_000_000_000 * _NS
_CHUNK_BYTES = 4 << 20
_KINDS = {
    "float64": ("Float64s", 1), "float32": ("Float32s", 2), "float16": ("Float32s", 2), "int64": ("Int64s", 3),
    "uint64": ("Uint64s", 4), "int8": ("Int32s", 5), "int16": ("Int32s", 5), "int32": ("Int32s", 5),
    "uint8": ("Uint32s", 13), "uint16": ("Uint32s", 13), "uint32": ("Uint32s", 13), "bool": ("Bools", 8),
}  # fmt: skip
"""For each element type, the name of its message, and Protobuf's number for the type of the values."""
_MARKS = {"event", "episode"}
"""What the messages at the start and the end of an episode have besides its text."""
_MADE = frozenset({"time", "age", "late"})
"""First parts of the keys that the reader of logs makes."""


class McapExporter(RowSink):
    """Writes episodes as one MCAP log, with a few steps in memory."""

    option_names = frozenset({"fps"})

    @classmethod
    def made(cls, path: Path) -> bool:
        """Return whether `path` is an MCAP file that rbtool wrote."""
        return path.is_file() and _LIBRARY.encode() in first_bytes(path, 256)

    def prepare(self) -> None:
        """Choose the fields that have a topic, and the rate."""
        library("mcap.writer")
        fields = self.chosen.fields
        self._states = set(state_keys(fields))
        self._fields = [field for field in fields if field.key != EPISODE and field.key[0] not in {NEXT, *_MADE}]
        self._reward = next((field for field in fields if field.key == NEXT_REWARD), None)
        stored = [*self._fields, *([] if self._reward is None else [self._reward])]
        for field in stored:
            if field.dtype not in _KINDS:
                raise SchemaError(f"{field.name} is {field.dtype}, which an MCAP export does not support")
        after = [(NEXT, *key) for key in self._states]
        self.place([field.key for field in stored], [NEXT_TERMINATED, NEXT_TRUNCATED, *after])
        self._row_bytes = sum(field.row_bytes for field in stored)
        stated = self.options.get("fps") or stated_fps(self.chosen.reader)
        if stated is not None and not 0 < stated <= 10**6:
            raise UsageError(f"--fps is {stated}, expected steps a second")
        self._fps = Fraction(repr(float(stated or 10)))  # decimal, as the reader takes --fps: times are equal to the ns
        if stated is None:
            self.notes.append("the dataset does not state its rate: steps are 0.1 s apart (--fps N)")
        self._note_losses()

    def _note_losses(self) -> None:
        table = self.chosen.table
        for field in self._fields:
            if len(field.shape) > 1 and not _is_picture(field):
                self.notes.append(f"rows of {field.name}, {list(field.shape)}, are stored as flat lists")
            elif not _is_picture(field) and field.dtype in {"float16", "int8", "int16", "uint8", "uint16"}:
                self.notes.append(f"{field.name} is {field.dtype}, and is stored with 32 bits")
        if (count := int(table.explicit_next.sum())) > 0:
            self.notes.append(
                f"{count:,} episodes have next observations that differ from the next step: only the last is stored"
            )
        if inside := self.flags_inside():
            self.notes.append(f"flags in {counted(inside, 'step')} inside episodes are not stored")
        self.note_both()
        if table.has_seed.any():
            self.notes.append("seeds of episodes are not stored")
        if lost := sorted(_MARKS & set().union(*(self.chosen.text or ()))):
            self.notes.append(f"text of episodes named {' and '.join(lost)} is not stored")
        pairs = " ".join(f"{'.'.join(field.key)}=/{'/'.join(field.key)}" for field in self._fields)
        reward = " reward=/reward" if self._reward is not None else ""
        fps = str(float(self._fps)).removesuffix(".0")
        self.notes.append(f"it is read with --map '{pairs}{reward}' --fps {fps} --episodes-by topic:/episode")

    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        """Write the log, episode by episode."""
        types = _Types()
        with fs.created(target) as file:
            writer = library("mcap.writer").Writer(file, enable_crcs=True)
            writer.start(profile="", library=_LIBRARY)
            channels = {field.key: types.channel(writer, f"/{'/'.join(field.key)}", field) for field in self._fields}
            if self._reward is not None:
                channels[NEXT_REWARD] = types.channel(writer, "/reward", self._reward)
            marker = writer.register_channel("/episode", "json", 0)
            begin = _BEGIN
            for at in range(len(self.chosen.rows)):
                begin = self._write_episode(writer, channels, marker, at, begin, types, progress)
            writer.finish()
            file.flush()
            fs.fsync(file.fileno(), target)

    def _write_episode(
        self, writer: Any, channels: Mapping[Any, int], marker: int, at: int, begin: int, types: _Types,
        progress: Callable[[int], None],
    ) -> int:  # fmt: skip
        """Write an episode that begins at the time `begin`; return the time at which the next one may begin."""
        start, stop = self.chosen.episode(at)
        table = self.chosen.table
        text = {} if self.chosen.text is None else dict(self.chosen.text[at])

        def time(step: int) -> int:
            return begin + step * _NS * self._fps.denominator // self._fps.numerator

        def mark(step: int, said: Mapping[str, Any]) -> None:
            data = json.dumps(said, ensure_ascii=False).encode()
            writer.add_message(marker, time(step), data, time(step))

        mark(0, {**text, "event": "start", "episode": int(table.episode[at])})
        reader = self.chosen.reader
        for low, high in _ranges(start, stop, max(1, _CHUNK_BYTES // max(1, self._row_bytes))):
            rows = {field.key: reader.read(field.key, low, high) for field in self._fields}
            rewards = None if self._reward is None else reader.read(NEXT_REWARD, low, high)
            for step in range(low - start, high - start):
                for field in self._fields:
                    data = types.message(field, rows[field.key][step - (low - start)], time(step))
                    writer.add_message(channels[field.key], time(step), data, time(step))
                if rewards is not None and self._reward is not None:
                    data = types.message(self._reward, rewards[step - (low - start)], time(step + 1))
                    writer.add_message(channels[NEXT_REWARD], time(step + 1), data, time(step + 1))
            progress(self._row_bytes * (high - low))
        steps = stop - start
        for field in self._fields:
            if field.key in self._states:
                row = reader.read((NEXT, *field.key), stop - 1, stop)[0]
                writer.add_message(
                    channels[field.key], time(steps), types.message(field, row, time(steps)), time(steps)
                )
        ended = {"success": True} if bool(table.terminated[at]) else {}
        mark(steps, {"event": "stop", **ended})
        return time(steps) + _NS


def _ranges(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    for low in range(start, stop, size):
        yield low, min(low + size, stop)


def _is_picture(field: Field) -> bool:
    shape = field.shape
    channels = shape[2] if len(shape) == 3 else 0
    if field.dtype == "uint16":
        return channels == 1 and min(shape) > 0
    return field.dtype == "uint8" and channels in {1, 3, 4} and min(shape[:2]) > 0


class _Types:
    """The types of Protobuf messages that an export writes."""

    def __init__(self) -> None:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

        self._files = descriptor_pb2.FileDescriptorSet()
        stamp = self._files.file.add()
        timestamp_pb2.DESCRIPTOR.CopyToProto(stamp)
        own, picture = self._files.file.add(), self._files.file.add()
        own.name, own.package, own.syntax = "rbtool.proto", "rbtool", "proto3"
        for name, number in dict(_KINDS.values()).items():
            message = own.message_type.add(name=name)
            message.field.add(name="value", number=1, label=3, type=number)
        picture.name, picture.package, picture.syntax = "foxglove/CompressedImage.proto", "foxglove", "proto3"
        picture.dependency.append(stamp.name)
        message = picture.message_type.add(name="CompressedImage")
        message.field.add(name="timestamp", number=1, label=1, type=11, type_name=".google.protobuf.Timestamp")
        for name, number, kind in (("frame_id", 4, 9), ("data", 2, 12), ("format", 3, 9)):
            message.field.add(name=name, number=number, label=1, type=kind)
        pool = descriptor_pool.DescriptorPool()
        for one in self._files.file:
            pool.Add(one)
        names = ["foxglove.CompressedImage", *(f"rbtool.{name}" for name, _ in set(_KINDS.values()))]
        self._classes = {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names}
        self._schemas: dict[str, int] = {}

    def _name(self, field: Field) -> str:
        return "foxglove.CompressedImage" if _is_picture(field) else f"rbtool.{_KINDS[field.dtype][0]}"

    def channel(self, writer: Any, topic: str, field: Field) -> int:
        """Register the topic of a field; return its number."""
        name = self._name(field)
        if name not in self._schemas:
            self._schemas[name] = writer.register_schema(name, "protobuf", self._files.SerializeToString())
        return int(writer.register_channel(topic, "protobuf", self._schemas[name]))

    def message(self, field: Field, row: Array, time: int) -> bytes:
        """Encode a row as a message."""
        made = self._classes[self._name(field)]()
        if _is_picture(field):
            made.timestamp.seconds, made.timestamp.nanos = divmod(time, _NS)
            made.frame_id, made.format, made.data = field.name, "png", _png(row)
        else:
            made.value.extend(np.asarray(row).reshape(-1).tolist())
        found: bytes = made.SerializeToString()
        return found


def _png(pixels: Array) -> bytes:
    from PIL import Image

    made = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)).save(made, "PNG")
    return made.getvalue()
