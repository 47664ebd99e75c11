"""`rbtool upload` to a hub on loopback, by the real client: what is there afterwards, and what is never sent."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hub import WRITER, Fault, UploadHub
from machine import Uploader, files_of, write_layouts
from waiting import HANG, wait_until

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


OBJECT, COMMIT, CREATE, BATCH = "PUT /lfs/", "POST .*/commit/", "POST /api/repos/create", "POST .*/batch"
OCCUPIED = '{"error": "Cannot create repo: another conflicting operation is in progress"}'

SLOW = pytest.mark.slow
FAULTS = [
    pytest.param(Fault("GET", "status:401", 99), 5, "HF_TOKEN", id="401"),
    pytest.param(Fault(CREATE, "status:403", 99), 5, "403 Forbidden", id="403 for the repository", marks=SLOW),
    pytest.param(Fault(COMMIT, "status:403", 99), 5, "no right to write", id="403 for the commit"),
    pytest.param(
        Fault("POST .*/preupload/", "status:404", 99), 4, "404", id="the repository is removed meanwhile", marks=SLOW
    ),
    pytest.param(Fault(COMMIT, "status:413", 99), 5, "too large", id="413", marks=SLOW),
    pytest.param(
        Fault(COMMIT, "status:400", 99, body='{"error": "bad name"}'), 5, "bad name", id="400 with a reason", marks=SLOW
    ),
    pytest.param(Fault(OBJECT, "status:429", 1, headers={"Retry-After": "0"}), 0, "", id="429 once"),
    pytest.param(
        Fault(OBJECT, "status:429", 99, headers={"Retry-After": "9000"}), 5, "9,000 s", id="429 for hours", marks=SLOW
    ),
    pytest.param(Fault("/api/", "status:500", 1), 0, "", id="500 once from the API", marks=SLOW),
    pytest.param(Fault(OBJECT, "status:503", 2), 0, "", id="503 twice for an object"),
    pytest.param(Fault(OBJECT, "status:503", 99), 5, "503", id="503 for ever for objects", marks=SLOW),
    pytest.param(Fault(OBJECT, "broken:2000", 2), 0, "", id="an object broken off twice", marks=SLOW),
    pytest.param(
        Fault(OBJECT, "broken:2000", 99), 5, "could not be sent to", id="objects broken off for ever", marks=SLOW
    ),
    pytest.param(Fault(OBJECT, "lost", 1), 0, "", id="the answer to an object is lost", marks=SLOW),
    pytest.param(Fault(OBJECT, "slow:20", 1), 0, "", id="an object is not answered once", marks=SLOW),
    pytest.param(Fault(BATCH, "status:502", 1), 0, "", id="502 once for a batch", marks=SLOW),
    pytest.param(Fault(BATCH, "status:200", 99, body='{"objects": 5}'), 1, "", id="answers without sense", marks=SLOW),
    pytest.param(Fault(CREATE, "lost", 1), 0, "", id="the answer to the repository is lost", marks=SLOW),
    pytest.param(Fault(CREATE, "status:409", 2, body=OCCUPIED), 0, "another change", id="another repository is made"),
    pytest.param(
        Fault(CREATE, "status:409", 9999, body=OCCUPIED), 5, "another change", id="others are made for ever", marks=SLOW
    ),
    pytest.param(Fault(CREATE, "reset", 1), 0, "", id="the repository fails once", marks=SLOW),
    pytest.param(Fault(COMMIT, "lost", 1), 0, "", id="the answer to the commit is lost"),
    pytest.param(Fault(COMMIT, "reset", 1), 0, "", id="the commit fails once"),
    pytest.param(Fault(COMMIT, "status:412", 1), 0, "", id="412 once, and nothing has changed", marks=SLOW),
    pytest.param(Fault(COMMIT, "status:503", 99), 5, "503", id="503 for ever for the commit", marks=SLOW),
    pytest.param(Fault("GET .*/tree/", "reset", 99), 5, "", id="the list of files for ever", marks=SLOW),
]


@pytest.fixture
def machine_of_upload_faults(hub, tmp_path):
    write_walks(tmp_path / "walks", [(300, "terminated"), (1, "truncated"), (400, "both")])
    return Uploader(hub, tmp_path)


def require_whole(hub, machine_of_upload_faults, commits=2):
    """Require that each commit but the first has all of the dataset, and that so many commits were made."""
    history, wanted = hub.histories["me/walks"], files_of(machine_of_upload_faults.folder / "walks").keys()
    assert [files.keys() >= wanted for files in history.commits.values()] == [False, *[True] * (commits - 1)]


@pytest.mark.parametrize(("fault", "code", "sentence"), FAULTS)
def test_a_fault_is_survived_or_named_and_the_next_run_completes(hub, machine_of_upload_faults, fault, code, sentence):
    hub.faults.append(replace(fault))
    done = machine_of_upload_faults.run("upload", "walks", WHERE)
    assert (done.returncode, done.stderr.count("Traceback")) == (code, 0), done.stderr
    assert sentence in done.stderr
    assert done.stderr.count("error: ") == (code != 0)
    hub.faults.clear()
    if code:
        machine_of_upload_faults.json("upload", "walks", WHERE)
    require_whole(hub, machine_of_upload_faults)


def test_the_client_is_left_to_other_threads(hub, machine_of_upload_faults):
    hub.create("me/other")
    hub.faults.append(Fault(OBJECT, "slow:1", 1))
    script = """
import threading
import rbtool
from huggingface_hub import HfApi, errors, get_session
one = threading.Thread(target=rbtool.upload, args=("walks", "hf://me/walks"))
one.start()
seen = []
while one.is_alive():
    seen.append(HfApi().dataset_info("me/other").id)
    try:
        HfApi().dataset_info("me/nothing")
    except errors.RepositoryNotFoundError:
        seen.append("theirs")
    assert get_session().timeout.read is None
one.join()
print(sorted(set(seen)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=machine_of_upload_faults.folder,
        env=machine_of_upload_faults.variables,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "['me/other', 'theirs']\n"), done.stderr
    require_whole(hub, machine_of_upload_faults)


def test_only_what_is_missing_is_sent_again(hub, machine_of_upload_faults):
    hub.faults.append(Fault(COMMIT, "status:503", 99))
    assert machine_of_upload_faults.run("upload", "walks", WHERE).returncode == 5
    sent = hub.sent()
    assert len(sent) > 5
    hub.faults.clear()
    lost = sent[2].rpartition("/")[2]
    del hub.objects[lost]
    hub.forget()
    machine_of_upload_faults.json("upload", "walks", WHERE)
    assert [path.rpartition("/")[2] for path in hub.sent()] == [lost]


def test_a_change_by_somebody_else_is_never_overwritten(hub, machine_of_upload_faults):
    hub.create("me/walks")

    def push(line):
        if "/commit/" in line and len(hub.histories["me/walks"].commits) == 1:
            hub.push("me/walks", {"theirs.txt": b"theirs"})

    hub.before = push
    done = machine_of_upload_faults.run("upload", "walks", WHERE)
    assert (done.returncode, "changed by another client" in done.stderr) == (5, True), done.stderr
    assert hub.tree("me/walks")["theirs.txt"] == b"theirs"
    assert machine_of_upload_faults.run("upload", "walks", WHERE).returncode == 2


def test_two_uploads_of_one_dataset_at_once(hub, machine_of_upload_faults):
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda _: machine_of_upload_faults.run("upload", "walks", WHERE, "-q"), range(2)))
    assert [done.returncode for done in both] == [0, 0], both
    assert hub.tree("me/walks").keys() > files_of(machine_of_upload_faults.folder / "walks").keys()
    assert len({done.stdout for done in both}) == len(hub.histories["me/walks"].commits) - 1


def test_two_uploads_of_different_datasets_at_once(hub, machine_of_upload_faults):
    write_walks(machine_of_upload_faults.folder / "other", [(500, "truncated")], seed=3)
    names = ("walks", "other")
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda name: machine_of_upload_faults.run("upload", name, WHERE, "-q"), names))
    codes = [done.returncode for done in both]
    assert 0 in set(codes) <= {0, 2, 5}, both
    winner = names[codes.index(0)]
    assert files_of(machine_of_upload_faults.folder / winner).keys() <= hub.tree("me/walks").keys()
    assert len(hub.histories["me/walks"].commits) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_soon_and_the_next_run_completes(hub, machine_of_upload_faults, number):
    hub.faults.append(Fault(OBJECT, "held", 99))
    process = machine_of_upload_faults.start("upload", "walks", WHERE, RBTOOL_TIMEOUT=str(2 * HANG))
    wait_until(lambda: hub.faults[0].times < 99 or process.poll() is not None, "the arrival of an object")
    process.send_signal(number)
    _, err = process.communicate(timeout=HANG)  # less than it would wait for the answer
    assert process.returncode == (130 if number == signal.SIGINT else 143), err
    assert "run it again: what was sent is not sent again" in err
    hub.faults.clear()
    machine_of_upload_faults.json("upload", "walks", WHERE)
    require_whole(hub, machine_of_upload_faults)
