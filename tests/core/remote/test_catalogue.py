"""Which dataset the words of a user mean, and what is remembered of a remote, however damaged."""

from __future__ import annotations

import datetime

import pytest
from cases import each

from rbtool.core.errors import DatasetNotFoundError, UsageError
from rbtool.core.format.converter import Catalogue, CatalogueEntry
from rbtool.core.format.locate import KnownNames, Resolution
from rbtool.core.remote.catalogue import CatalogueFile, catalogue_age, is_complete, resolve

IDS = (
    "D4RL/antmaze/umaze-diverse-v1", "D4RL/antmaze/umaze-v1", "D4RL/door/cloned-v2", "D4RL/door/human-v1",
    "D4RL/door/human-v2", "D4RL/door/human-v10", "D4RL/minigrid/fourrooms-v0", "D4RL/pen/human-v2",
    "atari/pong/expert-v0", "flat-v0", "mujoco/hopper/expert-v0", "mujoco/hopper/medium-v0",
)  # fmt: skip


def test_an_id_means_itself():
    for asked in IDS:
        found = resolve(asked, IDS, "minari")
        assert (found.id, found.how) == (asked, "exact")
    names = {"D4RL/door/human-v2": True, "door-v2": False, "a/b": False}
    assert {name: is_complete(name) for name in names} == names


@each(
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


@each(
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


@each(
    ("asked", "near"),
    [
        ("D4RL/door/human-v3", "D4RL/door/human-v1, D4RL/door/human-v2, D4RL/door/human-v10"),
        ("D4RL/dor/human-v2", "D4RL/door/human-v10"),
        ("hoper-medium-v0", "mujoco/hopper/medium-v0"),
        ("flat-v1x", "flat-v0"),
        ("zzzzzz", "list --remote minari"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest(asked, near):
    with pytest.raises(DatasetNotFoundError) as failed:
        resolve(asked, IDS, "minari")
    assert near in failed.value.hint
    with pytest.raises(DatasetNotFoundError):
        resolve(asked, (), "minari")


FOUND = Resolution("door-human-v1", "D4RL/door/human-v2", "words")


def test_words_and_catalogues_are_remembered(tmp_path):
    names = KnownNames(tmp_path, "minari")
    assert names.get("door-human-v1") is None
    names.put(FOUND)
    names.put(Resolution("door", "D4RL/door/human-v2", "latest"))
    assert KnownNames(tmp_path, "minari").get("door-human-v1") == FOUND
    assert KnownNames(tmp_path, "other").get("door-human-v1") is None
    catalogue = Catalogue(
        "hf://x", "2026-01-01T00:00:00+00:00", (CatalogueEntry("a/b-v0", 10, None, 3, "s"), CatalogueEntry("c")), ("p",)
    )
    CatalogueFile(tmp_path, "minari", "key").save(catalogue)
    assert CatalogueFile(tmp_path, "minari", "key").load() == catalogue
    assert CatalogueFile(tmp_path, "minari", "other").load() is None
    assert catalogue_age(Catalogue("x", "yesterday", ())) == float("inf")


@each("text", ["", "{", "[]", '{"door-human-v1": 3}', '{"door-human-v1": {"id": "../up", "how": "words"}}'])
def test_a_damaged_memory_knows_nothing_and_learns_again(tmp_path, text):
    names = KnownNames(tmp_path, "minari")
    names.put(FOUND)
    names.path.write_text(text)
    assert names.get("door-human-v1") is None
    names.put(FOUND)
    assert names.get("door-human-v1") == FOUND


@each("text", ["", "{", "[]", '{"entries": [1]}', '{"entries": []}'])
def test_a_damaged_catalogue_is_none(tmp_path, text):
    file = CatalogueFile(tmp_path, "minari", "key")
    file.path.parent.mkdir(parents=True)
    file.path.write_text(text)
    assert file.load() is None


@pytest.mark.parametrize(("ago", "least"), [(3600, 3600), (-3600, 0)])
def test_the_age_of_a_catalogue(ago, least):
    fetched = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=ago)
    assert least <= catalogue_age(Catalogue("x", fetched.isoformat(), ())) < least + 60
