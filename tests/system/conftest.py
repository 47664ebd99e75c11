"""A hub on loopback with the Minari datasets of tests/data, and a machine that downloads from it."""

from __future__ import annotations

import pytest
from hub import Hub, lay_out_hub
from machine import DATA, Machine

import rbtool


@pytest.fixture(scope="session")
def hub_root(tmp_path_factory):
    return lay_out_hub(DATA, tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="session")
def expected(tmp_path_factory):
    """The digest that a dataset has when it is converted from the files themselves."""
    known: dict[str, str] = {}

    def digest(name: str) -> str:
        if name not in known:
            folder = tmp_path_factory.mktemp("expected") / "dataset"
            known[name] = rbtool.convert(DATA / name, folder).content_digest
        return known[name]

    return digest


@pytest.fixture
def hub(hub_root):
    with Hub(hub_root) as server:
        yield server


@pytest.fixture
def machine(hub, tmp_path):
    return Machine(hub, tmp_path)
