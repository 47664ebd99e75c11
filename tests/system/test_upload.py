"""`rbtool upload` to a hub on loopback, by the real client: what is there afterwards, and what is never sent."""

from __future__ import annotations

import hashlib
import json
import shutil

import numpy as np
import pytest
from hub import WRITER, UploadHub
from machine import Uploader, files_of, write_layouts

from rbtool.core.format.manifest import MANIFEST
from rbtool.core.remote.hub_address import transfers_of
from rbtool.core.testing.datasets import DatasetPlan, PlannedLeaf, relist, write_plan, write_walks

WHERE = "hf://me/walks"


@pytest.fixture(scope="session")
def layouts(tmp_path_factory):
    return write_layouts(tmp_path_factory.mktemp("layouts"))


@pytest.fixture
def hub(tmp_path):
    with UploadHub(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def machine(hub, tmp_path):
    return Uploader(hub, tmp_path)


@pytest.fixture
def dataset(layouts, tmp_path):
    shutil.copytree(layouts["ted"], tmp_path / "walks")
    return tmp_path / "walks"


def digests(tree):
    """The digests of a tree's files, without what a repository has next to a dataset."""
    ours = {path: data for path, data in tree.items() if path not in {"README.md", ".gitattributes"}}
    return {path: hashlib.sha256(data).hexdigest() for path, data in ours.items()}


@pytest.mark.parametrize(
    ("name", "part_size"),
    [("ted", None), ("ted", 5_000), ("packed", None), ("compressed", None), ("odd", None), ("empty", None)],
)
def test_the_repository_has_the_same_files_and_so_has_who_downloads_it(layouts, tmp_path, name, part_size):
    shutil.copytree(layouts[name], tmp_path / name)
    words = ("--allow-errors",) if name == "odd" else ()
    with UploadHub(tmp_path / "hub", part_size=part_size) as hub:
        machine = Uploader(hub, tmp_path)
        done = machine.json("upload", name, WHERE, *words)
        assert machine.run("download", WHERE).returncode == 0
        assert files_of(machine.store / "hf/me/walks") == files_of(layouts[name])
        assert digests(hub.tree("me/walks")) == files_of(layouts[name])
        assert done["commit"] == hub.histories["me/walks"].branches["main"]
        assert len(hub.histories["me/walks"].commits) == 2


def test_the_bars_of_the_client_are_not_between_our_lines(tmp_path, dataset):
    with UploadHub(tmp_path / "hub", lfs_threshold=100) as hub:
        machine = Uploader(hub, tmp_path)
        del machine.variables["HF_HUB_DISABLE_PROGRESS_BARS"]  # which the stand-in sets, and users do not
        done = machine.run("upload", str(dataset), WHERE)
        assert hub.objects
    assert done.returncode == 0, done.stderr
    assert "LFS files" not in done.stderr
    assert "it/s" not in done.stderr


def test_the_commit_is_printed_recorded_and_shown(machine, hub, dataset):
    before = files_of(dataset)
    done = machine.run("upload", str(dataset), WHERE, "-q")
    commit = hub.histories["me/walks"].branches["main"]
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{WHERE}@{commit}\n", "")
    assert [one.commit for one in transfers_of(dataset)] == [commit]
    assert f"upload   {WHERE}@{commit[:7]}" in machine.run("inspect", str(dataset)).stdout
    assert machine.run("check", str(dataset), "--fail-on", "warn").returncode == 0
    assert files_of(dataset) == before


def test_the_same_dataset_is_not_sent_again(machine, hub, dataset):
    first = machine.json("upload", str(dataset), WHERE)
    hub.forget()
    second = machine.json("upload", str(dataset), WHERE)
    assert (second["already_there"], second["commit"]) == (True, first["commit"])
    assert {asked.method for asked in hub.requests} == {"GET"}
    assert len(transfers_of(dataset)) == 1


def test_a_dataset_with_a_record_can_be_replaced_and_removed(machine, dataset):
    machine.json("upload", str(dataset), WHERE)
    shutil.copytree(dataset, machine.store / "walks" / "one")
    assert machine.run("cache", "rm", "walks:one", "--yes").returncode == 0
    assert machine.run("checkpoint", "save", str(dataset), "saved", "--as", "flat").returncode == 0
    machine.json("checkpoint", "load", "saved", str(dataset), "--force")
    assert transfers_of(dataset) == []


def test_dry_run_changes_nothing(machine, hub, dataset):
    done = machine.json("upload", str(dataset), WHERE, "--dry-run")
    assert (done["commit"], done["address"], done["dry_run"]) == (None, WHERE, True)
    assert hub.histories == {}
    assert transfers_of(dataset) == []


def test_private(machine, hub, dataset):
    assert machine.json("upload", str(dataset), WHERE, "--private")["private"]
    assert hub.histories["me/walks"].private
    assert machine.json("upload", str(dataset), "hf://me/open")["private"] is False
    hub.forget()
    refused = machine.run("upload", str(dataset), "hf://me/open", "--private")
    assert (refused.returncode, "is public" in refused.stderr) == (2, True)
    assert {asked.method for asked in hub.requests} == {"GET"}


def test_another_dataset_is_replaced_only_by_force(machine, hub, dataset, tmp_path):
    write_walks(tmp_path / "other", [(5, "truncated")], seed=3)
    machine.json("upload", str(tmp_path / "other"), WHERE)
    before = hub.tree("me/walks")
    refused = machine.run("upload", str(dataset), WHERE)
    assert (refused.returncode, "another dataset" in refused.stderr) == (2, True)
    assert hub.tree("me/walks") == before
    machine.json("upload", str(dataset), WHERE, "--force")
    assert digests(hub.tree("me/walks")) == files_of(dataset)
    assert [hub.tree("me/walks", commit) for commit in hub.histories["me/walks"].commits][1] == before


def test_foreign_files_are_removed_only_by_force_in_the_same_commit(machine, hub, dataset):
    hub.create("me/walks")
    hub.push("me/walks", {"model.bin": b"\0" * 20_000, "notes/today.txt": b"mine"})
    refused = machine.run("upload", str(dataset), WHERE)
    assert (refused.returncode, "model.bin" in refused.stderr, "--force" in refused.stderr) == (2, True, True)
    done = machine.json("upload", str(dataset), WHERE, "--force")
    assert done["deleted"] == ["model.bin", "notes/today.txt"]
    assert digests(hub.tree("me/walks")) == files_of(dataset)
    assert len(hub.histories["me/walks"].commits) == 3


def test_a_branch_of_its_own(machine, hub, dataset, tmp_path):
    write_walks(tmp_path / "other", [(5, "truncated")], seed=3)
    machine.json("upload", str(tmp_path / "other"), WHERE)
    done = machine.json("upload", str(dataset), WHERE, "--revision", "v2", "--message", "the second")
    history = hub.histories["me/walks"]
    assert (done["branch"], history.branches["v2"], history.messages[-1]) == ("v2", done["commit"], "the second")
    assert digests(hub.tree("me/walks", "v2")) == files_of(dataset)
    assert digests(hub.tree("me/walks")) == files_of(tmp_path / "other")
    refused = machine.run("upload", str(tmp_path / "other"), f"{WHERE}@v2")
    assert refused.returncode == 2


def test_a_new_branch_of_the_same_dataset(machine, hub, dataset):
    first = machine.json("upload", str(dataset), WHERE)
    second = machine.json("upload", str(dataset), WHERE, "--revision", "v2")
    assert digests(hub.tree("me/walks", "v2")) == files_of(dataset)
    assert second["commit"] == hub.histories["me/walks"].branches["v2"]
    assert hub.histories["me/walks"].branches["main"] == first["commit"]


def test_what_others_wrote_in_the_card_stays(machine, hub, dataset):
    hub.create("me/walks")
    text = "---\nlicense: cc-by-4.0\nlanguage: [de]\ntags: [walking]\n---\n# Walks\n\nRead this first.\n"
    hub.push("me/walks", {"README.md": text.encode()})
    assert machine.json("upload", str(dataset), WHERE)["license"] == "cc-by-4.0"
    card = hub.tree("me/walks")["README.md"].decode()
    assert all(part in card for part in ("license: cc-by-4.0", "- de\n", "- walking\n", "Read this first."))
    machine.json("upload", str(dataset), WHERE, "--license", "mit")
    again = hub.tree("me/walks")["README.md"].decode()
    assert again == card.replace("license: cc-by-4.0", "license: mit")


def test_rules_of_the_repository_leave_nothing_out(machine, hub, dataset):
    hub.create("me/walks")
    hub.push("me/walks", {".gitignore": b"*.memmap\n.rbtool\n"})
    assert machine.run("upload", str(dataset), WHERE).returncode == 2
    machine.json("upload", str(dataset), WHERE, "--force")
    assert digests(hub.tree("me/walks")) == files_of(dataset)


def test_a_file_that_the_hub_drops_is_named(machine, hub, dataset):
    hub.drops.append("*/reward.memmap")
    done = machine.run("upload", str(dataset), WHERE)
    assert (done.returncode, "reward.memmap is missing there" in done.stderr) == (1, True)
    assert transfers_of(dataset) == []


def test_damaged_data_is_never_sent(machine, hub, dataset):
    file = next(dataset.rglob("observation.memmap"))
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    for words in ((), ("--allow-errors", "--force")):
        done = machine.run("upload", str(dataset), WHERE, *words)
        assert (done.returncode, hub.histories) == (1, {}), done.stderr


def test_errors_of_check_are_sent_only_if_allowed(machine, hub, tmp_path):
    write_walks(tmp_path / "odd", [(9, "terminated")])
    file = next((tmp_path / "odd" / "next").rglob("reward.memmap"))
    rewards = np.fromfile(file, np.float64 if file.stat().st_size == 72 else np.float32)
    rewards[4] = np.nan
    file.write_bytes(rewards.tobytes())
    relist(tmp_path / "odd")
    found = machine.run("check", str(tmp_path / "odd"))
    refused = machine.run("upload", str(tmp_path / "odd"), WHERE)
    assert (refused.returncode, hub.histories) == (found.returncode, {}), refused.stderr
    assert found.returncode == 3
    done = machine.json("upload", str(tmp_path / "odd"), WHERE, "--allow-errors")
    assert done["errors"] > 0
    assert f"{done['errors']} errors" in hub.tree("me/walks")["README.md"].decode()


def test_only_the_files_of_the_manifest_go_up(machine, hub, dataset):
    (dataset / "notes.txt").write_text("mine")
    (dataset / ".rbtool" / "secret").write_text("mine")
    machine.json("upload", str(dataset), WHERE)
    assert digests(hub.tree("me/walks")).keys() == files_of(dataset).keys() - {"notes.txt", ".rbtool/secret"}


@pytest.mark.parametrize("address", ["me/walks", "https://huggingface.co/datasets/me/walks/tree/main"])
def test_an_address_that_is_meant_otherwise_is_named_right(machine, hub, dataset, address):
    done = machine.run("upload", str(dataset), address)
    assert (done.returncode, hub.requests, "write hf://me/walks\n" in done.stderr) == (2, [], True), done.stderr


@pytest.mark.parametrize("address", ["hf://walks", "hf://me/../walks", "hf://me/walks@../x", "hf://models/me/walks"])
def test_an_address_that_makes_no_sense(machine, hub, dataset, address):
    done = machine.run("upload", str(dataset), address)
    assert (done.returncode, hub.requests) == (2, []), done.stderr


def test_what_is_no_dataset(machine, hub, tmp_path):
    (tmp_path / "raw").mkdir()
    done = machine.run("upload", "raw", WHERE)
    assert (done.returncode, "raw is an empty folder" in done.stderr) == (4, True)
    (tmp_path / "raw" / "notes.txt").write_text("no rows")
    assert machine.run("upload", "raw", WHERE).returncode == 2
    assert machine.run("upload", str(tmp_path / "none"), WHERE).returncode == 4
    write_walks(tmp_path / "walks", [(5, "truncated")])
    assert machine.run("checkpoint", "save", "walks", "saved", "--as", "flat").returncode == 0
    assert machine.run("upload", "saved", WHERE).returncode == 2
    assert hub.requests == []


def test_a_path_that_no_hub_takes(machine, hub, tmp_path):
    leaf = PlannedLeaf((".git", "config"), "int8", (1,), "root")
    write_plan(DatasetPlan((3,), ("terminated",), (False,), (leaf,)), tmp_path / "odd")
    done = machine.run("upload", "odd", WHERE, "--allow-errors")
    assert (done.returncode, ".git" in done.stderr, hub.histories) == (2, True, {})
    machine.json("convert", "odd", "packed", "--layout", "packed")
    machine.json("upload", "packed", WHERE, "--allow-errors")


def test_a_dataset_that_cannot_be_written_to_gets_a_note(machine, dataset):
    (dataset / ".rbtool" / "transfers.jsonl").mkdir()  # root may write everywhere, but not over a folder
    done = machine.json("upload", str(dataset), WHERE)
    assert "is not recorded" in done["notes"][0]


def test_no_token_is_shown_or_kept(machine, hub, dataset):
    words = ("upload", str(dataset), WHERE, "--debug", "-v", "--log-file", "log.txt")
    done = [machine.run(*words, HF_TOKEN=token) for token in ("", "hf_readerreader", WRITER)]
    assert [one.returncode for one in done] == [5, 5, 0]
    assert ["HF_TOKEN" in one.stderr for one in done] == [True, True, False]
    said = "".join(one.stdout + one.stderr for one in done) + (machine.folder / "log.txt").read_text()
    assert not any(token in said for token in ("hf_reader", "hf_writer"))
    assert not any(b"hf_writer" in path.read_bytes() for path in dataset.rglob("*") if path.is_file())


def test_the_token_goes_to_the_hub_alone(machine, hub, dataset, tmp_path):
    with UploadHub(tmp_path / "elsewhere") as other:
        hub.verified_at = other.url
        machine.run("upload", str(dataset), WHERE)
        assert {asked.authorization for asked in other.requests} == {None}
    assert {asked.authorization for asked in hub.requests if "/api/" in asked.path} == {f"Bearer {WRITER}"}


def test_the_hub_is_not_asked_where_the_network_is_forbidden(machine, hub, dataset):
    for variable in ("RBTOOL_OFFLINE", "HF_HUB_OFFLINE"):
        done = machine.run("upload", str(dataset), WHERE, **{variable: "1"})
        assert (done.returncode, variable in done.stderr, hub.requests) == (5, True, [])


def test_xet_is_not_used_where_it_is_installed(machine, hub, dataset):
    pytest.importorskip("hf_xet")
    done = machine.run("upload", str(dataset), WHERE, HF_HUB_DISABLE_XET="")
    assert (done.returncode, "Xet" in done.stderr) == (0, False), done.stderr
    assert hub.paths("xet") == []
    assert digests(hub.tree("me/walks")) == files_of(dataset)


def test_the_document(machine, dataset):
    document = machine.json("upload", str(dataset), WHERE)
    assert document["kind"] == "upload"
    assert document["files"] == len(json.loads((dataset / MANIFEST).read_text())["files"]) + 1
    assert document["bytes_sent"] > 0
