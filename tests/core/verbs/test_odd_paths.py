"""Paths that are not UTF-8: every verb takes them, and what is written about them is JSON all the same."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import rbtool
from rbtool.core.errors import UsageError
from rbtool.core.format.manifest import MANIFEST, Manifest
from rbtool.core.format.sources import safe_id
from rbtool.core.open_steps import open_steps

SOURCE = Path(__file__).parents[2] / "data" / "minari" / "tuple" / "trunc-v0"
ODD = os.fsdecode(b"caf\xe9")


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A dataset in a folder whose name is not UTF-8, converted from another one."""
    shutil.copytree(SOURCE, tmp_path / ODD / "source")
    metadata = tmp_path / ODD / "source" / "data" / "metadata.json"
    document = json.loads(metadata.read_bytes()) | {"description": "half of a pair: \ud83d"}
    metadata.write_text(json.dumps(document))
    rbtool.convert(tmp_path / ODD / "source", tmp_path / ODD / "made")
    return tmp_path / ODD / "made"


def test_the_provenance_has_the_path_as_escapes(odd: Path) -> None:
    assert b"caf\\udce9" in (odd / MANIFEST).read_bytes()
    assert any(ODD in str(said) for said in Manifest.load(odd).provenance[0].arguments.values())
    assert not rbtool.check(odd).errors


@pytest.mark.parametrize("form", ["flat", "nested", "h5"])
def test_checkpoints_there_and_back(odd: Path, form: str) -> None:
    saved = odd.with_name(f"saved{ODD}" + (".h5" if form == "h5" else ""))
    rbtool.checkpoint.save(odd, saved, form=form)
    with open_steps(saved) as reader:
        assert reader.manifest.steps == Manifest.load(odd).steps


def test_torchrls_checkpoints(odd: Path) -> None:
    rbtool.checkpoint.save(odd, odd.with_name("torchrl"), form="nested", for_library="torchrl")
    with open_steps(odd.with_name("torchrl")) as reader:
        assert reader.manifest.steps == Manifest.load(odd).steps


@pytest.mark.parametrize("library", ["npz", "parquet", "h5", "minari"])
def test_exports(odd: Path, library: str) -> None:
    rbtool.export(odd, odd.with_name(f"out{ODD}"), to=library)
    assert odd.with_name(f"out{ODD}").exists()


def test_preprocess(odd: Path) -> None:
    made = rbtool.preprocess(odd, dest=odd.with_name("cast"), operations={"clip_reward": "-99:99"}, num_workers=0)
    assert made.steps == Manifest.load(odd).steps


def test_an_id_with_half_a_character_is_none() -> None:
    with pytest.raises(UsageError, match="is not a dataset id"):
        safe_id("a\ud800/x-v0")
