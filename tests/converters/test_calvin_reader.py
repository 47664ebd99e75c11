"""`CalvinReader`: the contract of readers, every row against a plain reading, spans with texts, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from cases import each
from conversions import WrittenReaderTests, column, columns_of, converted, refused
from shard_files import calvin_frame, write_calvin

import rbtool
from rbtool.converters.calvin.reader import CalvinReader
from rbtool.core.errors import CorruptDataError, RbtoolError, UsageError
from rbtool.core.format.contracts import StepReader
from rbtool.core.ted.episodes import EndReason, Final

DATA = Path(__file__).parents[1] / "data" / "calvin" / "task_D_D"
RECORDINGS = [(40, 46), (10, 10), (20, 25)]
SPANS = [(40, 43, "push", "a"), (42, 46, "pull it", "b"), (42, 46, "zieh daran", "b"), (21, 24, "lift", "c")]
SPANS_OF_TEXT: dict[str, Any] = {"episodes_by": "annotation", "trust_pickle": True}


class TestReader(WrittenReaderTests):
    """Recordings."""

    kind, piece_bytes, has_rewards = CalvinReader, 1000, False

    def write(self, folder: Path) -> Path:
        return write_calvin(folder / "training", RECORDINGS, SPANS)


class TestReaderOfAnnotations(TestReader):
    """Annotated spans."""

    options = SPANS_OF_TEXT


class TestReaderOfTactileFrames(TestReader):
    """Frames of pictures of touch, with six digits in their names."""

    def write(self, folder: Path) -> Path:
        more = {"rgb_tactile": np.zeros((3, 2, 6), "u1"), "depth_tactile": np.ones((3, 2, 2), "f4")}
        return write_calvin(folder / "training", RECORDINGS, names="episode_{:06d}.npz", **more)


def assert_equal_rows(reader: StepReader, spans: list[list[dict[str, Any]]], followed: list[bool]) -> None:
    """Compare with spans of frames, each with the frame after it where that is `followed`."""
    found = columns_of(reader)
    assert reader.episodes.length.tolist() == [len(span) - more for span, more in zip(spans, followed, strict=True)]
    assert reader.episodes.final.tolist() == [Final.OBSERVED if more else Final.REPEATED for more in followed]
    assert reader.episodes.end_reason.tolist() == [EndReason.TRUNCATED] * len(spans)
    here = [frame for span, more in zip(spans, followed, strict=True) for frame in span[: len(span) - more]]
    after = [
        frame
        for span, more in zip(spans, followed, strict=True)
        for frame in (span[1:] if more else [*span[1:], span[-1]])
    ]
    for name in here[0]:
        key = {"actions": "action", "rel_actions": "rel_actions"}.get(name, f"observation.{name}")
        expected = np.stack([frame[name] for frame in here])
        assert found[key].dtype == expected.dtype
        assert found[key].tobytes() == expected.tobytes(), name
        if name not in ("actions", "rel_actions"):
            assert found[f"next.{key}"].tobytes() == np.stack([frame[name] for frame in after]).tobytes(), name
    assert "next.reward" not in found


def plain_frames(folder: Path, first: int, last: int) -> list[dict[str, Any]]:
    frames = []
    for number in range(first, last + 1):
        with np.load(folder / f"episode_{number:07d}.npz") as file:
            frames.append({name: file[name] for name in file.files})
    return frames


def test_recordings_equal_a_plain_reading(tmp_path: Path) -> None:
    folder = DATA / "training"
    edges = np.load(folder / "ep_start_end_ids.npy").tolist()
    with converted(DATA, tmp_path / "out") as reader:
        assert_equal_rows(reader, [plain_frames(folder, *edge) for edge in edges], [False] * len(edges))
        numbers = [frame for first, last in edges for frame in range(first, last + 1)]
        assert column(reader, "info.frame").tolist() == numbers
        notes = reader.manifest.notes
        assert any("auto_lang_ann.npy is a pickle, which --trust-pickle reads" in note for note in notes)
        assert reader.documents().keys() == {"training_statistics.yaml"}
        pictures = column(reader, "observation.rgb_static")
    # The picture shows the number of the step: band k of the top half is bright where bit k is set.
    shown = pictures[:20, 2, :, 0] > 127
    assert len({row.tobytes() for row in shown}) == 20


def test_annotated_spans_equal_a_plain_reading(tmp_path: Path) -> None:
    folder = DATA / "training"
    stated = np.load(folder / "lang_annotations" / "auto_lang_ann.npy", allow_pickle=True).item()
    spans = stated["info"]["indx"]
    ends = dict(np.load(folder / "ep_start_end_ids.npy").tolist()).values()
    followed = [last not in ends for _, last in spans]
    frames = [plain_frames(folder, first, last + more) for (first, last), more in zip(spans, followed, strict=True)]
    assert followed == [True, True, False]
    with converted(folder, tmp_path / "out", **SPANS_OF_TEXT) as reader:
        assert_equal_rows(reader, frames, followed)
        texts, manifest = reader.episode_text or [], reader.manifest
    assert [text["language_instruction"] for text in texts] == stated["language"]["ann"]
    assert [text["task"] for text in texts] == stated["language"]["task"]
    assert {text["scene"] for text in texts} == {"calvin_scene_D"}
    assert [one.key for one in manifest.dropped_keys] == ["lang_annotations/auto_lang_ann.npy: language.emb"]
    assert any("each annotated span is an episode" in note for note in manifest.notes)


def test_recordings_have_their_spans_by_the_numbers_of_frames(tmp_path: Path) -> None:
    write_calvin(tmp_path / "d" / "training", RECORDINGS, [*SPANS, (9, 10, "outside", "x"), (45, 47, "across", "y")])
    write_calvin(tmp_path / "d" / "validation", [(60, 62)])
    with converted(tmp_path / "d", tmp_path / "out", trust_pickle=True) as reader:
        texts, frames, notes = reader.episode_text or [], column(reader, "info.frame").tolist(), reader.manifest.notes
    assert json.loads(texts[0]["annotations"]) == [
        {"first": first, "last": last, "text": text, "task": task} for first, last, text, task in SPANS[:3]
    ]
    assert [text.get("annotations") is None for text in texts] == [False, True, False, True]
    assert [text["split"] for text in texts] == ["training"] * 3 + ["validation"]
    assert frames == [*range(40, 47), 10, *range(20, 26), *range(60, 63)]
    assert any(note.startswith("2 annotations left out") for note in notes)
    one = rbtool.convert(tmp_path / "d", tmp_path / "validation", filter_key="validation")
    assert one.steps == 3
    with converted(tmp_path / "d", tmp_path / "spans", **SPANS_OF_TEXT, skip_bad=True) as reader:
        assert reader.episodes.length.tolist() == [4, 5, 5, 4]
        notes = reader.manifest.notes
    assert "validation has no annotations: lang_annotations/auto_lang_ann.npy is missing" in notes


def test_other_folders_of_annotations_and_other_forms_of_their_lists(tmp_path: Path) -> None:
    folder = write_calvin(tmp_path / "d", RECORDINGS, SPANS, language="lang_paraphrase-MiniLM-L3-v2")
    path = folder / "lang_paraphrase-MiniLM-L3-v2" / "auto_lang_ann.npy"
    first = rbtool.convert(folder, tmp_path / "a", **SPANS_OF_TEXT)
    content = np.load(path, allow_pickle=True).item()
    for count, indices in enumerate(
        [
            np.array(SPANS, object)[:, :2].astype(int), [np.array(one[:2]) for one in SPANS],
            [list(one[:2]) for one in SPANS], [tuple(map(np.int64, one[:2])) for one in SPANS],
        ]
    ):  # fmt: skip
        content["info"]["indx"] = indices
        content["language"]["ann"] = np.array(content["language"]["ann"])
        np.save(path, content, allow_pickle=True)
        again = rbtool.convert(folder, tmp_path / f"b{count}", **SPANS_OF_TEXT)
        assert again.content_digest == first.content_digest
    shutil.copytree(path.parent, folder / "lang_all-mpnet-base-v2")
    notes = rbtool.convert(folder, tmp_path / "c", trust_pickle=True).notes
    assert any("not read: lang_paraphrase-MiniLM-L3-v2" in note for note in notes)


def test_annotations_need_trust(tmp_path: Path) -> None:
    folder = write_calvin(tmp_path / "d", RECORDINGS, SPANS)
    error = refused(folder, r"auto_lang_ann\.npy is not read", UsageError, episodes_by="annotation")
    assert "--trust-pickle" in str(error.hint)
    content = np.load(folder / "lang_annotations" / "auto_lang_ann.npy", allow_pickle=True).item()
    np.save(folder / "lang_annotations" / "auto_lang_ann.npy", content | {"x": Path("x")}, allow_pickle=True)
    refused(folder, "a pickle of more than data: it has pathlib", **SPANS_OF_TEXT)


def test_pictures_can_be_left_out_and_odd_arrays_are_named(tmp_path: Path) -> None:
    folder = write_calvin(tmp_path / "d", RECORDINGS, words=np.array(["a"]))
    for number in range(20, 27):
        np.savez(folder / f"episode_{number:07d}.npz", **calvin_frame(number, depth_static=None, words=np.array(["a"])))
    with converted(folder, tmp_path / "out", images="skip") as reader:
        names = {field.name for field in reader.fields if field.name.startswith("observation")}
    assert names == {"observation.robot_obs", "observation.scene_obs"}
    dropped = {one["key"]: one["why"] for one in rbtool.convert(folder, tmp_path / "all").dropped_keys}
    assert dropped["depth_static"] == "1 of 3 recordings do not have it"
    assert "cannot be stored" in dropped["words"]
    only = write_calvin(tmp_path / "relative", RECORDINGS, actions=None)
    with converted(only, tmp_path / "relative_out") as reader:
        assert column(reader, "action")[0].tolist() == calvin_frame(40)["rel_actions"].tolist()
        assert "there are no actions: action has the rel_actions" in reader.manifest.notes


def test_a_missing_frame_is_named_and_its_recording_can_be_left_out(tmp_path: Path) -> None:
    folder = write_calvin(tmp_path / "d", RECORDINGS, SPANS)
    for number in (22, 23):
        (folder / f"episode_{number:07d}.npz").unlink()
    message = r"episode_0000022.npz of recording 2 \(20 to 25\) is missing, and 1 more"
    refused(folder, message, CorruptDataError)
    with converted(folder, tmp_path / "out", skip_bad=True) as reader:
        assert reader.episodes.episode.tolist() == [0, 1]
    (folder / "episode_0000040.npz").write_bytes(b"PK")
    with converted(folder, tmp_path / "one", skip_bad=True) as reader:
        assert reader.episodes.episode.tolist() == [1]


def test_a_list_that_states_more_frames_than_there_can_be_takes_no_time(tmp_path: Path) -> None:
    folder = write_calvin(tmp_path / "d", RECORDINGS)
    np.save(folder / "ep_start_end_ids.npy", np.array([[20, 25], [40, 1 << 60]]))
    refused(folder, "at least 999 more of its frames", CorruptDataError)
    with converted(folder, tmp_path / "out", skip_bad=True) as reader:
        assert reader.episodes.length.tolist() == [6]


def _other(frame: int, **more: Any) -> Any:
    return lambda folder: np.savez(folder / f"episode_{frame:07d}.npz", **calvin_frame(frame, **more))


def _saved(name: str, value: Any) -> Any:
    return lambda folder: np.save(folder / name, value, allow_pickle=True)


def _annotated(**changed: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / "lang_annotations" / "auto_lang_ann.npy"
        content = np.load(path, allow_pickle=True).item()
        for place, value in changed.items():
            group, _, name = place.partition("_")
            content[group][name] = value
        np.save(path, content, allow_pickle=True)

    return change


def _as_pickles(folder: Path) -> None:
    for path in folder.glob("episode_*.npz"):
        path.rename(path.with_suffix(".pkl"))


@each(
    ("change", "message"),
    [
        (_other(23, actions=np.zeros(6)), r"actions is float64 \[6\], before float64 \[7\]"),
        (_other(23, robot_obs=np.zeros(15, "f4")), "robot_obs is float32"),
        (_other(23, scene_obs=None), "has no 'scene_obs', which the first frames have"),
        (_other(23, more=np.zeros(2)), "has an array 'more', which the first frames do not have"),
        (_other(20, actions=np.zeros(7, "f4")), "actions are float32 .7. and float64 .7. in different recordings"),
        (_saved("ep_start_end_ids.npy", np.zeros((0, 2), int)), "has no recordings"),
        (_saved("ep_start_end_ids.npy", np.zeros((2, 3), int)), "the first and the last frame of each recording"),
        (_saved("ep_start_end_ids.npy", np.array([[5, 3]])), "a recording from frame 5 to 3"),
        (_saved("ep_start_end_ids.npy", np.array([[5.0, 3.0]])), "expected whole numbers"),
        (_saved("ep_start_end_ids.npy", np.array([[5, None]])), "has elements of type object"),
        (_as_pickles, "frames as pickles"),
        (lambda folder: [path.unlink() for path in folder.glob("*.npz")], "has no frames"),
        (_annotated(language_ann=["a"]), "has 1 texts, 4 tasks and 4 spans"),
        (_annotated(language_ann=[1, 2, 3, 4]), "language/ann has values that are not text"),
        (_annotated(info_indx=[(1, 2, 3)] * 4), "spans that are not a first and a last frame"),
        (_annotated(info_indx=[(1.5, 2.5)] * 4), "spans that are not a first and a last frame"),
        (_annotated(info_indx=["x"] * 4), "spans that are not a first and a last frame"),
        (_saved("lang_annotations/auto_lang_ann.npy", np.array([1, None])), "expected one pickled object"),
        (_saved("lang_annotations/auto_lang_ann.npy", {"language": 3}), "has no texts at language/ann"),
        (_saved("scene_info.npy", np.array([None, 2])), "expected one pickled object"),
        (_saved("scene_info.npy", {"a": "b"}), "spans that are not"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    folder = write_calvin(tmp_path / "d", RECORDINGS, SPANS)
    change(folder)
    refused(folder, message, trust_pickle=True)


@each(
    ("options", "message"),
    [
        ({"episodes_by": "file"}, "--episodes-by is 'file', expected recording or annotation"),
        ({"filter_key": "test"}, "has no split 'test'"),
        ({"images": "keep"}, "--images is 'keep', expected decode or skip"),
    ],
)
def test_options_with_other_values_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(write_calvin(tmp_path / "d", RECORDINGS), message, UsageError, **options)


def test_spans_across_recordings_are_refused_and_notes_say_what_else_is_odd(tmp_path: Path) -> None:
    spans = [(24, 26, "beyond", "x"), (20, 21, "in", "y"), (43, 42, "back", "z")]
    folder = write_calvin(tmp_path / "d", RECORDINGS, spans)
    np.save(folder / "ep_lens.npy", np.array([6, 0, 5]))
    refused(folder, "annotation 0: no recording contains all its frames 24 to 26", **SPANS_OF_TEXT)
    with converted(folder, tmp_path / "out", **SPANS_OF_TEXT, skip_bad=True) as reader:
        assert reader.episodes.episode.tolist() == [1]
        assert any("the lengths in ep_lens.npy differ" in note for note in reader.manifest.notes)
    shared = write_calvin(tmp_path / "shared", [(10, 12), (12, 14)])
    with converted(shared, tmp_path / "twice") as reader:
        assert any("recordings overlap: frames of 1 recording" in note for note in reader.manifest.notes)
        assert column(reader, "info.frame").tolist() == [10, 11, 12, 12, 13, 14]
    refused(shared, "has no annotations", RbtoolError, **SPANS_OF_TEXT)
