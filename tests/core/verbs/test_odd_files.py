"""Odd files: FIFOs in place of files, names that are not UTF-8, fields whose dotted names are equal."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from minari_oracle import make_episode, write_minari

import rbtool
from rbtool.core.encodings.save import save_checkpoint
from rbtool.core.errors import RbtoolError, UsageError
from rbtool.core.format.converter import safe_id
from rbtool.core.format.manifest import MANIFEST, Manifest
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import write_walks


def _ted(place: Path) -> None:
    write_walks(place, [(3, "terminated"), (2, "open")])


def _packed(place: Path) -> None:
    _ted(place.with_name("plain"))
    rbtool.convert(_minari_of(place, "hdf5"), place, layout="packed")


def _saved(form: str) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        _ted(place.with_name("plain"))
        with open_steps(place.with_name("plain")) as reader:
            save_checkpoint(reader, place, form)

    return make


def _minari_of(place: Path, form: str) -> Path:
    box = spaces.Box(-1, 1, (2,), np.float64)
    episodes = [make_episode(box, box, 3, np.random.default_rng(1))]
    return write_minari(place.parent, "made/box-v0", box, box, episodes, data_format=form)


def _minari(form: str) -> Callable[[Path], None]:
    return lambda place: shutil.move(_minari_of(place, form), place) and None


KINDS = {
    "ted": _ted, "packed": _packed, "flat": _saved("flat"), "nested": _saved("nested"), "h5": _saved("h5"),
    "hdf5": _minari("hdf5"), "arrow": _minari("arrow"), "parquet": _minari("parquet"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_no_verb_waits_for_a_fifo_in_place_of_a_file(kind: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path / "sound")
    files = [path for path in (tmp_path / "sound", *(tmp_path / "sound").rglob("*")) if path.is_file()]
    read: list[Callable[[Path], object]] = [rbtool.inspect]
    if kind in {"hdf5", "arrow", "parquet"}:
        read.append(lambda place: rbtool.convert(place, tmp_path / "made", force=True))
    else:
        read += [rbtool.check, rbtool.stats]
    refused = 0
    for file in files:
        file.rename(tmp_path / "aside")
        os.mkfifo(file)
        for use in read:
            try:
                use(tmp_path / "sound")
            except (RbtoolError, FileNotFoundError):
                refused += 1
        (tmp_path / "aside").replace(file)
    assert refused


SOURCE = Path(__file__).parents[2] / "data" / "minari" / "tuple" / "trunc-v0"
HER = {"strategy": "future", "goal_key": "a.b", "achieved_goal_key": "a.c"}
ODD = os.fsdecode(b"caf\xe9")


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A dataset in a folder whose name is not UTF-8, converted from another one."""
    shutil.copytree(SOURCE, tmp_path / ODD / "source")
    metadata = tmp_path / ODD / "source" / "data" / "metadata.json"
    document = json.loads(metadata.read_bytes()) | {"description": "half of a pair: \ud83d"}
    metadata.write_text(json.dumps(document))
    rbtool.convert(tmp_path / ODD / "source", tmp_path / ODD / "made")
    return tmp_path / ODD / "made"


def test_the_provenance_has_the_path_as_escapes(odd: Path) -> None:
    assert b"caf\\udce9" in (odd / MANIFEST).read_bytes()
    assert any(ODD in str(said) for said in Manifest.load(odd).provenance[0].arguments.values())
    assert not rbtool.check(odd).errors


def test_checkpoints_have_odd_paths(odd: Path) -> None:
    for form, library in (("flat", None), ("nested", None), ("h5", None), ("nested", "torchrl")):
        saved = odd.with_name(f"saved{ODD}{form}{library}")
        rbtool.checkpoint.save(odd, saved, form=form, for_library=library)
        with open_steps(saved) as reader:
            assert reader.manifest.steps == Manifest.load(odd).steps


def test_exports_and_results_of_preprocess_have_odd_paths(odd: Path) -> None:
    for library in ("npz", "parquet", "h5", "minari"):
        assert rbtool.export(odd, odd.with_name(f"out{ODD}{library}"), to=library).path.exists()
    made = rbtool.preprocess(odd, dest=odd.with_name("cast"), operations={"clip_reward": "-99:99"}, num_workers=0)
    assert made.steps == Manifest.load(odd).steps


def test_an_id_with_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(UsageError, match="is not a dataset id"):
        safe_id("a\ud800/x-v0")


@pytest.fixture
def twins(written) -> Path:
    """A dataset with two fields called `a.b`, two called `x.a.b`, and one called `a.c`."""
    rows, columns = np.arange(8, dtype=np.float32), {}
    for lead in ((), ("next",)):
        for number, key in enumerate([("a", "b"), ("a.b",)]):
            columns[Field((*lead, *key), "float32", (2, 2, 3), "observation")] = np.zeros((8, 2, 2, 3), np.float32)
            columns[Field((*lead, "x", *key), "float32", (), "info")] = rows // 4 + number
    columns[Field(("a.c",), "float32", (), "info")] = rows // 4
    columns[Field(("next", "reward"), "float32", (1,), "reward")] = rows[:, None]
    columns[Field(("action",), "float32", (1,), "action")] = rows[:, None]
    return written(columns, (4, 4))


@pytest.mark.parametrize(
    "command",
    [
        lambda path, out: rbtool.plot(path, fields=["x.a.b"]),
        lambda path, out: rbtool.plot(path, fields=["x.a.b[0]"]),
        lambda path, out: rbtool.split(path, out, train=0.5, val=0.5, by="x.a.b"),
        lambda path, out: rbtool.sample(path, 2, sampler="prioritized", priority="x.a.b"),
        lambda path, out: rbtool.sample(path, 2, frame_stack=2, frame_keys=["a.b"]),
        lambda path, out: rbtool.frames(path, out / "frames.png", episode=0, field="a.b"),
        lambda path, out: rbtool.stats(path, fields=["a.b"]),
        lambda path, out: rbtool.preprocess(path, None, out, operations={"exclude": "a.b"}),
        lambda path, out: rbtool.preprocess(path, "her.py:f", out, hindsight=HER),
        lambda path, out: rbtool.convert(path, out, compress=["a.b=zstd"], layout="packed"),
    ],
    ids=[
        "plot", "plot-column", "split", "priority", "frame-key", "frames", "stats", "exclude", "hindsight", "compress",
    ],
)  # fmt: skip
def test_a_name_of_two_fields_is_refused_by_every_verb(twins: Path, tmp_path: Path, command) -> None:
    with pytest.raises(UsageError, match=r"means both \(.*'a', 'b'\) and \(.*'a\.b',?\)") as caught:
        command(twins, tmp_path / "out")
    assert "rename one of them" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_names_of_one_field_are_taken_by_every_verb(twins: Path, tmp_path: Path) -> None:
    assert rbtool.plot(twins, fields=["a.c"]).fields
    assert {one.key for one in rbtool.stats(twins, fields=["a"]).fields} == {("a", "b")}
    left = rbtool.preprocess(twins, None, tmp_path / "out", operations={"exclude": "a"}).path
    with open_steps(left) as reader:
        assert {("a.b",), ("a.c",), ("x", "a", "b")} < {field.key for field in reader.fields}
        assert ("a", "b") not in {field.key for field in reader.fields}
    stacked = rbtool.sample(twins, 2, frame_stack=2, seed=0)
    assert [one.shape for one in stacked.fields if one.key == "a.b"] == [(2, 2, 2, 6)] * 2, "all images are stacked"


@pytest.mark.usefixtures("homeless")
def test_a_path_needs_no_home(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(3, "open")])
    assert rbtool.inspect(tmp_path / "walks").name == str(tmp_path / "walks")
    assert not rbtool.stats(tmp_path / "walks").remembered


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize(
    ("ask", "hint"),
    [
        (lambda: rbtool.list(), "set RBTOOL_HOME, or name the folder: --root DIR"),
        (lambda: rbtool.cache.ls(), "set RBTOOL_HOME, or name the folder: --root DIR"),
        (lambda: rbtool.inspect("minari:a-v0"), "set RBTOOL_HOME, or name the folder: --root DIR"),
        (lambda: rbtool.download("minari", "a-v0", local=True, root="here"), "set MINARI_DATASETS_PATH, or HOME"),
        (lambda: rbtool.inspect("~/walks"), "set HOME, or write the path in full"),
        (lambda: rbtool.repair("~/walks"), "set HOME, or write the path in full"),
    ],
)
def test_verbs_that_need_a_home_say_so(ask: Callable[[], object], hint: str) -> None:
    with pytest.raises(UsageError, match="HOME is not set, and the system has no home folder") as caught:
        ask()
    assert caught.value.hint == hint
