"""`rbtool download` with every kind of bad luck: the right exit code, and the next run completes."""

from __future__ import annotations

import json
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import h5py
import pytest
from hub import Fault, Hub
from machine import DATA, DOOR, INFO, MAIN, SMALL, Machine
from waiting import HANG

from rbtool.core.format.memmap.reader import TedReader

SLOW = pytest.mark.slow
FAULTS = [
    pytest.param(Fault(MAIN, "status:404", 99), 4, "main_data.hdf5", id="404 on a file"),
    pytest.param(Fault("GET", "status:401", 99), 5, "401", id="401"),
    pytest.param(Fault("GET", "status:403", 99), 5, "403 Forbidden", id="403", marks=SLOW),
    pytest.param(Fault(MAIN, "status:429", 1, headers={"Retry-After": "0"}), 0, "", id="429 with Retry-After once"),
    pytest.param(
        Fault(MAIN, "status:429", 99, headers={"Retry-After": "9000"}),
        5,
        "9,000 s",
        id="429 with a Retry-After of hours",
    ),
    pytest.param(Fault("/api/", "status:500", 1), 0, "", id="500 once from the API", marks=SLOW),
    pytest.param(Fault(MAIN, "status:503", 1), 0, "", id="503 once"),
    pytest.param(Fault("GET", "status:500", 99), 5, "500", id="500 for ever", marks=SLOW),
    pytest.param(Fault(MAIN, "status:503", 99), 5, "503", id="503 for ever"),
    pytest.param(Fault(MAIN, "reset", 1), 0, "", id="reset once"),
    pytest.param(Fault(MAIN, "reset", 99), 5, "", id="reset for ever", marks=SLOW),
    pytest.param(Fault(MAIN, "corrupt", 1), 0, "", id="a corrupt byte once", marks=SLOW),
    pytest.param(Fault(MAIN, "corrupt", 99), 1, "sha256", id="a corrupt byte for ever"),
    pytest.param(Fault(INFO, "corrupt", 99), 1, "git-sha1", id="a corrupt byte in a small file"),
    pytest.param(Fault(INFO, "corrupt", 1), 0, "", id="a corrupt byte in a small file once", marks=SLOW),
    pytest.param(Fault(MAIN, "norange", 99), 0, "", id="no ranges"),
    pytest.param(Fault(MAIN, "slow:0.5", 1), 0, "", id="slow", marks=SLOW),
    pytest.param(Fault(MAIN, "stall:20000", 1), 0, "", id="stalled once", marks=SLOW),
    pytest.param(Fault("/api/", "slow:30", 99), 5, "did not answer", id="a stalled API"),
    pytest.param(Fault(MAIN, "slow:30", 99), 5, "did not answer", id="a stalled file", marks=SLOW),
]


@pytest.mark.parametrize(("fault", "code", "sentence"), FAULTS)
def test_a_fault_is_survived_or_named_and_the_next_run_completes(hub_root, tmp_path, expected, fault, code, sentence):
    with Hub(hub_root) as server:
        machine = Machine(server, tmp_path)
        server.faults.append(replace(fault))
        done = machine.run("download", "minari", SMALL)
        assert (done.returncode, done.stderr.count("Traceback")) == (code, 0), done.stderr
        assert sentence in done.stderr
        assert done.stderr.count("error: ") == (code != 0)
        server.faults.clear()
        assert machine.json("download", "minari", SMALL)["content_digest"] == expected(SMALL)
        assert machine.leftovers() == []


@pytest.mark.parametrize(
    "tenth", [tenth if tenth in (0, 4) else pytest.param(tenth, marks=SLOW) for tenth in range(10)]
)
def test_a_body_that_is_cut_goes_on_where_it_ended(hub_root, tmp_path, expected, tenth):
    size = (DATA / SMALL / "data/main_data.hdf5").stat().st_size
    with Hub(hub_root) as server:
        machine = Machine(server, tmp_path)
        server.faults.append(Fault(MAIN, f"cut:{size * tenth // 10}"))
        document = machine.json("download", "minari", SMALL)
        assert document["content_digest"] == expected(SMALL)
        ranges = [asked.range for asked in server.requests if "main_data" in asked.path and asked.status in (200, 206)]
        assert ranges[-1] == (f"bytes={size * tenth // 10}-" if tenth else None)


def test_only_what_was_not_verified_is_fetched_again(machine, hub, expected):
    hub.faults.append(Fault(MAIN, "status:503", 99))
    assert machine.run("download", "minari", SMALL).returncode == 5
    hub.faults.clear()
    hub.forget()
    assert machine.json("download", "minari", SMALL)["content_digest"] == expected(SMALL)
    assert [name for name in machine.fetched() if name == "main_data.hdf5"] == ["main_data.hdf5"]
    assert "metadata.json" not in machine.fetched()


def test_paging(hub_root, tmp_path, expected):
    with Hub(hub_root, page_size=2) as server:
        machine = Machine(server, tmp_path)
        assert machine.json("download", "minari", "griddict-random-parquet")["content_digest"] == expected(
            "griddict/random-parquet-v0"
        )


def test_a_token_is_sent_and_never_shown(machine, hub, expected):
    hub.token = "hf_abcdefghijklmnop"
    refused = machine.run("download", "minari", SMALL, "--debug", "-v", "--log-file", "log.txt")
    assert (refused.returncode, "HF_TOKEN" in refused.stderr) == (5, True)
    done = machine.run("download", "minari", SMALL, "--debug", "-v", "--log-file", "log.txt", HF_TOKEN=hub.token)
    assert done.returncode == 0, done.stderr
    wrong = machine.run("download", "minari", DOOR, "--debug", "-v", "--log-file", "log.txt", HF_TOKEN="hf_wrongwrong")
    assert wrong.returncode == 5
    said = done.stdout + done.stderr + wrong.stdout + wrong.stderr + (machine.folder / "log.txt").read_text()
    assert not any(token in said for token in ("hf_abc", "hf_wrong"))
    assert not any(b"hf_abc" in path.read_bytes() for path in machine.store.rglob("*") if path.is_file())


def test_a_proxy_is_used_and_never_shown(machine, hub):
    proxy = "http://someone:secret@127.0.0.1:9"
    variables = {"http_proxy": proxy, "HTTP_PROXY": proxy, "NO_PROXY": "", "no_proxy": ""}
    done = machine.run("download", "minari", SMALL, "--debug", "-v", "--log-file", "log.txt", **variables)
    assert done.returncode == 5
    said = done.stdout + done.stderr + (machine.folder / "log.txt").read_text()
    assert not any(word in said for word in ("someone", "secret", "127.0.0.1:9/", "127.0.0.1:9 ", "127.0.0.1:9'"))
    assert hub.requests == []


def test_a_gated_repository_names_the_page(machine, hub):
    hub.gated.add("farama-minari/cartpole")
    done = machine.run("download", "minari", SMALL)
    assert done.returncode == 5
    assert f"{hub.url}/datasets/farama-minari/cartpole" in done.stderr


@pytest.mark.parametrize("how", ["no index", "broken index"])
def test_a_repository_whose_index_is_missing_or_broken(hub_root, tmp_path, expected, how):
    root = Path(shutil.copytree(hub_root, tmp_path / "hub"))
    index = root / "farama-minari/cartpole/namespace_metadata.json"
    index.unlink() if how == "no index" else index.write_text("{")
    with Hub(root) as server:
        machine = Machine(server, tmp_path)
        assert machine.json("download", "minari", SMALL)["content_digest"] == expected(SMALL)
        assert machine.json("download", "minari", "door-human-v1")["id"] == DOOR


def test_a_remote_that_changes_between_listing_and_fetching(hub_root, tmp_path):
    root = Path(shutil.copytree(hub_root, tmp_path / "hub"))
    with Hub(root) as server:
        machine = Machine(server, tmp_path)
        server.faults.append(Fault(MAIN, "held", 1))
        process = machine.start("download", "minari", SMALL, "--json")
        while server.faults[0].times:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        with h5py.File(root / "farama-minari" / SMALL / "data/main_data.hdf5", "r+") as file:
            file["episode_0/rewards"][0] = 12345
        server.rescan()
        server.released.set()
        out, err = process.communicate(timeout=HANG)
        assert process.returncode == 0, err
        assert "changed during the fetch" in err
        path = Path(json.loads(out)["path"])
        with TedReader(path) as reader:
            assert reader.read(("next", "reward"), 0, 1)[0, 0] == 12345
            assert reader.manifest.resolved_revision == server.repositories["farama-minari/cartpole"].commit


def test_two_processes_at_once_download_once(machine, hub, expected):
    hub.faults.append(Fault(MAIN, "slow:1", 1))
    with ThreadPoolExecutor() as pool:
        documents = list(pool.map(lambda _: machine.json("download", "minari", SMALL), range(2)))
    assert {document["content_digest"] for document in documents} == {expected(SMALL)}
    assert sorted(document["already_there"] for document in documents) == [False, True]
    assert machine.fetched().count("main_data.hdf5") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_download_that_is_stopped_goes_on_later(machine, hub, expected, number):
    hub.faults.append(Fault(MAIN, "stall:20000", 1))
    process = machine.start("download", "minari", SMALL, RBTOOL_TIMEOUT=str(2 * HANG))
    part = machine.store / "minari/.originals/cartpole%2Fscripted-v0/files/data/main_data.hdf5.part"
    while not hub.paths("main_data") or not part.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=HANG)  # less than it would wait for the rest
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number], err
    assert machine.json("download", "minari", SMALL)["content_digest"] == expected(SMALL)
    assert machine.leftovers() == []


@pytest.mark.parametrize("variable", ["RBTOOL_OFFLINE", "HF_HUB_OFFLINE"])
def test_without_the_network_what_needs_it_says_so_at_once(machine, hub, variable):
    for words in ("download minari cartpole/scripted-v0", "download minari door-human-v1", "list --remote minari"):
        done = machine.run(*words.split(), **{variable: "1"})
        assert (done.returncode, variable in done.stderr) == (5, True), done.stderr
    assert hub.requests == []


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["download", "minari", "../up-v0"], 2, "is not a dataset id"),
        (["download", "arcade", "pong-v0"], 2, "source 'arcade' is unknown"),
        (["download", "minari", SMALL, "--local", "--frozen"], 2, "--frozen needs the remote"),
        (["download", "minari", SMALL, "--frozen", "--force"], 2, "leave one out"),
        (["download", "minari", SMALL, "--episodes", "7:3"], 2, "holds no episode"),
        (["download", "minari", SMALL, "--episodes", "100000"], 2, "100000"),
        (
            ["download", "minari", SMALL, "--episodes", ",".join(map(str, range(100)))],
            2,
            "100 single episodes, expected",
        ),
        (["download", "minari", "door*"], 2, "is a pattern"),
        (["download", SMALL], 2, "no source named"),
        (["download", "minari"], 2, "no dataset named"),
        (["list", "--refresh"], 2, "add --remote minari"),
    ],
)
def test_bad_words(machine, words, code, sentence):
    done = machine.run(*words)
    assert (done.returncode, sentence in done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize("remote", ["ftp://somewhere", "farama-minari", "hf://", "hf://a/b/c"])
def test_a_remote_that_is_none(machine, remote):
    done = machine.run("download", "minari", SMALL, MINARI_REMOTE=remote)
    assert (done.returncode, "MINARI_REMOTE" in done.stderr) == (2, True), done.stderr


def test_no_server_at_all(machine, hub):
    done = machine.run("download", "minari", SMALL, HF_ENDPOINT="http://127.0.0.1:9")
    assert (done.returncode, done.stderr.count("error: ")) == (5, 1), done.stderr
    assert "is kept" not in done.stderr


def test_a_server_whose_name_no_one_resolves(machine, hub):
    done = machine.run("download", "minari", SMALL, HF_ENDPOINT="http://hub.invalid")
    assert (done.returncode, done.stderr.count("error: ")) == (5, 1), done.stderr
    assert "its address could not be looked up" in done.stderr
    assert "is kept" not in done.stderr


def test_what_came_before_the_network_went_is_kept(machine, hub):
    hub.faults += [Fault(MAIN, "cut:20000", 1), Fault(MAIN, "reset", 99)]
    done = machine.run("download", "minari", SMALL)
    assert (done.returncode, "hint: run it again: what was fetched so far is kept" in done.stderr) == (5, True), (
        done.stderr
    )
