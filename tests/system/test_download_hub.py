"""`rbtool download hf://OWNER/NAME`: the same files as were uploaded, or nothing, and a sentence."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from cases import each
from hub import WRITER, Fault, UploadHub
from machine import Uploader, files_of

import rbtool
from rbtool.core.format.manifest import MANIFEST, TRANSFERS
from rbtool.core.remote.hub_address import transfers_of
from rbtool.core.testing.datasets import write_walks

WHERE = "hf://me/walks"
FILE = r"GET .*/resolve/.*/observation\.memmap"


@pytest.fixture
def hub(tmp_path):
    with UploadHub(tmp_path / "hub") as server:
        yield server


def put(hub, folder, name="me/walks", branch="main"):
    """Put a dataset into a repository as an upload does; return the commit."""
    if name not in hub.histories:
        hub.create(name)
    files = (path for path in folder.rglob("*") if path.is_file())
    return hub.push(name, {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}, branch)


@pytest.fixture
def walks(tmp_path):
    write_walks(tmp_path / "walks", [(300, "terminated"), (1, "truncated"), (400, "both")])
    return tmp_path / "walks"


@pytest.fixture
def machine(hub, walks, tmp_path):
    put(hub, walks)
    return Uploader(hub, tmp_path)


@pytest.fixture
def stored(machine):
    return machine.store / "hf/me/walks"


def test_it_is_there_under_its_name_and_where_it_came_from_is_recorded(machine, hub, walks, stored):
    done = machine.json("download", WHERE)
    commit = hub.histories["me/walks"].branches["main"]
    assert (done["path"], done["fetched_from"]) == (str(stored), f"{WHERE}@{commit}")
    assert files_of(stored) == files_of(walks)
    assert [(one.verb, one.commit) for one in transfers_of(stored)] == [("download", commit)]
    for name in ("hf:me/walks", WHERE):
        assert machine.run("check", name, "--fail-on", "warn").returncode == 0
    assert "download hf://me/walks@" in machine.run("inspect", WHERE).stdout
    assert machine.run("list", "-q").stdout == "hf:me/walks\n"
    assert machine.run("cache", "verify").returncode == 0
    assert machine.leftovers() == []


@pytest.mark.parametrize("words", [(WHERE,), ("hf:me/walks",), ("hf", "me/walks"), (f"{WHERE}@main",)])
def test_what_is_there_needs_no_network(machine, hub, words):
    machine.json("download", *words)
    hub.forget()
    again = machine.json("download", *words, RBTOOL_OFFLINE="1")
    assert (again["already_there"], hub.requests) == (True, [])


def test_what_a_killed_process_left_goes_when_it_is_asked_for_again(machine, stored):
    machine.json("download", WHERE)
    (machine.store / "hf/.originals/me%2Fwalks/files").mkdir(parents=True)
    (machine.store / "hf/me/.walks.rbtool-new-01234567").mkdir()
    (machine.store / "hf/.me%2Fwalks.rbtool-new-01234567").mkdir()
    assert machine.json("download", WHERE, "--dry-run")["already_there"]
    assert len(list(machine.store.rglob(".*new-*"))) == 2
    assert machine.json("download", WHERE)["already_there"]
    assert machine.leftovers() == []
    assert list(machine.store.rglob(".*new-*")) == []


def test_it_is_opened_by_its_address(machine):
    with pytest.raises(rbtool.DatasetNotFoundError) as refused:
        rbtool.load_dataset(WHERE, root=machine.store)
    assert "rbtool download hf://me/walks" in refused.value.hint
    machine.json("download", WHERE)
    for name in (WHERE, "hf:me/walks"):
        assert len(rbtool.load_dataset(name, root=machine.store, batch_size=4)) == 701


def test_frozen_and_force_after_a_change(machine, hub, tmp_path, stored):
    machine.json("download", WHERE)
    assert machine.run("download", WHERE, "--frozen").returncode == 0
    write_walks(tmp_path / "other", [(5, "truncated")], seed=3)
    put(hub, tmp_path / "other")
    assert machine.json("download", WHERE)["already_there"]
    assert machine.run("download", WHERE, "--frozen").returncode == 3
    machine.json("download", WHERE, "--force")
    assert files_of(stored) == files_of(tmp_path / "other")


def test_a_revision_is_another_dataset(machine, hub, walks, tmp_path):
    first = hub.histories["me/walks"].branches["main"]
    write_walks(tmp_path / "other", [(5, "truncated")], seed=3)
    put(hub, tmp_path / "other")
    newest, older = machine.json("download", WHERE), machine.json("download", WHERE, "--revision", first)
    assert files_of(machine.folder / newest["path"]) == files_of(tmp_path / "other")
    assert files_of(machine.folder / older["path"]) == files_of(walks)
    assert machine.json("download", f"{WHERE}@{first}")["already_there"]
    assert machine.json("inspect", f"{WHERE}@{first}")["path"] == older["path"]
    assert machine.run("download", f"{WHERE}@{first}", "--revision", "main").returncode == 2
    assert machine.run("download", f"{WHERE}@nowhere").returncode == 4


def test_dry_run(machine, stored):
    done = machine.json("download", WHERE, "--dry-run")
    assert (done["steps"], done["dry_run"], stored.exists()) == (701, True, False)
    assert done["fetch"]["bytes"] > 10_000


@each(
    ("option", "value"),
    [
        ("layout", "packed"), ("episodes", "0:1"), ("final_step", "drop"), ("local", True), ("keep_source", True),
        ("exact_id", True), ("skip_bad", True), ("num_workers", 2), ("trust_pickle", True), ("horizon", 3),
        ("compress", ["observation=zstd:3"]),
    ],
)  # fmt: skip
def test_an_option_that_needs_a_conversion_names_the_way(tmp_path, option, value):
    with pytest.raises(rbtool.UsageError) as refused:
        rbtool.download(WHERE, root=tmp_path, **{option: value})
    assert f"--{option.replace('_', '-')}" in refused.value.message
    assert "rbtool convert hf:me/walks DEST" in refused.value.hint


@each("address", ["hf://walks", "hf://me/../walks", "hf:///me/walks", "hf://me/walks/x", "hf:"])
def test_an_address_that_makes_no_sense(tmp_path, address):
    with pytest.raises(rbtool.UsageError):
        rbtool.download(address, root=tmp_path)
    with pytest.raises((rbtool.UsageError, rbtool.DatasetNotFoundError)):
        rbtool.inspect(address, root=tmp_path)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"meta/info.json": b"{}"}, "LeRobot"),
        ({"door/human-v2/data/main_data.hdf5": b"x"}, "Minari"),
        ({"shard-0.tar": b"x"}, "tar archives"),
        ({"train.parquet": b"x"}, "rbtool convert"),
        ({"model.safetensors": b"x"}, "no data files that rbtool knows"),
    ],
)
def test_a_repository_of_something_else(machine, hub, files, sentence):
    hub.create("me/else")
    hub.push("me/else", files)
    done = machine.run("download", "hf://me/else")
    assert (done.returncode, sentence in done.stderr) == (1, True), done.stderr
    assert machine.leftovers() == []


def changed_manifest(walks, **changes):
    document = json.loads((walks / MANIFEST).read_text())
    return json.dumps(document | changes, indent=1).encode()


def test_a_repository_that_is_not_what_its_manifest_states(machine, hub, walks, stored):
    files = {path.relative_to(walks).as_posix(): path.read_bytes() for path in walks.rglob("*.memmap")}
    name, data = next(one for one in files.items() if one[0] == "observation.memmap")
    bad = {
        "another byte": {name: bytes([data[0] ^ 1]) + data[1:]},
        "another size": {name: data + b"x"},
        "a missing file": {name: None},
        "another manifest": {MANIFEST: changed_manifest(walks, steps=5)},
        "a newer format": {MANIFEST: changed_manifest(walks, format_version=99)},
        "no document": {MANIFEST: b"\0\1"},
        "half a manifest": {MANIFEST: (walks / MANIFEST).read_bytes()[:500]},
        "a manifest with more white space": {MANIFEST: (walks / MANIFEST).read_bytes() + b"\n"},
    }
    for what, change in bad.items():
        put(hub, walks)
        hub.push("me/walks", change)
        done = machine.run("download", WHERE)
        assert (done.returncode, done.stderr.count("error: "), stored.exists()) == (1, 1, False), (what, done.stderr)
        assert machine.leftovers() == [], what


def test_a_checkpoint_is_no_dataset(machine, hub, tmp_path):
    assert machine.run("checkpoint", "save", "walks", "saved", "--as", "flat").returncode == 0
    put(hub, tmp_path / "saved", "me/saved")
    assert machine.run("download", "hf://me/saved").returncode == 1


def test_other_files_of_the_repository_are_not_fetched(machine, hub, stored, walks):
    hub.push("me/walks", {"README.md": b"# mine", "model.bin": b"x" * 99, TRANSFERS: b"{}\n"})
    machine.json("download", WHERE)
    assert files_of(stored) == files_of(walks)
    assert hub.paths("README|model|transfers") == []


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault(FILE, "status:503", 1), 0), (Fault(FILE, "corrupt", 1), 0), (Fault(FILE, "corrupt", 99), 1),
        (Fault(FILE, "cut:3000", 1), 0), (Fault(FILE, "reset", 99), 5),
        *(
            pytest.param(fault, code, marks=pytest.mark.slow)
            for fault, code in (
                (Fault(FILE, "status:404", 99), 4), (Fault("/api/", "status:500", 99), 5),
                (Fault("GET", "status:401", 99), 5), (Fault(FILE, "stall:900", 1), 0),
                (Fault(r"manifest\.json", "corrupt", 1), 0), (Fault(r"manifest\.json", "corrupt", 99), 1),
            )
        ),
    ],
)  # fmt: skip
def test_a_fault_is_survived_or_named_and_the_next_run_completes(machine, hub, walks, stored, fault, code):
    hub.faults.append(Fault(fault.match, fault.kind, fault.times))
    done = machine.run("download", WHERE)
    assert (done.returncode, done.stderr.count("error: ")) == (code, code != 0), done.stderr
    hub.faults.clear()
    hub.forget()
    machine.json("download", WHERE)
    assert files_of(stored) == files_of(walks)
    assert machine.leftovers() == []
    if code == 5 and "resolve" in fault.match:
        assert len(hub.paths("/resolve/")) < len(files_of(walks))


def test_a_private_repository_is_fetched_with_its_token(machine, hub, stored, walks):
    hub.token = WRITER
    for token in ("", "hf_readerreader"):
        refused = machine.run("download", WHERE, HF_TOKEN=token)
        assert (refused.returncode in (4, 5), "HF_TOKEN" in refused.stderr, stored.exists()) == (True, True, False)
    machine.json("download", WHERE)
    assert files_of(stored) == files_of(walks)


def test_two_at_once_fetch_once(machine, hub, stored, walks):
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda _: machine.run("download", WHERE, "-q"), range(2)))
    assert [done.returncode for done in both] == [0, 0], both
    assert files_of(stored) == files_of(walks)
    assert len([path for path in hub.paths("/resolve/") if "memmap" in path]) == len(list(walks.rglob("*.memmap")))


def test_something_else_in_its_place_is_left_alone(machine, stored, walks, tmp_path):
    write_walks(stored, [(5, "truncated")], seed=3)
    before = files_of(stored)
    refused = machine.run("download", WHERE)
    assert (refused.returncode, files_of(stored)) == (2, before)
    machine.json("download", WHERE, "--force")
    assert files_of(stored) == files_of(walks)


def test_originals_of_another_source_stay_when_it_is_removed(machine, stored):
    kept = machine.store / "walks/.originals/walks%2Ftest-v0"
    (kept / "files").mkdir(parents=True)
    (kept / "files/data.bin").write_bytes(b"mine")
    machine.json("download", WHERE)
    assert machine.run("cache", "rm", "hf:me/walks", "--yes").returncode == 0
    assert (kept / "files/data.bin").exists()
    assert not stored.exists()
