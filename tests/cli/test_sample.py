"""What `rbtool sample` shows of steps, slices and speed, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest

from rbtool.cli.sample import AnchorName, SamplerName, WeightName
from rbtool.core.verbs.sample import SAMPLERS, SamplerOptions


@pytest.fixture(scope="module")
def environment(forked):
    """Commands are forked: there are many of them."""
    return forked


def test_the_samplers_are_completed_and_listed(shell):
    done = shell("python -m rbtool", _RBTOOL_COMPLETE="bash", _RBTOOL_LINE="rbtool sample --sampler ")
    names = done.stdout.split()
    assert len(names) == 6
    assert " ".join(names) in re.sub(r"\s+", " ", shell("rbtool sample --help").stdout.replace(",", ""))


def test_the_words_are_those_of_the_library():
    assert [*SamplerName] == [*SAMPLERS]
    for weight, anchor in zip([*WeightName, None], AnchorName, strict=True):
        SamplerOptions(sampler="slice", slice_len=1, weight=weight, anchor=anchor)


def test_steps_are_shown_with_their_episodes(shell):
    lines = shell("rbtool sample ./cartpole -n 3 --sampler without-replacement --no-shuffle --seed 5").stdout.split(
        "\n"
    )
    assert lines[0].endswith("3 steps of cartpole   seed 5   without-replacement")
    assert lines[1] == "drawn    episode:step 0:0 0:1 0:2"


def test_the_number_of_steps_has_the_name_that_it_has_in_python_too(shell):
    numbers = [shell(f"rbtool sample ./cartpole {option} 5 --seed 5 -q").stdout for option in ("-n", "--batch-size")]
    assert numbers[0] == numbers[1]
    assert len(numbers[0].splitlines()) == 5


def test_slices_are_shown_with_their_ends(shell):
    lines = shell("rbtool sample ./cartpole --sampler slice --slice-len 8 -n 64 --seed 5").stdout.split("\n")
    assert lines[0] == "64 steps in 8 slices of cartpole   seed 5   slice"
    slices = re.fullmatch(r"drawn    episode:first-last((?: \d+:\d+-\d+\(8\)){6}) …", lines[1])
    assert slices is not None, lines[1]
    for first, last in re.findall(r":(\d+)-(\d+)", slices[1]):
        assert int(last) - int(first) == 7


def test_padded_slices_tell_how_much_of_them_is_real(shell):
    line = "rbtool sample ./cartpole --sampler slice --slice-len 1000 --pad --seed 5"
    lines = shell(line).stdout.split("\n")
    found = re.fullmatch(r"drawn    episode:first-last \d+:0-(\d+)\((\d+)\+(\d+)\)", lines[1])
    assert found is not None, lines[1]
    last, length, padding = map(int, found.groups())
    assert (last, length + padding) == (length - 1, 1000)
    (one,) = json.loads(shell(f"{line} --json").stdout)["slices"]
    assert (one["length"], one["padding"]) == (length, padding)


def test_the_speed_is_told(shell):
    line = "rbtool sample ./cartpole --time --seconds 0.05 -n 32"
    lines = shell(line).stdout.split("\n")
    assert re.fullmatch(r"speed    [\d,]+ batch(es)?/s · [\d,]+ steps/s · [\d.]+ [kMG]?B/s", lines[-4]), lines[-4]
    timing = json.loads(shell(f"{line} --json").stdout)["timing"]
    assert timing["steps_per_second"] == pytest.approx(32 * timing["batches_per_second"])
    assert 0 < timing["median_us"] <= timing["p95_us"]


def test_quietly_it_is_the_rate_that_is_told_of_a_time(shell):
    done = shell("rbtool sample ./cartpole --time --seconds 0.05 -n 32 -q")
    assert re.fullmatch(r"[1-9]\d* steps/s\n", done.stdout)
    drawn = shell("rbtool sample ./cartpole -n 3 --sampler without-replacement --no-shuffle -q --seed 5")
    assert (drawn.stdout, drawn.stderr, done.stderr) == ("0\n1\n2\n", "", "")


def test_without_a_time_there_is_none(shell):
    document = json.loads(shell("rbtool sample ./cartpole -n 2 --json --seed 1").stdout)
    assert (document["timing"], document["slices"], document["sampler"]) == (None, [], "random")
    assert (document["options"], len(document["indices"])) == ({}, 2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--sampler shuffled", "invalid value for '--sampler': 'shuffled' is not one of random, without-replacement,"),
        ("--seconds soon", "invalid value for '--seconds': 'soon' is not a number"),
        ("--slice-len 4", "--slice-len is no option of the sampler random"),
        ("--no-shuffle", "--no-shuffle is no option of the sampler random"),
        ("--sampler slice", "the sampler slice needs --slice-len or --num-slices"),
        ("--sampler slice --slice-len 3 -n 10", "a batch is 10 steps, expected a multiple of the length of a slice, 3"),
        ("--sampler slice --slice-len 99999", "slices are 99999 steps, expected at most"),
        ("--sampler prioritized --priority nothing", "field 'nothing' not found"),
        ("--sampler prioritized --priority next.done", "--priority is 'next.done', which is bool [1], expected"),
        ("--sampler prioritized --alpha -1", "--alpha is -1.0, expected a finite number from 0"),
        ("--sampler without-replacement --drop-last -n 99999", "batch_size is 99999, expected at most"),
        ("--seconds 2", "--seconds needs --time"),
    ],
)
def test_what_has_no_meaning(words, sentence, shell):
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--frame-stack 0", "--frame-stack is 0, expected a number of frames from 1"),
        ("--frame-key observation", "--frame-key names the frames to stack, and none are stacked"),
        ("--frame-stack 4 --frame-key action", "field 'action' not found"),
    ],
)
def test_frames_that_cannot_be_stacked(shell, words, message):
    done = shell(f"rbtool sample ./cartpole {words}")
    assert message in re.sub(r"\s+", " ", done.stderr)
    assert done.returncode == 2
