"""Which dataset the words mean that a user types."""

from __future__ import annotations

import pytest

from rbtool.core.errors import DatasetNotFoundError, UsageError
from rbtool.core.remote.catalogue import is_complete, resolve

IDS = (
    "D4RL/antmaze/umaze-diverse-v1", "D4RL/antmaze/umaze-v1", "D4RL/door/cloned-v2", "D4RL/door/human-v1",
    "D4RL/door/human-v2", "D4RL/door/human-v10", "D4RL/minigrid/fourrooms-v0", "D4RL/pen/human-v2",
    "atari/pong/expert-v0", "flat-v0", "mujoco/hopper/expert-v0", "mujoco/hopper/medium-v0",
)  # fmt: skip


@pytest.mark.parametrize("asked", IDS)
def test_an_id_means_itself(asked):
    found = resolve(asked, IDS, "minari")
    assert (found.id, found.how) == (asked, "exact")


@pytest.mark.parametrize(
    ("asked", "dataset_id", "how"),
    [
        ("D4RL/door/human", "D4RL/door/human-v10", "latest"),
        ("flat", "flat-v0", "latest"),
        ("door-human-v1", "D4RL/door/human-v1", "words"),
        ("door-human-v7", "D4RL/door/human-v10", "words"),
        ("door-human", "D4RL/door/human-v10", "words"),
        ("Door_Human", "D4RL/door/human-v10", "words"),
        ("human-door", "D4RL/door/human-v10", "words"),
        ("d4rl-pen-human", "D4RL/pen/human-v2", "words"),
        ("antmaze-umaze-v0", "D4RL/antmaze/umaze-v1", "words"),
        ("fourrooms", "D4RL/minigrid/fourrooms-v0", "words"),
        ("door/human", "D4RL/door/human-v10", "words"),
        ("hopper-medium-v2", "mujoco/hopper/medium-v0", "words"),
    ],
)
def test_words_find_the_dataset(asked, dataset_id, how):
    found = resolve(asked, IDS, "minari")
    assert (found.asked, found.id, found.how) == (asked, dataset_id, how)


@pytest.mark.parametrize(
    ("asked", "listed"),
    [
        ("door", ["D4RL/door/cloned", "D4RL/door/human"]),
        ("human-v2", ["D4RL/door/human", "D4RL/pen/human"]),
        ("hopper-v0", ["mujoco/hopper/expert", "mujoco/hopper/medium"]),
    ],
)
def test_several_candidates_are_an_error_that_lists_them(asked, listed):
    with pytest.raises(UsageError) as failed:
        resolve(asked, IDS, "minari")
    assert all(name in str(failed.value) for name in listed)
    assert str(failed.value).count("/") == 2 * len(listed)


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("D4RL/door/human-v3", "D4RL/door/human-v1, D4RL/door/human-v2, D4RL/door/human-v10"),
        ("D4RL/dor/human-v2", "D4RL/door/human-v10"),
        ("hoper-medium-v0", "mujoco/hopper/medium-v0"),
        ("flat-v1x", "flat-v0"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest(asked, near):
    with pytest.raises(DatasetNotFoundError) as failed:
        resolve(asked, IDS, "minari")
    assert near in failed.value.hint


def test_a_name_like_no_other_gets_no_neighbours():
    with pytest.raises(DatasetNotFoundError) as failed:
        resolve("zzzzzz", IDS, "minari")
    assert "list --remote minari" in failed.value.hint


def test_an_empty_catalogue_has_nothing():
    with pytest.raises(DatasetNotFoundError):
        resolve("door-human-v1", (), "minari")


@pytest.mark.parametrize(("name", "complete"), [("D4RL/door/human-v2", True), ("door-v2", False), ("a/b", False)])
def test_complete_names(name, complete):
    assert is_complete(name) == complete
