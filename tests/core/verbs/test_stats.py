"""`stats`: the numbers, when they are remembered, and that damaged rows have none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import flip
from tensordict import TensorDict

import rbtool
from rbtool.core.errors import CorruptDataError, UsageError
from rbtool.core.format.documents import dump_json
from rbtool.core.format.files import digest_bytes
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.results import to_document
from rbtool.core.stats import FieldStats
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs.checkpoint import save
from rbtool.core.verbs.convert import convert
from rbtool.core.verbs.stats import stats

EPISODES = [(300, "terminated"), (1, "truncated"), (90, "open")]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path / "home"))


def by_name(fields: tuple[FieldStats, ...]) -> dict[str, FieldStats]:
    return {".".join(field.key): field for field in fields}


def test_statistics_agree_with_numpy(walks: Path) -> None:
    result = stats(walks)
    fields, reader = by_name(result.fields), TedReader(walks)
    assert list(fields) == [
        "action", "info.success", "observation", "next.reward", "next.done", "next.terminated", "next.truncated"
    ]  # fmt: skip
    for name, field in fields.items():
        rows = reader.read(tuple(name.split(".")), 0, 391).reshape(391, -1).astype(np.float64)
        assert field.mean == pytest.approx(rows.mean(0))
        assert field.std == pytest.approx(rows.std(0))
        assert (field.min, field.max) == (tuple(rows.min(0)), tuple(rows.max(0)))
        exact = np.quantile(rows, result.fractions, axis=0, method="lower")
        assert np.allclose(np.array(field.quantiles), exact, rtol=result.quantile_error, atol=0)
    assert fields["next.truncated"].count == (391,)


def test_a_checkpoint_of_the_dataset_has_the_same_statistics(walks: Path, tmp_path: Path) -> None:
    rbtool.checkpoint.save(walks, tmp_path / "walks.h5", form="h5")
    assert stats(tmp_path / "walks.h5").fields == stats(walks).fields


def test_statistics_are_remembered_for_these_files(walks: Path, tmp_path: Path) -> None:
    first, again, part = stats(walks), stats(walks), stats(walks, fields=["next"])
    assert (first.remembered, again.remembered, part.remembered) == (False, True, True)
    shutil.copytree(walks, tmp_path / "twin")
    assert not stats(tmp_path / "twin").remembered
    assert again.fields == first.fields
    assert set(by_name(part.fields)) == {"next.reward", "next.done", "next.terminated", "next.truncated"}
    write_walks(tmp_path / "other", [(300, "terminated")], seed=1)
    assert not stats(tmp_path / "other").remembered


@pytest.mark.parametrize("damage", [b"", b"{", b'{"version": 1}', None])
def test_damaged_remembered_statistics_are_taken_anew(walks: Path, tmp_path: Path, damage: bytes | None) -> None:
    first = stats(walks)
    (file,) = (tmp_path / "home" / ".stats").iterdir()
    document = json.loads(file.read_bytes())
    document["fields"][0]["mean"] = [1.0] * 99
    del document["digest"]
    document["digest"] = digest_bytes(dump_json(document).encode())  # the digest is right, the numbers are too many
    file.write_bytes(json.dumps(document).encode() if damage is None else damage)
    again = stats(walks)
    assert not again.remembered
    assert again.fields == first.fields


def test_statistics_with_other_quantiles_are_not_remembered(walks: Path) -> None:
    assert not stats(walks, quantiles=[0.25]).remembered
    result = stats(walks)
    assert not result.remembered
    assert len(result.fields[0].quantiles) == 7


def with_actions(walks: Path, change: Callable[[torch.Tensor], object]) -> Path:
    """Write the same dataset with other actions."""

    def function(td: TensorDict) -> TensorDict:
        change(td["action"])
        return td

    return rbtool.preprocess(walks, function, walks.with_name("changed"), num_workers=0, chunk_size=1000).path


def test_nan_and_infinite_values_are_counted_and_left_out(walks: Path) -> None:
    def change(action: torch.Tensor) -> None:
        action[3, 0], action[5, 0], action[6, 1] = np.nan, -np.inf, np.nan

    changed = with_actions(walks, change)
    rows = TedReader(changed).read(("action",), 0, 391)
    field = stats(changed, fields=["action"]).fields[0]
    assert (field.nan, field.infinite, field.count) == ((1, 1), (1, 0), (389, 390))
    assert field.mean == pytest.approx([rows[np.isfinite(rows[:, place]), place].mean() for place in (0, 1)], rel=1e-5)
    document = json.dumps(to_document(stats(changed)), allow_nan=False)
    assert json.loads(document)["kind"] == "stats"


def test_constant_dimensions_are_listed(walks: Path) -> None:
    field = stats(with_actions(walks, lambda action: action[:, 1].fill_(0.1)), fields=["action"]).fields[0]
    assert field.constant == (1,)
    assert field.std[1] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fields": ["next.observation"]}, "'next.observation' is described by 'observation'"),
        ({"fields": ["episode"]}, "the field 'episode' has no statistics"),
        ({"quantiles": [1.5]}, r"quantiles \[1.5\]: expected"),
        ({"quantiles": []}, "numbers from 0 to 1"),
    ],
)
def test_fields_without_statistics_and_impossible_quantiles_are_refused(walks, arguments: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        stats(walks, **arguments)


def test_an_unknown_field_names_similar_ones(walks: Path) -> None:
    for name, near in (("nope", ""), ("rewrd", "; did you mean 'next.reward'?")):
        with pytest.raises(UsageError) as caught:
            stats(walks, fields=[name])
        assert str(caught.value) == f"field {name!r} not found{near}"
        assert caught.value.hint.startswith("fields are action, ")


def test_fields_are_found_without_next(walks: Path) -> None:
    for name, leaf in (("reward", "next.reward"), ("done", "next.done"), ("action", "action")):
        assert [".".join(field.key) for field in stats(walks, fields=[name]).fields] == [leaf]


def test_a_raw_dataset_has_to_be_converted_first() -> None:
    with pytest.raises(UsageError, match=r"a TED dataset is needed; .* is Minari"):
        stats(Path(__file__).parents[2] / "data" / "minari" / "cartpole" / "scripted-v0")


@pytest.mark.parametrize("fields", [None, ["observation"]])
def test_damaged_rows_have_no_statistics_and_none_are_remembered(walks: Path, fields: list[str] | None) -> None:
    sound = flip(walks / "observation.memmap", 0)
    with pytest.raises(CorruptDataError, match="was changed after it was written"):
        stats(walks, fields=fields)
    assert stats(walks, fields=["action"]).fields[0].count == (391, 391)
    (walks / "observation.memmap").write_bytes(sound)
    assert not stats(walks).remembered


@pytest.mark.parametrize("damage", [lambda file: flip(file, 0), Path.unlink])
@pytest.mark.parametrize("options", [{"fields": ["action"]}, {}, {"write_lerobot": "stats.json"}])
@pytest.mark.parametrize("known", [True, False])
def test_changed_rows_have_no_statistics_even_if_some_are_remembered(
    walks: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], options: dict[str, Any], known: bool
) -> None:
    monkeypatch.chdir(walks.parent)
    if known:
        assert [stats(walks).remembered for _ in range(2)] == [False, True]
    damage(walks / "action.memmap")
    with pytest.raises(CorruptDataError, match=r"action\.memmap"):
        stats(walks, **options)
    assert not Path("stats.json").exists()


def test_statistics_for_lerobot_need_all_rows_to_be_sound(walks: Path, tmp_path: Path) -> None:
    flip(walks / "observation.memmap", 0)
    with pytest.raises(CorruptDataError, match="was changed"):
        stats(walks, fields=["action"], write_lerobot=tmp_path / "stats.json")
    assert not (tmp_path / "stats.json").exists()


def test_a_link_that_leads_nowhere_is_not_replaced(walks: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="already exists"):
        stats(walks, write_lerobot=tmp_path / "link")
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("layout", ["flat", "nested", "h5", "packed"])
@pytest.mark.parametrize("options", [{}, {"quantiles": [0.5]}])
def test_damaged_rows_of_other_layouts_have_no_statistics(
    walks: Path, tmp_path: Path, layout: str, options: dict[str, Any]
) -> None:
    made = tmp_path / "made"
    if layout == "packed":
        convert(walks, made, layout=layout)
    else:
        save(walks, made, form=layout)
    file = made if made.is_file() else max(made.rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    flip(file, file.stat().st_size // 2)
    with pytest.raises(CorruptDataError):
        stats(made, **options)


@pytest.mark.parametrize("case", ["flat_full", "nested_wrapped", "h5_partly_7of16"])
def test_statistics_of_checkpoints_of_torchrl_are_not_remembered(case: str, walks: Path, tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "data" / "torchrl_checkpoints" / case / "checkpoint"
    found = [stats(path) for _ in range(2)]
    assert [(result.content_digest, result.remembered) for result in found] == [(None, False)] * 2
    assert found[0].fields == found[1].fields
    assert found[0].fields[0].count[0] == found[0].steps
    assert not (tmp_path / "home" / ".stats").exists()


def test_fields_may_have_names_like_nan(written: Callable[..., Path]) -> None:
    names = ("nan", "inf", "-inf")
    columns = {Field((name,), "int64", (), "info"): np.arange(2) + place for place, name in enumerate(names)}
    columns |= {Field(("next", "-inf"), "float32", (), "info"): np.array([np.nan, 1], np.float32)}
    path = written(columns, [2])
    first, again = stats(path), stats(path)
    assert (first.remembered, again.remembered) == (False, True)
    assert first.fields == again.fields
    assert [field.key for field in again.fields][:3] == [(name,) for name in names]


def test_integers_beyond_float64_are_exact_and_remembered(written: Callable[..., Path]) -> None:
    values = np.array([2**53, 2**53 + 1, 2**53 + 3], np.int64)
    path = written({Field(("time",), "int64", (), "info"): values}, [3])
    for _ in range(2):
        (field,) = stats(path).fields
        assert (field.min, field.max) == ((2**53,), (2**53 + 3,))
        assert field.std == pytest.approx([np.std([0, 1, 3])], rel=1e-15)
        assert all(type(value) is int and 2**53 <= value <= 2**53 + 3 for (value,) in field.quantiles)
    document = json.loads(json.dumps(to_document(stats(path))))
    assert document["fields"][0]["max"] == [2**53 + 3]
