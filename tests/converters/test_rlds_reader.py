"""`RldsReader`: rows equal those of a plain reading, and episodes end where the flags say."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from rlds_files import (
    METADATA,
    PLAIN,
    RICH,
    described_before,
    encoded,
    plain_records,
    random_episode,
    record,
    write_dataset,
)

import rbtool
from rbtool.converters.rlds.reader import RldsReader
from rbtool.core.errors import UsageError
from rbtool.core.format.reader import Reader
from rbtool.core.open_steps import open_steps
from rbtool.core.testing.readers import ReaderTests

BRIDGE = Path(__file__).parents[1] / "data" / "rlds" / "bridge_dataset"
Array = np.ndarray[Any, np.dtype[Any]]


class TestReader(ReaderTests):
    @pytest.fixture(autouse=True)
    def made(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        episodes = [random_episode(length, RICH, seed=seed) for seed, length in enumerate((5, 2, 7, 4))]
        shards = [[record(RICH, one, METADATA) for one in episodes[:3]], [record(RICH, episodes[3], METADATA)]]
        self.folder = write_dataset(tmp_path_factory.mktemp("rlds") / "1.0.0", {"train": shards}, RICH, METADATA)

    def reader(self) -> type[Reader]:
        return RldsReader

    def source(self) -> Path:
        return self.folder

    def with_small_pieces(self) -> Reader:
        return type("Small", (RldsReader,), {"piece_bytes": 2000})(self.source())


def columns_of(path: Path) -> dict[str, Array]:
    with open_steps(path) as reader:
        return {field.name: reader.read(field.key, 0, reader.manifest.steps) for field in reader.fields}


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


def assert_rich(path: Path, episodes: list[Any], *, last: str) -> None:
    """All columns of `RICH` are those of the episodes; with `last` observation, a step is the row after the others."""
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


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lengths=st.lists(st.integers(2, 6), min_size=3, max_size=6), cut=st.integers(0, 3), seed=st.integers(0, 50))
def test_random_datasets_come_back(lengths: list[int], cut: int, seed: int) -> None:
    episodes = [random_episode(length, RICH, seed=seed + place) for place, length in enumerate(lengths)]
    records = [record(RICH, one, METADATA) for one in episodes]
    with tempfile.TemporaryDirectory() as made:
        folder = write_dataset(Path(made) / "1.0.0", {"train": [records[:cut], [], records[cut:]]}, RICH, METADATA)
        result = rbtool.convert(folder, Path(made) / "out", rlds_last="observation")
        assert_rich(result.path, episodes, last="observation")
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


@pytest.mark.parametrize("choice", ["observation", "step"])
def test_last_steps_are_what_the_option_states(choice: str, tmp_path: Path) -> None:
    episodes = [random_episode(length, seed=seed, last="step") for seed, length in enumerate((4, 6))]
    result = rbtool.convert(write(tmp_path / "1.0.0", episodes), tmp_path / "out", rlds_last=choice)
    columns, kept = columns_of(result.path), [one["steps"] for one in episodes]
    assert any("as --rlds-last states" in note for note in result.notes)
    lengths = {"observation": [3, 5], "step": [4, 5]}[choice]  # the truncated last step has no observation after it
    assert_rows(columns, "action", [one["action"][:length] for one, length in zip(kept, lengths, strict=True)])
    assert_rows(
        columns, "observation", [one["observation"][:length] for one, length in zip(kept, lengths, strict=True)]
    )
    assert columns["next.terminated"].nonzero()[0].tolist() == [lengths[0] - 1]
    assert columns["next.truncated"].nonzero()[0].tolist() == [sum(lengths) - 1]


@pytest.mark.parametrize(("last", "steps"), [("observation", 4 * 9), ("step", 4 * 9 + 2)])
def test_auto_takes_them_for_what_they_are(last: str, steps: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "1.0.0", [random_episode(10, seed=seed, last=last) for seed in range(4)])
    result = rbtool.convert(folder, tmp_path / "out")
    assert result.steps == steps
    assert ("observed" in str(result.boundary)) or result.boundary["terminated"] == 2
    expected = "zeros in 4 of 4 episodes" if last == "observation" else "zeros in 0 of 4 episodes"
    assert any(expected in note for note in result.notes)


def test_an_episode_without_is_last_ends_with_a_step(tmp_path: Path) -> None:
    episodes = [random_episode(10, seed=seed) for seed in range(4)]
    episodes.append(random_episode(5, seed=9, last="step", ends=False))
    result = rbtool.convert(write(tmp_path / "1.0.0", episodes), tmp_path / "out", final_step="repeat")
    with open_steps(result.path) as reader:
        assert reader.episodes.length.tolist() == [9, 9, 9, 9, 5]
    assert any("1 episode does not end with is_last, and is incomplete" in note for note in result.notes)


def test_short_and_empty_episodes_are_left_out_and_counted(tmp_path: Path) -> None:
    episodes = [random_episode(length, seed=seed) for seed, length in enumerate((4, 0, 1, 3, 5))]
    result = rbtool.convert(write(tmp_path / "1.0.0", episodes), tmp_path / "out", rlds_last="observation")
    with open_steps(result.path) as reader:
        assert reader.episodes.episode.tolist() == [0, 3, 4]
    assert any("1 episode without steps" in note for note in result.notes)
    assert any("1 episode of an observation and no step" in note for note in result.notes)


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
    with pytest.raises(rbtool.UsageError, match="no split 'vall'; did you mean 'val'"):
        rbtool.convert(folder, tmp_path / "other", filter_key="vall")


def test_every_record_counts_as_progress(tmp_path: Path) -> None:
    folder = write(tmp_path / "1.0.0", [random_episode(3, seed=seed) for seed in range(5)])
    seen: list[int] = []
    with RldsReader(folder) as reader:
        reader.facts(progress=seen.append)
    assert sum(seen) == 5


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    episodes = [record(RICH, random_episode(length, RICH, seed=length), METADATA) for length in range(2, 12)]
    folder = write_dataset(tmp_path / "1.0.0", {"train": [episodes[:4], episodes[4:]]}, RICH, METADATA)
    one, two = (rbtool.convert(folder, tmp_path / str(count), num_workers=count) for count in (0, 2))
    assert one.content_digest == two.content_digest
    assert one.notes == two.notes


def test_compiled_loops_write_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = [record(RICH, random_episode(length, RICH, seed=length), METADATA) for length in range(2, 7)]
    folder = write_dataset(tmp_path / "1.0.0", {"train": [episodes]}, RICH, METADATA)
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


@pytest.mark.parametrize("form", ["plain", "text", "entries"])
def test_older_descriptions_mean_the_same(form: str, tmp_path: Path) -> None:
    """Those with a `type` and a `content`, which has plain values, or the newer entry, perhaps as text."""
    records = [record(RICH, random_episode(length, RICH, seed=length), METADATA) for length in (4, 3)]
    folder = write_dataset(tmp_path / "1.0.0", {"train": [records]}, RICH, METADATA)
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
    assert any("1 episode is marked as invalid by the recorder, and kept: 3" in note for note in result.notes)
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
    with pytest.raises(UsageError, match="expected exact or fast"):
        rbtool.convert(source, tmp_path / "other", jpeg="slow")
