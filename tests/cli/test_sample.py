"""`rbtool sample`: steps, slices and speed; and `--streaming` of `sample` and `inspect`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import each
from commands import folder_of_commands
from hub import Fault, Hub
from lerobot_files import random_takes
from lerobot_files import write_dataset as write_lerobot
from processes import type_line
from shard_files import random_openx, write_openx

import rbtool
from rbtool.core.open_steps import open_dataset
from rbtool.core.remote import shards
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs.options import SAMPLERS, SampleOptions

from .conftest import Shell


def test_samplers_are_completed_and_listed_by_help(shell):
    done = shell("python -m rbtool", _RBTOOL_COMPLETE="bash", _RBTOOL_LINE="rbtool sample --sampler ")
    names = done.stdout.split()
    assert len(names) == 6
    assert " ".join(names) in re.sub(r"\s+", " ", shell("rbtool sample --help").stdout.replace(",", ""))


def test_choices_are_those_of_the_library():
    described = SampleOptions.described()
    assert [*described["sampler"].choices] == [*SAMPLERS]
    for weight, anchor in zip([*described["weight"].choices, None], described["anchor"].choices, strict=True):
        SampleOptions("", sampler="slice", slice_len=1, weight=weight, anchor=anchor)


def test_steps_are_shown_with_their_episodes(shell):
    line = "rbtool sample ./cartpole -n 3 --sampler without-replacement --no-shuffle --seed 5"
    lines = shell(line).stdout.split("\n")
    assert lines[0].endswith("3 steps of cartpole   seed 5   without-replacement")
    assert lines[1] == "drawn    episode:step 0:0 0:1 0:2"


def test_batch_size_is_another_name_of_n(shell):
    numbers = [shell(f"rbtool sample ./cartpole {option} 5 --seed 5 -q").stdout for option in ("-n", "--batch-size")]
    assert numbers[0] == numbers[1]
    assert len(numbers[0].splitlines()) == 5


def test_slices_are_shown_with_their_ends_and_padding(shell):
    lines = shell("rbtool sample ./cartpole --sampler slice --slice-len 8 -n 64 --seed 5").stdout.split("\n")
    assert lines[0] == "64 steps in 8 slices of cartpole   seed 5   slice"
    slices = re.fullmatch(r"drawn    episode:first-last((?: \d+:\d+-\d+\(8\)){6}) …", lines[1])
    assert slices is not None, lines[1]
    for first, last in re.findall(r":(\d+)-(\d+)", slices[1]):
        assert int(last) - int(first) == 7
    line = "rbtool sample ./cartpole --sampler slice --slice-len 1000 --pad --seed 5"
    lines = shell(line).stdout.split("\n")
    found = re.fullmatch(r"drawn    episode:first-last \d+:0-(\d+)\((\d+)\+(\d+)\)", lines[1])
    assert found is not None, lines[1]
    last, length, padding = map(int, found.groups())
    assert (last, length + padding) == (length - 1, 1000)
    (one,) = json.loads(shell(f"{line} --json").stdout)["slices"]
    assert (one["length"], one["padding"]) == (length, padding)


def test_time_measures_the_speed(shell):
    line = "rbtool sample ./cartpole --time --seconds 0.05 -n 32"
    lines = shell(line).stdout.split("\n")
    assert re.fullmatch(r"speed    [\d,]+ batch(es)?/s · [\d,]+ steps/s · [\d.]+ [kMG]?B/s", lines[-4]), lines[-4]
    timing = json.loads(shell(f"{line} --json").stdout)["timing"]
    assert timing["steps_per_second"] == pytest.approx(32 * timing["batches_per_second"])
    assert 0 < timing["median_us"] <= timing["p95_us"]


def test_quiet_prints_the_rate_or_the_indices(shell):
    done = shell("rbtool sample ./cartpole --time --seconds 0.05 -n 32 -q")
    assert re.fullmatch(r"[1-9]\d* steps/s\n", done.stdout)
    drawn = shell("rbtool sample ./cartpole -n 3 --sampler without-replacement --no-shuffle -q --seed 5")
    assert (drawn.stdout, drawn.stderr, done.stderr) == ("0\n1\n2\n", "", "")


def test_a_document_without_time_has_no_timing(shell):
    document = json.loads(shell("rbtool sample ./cartpole -n 2 --json --seed 1").stdout)
    assert (document["timing"], document["slices"], document["sampler"]) == (None, [], "random")
    assert (document["options"], len(document["indices"])) == ({}, 2)


@each(
    ("words", "sentence"),
    [
        ("--sampler shuffled", "invalid value for '--sampler': 'shuffled' is not one of random, without-replacement,"),
        ("--seconds soon", "invalid value for '--seconds': 'soon' is not a number"),
        ("--no-shuffle", "--no-shuffle is not an option of the sampler random"),
        ("--sampler prioritized --alpha -1", "--alpha is -1.0, expected a finite number from 0"),
        ("--sampler without-replacement --drop-last -n 99999", "batch_size is 99999, expected at most"),
    ],
)
def test_impossible_options_are_refused(words, sentence, shell):
    done = shell(f"rbtool sample ./cartpole {words}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {sentence}")


def test_frames_are_stacked(shell):
    found = json.loads(shell("rbtool sample ./cartpole -n 8 --seed 5 --frame-stack 4 --json").stdout)
    shapes = {field["key"]: field["shape"] for field in found["fields"]}
    assert shapes["observation"] == shapes["next.observation"] == [8, 4, 4]
    assert found["options"] == {"frame_stack": 4}
    plain = json.loads(shell("rbtool sample ./cartpole -n 8 --seed 5 --json").stdout)
    assert (found["indices"], found["steps"]) == (plain["indices"], plain["steps"])


def test_windows_have_masks_and_no_next_observation(shell):
    words = "rbtool sample ./cartpole -n 8 --seed 5"
    found = json.loads(shell(f"{words} --window action=0:8 --window observation=-1:1 --json").stdout)
    shapes = {field["key"]: field["shape"] for field in found["fields"]}
    assert shapes["action"][:2] == shapes["is_pad.action"] == [8, 8]
    assert shapes["observation"] == [8, 2, 4]
    assert "next.observation" not in shapes
    assert "next.reward" in shapes
    assert found["options"] == {"window": ["action=0:8", "observation=-1:1"]}
    plain = json.loads(shell(f"{words} --json").stdout)
    assert (found["indices"], found["steps"]) == (plain["indices"], plain["steps"])


@each(
    ("words", "message"),
    [
        ("--window 0:8", "--window is '0:8', expected KEY=A:B"),
        ("--window action=0:8 --window action=0:4", "--window is 'action=0:8', expected KEY=A:B, once per key"),
        ("--window actoin=0:8", "actoin is not in the data, so it cannot have a window; did you mean 'action'?"),
        ("--window action=0:1000000", "the window of action reaches 999,999 steps away, and the longest episode has"),
        ("--window action=8:8", "the window is '8:8', which has no steps"),
        ("--window action=0s:1s", "the number of steps per second is unknown"),
        ("--window action=0:8 --frame-stack 4", "--window and --frame-stack are both set"),
        ("--frame-stack 0", "--frame-stack is 0, expected 1 or more"),
        ("--frame-key observation", "--frame-key needs --frame-stack"),
        ("--frame-stack 4 --frame-key action", "field 'action' not found"),
    ],
)
def test_impossible_windows_and_stacks_are_refused(shell, words, message):
    done = shell(f"rbtool sample ./cartpole {words}")
    assert message in re.sub(r"\s+", " ", done.stderr)
    assert done.returncode == 2


# `--streaming` of `sample` and `inspect`.

EPISODES = [(6, "terminated"), (1, "truncated"), (9, "open"), (31, "both")] * 3
STEPS = sum(length for length, _ in EPISODES)
TED, LEROBOT, OPENX = "hf://org/ted", "lerobot:org/arm", "openx:toy"
TRUST = "--trust-pickle --rlds-last step"


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of repositories: a dataset of rbtool, one of LeRobot, and one of Open X-Embodiment."""
    root = tmp_path_factory.mktemp("repositories")
    write_walks(root / "org" / "ted", EPISODES)
    write_lerobot(root / "org" / "arm", random_takes([4, 7]), images="none")
    openx = root / "jxu124" / "OpenX-Embodiment"
    write_openx(openx / "toy", [random_openx([5, 3])])
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
        (TED, "", 1, STEPS, "observation"), (LEROBOT, "", 1, None, "observation.state"),
        (OPENX, TRUST, 1, None, "observation.image"),
    ],
)  # fmt: skip
def test_inspect_shows_size_and_fields_of_a_stream(dataset, options, shards, steps, key, shell, places) -> None:
    done = shell(f"rbtool inspect {dataset} --streaming {options} --json", **places)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["kind"], found["shards"], found["steps"]) == ("stream", shards, steps)
    assert key in {field["key"] for field in found["fields"]}
    assert found["shard_steps"] >= found["shard_episodes"] > 0
    assert f"{shards} shard" in shell(f"rbtool inspect {dataset} --streaming {options}", **places).stdout


@pytest.mark.parametrize(("dataset", "options"), [(TED, ""), (LEROBOT, ""), (OPENX, TRUST)])
def test_sample_draws_from_a_stream(dataset: str, options: str, shell: Shell, places: dict[str, str]) -> None:
    line = f"rbtool sample {dataset} --streaming {options} -n 3 --seed 2"
    done = shell(f"{line} --json", **places)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["n"], found["sampler"], len(set(found["indices"]))) == (3, "without-replacement", 3)
    assert shell(f"{line} -q", **places).stdout.split() == [str(one) for one in found["indices"]]
    assert f"3 steps of {found['path']}" in shell(line, **places).stdout


@pytest.mark.parametrize("slices", [False, True])
def test_sample_of_a_stream_is_the_first_batch_of_a_buffer(slices, repositories, shell, places, monkeypatch) -> None:
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
        (f"sample {TED} --cache-size 2GB", 2, "--cache-size needs --streaming"),
        (f"inspect {TED} --cache-size 2GB", 2, "--cache-size needs --streaming"),
        ("sample cartpole --trust-pickle", 2, "--trust-pickle needs --streaming"),
        (f"sample {TED} --streaming --cache-size much", 2, "'much' is not a size"),
        (f"sample {TED} --streaming --sampler prioritized", 2, "the sampler is prioritized, expected"),
        (f"sample {TED} --streaming --verify", 2, "--verify works only for datasets on this disk"),
        (f"sample {TED} --streaming --slice-len 4", 2, "is not an option of the sampler without-replacement"),
        (f"inspect {TED} --streaming --episode 3", 2, "--episode works only for datasets on this disk"),
        (f"inspect {TED} --streaming --write-map map.toml", 2, "--write-map works only for datasets on this disk"),
        (f"sample {TED} --streaming --cache-size 1kB", 2, "give it a larger cache_size"),
        (f"sample {OPENX} --streaming", 2, "--trust-pickle"),
        ("inspect hf://org/missing --streaming", 4, "the hub shows no dataset repository org/missing"),
        (f"sample {TED} --streaming --offline", 5, "needs the network"),
    ],
)
def test_impossible_streams_are_one_sentence(
    line: str, code: int, said: str, shell: Shell, places: dict[str, str]
) -> None:
    done = shell(f"rbtool {line}", **places)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert said in done.stderr
    assert "internal error" not in done.stderr
    assert sum(one.startswith("error: ") for one in done.stderr.splitlines()) == 1


def test_revoked_access_to_a_stream_does_not_spoil_the_next_run(remote, shell, places) -> None:
    remote.faults.append(Fault("GET .*memmap", "status:401", times=99))
    done = shell(f"rbtool sample {TED} --streaming --json", **places)
    assert json.loads(done.stdout)["error"]["type"] == "AuthorisationError"
    remote.faults.clear()
    assert shell(f"rbtool sample {TED} --streaming -n 4 -q", **places).returncode == 0


def test_inspect_shows_several_streams_and_the_errors_of_others(shell: Shell, places: dict[str, str]) -> None:
    done = shell(f"rbtool inspect {TED} hf://org/missing {LEROBOT} --streaming", **places)
    assert done.returncode == 4
    assert done.stdout.count("   stream   ") == 2
