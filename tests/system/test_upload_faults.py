"""`rbtool upload` with bad luck of every kind: the right exit code, no half dataset, and the next run completes."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from hub import Fault, UploadHub
from machine import Uploader, files_of
from waiting import HANG, wait_until

from rbtool.core.testing.datasets import write_walks

WHERE = "hf://me/walks"
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
def hub(tmp_path):
    with UploadHub(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def machine(hub, tmp_path):
    write_walks(tmp_path / "walks", [(300, "terminated"), (1, "truncated"), (400, "both")])
    return Uploader(hub, tmp_path)


def require_whole(hub, machine, commits=2):
    """Require that each commit but the first has all of the dataset, and that so many commits were made."""
    history, wanted = hub.histories["me/walks"], files_of(machine.folder / "walks").keys()
    assert [files.keys() >= wanted for files in history.commits.values()] == [False, *[True] * (commits - 1)]


@pytest.mark.parametrize(("fault", "code", "sentence"), FAULTS)
def test_a_fault_is_survived_or_named_and_the_next_run_completes(hub, machine, fault, code, sentence):
    hub.faults.append(replace(fault))
    done = machine.run("upload", "walks", WHERE)
    assert (done.returncode, done.stderr.count("Traceback")) == (code, 0), done.stderr
    assert sentence in done.stderr
    assert done.stderr.count("error: ") == (code != 0)
    hub.faults.clear()
    if code:
        machine.json("upload", "walks", WHERE)
    require_whole(hub, machine)


def test_the_client_is_left_to_other_threads(hub, machine):
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
        [sys.executable, "-c", script], cwd=machine.folder, env=machine.variables, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "['me/other', 'theirs']\n"), done.stderr
    require_whole(hub, machine)


def test_only_what_is_missing_is_sent_again(hub, machine):
    hub.faults.append(Fault(COMMIT, "status:503", 99))
    assert machine.run("upload", "walks", WHERE).returncode == 5
    sent = hub.sent()
    assert len(sent) > 5
    hub.faults.clear()
    lost = sent[2].rpartition("/")[2]
    del hub.objects[lost]
    hub.forget()
    machine.json("upload", "walks", WHERE)
    assert [path.rpartition("/")[2] for path in hub.sent()] == [lost]


def test_a_change_by_somebody_else_is_never_overwritten(hub, machine):
    hub.create("me/walks")

    def push(line):
        if "/commit/" in line and len(hub.histories["me/walks"].commits) == 1:
            hub.push("me/walks", {"theirs.txt": b"theirs"})

    hub.before = push
    done = machine.run("upload", "walks", WHERE)
    assert (done.returncode, "changed by another client" in done.stderr) == (5, True), done.stderr
    assert hub.tree("me/walks")["theirs.txt"] == b"theirs"
    assert machine.run("upload", "walks", WHERE).returncode == 2


def test_two_uploads_of_one_dataset_at_once(hub, machine):
    processes = [machine.start("upload", "walks", WHERE, "-q", forked=True) for _ in range(2)]
    ends = [process.communicate(timeout=HANG) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    assert hub.tree("me/walks").keys() > files_of(machine.folder / "walks").keys()
    assert len({out for out, _ in ends}) == len(hub.histories["me/walks"].commits) - 1


def test_two_uploads_of_different_datasets_at_once(hub, machine):
    write_walks(machine.folder / "other", [(500, "truncated")], seed=3)
    names = ("walks", "other")
    processes = [machine.start("upload", name, WHERE, "-q", forked=True) for name in names]
    ends = [process.communicate(timeout=HANG) for process in processes]
    assert 0 in {process.returncode for process in processes} <= {0, 2, 5}, ends
    winner = names[[process.returncode for process in processes].index(0)]
    assert files_of(machine.folder / winner).keys() <= hub.tree("me/walks").keys()
    assert len(hub.histories["me/walks"].commits) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_soon_and_the_next_run_completes(hub, machine, number):
    hub.faults.append(Fault(OBJECT, "held", 99))
    process = machine.start("upload", "walks", WHERE, RBTOOL_TIMEOUT=str(2 * HANG))
    wait_until(lambda: hub.faults[0].times < 99 or process.poll() is not None, "the arrival of an object")
    process.send_signal(number)
    _, err = process.communicate(timeout=HANG)  # less than it would wait for the answer
    assert process.returncode == (130 if number == signal.SIGINT else 143), err
    assert "run it again: what was sent is not sent again" in err
    hub.faults.clear()
    machine.json("upload", "walks", WHERE)
    require_whole(hub, machine)
