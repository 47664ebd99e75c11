"""`RldsReader`: rows equal those of a plain reading, ends of episodes, ArrayRecord shards, and damaged datasets."""

from __future__ import annotations

import importlib
import io
import json
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each
from conversions import WrittenReaderTests, column, converted, refused
from conversions import columns_of as columns_in
from damage import POINTER, flip
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rlds_files import (
    METADATA,
    PLAIN,
    RICH,
    described_before,
    encoded,
    example,
    masked,
    plain_records,
    random_episode,
    record,
    write_dataset,
    write_shard,
)

import rbtool
from rbtool.converters.rlds.reader import RldsReader
from rbtool.core.errors import CorruptDataError, FormatError, RbtoolError, UsageError
from rbtool.core.open_steps import open_steps

BRIDGE = Path(__file__).parents[1] / "data" / "rlds" / "bridge_dataset"
Array = np.ndarray[Any, np.dtype[Any]]


def rich_records(lengths: Sequence[int]) -> list[bytes]:
    return [record(RICH, random_episode(length, RICH, seed=length), METADATA) for length in lengths]


def write_rich(folder: Path, *shards: list[bytes]) -> Path:
    return write_dataset(folder / "1.0.0", {"train": list(shards)}, RICH, METADATA)


class TestReader(WrittenReaderTests):
    kind, piece_bytes = RldsReader, 2000

    def write(self, folder: Path) -> Path:
        return write_rich(folder, rich_records((5, 2, 7)), rich_records((4,)))


def columns_of(path: Path) -> dict[str, Array]:
    with open_steps(path) as reader:
        return columns_in(reader)


def texts(columns: dict[str, Array], name: str) -> list[str]:
    lengths = columns[f"{name}_length"].tolist()
    return [bytes(row[:size]).decode() for row, size in zip(columns[name], lengths, strict=True)]


def assert_rows(columns: dict[str, Array], name: str, rows: list[Any], dtype: str | None = None) -> None:
    expected = np.concatenate([np.asarray(one) for one in rows])
    expected = expected if dtype is None else expected.astype(dtype)
    assert (columns[name].dtype, columns[name].shape) == (expected.dtype, expected.shape), name
    assert columns[name].tobytes() == expected.tobytes(), name


def assert_padded(columns: dict[str, Array], name: str, steps: list[Any]) -> None:
    lengths = columns[f"{name}_length"].tolist()
    assert lengths == [len(one) for one in steps]
    for row, size, values in zip(columns[name], lengths, steps, strict=True):
        assert row[:size].tobytes() == np.asarray(values, row.dtype).tobytes()
        assert not row[size:].any()


def jpeg(pixels: Array) -> Array:
    with Image.open(io.BytesIO(encoded(pixels, "jpeg"))) as image:
        return np.asarray(image)


def assert_rich(path: Path, episodes: list[Any]) -> None:
    """All columns of `RICH` equal the episodes they were made from, whose last step is only an observation."""
    columns = columns_of(path)
    kept = [one["steps"] for one in episodes]
    for before, prefix in ((True, ""), (False, "next.")):

        def part(rows: Any, before: bool = before) -> Any:
            return rows[:-1] if before else rows[1:]

        for name in ("image", "depth", "ids", "count", "nothing", "state"):
            assert_rows(columns, f"{prefix}observation.{name}", [part(one["observation"][name]) for one in kept])
        wrist = [np.stack([jpeg(image) for image in part(one["observation"]["wrist"])]) for one in kept]
        assert_rows(columns, f"{prefix}observation.wrist", wrist)
        tasks = [text for one in kept for text in part(one["observation"]["task"])]
        assert texts(columns, f"{prefix}observation.task") == tasks
        spoken = [text for one in kept for text in part(one["language_instruction"])]
        assert texts(columns, f"{prefix}language_instruction") == spoken
        for name in ("points", "taps"):
            assert_padded(columns, f"{prefix}{name}", [row for one in kept for row in part(one[name])])
        for name in ("pair", "raw", "packed"):
            assert_rows(columns, f"{prefix}{name}", [part(one[name]) for one in kept])
    for name in ("world", "gripper", "mode"):
        assert_rows(columns, f"action.{name}", [one["action"][name][:-1] for one in kept])
    assert_rows(columns, "is_init", [one["is_first"][:-1, None] for one in kept])
    assert_rows(columns, "next.reward", [one["reward"][:-1, None] for one in kept])
    assert_rows(columns, "next.discount", [one["discount"][:-1] for one in kept])


@settings(max_examples=12)
@given(lengths=st.lists(st.integers(2, 6), min_size=3, max_size=6), cut=st.integers(0, 3), seed=st.integers(0, 50))
def test_random_datasets_come_back(lengths: list[int], cut: int, seed: int) -> None:
    episodes = [random_episode(length, RICH, seed=seed + place) for place, length in enumerate(lengths)]
    records = [record(RICH, one, METADATA) for one in episodes]
    with tempfile.TemporaryDirectory() as made:
        folder = write_rich(Path(made), records[:cut], [], records[cut:])
        result = rbtool.convert(folder, Path(made) / "out", rlds_last="observation")
        assert_rich(result.path, episodes)
        with open_steps(result.path) as reader:
            assert reader.episodes.length.tolist() == [length - 1 for length in lengths]
            assert reader.episodes.terminated.tolist() == [one["steps"]["is_terminal"][-1] for one in episodes]
            assert (reader.episodes.truncated != reader.episodes.terminated).all()
            text = reader.episode_text
        assert text is not None
        assert [one["file_path"] for one in text] == [one["episode_metadata"]["file_path"] for one in episodes]


def test_the_real_rows_are_those_of_a_plain_reading(tmp_path: Path) -> None:
    result = rbtool.convert(BRIDGE, tmp_path / "out", final_step="repeat")
    [shard] = (BRIDGE / "1.0.0").glob("*.tfrecord-*")
    columns, plain = columns_of(result.path), list(plain_records(shard))
    for name, shape in (("action", (7,)), ("observation/state", (7,)), ("language_embedding", (512,))):
        rows = [one[f"steps/{name}"].reshape(10, *shape) for one in plain]
        assert_rows(columns, name.replace("/", "."), rows)
        if name != "action":
            after = [np.concatenate((one[1:], one[-1:])) for one in rows]
            assert_rows(columns, "next." + name.replace("/", "."), after)
    for name in ("reward", "discount"):
        shape = (10, 1) if name == "reward" else (10,)
        assert_rows(columns, f"next.{name}", [one[f"steps/{name}"].reshape(shape) for one in plain])
    for camera in range(4):
        images = [one[f"steps/observation/image_{camera}"] for one in plain]
        pixels = [np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files]) for files in images]
        assert_rows(columns, f"observation.image_{camera}", pixels)
    spoken = [text.decode() for one in plain for text in one["steps/language_instruction"]]
    assert texts(columns, "language_instruction") == spoken
    assert (result.steps, result.episodes, result.request["id"]) == (30, 3, "bridge_dataset/1.0.0")
    with open_steps(result.path) as reader:
        assert reader.episode_text is not None
        found = [one["file_path"] for one in reader.episode_text]
        numbers = [one["episode_id"] for one in reader.episode_text]
    assert found == [one["episode_metadata/file_path"][0].decode() for one in plain]
    assert numbers == [str(one["episode_metadata/episode_id"][0]) for one in plain]
    assert rbtool.check(BRIDGE).errors == 0


def write(folder: Path, episodes: list[Any], steps: Any = PLAIN) -> Path:
    return write_dataset(folder, {"train": [[record(steps, one) for one in episodes]]}, steps)


@each("choice", ["observation", "step"])
def test_last_steps_are_what_the_option_states(choice: str, tmp_path: Path) -> None:
    episodes = [random_episode(length, seed=seed, last="step") for seed, length in enumerate((4, 6))]
    result = rbtool.convert(write(tmp_path / "1.0.0", episodes), tmp_path / "out", rlds_last=choice)
    columns, kept = columns_of(result.path), [one["steps"] for one in episodes]
    assert any("as --rlds-last states" in note for note in result.notes)
    lengths = {"observation": [3, 5], "step": [4, 5]}[choice]  # the truncated last step has no observation after it
    for name in ("action", "observation"):
        assert_rows(columns, name, [one[name][:length] for one, length in zip(kept, lengths, strict=True)])
    assert columns["next.terminated"].nonzero()[0].tolist() == [lengths[0] - 1]
    assert columns["next.truncated"].nonzero()[0].tolist() == [sum(lengths) - 1]


@each(("last", "steps"), [("observation", 4 * 9), ("step", 4 * 9 + 2)])
def test_auto_takes_last_steps_for_what_they_are(last: str, steps: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "1.0.0", [random_episode(10, seed=seed, last=last) for seed in range(4)])
    result = rbtool.convert(folder, tmp_path / "out")
    assert (result.steps, result.boundary["terminated"]) == (steps, 2)
    expected = "zeros in 4 of 4 episodes" if last == "observation" else "zeros in 0 of 4 episodes"
    assert any(expected in note for note in result.notes)


def test_an_episode_without_is_last_ends_with_a_step(tmp_path: Path) -> None:
    episodes = [random_episode(10, seed=seed) for seed in range(4)]
    episodes.append(random_episode(5, seed=9, last="step", ends=False))
    result = rbtool.convert(write(tmp_path / "1.0.0", episodes), tmp_path / "out", final_step="repeat")
    with open_steps(result.path) as reader:
        assert reader.episodes.length.tolist() == [9, 9, 9, 9, 5]
    assert any("1 incomplete episode without is_last at the end" in note for note in result.notes)


def test_short_and_empty_episodes_are_left_out_and_counted(tmp_path: Path) -> None:
    episodes = [random_episode(length, seed=seed) for seed, length in enumerate((4, 0, 1, 3, 5))]
    result = rbtool.convert(write(tmp_path / "1.0.0", episodes), tmp_path / "out", rlds_last="observation")
    with open_steps(result.path) as reader:
        assert reader.episodes.episode.tolist() == [0, 3, 4]
    assert any("1 episode without steps" in note for note in result.notes)
    assert any("1 episode with only an observation and no step" in note for note in result.notes)


def test_splits_are_numbered_in_their_order_and_one_can_be_chosen(tmp_path: Path) -> None:
    episodes = [record(PLAIN, random_episode(3, seed=seed)) for seed in range(6)]
    splits = {"train": [episodes[:2], episodes[2:4]], "val": [episodes[4:]], "none": []}
    folder = write_dataset(tmp_path / "toy" / "config" / "1.0.0", splits, PLAIN)
    for path in (folder, folder.parent, folder.parents[1]):
        whole = rbtool.inspect(path)
        assert whole.episodes == 6
    assert any("train has episodes 0..3, val has episodes 4..5, none has none" in note for note in whole.notes)
    result = rbtool.convert(folder, tmp_path / "out", filter_key="val")
    with open_steps(result.path) as reader:
        assert reader.episodes.episode.tolist() == [4, 5]
    refused(folder, "no split 'vall'; did you mean 'val'", UsageError, filter_key="vall")


def test_every_record_counts_as_progress(tmp_path: Path) -> None:
    folder = write(tmp_path / "1.0.0", [random_episode(3, seed=seed) for seed in range(5)])
    seen: list[int] = []
    with RldsReader(folder) as reader:
        reader.facts(progress=seen.append)
    assert sum(seen) == 5


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    episodes = rich_records(range(2, 12))
    folder = write_rich(tmp_path, episodes[:4], episodes[4:])
    one, two = (rbtool.convert(folder, tmp_path / str(count), num_workers=count) for count in (0, 2))
    assert one.content_digest == two.content_digest
    assert one.notes == two.notes


def test_compiled_loops_write_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_rich(tmp_path, rich_records(range(2, 7)))
    plain = rbtool.convert(folder, tmp_path / "plain")
    monkeypatch.setattr("rbtool.converters.rlds.reader.COMPILED_BYTES", 0)
    compiled = rbtool.convert(folder, tmp_path / "compiled")
    assert (compiled.content_digest, compiled.notes) == (plain.content_digest, plain.notes)


def test_features_that_cannot_be_columns_are_named(tmp_path: Path) -> None:
    steps = {**PLAIN, "video": ("Video",), "words": ("sequence", ("text",), -1), "wide": ("tensor", "bfloat16", ())}
    known = [record(PLAIN, random_episode(5, seed=seed)) for seed in range(3)]
    folder = write_dataset(tmp_path / "1.0.0", {"train": [known]}, steps)
    dropped = {one["key"]: one["why"] for one in rbtool.convert(folder, tmp_path / "out").dropped_keys}
    assert dropped == {
        "steps/video": "it is a feature of the kind Video",
        "steps/wide": "its values are of type bfloat16",
        "steps/words": "it is a sequence of text",
    }


@each("form", ["plain", "text", "entries"])
def test_older_descriptions_mean_the_same(form: str, tmp_path: Path) -> None:
    """Older ones have a `type` and a `content`: plain values, or the newer entry, perhaps as text."""
    folder = write_rich(tmp_path, rich_records((4, 3)))
    expected = rbtool.convert(folder, tmp_path / "one").content_digest
    path = folder / "features.json"
    newer = json.loads(path.read_text())
    content: Any = newer["featuresDict"]
    older = {"type": "x.FeaturesDict", "proto_cls": "x", "content": json.dumps(content) if form == "text" else content}
    path.write_text(json.dumps(described_before(newer) if form == "plain" else older))
    assert rbtool.convert(folder, tmp_path / "two").content_digest == expected


def test_images_of_sizes_that_are_not_stated(tmp_path: Path) -> None:
    spec = {**PLAIN, "one": ("image", (6, 5, 3), "png"), "several": ("image", (6, 5, 3), "png")}
    stated = {**PLAIN, "one": ("image", (-1, -1, 3), "png"), "several": ("image", (-1, -1, 3), "png")}
    episodes = [random_episode(3, spec, seed=seed) for seed in range(2)]
    episodes[1]["steps"]["several"] = episodes[1]["steps"]["several"][:, :4]
    folder = write_dataset(tmp_path / "1.0.0", {"train": [[record(spec, one) for one in episodes]]}, stated)
    result = rbtool.convert(folder, tmp_path / "out", rlds_last="observation")
    assert_rows(columns_of(result.path), "one", [one["steps"]["one"][:-1] for one in episodes])
    [dropped] = result.dropped_keys
    assert dropped["key"] == "steps/several"
    assert "[4, 5, 3] in episode 1" in dropped["why"]
    skipped = rbtool.convert(folder, tmp_path / "skipped", images="skip")
    assert {one["why"] for one in skipped.dropped_keys} == {"--images skip leaves it out"}


def test_invalid_episodes_are_kept_and_named(tmp_path: Path) -> None:
    records = [record(PLAIN, random_episode(5, seed=seed), METADATA) for seed in range(5)]
    result = rbtool.convert(write_dataset(tmp_path / "1.0.0", {"train": [records]}, PLAIN, METADATA), tmp_path / "out")
    assert any("1 episode that the recorder marked as invalid, and kept: 3" in note for note in result.notes)
    with open_steps(result.path) as reader:
        assert reader.episode_text is not None
        assert [one["invalid"] for one in reader.episode_text] == ["false"] * 3 + ["true", "false"]
        assert reader.episode_text[2]["scale"] == "[0.10000000149011612, 2.0]"


def test_a_terminal_step_inside_an_episode_is_a_flag_of_the_step_before(tmp_path: Path) -> None:
    """`is_terminal` is about an observation, and a flag under `next` about the one after a step."""
    episodes = [random_episode(6, seed=seed, last=last) for seed, last in enumerate(("observation", "step"))]
    for one in episodes:
        one["steps"]["is_terminal"][2] = True
    for choice, expected in (("observation", [1, 4, 6]), ("step", [2, 5, 8])):
        folder = write(tmp_path / choice / "1.0.0", episodes)
        result = rbtool.convert(folder, tmp_path / choice / "out", rlds_last=choice)
        assert columns_of(result.path)["next.terminated"][:, 0].nonzero()[0].tolist() == expected
        assert any("is_terminal is set in 2 steps inside episodes" in note for note in result.notes)


def test_a_damaged_episode_widens_no_column(tmp_path: Path) -> None:
    spec = {**PLAIN, "task": ("text",)}
    episodes = [random_episode(4, spec, seed=seed) for seed in range(3)]
    episodes[1]["steps"]["task"] = ["x" * 70_000] * 4
    episodes[1]["steps"]["is_last"][1] = True
    result = rbtool.convert(write(tmp_path / "1.0.0", episodes, spec), tmp_path / "out", skip_bad=True)
    assert result.dropped_keys == ()
    assert texts(columns_of(result.path), "task")[:3] == episodes[0]["steps"]["task"][:3]


def test_fast_jpeg_is_another_dataset(tmp_path: Path) -> None:
    records = [record(RICH, random_episode(3, RICH, seed=seed)) for seed in range(2)]
    source = write_dataset(tmp_path / "1.0.0", {"train": [records]}, RICH)
    exact = rbtool.convert(source, tmp_path / "exact", rlds_last="step", final_step="repeat")
    fast = rbtool.convert(source, tmp_path / "fast", rlds_last="step", final_step="repeat", jpeg="fast")
    assert exact.content_digest != fast.content_digest
    assert fast.request["options"]["jpeg"] == "fast"
    changed = {one.key for one in rbtool.diff(tmp_path / "exact", tmp_path / "fast").values}
    assert changed == {"observation.wrist", "next.observation.wrist"}
    refused(source, "expected exact or fast", UsageError, jpeg="slow")


def nine_episodes(tmp_path: Path) -> Path:
    """Write nine episodes in three shards."""
    records = [record(PLAIN, random_episode(4, seed=seed)) for seed in range(9)]
    return write_dataset(tmp_path / "toy" / "1.0.0", {"train": [records[:3], records[3:5], records[5:]]}, PLAIN)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return nine_episodes(tmp_path)


def shard(folder: Path, number: int) -> Path:
    return folder / f"toy-train.tfrecord-{number:05}-of-00003"


def offsets(file: Path) -> list[int]:
    """Where each record begins."""
    data, at, found = file.read_bytes(), 0, []
    while at < len(data):
        found.append(at)
        at += 16 + struct.unpack_from("<Q", data, at)[0]
    return found


def part(folder: Path) -> Path:
    return shard(folder, 1)


def second(folder: Path) -> int:
    """Where the second record of the shard begins."""
    return offsets(part(folder))[1]


def cut(folder: Path, size: int) -> None:
    part(folder).write_bytes(part(folder).read_bytes()[: second(folder) + size])


def replace_second(folder: Path, data: bytes) -> None:
    write_shard(part(folder), [record(PLAIN, random_episode(4, seed=3)), data])


CONTRADICTING = example(
    {"steps/is_first": [1, 0], "steps/action": [0.0] * 5, "steps/observation": [0.0] * 6, "steps/reward": [0.0] * 2}
)


def two_episodes() -> bytes:
    one = random_episode(4, seed=3)
    one["steps"]["is_last"][1] = True
    return record(PLAIN, one)


@each(
    ("damage", "said", "lost"),
    [
        (lambda it: part(it).unlink(), r"00001-of-00003 is missing, which has 2 episodes", [3, 4]),
        (lambda it: cut(it, 20), r"00001-of-00003 is cut: it ends after \d+ bytes, inside record 1", [4]),
        (lambda it: cut(it, 5), r"is cut: it ends after \d+ bytes, inside record 1", [4]),
        (
            lambda it: flip(part(it), second(it) + 40, 2), r"the checksum of the record at byte \d+ does not match", [4]
        ),
        (
            lambda it: flip(part(it), second(it) + 1, 2),
            r"the checksum of the length of record 1, at byte \d+, does not match", [4],
        ),
        (lambda it: part(it).write_bytes(POINTER), "is a git-lfs pointer", [3, 4]),
        (lambda it: part(it).write_bytes(b""), "has 0 records, and 2 in dataset_info", [3, 4]),
        (
            lambda it: replace_second(it, b"\xff" * 40),
            "episode 4 in toy-train.tfrecord-00001-of-00003: not a sound Example", [4],
        ),
        (lambda it: replace_second(it, CONTRADICTING), "'steps/action' has 5 values for 2 steps, not 4", [4]),
        (lambda it: replace_second(it, two_episodes()), r"is_last is set in step 1 of 4, expected one episode", [4]),
    ],
)  # fmt: skip
def test_what_is_damaged_is_named_and_the_rest_can_be_kept(
    damage: Callable[[Path], Any], said: str, lost: list[int], tmp_path: Path
) -> None:
    folder = nine_episodes(tmp_path)
    damage(folder)
    assert refused(folder, said).exit_code == 1
    assert rbtool.check(folder).errors > 0
    with converted(folder, tmp_path / "rest", skip_bad=True, rlds_last="observation") as reader:
        assert reader.episodes.episode.tolist() == [number for number in range(9) if number not in lost]
        assert any("left out" in note for note in reader.manifest.notes)


def test_more_records_than_stated_are_an_error(folder: Path, tmp_path: Path) -> None:
    more = [record(PLAIN, random_episode(4, seed=seed)) for seed in range(4)]
    write_shard(shard(folder, 1), more)
    refused(folder, "has more than the 2 records in dataset_info")
    result = rbtool.convert(folder, tmp_path / "rest", skip_bad=True)
    assert result.episodes == 9


def test_without_dataset_info_records_are_counted(folder: Path, tmp_path: Path) -> None:
    (folder / "dataset_info.json").unlink()
    result = rbtool.convert(folder, tmp_path / "out")
    assert (result.episodes, result.request["id"]) == (9, "toy/1.0.0")
    shard(folder, 2).unlink()
    assert "--skip-bad" in refused(folder, "00002-of-00003 is missing", CorruptDataError).hint


@each("name", ["features.json", "dataset_info.json"])
@each(
    ("content", "said"),
    [
        (b"", "is an empty file"), (POINTER, "is a git-lfs pointer"), (b"{", "is not JSON"),
        (b"[]", "is not a JSON object"), (b"{}", ""),
    ],
)  # fmt: skip
def test_documents_that_cannot_be_read_are_refused(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    folder = nine_episodes(tmp_path)
    (folder / name).write_bytes(content)
    refused(folder, f"{name}.*{said}")
    with pytest.raises(FormatError, match=f"{name}.*{said}"):
        rbtool.inspect(folder)


@each(
    ("change", "said"),
    [
        ({"fileFormat": "riegeli"}, "the file format is 'riegeli'"),
        ({"fileFormat": ["tfrecord"]}, r"the file format is .*, expected tfrecord"),
        ({"fileFormat": {"a": 1}}, r"the file format is .*, expected tfrecord"),
        ({"name": "../toy"}, "name is '../toy', expected a plain name"),
        ({"splits": [{"name": "train", "shardLengths": ["x"]}]}, "a shard of 'x' records"),
        ({"splits": [{"name": "train", "shardLengths": ["1"], "filepathTemplate": "../{DATASET}"}]}, "leads out of"),
        ({"splits": [{"name": "a"}, {"name": "a"}]}, "names a split twice"),
        ({"splits": 3}, "splits are not a list"),
    ],
)
def test_contradictions_of_dataset_info_are_refused(change: dict[str, object], said: str, tmp_path: Path) -> None:
    folder = nine_episodes(tmp_path)
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps(info | change))
    with pytest.raises(FormatError, match=said):
        rbtool.inspect(folder)


def test_other_datasets_are_named(folder: Path) -> None:
    path = folder / "features.json"
    path.write_text(json.dumps({"pythonClassName": "x", "featuresDict": {"features": {"image": {"text": {}}}}}))
    with pytest.raises(FormatError, match="has no feature 'steps'"):
        rbtool.inspect(folder)
    path.unlink()
    with pytest.raises(FormatError, match=r"has no features\.json"):
        rbtool.inspect(folder)


def test_a_folder_of_several_versions_is_refused(folder: Path) -> None:
    records = [record(PLAIN, random_episode(4))]
    write_dataset(folder.parent / "2.0.0", {"train": [records]}, PLAIN)
    with pytest.raises(FormatError, match=r"has 2 datasets \(1\.0\.0, 2\.0\.0\)") as caught:
        rbtool.inspect(folder.parent)
    assert caught.value.hint == f"name one of them: {folder.parent / '2.0.0'}"


@each(("lengths", "is_sound"), [(None, True), ([2, 2], True), ([1, 3], False)])
def test_sequences_of_a_stated_length(lengths: list[int] | None, is_sound: bool, tmp_path: Path) -> None:
    """They are stored flat, or like those of any length."""
    steps = {**PLAIN, "pair": ("sequence", ("tensor", "int32", ()), 2)}
    lists: dict[str, Any] = {
        "steps/is_first": [1, 0], "steps/reward": [0.0, 1.0], "steps/action": [0.5] * 4,
        "steps/observation": [0.5] * 6,
    }  # fmt: skip
    if lengths is None:
        lists["steps/pair"] = [7, 8, 9, 10]
    else:
        lists |= {"steps/pair/ragged_flat_values": [7, 8, 9, 10], "steps/pair/ragged_row_lengths_0": lengths}
    folder = write_dataset(tmp_path / "1.0.0", {"train": [[example(lists)]]}, steps)
    if not is_sound:
        refused(folder, "its steps have sequences of several lengths", CorruptDataError, rlds_last="observation")
        return
    with converted(folder, tmp_path / "out", rlds_last="observation") as reader:
        assert column(reader, "next.pair").tolist() == [[9, 10]]


@each("number", [1, 1 << 31, -1])
def test_values_that_do_not_fit_their_type_are_damage(number: int, tmp_path: Path) -> None:
    steps = {**PLAIN, "small": ("tensor", "uint8", ())}
    lists = {"steps/is_first": [1, 0], "steps/is_last": [0, 1], "steps/is_terminal": [0, 0], "steps/reward": [0.0, 1.0],
             "steps/action": [0.5] * 4, "steps/observation": [0.5] * 6, "steps/small": [number, 0]}  # fmt: skip
    folder = write_dataset(tmp_path / "1.0.0", {"train": [[example(lists)]]}, steps)
    if number == 1:
        assert rbtool.convert(folder, tmp_path / "out", rlds_last="observation").steps == 1
        return
    refused(folder, f"the value {number} does not fit uint8", CorruptDataError, rlds_last="observation")


def test_a_record_of_a_stated_size_beyond_the_file_takes_no_memory(folder: Path) -> None:
    size = struct.pack("<Q", 1 << 40)
    shard(folder, 1).write_bytes(size + masked(size) + b"x" * 100)
    refused(folder, "record 0 has 1,099,511,627,776 bytes", RbtoolError)


@pytest.fixture
def records() -> list[bytes]:
    return rich_records((5, 2, 7, 4))


@pytest.fixture
def folder_record(records: list[bytes], tmp_path: Path) -> Path:
    """Four episodes in two shards."""
    made = write_rich(tmp_path / "array", records[:3], records[3:])
    library = importlib.import_module("array_record.python.array_record_module")
    for number, part in enumerate((records[:3], records[3:])):
        (made / f"toy-train.tfrecord-{number:05}-of-00002").unlink()
        writer = library.ArrayRecordWriter(str(shard_record(made, number)), "group_size:1")
        for one in part:
            writer.write(one)
        writer.close()
    info = json.loads((made / "dataset_info.json").read_text())
    (made / "dataset_info.json").write_text(json.dumps(info | {"fileFormat": "array_record"}))
    return made


def shard_record(folder_record: Path, number: int) -> Path:
    return folder_record / f"toy-train.array_record-{number:05}-of-00002"


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rows_are_those_of_tfrecords(
    workers: int, folder_record: Path, records: list[bytes], tmp_path: Path
) -> None:
    plain = write_rich(tmp_path / "plain", records)
    one = rbtool.convert(folder_record, tmp_path / "one", num_workers=workers, rlds_last="observation")
    assert one.content_digest == rbtool.convert(plain, tmp_path / "two", rlds_last="observation").content_digest
    (folder_record / "dataset_info.json").unlink()
    assert rbtool.inspect(folder_record).episodes == 4


def test_damage_is_named_and_the_rest_can_be_kept(folder_record: Path, tmp_path: Path) -> None:
    shard_record(folder_record, 0).write_bytes(shard_record(folder_record, 0).read_bytes()[:70_000])
    refused(folder_record, "array_record-00000-of-00002 is damaged", CorruptDataError)
    assert rbtool.convert(folder_record, tmp_path / "rest", skip_bad=True).episodes == 1
    (folder_record / "dataset_info.json").unlink()
    refused(folder_record, "array_record-00000-of-00002 is damaged", CorruptDataError)


def test_without_the_library_the_extra_is_named(folder_record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    with pytest.raises(UsageError, match="the package array-record is not installed") as caught:
        rbtool.inspect(folder_record)
    assert caught.value.hint == "pip install 'rbtool[array-record]'"
