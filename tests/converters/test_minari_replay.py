"""`MinariExperienceReplay`: the values of Minari, from its local cache, a store, or a hub on loopback."""

from __future__ import annotations

import pickle
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hub import Hub, lay_out_hub
from machine import Machine
from minari_oracle import assert_equals_minari, flat_columns, minari_episodes

from rbtool import MinariExperienceReplay
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, NetworkError, UsageError
from rbtool.core.experience_replay import BaseDatasetExperienceReplay
from rbtool.core.format.locate import KnownNames, Resolution
from rbtool.core.format.manifest import MANIFEST, Manifest
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.samplers.uniform import SamplerWithoutReplacement
from rbtool.core.specs.bounded import Bounded, Unbounded
from rbtool.core.specs.categorical import Categorical
from rbtool.core.specs.composite import Composite
from rbtool.core.transforms.base import Compose
from rbtool.core.transforms.keyed import CatTensors
from rbtool.core.verbs.download import download
from rbtool.core.writers.base import ImmutableDatasetWriter
from rbtool.core.writers.round_robin import TensorDictRoundRobinWriter

DATA = Path(__file__).parents[1] / "data" / "minari"
DOOR, CART, GRID = "D4RL/door/human-v2", "cartpole/scripted-v0", "griddict/random-infos-v0"
ALL = sorted(path.parent.parent.relative_to(DATA).as_posix() for path in DATA.rglob("data/metadata.json"))


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage root with the door and the cart; tests read it."""
    root = tmp_path_factory.mktemp("stored")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(DATA))
        for name in (DOOR, CART):
            download("minari", name, local=True, root=root)
    return root


@pytest.fixture
def home(tmp_path: Path, stored: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it that a test may change, as the storage root; the network is forbidden."""
    root = Path(shutil.copytree(stored, tmp_path / "home"))
    monkeypatch.setenv("RBTOOL_HOME", str(root))
    monkeypatch.setenv("RBTOOL_OFFLINE", "1")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "no minari"))
    return root


@pytest.fixture
def cache(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local Minari cache that a test may change."""
    folder = Path(shutil.copytree(DATA, tmp_path / "minari cache"))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder))
    return folder


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("name", ALL)
def test_the_values_are_those_of_the_reader_and_of_minari(name: str, cache: Path, no_sockets: None) -> None:
    data = MinariExperienceReplay(name, batch_size=4, load_from_local_minari=True)
    assert assert_equals_minari(data.data_path, DATA / name) > 0
    with TedReader(data.data_path) as reader:
        rows = data[:]
        assert set(rows.keys(True, True)) == {k if len(k) > 1 else k[0] for k in (field.key for field in reader.fields)}
        for field in reader.fields:
            assert rows.get(field.key).numpy().tobytes() == reader.read(field.key, 0, len(data)).tobytes()
    assert data.sample().batch_size == (4,)


def test_rows_are_steps_in_the_form_of_ted(home: Path) -> None:
    data = MinariExperienceReplay(DOOR, 32)
    episode = minari_episodes(DATA / DOOR)[3]
    rows = data[(data[:]["episode"] == 3).nonzero().squeeze(1)]
    assert np.array_equal(rows["observation"], flat_columns(episode.observations)[()][:-1])
    assert np.array_equal(rows["next", "observation"], flat_columns(episode.observations)[()][1:])
    assert np.array_equal(rows["action"], episode.actions)
    assert np.array_equal(rows["next", "reward"][:, 0], episode.rewards)
    assert rows["next", "done"].shape == (len(episode.rewards), 1)
    assert (rows["next", "done"] == rows["next", "terminated"] | rows["next", "truncated"]).all()


def test_the_attributes_of_the_reference(home: Path, no_sockets: None) -> None:
    data = MinariExperienceReplay(DOOR, batch_size=32)
    assert isinstance(data, BaseDatasetExperienceReplay)
    assert (data.dataset_id, data.root, data.batch_size, len(data)) == (DOOR, home / "minari", 32, 6704)
    assert data.data_path == data.data_path_root == home / "minari" / DOOR
    assert (type(data.writer), data.storage.max_size) == (ImmutableDatasetWriter, 6704)
    assert data._is_downloaded()
    assert "MinariExperienceReplay" in repr(data)


def test_the_arguments_reach_the_buffer(home: Path) -> None:
    data = MinariExperienceReplay(
        CART, 8, sampler=SamplerWithoutReplacement(), prefetch=2, transform=lambda batch: batch.select("action"),
        collate_fn=lambda rows: rows, writer=TensorDictRoundRobinWriter(),
    )  # fmt: skip
    found = [row for batch in data for row in batch["index"].tolist()]
    assert sorted(found) == list(range(len(data)))
    assert set(data.sample().keys()) == {"action", "index"}
    assert type(data.writer) is TensorDictRoundRobinWriter


def test_no_edit_of_a_batch_reaches_the_disk(home: Path) -> None:
    files = {path: path.read_bytes() for path in (home / "minari" / DOOR).rglob("*") if path.is_file()}
    data = MinariExperienceReplay(DOOR, 32)
    data[:]["observation"].zero_()
    data.sample()["action"].zero_()
    data.set_("episode", torch.zeros(6704, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="doesn't allow writing"):
        data.extend(data[:2])
    assert {path: path.read_bytes() for path in files} == files
    assert MinariExperienceReplay(DOOR, 32)[:]["observation"].any()


@pytest.mark.parametrize("split", [False, True])
def test_a_pickle_opens_the_dataset_anew(home: Path, split: bool) -> None:
    data = MinariExperienceReplay(CART, 3, split_trajs=split)
    data.set_rng(torch.Generator().manual_seed(1))
    spec = data.metadata["observation_space"]
    again = pickle.loads(pickle.dumps(data))
    assert (again.data_path, again.dataset_id, again.metadata["observation_space"]) == (data.data_path, CART, spec)
    assert (again.sample() == data.sample()).all()


def test_whole_trajectories(home: Path) -> None:
    data, rows = MinariExperienceReplay(CART, 5, split_trajs=True), MinariExperienceReplay(CART, 5)[:]
    lengths = torch.bincount(rows["episode"])
    whole = data[:]
    assert whole.batch_size == (len(lengths), int(lengths.max()))
    assert torch.equal(whole["mask"].sum(1), lengths)
    assert (whole[whole["mask"]].exclude("mask", "traj_ids") == rows).all()
    batch = data.sample()
    assert batch.batch_size == batch["index"].shape == (5, int(lengths.max()))
    assert (batch.exclude("index") == whole[batch["index"][:, 0]]).all()


# Metadata --------------------------------------------------------------------------------------------


def test_metadata_holds_specs(home: Path) -> None:
    door, cart = (MinariExperienceReplay(name, 2).metadata for name in (DOOR, CART))
    assert isinstance(door["observation_space"], Unbounded)
    assert isinstance(door["action_space"], Bounded)
    assert cart["action_space"] == Categorical(2, (), dtype=torch.int64)
    assert (door["dataset_id"], door["total_episodes"], door["total_steps"]) == (DOOR, 25, 6704)
    assert (door["namespace"], door["dataset_name"], door["version"]) == ("D4RL/door", "human", 2)
    assert cart["env_spec"]["id"] == "CartPole-v1"


@pytest.mark.parametrize("name", ALL)
def test_every_row_lies_in_its_spec(name: str, cache: Path) -> None:
    data = MinariExperienceReplay(name, 2, load_from_local_minari=True)
    with TedReader(data.data_path) as reader:
        text = {field.key for field in reader.fields if field.role == "text"}
    rows, compared = data[:], 0
    known = {key if isinstance(key, tuple) else (key,) for key in rows.keys(True, True)} - text
    for what in ("action", "observation"):
        spec = data.metadata[f"{what}_space"]
        for key, leaf in spec.items(True, True) if isinstance(spec, Composite) else [((), spec)]:
            full = (what, *((key,) if isinstance(key, str) else key))
            if full in known:
                compared += 1
                assert (leaf.dtype, leaf.shape) == (rows[full].dtype, rows[full].shape[1:])
                assert leaf.is_in(rows[full]) or (name, what) == (DOOR, "action"), (
                    full
                )  # people moved beyond the bounds
    assert compared >= 2


def test_metadata_of_spaces_that_torchrl_cannot_say(cache: Path) -> None:
    data = MinariExperienceReplay("tuple/trunc-v0", 2, load_from_local_minari=True)
    assert not (data.data_path / "env_metadata.json").exists()
    assert (data.metadata["dataset_id"], data.metadata["total_steps"]) == ("tuple/trunc-v0", 48)
    assert isinstance(data.metadata["observation_space"], Composite)


# Where it lies ---------------------------------------------------------------------------------------


def test_another_root(cache: Path, tmp_path: Path) -> None:
    root = tmp_path / "elsewhere"
    data = MinariExperienceReplay(CART, 2, root=str(root), load_from_local_minari=True)
    assert (data.root, data.data_path) == (root, root / CART)
    assert [path for path in root.iterdir() if not path.name.startswith(".")] == [root / "cartpole"]
    assert not list(root.rglob("*rbtool-new*"))
    again = MinariExperienceReplay(CART, 2, root=root, download=False)
    assert (again[:] == data[:]).all()
    assert load_dataset(root / CART)[:].shape == data[:].shape


def test_the_root_may_be_set(home: Path, tmp_path: Path) -> None:
    data = MinariExperienceReplay(CART, 2)
    data.root = str(tmp_path)  # type: ignore[assignment]
    assert data.root == tmp_path


def test_a_name_that_was_resolved_before_needs_no_network(home: Path, no_sockets: None) -> None:
    KnownNames(home, "minari").put(Resolution("door-human-v1", DOOR, "words"))
    data = MinariExperienceReplay("door-human-v1", 2)
    assert (data.dataset_id, data.data_path) == ("door-human-v1", home / "minari" / DOOR)


def test_delete(home: Path) -> None:
    data = MinariExperienceReplay(CART, 4)
    data.delete()
    assert not data.data_path.exists()
    assert not data._is_downloaded()
    assert data.sample().batch_size == (4,)  # what is mapped stays readable
    with pytest.raises(DatasetNotFoundError):
        data.delete()
    assert (home / "minari" / DOOR / MANIFEST).is_file()


def test_delete_leaves_files_of_others_alone(home: Path) -> None:
    data = MinariExperienceReplay(CART, 4)
    (data.data_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt is not part of the dataset"):
        data.delete()
    assert data._is_downloaded()


def test_the_documented_example_of_preprocess(home: Path) -> None:
    data = MinariExperienceReplay(DOOR, batch_size=32)
    cat_tensors = CatTensors(in_keys=["observation", "action"], out_key="obs")
    cat_next_tensors = CatTensors(in_keys=[("next", "observation"), ("next", "reward")], out_key=("next", "obs"))
    t = Compose(cat_tensors, cat_next_tensors)

    def func(td: Any) -> Any:
        td = td.select(
            "action", "episode", ("next", "done"), ("next", "observation"), ("next", "reward"),
            ("next", "terminated"), ("next", "truncated"), "observation",
        )  # fmt: skip
        return t(td)

    with TemporaryDirectory() as tmpdir:
        new_storage = data.preprocess(func, num_workers=2, pbar=True, mp_start_method="fork", dest=tmpdir)
        rb: Any = ReplayBuffer(storage=new_storage)
        assert "TensorStorage" in repr([*map(str, type(new_storage).__mro__)])
        assert len(repr(rb)) > 0
        before, after = data[:], rb[:]
        assert torch.equal(after["obs"], torch.cat([before["action"], before["observation"]], -1))
        assert ("observation" in set(after.keys()), after["next", "obs"].shape) == (False, (6704, 40))
        assert torch.equal(after["episode"], before["episode"])
        assert len(load_dataset(tmpdir)) == 6704


# The local cache -------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["minari", "other"])
def test_the_local_cache_is_read_again_when_it_has_changed(cache: Path, tmp_path: Path, root: str) -> None:
    def opened() -> MinariExperienceReplay:
        return MinariExperienceReplay(CART, 2, root=tmp_path / root, load_from_local_minari=True)

    first = opened()
    created = (first.data_path / MANIFEST).stat().st_mtime_ns
    assert root == "other" or (opened().data_path / MANIFEST).stat().st_mtime_ns == created
    shutil.rmtree(cache / CART)
    shutil.copytree(DATA / "cartpole" / "single-episode-v0", cache / CART)
    assert Manifest.load(opened().data_path).episodes == 1
    assert len(first) == len(first[:])


def test_what_the_local_cache_does_not_hold(cache: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no dataset 'cartpole/scripted-v7'") as caught:
        MinariExperienceReplay("cartpole/scripted-v7", 2, load_from_local_minari=True)
    assert "cartpole/scripted-v0" in caught.value.hint  # type: ignore[attr-defined]


# What goes wrong -------------------------------------------------------------------------------------


def test_what_is_not_there_and_not_to_be_downloaded(home: Path, no_sockets: None) -> None:
    with pytest.raises(FileNotFoundError, match=f"{GRID} is not in {home / 'minari'}") as caught:
        MinariExperienceReplay(GRID, 2, download=False)
    assert "load_from_local_minari=True" in caught.value.hint  # type: ignore[attr-defined]


def test_what_is_not_there_and_cannot_be_downloaded(home: Path, no_sockets: None) -> None:
    with pytest.raises(NetworkError, match="RBTOOL_OFFLINE"):
        MinariExperienceReplay(GRID, 2)
    with pytest.raises(NetworkError):
        MinariExperienceReplay(DOOR, 2, download="force")
    assert len(MinariExperienceReplay(DOOR, 2)) == 6704  # it is still there


def test_the_list_asks_when_it_is_read(home: Path, no_sockets: None) -> None:
    with pytest.raises(NetworkError):
        MinariExperienceReplay.available_datasets  # noqa: B018
    assert len(MinariExperienceReplay(CART, 2)) > 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 0}, {"batch_size": "32"}, {"download": "yes"}, {"download": None}, {"prefetch": -1},
        {"dataset_id": "../out"}, {"dataset_id": ""}, {"dataset_id": "/etc"},
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense(home: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        MinariExperienceReplay(**({"dataset_id": CART, "batch_size": 2} | arguments))


def test_a_damaged_dataset_says_how_to_replace_it(home: Path) -> None:
    (home / "minari" / DOOR / "action.memmap").write_bytes(b"")
    with pytest.raises(CorruptDataError, match=r"action\.memmap") as caught:
        MinariExperienceReplay(DOOR, 2)
    assert 'download="force"' in caught.value.hint


def test_a_damaged_manifest(home: Path) -> None:
    manifest = home / "minari" / DOOR / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b"6704", b"6703"))
    with pytest.raises(CorruptDataError, match="was changed after it was written"):
        MinariExperienceReplay(DOOR, 2)


# A hub on loopback -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with Hub(lay_out_hub(DATA, tmp_path_factory.mktemp("hub"))) as server:
        yield server


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Machine:
    hub.forget()
    return Machine(hub, tmp_path)


def run(machine: Machine, script: str) -> str:
    return machine.python(f"from rbtool import MinariExperienceReplay, load_dataset\n{script}")


EXAMPLE = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    data = MinariExperienceReplay("door-human-v1", batch_size=32, download="force")
for sample in data:
    break
print([str(warning.message) for warning in caught])
print({key if isinstance(key, str) else ".".join(key): list(sample[key].shape) for key in sorted(sample.keys(True, True), key=str)})
print({str(sample[key].dtype) for key in ("observation", ("next", "reward"))}, sample["action"].dtype)
"""  # noqa: E501


def test_the_example_of_the_reference_page(machine: Machine) -> None:
    warned, shapes, dtypes = run(machine, EXAMPLE).splitlines()
    assert warned == f"['door-human-v1 not found; using {DOOR}']"
    assert eval(shapes) == {
        "next.done": [32, 1], "next.observation": [32, 39], "next.reward": [32, 1], "next.terminated": [32, 1],
        "next.truncated": [32, 1], "action": [32, 28], "episode": [32], "index": [32], "observation": [32, 39],
    }  # fmt: skip
    assert dtypes == "{'torch.float64'} torch.float32"
    before = len(machine.hub.paths(""))
    script = """
data = MinariExperienceReplay("door-human-v1", 32)
print(len(data), len(load_dataset("minari:door-human-v1")), data.data_path)
"""
    assert run(machine, script) == f"6704 6704 {machine.store / 'minari' / DOOR}\n"
    assert len(machine.hub.paths("")) == before


@pytest.mark.slow
def test_it_is_fetched_once_and_by_force_again(machine: Machine) -> None:
    script = f"""
for download in (True, True, False, "force", True):
    data = MinariExperienceReplay({CART!r}, 2, root="data", download=download)
print(data.data_path)
"""
    assert run(machine, script) == f"{machine.folder / 'data' / CART}\n"
    assert len(machine.fetched("main_data")) == 2
    assert {path.name for path in (machine.folder / "data").iterdir()} == {"cartpole", ".rbtool-store"}


@pytest.mark.slow
def test_damage_is_mended_by_force(machine: Machine) -> None:
    script = f"""
data = MinariExperienceReplay({CART!r}, 2)
(data.data_path / "action.memmap").write_bytes(b"")
print(len(MinariExperienceReplay({CART!r}, 2, download="force")[:]["action"]) == len(data))
"""
    assert run(machine, script) == "True\n"


def test_the_list_of_what_there_is(machine: Machine) -> None:
    ids = run(machine, "print(*MinariExperienceReplay.available_datasets, sep='\\n')").split()
    assert ids == sorted(path.parent.parent.relative_to(DATA).as_posix() for path in DATA.rglob("data/metadata.json"))


def test_what_the_hub_does_not_have(machine: Machine) -> None:
    script = """
try:
    MinariExperienceReplay("D4RL/door/human-v9", 2)
except FileNotFoundError as error:
    print(type(error).__name__, error.hint)
"""
    said = run(machine, script)
    assert said.startswith("DatasetNotFoundError ")
    assert DOOR in said
    assert not (machine.store / "minari" / "D4RL").exists()
