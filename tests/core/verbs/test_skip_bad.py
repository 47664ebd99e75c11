"""`--skip-bad`: the sound episodes of a damaged dataset, and the names of the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rbtool
from rbtool.core.checkpoint import open_steps
from rbtool.core.dataset import TedReader, leaf_path
from rbtool.core.errors import CorruptDataError, UsageError
from rbtool.core.testing.walks import write_walks

WALKS = [(10, "terminated"), (10, "truncated"), (4, "both"), (1, "open")]
Damage = Callable[[Path], object]


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    write_walks(tmp_path / "walks", WALKS)
    return tmp_path / "walks"


def cut(folder: Path) -> None:
    os.truncate(folder / "observation.memmap", 22 * 24 + 7)


def edited(*edits: tuple[str, int, float]) -> Damage:
    def damage(folder: Path) -> None:
        for name, row, value in edits:
            key = tuple(name.split("."))
            with TedReader(folder) as reader:
                array = reader.read(key, 0, reader.manifest.steps)
            array[row] = value
            (folder / leaf_path(key)).write_bytes(array.tobytes())

    return damage


def converted(walks: Path, dest: Path, **options: Any) -> Any:
    return rbtool.convert(walks, dest, **options)


def packed(walks: Path, dest: Path, **options: Any) -> Any:
    return rbtool.convert(walks, dest, layout="packed", **options)


def preprocessed(walks: Path, dest: Path, **options: Any) -> Any:
    return rbtool.preprocess(walks, None, dest, operations={"clip_reward": "-9:9"}, num_workers=0, **options)


DAMAGED = [
    (cut, [0, 1]),
    (edited(("next.observation", 3, 0.5)), [1, 2, 3]),
    (edited(("next.reward", 12, 9.0), ("next.done", 20, True)), [0, 3]),
]


@pytest.mark.parametrize("make", [converted, packed, preprocessed])
@pytest.mark.parametrize(("damage", "sound"), DAMAGED)
def test_sound_episodes_are_taken_and_the_others_named(
    walks: Path, tmp_path: Path, make: Callable[..., Any], damage: Damage, sound: list[int]
) -> None:
    with open_steps(walks) as reader:
        before, table = reader.read(("observation",), 0, 25), reader.episodes
    damage(walks)
    with pytest.raises(CorruptDataError) as caught:
        make(walks, tmp_path / "made")
    assert caught.value.hint.endswith("; --skip-bad takes the sound episodes, if there are any")
    result = make(walks, tmp_path / "made", skip_bad=True)
    bad = ", ".join(str(number) for number in range(4) if number not in sound)
    assert any(f"{4 - len(sound)} of 4 episodes are damaged and left out: {bad}" in note for note in result.notes)
    with open_steps(tmp_path / "made") as reader:
        assert reader.episodes.episode.tolist() == sound
        assert reader.episodes.seed.tolist() == [number + 7 for number in sound]
        assert reader.episode_text == [{"task": f"walk {number} é"} for number in sound]
        rows = np.concatenate([np.arange(table.start[n], table.start[n] + table.length[n]) for n in sound])
        assert np.array_equal(reader.read(("observation",), 0, len(rows)), before[rows])
        assert np.array_equal(reader.episodes.total_reward, table.total_reward[sound])
    assert rbtool.check(tmp_path / "made").errors == 0


@pytest.mark.parametrize(("damage", "sound"), DAMAGED)
def test_an_export_takes_the_sound_ones_too(walks: Path, tmp_path: Path, damage: Damage, sound: list[int]) -> None:
    damage(walks)
    result = rbtool.export(walks, tmp_path / "out.npz", to="npz", skip_bad=True)
    with np.load(tmp_path / "out.npz") as file:
        assert file["episodes.episode"].tolist() == sound
    assert any("are damaged and left out" in note for note in result.notes)
    kept = rbtool.export(walks, tmp_path / "few.npz", to="npz", skip_bad=True, episodes="0:4")
    assert kept.episodes == len(sound)


def test_workers_take_the_same_episodes(walks: Path, tmp_path: Path) -> None:
    cut(walks)
    alone = preprocessed(walks, tmp_path / "alone", skip_bad=True, chunk_size=5)
    options = {"operations": {"clip_reward": "-9:9"}, "chunk_size": 5, "skip_bad": True}
    both = rbtool.preprocess(walks, None, tmp_path / "both", num_workers=2, **options)
    assert (both.content_digest, both.episodes) == (alone.content_digest, 2)


def test_a_sound_dataset_is_taken_as_it_is(walks: Path, tmp_path: Path) -> None:
    assert converted(walks, tmp_path / "made", skip_bad=True).notes == ()
    assert converted(walks, tmp_path / "plain").content_digest == rbtool.inspect(tmp_path / "made").content_digest


def test_nothing_is_made_where_nothing_is_sound(walks: Path, tmp_path: Path) -> None:
    os.truncate(walks / "observation.memmap", 9 * 24)
    with pytest.raises(CorruptDataError, match="has no episode that is sound"):
        converted(walks, tmp_path / "made", skip_bad=True)
    assert not (tmp_path / "made").exists()
    with pytest.raises(UsageError, match="--skip-bad chooses from a damaged dataset in TED"):
        converted(Path("tests/data/minari/cartpole/scripted-v0"), tmp_path / "made", skip_bad=True)


def test_sound_episodes_of_a_packed_dataset_that_was_cut(walks: Path, tmp_path: Path) -> None:
    source, made = tmp_path / "packed", tmp_path / "made"
    packed(walks, source)
    records = source / "records.bin"
    os.truncate(records, records.stat().st_size * 21 // 29)  # of 25 steps and 4 last observations
    result = rbtool.check(source)
    found = [(finding.steps, finding.episodes) for finding in result.findings if finding.rule == "TED012"]
    assert (found, result.errors) == ([(((19, 25),), (1, 2, 3))], 1)
    assert rbtool.inspect(source).problems == (result.findings[0].message,)
    with pytest.raises(CorruptDataError, match="the manifest says"):
        preprocessed(source, made)
    assert any("3 of 4 episodes are damaged and left out: 1, 2, 3" in note for note in
               preprocessed(source, made, skip_bad=True, chunk_size=5).notes)  # fmt: skip
    assert rbtool.check(made).errors == 0


@pytest.mark.parametrize("cut", [True, False])
def test_episodes_of_a_damaged_chunk_are_bad(walks: Path, tmp_path: Path, cut: bool) -> None:
    packed(walks, tmp_path / "packed", compress=["observation=zstd"])
    file = next((tmp_path / "packed" / "fields").glob("observation.zstd"))
    data = file.read_bytes()
    file.write_bytes(data[:-1] if cut else bytes([data[0] ^ 0xFF]) + data[1:])
    findings = rbtool.check(tmp_path / "packed").findings
    assert [finding.episodes for finding in findings if finding.episodes] == [(0, 1, 2, 3)]
    with pytest.raises(CorruptDataError, match=r"has no episode that is sound: .*observation") as caught:
        converted(tmp_path / "packed", tmp_path / "made", skip_bad=True)
    assert caught.value.hint.startswith("see what is damaged: rbtool check ")


def test_a_conversion_of_the_sound_ones_is_none_of_all(walks: Path, tmp_path: Path) -> None:
    whole = (walks / "observation.memmap").read_bytes()
    cut(walks)
    converted(walks, tmp_path / "made", skip_bad=True)
    assert converted(walks, tmp_path / "made", skip_bad=True).already_there
    (walks / "observation.memmap").write_bytes(whole)
    with pytest.raises(UsageError, match="has 20 of its steps, not 25"):
        converted(walks, tmp_path / "made")
