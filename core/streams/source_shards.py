"""Shards of datasets of other formats on their remotes: each is fetched and converted when its turn comes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..declarations import default_layout
from ..encodings.pickles import require_trust
from ..errors import FormatError
from ..format import fs
from ..format.checks import sound_episodes
from ..format.contracts import SourceFacts
from ..format.digest import digest_text
from ..format.documents import decode, dump_json, load_json
from ..format.episodes import parse_episodes, select_episodes
from ..format.locate import reader_class, source_class
from ..format.manifest import Request
from ..format.memmap.reader import TedReader
from ..format.packed.reader import PackedReader
from ..format.reader import PartsReader, Reader
from ..format.sources import RemoteFile, RemoteShard, Source, safe_id
from ..open_steps import open_dataset
from ..progress import Silent
from ..results import PICKLED
from ..storages.stream import OpenShard
from ..transforms.video import with_frames
from ..verbs.convert import SourceConversion, facts_of
from .cache import ShardFiles
from .local_shards import storage_of

_METADATA, _SETTLED, _FILES, _DATASET, _LEFT_OUT = "metadata", "settled", "files", "dataset", "left_out.json"
_MOST_ASKED = 16
_EPISODE = 32
"""Bits of an episode's number that are its number in the shard, where remotes do not number episodes."""


class SourceShards(ShardFiles):
    """The shards of dataset `dataset_id` of a source, as the source divides it.

    The remote is asked once for the state that all shards are of. Files that all shards need are fetched into `folder`
    once; the files of a shard are fetched, converted to TED with the `options` of the reader, and removed. Only then is
    it known how many steps a shard has.

    What an option `auto` means for the whole dataset is decided by its first shards. With `skip_bad`
    episodes that cannot be read are left out. `make` makes the source, where it is not the one of that name.

    Videos are kept by default, as in a download, and decoded where rows are read. UsageError without the trust that
    pickles need, and what the source and the reader raise.
    """

    def __init__(
        self, source: str, dataset_id: str, revision: str | None, options: Mapping[str, Any], folder: Path,
        *, skip_bad: bool = False, make: Callable[[], Source] | None = None,
    ) -> None:  # fmt: skip
        self.skip_bad, self._make = skip_bad, make or source_class(source)
        self.name, self.id, self.options = source, safe_id(dataset_id), dict(options)
        self._process, self._guard = os.getpid(), threading.Lock()
        if self.source.pickled:
            require_trust(Path(self.id), self.options.get("trust_pickle"), PICKLED)
        self.remote = self.source.describe(self.id, revision)
        self.address = self.remote.address
        state = sorted(f"{file.path}\0{file.checksum}\0{file.version}\0{file.size}" for file in self.remote.files)
        given = sorted(f"{name}={value}" for name, value in self.options.items()) + ["skip_bad"] * skip_bad
        lacking = self.source.lacking(self.remote)
        if lacking and not skip_bad:
            raise lacking[0]
        self.lacking = tuple(error.message for error in lacking)
        self.identity = digest_text("\n".join([source, self.id, *given, *state]))
        self.folder = folder / f"{source}-{self.identity.rpartition(':')[2][:16]}"
        self._growth = 1.0
        with self._metadata() as there:
            self.shards = [
                replace(shard, files=tuple(self.source.files_read(shard.files, self.options)))
                for shard in self.source.shards(self.remote, there)
            ]

    @property
    def source(self) -> Source:
        """The connections of this process."""
        if self._process != os.getpid():
            self._process, self._guard = os.getpid(), threading.Lock()
            self.__dict__.pop("_connected", None)
        return self._connected

    @cached_property
    def _connected(self) -> Source:
        return self._make()

    def __len__(self) -> int:
        return len(self.shards)

    @cached_property
    def _shared(self) -> frozenset[str]:
        """The paths of the files that every shard needs; of a single one, those that are here already."""
        paths = [{file.path for file in shard.files} for shard in self.shards]
        if len(paths) == 1:
            return frozenset(path for path in paths[0] if (self.folder / _METADATA / path).is_file())
        return frozenset(set.intersection(*paths))

    def size(self, number: int) -> int:
        """Return what a shard takes, by its files and by what the rows of the shards before took."""
        return int(self._growth * self._files_size(number))

    def _files_size(self, number: int) -> int:
        shard = self.shards[number]
        if shard.span is not None:
            return shard.span[1] - shard.span[0]
        return sum(file.known_size for file in shard.files if file.path not in self._shared)

    # Fetching ----------------------------------------------------------------------------------------

    def fetch(self, number: int, folder: Path, more: Callable[[int], None]) -> None:
        """Fetch the files of a shard, and convert them."""
        options = self._options
        files, left_out = folder / _FILES, list[str]()
        if self._bring(number, files):
            with self._guard:  # one conversion at a time: it takes memory, and the interpreter
                left_out = self._convert(self.shards[number], files, folder / _DATASET, options)
        fs.remove(files)
        fs.write_file(folder / _LEFT_OUT, dump_json(left_out).encode())
        taken = sum(path.lstat().st_size for path in folder.rglob("*"))
        self._growth = max(self._growth, taken / max(1, self._files_size(number)))

    def _bring(self, number: int, files: Path) -> bool:
        """Fetch the files of a shard; return whether there are episodes in it."""
        shard = self.shards[number]
        fs.make_folder(files)
        if shard.span is not None:
            return self.source.fetch_part(shard, files)
        self._bring_metadata([file for file in shard.files if file.path in self._shared], files)
        self.source.fetch([file for file in shard.files if file.path not in self._shared], files)
        return True

    def _bring_metadata(self, shared: list[RemoteFile], files: Path) -> None:
        """Fetch the files that all shards need unless they are there, and link to them from `files`."""
        if not shared:
            return
        with self._metadata() as there:
            self.source.fetch(shared, there)
            for file in shared:
                fs.make_folder((files / file.path).parent)
                fs.link_to(there / file.path, files / file.path)

    @contextlib.contextmanager
    def _metadata(self) -> Iterator[Path]:
        """Return the folder of files that all shards need, which one process at a time changes."""
        there = self.folder / _METADATA
        fs.make_folder(there)
        with self._locked(_METADATA):
            yield there

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        lock = fs.open_to_append(self.folder / f"{name}.lock")
        try:
            fs.lock(lock, fcntl.LOCK_EX, self.folder)
            yield
        finally:
            os.close(lock)

    def _reader(self, shard: RemoteShard, files: Path, options: Mapping[str, Any]) -> Reader:
        path = files / shard.files[0].path if shard.span is not None else files
        return reader_class(self.name)(path, options={**self.source.reader_options(self.id), **options})

    @property
    def _options(self) -> Mapping[str, Any]:
        """The options of the reader, with what `auto` means for the dataset.

        It is decided once, by as many of the first shards as need be, and kept in the folder.
        """
        kind = reader_class(self.name)
        if not issubclass(kind, PartsReader):
            return self.options
        if not {name for name in kind.settled_names if self.options.get(name) in (None, "auto")}:
            return self.options
        path, folder = self.folder / _SETTLED, self.folder / f"{_SETTLED}-files"
        with self._locked(_SETTLED):
            if not path.is_file():
                fs.replace_file(path, dump_json(self._settled(kind, folder)).encode())
            return self.options | decode(dict[str, Any], load_json(path), str(path))

    def _settled(self, kind: type[PartsReader], folder: Path) -> dict[str, str]:
        counted = Counter[str]()
        for number in range(min(len(self.shards), _MOST_ASKED)):
            fs.remove(folder)  # of a process that was killed
            try:
                if self._bring(number, folder):
                    with self._reader(self.shards[number], folder, self.options) as reader:
                        assert isinstance(reader, PartsReader)
                        counted.update(reader.evidence())
            except FormatError:
                if not self.skip_bad:
                    raise
            finally:
                fs.remove(folder)
            if counted and kind.settled(counted)[1]:
                break
        return kind.settled(counted)[0]

    def _convert(self, shard: RemoteShard, files: Path, destination: Path, options: Mapping[str, Any]) -> list[str]:
        """Convert a shard, unless it has no steps; return sentences on the episodes that are left out."""
        layout = default_layout(self.name)
        with self._reader(shard, files, options) as reader:
            if not reader.stated().episode_numbers:
                return []
            facts, left_out = self._facts(reader, shard)
            if not facts.steps:
                return left_out
            SourceConversion(
                reader=reader, facts=facts, source=files, destination=destination,
                request=Request(self.name, self.id, self.id, self.remote.revision, shard.episodes, layout, "remote"),
                verb="download", arguments={"from": self.address}, force=False, dry_run=False, progress=Silent(),
                inputs={file.path: file.checksum or "" for file in shard.files}, revision=self.remote.revision,
            ).run()  # fmt: skip
            return left_out

    def _facts(self, reader: Reader, shard: RemoteShard) -> tuple[SourceFacts, list[str]]:
        """Return the facts of the episodes of a shard, and sentences on those that are left out."""
        if not self.skip_bad:
            return facts_of(reader, shard.episodes, Silent()), []
        numbers = reader.stated().episode_numbers
        chosen = numbers if shard.episodes is None else select_episodes(parse_episodes(shard.episodes), numbers)
        sound, left_out = sound_episodes(reader, chosen, Silent())
        if shard.episodes is None and not left_out:
            try:
                return reader.facts(), []
            except FormatError as error:  # of the shard as a whole: its end is missing
                left_out.append(error.message)
        return reader.facts([(number, number + 1) for number in sound]), left_out

    def open(self, number: int, folder: Path) -> OpenShard:
        """Map a shard that is in a folder."""
        left_out = decode(tuple[str, ...], load_json(folder / _LEFT_OUT), str(folder / _LEFT_OUT))
        if not (folder / _DATASET).is_dir():
            return OpenShard.nothing(left_out)
        with open_dataset(folder / _DATASET) as reader:
            first, frames = self._first_episode(number, reader), with_frames(reader, None)
            return OpenShard(storage_of(reader), 0, reader.episodes.length, first, left_out, frames, reader.fields)

    def _first_episode(self, number: int, reader: TedReader | PackedReader) -> int:
        """Return what is added to the numbers of episodes that begin at 0 in each shard."""
        if self.shards[number].episodes is not None or len(self.shards) == 1:
            return 0
        own = reader.episodes.episode.tolist()
        known = [self.source.episode_number(text) for text in reader.episode_text or [{}] * len(own)]
        offsets = {-1 if one is None else one - at for one, at in zip(known, own, strict=True)}
        return offset if len(offsets) == 1 and (offset := offsets.pop()) >= 0 else number << _EPISODE

    def close(self) -> None:
        """Close the connections."""
        self.source.close()

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"_guard", "_connected", "_process"}
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._process, self._guard = os.getpid(), threading.Lock()
