"""`OpenXReader`: the contract of readers, rows as a plain reading has them, and episodes that differ or are damaged."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each
from conversions import WrittenReaderTests, column, columns_of, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_files import (
    TRUST,
    assert_equal_rows,
    decoded,
    encoded,
    random_openx,
    random_openx_episode,
    read_plainly,
    write_openx,
    write_openx_shard,
)

import rbtool
from rbtool.converters.openx.reader import OpenXReader
from rbtool.core.errors import CorruptDataError, UsageError
from rbtool.core.open_steps import open_steps

DATA = Path(__file__).parents[1] / "data" / "openx" / "nyu_toy"


class TestReader(WrittenReaderTests):
    kind, options, piece_bytes = OpenXReader, TRUST, 9000

    def write(self, folder: Path) -> Path:
        return write_openx(folder / "toy", [random_openx(one, side=32) for one in ((5, 1, 7), (4,))])


@each("kind", ["PNG", "JPEG"])
@each("last", ["observation", "step"])
@each("layout", ["ted", "packed"])
def test_the_rows_are_those_of_a_plain_reading(tmp_path: Path, kind: str, last: str, layout: Any) -> None:
    folder = write_openx(tmp_path / "toy", [random_openx((5, 2), kind=kind), random_openx((3, 7), kind=kind)])
    result = rbtool.convert(folder, tmp_path / "out", rlds_last=last, final_step="repeat", layout=layout, **TRUST)
    assert_equal_rows(result.path, read_plainly(folder), last)
    assert (result.boundary["terminated"], result.boundary["truncated"]) == (2, 2)


def test_the_published_layout(tmp_path: Path) -> None:
    result = rbtool.convert(DATA, tmp_path / "out", final_step="repeat", **TRUST)
    assert (result.steps, result.episodes, result.layout, result.request["id"]) == (42, 4, "packed", "nyu_toy")
    with open_steps(result.path) as reader:
        images, action, state = (column(reader, name) for name in ("observation.image", "action", "observation.state"))
    steps = [step for one in read_plainly(DATA) for step in one["steps"]]
    assert images.tobytes() == np.stack([decoded(one["observation"]["image"]["bytes"]) for one in steps]).tobytes()
    assert action.tobytes() == np.array([one["action"] for one in steps], "f4").tobytes()
    assert state.tobytes() == np.array([one["observation"]["state"] for one in steps], "f4").tobytes()
    assert rbtool.check(DATA, **TRUST).errors == 0
    assert rbtool.inspect(DATA, **TRUST).episodes == 4


@settings(max_examples=12)
@given(
    shards=st.lists(st.lists(st.integers(2, 6), max_size=3), min_size=1, max_size=3),
    last=st.sampled_from(["observation", "step"]), filler=st.booleans(), piece=st.sampled_from([400, 16 << 20]),
)  # fmt: skip
def test_random_shards_come_back(shards: list[list[int]], last: str, filler: bool, piece: int) -> None:
    """Empty shards and episodes in several pieces are no exception."""
    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenXReader, "piece_bytes", piece)
        parts = [random_openx(one, filler=filler) for one in [*shards, [3]]]
        folder = write_openx(Path(made) / "toy", parts)
        out = Path(made) / "out"
        result = rbtool.convert(folder, out, rlds_last=last, final_step="repeat", **TRUST)
        assert_equal_rows(result.path, [one for part in parts for one in part], last)


def test_the_last_steps_of_a_dataset_decide_what_they_are(tmp_path: Path) -> None:
    lengths = (4, 3, 6, 5, 4, 3, 5, 4, 6, 3, 5)
    for filler, last in ((True, "observation"), (False, "step")):
        episodes = random_openx(lengths, filler=filler)
        folder = write_openx(tmp_path / f"toy{filler}", [episodes])
        result = rbtool.convert(folder, tmp_path / f"out{filler}", final_step="repeat", **TRUST)
        assert_equal_rows(result.path, episodes, last)
        assert ("taken for the observation" in result.notes[0]) == filler


def test_steps_without_a_next_observation_follow_final_step(tmp_path: Path) -> None:
    folder = write_openx(tmp_path / "toy", [random_openx((5, 4, 1))])
    dropped = rbtool.convert(folder, tmp_path / "drop", final_step="drop", **TRUST)
    assert (dropped.steps, dropped.boundary["truncated"], dropped.boundary["final_dropped"]) == (7, 2, 2)
    auto = rbtool.convert(folder, tmp_path / "auto", **TRUST)
    assert (auto.steps, auto.boundary["final_repeated"], auto.boundary["final_dropped"]) == (9, 2, 1)


@each("layout", ["ted", "packed"])
def test_workers_write_the_same_bytes(tmp_path: Path, layout: Any) -> None:
    folder = write_openx(tmp_path / "toy", [random_openx((5, 2, 6)), [], random_openx((3, 4))])
    one, two = (
        rbtool.convert(folder, tmp_path / str(count), num_workers=count, layout=layout, **TRUST) for count in (0, 2)
    )
    files = sorted(path.relative_to(one.path) for path in one.path.rglob("*") if path.is_file())
    assert one.content_digest == two.content_digest
    assert [name for name in files if "manifest" not in name.name] != []
    for name in files:
        if ".rbtool" not in name.parts:
            assert (one.path / name).read_bytes() == (two.path / name).read_bytes(), name


def test_images_can_be_left_out(tmp_path: Path) -> None:
    folder = write_openx(tmp_path / "toy", [random_openx((4, 3))])
    result = rbtool.convert(folder, tmp_path / "out", images="skip", **TRUST)
    assert {"key": "steps.observation.image", "why": "an image, left out by --images skip"} in result.dropped_keys
    refused(folder, "--images is 'keep', expected decode or skip", UsageError, images="keep", **TRUST)


def test_nothing_is_read_without_trust() -> None:
    assert "--trust-pickle" in refused(DATA, "its episodes are pickles", UsageError).hint


def test_floats_that_float32_does_not_hold_stay_float64(tmp_path: Path) -> None:
    episodes = random_openx((3, 4))
    episodes[1]["steps"][2]["observation"]["state"][1] = 0.1
    folder = write_openx(tmp_path / "toy", [episodes])
    result = rbtool.convert(folder, tmp_path / "out", final_step="repeat", **TRUST)
    with open_steps(result.path) as reader:
        rows = column(reader, "observation.state")
    assert rows.dtype == np.float64
    assert rows.tolist() == [step["observation"]["state"] for one in episodes for step in one["steps"]]
    assert any("float64, since float32 cannot hold all values: observation.state" in note for note in result.notes)


def without(episode: dict[str, Any], name: str, *, steps: slice = slice(None)) -> dict[str, Any]:
    for step in episode["steps"][steps]:
        del step[name]
    return episode


def with_value(episode: dict[str, Any], name: str, value: Any, at: slice = slice(None)) -> dict[str, Any]:
    for step in episode["steps"][at]:
        step[name] = value
    return episode


def larger_image(episode: dict[str, Any]) -> dict[str, Any]:
    for step in episode["steps"]:
        step["observation"]["image"] = {"bytes": encoded(np.zeros((9, 9, 3), np.uint8)), "path": None}
    return episode


@each(
    ("change", "said"),
    [
        (lambda one: without(one, "language_embedding"), "language_embedding must be in all episodes"),
        (lambda one: with_value(one, "extra", 1.0), "extra must be in all episodes or in none"),
        (lambda one: with_value(one, "language_embedding", [1.0]), r"\[1\], in other episodes"),
        (lambda one: with_value(one, "language_embedding", [1.0], slice(2, 3)), "differ in form"),
        (lambda one: without(one, "reward", steps=slice(1, 2)), "reward: its values differ"),
        (lambda one: without(one, "action"), "action.* must be in all episodes"),
        (larger_image, r"uint8 \[9, 9, 3\], in other episodes uint8 \[6, 6, 3\]"),
        (lambda one: with_value(one, "is_last", True), "is_last is set in step 0 of 4"),
        (lambda one: with_value(one, "is_terminal", True), "is_terminal is set in step 0 of 4"),
        (lambda one: with_value(one, "is_first", True), "is_first is set in step 1 of 4"),
        (lambda one: with_value(one, "is_last", 0.5), "is_last is not true or false"),
        (lambda one: {"frames": one["steps"]}, "is not an episode"),
        (lambda one: [one], "is not an episode"),
        (lambda one: {"steps": [*one["steps"], 3]}, "step 4 is not a dictionary"),
        (lambda one: pickle.dumps(Path("x")), "is a pickle of more than data: it has pathlib"),
        (lambda one: pickle.dumps(one)[:300], "cannot be read"),
    ],
)
def test_an_episode_that_differs_is_named_and_left_out_with_skip_bad(change: Any, said: str, tmp_path: Path) -> None:
    sound = random_openx((3, 4, 5))
    folder = write_openx(tmp_path / "toy", [[sound[0], change(random_openx_episode(4, seed=9))], sound[1:]])
    error = refused(folder, said, **TRUST)
    assert "toy_00001.data.pickle" in error.message
    assert "--skip-bad" in error.hint
    result = rbtool.convert(folder, tmp_path / "out", skip_bad=True, final_step="repeat", rlds_last="step", **TRUST)
    assert (result.episodes, result.steps) == (3, 12)
    assert any("episode 1 is left out" in note for note in result.notes)


def test_episodes_without_an_end_are_noted(tmp_path: Path) -> None:
    open_ended = with_value(with_value(random_openx_episode(4, seed=9), "is_last", False), "is_terminal", False)
    folder = write_openx(tmp_path / "toy", [[*random_openx((3, 4)), open_ended]])
    notes = rbtool.convert(folder, tmp_path / "out", **TRUST).notes
    assert "1 incomplete episode without is_last at the end" in notes


def test_a_damaged_image_inside_an_episode_is_named(tmp_path: Path) -> None:
    episodes = random_openx((3, 4))
    image = episodes[1]["steps"][2]["observation"]["image"]
    image["bytes"] = image["bytes"][:-30]
    folder = write_openx(tmp_path / "toy", [episodes])
    message = r"toy_00001.data.pickle: observation.image: the image is damaged"
    refused(folder, message, CorruptDataError, **TRUST)
    assert rbtool.convert(folder, tmp_path / "out", skip_bad=True, **TRUST).episodes == 1


def test_what_the_first_episode_has_in_no_form_is_named(tmp_path: Path) -> None:
    episodes = [with_value(one, "notes", [1, "x"]) for one in random_openx((3, 4))]
    for one in episodes:
        one["other"] = [None]
        one["steps"][1]["empty"] = one["steps"][0]["empty"] = one["steps"][2]["empty"] = None
    episodes[1]["steps"][3]["empty"] = None
    folder = write_openx(tmp_path / "toy", [episodes])
    result = rbtool.convert(folder, tmp_path / "out", **TRUST)
    assert [one["key"] for one in result.dropped_keys] == ["other", "steps.empty", "steps.notes"]


def test_raw_bytes_arrays_and_texts_of_other_types(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 5, 4, 3), np.uint8)
    steps = [
        {
            "observation": {"raw": pixels[0, at], "png": encoded(pixels[1, at]), "said": f"é{at}".encode()},
            "action": np.arange(at, at + 2, dtype=">f8"), "done": True, "label": np.str_("ab"),
            "is_first": np.bool_(at == 0), "is_last": np.bool_(at == 2), "is_terminal": np.bool_(False),
        }
        for at in range(3)
    ]  # fmt: skip
    folder = write_openx(tmp_path / "toy", [[{"steps": steps, "episode_metadata": {"id": np.int64(7), "x": 1.5}}]])
    result = rbtool.convert(folder, tmp_path / "out", rlds_last="step", final_step="repeat", **TRUST)
    with open_steps(result.path) as reader:
        columns = columns_of(reader)
        assert reader.episode_text == [{"file": "toy_00000.data.pickle", "id": "7", "x": "1.5"}]
    assert columns["observation.raw"].tobytes() == pixels[0].tobytes()
    assert columns["observation.png"].tobytes() == pixels[1].tobytes()
    assert columns["action"].tolist() == [[0, 1], [1, 2], [2, 3]]
    assert (columns["action"].dtype, columns["done_"].tolist()) == (np.float64, [True] * 3)
    assert [row[:3].tobytes().decode() for row in columns["observation.said"]] == ["é0", "é1", "é2"]
    assert columns["next.truncated"].tolist() == [[False], [False], [True]]
    assert "next.reward" not in columns


def test_a_single_shard_is_a_dataset(tmp_path: Path) -> None:
    file = write_openx_shard(tmp_path / "toy" / "toy_00004.tar", random_openx((3, 4)))
    assert rbtool.convert(file, tmp_path / "out", **TRUST).episodes == 2
