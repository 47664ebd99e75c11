"""`rbtool download` from a hub on loopback: real processes, real client, every kind of bad luck."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from download_machine import Machine
from hub import Fault, Hub
from minari_hub import lay_out_hub

import rbtool
from rbtool.core.dataset import TedReader

DATA = Path(__file__).parents[1] / "data" / "minari"
DOOR = "D4RL/door/human-v2"
SMALL = "cartpole/scripted-v0"
MAIN = r"GET .*/resolve/.*main_data\.hdf5"
INFO = r"GET .*/resolve/.*scripted-v0/data/metadata\.json"


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


def test_the_first_line_a_user_types(machine):
    done = machine.run("download", "minari", "door-human-v1")
    folder = machine.store / "minari" / DOOR
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    assert f"door-human-v1 is published today as {DOOR}" in done.stderr
    assert machine.leftovers() == []
    with TedReader(folder) as ours, h5py.File(DATA / DOOR / "data/main_data.hdf5") as theirs:
        request = ours.manifest.request
        assert (request.asked, request.id, request.origin) == ("minari:door-human-v1", DOOR, "remote")
        assert (ours.manifest.episodes, ours.manifest.steps) == (25, 6704)
        row = 0
        for number in range(25):
            episode = theirs[f"episode_{number}"]
            steps = len(episode["rewards"])
            rows = (row, row + steps)
            assert np.array_equal(ours.read(("observation",), *rows), episode["observations"][:-1])
            assert np.array_equal(ours.read(("next", "observation"), *rows), episode["observations"][1:])
            assert np.array_equal(ours.read(("action",), *rows), episode["actions"])
            assert np.array_equal(ours.read(("next", "reward"), *rows)[:, 0], episode["rewards"])
            row += steps
        assert row == ours.manifest.steps


def test_the_document_says_what_was_asked_and_what_it_means(machine):
    document = machine.json("download", "minari", "door-human-v1")
    assert (document["asked"], document["resolved"], document["id"]) == ("door-human-v1", "words", DOOR)
    assert document["request"]["asked"] == "minari:door-human-v1"
    assert document["fetched_from"].startswith("hf://farama-minari/D4RL@")
    assert document["fetch"]["files"] == 2


def test_what_is_there_is_answered_at_once_without_the_network(machine, hub):
    first = machine.json("download", "minari", "door-human-v1")
    hub.forget()
    for words in (["minari", "door-human-v1"], ["minari", DOOR], [f"minari:{DOOR}"]):
        again = machine.json("download", *words, RBTOOL_OFFLINE="1")
        assert (again["already_there"], again["content_digest"]) == (True, first["content_digest"])
    assert hub.requests == []


def test_the_local_cache_and_the_remote_make_one_and_the_same(machine, hub):
    shutil.copytree(DATA / SMALL, machine.folder / "minari" / SMALL)
    first = machine.json("download", "minari", SMALL)
    again = machine.json("download", "minari", SMALL, "--local")
    assert (again["already_there"], again["content_digest"]) == (True, first["content_digest"])
    with h5py.File(machine.folder / "minari" / SMALL / "data/main_data.hdf5", "r+") as file:
        file["episode_0/rewards"][0] += 1
    done = machine.run("download", "minari", SMALL, "--local")
    assert (done.returncode, "another state of the source" in done.stderr) == (2, True)


def test_a_dataset_without_a_version_is_its_latest(machine):
    document = machine.json("download", "minari", "D4RL/door/human")
    assert (document["id"], document["resolved"]) == (DOOR, "latest")


def test_an_exact_id_is_taken_as_it_is(machine):
    done = machine.run("download", "minari", "door-human-v1", "--exact-id")
    assert (done.returncode, done.stdout) == (4, "")
    assert "D4RL/door/human-v2" in done.stderr


def test_a_namespaced_id_with_a_version_is_never_replaced(machine):
    done = machine.run("download", "minari", "D4RL/door/human-v1")
    assert (done.returncode, done.stdout) == (4, "")
    assert "nearest: D4RL/door/human-v2" in done.stderr


def test_several_candidates_are_listed(machine):
    done = machine.run("download", "minari", "cartpole")
    assert done.returncode == 2
    assert all(name in done.stderr for name in ("cartpole/scripted", "cartpole/single-episode"))


def test_a_dataset_without_a_namespace(hub_root, tmp_path, expected):
    root = tmp_path / "hub"
    shutil.copytree(DATA / SMALL, root / "farama-minari" / "flat-v0")
    with Hub(root) as server:
        document = Machine(server, tmp_path).json("download", "minari", "flat-v0")
    assert document["content_digest"] == expected(SMALL)


def test_episodes_of_an_arrow_dataset_fetch_only_their_files(machine):
    document = machine.json("download", "minari", "cartpole/scripted-arrow-v0", "--episodes", "1")
    assert document["episodes"] == 1
    assert machine.fetched().count("part-0.arrow") == 1
    assert "@" in Path(document["path"]).name


def test_a_dry_run_fetches_and_writes_nothing(machine):
    document = machine.json("download", "minari", SMALL, "--dry-run")
    assert document["dry_run"]
    assert (document["fetch"]["files"], document["fetch"]["bytes_present"]) == (2, 0)
    assert document["fetch"]["bytes"] == sum(path.stat().st_size for path in (DATA / SMALL / "data").iterdir())
    assert "main_data.hdf5" not in machine.fetched()
    assert not machine.store.exists()


def test_the_originals_are_kept_where_asked(machine, hub):
    document = machine.json("download", "minari", SMALL, "--keep-source")
    kept = Path(document["originals"])
    assert (kept / "data/main_data.hdf5").read_bytes() == (DATA / SMALL / "data/main_data.hdf5").read_bytes()
    hub.forget()
    some = machine.json("download", "minari", SMALL, "--episodes", "0:2")
    assert (some["episodes"], [name for name in machine.fetched() if name.endswith("hdf5")]) == (2, [])
    assert kept.is_dir()


def test_originals_can_be_had_of_a_dataset_that_is_there(machine):
    machine.json("download", "minari", SMALL)
    document = machine.json("download", "minari", SMALL, "--keep-source")
    assert document["already_there"]
    assert (Path(document["originals"]) / "data/main_data.hdf5").is_file()


def test_a_frozen_dataset_is_compared_with_the_remote(hub_root, tmp_path):
    root = Path(shutil.copytree(hub_root, tmp_path / "hub"))
    with Hub(root) as server:
        machine = Machine(server, tmp_path)
        assert machine.run("download", "minari", SMALL, "--frozen").returncode == 4
        machine.json("download", "minari", SMALL)
        (root / "farama-minari/cartpole/README.md").write_text("a new word\n")
        server.rescan()
        assert machine.json("download", "minari", SMALL, "--frozen")["already_there"]
        with h5py.File(root / "farama-minari" / SMALL / "data/main_data.hdf5", "r+") as file:
            file["episode_0/rewards"][0] += 1
        server.rescan()
        done = machine.run("download", "minari", SMALL, "--frozen")
        assert (done.returncode, "is not what" in done.stderr) == (3, True)
        assert machine.run("download", "minari", SMALL).returncode == 0


def test_a_revision_is_a_dataset_of_its_own(machine, hub):
    commit = hub.repositories["farama-minari/cartpole"].commit
    document = machine.json("download", "minari", SMALL, "--revision", commit)
    assert "@" in Path(document["path"]).name
    assert document["request"]["revision"] == commit
    done = machine.run("download", "minari", SMALL, "--revision", "nowhere")
    assert (done.returncode, "nowhere" in done.stderr) == (4, True)


ARROW = "cartpole/scripted-arrow-v0"


def test_what_is_kept_beside_does_not_get_in(machine, tmp_path, hub):
    fresh = Machine(hub, tmp_path / "fresh")
    fresh.folder.mkdir()
    expected = fresh.json("download", "minari", "griddict/random-parquet-v0", "--episodes", "2")
    machine.json("download", "minari", "griddict/random-parquet-v0", "--episodes", "0:2", "--keep-source")
    document = machine.json("download", "minari", "griddict/random-parquet-v0", "--episodes", "2")
    assert document["content_digest"] == expected["content_digest"]


def test_an_episode_that_the_remote_drops_is_gone(hub_root, tmp_path):
    root = Path(shutil.copytree(hub_root, tmp_path / "hub"))
    with Hub(root) as server:
        machine = Machine(server, tmp_path)
        machine.json("download", "minari", ARROW, "--keep-source")
        folder = root / "farama-minari" / ARROW / "data"
        shutil.rmtree(folder / "2")
        metadata = json.loads((folder / "metadata.json").read_text())
        (folder / "metadata.json").write_text(json.dumps(metadata | {"total_episodes": 2, "total_steps": 1000}))
        server.rescan()
        assert machine.json("download", "minari", ARROW, "--force")["episodes"] == 2
        assert machine.run("cache", "verify").returncode == 0


def test_originals_that_were_cut_are_not_taken_for_kept(machine, hub):
    machine.json("download", "minari", SMALL)
    hub.faults.append(Fault(MAIN, "status:503", 99))
    assert machine.run("download", "minari", SMALL, "--keep-source").returncode == 5
    hub.faults.clear()
    document = machine.json("download", "minari", SMALL, "--keep-source")
    assert (Path(document["originals"]) / "data/main_data.hdf5").is_file()


def test_originals_of_some_episodes_are_not_those_of_all(machine):
    machine.json("download", "minari", ARROW, "--episodes", "0", "--keep-source")
    document = machine.json("download", "minari", ARROW, "--keep-source")
    assert len(list(Path(document["originals"]).rglob("part-0.arrow"))) == 3


def test_originals_of_another_state_are_not_kept(hub_root, tmp_path):
    root = Path(shutil.copytree(hub_root, tmp_path / "hub"))
    with Hub(root) as server:
        machine = Machine(server, tmp_path)
        machine.json("download", "minari", SMALL)
        with h5py.File(root / "farama-minari" / SMALL / "data/main_data.hdf5", "r+") as file:
            file["episode_0/rewards"][0] += 1
        server.rescan()
        done = machine.run("download", "minari", SMALL, "--keep-source")
        assert done.returncode == 4  # the hub has forgotten the commit that it was made from


def test_some_episodes_of_the_remote_and_of_the_cache_are_one(machine):
    shutil.copytree(DATA / ARROW, machine.folder / "minari" / ARROW)
    machine.json("download", "minari", ARROW, "--episodes", "1")
    assert machine.json("download", "minari", ARROW, "--episodes", "1", "--local")["already_there"]


def test_an_id_without_a_namespace_is_there_at_once(tmp_path):
    root = tmp_path / "hub"
    shutil.copytree(DATA / SMALL, root / "farama-minari" / "flat-v0")
    with Hub(root) as server:
        machine = Machine(server, tmp_path)
        machine.json("download", "minari", "flat-v0")
        assert machine.json("download", "minari", "flat-v0", RBTOOL_OFFLINE="1")["already_there"]


def test_a_name_is_not_guessed_while_part_of_the_remote_is_down(hub_root, tmp_path):
    root = Path(shutil.copytree(hub_root, tmp_path / "hub"))
    shutil.copytree(DATA / SMALL, root / "farama-minari/cartpole/door-human-extra-v0")
    index = root / "farama-minari/cartpole/namespace_metadata.json"
    index.write_text(json.dumps({"datasets": ["cartpole/door-human-extra-v0"]}))
    with Hub(root) as server:
        machine = Machine(server, tmp_path)
        server.faults.append(Fault("/D4RL/resolve", "status:503", 99))
        done = machine.run("download", "minari", "door-human-v1")
        assert (done.returncode, "cannot be told" in done.stderr) == (5, True), done.stderr
        server.faults.clear()
        assert machine.json("download", "minari", "door-human-v1")["id"] == DOOR


def test_what_was_the_latest_is_asked_for_anew_when_it_is_gone(hub_root, tmp_path):
    root = Path(shutil.copytree(hub_root, tmp_path / "hub"))
    with Hub(root) as server:
        machine = Machine(server, tmp_path)
        assert machine.json("download", "minari", "D4RL/door/human")["id"] == DOOR
        shutil.copytree(root / "farama-minari" / DOOR, root / "farama-minari/D4RL/door/human-v3")
        index = root / "farama-minari/D4RL/namespace_metadata.json"
        index.write_text(json.dumps({"datasets": [DOOR, "D4RL/door/human-v3"]}))
        server.rescan()
        assert machine.json("download", "minari", "D4RL/door/human")["id"] == DOOR
        assert machine.run("cache", "rm", f"minari:{DOOR}", "--yes").returncode == 0
        assert machine.json("download", "minari", "D4RL/door/human")["id"] == "D4RL/door/human-v3"


def test_a_substitution_is_said_even_quietly(machine):
    done = machine.run("download", "minari", "door-human-v1", "-q")
    assert f"published today as {DOOR}" in done.stderr


def test_a_wait_is_said(machine, hub):
    hub.faults.append(Fault(MAIN, "status:429", 1, headers={"Retry-After": "1"}))
    assert "trying again in 1 s" in machine.run("download", "minari", SMALL).stderr


# Bad luck --------------------------------------------------------------------------------------------

FAULTS = [
    pytest.param(Fault(MAIN, "status:404", 99), 4, "main_data.hdf5", id="404 on a file"),
    pytest.param(Fault("GET", "status:401", 99), 5, "401", id="401"),
    pytest.param(Fault("GET", "status:403", 99), 5, "403 Forbidden", id="403"),
    pytest.param(Fault(MAIN, "status:429", 1, headers={"Retry-After": "0"}), 0, "", id="429 with Retry-After once"),
    pytest.param(
        Fault(MAIN, "status:429", 99, headers={"Retry-After": "9000"}),
        5,
        "9,000 s",
        id="429 with a Retry-After of hours",
    ),
    pytest.param(Fault("/api/", "status:500", 1), 0, "", id="500 once from the API"),
    pytest.param(Fault(MAIN, "status:503", 1), 0, "", id="503 once"),
    pytest.param(Fault("GET", "status:500", 99), 5, "500", id="500 for ever"),
    pytest.param(Fault(MAIN, "status:503", 99), 5, "503", id="503 for ever"),
    pytest.param(Fault(MAIN, "reset", 1), 0, "", id="reset once"),
    pytest.param(Fault(MAIN, "reset", 99), 5, "", id="reset for ever"),
    pytest.param(Fault(MAIN, "corrupt", 1), 0, "", id="a corrupt byte once"),
    pytest.param(Fault(MAIN, "corrupt", 99), 1, "sha256", id="a corrupt byte for ever"),
    pytest.param(Fault(INFO, "corrupt", 99), 1, "git-sha1", id="a corrupt byte in a small file"),
    pytest.param(Fault(INFO, "corrupt", 1), 0, "", id="a corrupt byte in a small file once"),
    pytest.param(Fault(MAIN, "norange", 99), 0, "", id="no ranges"),
    pytest.param(Fault(MAIN, "slow:0.5", 1), 0, "", id="slow"),
    pytest.param(Fault(MAIN, "stall:20000", 1), 0, "", id="stalled once"),
    pytest.param(Fault("/api/", "slow:30", 99), 5, "did not answer", id="a stalled API"),
    pytest.param(Fault(MAIN, "slow:30", 99), 5, "did not answer", id="a stalled file"),
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


@pytest.mark.parametrize("tenth", range(10))
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
        server.faults.append(Fault(MAIN, "slow:3", 1))
        process = machine.start("download", "minari", SMALL, "--json", RBTOOL_TIMEOUT="20")
        while not server.paths("main_data"):
            assert process.poll() is None, process.communicate()
            if not any(fault.times for fault in server.faults):
                break
        with h5py.File(root / "farama-minari" / SMALL / "data/main_data.hdf5", "r+") as file:
            file["episode_0/rewards"][0] = 12345
        server.rescan()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "changed while it was fetched" in err
        path = Path(json.loads(out)["path"])
        with TedReader(path) as reader:
            assert reader.read(("next", "reward"), 0, 1)[0, 0] == 12345
            assert reader.manifest.resolved_revision == server.repositories["farama-minari/cartpole"].commit


def test_two_processes_at_once_download_once(machine, hub, expected):
    hub.faults.append(Fault(MAIN, "slow:1", 1))
    both = [machine.start("download", "minari", SMALL, "--json") for _ in range(2)]
    answers = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    documents = [json.loads(out) for out, _ in answers]
    assert {document["content_digest"] for document in documents} == {expected(SMALL)}
    assert sorted(document["already_there"] for document in documents) == [False, True]
    assert machine.fetched().count("main_data.hdf5") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_download_that_is_stopped_goes_on_later(machine, hub, expected, number):
    hub.faults.append(Fault(MAIN, "stall:20000", 1))
    process = machine.start("download", "minari", SMALL, RBTOOL_TIMEOUT="30")
    part = machine.store / "minari/.originals/cartpole%2Fscripted-v0/files/data/main_data.hdf5.part"
    while not hub.paths("main_data") or not part.exists():
        assert process.poll() is None, process.communicate()
    process.send_signal(number)
    _, err = process.communicate(timeout=10)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number], err
    assert machine.json("download", "minari", SMALL)["content_digest"] == expected(SMALL)
    assert machine.leftovers() == []


@pytest.mark.parametrize("variable", ["RBTOOL_OFFLINE", "HF_HUB_OFFLINE"])
def test_without_the_network_what_needs_it_says_so_at_once(machine, hub, variable):
    for words in ("download minari cartpole/scripted-v0", "download minari door-human-v1", "list --remote minari"):
        done = machine.run(*words.split(), **{variable: "1"}, timeout=10)
        assert (done.returncode, variable in done.stderr) == (5, True), done.stderr
    assert hub.requests == []


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["download", "minari", "../up-v0"], 2, "is not a dataset id"),
        (["download", "atari", "pong-v0"], 2, "source 'atari' is unknown"),
        (["download", "minari", SMALL, "--local", "--frozen"], 2, "--frozen is about the remote"),
        (["download", "minari", SMALL, "--frozen", "--force"], 2, "leave one out"),
        (["download", "minari", SMALL, "--episodes", "7:3"], 2, "holds no episode"),
        (["download", "minari", SMALL, "--episodes", "100000"], 2, "100000"),
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


# The listing -----------------------------------------------------------------------------------------


def test_the_remote_is_listed_and_the_listing_kept(machine, hub):
    document = machine.json("list", "--remote", "minari")
    entries = {entry["name"]: entry for entry in document["datasets"]}
    assert len(entries) == 9
    door = entries[f"minari:{DOOR}"]
    assert (door["steps"], door["episodes"], door["stored"]) == (6704, 25, False)
    assert door["bytes"] == sum(path.stat().st_size for path in (DATA / DOOR / "data").iterdir())
    hub.forget()
    again = machine.json("list", "--remote", "minari", "door", RBTOOL_OFFLINE="1")
    assert ([entry["name"] for entry in again["datasets"]], again["cached"]) == ([f"minari:{DOOR}"], True)
    assert hub.requests == []
    assert not machine.json("list", "--remote", "minari", "--refresh")["cached"]
    assert not any(path.endswith("/data/metadata.json") for path in hub.paths("/resolve/"))  # nothing has changed


def test_one_broken_repository_does_not_stop_the_listing(machine, hub):
    hub.faults.append(Fault("/cartpole/", "status:500", 99))
    document = machine.json("list", "--remote", "minari")
    assert len(document["datasets"]) == 6
    assert any("cartpole" in problem for problem in document["problems"])
    hub.faults.clear()
    document = machine.json("list", "--remote", "minari")
    assert (len(document["datasets"]), document["problems"], document["cached"]) == (9, [], False)
