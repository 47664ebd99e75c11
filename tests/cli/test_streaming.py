"""`--streaming` of `sample` and `inspect`: datasets on a hub, of which the shards that are needed are fetched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_commands import folder_of_commands
from hub import Fault, Hub
from lerobot_files import random_takes
from lerobot_files import write_dataset as write_lerobot
from openx_files import random_episodes, write_shards
from terminal import type_line

import rbtool
from rbtool.core.format import shards
from rbtool.core.open_steps import open_dataset
from rbtool.core.testing.datasets import write_walks

from .conftest import Shell

EPISODES = [(6, "terminated"), (1, "truncated"), (9, "open"), (31, "both")] * 3
STEPS = sum(length for length, _ in EPISODES)
TED, LEROBOT, OPENX = "hf://org/ted", "lerobot:org/arm", "openx:toy"
TRUST = "--trust-pickle --rlds-last step"


@pytest.fixture(scope="module")
def environment(forked: dict[str, str]) -> dict[str, str]:
    """Commands are forked: there are many of them."""
    return forked


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of repositories: a dataset of rbtool, one of LeRobot, and one of Open X-Embodiment."""
    root = tmp_path_factory.mktemp("repositories")
    write_walks(root / "org" / "ted", EPISODES)
    write_lerobot(root / "org" / "arm", random_takes([4, 7]), images="none")
    openx = root / "jxu124" / "OpenX-Embodiment"
    write_shards(openx / "toy", [random_episodes([5, 3])])
    shutil.copy(Path(__file__).parents[1] / "data" / "openx" / "README.md", openx / "README.md")
    return root


@pytest.fixture
def remote(repositories: Path, tmp_path: Path) -> Iterator[Hub]:
    with Hub(repositories, lfs_threshold=1000) as served:
        yield served


@pytest.fixture
def places(remote: Hub, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": remote.url, "RBTOOL_HOME": str(tmp_path / "root"), "RBTOOL_RETRIES": "2:0.01"}


@pytest.mark.parametrize(
    ("dataset", "options", "shards", "steps", "key"),
    [
        (TED, "", 1, STEPS, "observation"),
        (LEROBOT, "", 1, None, "observation.state"),
        (OPENX, TRUST, 1, None, "observation.image"),
    ],
)
def test_inspect_shows_how_much_there_is_and_the_fields(
    dataset: str, options: str, shards: int, steps: int | None, key: str, shell: Shell, places: dict[str, str]
) -> None:
    done = shell(f"rbtool inspect {dataset} --streaming {options} --json", **places)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["kind"], found["shards"], found["steps"]) == ("stream", shards, steps)
    assert key in {field["key"] for field in found["fields"]}
    assert found["shard_steps"] >= found["shard_episodes"] > 0
    assert f"{shards} shard" in shell(f"rbtool inspect {dataset} --streaming {options}", **places).stdout


@pytest.mark.parametrize(("dataset", "options"), [(TED, ""), (LEROBOT, ""), (OPENX, TRUST)])
def test_sample_draws_from_a_remote(dataset: str, options: str, shell: Shell, places: dict[str, str]) -> None:
    line = f"rbtool sample {dataset} --streaming {options} -n 3 --seed 2"
    done = shell(f"{line} --json", **places)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["n"], found["sampler"], len(set(found["indices"]))) == (3, "without-replacement", 3)
    assert shell(f"{line} -q", **places).stdout.split() == [str(one) for one in found["indices"]]
    assert f"3 steps of {found['path']}" in shell(line, **places).stdout


@pytest.mark.parametrize("slices", [False, True])
def test_the_steps_are_those_of_the_first_batch_of_training(
    slices: bool, repositories: Path, shell: Shell, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 64 << 20)  # other tests have smaller ones
    sampler = rbtool.StreamSliceSampler(slice_len=6) if slices else None
    stored = rbtool.load_dataset(repositories / "org" / "ted", 24, streaming=True, seed=5, sampler=sampler)
    rows = stored.sample()["index"].reshape(-1)
    asked = "--sampler slice-without-replacement --slice-len 6" if slices else ""
    done = shell(f"rbtool sample {TED} --streaming -n 24 --seed 5 {asked} --json", **places)
    found = json.loads(done.stdout)
    assert found["indices"] == rows.tolist()
    with open_dataset(repositories / "org" / "ted") as reader:
        which = reader.episodes.index_of_step(rows.numpy())
        assert found["episodes"] == reader.episodes.episode[which].tolist()
        assert found["steps"] == (rows.numpy() - reader.episodes.start[which]).tolist()
    assert len(found["slices"]) == (4 if slices else 0)
    assert all(one["last"] - one["first"] == 5 for one in found["slices"])


@pytest.mark.parametrize("verb", ["inspect", "sample"])
def test_a_terminal_shows_a_stream(verb: str, places: dict[str, str], environment: dict[str, str]) -> None:
    line = f"{folder_of_commands()}/rbtool {verb} {TED} --streaming"
    code, shown = type_line(line, Path.cwd(), environment | places)
    assert code == 0, shown
    assert "hf://org/ted@" in shown
    assert "next.reward" in shown


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (f"sample {TED} --cache-size 2GB", 2, "--cache-size is set, expected with --streaming only"),
        (f"inspect {TED} --cache-size 2GB", 2, "--cache-size is set, expected with --streaming only"),
        ("sample cartpole --trust-pickle", 2, "--trust-pickle is set, expected with --streaming only"),
        (f"sample {TED} --streaming --cache-size much", 2, "'much' is no size"),
        (f"sample {TED} --streaming --sampler prioritized", 2, "the sampler is prioritized, expected"),
        (f"sample {TED} --streaming --verify", 2, "--verify is for datasets on this disk"),
        (f"sample {TED} --streaming --slice-len 4", 2, "is no option of the sampler without-replacement"),
        (f"inspect {TED} --streaming --episode 3", 2, "--episode is for datasets on this disk"),
        (f"sample {TED} --streaming --cache-size 1kB", 2, "give it a larger cache_size"),
        (f"sample {OPENX} --streaming", 2, "--trust-pickle"),
        ("inspect hf://org/missing --streaming", 4, "the hub shows no dataset repository org/missing"),
        (f"sample {TED} --streaming --offline", 5, "needs the network"),
    ],
)
def test_what_cannot_be_is_one_sentence(line: str, code: int, said: str, shell: Shell, places: dict[str, str]) -> None:
    done = shell(f"rbtool {line}", **places)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert said in done.stderr
    assert "internal error" not in done.stderr
    assert sum(one.startswith("error: ") for one in done.stderr.splitlines()) == 1


def test_access_that_is_revoked_is_one_sentence_and_the_next_run_goes_on(
    remote: Hub, shell: Shell, places: dict[str, str]
) -> None:
    remote.faults.append(Fault("GET .*memmap", "status:401", times=99))
    done = shell(f"rbtool sample {TED} --streaming --json", **places)
    assert json.loads(done.stdout)["error"]["type"] == "AuthorisationError"
    remote.faults.clear()
    assert shell(f"rbtool sample {TED} --streaming -n 4 -q", **places).returncode == 0


def test_several_streams_are_inspected_one_after_the_other(shell: Shell, places: dict[str, str]) -> None:
    done = shell(f"rbtool inspect {TED} hf://org/missing {LEROBOT} --streaming", **places)
    assert done.returncode == 4
    assert done.stdout.count("   stream   ") == 2
