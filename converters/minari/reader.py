"""Reads Minari datasets: HDF5, Arrow and Parquet storage, every space and every kind of info that Minari writes.

Imports h5py, pyarrow or Pillow only for datasets stored that way; never minari, gymnasium or torch.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...core.errors import CorruptDataError, FormatError
from ...core.format.contracts import Array, Piece, SourceFacts
from ...core.format.converter import Reader
from ...core.format.manifest import Dropped
from ...core.ted.schema import (
    REWARD,
    Field,
    Key,
    Role,
    Timing,
    encode_text,
    key_name,
    length_key,
    row_bytes,
    ted_fields,
    text_fields,
)
from ..files.columns import ColumnForm, ColumnPath, column_name
from .metadata import METADATA_FILE, MinariMetadata, env_metadata, looks_like_minari, strict_space
from .store import EpisodeStore, StoredEpisode
from .survey import (
    FLAGS,
    REWARDS,
    EpisodeTexts,
    Extra,
    ExtraRows,
    Survey,
    extra_keys,
    free_keys,
    renamed,
    seed_of,
    survey,
)


@dataclass(frozen=True, slots=True)
class SourceColumn:
    """A column that is kept: its path in the file, its key, and how its rows are read."""

    path: ColumnPath
    key: Key
    kind: Literal["array", "image", "text"]
    dtype: str
    shape: tuple[int, ...]
    role: Role
    timing: Timing
    form: ColumnForm | None
    extra: Extra | None = None

    def fields(self) -> list[Field]:
        """The TED source fields: one, or two for text."""
        if self.kind == "text":
            return text_fields(self.key, self.shape[0])
        return [Field(self.key, self.dtype, self.shape, self.role)]

    def rows(self, index: int) -> ExtraRows:
        """The rows that the `index`-th episode has."""
        return ExtraRows.ALL if self.extra is None else ExtraRows(self.extra.rows[index])

    def of_episode(self, index: int) -> SourceColumn:
        """The column as the `index`-th episode stores it."""
        if self.extra is None or len(self.extra.dtypes) == 1:
            return self
        return replace(self, form=self.extra.stored(index))

    def read(self, episode: StoredEpisode, what: str, start: int, stop: int, rows: ExtraRows) -> dict[Key, Array]:
        """Read the rows of steps `[start, stop)` of an episode; `rows` states which rows the episode has."""
        after = self.timing == "state"
        if rows is ExtraRows.ALL:
            return self._stored(episode, what, start, stop + after)
        count = stop - start + after
        columns = {field.key: np.zeros((count, *field.shape), field.numpy) for field in self.fields()}
        if rows is ExtraRows.AFTER_STEPS:  # the row of step t is what came after it: row t + 1 of a state
            stored = self._stored(episode, what, max(start - 1, 0), stop)
            for key, values in stored.items():
                columns[key][count - len(values) :] = values
        return columns

    def _stored(self, episode: StoredEpisode, what: str, first: int, stop: int) -> dict[Key, Array]:
        if self.kind == "text":
            characters, lengths = encode_text(episode.strings(self.path, first, stop), self.shape[0])
            return {self.key: characters, length_key(self.key): lengths}
        form = episode.form(self.path) if self.kind == "image" else self.form
        if form is not None and self.kind == "image" and form.is_jpeg:
            frames = episode.strings(self.path, first, stop)
            return {self.key: decode_images(frames, self.shape, f"{column_name(self.path)!r} of {what}", first)}
        values = episode.array(self.path, first, stop, form)
        return {self.key: _exact(values.reshape(len(values), *self.shape), self.dtype, what, self.path)}


def _exact(values: Array, dtype: str, what: str, path: ColumnPath) -> Array:
    """Widen values to the type that the column has in other episodes."""
    if values.dtype == dtype:
        return values
    widened: Array = values.astype(dtype)
    back = widened.real if widened.dtype.kind == "c" and values.dtype.kind != "c" else widened
    if not np.array_equal(back.astype(values.dtype), values, equal_nan=values.dtype.kind in "fc"):
        raise FormatError(
            f"{column_name(path)!r} of {what} is {values.dtype} and does not fit into {dtype}, which others need"
        )
    return widened


class SourceColumns:
    """The columns of a surveyed dataset with their keys, and the reasons why others are dropped."""

    def __init__(self, found: Survey) -> None:
        self._survey = found
        self._index = {number: index for index, number in enumerate(found.numbers)}
        extras, self._texts = found.extras.kept(), list[Extra]()
        self._plain = {want.path: want.key for want in found.required.columns} | extra_keys(found.extras.found)
        texts = [want.path for want in found.required.columns if want.kind == "text"]
        texts += [extra.path for extra in extras if extra.varies]
        self._keys = free_keys(self._plain, texts)
        self._rewards = self._reward()
        self.kept = [*self._required(), self._rewards]
        for extra in extras:
            if extra.form.kind == "text" and not extra.varies:
                self._texts.append(extra)
            else:
                self.kept.append(self._extra(extra))
        constant = {extra.path: self._plain[extra.path] for extra in self._texts}
        self._episode_texts = EpisodeTexts(constant, found.attributes)

    def _required(self) -> Iterator[SourceColumn]:
        for want in self._survey.required.columns:
            shape = (want.longest,) if want.kind == "text" else want.shape
            yield SourceColumn(
                want.path, self._keys[want.path], want.kind, want.dtype, shape, want.role,
                "state" if want.more else "step", want.form,
            )  # fmt: skip

    def _reward(self) -> SourceColumn:
        required = self._survey.required
        form = required.forms.get(REWARDS)
        return SourceColumn(REWARDS, REWARD, "array", required.reward_dtype, (), "reward", "result", form)

    def _extra(self, extra: Extra) -> SourceColumn:
        role: Role = "info" if extra.path[0] == "infos" else "state"
        kind: Literal["array", "text"] = "text" if extra.form.kind == "text" else "array"
        shape = (extra.longest,) if kind == "text" else extra.form.shape
        key = self._keys[extra.path]
        return SourceColumn(extra.path, key, kind, extra.form.dtype, shape, role, "state", extra.form, extra)

    def fields(self) -> tuple[tuple[Field, Timing], ...]:
        """Source fields with when each is known."""
        return tuple((field, column.timing) for column in self.kept for field in column.fields())

    def renamed_keys(self) -> dict[str, str]:
        """Dotted names before and after."""
        kept = {column.path: column.key for column in self.kept if column.path in self._plain}
        return renamed({path: self._plain[path] for path in kept}, kept) | self._episode_texts.renamed()

    def dropped_keys(self) -> tuple[Dropped, ...]:
        """Columns that cannot be kept, and why."""
        return tuple(self._survey.extras.dropped({path: key_name(key) for path, key in self._plain.items()}))

    def notes(self, numbers: Sequence[int]) -> list[str]:
        """Notes for the user on these episodes: rewards of two types, missing values, rows filled in."""
        notes, total = list[str](), len(numbers)
        dtypes = self._survey.required.reward_dtypes
        if len(dtypes) > 1:
            found = ", ".join(f"{dtype} in {count}" for dtype, count in sorted(dtypes.items()))
            notes.append(f"rewards are {found} episodes; {self._survey.required.reward_dtype} holds them all")
        notes += [
            f"{key_name(self._keys[want.path])} is {want.dtype} in the data and {want.space_dtype} in the {want.role} "
            f"space; {want.dtype} is kept"
            for want in self._survey.required.columns
            if want.contradicts
        ]
        for column in self.kept:
            name, extra = key_name(column.key), column.extra
            if extra is not None and (widened := extra.widened()):
                notes.append(f"{name} is {widened}")
            missing = self._survey.required.holes.get(column.path, set()) if extra is None else extra.holes
            if holes := missing.intersection(numbers):
                notes.append(f"{name} has no value in some rows of {len(holes)} of {total} episodes: NaN there")
            if extra is None:
                continue
            rows = [extra.rows[self._index[number]] for number in numbers]
            blank = "empty" if column.kind == "text" else "zero"
            if late := rows.count(ExtraRows.AFTER_STEPS):
                notes.append(f"{name} has no value at reset in {late} of {total} episodes: {blank} rows there")
            if absent := rows.count(ExtraRows.NONE):
                notes.append(f"{name} is missing in {absent} of {total} episodes: {blank} rows there")
        return notes

    def read(self, episode: StoredEpisode, number: int, start: int, stop: int) -> dict[Key, Array]:
        """Read every column for steps `[start, stop)` of one episode."""
        index, what = self._index[number], f"episode {number}"
        columns: dict[Key, Array] = {}
        for column in self.kept:
            columns |= column.of_episode(index).read(episode, what, start, stop, column.rows(index))
        return columns

    def read_rewards(self, episode: StoredEpisode, number: int, start: int, stop: int) -> Array:
        """Read the rewards of steps `[start, stop)` alone."""
        return self._rewards.read(episode, f"episode {number}", start, stop, ExtraRows.ALL)[REWARD]

    def read_flags(self, episode: StoredEpisode, number: int, start: int, stop: int) -> tuple[Array, Array]:
        """Read `terminated` and `truncated` as bool `[stop - start]`, however they are stored."""
        terminated, truncated = (self._flag(episode, path, number, start, stop) for path in FLAGS)
        return terminated, truncated

    def _flag(self, episode: StoredEpisode, path: ColumnPath, number: int, start: int, stop: int) -> Array:
        values = episode.array(path, start, stop, self._survey.required.forms.get(path)).reshape(-1)
        if values.dtype == bool:
            return values
        odd = np.flatnonzero((values != 0) & (values != 1))
        if odd.size:
            raise FormatError(
                f"episode {number} has {values[odd[0]].item()} for {column_name(path)!r} of step {start + odd[0]}, "
                "expected 0 or 1"
            )
        return values.astype(bool)

    def read_texts(self, episode: StoredEpisode, number: int, attributes: Mapping[ColumnPath, Any]) -> dict[str, str]:
        """Read the strings that belong to the whole of one episode; `attributes` are the attributes of that episode."""
        name, index = self._episode_texts.of_column, self._index[number]
        present = (extra.path for extra in self._texts if extra.rows[index] != ExtraRows.NONE)
        texts = {name(path): episode.strings(path, 0, 1)[0].decode() for path in present}
        return texts | self._episode_texts.of_attributes(attributes)


_WORTH_THREADS = 8  # frames; starting threads for fewer takes longer than decoding them


def decode_images(frames: Sequence[bytes], shape: tuple[int, ...], what: str, first: int) -> Array:
    """Decode frames into uint8 `[n, *shape]`; `first` is the row of the first, for messages.

    Raises CorruptDataError for a frame that cannot be decoded, FormatError for one of another shape.
    """
    images = np.empty((len(frames), *shape), np.uint8)

    def decode(number: int) -> None:
        images[number] = _decode(frames[number], shape, f"{what}, row {first + number}")

    if len(frames) < _WORTH_THREADS:
        for number in range(len(frames)):
            decode(number)
    else:
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            list(pool.map(decode, range(len(frames))))
    return images


def _decode(frame: bytes, shape: tuple[int, ...], what: str) -> Array:
    from PIL import Image  # needed only where there are images

    try:
        with Image.open(io.BytesIO(frame), formats=("JPEG",)) as image:
            bands = len(image.getbands())
            found = (image.height, image.width, *([bands] if bands > 1 else []))
            if found == shape:  # before any memory is taken for it
                return np.asarray(image, np.uint8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = str(error).partition("<")[0].strip() or type(error).__name__
        raise CorruptDataError(f"{what}: the image is damaged or was cut: {reason}") from error
    raise FormatError(f"{what}: the image has shape {list(found)}, its space says {list(shape)}")


PIECE_BYTES = 16 << 20
"""TED bytes of the rows in memory at a time."""
_TABLE_ROWS = 1 << 20


class MinariReader(Reader):
    """The Minari dataset in a folder anywhere on disk; also takes the `data` folder in it.

    Raises FormatError for contradictions and CorruptDataError for damaged files. Episodes are in the order of their
    numbers.
    """

    piece_bytes = PIECE_BYTES

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the folder has Minari's files, sound or not."""
        return looks_like_minari(path)

    def on_open(self) -> None:
        """Read the metadata, and open the store of episodes."""
        self.metadata = MinariMetadata.load(self.path)
        self._store = _open_store(self.metadata)
        self._found: Survey | None = None

    @property
    def folder(self) -> Path:
        """The folder that holds `metadata.json`."""
        return self.metadata.folder

    @property
    def _survey(self) -> Survey:
        return self._surveyed(None)

    def _surveyed(self, progress: Callable[[int], None] | None) -> Survey:
        if self._found is None:
            self._found = survey(self._store, self.metadata, progress)
        return self._found

    @cached_property
    def _columns(self) -> SourceColumns:
        return SourceColumns(self._survey)

    @cached_property
    def _steps(self) -> dict[int, int]:
        return dict(zip(self._survey.numbers, self._survey.steps, strict=True))

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Look at every episode; all parts of the source have the fields of the whole."""
        found = self._surveyed(progress)
        return SourceFacts(
            source="minari",
            id=self.metadata.id,
            fields=self._columns.fields(),
            episode_numbers=list(found.numbers),
            steps=sum(found.steps),
            spaces={name: strict_space(space) for name, space in self.metadata.spaces().items()},
            renamed_keys=self._columns.renamed_keys(),
            dropped_keys=self._columns.dropped_keys(),
            notes=tuple(f"{name!r} is no episode and was left out" for name in self._store.other_names()),
            documents=self.metadata.documents(),
            env_metadata=env_metadata(self.metadata),
            lengths=list(found.steps),
        )

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Refuse damaged episodes; all of them together must have the totals of the metadata."""
        self._survey.require_sound(numbers)
        if everything:
            self._survey.require_totals(self.metadata)

    def notes_on(self, numbers: Sequence[int]) -> Sequence[str]:
        """Widened types, missing values and contradictions to the spaces in these episodes."""
        return self._columns.notes(numbers)

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        size = max(1, self.piece_bytes // max(1, row_bytes(ted_fields(self._columns.fields()))))
        episode, steps = self._store.episode(number), self._steps[number]
        attributes = episode.attributes()
        text = self._columns.read_texts(episode, number, attributes)
        for start in range(0, steps, size):
            stop = min(start + size, steps)
            terminated, truncated = self._columns.read_flags(episode, number, start, stop)
            columns = self._columns.read(episode, number, start, stop)
            yield Piece(
                number, columns, terminated, truncated, first=not start, last=stop == steps,
                seed=seed_of(attributes), text=text,
            )  # fmt: skip

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards, and the flags of the last step, of one episode."""
        episode, steps = self._store.episode(number), self._steps[number]
        seed = seed_of(episode.attributes())
        for start in range(0, steps, _TABLE_ROWS):
            stop = min(start + _TABLE_ROWS, steps)
            rewards = self._columns.read_rewards(episode, number, start, stop)
            terminated, truncated = np.zeros((2, stop - start), bool)
            if stop == steps:
                ends = self._columns.read_flags(episode, number, steps - 1, steps)
                terminated[-1:], truncated[-1:] = ends
            yield Piece(
                number, {REWARD: rewards}, terminated, truncated, first=not start, last=stop == steps, seed=seed
            )

    def files(self) -> list[Path]:
        """The metadata and the files of the store."""
        return [self.metadata.folder / METADATA_FILE, *self._store.files()]

    def on_close(self) -> None:
        """Close the files."""
        self._store.close()


def _open_store(metadata: MinariMetadata) -> EpisodeStore:
    if metadata.data_format == "hdf5":
        from .hdf5 import Hdf5Store  # h5py and pyarrow take longer to load than most datasets to inspect

        return Hdf5Store(metadata.folder)
    from .arrow import ArrowStore

    return ArrowStore(metadata.folder, metadata.data_format)
