"""`load_dataset(…, streaming=True)`: from a hub on loopback, and from a copy on this disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import streaming
import torch
from cases import each
from hub import Fault, Hub
from streaming import batches_of, environment_of, in_process
from waiting import HANG, wait_until

import rbtool
from rbtool import Sequence
from rbtool.core.errors import SchemaError
from rbtool.core.remote import shards
from rbtool.core.testing.datasets import write_packed, write_walks
from rbtool.core.transforms.windows import StoredFrameStack

EPISODES: Any = [(6, "terminated"), (1, "truncated"), (9, "open"), (31, "both")] * 12
STEPS = sum(length for length, _ in EPISODES)
TED = {"dataset": "hf://org/ted"}
LAYOUTS = ("ted", "compressed", pytest.param("packed", marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of repositories, `org/<layout>`, with the same steps."""
    root = tmp_path_factory.mktemp("hub")
    write_walks(root / "org" / "ted", EPISODES)
    rbtool.convert(root / "org" / "ted", root / "org" / "packed", layout="packed")
    packed = root / "org" / "compressed"
    rbtool.convert(root / "org" / "ted", packed, layout="packed", compress=["observation=zstd:1"])
    return root


@pytest.fixture
def hub(datasets: Path) -> Iterator[Hub]:
    with Hub(datasets, lfs_threshold=1000) as served:
        yield served


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return environment_of(hub, tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stream_has_the_batches_of_the_dataset(datasets: Path, environment: dict[str, str], layout: str) -> None:
    asked: list[Any] = [
        {}, {"slices": True}, {"skip": 5}, {"window": 1, "seed": 9}, {"cache_size": "100kB", "window": 2},
    ]  # fmt: skip
    found = in_process(environment, *({"dataset": f"hf://org/{layout}"} | one for one in asked))
    expected = [batches_of(str(datasets / "org" / "ted"), **one) for one in asked]
    assert found == expected
    assert found[0]["shards"] > 6
    assert sorted(step for batch in found[0]["steps"] for step in batch) == list(range(STEPS))
    assert found[2]["steps"] == found[0]["steps"][5:]


def test_rows_shards_and_ensembles_are_those_of_the_dataset(datasets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rbtool.load_dataset(datasets / "org" / "ted")
    batches = list(rbtool.load_dataset(datasets / "org" / "packed", 16, streaming=True, seed=0))
    assert sum(map(len, batches)) == STEPS
    for batch in batches:
        assert (batch.exclude("index") == whole.storage.get(batch["index"])).all()
    stream = rbtool.load_dataset(datasets / "org" / "ted", 8, streaming=True, seed=0)
    other = rbtool.load_dataset(datasets / "org" / "packed", 8, seed=0)
    both = rbtool.ReplayBufferEnsemble(stream, other, batch_size=8)
    assert both.sample().numel() == 8
    with pytest.raises(rbtool.UsageError, match="expected with streaming=True only"):
        rbtool.load_dataset(datasets / "org" / "ted", cache_size="1GB")
    monkeypatch.setattr(shards, "SHARD_BYTES", 1)
    one_each = rbtool.load_dataset(datasets / "org" / "ted", streaming=True)
    assert len(one_each.storage.shards) == len(EPISODES)
    monkeypatch.setattr(shards, "SHARD_BYTES", 1 << 30)
    assert len(rbtool.load_dataset(datasets / "org" / "ted", streaming=True).storage.shards) == 1


def test_a_script_that_ends_with_an_open_stream_is_silent(environment: dict[str, str]) -> None:
    code = "import rbtool; kept = list(stream := rbtool.load_dataset('hf://org/ted', 8, streaming=True, seed=0))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "Exception ignored" not in done.stderr


def test_a_second_stream_fetches_nothing_again(hub: Hub, environment: dict[str, str]) -> None:
    in_process(environment, TED)
    before = len(hub.requests)
    in_process(environment, TED)
    assert {asked.path.split("?")[0].split("/")[1] for asked in hub.requests[before:]} == {"api"}
    assert any(asked.status == 206 for asked in hub.requests[:before])


@pytest.mark.parametrize(
    "kind", ["cut:1500", "norange", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("reset", "status:503"))]
)
def test_a_network_that_is_interrupted_changes_nothing(datasets, hub, environment, kind) -> None:
    hub.faults.append(Fault("GET .*memmap", kind, times=6))
    assert in_process(environment, TED)[0] == batches_of(str(datasets / "org" / "ted"))
    assert not hub.faults[0].times


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault("GET .*observation.memmap", "status:401", times=99), "AuthorisationError"),
        pytest.param(Fault("GET .*memmap", "status:404", times=99), "StaleListing", marks=pytest.mark.slow),
        (Fault("GET .*memmap", "status:429", times=99, headers={"Retry-After": "9999"}), "NetworkError"),
        pytest.param(Fault("GET .*memmap", "reset", times=99), "NetworkError", marks=pytest.mark.slow),
        pytest.param(Fault("GET /api", "status:401", times=99), "AuthorisationError", marks=pytest.mark.slow),
    ],
)
def test_a_remote_that_refuses_is_one_sentence(datasets, hub, environment, fault: Fault, error: str) -> None:
    hub.faults.append(fault)
    found = in_process(environment, TED, TED)
    assert [one.get("error") for one in found] == [error, error]
    assert "\n" not in found[0]["message"]
    hub.faults.clear()
    assert in_process(environment, TED)[0] == batches_of(str(datasets / "org" / "ted"))


def test_a_repository_without_a_dataset_is_not_found(hub: Hub, environment: dict[str, str], tmp_path: Path) -> None:
    hub.root = tmp_path / "hub"
    (hub.root / "org" / "empty").mkdir(parents=True)
    (hub.root / "org" / "empty" / "README.md").write_text("nothing")
    hub.rescan()
    found = in_process(environment, {"dataset": "hf://org/missing"}, {"dataset": "hf://org/empty"})
    assert [one["error"] for one in found] == ["DatasetNotFoundError"] * 2


@each("dataset", ["hf://org", "hf://org/a/b", "hf:///a", "hf://org/../x"])
def test_an_invalid_address_is_refused(dataset: str) -> None:
    with pytest.raises(rbtool.UsageError, match="not the address of a dataset"):
        rbtool.load_dataset(dataset, streaming=True)


def test_a_cache_that_is_too_small_is_refused(environment: dict[str, str]) -> None:
    found = in_process(environment, TED | {"window": 6, "cache_size": "100kB"})[0]
    assert found["error"] == "UsageError"
    assert "a smaller window" in found["hint"]
    assert in_process(environment | {"RBTOOL_OFFLINE": "1"}, TED)[0]["error"] == "NetworkError"


# The cache ------------------------------------------------------------------------------------------


def bytes_below(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("shards/*/**/*") if path.is_file())


@pytest.mark.slow
def test_the_cache_stays_within_its_size(environment: dict[str, str], tmp_path: Path) -> None:
    found = in_process(environment, TED | {"window": 1, "cache_size": "400kB"})
    assert "error" not in found[0]
    assert 0 < bytes_below(tmp_path / "root") <= 400_000


def test_the_environment_states_the_size_of_the_cache(environment: dict[str, str], tmp_path: Path) -> None:
    asked = TED | {"window": 1}
    found = in_process(environment | {"RBTOOL_CACHE_SIZE": "400kB"}, asked)
    assert "error" not in found[0]
    assert 0 < bytes_below(tmp_path / "root") <= 400_000
    refused = in_process(environment | {"RBTOOL_CACHE_SIZE": "much"}, asked)[0]
    assert (refused["error"], "RBTOOL_CACHE_SIZE" in refused["message"] + refused["hint"]) == ("UsageError", True)


def test_the_cache_is_listed_and_pruned(environment: dict[str, str], tmp_path: Path) -> None:
    in_process(environment, TED | {"limit": 3})
    root = tmp_path / "root"
    [entry] = [one for one in rbtool.cache.ls(root=root).entries if one.what == "stream"]
    assert (entry.in_use, entry.prunable) == (False, True)
    assert 0 < entry.bytes < 5_000_000
    assert [one.what for one in rbtool.cache.prune(root=root).removed] == ["stream"]
    assert not list((root / ".streams").glob("*"))


_COPIED = """
import pickle, rbtool
copy = pickle.dumps(rbtool.load_dataset("hf://org/ted", 16, streaming=True).storage.shards)
assert rbtool.cache.prune().removed
print(pickle.loads(copy).take(0).rows)
"""


@pytest.mark.slow
def test_a_copy_of_a_stream_that_was_pruned_fetches_again(environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", _COPIED], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, int(done.stdout or 0) > 0) == (0, True), done.stderr


@pytest.mark.slow
def test_two_processes_share_a_cache(datasets: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, streaming.__file__, json.dumps([TED | {"cache_size": "400kB", "window": 2}])]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=HANG)[0] for process in running]
    assert answers[0] == answers[1]
    assert "error" not in answers[0]


@pytest.mark.parametrize("times", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_process_leaves_no_half_shard(datasets, hub, environment, times) -> None:
    command = [sys.executable, streaming.__file__, json.dumps([TED])]
    for _ in range(times):
        hub.faults.append(Fault("GET .*reward.memmap", "stall:60"))
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: not hub.faults[-1].times, "a request for the rewards")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        hub.faults.clear()
    assert in_process(environment, TED)[0] == batches_of(str(datasets / "org" / "ted"))


# Arguments ------------------------------------------------------------------------------------------


@each(
    ("options", "message"),
    [
        ({"mode": "r+"}, "mode is set, expected only without streaming=True"),
        ({"split_trajs": True}, "split_trajs is set"),
        ({"verify": True}, "verify is set"),
        ({"sampler": rbtool.RandomSampler()}, "the sampler is a RandomSampler"),
        ({"cache_size": "many"}, "is not a size"),
        ({"cache_size": 0}, "is not a size"),
    ],
)
def test_options_that_a_stream_does_not_have_are_refused(datasets: Path, options: Any, message: str) -> None:
    with pytest.raises(rbtool.UsageError, match=message):
        rbtool.load_dataset(datasets / "org" / "ted", streaming=True, **options)


def test_a_state_of_another_dataset_is_refused(datasets: Path, tmp_path: Path) -> None:
    write_walks(tmp_path / "other", EPISODES[:-1])
    state = rbtool.load_dataset(datasets / "org" / "ted", 4, streaming=True).state_dict()
    other = rbtool.load_dataset(tmp_path / "other", 4, streaming=True)
    with pytest.raises(rbtool.SchemaError, match="the state belongs to other data"):
        other.load_state_dict(state)


def test_a_stream_has_no_windows_and_no_queries(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(9, "terminated"), (3, "truncated")])
    with pytest.raises(RuntimeError, match="which a stream does not keep"):
        rbtool.load_dataset(tmp_path / "walks", 8, sample_unit=Sequence(2), streaming=True)
    with pytest.raises(NotImplementedError, match="only the rows of the next batches"):
        rbtool.load_dataset(tmp_path / "walks", 8, streaming=True).query()


# Stacks of frames ----------------------------------------------------------------------------------


WALKS: Any = [(9, "terminated"), (3, "truncated"), (1, "both"), (1, "terminated"), (12, "open"), (4, "terminated")]
SAMPLERS: dict[str, Callable[[], Any]] = {
    "steps": lambda: rbtool.StreamSampler(window=3),
    "slices": lambda: rbtool.StreamSliceSampler(slice_len=3, strict_length=False, window=2),
    "batched": lambda: rbtool.StreamSliceSampler(slice_len=3, batched=True),
}


@pytest.fixture
def walks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same episodes in both layouts, and packed with compressed observations; a shard has a few of them."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 500)
    write_walks(tmp_path / "ted", WALKS)
    write_packed(tmp_path / "ted", tmp_path / "small", "observation=zstd:3")
    write_packed(tmp_path / "ted", tmp_path / "packed")
    return tmp_path


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("layout", ["ted", "packed", "small"])
@each("padding", ["same", "constant"])
def test_frames_are_stacked_as_in_the_dataset(walks: Path, layout: str, sampler: str, padding: Any) -> None:
    def opened(*batch_size: int, **options: Any) -> Any:
        frames = StoredFrameStack(4, "observation", dim=-2, padding=padding)
        return rbtool.load_dataset(walks / layout, *batch_size, transform=frames, **options)

    stream, whole = opened(6, streaming=True, sampler=SAMPLERS[sampler](), seed=0), opened()
    assert len(stream.storage.shards) > 2
    batches = list(stream)
    assert len(batches) >= (5 if sampler == "steps" else 2)
    for batch in batches:
        rows = whole[batch["index"].reshape(-1)]
        for key in ("observation", ("next", "observation")):
            assert torch.equal(batch[key].reshape(-1, 4, 3), rows[key])


def test_a_stream_has_no_other_episodes_than_its_own(walks: Path) -> None:
    frames = StoredFrameStack(4, "observation", dim=-2, traj_key="action")
    with pytest.raises(SchemaError, match="a stream knows the episodes from its shards"):
        next(iter(rbtool.load_dataset(walks / "ted", 8, streaming=True, transform=frames, seed=0)))


def test_frames_of_slices_of_a_stream_are_stacked_in_the_batch(walks: Path) -> None:
    sampler = rbtool.StreamSliceSampler(slice_len=5, batched=True, strict_length=False, shuffle=False)
    options: Any = {"streaming": True, "sampler": sampler, "transform": rbtool.FrameStack(2, "observation", dim=-1)}
    batches, whole = list(rbtool.load_dataset(walks / "ted", 10, **options)), rbtool.load_dataset(walks / "ted")
    assert batches
    for batch in batches:
        assert batch.batch_size[1] == 5
        frames = whole.storage.get(batch["index"].reshape(-1))["observation"].reshape(*batch.batch_size, 3)
        assert torch.equal(batch["observation"][..., 3:], frames)
        real = batch["collector", "mask"][:, 1:]
        assert torch.equal(batch["observation"][:, 1:, :3][real], frames[:, :-1][real])
