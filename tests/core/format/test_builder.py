from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool import CorruptDataError, FormatError
from rbtool.core.format.digest import digest_file
from rbtool.core.format.memmap.builder import DatasetBuilder
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.returns import Ingest
from rbtool.core.ted.schema import NEXT_REWARD, ted_fields
from rbtool.core.testing.datasets import WALK_FIELDS, relist, walk_pieces, write_walks

ENDINGS = st.sampled_from(["terminated", "truncated", "both", "open"])
EPISODES = st.lists(st.tuples(st.integers(1, 7), ENDINGS), min_size=1, max_size=6)


@settings(deadline=None, max_examples=30)
@given(EPISODES, st.integers(1, 9))
def test_content_never_depends_on_how_episodes_are_cut(tmp_path_factory, episodes, piece) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("cut")
    whole = write_walks(folder / "whole", episodes)
    assert write_walks(folder / "cut", episodes, piece_steps=piece).content_digest == whole.content_digest


@settings(deadline=None, max_examples=30)
@given(EPISODES)
def test_rows_are_the_source_s_and_only_open_ends_get_a_flag(tmp_path_factory, episodes) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("rows") / "data"
    write_walks(folder, episodes)
    with TedReader(folder) as reader:
        table = reader.episodes
        for row, piece in enumerate(walk_pieces(episodes)):
            start, stop = int(table.start[row]), int(table.start[row] + table.length[row])
            states = piece.columns[("observation",)]
            np.testing.assert_array_equal(reader.read(("observation",), start, stop), states[:-1])
            np.testing.assert_array_equal(reader.read(("next", "observation"), start, stop), states[1:])
            flags = reader.read(("next", "truncated"), start, stop)[:, 0]
            expected = piece.truncated.copy()
            expected[-1] |= episodes[row][1] == "open"
            np.testing.assert_array_equal(flags, expected)
            done = reader.read(("next", "done"), start, stop)[:, 0]
            np.testing.assert_array_equal(done, piece.terminated | expected)


def test_the_episode_table_tells_each_episode(tmp_path: Path) -> None:
    manifest = write_walks(tmp_path / "data", [(5, "terminated"), (1, "truncated"), (3, "open"), (2, "both")])
    with TedReader(tmp_path / "data") as reader:
        table = reader.episodes
        assert table.start.tolist() == [0, 5, 6, 9]
        assert table.end_reason.tolist() == [0, 1, 3, 2]
        assert table.truncated.tolist() == [False, True, True, True]
        assert table.seed.tolist() == [7, 8, 9, 10]
        rewards = reader.read(NEXT_REWARD, 0, manifest.steps)
        assert table.total_reward[2] == pytest.approx(rewards[6:9].sum())
        assert reader.episode_text == [{"task": f"walk {n} é"} for n in range(4)]
        assert table.index_of_step(np.array([0, 4, 5, 6, 10])).tolist() == [0, 0, 1, 2, 3]


def test_ranges_leave_nan_out(tmp_path: Path) -> None:
    with DatasetBuilder(tmp_path / "data", ted_fields(WALK_FIELDS)) as builder:
        ingest = Ingest(builder, WALK_FIELDS)
        for piece in walk_pieces([(4, "open")]):
            piece.columns[("observation",)][1] = np.nan
            piece.columns[("observation",)][2, 0] = np.inf
            ingest.add(piece)
        manifest = builder.finish(ingest.table, _origin())
    assert manifest.ranges[("observation",)] is not None
    assert manifest.ranges[("observation",)][1] == np.inf
    assert np.isfinite(manifest.ranges[("observation",)][0])
    assert manifest.ranges[("next", "done")] is None


def _origin():  # type: ignore[no-untyped-def]
    from rbtool.core.format.manifest import Request
    from rbtool.core.format.memmap.builder import Origin

    return Origin(Request("walks", "walks", "walks"))


def test_a_column_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    with DatasetBuilder(tmp_path / "data", ted_fields(WALK_FIELDS)) as builder:
        ingest = Ingest(builder, WALK_FIELDS)
        [piece] = walk_pieces([(4, "open")])
        columns = dict(piece.columns) | {("observation",): piece.columns[("observation",)][:-1]}
        object.__setattr__(piece, "columns", columns)
        with pytest.raises(FormatError, match="'observation' has 4 rows for 4 steps, expected 5"):
            ingest.add(piece)


def test_digests_are_those_of_the_files(tmp_path: Path) -> None:
    manifest = write_walks(tmp_path / "data", [(300, "open")] * 40)
    for file in manifest.files:
        assert digest_file(tmp_path / "data" / file.path) == file.digest
    listed = {file.path for file in manifest.files} | {".rbtool/manifest.json"}
    there = {str(p.relative_to(tmp_path / "data")) for p in (tmp_path / "data").rglob("*") if p.is_file()}
    assert listed == there


@pytest.mark.parametrize("name", ["observation.memmap", "next/meta.json", ".rbtool/episodes/return.memmap"])
def test_one_changed_byte_anywhere_is_found(tmp_path: Path, name: str) -> None:
    write_walks(tmp_path / "data", [(4, "open")])
    path = tmp_path / "data" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptDataError, match="digest does not match"):
        TedReader(tmp_path / "data").verify_files()


def test_an_episode_table_that_contradicts_the_manifest_is_refused(tmp_path: Path) -> None:
    write_walks(tmp_path / "one", [(4, "open")])
    write_walks(tmp_path / "two", [(4, "open"), (2, "open")])
    for path in (tmp_path / "one" / ".rbtool" / "episodes").iterdir():
        path.unlink()
    TedReader(tmp_path / "two").episodes.save(tmp_path / "one")
    relist(tmp_path / "one")
    with pytest.raises(CorruptDataError, match="2 episodes and 6 steps, the manifest states 1 and 4"):
        _ = TedReader(tmp_path / "one").episodes
