"""`env`: versions, folders and variables of this process, without secrets."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
import torch
from cases import each

import rbtool
from rbtool.core.results import to_document
from rbtool.core.verbs import env as module


def test_versions_and_folders_are_those_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path))
    found = rbtool.env()
    assert found.packages["torch"] == metadata.version("torch") != ""
    assert torch.__version__.startswith(str(found.packages["torch"]).partition("+")[0])
    assert (found.store, found.package) == (tmp_path, Path(rbtool.__file__).parent)
    assert found.free_bytes is not None
    assert found.processors >= 1
    assert not found.extras.keys() & {"dev", "docs", "peer"}


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["numpy>=2", "no-such-package", 'av>=14; extra == "video"', "other.one ; extra == 'video'"]
    monkeypatch.setattr(module.metadata, "requires", lambda _: lines)
    found = rbtool.env()
    assert found.packages == {"numpy": metadata.version("numpy"), "no-such-package": None}
    assert found.extras == {"video": module.ExtraState({"av": metadata.version("av")}, ("other.one",))}


def test_a_checkout_that_is_not_installed_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.metadata, "requires", missing)
    found = rbtool.env()
    assert (found.rbtool, found.packages, found.extras) == (rbtool.__version__, {}, {})


@each(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", "hf_abcdefghijklmnop", "***"),
        ("RBTOOL_PASSWORD", "swordfish", "***"),
        ("D4RL_URL", "https://me:swordfish@mirror.example/d4rl", "https://***@mirror.example/d4rl"),
        ("RBTOOL_RETRIES", "8:2", "8:2"),
        ("MINARI_DATASETS_PATH", "/data/minari", "/data/minari"),
        ("RLDS_REMOTE", "gs://bucket", "gs://bucket"),
        ("SHELL_PROMPT", "other", None),
        ("WEBHOOK_URL", "https://chat.example/services/T0/B0/swordfish", None),
        ("OTHER_DATASET_DIR", "/secret/project", None),
    ],
)
def test_variables_are_shown_without_secrets(name: str, value: str, shown: str | None, monkeypatch) -> None:
    monkeypatch.setenv(name, value)
    assert rbtool.env().variables.get(name) == shown


def test_the_result_is_a_document() -> None:
    document = to_document(rbtool.env())
    assert document["kind"] == "env"
    assert document["packages"]["torch"] == metadata.version("torch")
