"""The source and the reader of the page *Extend*, as another package registers them: they pass all suites."""

from __future__ import annotations

import importlib.metadata
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hop_source import HopReader, HopSource
from static_server import StaticServer

import rbtool
from rbtool.core.errors import CheckFailed
from rbtool.core.format.converter import Reader, Source
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.testing.readers import ReaderTests
from rbtool.core.testing.sources import SourceTests


def content(steps: tuple[int, ...] = (5, 1, 7), seed: int = 0) -> dict[str, np.ndarray]:
    """Transitions; the observation after the second step of the first episode is not the one before the third."""
    draw, total = np.random.default_rng(seed), sum(steps)
    walk = draw.normal(size=(total + 1, 3)).astype(np.float32)
    following = walk[1:].copy()
    following[1] += 1
    done = np.zeros(total, bool)
    done[np.cumsum(steps) - 1] = True
    return {
        "obs": walk[:-1], "next_obs": following, "act": draw.normal(size=(total, 1)).astype(np.float32),
        "rew": draw.normal(size=total).astype(np.float32), "done": done,
    }  # fmt: skip


def npz(data: dict[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **data)
    return file.getvalue()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StaticServer]:
    entries = {
        group: importlib.metadata.EntryPoint("hop", f"hop_source:{kind}", group)
        for group, kind in (("rbtool.readers", "HopReader"), ("rbtool.sources", "HopSource"))
    }
    plain = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [entries[group]] if group in entries else plain(group=group)
    )
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("RBTOOL_RETRIES", "2:0.001")
    easy, hard = npz(content()), npz(content(seed=1))
    with StaticServer({"hop-easy-v0.npz": easy, "hop-hard-v0.npz": hard}) as running:
        monkeypatch.setenv("HOP_URL", running.address("").rstrip("/"))
        yield running


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path / "store"))
    return tmp_path / "store"


class TestReader(ReaderTests):
    @pytest.fixture(autouse=True)
    def made(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folder = tmp_path_factory.mktemp("hop")
        (self.folder / "hop.npz").write_bytes(npz(content()))

    def source(self) -> Path:
        return self.folder

    def reader(self) -> type[Reader]:
        return HopReader

    def with_small_pieces(self) -> Reader:
        return type("Small", (HopReader,), {"piece_steps": 2})(self.folder)


class TestSource(SourceTests):
    @pytest.fixture(autouse=True)
    def served(self, server: StaticServer) -> None:
        pass

    def source(self) -> Source:
        return HopSource()


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_download_converts_and_says_that_the_remote_has_no_checksum(
    server: StaticServer, root: Path, layout: str
) -> None:
    result = rbtool.download("hop", "hop-easy-v0", layout=layout)
    assert result.boundary["explicit_next"] == 1
    assert any(
        note.startswith("unverified by the remote: it gives no checksum of 1 of 1 files") for note in result.notes
    )
    shown = rbtool.inspect(result.path)
    assert (shown.steps, shown.episodes, shown.ends.explicit_next, shown.ends.final_repeated) == (13, 3, 1, 0)
    assert shown.notes == result.notes
    provenance = shown.provenance[0]
    assert provenance.arguments["unverified"] == {"hop.npz": None}
    assert provenance.inputs["hop.npz"].startswith("sha256:")
    found = rbtool.check(result.path)
    assert (found.errors, [finding.rule for finding in found.findings]) == (
        0,
        ["TED004", "TED005"],
    )  # the walk goes on over the ends of its episodes
    data = content()
    buffer = rbtool.load_dataset("hop:hop-easy-v0" if layout == "ted" else result.path)
    rows = buffer[:]
    for key, name in (("observation", "obs"), (("next", "observation"), "next_obs"), ("action", "act")):
        assert rows[key].numpy().tobytes() == data[name].tobytes()
    assert rows["next", "reward"].numpy()[:, 0].tobytes() == data["rew"].tobytes()


def test_the_layouts_have_one_content(server: StaticServer, root: Path, tmp_path: Path) -> None:
    ted = rbtool.download("hop", "hop-easy-v0")
    packed = rbtool.download("hop", "hop-easy-v0", layout="packed")
    back = rbtool.convert(packed.path, tmp_path / "back")
    assert back.content_digest == ted.content_digest
    with TedReader(back.path) as reader:
        assert reader.episodes.explicit_next.tolist() == [True, False, False]


def test_frozen_compares_versions_and_else_refuses(server: StaticServer, root: Path) -> None:
    from static_server import Fault

    rbtool.download("hop", "hop-easy-v0")
    with pytest.raises(CheckFailed, match=r"neither a checksum nor a version of hop\.npz"):
        rbtool.download("hop", "hop-easy-v0", frozen=True)
    server.faults["hop-hard-v0.npz"] = [Fault(headers={"ETag": '"one"'})]
    rbtool.download("hop", "hop-hard-v0")
    assert rbtool.download("hop", "hop-hard-v0", frozen=True).already_there
    server.faults["hop-hard-v0.npz"] = [Fault(headers={"ETag": '"two"'})]
    with pytest.raises(CheckFailed, match="has changed since"):
        rbtool.download("hop", "hop-hard-v0", frozen=True)


def test_kept_originals_are_verified_by_the_digest_of_what_came(server: StaticServer, root: Path) -> None:
    kept = rbtool.download("hop", "hop-easy-v0", keep_source=True)
    assert kept.originals is not None
    record = json.loads((kept.originals.parent / "fetched.json").read_bytes())
    assert record["files"][0]["checksum"] is None
    assert record["files"][0]["received"].startswith("sha256:")
    assert rbtool.cache.verify().problems == ()
    file = kept.originals / "hop.npz"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert any("is not as it was received" in problem.message for problem in rbtool.cache.verify().problems)


def test_a_listed_source_shows_its_ids(server: StaticServer, root: Path) -> None:
    found = rbtool.list_remote("hop")
    assert [entry.name for entry in found.datasets] == ["hop:hop-easy-v0", "hop:hop-hard-v0"]
    assert rbtool.download("hop:hop-hard-v0", dry_run=True).fetch.bytes == len(server.files["hop-hard-v0.npz"])
