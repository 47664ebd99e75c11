"""What is remembered of a remote: never more than a convenience, however damaged."""

from __future__ import annotations

import datetime

import pytest

from rbtool.core.format.locate import KnownNames, Resolution
from rbtool.core.format.sources import Catalogue, CatalogueEntry
from rbtool.core.remote.catalogue import CatalogueFile, catalogue_age

FOUND = Resolution("door-human-v1", "D4RL/door/human-v2", "words")
DAMAGED = ["", "{", "[]", '{"door-human-v1": 3}', '{"door-human-v1": {"id": "../up", "how": "words"}}']


def test_words_are_remembered(tmp_path):
    names = KnownNames(tmp_path, "minari")
    assert names.get("door-human-v1") is None
    names.put(FOUND)
    names.put(Resolution("door", "D4RL/door/human-v2", "latest"))
    assert KnownNames(tmp_path, "minari").get("door-human-v1") == FOUND
    assert KnownNames(tmp_path, "other").get("door-human-v1") is None


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_memory_knows_nothing_and_learns_again(tmp_path, text):
    names = KnownNames(tmp_path, "minari")
    names.put(FOUND)
    names.path.write_text(text)
    assert names.get("door-human-v1") is None
    names.put(FOUND)
    assert names.get("door-human-v1") == FOUND


def test_a_catalogue_comes_back_as_it_was(tmp_path):
    catalogue = Catalogue(
        "hf://x", "2026-01-01T00:00:00+00:00", (CatalogueEntry("a/b-v0", 10, None, 3, "s"), CatalogueEntry("c")), ("p",)
    )
    CatalogueFile(tmp_path, "minari", "key").save(catalogue)
    assert CatalogueFile(tmp_path, "minari", "key").load() == catalogue
    assert CatalogueFile(tmp_path, "minari", "other").load() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"entries": [1]}', '{"entries": []}'])
def test_a_damaged_catalogue_is_none(tmp_path, text):
    file = CatalogueFile(tmp_path, "minari", "key")
    file.path.parent.mkdir(parents=True)
    file.path.write_text(text)
    assert file.load() is None


@pytest.mark.parametrize(("ago", "least"), [(3600, 3600), (-3600, 0)])
def test_the_age_of_a_catalogue(ago, least):
    fetched = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=ago)
    assert least <= catalogue_age(Catalogue("x", fetched.isoformat(), ())) < least + 60


def test_a_catalogue_of_no_date_is_old():
    assert catalogue_age(Catalogue("x", "yesterday", ())) == float("inf")
