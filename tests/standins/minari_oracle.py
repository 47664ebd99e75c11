"""Minari datasets to test with, written by Minari itself, and what Minari says is in them: the oracle."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import gymnasium
import numpy as np
from gymnasium import spaces
from hypothesis import strategies as st

from rbtool.core.format.contracts import Array
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.schema import ACTION, NEXT, NEXT_DONE, NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED, Key

__all__ = [
    "NAMES", "SPACES", "MinariColumns", "assert_equals_minari", "flat_columns", "make_episode", "minari_cache",
    "minari_episodes", "sample_rows", "write_minari",
]  # fmt: skip

MinariColumns: TypeAlias = dict[Key, Array | list[str]]
Space: TypeAlias = "gymnasium.Space[Any]"

NAMES = st.text("abcxyz_ .-é", min_size=1, max_size=6).filter(lambda name: name.strip(". "))
DTYPES = st.sampled_from(["uint8", "int16", "int32", "uint64", "float16", "float32", "float64"])
SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)

LEAVES: st.SearchStrategy[spaces.Space[Any]] = st.one_of(
    st.builds(lambda shape, dtype: spaces.Box(0, 9, shape, np.dtype(dtype).type), SHAPES, DTYPES),
    st.builds(spaces.Discrete, st.integers(1, 9), start=st.integers(-5, 5)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 5), min_size=1, max_size=4)),
    st.builds(spaces.MultiBinary, st.integers(1, 9)),
    st.builds(lambda size: spaces.Text(size, min_length=0, charset="aé→𝄞 "), st.integers(1, 9)),
)
SPACES: st.SearchStrategy[spaces.Space[Any]] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(spaces.Dict, st.dictionaries(NAMES, inner, min_size=1, max_size=3)),
        st.builds(spaces.Tuple, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)
"""Any space that Minari can store."""

_ABOUT = {
    "algorithm_name": "random", "author": "nobody", "author_email": "nobody@example.invalid",
    "code_permalink": "none", "description": "made for a test",
}  # fmt: skip


@contextmanager
def minari_cache(root: Path) -> Iterator[None]:
    """Make `root` the local Minari cache, and keep still the warnings that Minari raises on any small dataset."""
    with mock.patch.dict(os.environ, {"MINARI_DATASETS_PATH": str(root)}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`eval_env` is set to None")
        warnings.filterwarnings("ignore", r"env_spec is None")
        yield


def write_minari(
    root: Path,
    dataset_id: str,
    observation_space: Space,
    action_space: Space,
    episodes: Sequence[Any],
    *,
    data_format: str = "hdf5",
    jpeg_encoding: bool = True,
) -> Path:
    """Let Minari write `EpisodeBuffer`s into its cache at `root`; return the dataset's folder."""
    import minari  # slow to load, and only tests of the converter need it

    with minari_cache(root):
        minari.create_dataset_from_buffers(
            dataset_id, list(episodes), observation_space=observation_space, action_space=action_space,
            data_format=data_format, jpeg_encoding=jpeg_encoding, **_ABOUT,
        )  # fmt: skip
    return root / dataset_id


def make_episode(
    observation_space: Space, action_space: Space, steps: int, draw: np.random.Generator, **more: Any
) -> Any:
    """Return an `EpisodeBuffer` of random rows that ends by truncation; `more` replaces or adds its entries."""
    from minari.data_collector import EpisodeBuffer

    entries: dict[str, Any] = {
        "observations": sample_rows(observation_space, steps + 1, draw),
        "actions": sample_rows(action_space, steps, draw),
        "rewards": draw.normal(size=steps).tolist(),
        "terminations": [False] * steps,
        "truncations": [False] * (steps - 1) + [True],
    }
    return EpisodeBuffer(**(entries | more))


def sample_rows(space: Space, rows: int, draw: np.random.Generator) -> Any:
    """Draw rows of a space in the nesting that Minari's buffers have."""
    if isinstance(space, spaces.Dict):
        return {name: sample_rows(child, rows, draw) for name, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(sample_rows(child, rows, draw) for child in space.spaces)
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        return _floats(space, rows, draw)
    space.seed(int(draw.integers(1 << 31)))
    return [space.sample() for _ in range(rows)]


def _floats(space: spaces.Box, rows: int, draw: np.random.Generator) -> Array:
    """Numbers all over the range of the type, with NaN and infinities among them."""
    values = (draw.normal(size=(rows, *space.shape)) * 10.0 ** draw.integers(-4, 4)).astype(space.dtype)
    odd = draw.random(values.shape) < 0.05
    values[odd] = draw.choice(np.array([np.nan, np.inf, -np.inf, -0.0]), int(odd.sum()))
    return values


def minari_episodes(folder: Path) -> list[Any]:
    """Read a dataset with Minari itself."""
    from minari import MinariDataset

    return list(MinariDataset(folder / "data").iterate_episodes())


def flat_columns(value: Any, key: Key = ()) -> MinariColumns:
    """Flatten what Minari gives for observations, actions or infos into columns; strings become lists."""
    if (
        isinstance(value, np.ndarray)
        and value.dtype.kind in "OUS"
        and len(value)
        and not isinstance(value[0], np.ndarray)
    ):
        value = value.tolist()
    if isinstance(value, list) and isinstance(value[0], dict):
        value = {name: [row[name] for row in value] for name in value[0]}
    if isinstance(value, Mapping):
        parts = [flat_columns(child, (*key, name.removeprefix("_index_"))) for name, child in value.items()]
        return {name: column for part in parts for name, column in part.items()}
    if isinstance(value, tuple):
        return flat_columns({str(number): child for number, child in enumerate(value)}, key)
    if isinstance(value, list) and isinstance(value[0], str | bytes):
        return {key: [row if isinstance(row, str) else row.decode() for row in value]}
    return {key: np.asarray(value)} if np.ndim(value) else {}


def _same(found: Array, expected: Array, what: object) -> None:
    assert found.dtype == expected.dtype, what
    assert found.shape == expected.shape, what
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes(), what


def _read_text(reader: TedReader, key: Key, start: int, stop: int) -> list[str]:
    rows = reader.read(key, start, stop)
    lengths = reader.read((*key[:-1], key[-1] + "_length"), start, stop)
    assert not any(row[length:].any() for row, length in zip(rows, lengths, strict=True))
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


def _compare(reader: TedReader, key: Key, start: int, expected: Array | list[str]) -> None:
    stop = start + len(expected)
    if isinstance(expected, list):
        assert _read_text(reader, key, start, stop) == expected, key
    else:
        _same(reader.read(key, start, stop), expected, key)


def _shifted(column: Array | list[str]) -> Array | list[str]:
    """The rows before and after every step of a column that has none at reset."""
    if isinstance(column, list):
        return ["", *column]
    return np.concatenate((np.zeros_like(column[:1]), column))


def assert_equals_minari(dataset: Path, folder: Path, episodes: Sequence[int] | None = None) -> int:
    """Compare every array of a converted dataset with what Minari reads; return how many were compared.

    The one difference allowed: a last step with neither flag is truncated here.
    """
    compared = 0
    with TedReader(dataset) as reader:
        known = {field.key for field in reader.fields}
        originals = {int(episode.id): episode for episode in minari_episodes(folder)}
        numbers = sorted(originals) if episodes is None else list(episodes)
        assert reader.episodes.episode.tolist() == numbers
        for row, number in enumerate(numbers):
            start, original = int(reader.episodes.start[row]), originals[number]
            text = (reader.episode_text or [{}] * len(numbers))[row]
            steps = len(original.rewards)
            assert reader.episodes.length[row] == steps
            _compare_results(reader, start, original)
            for key, actions in flat_columns(original.actions, ACTION).items():
                _compare(reader, key, start, actions)
            states = flat_columns(original.observations, ("observation",)) | flat_columns(
                original.infos or {}, ("info",)
            )
            for key, column in states.items():
                if key not in known and isinstance(column, list):
                    assert {text[".".join(key)]} == set(column)
                    continue
                column = _shifted(column) if len(column) == steps else column
                _compare(reader, key, start, column[:-1])
                _compare(reader, (NEXT, *key), start, column[1:])
                compared += 1
    return compared


def _compare_results(reader: TedReader, start: int, original: Any) -> None:
    terminated, truncated = original.terminations.copy(), original.truncations.copy()
    truncated[-1] |= not terminated[-1]
    rewards = np.asarray(original.rewards)
    expected = {NEXT_REWARD: rewards, NEXT_TERMINATED: terminated, NEXT_TRUNCATED: truncated}
    for key, column in (expected | {NEXT_DONE: terminated | truncated}).items():
        _same(reader.read(key, start, start + len(rewards)), column[:, None], key)
    assert set(reader.read(("episode",), start, start + len(rewards))) == {int(original.id)}
