"""Streams of Open X-Embodiment: each episode once, the rows of a stored dataset, and states that continue exactly."""

from __future__ import annotations

import atexit
import functools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub import Fault, Hub
from processes import Interpreter
from shard_files import random_openx, write_openx
from tensordict import TensorDictBase

import rbtool
from rbtool import OpenXExperienceReplay
from rbtool.converters.openx import shards
from rbtool.core.errors import CorruptDataError, FormatError, SchemaError, UsageError
from rbtool.core.transforms.keyed import channels_first

DATA = Path(__file__).parents[1] / "data" / "openx"
LENGTHS = ((5, 3), (9, 4), (), (6,), (3, 7, 8))
STEP = {"rlds_last": "step"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams in this process share converted shards in a cache of this module; archives are cut into several parts."""
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path_factory.getbasetemp() / "streams"))
    monkeypatch.setattr(shards, "PIECE_BYTES", 8 << 10)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("openx")
    write_openx(found / "toy", list(parts()))
    return found


def parts() -> Iterator[list[dict[str, Any]]]:
    episodes = random_openx([length for shard in LENGTHS for length in shard])
    for shard in LENGTHS:
        yield [episodes.pop(0) for _ in shard]


def streamed(root: Path, batch_size: int | None = 4, **options: Any) -> OpenXExperienceReplay:
    return OpenXExperienceReplay("toy", batch_size, root=root, streaming=True, **STEP, **options)


def same(one: TensorDictBase, other: TensorDictBase) -> bool:
    """Whether two batches have the same entries; text is compared as lists of strings."""
    if set(one.keys(True, True)) != set(other.keys(True, True)):
        return False
    for key in one.keys(True, True):
        a, b = one[key], other[key]
        if isinstance(a, torch.Tensor):
            if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a, b):
                return False
        elif list(a) != list(b):
            return False
    return True


@pytest.mark.parametrize("name", ["toy", "nyu_toy"])
def test_a_stream_gives_the_batches_of_the_stored_dataset(root: Path, tmp_path: Path, name: str) -> None:
    source = root if name == "toy" else DATA
    path = tmp_path / "openx" / name
    rbtool.convert(source / name, path, trust_pickle=True, **STEP)
    stored = OpenXExperienceReplay(name, 4, root=tmp_path / "openx", download=True, shuffle=False)
    stream = OpenXExperienceReplay(name, 4, root=source, streaming=True, shuffle=False, **STEP)
    pairs = list(zip(stored, stream, strict=True))
    assert sum(len(one) for one, _ in pairs) == len(stored)
    decoded = rbtool.Compose(rbtool.DecodeText(), channels_first)
    local = rbtool.load_dataset(path, 4, streaming=True, seed=3, transform=decoded)
    stream = OpenXExperienceReplay(name, 4, root=source, streaming=True, seed=3, **STEP)
    pairs += list(zip(local, stream, strict=True))
    for one, other in pairs:
        assert same(one.exclude("index"), other.exclude("index"))
    assert pairs[0][0]["observation", "image"].shape[:2] == (4, 3)


@pytest.mark.parametrize("batch_size", [1, 4, 100, None])
def test_a_shuffled_pass_has_each_step_once(root: Path, batch_size: int | None) -> None:
    stream = streamed(root, batch_size, seed=5)
    first, second = ([batch["index"] for batch in stream] for _ in range(2))
    ordered = torch.cat([batch["index"] for batch in streamed(root, batch_size, shuffle=False)])
    assert len(ordered) == 41
    for found in (first, second):
        assert torch.equal(torch.cat(found).sort().values, ordered)
    assert not torch.equal(torch.cat(first), ordered)
    assert not torch.equal(torch.cat(first), torch.cat(second))


def test_whole_episodes_come_without_a_batch_size(root: Path) -> None:
    for batch in streamed(root, None, seed=1):
        assert len(batch["episode"].unique()) == 1
        assert batch["is_init"].flatten().tolist() == [True] + [False] * (len(batch) - 1)
        assert batch["next", "done"].flatten().tolist() == [False] * (len(batch) - 1) + [True]


def test_it_is_the_stream_of_load_dataset(root: Path, hub: Hub, tmp_path: Path) -> None:
    done = ran(hub, tmp_path / "home", {}, {"plain": True})
    one, other = map(json.loads, done.stdout.splitlines())
    assert one == other


@pytest.mark.parametrize(
    "options", [{}, {"slice_len": 2}, {"num_slices": 2}, {"slice_len": 4, "pad": 0}, {"shuffle": False}]
)
def test_the_same_seed_gives_the_same_batches_and_a_state_continues(root: Path, options: dict[str, Any]) -> None:
    options = {"seed": 7, **options}
    stream = streamed(root, 4, **options)
    seen = [(batch, stream.state_dict()) for _ in range(2) for batch in stream]
    again = streamed(root, 4, **options)
    assert all(same(one, again.sample()) for one, _ in seen)
    for at in range(0, len(seen) - 1, 5):
        other = streamed(root, 4, **options)
        other.load_state_dict(seen[at][1])
        assert all(same(batch, other.sample()) for batch, _ in seen[at + 1 :])


def test_a_checkpoint_in_a_folder_continues(root: Path, tmp_path: Path) -> None:
    stream, other = streamed(root, 3, seed=1), streamed(root, 3, seed=1)
    for _ in range(4):
        stream.sample()
    stream.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    assert all(same(stream.sample(), other.sample()) for _ in range(20))


def test_a_state_of_another_stream_is_refused(root: Path, tmp_path: Path) -> None:
    stream = streamed(root, 4, seed=1)
    stream.sample()
    write_openx(tmp_path / "toy", [random_openx((3, 4))])
    for other in (streamed(tmp_path, 4, seed=1), streamed(root, 4, seed=1, shuffle=False)):
        with pytest.raises(SchemaError, match="the state "):
            other.load_state_dict(stream.state_dict())
        other.sample()


def test_slices_are_of_one_episode_and_marked(root: Path) -> None:
    for batch in streamed(root, 6, slice_len=2, seed=3):
        slices = batch.reshape(-1, 2)
        assert (slices["episode"][:, 0] == slices["episode"][:, 1]).all()
        assert slices["next", "truncated"][..., 0].tolist() == [[False, True]] * len(slices)
        assert slices["is_init"][..., 0].tolist() == [[True, False]] * len(slices)
        assert len(slices["episode"][:, 0].unique()) == len(slices)


def test_short_episodes_in_slices(root: Path) -> None:
    with pytest.raises(SchemaError, match=r"has [23] steps, but slices have 4"):
        list(streamed(root, 8, slice_len=4, seed=1))
    taken = list(streamed(root, 8, slice_len=4, seed=1, strict_length=False))
    assert sum(map(len, taken)) < 36
    padded = list(streamed(root, 8, slice_len=4, seed=1, pad=-1))
    for batch in padded:
        mask = batch["collector", "mask"]
        assert (batch["action", "gripper"][~mask] == -1).all()
        assert (batch["episode"][~mask] == -1).all()
        assert {text for text, real in zip(batch["language_instruction"], mask, strict=True) if not real} <= {""}
    assert sum(int((~one["collector", "mask"]).sum()) for one in padded) == 2 + 1 + 2


def test_arguments_that_contradict_each_other(root: Path) -> None:
    refused: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"streaming": True, "download": True}, ValueError), ({"num_slices": 2, "slice_len": 2}, ValueError),
        ({"split_trajs": True}, NotImplementedError), ({"download": True, "pad": 0.0}, RuntimeError),
        ({"replacement": True}, RuntimeError), ({"rlds_last": "both"}, UsageError), ({"seed": -1}, ValueError),
        ({"download": True, "shuffle": False, "replacement": True}, RuntimeError),
        ({"slice_len": 2, "sampler": rbtool.RandomSampler()}, ValueError),
        ({"sampler": rbtool.RandomSampler()}, UsageError), ({"download": True, "skip_bad": True}, UsageError),
    ]  # fmt: skip
    for options, kind in refused:
        with pytest.raises(kind):
            OpenXExperienceReplay("toy", 4, root=root, **options)


def test_a_stream_has_no_length_and_no_folder(root: Path) -> None:
    stream = streamed(root)
    for call, kind in (
        (lambda: len(stream), TypeError), (lambda: stream.data_path, RuntimeError),
        (lambda: stream.extend(stream.sample()), RuntimeError),
    ):  # fmt: skip
        with pytest.raises(kind):
            call()
    assert stream
    assert repr(stream) == "OpenXExperienceReplay('toy', batch_size=4, streaming=True)"


def test_an_episode_that_differs_is_named_or_left_out(tmp_path: Path) -> None:
    episodes = random_openx((3, 4, 5, 3, 4, 5))
    for step in episodes[4]["steps"]:
        del step["language_embedding"]
    write_openx(tmp_path / "toy", [episodes[:2], episodes[2:]])
    with pytest.raises(FormatError, match=r"toy_00004.data.pickle: language_embedding must be in all episodes"):
        list(streamed(tmp_path, None, shuffle=False))
    stream = streamed(tmp_path, None, shuffle=False, skip_bad=True)
    with pytest.warns(UserWarning, match="left out of shard"):
        assert [batch["episode"][0].item() for batch in stream] == [0, 1, 2, 3, 5]
    assert len(stream.storage.left_out) == 1


def test_a_missing_or_cut_shard_is_an_error_or_left_out(root: Path, tmp_path: Path) -> None:
    write_openx(tmp_path / "toy", [random_openx((3,), side=40) for _ in range(3)])
    last = tmp_path / "toy" / "toy_00002.tar"
    last.write_bytes(last.read_bytes()[:6000])
    with pytest.raises(CorruptDataError, match=r"toy_00002.tar is cut"):
        list(streamed(tmp_path, shuffle=False))
    (tmp_path / "toy" / "toy_00001.tar").unlink()
    with pytest.raises(CorruptDataError, match=r"a shard is missing: toy_00001.tar"):
        streamed(tmp_path)
    stream = streamed(tmp_path, shuffle=False, skip_bad=True)
    with pytest.warns(UserWarning, match="is cut"):
        assert sum(map(len, stream)) == 3
    assert len(stream.storage.left_out) == 2


def test_last_steps_are_the_same_in_all_shards(tmp_path: Path) -> None:
    first = random_openx((9,) * 12, filler=True)
    write_openx(tmp_path / "toy", [first, random_openx((3, 5), filler=True)])
    stream = OpenXExperienceReplay("toy", 100, root=tmp_path, streaming=True, shuffle=False)
    assert sum(map(len, stream)) == 12 * 8 + 2 + 4


SCRIPT = """
import json, sys, rbtool, rbtool.converters.openx.shards, rbtool.core.transforms.keyed
rbtool.converters.openx.shards.PIECE_BYTES = 8 << 10
for options in json.loads(sys.argv[1]):
    if options.pop("plain", False):
        parts = [rbtool.DecodeText(), rbtool.core.transforms.keyed.channels_first]
        stream = rbtool.load_dataset("openx:toy", 4, streaming=True, seed=3, rlds_last="step", trust_pickle=True,
                                     transform=rbtool.Compose(*parts))
    else:
        stream = rbtool.OpenXExperienceReplay("toy", 4, seed=3, rlds_last="step", **options)
    print(json.dumps([[one["episode"].tolist(), one["observation", "image"].long().sum().item()] for one in stream]))
"""


def ran(hub: Hub, home: Path, *options: dict[str, Any], offline: str = "") -> subprocess.CompletedProcess[str]:
    limits = {"RBTOOL_OFFLINE": offline, "RBTOOL_RETRIES": "2:0.01", "OMP_NUM_THREADS": "1", "RBTOOL_TIMEOUT": "5"}
    limits["RBTOOL_HOME"] = str(home / "streams")
    return interpreter().run(SCRIPT, json.dumps(options or [{}]), environment={**hub.environment(home), **limits})


@functools.cache
def interpreter() -> Interpreter:
    """Runs the script in processes that have imported torch and tensordict alone: the hub's client reads variables."""
    running = Interpreter("torch", "tensordict")
    atexit.register(running.close)
    return running


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "hub" / "jxu124" / "OpenX-Embodiment"
    write_openx(folder / "toy", list(parts()))
    (folder / "OpenX-Embodiment.py").write_text("raise SystemExit('the loader script was run')")
    with Hub(tmp_path / "hub", lfs_threshold=1000) as served:
        yield served


def test_a_stream_from_the_hub_is_that_of_its_shards(hub: Hub, root: Path, tmp_path: Path) -> None:
    choices: list[dict[str, Any]] = [{}, {"shuffle": False}, {"slice_len": 2}]
    done = ran(hub, tmp_path / "home", *choices)
    assert done.returncode == 0, done.stderr
    for options, line in zip(choices, done.stdout.splitlines(), strict=True):
        local = streamed(root, 4, seed=3, **options)
        expected = [[one["episode"].tolist(), one["observation", "image"].long().sum().item()] for one in local]
        assert json.loads(line) == expected
    assert not hub.paths(r"OpenX-Embodiment\.py")


def test_what_the_hub_refuses_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    hub.faults = [Fault(r"GET .*/resolve/.*tar", "status:403", 1000)]
    assert "AuthorisationError" in ran(hub, tmp_path / "home").stderr.splitlines()[-2]


def test_a_stream_stays_offline_where_the_network_is_forbidden(hub: Hub, tmp_path: Path) -> None:
    hub.forget()
    done = ran(hub, tmp_path / "home", offline="1")
    assert "NetworkError" in done.stderr
    assert hub.paths("") == []


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("workers", "ranks"), [(0, 1), (2, 1), (2, 2)])
def test_workers_and_ranks_have_every_step_once(root: Path, workers: int, ranks: int) -> None:
    found: list[int] = []
    for rank in range(ranks):
        dataset = rbtool.StreamDataset(streamed(root, 4), seed=9, rank=rank, world_size=ranks)
        loader: Any = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers)
        found += [row for batch in loader for row in batch["index"].tolist()]
    assert sorted(found) == torch.cat([one["index"] for one in streamed(root, 4, shuffle=False)]).tolist()
