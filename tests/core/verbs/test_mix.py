"""`mix`: the file that it writes, what is noticed when it is opened, and the batches of mixtures."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import flip
from torch.utils.data import DataLoader

import rbtool
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError, SchemaError, UsageError
from rbtool.core.format.mixture import read_mixture
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs.mix import weighted_names


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with datasets `data/a` of 7 steps and `data/b` of 5, and one stored as `minari:cart-v0`."""
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path / "home"))
    (tmp_path / "work" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    write_walks(Path("data/a"), [(4, "open"), (3, "terminated")])
    write_walks(Path("data/b"), [(5, "open")])
    write_walks(tmp_path / "home" / "minari" / "cart-v0", [(2, "open")])
    return Path.cwd()


def names_in(path: str) -> list[str]:
    return [member.name for member in read_mixture(Path(path)).dataset]


def mix(*datasets: str, to: str = "m.toml", **options: Any) -> Any:
    """Mix `data/a` and `data/b`, unless others are given."""
    return rbtool.mix(datasets or ["data/a", "data/b"], to, **options)


def test_paths_are_relative_to_the_file_and_ids_stay(work):
    Path("mixes/new").mkdir(parents=True)
    result = rbtool.mix(["data/a", str(work / "data/b"), "minari:cart-v0"], "mixes/new/m.toml", p=[2, 1, 1])
    assert names_in("mixes/new/m.toml") == ["../../data/a", str(work / "data/b"), "minari:cart-v0"]
    assert [one.share for one in result.members] == [0.5, 0.25, 0.25]
    assert (result.steps, result.episodes) == (14, 4)
    shutil.copytree(work / "data", work / "else" / "data")
    shutil.copytree(work / "mixes", work / "else" / "mixes")
    Path("else/mixes/new/m.toml").unlink()
    shutil.move("mixes/new/m.toml", "else/mixes/new/m.toml")
    shutil.rmtree("data/a")
    assert rbtool.inspect("else/mixes/new/m.toml").members[0].path == work / "else/data/a"


def test_links_are_followed_when_the_file_is_opened(work):
    Path("newest").symlink_to("data/a")
    Path("deep/er").mkdir(parents=True)
    Path("short").symlink_to("deep/er")
    mix("newest", "data/b", to="short/m.toml")
    assert names_in("deep/er/m.toml") == ["../../newest", "../../data/b"]
    assert rbtool.inspect("short/m.toml").steps == 12
    Path("m.toml").symlink_to("deep/er/m.toml")
    assert rbtool.inspect("m.toml").steps == 12


def test_an_equal_mixture_is_already_there_and_another_is_replaced_with_force(work):
    mix()
    before = Path("m.toml").stat().st_mtime_ns
    assert mix().already_there
    with pytest.raises(UsageError, match=r"m.toml already exists and is another mixture"):
        mix(p=[1, 2])
    assert Path("m.toml").stat().st_mtime_ns == before
    mix(p=[1, 2], force=True)
    assert [one.weight for one in rbtool.inspect("m.toml").members] == [1, 2]
    assert sorted(path.name for path in work.iterdir()) == ["data", "m.toml"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("text", ["[tool]\nname = 'mine'\n", "", "\0"])
def test_a_file_of_another_kind_is_never_replaced(work, text, force):
    Path("m.toml").write_text(text)
    with pytest.raises(UsageError, match="already exists and is not a mixture of datasets; left unchanged"):
        mix(force=force)
    assert Path("m.toml").read_text() == text


def test_a_dry_run_writes_nothing(work):
    result = mix(to="new/m.toml", p="size", temperature=2.0, dry_run=True)
    assert result.dry_run
    assert [round(one.share, 3) for one in result.members] == [0.542, 0.458]
    assert [path.name for path in work.iterdir()] == ["data"]


@pytest.mark.parametrize(
    ("datasets", "options", "error", "words"),
    [
        (["data/a"], {}, UsageError, "one dataset to mix, expected two or more"),
        ([], {}, UsageError, "no dataset to mix, expected two or more"),
        ("data/a", {}, UsageError, "one dataset to mix"),
        (None, {"dest": "data/b"}, UsageError, "the destination comes last, and data/b does not end in .toml"),
        (None, {"dest": "data/a/m.toml"}, UsageError, "is inside the dataset"),
        (["data/a", "data/c"], {}, DatasetNotFoundError, "data/c not found"),
        (["data/a", "minari:c"], {}, DatasetNotFoundError, "minari:c is not in"),
        (["data/a", "data"], {}, FormatError, "is neither a dataset nor a checkpoint"),
        (None, {"p": [1, -1]}, UsageError, "a weight is -1, expected a number from 0"),
        (None, {"p": [1, float("nan")]}, UsageError, "a weight is nan"),
        (None, {"p": [0, 0]}, UsageError, "all weights are 0"),
        (None, {"p": [1]}, UsageError, "p has 1 weights, expected one for each of 2"),
        (None, {"p": "sise"}, UsageError, "weights are 'sise', expected numbers, 'size' or a score"),
        (None, {"temperature": 0}, UsageError, "the temperature is 0"),
        (None, {"schema": "onion"}, UsageError, "no schema policy 'onion'; did you mean"),
    ],
)
def test_impossible_mixtures_are_refused_and_not_written(work, datasets, options, error, words):
    given = ["data/a", "data/b"] if datasets is None else datasets
    with pytest.raises(error, match=words):
        rbtool.mix(given, **{"dest": "m.toml"} | options)
    assert sorted(work.rglob("*.toml")) == []


def test_a_dataset_without_steps_is_not_mixed(work):
    write_walks(Path("empty"), [])
    with pytest.raises(UsageError, match="empty has no steps: there is nothing to draw from it"):
        mix("data/a", "empty")


def test_weights_that_are_no_numbers_missing_or_ambiguous_are_refused(work):
    with pytest.raises(UsageError, match="the weight of data/a is 'half', expected a number"):
        weighted_names(["data/a:half", "data/b:1"])
    with pytest.raises(UsageError, match="data/b has no weight, but others have one"):
        weighted_names(["data/a:1", "data/b"])
    write_walks(Path("data/a:1"), [(5, "open")])
    with pytest.raises(UsageError, match="data/a:1 is ambiguous: it is a dataset, and so is data/a"):
        weighted_names(["data/a:1", "data/b:1"])


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["data/a", "data/b"], (["data/a", "data/b"], None)),
        (["data/a:0.5", "data/b:3e-1"], (["data/a", "data/b"], [0.5, 0.3])),
        (["data/a:.5", "minari:cart-v0:1"], (["data/a", "minari:cart-v0"], [0.5, 1.0])),
        (["minari:cart-v0", "data/b"], (["minari:cart-v0", "data/b"], None)),
        (["minari:1464", "data/b"], (["minari:1464", "data/b"], None)),
        (["data/a:-1", "data/b:inf"], (["data/a", "data/b"], [-1.0, float("inf")])),
        (["data/x:1:2", "data/b:1"], (["data/x:1", "data/b"], [2.0, 1.0])),
    ],
)
def test_weights_are_read_after_names(work, tmp_path, words, found):
    write_walks(tmp_path / "home" / "minari" / "1464", [(2, "open")])
    assert weighted_names(words) == found


def test_a_changed_dataset_is_noticed_until_the_file_is_written_again(work):
    mix()
    rbtool.preprocess("data/b", operations={"clip_reward": "0:0"}, dest="data/c")
    shutil.rmtree("data/b")
    shutil.move("data/c", "data/b")
    for open_it in (rbtool.load_dataset, rbtool.inspect, rbtool.sample):
        with pytest.raises(CorruptDataError, match=r"data/b changed since .*m.toml was written"):
            open_it("m.toml")
    assert rbtool.check("m.toml").errors == 1
    mix(force=True)
    assert len(rbtool.load_dataset("m.toml", 8).sample()) == 8
    text = Path("m.toml").read_text()
    Path("m.toml").write_text("\n".join(line for line in text.split("\n") if "content_digest" not in line))
    write_walks(Path("other"), [(1, "open")])
    shutil.rmtree("data/b")
    shutil.move("other", "data/b")
    assert rbtool.inspect("m.toml").steps == 8


def test_a_changed_mixture_in_a_mixture_is_noticed(work):
    mix(to="in.toml")
    mix("in.toml", "data/a", to="out.toml")
    assert [one.datasets for one in rbtool.inspect("out.toml").members] == [2, 1]
    mix(to="in.toml", p=[1, 3], force=True)
    with pytest.raises(CorruptDataError, match=r"in.toml changed since .*out.toml was written"):
        rbtool.load_dataset("out.toml")


def test_a_missing_dataset_and_a_cycle_are_named(work):
    mix()
    rbtool.mix(["m.toml", "data/b"], "n.toml")
    shutil.move("data/b", "data/c")
    with pytest.raises(DatasetNotFoundError, match=r"m.toml: .*data/b not found"):
        rbtool.load_dataset("m.toml")
    Path("m.toml").write_text(Path("m.toml").read_text().replace("data/b", "n.toml"))
    with pytest.raises(FormatError, match=r"m.toml contains itself: m.toml → n.toml → m.toml"):
        rbtool.load_dataset("m.toml")
    with pytest.raises(FormatError, match="contains itself"):
        rbtool.mix(["n.toml", "data/a"], "n.toml", force=True)


def test_deeply_nested_mixtures_are_refused(work, monkeypatch):
    monkeypatch.setattr("rbtool.core.datasets.mixtures._MOST", 50)
    rbtool.mix(["data/a", "data/a"], "m0.toml")
    text = "\n".join(line for line in Path("m0.toml").read_text().split("\n") if "digest" not in line)
    for number in range(1, 20):
        Path(f"m{number}.toml").write_text(text.replace("data/a", f"m{number - 1}.toml"))
    with pytest.raises(FormatError, match=r"is nested in .* other mixtures"):
        rbtool.load_dataset("m19.toml")
    with pytest.raises(FormatError, match="has more than 50 datasets"):
        rbtool.inspect("m6.toml")


def test_fields_that_differ_are_refused_unless_the_policy_allows_them(work):
    rbtool.preprocess("data/b", operations={"exclude": "info"}, dest="less")
    rbtool.preprocess("data/b", operations={"cast": "action=float64"}, dest="wide")
    with pytest.raises(SchemaError, match=r"differ in 2 fields: info.success: int32 \[\] in data/a, nothing in less"):
        mix("data/a", "less")
    for schema in ("error", "union", "intersect"):
        with pytest.raises(SchemaError, match=r"action: float32 \[2\] in data/a, float64 \[2\] in wide"):
            mix("data/a", "wide", schema=schema)
    mix("data/a", "less", schema="union")
    Path("m.toml").write_text(Path("m.toml").read_text().replace("union", "error"))
    with pytest.raises(SchemaError, match=r"the datasets of .*m.toml differ in 2 fields"):
        rbtool.load_dataset("m.toml")
    assert rbtool.check("m.toml").errors == 1


def test_rewards_over_n_steps_are_mixed_with_others_only_on_request(work):
    rbtool.preprocess("data/a", operations={"n_step": 3, "gamma": 0.9}, dest="three")
    with pytest.raises(SchemaError, match=r"next.reward is a sum over n steps in three, and of one step in the others"):
        mix("data/a", "three")
    result = mix("data/a", "three", schema="intersect")
    assert "next.reward is a sum over n steps in three, and of one step in the others" in result.notes


@pytest.mark.parametrize("schema", ["union", "intersect"])
def test_sample_describes_the_fields_of_the_batch(work, schema):
    rbtool.preprocess("data/b", operations={"exclude": "info"}, dest="less")
    mix("data/a", "less", schema=schema)
    rbtool.mix(["m.toml", "data/b"], "n.toml", schema="intersect")
    keys = [field.key for field in rbtool.sample("m.toml", 8).fields]
    assert ("schema_mask.info.success" in keys) == ("info.success" in keys) == (schema == "union")
    assert {field.key for field in rbtool.sample("n.toml", 9).fields} == set(keys)  # the mask is continued


@pytest.mark.parametrize(
    ("schema", "left", "masked"),
    [("union", {("a.b",), ("a", "b"), ("c",)}, {("a", "b"), ("c",)}), ("intersect", {("a.b",)}, set())],
)
def test_fields_with_one_name_in_dots_are_two_fields(work, written, schema, left, masked):
    for name, keys in {"one": [("a.b",), ("a", "b"), ("c",)], "two": [("a.b",)]}.items():
        columns = {Field(key, "int64", (), "info"): np.arange(3) for key in [*keys, ("index",)]}
        columns[Field(("next", "reward"), "float32", (1,), "reward")] = np.zeros((3, 1), np.float32)
        written(columns, (3,)).rename(name)
    rbtool.mix(["one", "two"], "m.toml", schema=schema)
    batch = rbtool.load_dataset("m.toml", batch_size=16).sample()
    keys = {(key,) if isinstance(key, str) else key for key in batch.keys(True, True)}
    assert {key for key in keys if key[0] in ("a", "a.b", "c")} == left
    assert {key[1:] for key in keys if key[0] == "schema_mask"} == masked
    names = sorted(".".join(key) for key in left | {("schema_mask", *key) for key in masked})
    found = sorted(field.key for field in rbtool.sample("m.toml", 8).fields)
    assert [name for name in found if name.startswith(("a.b", "c", "schema_mask"))] == names


def test_check_names_the_dataset_that_is_damaged(work):
    mix()
    assert (rbtool.check("m.toml").errors, rbtool.check("m.toml").steps) == (0, 12)
    flip(Path("data/b/observation.memmap"), 0)
    result = rbtool.check("m.toml")
    assert result.errors
    assert all(finding.message.startswith("data/b: ") for finding in result.findings)


def test_verbs_for_one_dataset_refuse_a_mixture_and_the_parts_of_a_split(work):
    mix()
    rbtool.split("data/a", "parts", train=0.5, val=0.5)
    for path, words in (("m.toml", r"is a mixture of 2 datasets \(data/a, data/b\)"), ("parts", "holds the parts of")):
        for run in (
            lambda path: rbtool.stats(path),
            lambda path: rbtool.convert(path, "x"),
            lambda path: rbtool.convert(path, "x", format="table"),
            lambda path: rbtool.export(path, "x", to="npz"),
            lambda path: rbtool.merge([path, "data/a"], "x"),
            lambda path: rbtool.split(path, "x", train=0.5, val=0.5),
            lambda path: rbtool.diff("data/a", path),
            lambda path: rbtool.preprocess(path, operations={"select": "action"}, dest="x"),
            lambda path: rbtool.checkpoint.save(path, "x", form="h5"),
            lambda path: rbtool.checkpoint.load(path, "x"),
            lambda path: rbtool.inspect(path, episode=0),
        ):
            with pytest.raises(UsageError, match=words):
                run(path)
    for run in (rbtool.load_dataset, rbtool.sample, rbtool.check):
        with pytest.raises(UsageError, match="holds the parts of a split, expected one of them: train, val"):
            run("parts")
    assert not Path("x").exists()


def test_inspect_shows_the_parts_of_a_split_and_their_problems(work):
    write_walks(Path("many"), [(n + 1, "open") for n in range(10)])
    rbtool.split("many", "parts", train=0.6, val=0.2, test=0.2, seed=3, stratify="return")
    result = rbtool.inspect("parts")
    assert [(part.name, part.episodes, part.problem) for part in result.parts] == [
        ("train", 6, None), ("val", 2, None), ("test", 2, None),
    ]  # fmt: skip
    assert (result.seed, result.stratify, result.steps) == (3, "return", 55)
    shutil.rmtree("parts/test")
    os.truncate(next(Path("parts/train").rglob("*observation*.memmap")), 8)
    shutil.rmtree("parts/val")
    rbtool.convert("many", "parts/val")
    problems = [part.problem for part in rbtool.inspect("parts").parts]
    assert problems == ["damaged", "changed since the split", "missing"]
    Path("parts/split.json").write_text(json.dumps({"made": 3}))
    with pytest.raises(RbtoolError, match=r"split.json has .* expected"):
        rbtool.inspect("parts")


# `load_dataset` of a mixture.

WALKS = {
    "ragged": [(4, "open"), (1, "terminated"), (3, "truncated"), (1, "both")],
    "ones": [(1, "terminated"), (1, "open"), (1, "truncated")],
    "long": [(30, "open")],
}


@pytest.fixture(params=["ted", "packed"])
def mixed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A mixture of three datasets, of which one or none is packed, with the weights 5, 3 and 0."""
    for name, walks in WALKS.items():
        write_walks(tmp_path / name, walks)
    rbtool.convert(tmp_path / "long", tmp_path / "packed", layout=request.param)
    rbtool.mix([tmp_path / name for name in ("ragged", "packed", "ones")], tmp_path / "m.toml", p=[5, 3, 0])
    return tmp_path / "m.toml"


def members_of(path: Path) -> list[rbtool.ReplayBuffer]:
    return [rbtool.load_dataset(member.path) for member in rbtool.inspect(path).members]


def test_every_row_is_a_row_of_its_source(mixed):
    members, buffer = members_of(mixed), rbtool.load_dataset(mixed, 64, seed=1)
    batch = buffer.sample()
    assert batch.batch_size == torch.Size([64])
    for row, source, index in zip(batch, batch["source_id"].tolist(), batch["index", "index"].tolist(), strict=True):
        found = members[source][index]
        for key in found.keys(True, True):
            assert torch.equal(row[key], found[key]), key
    counts = np.bincount(batch["source_id"], minlength=3)
    assert counts.tolist() == [40, 24, 0]


def test_a_seed_determines_the_batches_of_a_mixture_and_of_sample(mixed):
    one, other = (rbtool.load_dataset(mixed, 16, seed=7, prefetch=ahead) for ahead in (None, 3))
    first = one.sample()
    assert tuple(first["index", "index"].tolist()) == rbtool.sample(mixed, 16, seed=7).indices
    assert torch.equal(other.sample()["observation"], first["observation"])
    assert torch.equal(other.sample()["observation"], one.sample()["observation"])


@pytest.mark.parametrize("slice_len", [1, 3, 8])
def test_slices_of_a_mixture_never_cross_an_end(mixed, slice_len):
    sampler = rbtool.SliceSampler(slice_len=slice_len, strict_length=False, pad_output=True)
    batch = rbtool.load_dataset(mixed, 8 * slice_len, seed=0, sampler=sampler).sample()
    episodes, sources = (batch[key].reshape(-1, slice_len) for key in ("episode", "source_id"))
    steps = batch["index", "index"].reshape(-1, slice_len)
    assert (episodes == episodes[:, :1]).all()
    assert (sources == sources[:, :1]).all()
    assert set(steps.diff(dim=1).unique().tolist()) <= {0, 1}
    given = rbtool.sample(mixed, 8 * slice_len, seed=0, sampler="slice", slice_len=slice_len, pad=True)
    assert given.indices == tuple(batch["index", "index"].tolist())
    assert sum(one.length + one.padding for one in given.slices) == 8 * slice_len


def test_each_dataset_of_a_mixture_has_a_sampler_of_its_own(mixed):
    sampler = rbtool.SamplerWithoutReplacement()
    buffer = rbtool.load_dataset(mixed, 4, sampler=sampler, seed=0)
    assert len({id(buffer[number].sampler) for number in range(3)}) == len(buffer) == 3
    with pytest.raises(UsageError, match="has weights of its own"):
        rbtool.load_dataset(mixed, 4, sampler=rbtool.SamplerEnsemble(sampler, sampler, sampler))
    buffer = rbtool.load_dataset(mixed, 30, seed=0)
    buffer.p = [0, 0, 1]
    assert set(buffer.sample()["source_id"].tolist()) == {2}
    buffer = rbtool.OfflineToOnlineReplayBuffer(mixed, online_capacity=10, batch_size=8, seed=0)
    assert buffer.sample().batch_size == torch.Size([8])


def test_load_dataset_takes_the_same_arguments_for_a_mixture(mixed):
    collated = rbtool.load_dataset(mixed, 8, seed=0, collate_fn=lambda rows: rows.select("action")).sample()
    assert set(collated.keys()) == {"action", "index", "source_id"}
    changed = rbtool.load_dataset(mixed, 8, seed=0, transform=lambda rows: rows.set("n", rows["action"].sum(-1)))
    assert changed.sample()["n"].shape == (8,)
    rbtool.load_dataset(mixed, verify=True)
    with pytest.raises(UsageError, match="split_trajs pads all trajectories to one length"):
        rbtool.load_dataset(mixed, split_trajs=True)
    with pytest.raises(UsageError, match="batch_size"):
        rbtool.load_dataset(mixed, batch_size=0)


def test_a_mixture_without_a_seed_draws_different_batches_in_workers(mixed):
    buffer = rbtool.load_dataset(mixed, 32)
    batches = islice(DataLoader(buffer, batch_size=None), 2)
    drawn = [batch["index", "index"].tolist() for batch in batches]
    assert drawn[0] != drawn[1]
    copy = pickle.loads(pickle.dumps(buffer))
    assert copy.sample()["source_id"].bincount().tolist() == [20, 12]


def test_a_mixture_in_a_mixture_keeps_its_shares(mixed, tmp_path):
    write_walks(tmp_path / "new", [(9, "open")])
    rbtool.mix([mixed, tmp_path / "new"], tmp_path / "n.toml", p=[1, 1])
    batch = rbtool.load_dataset(tmp_path / "n.toml", 160, seed=0).sample()
    assert np.bincount(batch["source_id"], minlength=4).tolist() == [50, 30, 0, 80]
    assert rbtool.sample(tmp_path / "n.toml", 160, seed=0).sources == tuple(batch["source_id"].tolist())
