"""A damaged npz file of any format is refused, whichever rows are read: each array has its checksum compared."""

from __future__ import annotations

import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vd4rl_files import random_episodes, write_files

from rbtool.core.errors import CorruptDataError
from rbtool.core.format.locate import open_source
from rbtool.core.verbs.check import check
from rbtool.core.verbs.convert import convert

Array = np.ndarray[Any, Any]
Save = Callable[..., None]
ROWS = 40


def _ogbench(path: Path, save: Save) -> Path:
    draw = np.random.default_rng(0)
    marks = np.isin(np.arange(ROWS), (11, 25, ROWS - 1)).astype("f4")
    save(path, observations=draw.normal(size=(ROWS, 3)), actions=draw.normal(size=(ROWS, 2)), terminals=marks,
         qpos=draw.normal(size=(ROWS, 2)))  # fmt: skip
    return path


def _vd4rl(path: Path, save: Save) -> Path:
    return write_files(path.with_suffix(""), random_episodes([9, 4]), packed=save is np.savez_compressed)


def _imitation(path: Path, save: Save) -> Path:
    draw = np.random.default_rng(0)
    save(path, obs=draw.normal(size=(ROWS + 3, 3)), acts=draw.normal(size=(ROWS, 2)), rews=draw.normal(size=ROWS),
         indices=np.array([9, 21]), terminal=np.array([True, False, True]))  # fmt: skip
    return path


def _sb3(path: Path, save: Save, *, position: int = 13, full: bool = False) -> Path:
    draw = np.random.default_rng(0)
    shape = (20, 2)
    save(path, observations=draw.normal(size=(*shape, 3)), next_observations=draw.normal(size=(*shape, 3)),
         actions=draw.normal(size=(*shape, 1)), rewards=draw.normal(size=shape),
         dones=(draw.random(shape) < 0.2).astype("f4"), timeouts=np.zeros(shape, "f4"),
         pos=np.array(position), full=np.array(full))  # fmt: skip
    return path


def _full_ring(path: Path, save: Save) -> Path:
    return _sb3(path, save, position=7, full=True)


def _table(path: Path, save: Save) -> Path:
    draw = np.random.default_rng(0)
    save(path, o=draw.normal(size=(ROWS, 3)), a=draw.normal(size=(ROWS, 2)), r=draw.normal(size=ROWS),
         d=np.arange(ROWS) % 10 == 9)  # fmt: skip
    return path


TABLE = {"map": ["observation=o", "action=a", "next.reward=r"], "ends": "d"}
FORMATS = {"ogbench": _ogbench, "vd4rl": _vd4rl, "imitation": _imitation, "sb3": _sb3, "sb3 ring": _full_ring,
           "table": _table}  # fmt: skip


def _choice(kind: str) -> dict[str, Any]:
    return {"format": "table", "options": TABLE} if kind == "table" else {}


def _rows(path: Path, kind: str) -> list[Array]:
    """Read all steps as a conversion does."""
    with open_source(path, **_choice(kind)) as reader:
        numbers = reader.facts().episode_numbers
        return [array for part in reader.blocks(numbers) for _, array in sorted(part.columns.items())]


def _spans(file: Path) -> list[tuple[str, int, int]]:
    """The places of the bytes of each member."""
    data = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        found = []
        for member in archive.infolist():
            at = member.header_offset
            start = at + 30 + int.from_bytes(data[at + 26 : at + 28], "little")
            start += int.from_bytes(data[at + 28 : at + 30], "little")
            found.append((member.filename, start, start + member.compress_size))
    return found


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_bit_that_flipped_is_found_wherever_it_is(tmp_path: Path, kind: str, save: Save) -> None:
    path = FORMATS[kind](tmp_path / "a.npz", save)
    expected = _rows(path, kind)
    file = sorted(path.iterdir())[0] if path.is_dir() else path
    sound = file.read_bytes()
    draw, named = random.Random(0), list[tuple[str, str]]()
    for name, start, stop in _spans(file):
        places = {start, stop - 1, min(start + 129, stop - 1), *(draw.randrange(start, stop) for _ in range(5))}
        for place in sorted(places):
            file.write_bytes(sound[:place] + bytes([sound[place] ^ 1 << draw.randrange(8)]) + sound[place + 1 :])
            try:
                found = _rows(path, kind)
            except CorruptDataError as error:
                named.append((name.removesuffix(".npy"), str(error)))
                continue
            assert all(map(np.array_equal, found, expected)), f"{name}: byte {place - start} of {stop - start}"
            assert len(found) == len(expected)
    assert named
    assert [one for one, said in named if one not in said] == []
    file.write_bytes(sound)
    assert all(map(np.array_equal, _rows(path, kind), expected))


SKIPPED = {"ogbench": ("actions", 2), "vd4rl": ("reward", 1), "imitation": ("acts", 2), "sb3": ("rewards", 2),
           "sb3 ring": ("rewards", 2), "table": ("a", 2)}  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_nothing_is_published_of_a_damaged_file(tmp_path: Path, kind: str, save: Save) -> None:
    path = FORMATS[kind](tmp_path / "a.npz", save)
    file = sorted(path.iterdir())[0] if path.is_dir() else path
    named = SKIPPED[kind][0]
    start, stop = next(span[1:] for span in _spans(file) if span[0] == f"{named}.npy")
    data = bytearray(file.read_bytes())
    data[start + 150 if save is np.savez else (start + stop) // 2] ^= 0x40
    file.write_bytes(data)
    given: dict[str, Any] = {"format": "table", **TABLE} if kind == "table" else {}
    with pytest.raises(CorruptDataError, match=named):
        convert(path, tmp_path / "made", **given)
    assert not (tmp_path / "made").exists()
    with pytest.raises(CorruptDataError, match=named):
        convert(path, tmp_path / "made", episodes="0", **given)
    try:
        errors = check(path, **given).errors
    except CorruptDataError:  # of a file that cannot be opened
        errors = 1
    assert errors
    if kind == "vd4rl":  # a file is an episode
        made = convert(path, tmp_path / "made", skip_bad=True, **given)
        assert made.episodes == 1
        assert any("episode 0 is left out" in note for note in made.notes)
        return
    with pytest.raises(CorruptDataError):
        convert(path, tmp_path / "made", skip_bad=True, **given)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("kind", ["ogbench", "sb3", "imitation"])
@pytest.mark.parametrize("place", [0, 8, 20, 40])
def test_the_array_whose_header_is_damaged_is_named(tmp_path: Path, kind: str, place: int) -> None:
    path = FORMATS[kind](tmp_path / "a.npz", np.savez)
    sound = path.read_bytes()
    for name, start, _ in _spans(path):
        path.write_bytes(sound[: start + place] + bytes([sound[start + place] ^ 0x10]) + sound[start + place + 1 :])
        with pytest.raises(CorruptDataError, match=name.removesuffix(".npy")):
            _rows(path, kind)
