"""Reads messages of chosen topics from the files of robot logs: MCAP, ROS 2 bags in SQLite, and ROS 1 bags.

A `Log` finds the messages of a topic in order of log time, without reading other topics, and returns their bytes.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sqlite3
import struct
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import yaml
import zstandard

from ...core.errors import CorruptDataError, FormatError, RbtoolError, UsageError, did_you_mean, not_installed
from ...core.format import fs
from ...core.format.contracts import Array, Closing
from ...core.format.files import open_regular
from ..files.readers import natural_order, reading
from .messages import Buffer, Codec, Schema, codec_of

_MCAP, _SQLITE, _ROS1, _ZSTD = b"\x89MCAP0\r\n", b"SQLite format 3\0", b"#ROSBAG V", b"\x28\xb5\x2f\xfd"
_YAML = "metadata.yaml"
_BAG = "rosbag2_bagfile_information"
_NAMED = (".mcap", ".db3", ".bag", ".mcap.zstd", ".db3.zstd", ".bag.active")
_SUFFIXES = (".mcap", ".db3", ".bag", ".zstd", ".active")
_CACHED_BYTES = 16 << 20
"""Bytes of decompressed chunks that are kept, about the size of a processor's cache."""
_MOST_BYTES = 1 << 31
"""Limit in bytes for a chunk or a message: a larger size is damage, and would exhaust memory."""
_MOST_TEXT, _MOST_ATTACHED = 4096, 1 << 20
_LOOKED_AT, _DEPTH = 4096, 3
_MESSAGE_HEAD = struct.Struct("<HIQQ")
_RECORD_HEAD = struct.Struct("<BQ")
_INDEX_ENTRY = np.dtype([("log", "<u8"), ("offset", "<u8")])
_HEAD = np.dtype([("opcode", "u1"), ("size", "<u8"), ("channel", "<u2"), ("sequence", "<u4"), ("log", "<u8")])
_HEAD_BYTES = np.arange(_HEAD.itemsize)
"""The beginning of a message record in MCAP."""
MARKER = re.compile(r"episode|marker|record", re.IGNORECASE)
"""Names of topics that may mark episodes."""


def library(name: str) -> Any:
    """Import a library of the extra `logs`; UsageError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise not_installed(f"robot logs need {name.partition('.')[0]}", "logs", error) from error


@dataclass(slots=True)
class Topic:
    """A topic of a log, or the part of a topic that comes from one publisher.

    Attributes:
        name: the topic, or `/topic@publisher`.
        schemas: the types of its messages, one for each distinct type of its publishers.
        channels: the numbers of its channels in the file.
        count: the number of its messages, None if it is not stated.
        is_numbered: whether the publisher has no name, so that the number of its channel stands for it. Another file
            may give this number to another publisher.
    """

    name: str
    schemas: list[Schema]
    channels: list[int]
    count: int | None = 0
    is_numbered: bool = False

    def codec(self, log: str) -> Codec:
        """Return the codec of its messages; FormatError if publishers send different types."""
        if len(self.schemas) > 1:
            kinds = ", ".join(dict.fromkeys(f"{one.name} ({one.message})" for one in self.schemas))
            raise FormatError(f"{log}: messages of different types are on {self.name}: {kinds}")
        return codec_of(self.schemas[0], f"{log}: {self.name}")


@dataclass(frozen=True, slots=True)
class Index:
    """The messages of a topic in order of log time; messages with equal times are in the order of the file.

    Attributes:
        log: log times in nanoseconds, int64 `[n]`.
        places: where each message is, int64 `[n, 3]`: the number of the file, and two numbers for the place in it.
    """

    log: Array
    places: Array

    @classmethod
    def of(cls, log: Array, places: Array) -> Index:
        """Sort the messages of a topic."""
        if (log[1:] > log[:-1]).all():
            return cls(log, places)
        order = np.lexsort((places[:, 2], places[:, 1], places[:, 0], log))
        return cls(log[order], places[order])

    def __len__(self) -> int:
        return len(self.log)

    @property
    def has_twice(self) -> bool:
        """Whether a message occurs twice, as in a damaged index, where it hides another message."""
        same = self.log[1:] == self.log[:-1]
        return bool((self.places[1:][same] == self.places[:-1][same]).all(1).any())


class Log(Closing, ABC):
    """A recording, open for reading.

    A topic on which several publishers send at the same time is divided into one topic for each publisher, named
    `/topic@publisher`. Such names work in every log, even if a topic has only one publisher, because all recordings
    share one map.

    Attributes:
        name: the name of the recording in errors.
        topics: the topics by name, with single publishers in place of divided topics.
        divided: the names of the topics of single publishers, by the name of each divided topic.
        texts: texts about the episode, from the metadata of the recording.
        notes: sentences on anything unusual.
        attachments: small files inside the recording, by name.
    """

    kind = ""

    def __init__(self, name: str) -> None:
        self.name = name
        self.topics: dict[str, Topic] = {}
        self.divided: dict[str, list[str]] = {}
        self._publishers: dict[str, dict[str, Topic]] = {}
        self._indexes: dict[str, Index] = {}
        self.texts: dict[str, str] = {}
        self.notes: list[str] = []
        self.attachments: dict[str, bytes] = {}
        self._decompressor = zstandard.ZstdDecompressor()

    @property
    @abstractmethod
    def paths(self) -> list[Path]:
        """The files."""

    def index(self, names: Collection[str]) -> dict[str, Index]:
        """Return the messages of these topics; indexes are kept. CorruptDataError for a repeated message."""
        if new := [name for name in names if name not in self._indexes]:
            self._indexes |= self.find(new)
            if twice := next((name for name in new if self._indexes[name].has_twice), None):
                self.damaged(f"its index names a message on {twice} twice")
        return {name: self._indexes[name] for name in names}

    @abstractmethod
    def find(self, names: Collection[str]) -> dict[str, Index]:
        """Find the messages of these topics, none for an unknown one; the caller may change the arrays."""

    @abstractmethod
    def message(self, place: Sequence[int], log: int | None = None) -> tuple[int | None, Buffer]:
        """Return the time of publishing of a message, None if unknown, and its bytes.

        Raises CorruptDataError if its log time differs from `log`, the time in the index.
        """

    def read(self, asked: Sequence[tuple[Index, Array]]) -> Iterator[tuple[int, int, int | None, Buffer]]:
        """Yield messages in the order of the files, so that no part of a file is read twice.

        Args:
            asked: for each of several topics, its index and the ascending numbers of wanted messages.

        Yields:
            For each message its position in `asked`, its position among these numbers, its time of publishing, and its
            bytes, which are valid until the next message.
        """
        if not asked:
            return
        places = np.concatenate([index.places[numbers] for index, numbers in asked])
        owners = np.concatenate([np.full(len(numbers), at) for at, (_, numbers) in enumerate(asked)])
        rows = np.concatenate([np.arange(len(numbers)) for _, numbers in asked])
        logs = np.concatenate([index.log[numbers] for index, numbers in asked])
        order = np.lexsort((places[:, 2], places[:, 1], places[:, 0]))
        given = (array[order].tolist() for array in (owners, rows, places, logs))
        for owner, row, place, log in zip(*given, strict=True):
            yield owner, row, *self.message(place, log)

    def require_indexed(self, since: int, until: int) -> None:
        """Compare the index with all messages logged between two times, even with those that no step uses.

        An index has no checksum, and a wrong time in it moves a message to where it is not used. Raises
        CorruptDataError if the index does not agree with the messages.
        """

    @property
    def names(self) -> list[str]:
        """The names that a map may use: topics, and `/topic@publisher` for each publisher."""
        return list(self.topics | {own: part for parts in self._publishers.values() for own, part in parts.items()})

    def _topic(self, name: str) -> Topic | None:
        found = (parts[name] for parts in self._publishers.values() if name in parts)
        return self.topics.get(name) or next(found, None)

    def _channels_of(self, name: str) -> list[int]:
        topic = self._topic(name)
        return [] if topic is None else topic.channels

    def topic(self, name: str, is_alone: bool = True) -> Topic:
        """Return a topic; UsageError for an unknown or a divided one.

        Also raises UsageError for a publisher that only has a number, unless the log `is_alone` (the only recording)
        and consists of one file: the number may belong to another publisher in the next file.
        """
        if name in self.divided:
            names = self.divided[name]
            raise UsageError(
                f"{self.name}: {len(names)} publishers send on {name} at the same time, whose messages would be mixed",
                hint=f"map one of {', '.join(names)}",
            )
        found = self._topic(name)
        if found is None:
            raise UsageError(
                f"{self.name} has no topic {name!r}{did_you_mean(name, self.topics)}",
                hint=f"topics are {', '.join(self.topics) or 'none'}",
            )
        if found.is_numbered and not is_alone:
            raise UsageError(
                f"{self.name}: {name} names a publisher by its number, which may be another one in the next file",
                hint="convert each file on its own, with its own map, and merge the datasets",
            )
        return found

    def _add(self, name: str, schema: Schema, channel: int, count: int | None, publisher: str | None = None) -> None:
        """Add a channel, the messages of one publisher on a topic; without a name, each channel is a publisher."""
        own = f"{name}@{channel if publisher is None else publisher}"
        self._join(name, Topic(own, [schema], [channel], count, is_numbered=publisher is None))

    def _join(self, name: str, part: Topic) -> None:
        whole = self.topics.setdefault(name, Topic(name, [], []))
        own = Topic(part.name, [], [], is_numbered=part.is_numbered)
        for topic in (whole, self._publishers.setdefault(name, {}).setdefault(part.name, own)):
            topic.schemas += [one for one in part.schemas if one not in topic.schemas]
            topic.channels += part.channels
            topic.count = None if part.count is None or topic.count is None else topic.count + part.count

    def _divide(self) -> None:
        """Divide the topics on which publishers send at the same time, not those where one takes over from another."""
        for name, parts in self._publishers.items():
            if len(parts) < 2:
                continue
            spans = sorted((int(one.log[0]), int(one.log[-1])) for one in self.find(list(parts)).values() if len(one))
            if any(begin < end for (_, end), (begin, _) in pairwise(spans)):
                self._split(name)

    def _split(self, name: str) -> None:
        del self.topics[name]
        self.topics |= self._publishers[name]
        self.divided[name] = list(self._publishers[name])

    def damaged(self, why: object, hint: str | None = None) -> NoReturn:
        """Raise CorruptDataError for this recording."""
        raise CorruptDataError(f"{self.name} is damaged: {why}", hint=hint or "copy or record it again")


class _Chunks:
    """A cache of decompressed chunks by their positions; the chunks that were used last are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0

    def get(self, key: int) -> bytes | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: int, data: bytes) -> None:
        self._kept[key] = data
        self._bytes += len(data)
        while self._bytes > _CACHED_BYTES and len(self._kept) > 1:
            self._bytes -= len(self._kept.popitem(last=False)[1])


def _unzstd(data: Buffer, size: int | None, log: Log) -> bytes:
    try:
        stated = zstandard.frame_content_size(data)
        if stated > _MOST_BYTES or (stated >= 0 and size not in (None, stated)):
            log.damaged(f"a part of it would have {stated:,} bytes")
        if stated < 0:  # without a stated size, allocate as the data comes: `size` may be damaged
            return bytes(log._decompressor.decompressobj().decompress(data))
        found = log._decompressor.decompress(data)
    except zstandard.ZstdError as error:
        log.damaged(f"a part of it cannot be decompressed ({error})")
    return bytes(found)


def _unlz4(data: Buffer, size: int, log: Log) -> bytes:
    frame = library("lz4.frame")
    try:
        opened = frame.LZ4FrameDecompressor()
        found = opened.decompress(data, max_length=size + 1)
    except (RuntimeError, ValueError, EOFError) as error:
        log.damaged(f"a part of it cannot be decompressed ({str(error)[:80]})")
    return bytes(found)


# MCAP ---------------------------------------------------------------------------------------------------


_ANY = (0, (1 << 64) - 1)
"""The range of times of messages if none is stated."""


@dataclass(slots=True)
class _Chunk:
    """A chunk of an MCAP file: a compressed part with messages, followed in the file by an index of each channel.

    Attributes:
        start: position of its record.
        length: bytes of its record.
        index_length: bytes of the indexes behind it.
        channels: the channels of its messages, None if the summary does not list them.
        times: first and last log time of its messages, from the summary.
        entries: its index entries by channel, found by scanning it; None to read the indexes behind it.
    """

    start: int
    length: int
    index_length: int = 0
    channels: frozenset[int] | None = None
    times: tuple[int, int] = _ANY
    entries: dict[int, bytes] | None = None


_FOOTER = 9 + 20


class McapLog(Log):
    """An MCAP file, with or without chunks and a summary; a file without an end is read up to its last whole record."""

    kind = "MCAP"

    def __init__(self, path: Path, name: str | None = None) -> None:
        super().__init__(str(path) if name is None else name)
        self._path = path
        self._records = library("mcap.records")
        self._stream = library("mcap.data_stream")
        self._file = os.fdopen(open_regular(path), "rb")
        self._cache = _Chunks()
        self._schemas: dict[int, Any] = {}
        self._channels: dict[int, Any] = {}
        self._chunks: list[_Chunk] = []
        self._bare: dict[int, list[tuple[int, int]]] = {}
        self._asked: set[int] = set()
        self._compared: set[int] = set()
        self._counts: Mapping[int, int] | None = None
        self._span = _ANY
        try:
            self._open()
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> None:
        self._size = os.fstat(self._file.fileno()).st_size
        if self._bytes(0, 8) != _MCAP:
            raise FormatError(f"{self.name} is not MCAP: it begins with other bytes")
        with reading("the log", self._path, struct.error, library("mcap.exceptions").McapError):
            self._ended = self._size >= 8 + _FOOTER + 8 and self._bytes(self._size - 8, 8) == _MCAP
            if not (self._ended and self._read_summary()):
                self._scan()
            counts = self._counts
            for channel in self._channels.values():
                known = None if counts is None else int(counts.get(channel.id, 0))
                publisher = channel.metadata.get("callerid")
                self._add(channel.topic, self._schema(channel), channel.id, known, publisher)
            self._divide()

    def _bytes(self, at: int, count: int) -> bytes:
        if count > self._size - at or at < 0:
            self.damaged(f"{count:,} bytes at {at:,} lie outside the {self._size:,} of the file")
        self._file.seek(at)
        found = self._file.read(count)
        if len(found) != count:
            self.damaged("it became shorter while it was read")
        return found

    def _parsed(self, kind: str, content: bytes) -> Any:
        stream = self._stream.ReadDataStream(io.BytesIO(content))
        return getattr(self._records, kind).read(stream)

    def _schema(self, channel: Any) -> Schema:
        found = self._schemas.get(channel.schema_id)
        if found is None and channel.schema_id:
            self.damaged(f"the schema of {channel.topic} is missing")
        name, encoding, data = ("", "", b"") if found is None else (found.name, found.encoding, found.data)
        return Schema(name, channel.message_encoding, encoding, bytes(data))

    def _read_summary(self) -> bool:
        """Read the summary; return False if it does not suffice to find all messages, so that a scan is needed."""
        foot = self._bytes(self._size - 8 - _FOOTER, _FOOTER)
        opcode, length = _RECORD_HEAD.unpack_from(foot)
        begin, _, checksum = struct.unpack_from("<QQI", foot, 9)
        if opcode != 2 or length != 20:
            self.damaged("it has no footer before its end")
        if not begin:
            return False
        end = self._size - 8 - _FOOTER
        if begin > end or begin < 8:
            self.damaged("its summary lies outside the file")
        data = self._bytes(begin, end - begin)
        if checksum and zlib.crc32(foot[:-4], zlib.crc32(data)) != checksum:
            self.damaged("the checksum of its summary does not match")
        chunks: list[_Chunk] = []
        counts, places = None, []
        for opcode, content in self._records_in(data):
            if opcode == 3:
                self._take_schema(content)
            elif opcode == 4:
                self._take_channel(content)
            elif opcode == 8:
                chunks.append(_chunk_of(content))
            elif opcode == 11:
                counts = self._parsed("Statistics", content)
            elif opcode in (10, 13):
                places.append((opcode, self._parsed("AttachmentIndex" if opcode == 10 else "MetadataIndex", content)))
        known = set(self._channels)
        if (
            counts is None
            or len(chunks) != counts.chunk_count
            or (counts.message_count and not (chunks and counts.channel_message_counts))
            or any(one.channels is not None and not one.channels <= known for one in chunks)
            or len(self._channels) != counts.channel_count
            or (counts.metadata_count + counts.attachment_count > len(places))
        ):
            self._schemas, self._channels = {}, {}
            if counts is not None and not chunks:  # messages outside chunks have no checksum: compare their counts
                self._counts = counts.channel_message_counts or None  # an empty map means that none were counted
                self._span = (counts.message_start_time, counts.message_end_time)
            return False
        self._counts = counts.channel_message_counts
        self._chunks = sorted(chunks, key=lambda one: one.start)
        for opcode, place in places:
            head = self._bytes(place.offset, 9)
            if head[0] != opcode - 1:
                self.damaged("its index refers to records that do not exist")
            self._take_more(head[0], place.offset + 9, _RECORD_HEAD.unpack(head)[1])
        return True

    def _records_in(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        at = 0
        while at < len(data):
            if at + 9 > len(data):
                self.damaged("a record in it is cut")
            opcode, length = _RECORD_HEAD.unpack_from(data, at)
            at += 9
            if length > len(data) - at:
                self.damaged("a record in it is longer than the section that contains it")
            yield opcode, data[at : at + length]
            at += length

    def _take_schema(self, content: bytes) -> None:
        found = self._parsed("Schema", content)
        self._schemas.setdefault(found.id, found)

    def _take_channel(self, content: bytes) -> None:
        found = self._parsed("Channel", content)
        had = self._channels.setdefault(found.id, found)
        if had != found:
            self.damaged(f"channel {found.id} is both {had.topic} and {found.topic}")

    def _take_more(self, opcode: int, at: int, length: int) -> None:
        """Take a record of metadata or an attachment."""
        if opcode == 12:
            found = self._parsed("Metadata", self._bytes(at, length))
            texts = _custom_data(found.metadata) if found.name == "rosbag2" else found.metadata
            self.texts.update(_short_texts(texts))
        elif length > _MOST_ATTACHED:
            self.notes.append(f"{self.name}: an attachment of {length:,} bytes is left out, as it is too large")
        else:
            content = self._bytes(at, length)
            stated = int.from_bytes(content[-4:], "little")
            if stated and zlib.crc32(content[:-4]) != stated:
                self.damaged("the checksum of an attachment does not match")
            found = self._parsed("Attachment", content)
            name = found.name if found.name not in self.attachments else f"{len(self.attachments)}-{found.name}"
            self.attachments[name] = bytes(found.data)

    def _scan(self) -> None:
        """Find all messages by reading every record, for a file without a usable summary."""
        at, messages = 8, 0
        end = self._size - (8 if self._ended else 0)
        while at < end:
            head = self._bytes(at, min(9, end - at))
            opcode, length = _RECORD_HEAD.unpack(head) if len(head) == 9 else (0, end)
            if not opcode or length > end - at - 9:
                if self._ended:
                    self.damaged(f"the record at byte {at:,} is longer than the file")
                break
            if opcode == 6:
                chunk = _Chunk(at, length + 9, entries={})
                messages += self._scan_chunk(chunk)
                self._chunks.append(chunk)
            elif opcode == 5:
                channel, _, log, _ = _MESSAGE_HEAD.unpack(self._bytes(at + 9, 22))
                self._require_channel(channel)
                self._bare.setdefault(channel, []).append((log, at))
                messages += 1
            elif opcode == 3:
                self._take_schema(self._bytes(at + 9, length))
            elif opcode == 4:
                self._take_channel(self._bytes(at + 9, length))
            elif opcode in (9, 12):
                self._take_more(opcode, at + 9, length)
            elif opcode == 15:
                self._require_data(at, self._bytes(at + 9, length))
                at += length + 9
                break
            at += length + 9
        if not self._ended:
            left = self._size - at
            self.notes.append(
                f"{self.name} has no end, as when the recorder was killed or the file was cut: {messages:,} messages "
                f"are whole and read, the {left:,} bytes after them are not"
            )

    def _require_data(self, end: int, content: bytes) -> None:
        """Compare the checksum in the record at the end of data, which covers all bytes before it, if messages need it.

        Messages in chunks have checksums of their own.
        """
        stated = int.from_bytes(content[:4], "little")
        if not stated or not self._bare:
            return
        found = 0
        for at in range(0, end, _CACHED_BYTES):
            found = zlib.crc32(self._bytes(at, min(_CACHED_BYTES, end - at)), found)
        if found != stated:
            self.damaged("the checksum of its messages does not match")

    def _require_channel(self, channel: int) -> None:
        if channel not in self._channels:
            self.damaged(f"a message is on channel {channel}, which is not declared before it")

    def _scan_chunk(self, chunk: _Chunk) -> int:
        """Find the schemas, channels and messages in a chunk; return the number of messages."""
        data = self._content(chunk)
        found: dict[int, list[tuple[int, int]]] = {}
        at, end = 0, len(data)
        while at < end:
            if at + 9 > end:
                self.damaged("a record in a chunk is cut")
            opcode, length = _RECORD_HEAD.unpack_from(data, at)
            if length > end - at - 9:
                self.damaged("a record in a chunk is longer than the chunk")
            if opcode == 5:
                if length < _MESSAGE_HEAD.size:
                    self.damaged("a message in a chunk is cut")
                channel, _, log, _ = _MESSAGE_HEAD.unpack_from(data, at + 9)
                self._require_channel(channel)
                found.setdefault(channel, []).append((log, at))
            elif opcode == 3:
                self._take_schema(data[at + 9 : at + 9 + length])
            elif opcode == 4:
                self._take_channel(data[at + 9 : at + 9 + length])
            at += 9 + length
        chunk.entries = {channel: _entries(pairs) for channel, pairs in found.items()}
        chunk.channels = frozenset(chunk.entries)
        return sum(map(len, found.values()))

    def _content(self, chunk: _Chunk) -> bytes:
        """Return the records of a chunk, decompressed and verified."""
        kept = self._cache.get(chunk.start)
        if kept is not None:
            return kept
        data = self._bytes(chunk.start, chunk.length)
        opcode, length = _RECORD_HEAD.unpack_from(data)
        if opcode != 6 or length != chunk.length - 9 or length < 40:
            self.damaged(f"there is no chunk at byte {chunk.start:,}, where its index has one")
        _, _, size, checksum, named = struct.unpack_from("<QQQII", data, 9)
        compression = data[41 : 41 + named].decode(errors="replace")
        stored = struct.unpack_from("<Q", data, 41 + named)[0] if 49 + named <= len(data) else -1
        if stored != len(data) - 49 - named:
            self.damaged(f"the chunk at byte {chunk.start:,} states a length that is not its own")
        if size > _MOST_BYTES:
            self.damaged(f"the chunk at byte {chunk.start:,} would have {size:,} bytes")
        packed = memoryview(data)[49 + named :]
        if compression == "zstd":
            found = _unzstd(packed, size, self) if size else b""
        elif compression == "lz4":
            found = _unlz4(packed, size, self) if size else b""
        elif not compression:
            found = bytes(packed)
        else:
            raise FormatError(f"{self.name} is compressed with {compression}", hint="zstd and lz4 are read")
        if len(found) != size or (checksum and zlib.crc32(found) != checksum):
            self.damaged(
                f"the checksum of the chunk at byte {chunk.start:,} does not match",
                hint="copy or record it again; mcap recover makes a log without the damaged part",
            )
        if chunk.entries is None and chunk.channels is not None:
            self._compare(chunk, np.frombuffer(found, np.uint8))
        self._cache.put(chunk.start, found)
        return found

    def require_indexed(self, since: int, until: int) -> None:
        for chunk in self._chunks:
            if chunk.start in self._compared or chunk.times[0] > until or chunk.times[1] < since:
                continue
            if chunk.channels is not None and not chunk.channels.isdisjoint(self._asked):
                self._content(chunk)

    def _compare(self, chunk: _Chunk, data: Array) -> None:
        """Compare the index entries of a chunk with its messages, for the channels that are used."""
        self._compared.add(chunk.start)
        indexed = self._indexed(chunk, self._asked)
        if not indexed:
            return
        entries = np.frombuffer(b"".join(indexed.values()), _INDEX_ENTRY)
        owners = np.repeat(np.array(list(indexed), "<u2"), [len(one) // 16 for one in indexed.values()])
        if len(entries) and int(entries["offset"].max()) + 9 + _MESSAGE_HEAD.size > len(data):
            self.damaged("its index refers to a message that does not exist")
        heads = data[entries["offset"].astype(np.int64)[:, None] + _HEAD_BYTES].view(_HEAD)[:, 0]
        known = (heads["opcode"] == 5) & (heads["channel"] == owners) & (heads["log"] == entries["log"])
        if not known.all():
            self.damaged(f"the index of the chunk at byte {chunk.start:,} does not match its messages")

    def _indexed(self, chunk: _Chunk, wanted: Collection[int]) -> dict[int, bytes]:
        """Return the index entries (log time and offset) of the messages of some channels in a chunk."""
        if chunk.entries is not None:
            return {channel: chunk.entries[channel] for channel in wanted if channel in chunk.entries}
        if chunk.channels is None:
            self._scan_chunk(chunk)
            return self._indexed(chunk, wanted)
        if chunk.channels.isdisjoint(wanted):
            return {}
        found: dict[int, bytes] = {}
        for opcode, content in self._records_in(self._bytes(chunk.start + chunk.length, chunk.index_length)):
            if opcode != 7 or len(content) < 6:
                self.damaged("the index of a chunk is missing")
            channel, length = struct.unpack_from("<HI", content)
            if length != len(content) - 6 or length % 16:
                self.damaged("the index of a chunk states a length that is not its own")
            if channel in wanted:
                found[channel] = content[6:]
        if found.keys() != chunk.channels & set(wanted):
            self.damaged("the index of a chunk lacks channels")
        return found

    @property
    def paths(self) -> list[Path]:
        return [self._path]

    def find(self, names: Collection[str]) -> dict[str, Index]:
        channels = {name: self._channels_of(name) for name in names}
        wanted = {channel: name for name in names for channel in channels[name]}
        found: dict[int, list[tuple[int, bytes]]] = {channel: [] for channel in wanted}
        if not wanted.keys() <= self._asked:
            self._asked |= wanted.keys()
            self._cache, self._compared = _Chunks(), set()  # chunks have to be compared again, for the new channels
        with reading("the index", self._path, struct.error):
            for at, chunk in enumerate(self._chunks):
                for channel, part in self._indexed(chunk, wanted).items():
                    found[channel].append((at, part))
            for channel in wanted:
                found[channel].append((-1, _entries(self._bare.get(channel, ()))))
        bounds = np.array([*(chunk.times for chunk in self._chunks), self._span], np.uint64).T
        logs: dict[int, Array] = {}
        places: dict[int, Array] = {}
        for channel, name in wanted.items():
            entries = np.frombuffer(b"".join(part for _, part in found[channel]), _INDEX_ENTRY)
            log, chunks = entries["log"], np.array([at for at, _ in found[channel]], np.int64)
            chunks = np.repeat(chunks, [len(part) // 16 for _, part in found[channel]])
            stated = len(log) if self._counts is None else self._counts.get(channel, 0)
            if len(log) != stated:
                self.damaged(f"it states {stated:,} messages on {name}, and its index has {len(log):,}")
            if len(log) and int(log.max()) >> 63:
                self.damaged(f"a message on {name} has a time in the year 2262 or later")
            if ((log < bounds[0, chunks]) | (log > bounds[1, chunks])).any():
                self.damaged(f"a message on {name} has a time outside the range that its summary states")
            logs[channel] = log.astype(np.int64)
            places[channel] = np.stack((np.zeros_like(chunks), chunks, entries["offset"].astype(np.int64)), 1)
        return {
            name: Index.of(
                np.concatenate([np.zeros(0, np.int64), *(logs[one] for one in of)]),
                np.concatenate([np.zeros((0, 3), np.int64), *(places[one] for one in of)]),
            )
            for name, of in channels.items()
        }

    def message(self, place: Sequence[int], log: int | None = None) -> tuple[int | None, Buffer]:
        _, at, offset = place
        data: Buffer
        if at < 0:
            head = self._bytes(offset, 9)
            length = _RECORD_HEAD.unpack(head)[1]
            data, offset = head + self._bytes(offset + 9, length), 0
        else:
            data = self._content(self._chunks[at])
        if offset < 0 or offset + 31 > len(data):
            self.damaged("its index refers to a message that does not exist")
        opcode, length = _RECORD_HEAD.unpack_from(data, offset)
        if opcode != 5 or length < 22 or length > len(data) - offset - 9:
            self.damaged("its index refers to a message that does not exist")
        channel, _, logged, published = _MESSAGE_HEAD.unpack_from(data, offset + 9)
        if log is not None and logged != log:
            self.damaged(f"its index has a message at {log} ns, which was logged at {logged} ns")
        found: Buffer = memoryview(data)[offset + 31 : offset + 9 + length]
        # ROS 2 can compress single messages: CDR never begins with the magic number of zstd
        if found[:4] == _ZSTD and channel in self._channels and self._channels[channel].message_encoding == "cdr":
            found = _unzstd(found, None, self)
        return published, found

    def close(self) -> None:
        self._file.close()


def _entries(pairs: Sequence[tuple[int, int]]) -> bytes:
    return np.array(list(pairs), _INDEX_ENTRY).tobytes()


def _chunk_of(content: bytes) -> _Chunk:
    """Parse the record of a chunk in the summary; struct.error if it is cut."""
    first, last, start, length, size = struct.unpack_from("<QQQQI", content)
    channels = frozenset(channel for channel, _ in struct.iter_unpack("<HQ", content[36 : 36 + size])) or None
    (index_length,) = struct.unpack_from("<Q", content, 36 + size)
    return _Chunk(start, length, index_length, channels, (first, last))


# ROS 2 in SQLite ----------------------------------------------------------------------------------------


class SqliteLog(Log):
    """One `.db3` file of a ROS 2 bag; its messages may be compressed one by one."""

    kind = "ROS 2 bag (SQLite)"

    def __init__(self, path: Path, name: str | None = None) -> None:
        super().__init__(str(path) if name is None else name)
        self._path = path
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        log = path.with_name(f"{path.name}-wal")
        with reading("the bag", path, sqlite3.Error):
            if log.exists() and log.stat().st_size:  # SQLite would merge the write-ahead log into the file: open a copy
                self._folder = tempfile.TemporaryDirectory(prefix="rbtool-log-")
                for one in (path, log):
                    _copy(one, Path(self._folder.name) / one.name)
                path = Path(self._folder.name) / path.name
                self._base = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)
            else:
                self._base = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            with reading("the bag", self._path, sqlite3.Error):
                self._read_topics()
        except BaseException:
            self.close()
            raise

    def _read_topics(self) -> None:
        tables = {name for (name,) in self._base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not {"topics", "messages"} <= tables:
            raise FormatError(f"{self.name} is a database without the tables of a ROS 2 bag")
        defined: dict[str, tuple[str, bytes]] = {}
        if "message_definitions" in tables:
            columns = "topic_type, encoding, encoded_message_definition"
            for name, encoding, text in self._base.execute(f"SELECT {columns} FROM message_definitions"):
                defined[str(name)] = (str(encoding), str(text or "").encode())
        found = self._base.execute("SELECT id, name, type, serialization_format FROM topics ORDER BY id").fetchall()
        counts = dict(self._base.execute("SELECT topic_id, COUNT(*) FROM messages GROUP BY topic_id").fetchall())
        for number, name, kind, message in found:
            encoding, text = defined.get(str(kind), ("ros2msg", b""))
            schema = Schema(str(kind), str(message), encoding, text)
            self._add(str(name), schema, int(number), int(counts.pop(number, 0)))
        if counts:
            self.damaged(f"{sum(counts.values()):,} messages belong to topics that it does not list")
        self._divide()

    @property
    def paths(self) -> list[Path]:
        return [self._path]

    def find(self, names: Collection[str]) -> dict[str, Index]:
        found = {}
        with reading("the bag", self._path, sqlite3.Error):
            for name in names:
                channels = self._channels_of(name)
                marks = ",".join("?" * len(channels))
                rows = self._base.execute(f"SELECT timestamp, id FROM messages WHERE topic_id IN ({marks})", channels)
                pairs = np.array(rows.fetchall(), np.int64).reshape(-1, 2)
                places = np.zeros((len(pairs), 3), np.int64)
                places[:, 2] = pairs[:, 1]
                found[name] = Index.of(pairs[:, 0].copy(), places)
        return found

    def message(self, place: Sequence[int], log: int | None = None) -> tuple[int | None, Buffer]:
        with reading("the bag", self._path, sqlite3.Error):
            row = self._base.execute("SELECT data FROM messages WHERE id = ?", (place[2],)).fetchone()
        if row is None or not isinstance(row[0], bytes):
            self.damaged("a message has no data")
        data: bytes = row[0]
        return None, _unzstd(data, None, self) if data.startswith(_ZSTD) else data

    def close(self) -> None:
        self._base.close()
        if self._folder is not None:
            self._folder.cleanup()


def _copy(source: Path, target: Path, unpack: Callable[[IO[bytes]], Any] = lambda file: file) -> None:
    """Copy a file in parts; `unpack` turns it into a file of other contents, such as a decompressed one."""
    with os.fdopen(open_regular(source), "rb") as given, fs.created(target) as made:
        opened = unpack(given)
        while part := opened.read(1 << 20):
            made.write(part)


# ROS 1 --------------------------------------------------------------------------------------------------


class Ros1Log(Log):
    """A ROS 1 bag, which must be indexed."""

    kind = "ROS 1 bag"

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        self._module = library("rosbags.rosbag1.reader")
        self._asked: set[int] = set()
        self._named: dict[int, list[tuple[int, Any]]] = {}
        self._compared: set[int] = set()
        self._cache = _Chunks()
        self._errors = (AssertionError, EOFError, struct.error, self._module.ReaderError)
        self._reader = self._module.Reader(path)
        os.close(open_regular(path))
        hint = "rosbag reindex mends a bag whose recorder was killed; otherwise copy or record it again"
        with reading("the bag", path, *self._errors, hint=hint):
            self._reader.open()
        try:
            with reading("the bag", path, *self._errors):
                self._require_whole_index()
                for one in self._reader.connections:
                    schema = Schema(one.msgtype.replace("/msg/", "/"), "ros1", "ros1msg", one.msgdef.data.encode())
                    count = len(self._reader.indexes[one.id])
                    self._add(one.topic, schema, one.id, count, one.ext.callerid)
                self._divide()
        except BaseException:
            self.close()
            raise

    def _require_whole_index(self) -> None:
        """Compare the index with the counts of each chunk, as a damaged count would hide messages."""
        stated = {(one.pos, channel): count for one in self._reader.chunk_infos
                  for channel, count in one.connection_counts.items() if count}  # fmt: skip
        found = Counter((one.chunk_pos, channel) for channel, rows in self._reader.indexes.items() for one in rows)
        if stated != found:
            self.damaged("its index does not agree with the message counts of its chunks")
        bio, module = self._reader.bio, self._module
        bio.seek(0)
        bio.readline()
        head = module.Header.read(bio, module.RecordType.BAGHEADER)
        bio.seek(head.get_uint64("index_pos"))
        for _ in range(head.get_uint32("conn_count")):
            self._reader.read_connection()
        for _ in range(head.get_uint32("chunk_count")):
            self._reader.read_chunk_info()
        if bio.tell() != bio.seek(0, os.SEEK_END):
            self.damaged("it has more connections or chunks than it states")

    @property
    def paths(self) -> list[Path]:
        return [self._path]

    def find(self, names: Collection[str]) -> dict[str, Index]:
        found = {}
        for name in names:
            channels = self._channels_of(name)
            rows = [one for channel in channels for one in self._reader.indexes[channel]]
            for channel in set(channels) - self._asked:
                for one in self._reader.indexes[channel]:
                    self._named.setdefault(one.chunk_pos, []).append((channel, one))
                self._asked.add(channel)
                self._cache, self._compared = _Chunks(), set()
            log = np.array([one.time for one in rows], np.int64)
            places = np.zeros((len(rows), 3), np.int64)
            places[:, 1] = [one.chunk_pos for one in rows]
            places[:, 2] = [one.offset for one in rows]
            found[name] = Index.of(log, places)
        return found

    def _content(self, at: int) -> bytes:
        kept = self._cache.get(at)
        if kept is None:
            chunk = self._reader.chunks[at]
            self._reader.bio.seek(chunk.datapos)
            kept = bytes(chunk.decompressor(self._reader.bio.read(chunk.datasize)))
            for channel, one in self._named.get(at, ()):
                self._found(kept, one.offset, one.time, channel)
            self._compared.add(at)
            self._cache.put(at, kept)
        return kept

    def require_indexed(self, since: int, until: int) -> None:
        for one in self._reader.chunk_infos:
            if one.pos in self._compared or one.start_time > until or one.end_time < since:
                continue
            if one.pos in self._named:
                with reading("the bag", self._path, *self._errors):
                    self._content(one.pos)

    def message(self, place: Sequence[int], log: int | None = None) -> tuple[int | None, Buffer]:
        with reading("the bag", self._path, *self._errors):
            data = self._content(place[1])
            return None, memoryview(data)[slice(*self._found(data, place[2], log))]

    def _found(self, data: bytes, at: int, log: int | None, channel: int | None = None) -> tuple[int, int]:
        """Return where the bytes of the message at an index entry's place in a chunk begin and end."""
        while True:
            (length,) = struct.unpack_from("<I", data, at)
            head = data[at + 4 : at + 4 + length]
            at += 4 + length
            (size,) = struct.unpack_from("<I", data, at)
            kind = _ros1_field(head, b"op")
            at += 4
            if kind == b"\x02" and log is not None:
                seconds, nanos = struct.unpack("<II", _ros1_field(head, b"time") or bytes(8))
                if seconds * 10**9 + nanos != log:
                    self.damaged(f"its index has a message at {log} ns, which was logged at another time")
            if kind == b"\x02" and channel is not None and _ros1_field(head, b"conn") != struct.pack("<I", channel):
                self.damaged(f"its index has a message at {log} ns on another topic than the message has")
            if kind == b"\x02" and at + size <= len(data):
                return at, at + size
            if kind != b"\x07" or at + size > len(data):
                self.damaged("its index refers to a message that does not exist")
            at += size

    def close(self) -> None:
        if self._reader.bio is not None:
            self._reader.close()


def _ros1_field(head: bytes, name: bytes) -> bytes | None:
    at = 0
    while at + 4 <= len(head):
        (length,) = struct.unpack_from("<I", head, at)
        key, _, value = head[at + 4 : at + 4 + length].partition(b"=")
        if key == name:
            return value
        at += 4 + length
    return None


# Recordings ---------------------------------------------------------------------------------------------


class SplitLog(Log):
    """A recording in several consecutive files."""

    def __init__(self, name: str, parts: Sequence[Log]) -> None:
        super().__init__(name)
        self._parts = list(parts)
        self.kind = parts[0].kind
        for part in parts:
            self.texts.update(part.texts)
            self.attachments.update(part.attachments)
            self.notes += part.notes
            for topic, publishers in part._publishers.items():
                for publisher in publishers.values():
                    self._join(topic, publisher)
        for divided in dict.fromkeys(name for part in parts for name in part.divided):
            self._split(divided)

    def topic(self, name: str, is_alone: bool = True) -> Topic:
        return super().topic(name, is_alone and len(self._parts) == 1)

    @property
    def paths(self) -> list[Path]:
        return [path for part in self._parts for path in part.paths]

    def find(self, names: Collection[str]) -> dict[str, Index]:
        parts = [part.find([name for name in names if part._topic(name) is not None]) for part in self._parts]
        found = {}
        for name in names:
            there = [(at, one[name]) for at, one in enumerate(parts) if name in one]
            for at, one in there:
                one.places[:, 0] = at
            logs = [np.zeros(0, np.int64), *(one.log for _, one in there)]
            places = [np.zeros((0, 3), np.int64), *(one.places for _, one in there)]
            found[name] = Index.of(np.concatenate(logs), np.concatenate(places))
        return found

    def require_indexed(self, since: int, until: int) -> None:
        for part in self._parts:
            part.require_indexed(since, until)

    def message(self, place: Sequence[int], log: int | None = None) -> tuple[int | None, Buffer]:
        return self._parts[place[0]].message([0, *place[1:]], log)

    def close(self) -> None:
        for part in self._parts:
            part.close()


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording that can be opened: its files in order and, of a ROS 2 bag, its `metadata.yaml` in `about`.

    `notes` explain how its files were found, if that was a guess.
    """

    name: str
    files: tuple[Path, ...]
    about: Path | None = None
    notes: tuple[str, ...] = ()

    def open(self) -> Log:
        """Open the recording; FormatError or CorruptDataError for files that cannot be read."""
        with ExitStack() as stack:
            parts = [stack.enter_context(_opened(path)) for path in self.files]
            name = self.name if self.about is None else str(self.about.parent)
            log = parts[0] if len(parts) == 1 else SplitLog(name, parts)
            log.notes += self.notes
            if self.about is not None:
                log.texts.update(_short_texts(_custom_data_of(self.about)))
                stated, counts = _about(self.about).get("message_count"), [one.count for one in log.topics.values()]
                known = sum(one for one in counts if one is not None)
                if isinstance(stated, int) and None not in counts and stated != known:
                    log.notes.append(f"{self.about} states {stated:,} messages, and the files have {known:,}")
            stack.pop_all()
        return log


def _opened(path: Path) -> Log:
    magic = first_bytes(path)
    if magic.startswith(_ROS1):
        return Ros1Log(path)
    if magic.startswith(_SQLITE):
        return SqliteLog(path)
    if magic.startswith(_ZSTD):
        return _unpacked(path)
    return McapLog(path)


class _UnpackedLog(SplitLog):
    """A log whose file is compressed as a whole, decompressed to a temporary folder while it is open."""

    def __init__(self, path: Path, part: Log, folder: tempfile.TemporaryDirectory[str]) -> None:
        super().__init__(str(path), [part])
        self._path, self._folder = path, folder

    @property
    def paths(self) -> list[Path]:
        return [self._path]

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


def _unpacked(path: Path) -> Log:
    folder = tempfile.TemporaryDirectory(prefix="rbtool-log-")
    target = Path(folder.name) / path.name.removesuffix(".zstd")
    try:
        with reading("the log", path, zstandard.ZstdError):
            _copy(path, target, zstandard.ZstdDecompressor().stream_reader)
        if target.name.endswith(".db3"):
            return _UnpackedLog(path, SqliteLog(target, str(path)), folder)
        return _UnpackedLog(path, McapLog(target, name=str(path)), folder)
    except BaseException:
        folder.cleanup()
        raise


def first_bytes(path: Path, count: int = 16) -> bytes:
    """Return the first bytes of a file, b"" if it cannot be read."""
    try:
        descriptor = open_regular(path)
    except (OSError, RbtoolError):
        return b""
    try:
        return os.pread(descriptor, count, 0)
    finally:
        os.close(descriptor)


def is_log(path: Path) -> bool:
    """Return whether a file is a robot log, by its first bytes and, where these do not suffice, its name."""
    magic = first_bytes(path)
    if magic.startswith(_ZSTD):
        return path.name.endswith((".db3.zstd", ".mcap.zstd"))
    return magic.startswith((_MCAP, _ROS1)) or (magic.startswith(_SQLITE) and path.suffix == ".db3")


def recordings(path: Path, depth: int = _DEPTH, most: int | None = None) -> Iterator[Recording]:
    """Yield the recordings at a path: a file, a folder with a ROS 2 bag, or all those in a folder and its subfolders.

    Only the first `most` entries of a folder are considered. Raises CorruptDataError for a bag that lacks a file listed
    in its metadata.
    """
    if path.is_file():
        if is_log(path):
            yield Recording(path.name, (path,))
        return
    entries = sorted(path.iterdir(), key=lambda one: natural_order(one.name))[:most]
    about = path / _YAML
    named = _named_files(about) if about.is_file() else None
    files = [one for one in entries if one.name.endswith(_SUFFIXES) and one.is_file() and is_log(one)]
    there = {one.name for one in files}  # a compressed file may stand beside its decompressed copy
    files = [one for one in files if not (one.suffix == ".zstd" and one.name.removesuffix(".zstd") in there)]
    if named is not None:
        for name in named:
            if not any(one.name in {name, f"{name}.zstd", name.removesuffix(".zstd")} for one in files):
                raise CorruptDataError(
                    f"{path} has no robot log {name}, which its {_YAML} lists",
                    hint="copy the bag again",
                )
        files = [one for one in files if one.with_suffix("") not in files]  # without compressed copies of other files
        ordered = [
            one for name in named for one in files
            if name in {one.name, f"{one.name}.zstd", one.name.removesuffix(".zstd")}
        ]  # fmt: skip
        more = [one for one in files if one not in ordered]
        notes = [f"{one} is taken for a part of the bag, although its {_YAML} does not list it" for one in more]
        yield Recording(path.name, (*ordered, *more), about, tuple(notes))
        return
    split = [one for one in files if one.name.startswith(f"{path.name}_") and one.suffix in {".db3", ".mcap"}]
    if len(split) > 1 and split == files:
        note = f"{path}: {split[0].name} to {split[-1].name} are taken for parts of one recording, by their names"
        yield Recording(path.name, tuple(split), notes=(note,))
        return
    for one in entries:
        if one in files:
            yield Recording(one.name, (one,))
        elif depth and one.is_dir() and not one.is_symlink() and not one.name.startswith("."):
            for inner in recordings(one, depth - 1, most):
                yield replace(inner, name=f"{one.name}/{inner.name}")


def left_out(path: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Yield the files in a folder that have a suffix of logs but are not logs, as deep as `recordings` goes."""
    if path.is_dir():
        for one in sorted(path.iterdir(), key=lambda one: natural_order(one.name)):
            if one.name.endswith(_NAMED) and one.is_file() and not is_log(one):
                yield one
            elif depth and one.is_dir() and not one.is_symlink() and not one.name.startswith("."):
                yield from left_out(one, depth - 1)


def _about(path: Path) -> Mapping[str, Any]:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            found = yaml.safe_load(file.read(4 << 20))
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CorruptDataError(f"{path} cannot be read: it is not YAML", hint="take the file away") from error
    about = found.get(_BAG) if isinstance(found, Mapping) else None
    return about if isinstance(about, Mapping) else {}


def _named_files(path: Path) -> list[str] | None:
    """Return the files that the metadata of a bag list; None if the YAML is not the metadata of a bag."""
    about = _about(path)
    names = about.get("relative_file_paths")
    if not isinstance(names, list) or not names or not all(isinstance(one, str) for one in names):
        return None
    return [Path(one).name for one in names]


def _custom_data_of(path: Path) -> Mapping[str, Any]:
    found = _about(path).get("custom_data")
    return found if isinstance(found, Mapping) else {}


def _custom_data(metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the users' `custom_data` from the copy of a ROS 2 bag's metadata in an MCAP file."""
    try:
        found = yaml.safe_load(metadata.get("serialized_metadata", ""))
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    added = found.get("custom_data") if isinstance(found, Mapping) else None
    return added if isinstance(added, Mapping) else {}


def _short_texts(texts: Mapping[Any, Any]) -> dict[str, str]:
    """Return metadata as texts of an episode, without those that are too long."""
    found = {str(name): _text_of(value) for name, value in texts.items() if value is not None}
    return {name: text for name, text in found.items() if len(text) <= _MOST_TEXT and name}


def _text_of(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def require_recordings(path: Path) -> list[Recording]:
    """Return the recordings at a path; FormatError if there are none."""
    found = list(recordings(path))
    if not found:
        raise FormatError(f"{path} has no robot log: no MCAP file, ROS 2 bag or ROS 1 bag is in it")
    return found


def has_recordings(path: Path) -> bool:
    """Return whether there is a robot log at a path."""
    try:
        found = recordings(path, most=_LOOKED_AT)
        return next(found, None) is not None if path.is_dir() else path.is_file() and is_log(path)
    except CorruptDataError:
        return True
    except (OSError, RbtoolError):
        return False


def schema_names(topics: Iterable[Topic]) -> dict[str, str]:
    """Return the type of each topic's messages, by the name of the topic."""
    return {one.name: ", ".join(dict.fromkeys(schema.name for schema in one.schemas)) for one in topics}
