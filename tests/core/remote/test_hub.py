"""A hub on loopback, asked through huggingface_hub in processes of their own, and the sources of its folders."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from commands import ask, ask_one, failed
from hub import Fault, Hub, git_blob_sha1
from waiting import wait_until

SMALL = b'{"a": 1}'
LARGE = bytes(range(256)) * 80
TOKEN = "hf_abcdefghijklmnop"


def write_files(root: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    for name in ("one", "two", "three"):
        files = {"index.json": SMALL, f"deep/er/{name}.bin": LARGE, "deep/note.txt": name.encode()}
        write_files(tmp_path / "hub" / "acme" / name, files)
    with Hub(tmp_path / "hub", page_size=2) as served:
        yield served


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return hub.environment(tmp_path / "home")


def address(hub: Hub, path: str = "index.json", name: str = "one") -> str:
    commit = hub.repositories[f"acme/{name}"].commit
    return f"{hub.url}/datasets/acme/{name}/resolve/{commit}/{path}"


@pytest.mark.parametrize("base", [None, "https://hub.invalid"])
def test_repositories_from_all_pages(hub: Hub, environment: dict[str, str], base: str | None) -> None:
    hub.link_base = base or hub.url
    names = ("acme/one", "acme/three", "acme/two")
    expected = [{"name": name, "commit": hub.repositories[name].commit} for name in names]
    assert ask_one(environment, "hub", "repositories", "acme") == expected
    assert len(hub.requests) == 2


def test_files_of_a_repository_and_of_a_folder(hub: Hub, environment: dict[str, str]) -> None:
    commit = hub.repositories["acme/one"].commit
    whole, folder = ask(environment, "hub", ["tree", "acme/one", commit], ["tree", "acme/one", commit, "deep/er"])
    large = {"path": "deep/er/one.bin", "size": len(LARGE), "checksum": f"sha256:{hashlib.sha256(LARGE).hexdigest()}"}
    small = {"path": "index.json", "size": len(SMALL), "checksum": f"git-sha1:{git_blob_sha1(SMALL)}"}
    assert folder == [large]
    assert [file["path"] for file in whole] == ["deep/er/one.bin", "deep/note.txt", "index.json"]
    assert large in whole
    assert small in whole


def test_a_revision_is_pinned(hub: Hub, environment: dict[str, str]) -> None:
    repository = hub.repositories["acme/one"]
    repository.refs.add("v1/a")
    calls = [["commit", "acme/one", revision] for revision in (None, "main", "v1/a", repository.commit)]
    assert ask(environment, "hub", *calls) == [repository.commit] * 4


def test_missing_revisions_folders_and_hubs_are_named(environment: dict[str, str], hub: Hub) -> None:
    found = failed(ask_one(environment, "hub", "commit", "acme/one", "v9"), "DatasetNotFoundError")
    assert found.message == "the hub does not have the repository acme/one at revision v9: there is no such revision"
    commit = hub.repositories["acme/one"].commit
    failed(ask_one(environment, "hub", "tree", "acme/one", commit, "shallow"), "DatasetNotFoundError")
    nowhere = {**environment, "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert "refused" in failed(ask_one(nowhere, "hub", *CALLS[0]), "NetworkError").message


@pytest.mark.parametrize("hidden", [True, False])
def test_a_missing_repository_may_be_private(hub: Hub, environment: dict[str, str], hidden: bool) -> None:
    hub.hide_missing = hidden
    found = failed(ask_one(environment, "hub", "commit", "acme/four"), "DatasetNotFoundError")
    assert "acme/four" in found.message
    assert ("private and needs HF_TOKEN" in found.message) == hidden


CALLS = (["repositories", "acme"], ["commit", "acme/one"])


@pytest.mark.parametrize("call", CALLS)
def test_a_hub_needs_its_token(hub: Hub, environment: dict[str, str], call: list[str]) -> None:
    hub.token = TOKEN
    found = failed(ask_one(environment, "hub", *call), "AuthorisationError")
    assert "HF_TOKEN" in found.hint
    failed(ask_one({**environment, "HF_TOKEN": "hf_another_token"}, "hub", *call), "AuthorisationError")


def test_the_token_comes_from_the_environment_or_is_stored(hub: Hub, environment, tmp_path: Path) -> None:
    hub.token = TOKEN
    calls = [*CALLS, ["read", address(hub)]]
    assert ask({**environment, "HF_TOKEN": TOKEN}, "hub", *calls)[2] == SMALL.decode()
    (tmp_path / "home").mkdir(exist_ok=True)
    (tmp_path / "home" / "token").write_text(TOKEN, encoding="utf-8")
    assert ask(environment, "hub", *calls)[2] == SMALL.decode()


@pytest.mark.parametrize("token", ["hf_\u00e4bcdefgh", "hf_abc\x7fdefgh"])
def test_an_impossible_token_is_not_sent(hub: Hub, environment: dict[str, str], token: str) -> None:
    found = failed(ask_one({**environment, "HF_TOKEN": token}, "hub", *CALLS[0]), "AuthorisationError")
    assert "characters that no token has" in found.message
    assert hub.requests == []


@pytest.mark.parametrize("proxy", ["http://ann:secret@127.0.0.1:9", "nonsense://ann:secret@127.0.0.1:9"])
def test_a_proxy_is_used_and_not_named(hub: Hub, environment: dict[str, str], proxy: str) -> None:
    through = {**environment, "NO_PROXY": "", "no_proxy": "", "HTTP_PROXY": proxy, "http_proxy": proxy}
    for outcome in ask(through, "hub", CALLS[0], ["read", address(hub)]):
        found = failed(outcome, "NetworkError")
        assert "proxy" in found.hint
        assert not {"ann", "secret"} & set(re.split(r"\W+", found.message + found.hint))
    assert hub.requests == []


def test_the_token_stays_with_the_hub(hub: Hub, environment: dict[str, str]) -> None:
    with Hub(hub.root) as elsewhere:
        moved = address(hub).replace(hub.url, elsewhere.url)
        hub.faults = [Fault("GET .*index.json", "status:302", headers={"Location": moved})]
        calls = [["read", address(hub)], ["read", moved]]
        assert ask({**environment, "HF_TOKEN": TOKEN}, "hub", *calls) == [SMALL.decode()] * 2
    assert [asked.authorization for asked in elsewhere.requests] == [None, None]
    assert [asked.authorization for asked in hub.requests] == [f"Bearer {TOKEN}"]


def test_gated_repositories_name_the_page(hub: Hub, environment: dict[str, str]) -> None:
    hub.gated = {"acme/one"}
    for outcome in ask(environment, "hub", ["commit", "acme/one"], ["read", address(hub)]):
        hint = failed(outcome, "AuthorisationError").hint
        assert f"{hub.url}/datasets/acme/one" in hint
        assert "HF_TOKEN" in hint


PASSING = [
    Fault("", "status:503"), Fault("", "status:500"), Fault("", "status:429", headers={"Retry-After": "0"}),
    Fault("", "reset"), Fault("", "cut:5"), Fault("", "slow:0.05"),
]  # fmt: skip


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: fault.kind)
def test_passing_faults_are_retried(hub: Hub, environment: dict[str, str], fault: Fault) -> None:
    calls = {"/api/": CALLS[1], "/resolve/": ["read", address(hub)]}
    hub.faults = [Fault(match, fault.kind, headers=fault.headers) for match in calls]
    assert ask(environment, "hub", *calls.values()) == [hub.repositories["acme/one"].commit, SMALL.decode()]
    assert len(hub.requests) == (2 if fault.kind.startswith("slow") else 4)


@pytest.mark.parametrize(
    "header", [("Retry-After", "4000"), ("RateLimit", '"api";r=0;t=4000')], ids=lambda pair: pair[0]
)
def test_the_server_says_how_long_to_wait(hub: Hub, environment: dict[str, str], header: tuple[str, str]) -> None:
    hub.faults = [Fault("", "status:429", times=9, headers=dict([header]))]
    found = failed(ask_one(environment, "hub", *CALLS[0]), "NetworkError")
    assert "asks to wait for 4,000 s" in found.message
    assert len(hub.requests) == 1


def test_retries_end(hub: Hub, environment: dict[str, str]) -> None:
    hub.faults = [Fault("", "status:503", times=99)]
    found = failed(ask_one(environment, "hub", *CALLS[0]), "NetworkError")
    assert found.message == "127.0.0.1 could not give the list of datasets of acme now (503 Service Unavailable)"
    assert len(hub.requests) == 3


@pytest.mark.parametrize("kind", ["stall:0", "stall:3", "slow:1000"])
def test_a_silent_server_is_not_waited_for(hub: Hub, environment: dict[str, str], kind: str) -> None:
    hub.faults = [Fault("", kind, times=99)]
    calls = [*CALLS, ["read", address(hub)]]
    short = {**environment, "RBTOOL_TIMEOUT": "0.2", "RBTOOL_RETRIES": "2:0.01"}
    for outcome in ask(short, "hub", *calls):
        assert "did not answer within 0.2 s" in failed(outcome, "NetworkError").message
    wait_until(lambda: hub.faults[0].times <= 99 - 2 * len(calls), "the arrival of two requests for each call")
    assert hub.faults[0].times == 99 - 2 * len(calls)


@pytest.mark.parametrize("variable", ["RBTOOL_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_nothing_is_requested_if_the_network_is_forbidden(hub: Hub, environment: dict[str, str], variable: str) -> None:
    outcomes = ask({**environment, variable: "1"}, "hub", *CALLS)
    assert all(failed(outcome, "NetworkError") for outcome in outcomes)
    assert hub.requests == []


ODD = ["<html>", "[[1]]", '"text"', '{"sha": 7}', "[" * 100_000, '[{"type": "file", "path": "../x", "size": 1}]']


@pytest.mark.parametrize("call", [*CALLS, ["tree", "acme/one", "0" * 40]], ids=lambda call: call[0])
def test_answers_that_make_no_sense_are_refused(hub: Hub, environment: dict[str, str], call: list[str]) -> None:
    hub.faults = [Fault("", "status:200", body=body) for body in ODD]
    for outcome in ask(environment, "hub", *[call] * len(ODD)):
        failed(outcome, "FormatError")


FILES: list[dict[str, object]] = [
    {"path": "/etc/passwd"}, {"path": "a/../../b"}, {"path": "a\\b"}, {"path": 7}, {"size": -1}, {"size": "1"},
    {"oid": "ff"}, {"lfs": {"oid": "0" * 40}},
]  # fmt: skip


def test_entries_that_make_no_sense_are_refused(hub: Hub, environment: dict[str, str]) -> None:
    sound = {"type": "file", "path": "a", "size": 1, "oid": "0" * 40}
    hub.faults = [Fault("", "status:200", body=json.dumps([sound | odd])) for odd in ({}, *FILES)]
    good, *bad = ask(environment, "hub", *[["tree", "acme/one", "0" * 40]] * (1 + len(FILES)))
    assert good == [{"path": "a", "size": 1, "checksum": f"git-sha1:{'0' * 40}"}]
    assert all(failed(outcome, "FormatError") for outcome in bad)


def test_a_refusal_in_words_that_are_not_the_hubs(hub: Hub, environment: dict[str, str]) -> None:
    bodies = ["[1]", '"no"', "<html>", "", '{"error": [1]}', '{"errors": ["a"]}']
    warning = {"X-HF-Warning": "topic; this would be logged to stderr"}
    hub.faults = [Fault("", "status:403", body=body, headers=warning) for body in bodies]
    for outcome in ask(environment, "hub", *[CALLS[0]] * len(bodies)):
        failed(outcome, "AuthorisationError")


def test_a_listing_without_end_is_refused(hub: Hub, environment: dict[str, str]) -> None:
    link = f'<{hub.url}/api/datasets?author=acme>; rel="next"'
    hub.faults = [Fault("", "status:200", times=99, body="[]", headers={"Link": link})]
    assert "no end" in failed(ask_one(environment, "hub", *CALLS[0]), "FormatError").message
    assert len(hub.requests) == 1


def test_files_that_are_too_long_or_gone_are_refused(hub: Hub, environment: dict[str, str]) -> None:
    found = ask_one(environment, "hub", "read", address(hub, "deep/er/one.bin"), 1000)
    assert "has more bytes than expected (1,000)" in failed(found, "FormatError").message
    gone = [address(hub, "index.jsonl"), address(hub).replace("/resolve/", "/resolve/0")[:-1]]
    pinned, unpinned = ask(environment, "hub", *[["read", one] for one in gone])
    failed(pinned, "StaleListing")
    assert "StaleListing" not in failed(unpinned, "DatasetNotFoundError").types


def test_importing_loads_no_client() -> None:
    clients = ("huggingface_hub", "google.cloud", "httpx2")
    code = f"import sys, rbtool.core.remote; print([name for name in {clients} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


# Sources of the folders of one hub repository: what a dataset is, and that no other one is ever taken for it.

TOYS = {
    "kinds/small(red)/car/a_seed0.h5": b"one" * 10, "kinds/small(red)/car/a_seed1.h5": b"two" * 5_000,
    "kinds/small(red)/car/notes.txt": b"no data", "kinds/small(red)/car2/a.h5": b"three",
    "kinds/small(red)/car/inner/b.npz": b"four", "kinds/large/B.NPZ": b"five", "kinds/large/.hidden.npz": b"no data",
    "kinds/stray.h5": b"in no folder", "other/car/a.h5": b"elsewhere", "README.md": b"hello",
}  # fmt: skip
CAR = "small(red)/car"
TOY_CALLS: list[list[Any]] = [["ids"], ["catalogue"], ["describe", CAR]]
IDS = ["large", CAR, "small(red)/car/inner", "small(red)/car2"]


@pytest.fixture
def folder_hub(tmp_path: Path) -> Iterator[Hub]:
    write_files(tmp_path / "hub" / "acme" / "toys", TOYS)
    with Hub(tmp_path / "hub", page_size=4) as served:
        yield served


@pytest.fixture
def hub_variables(folder_hub: Hub, tmp_path: Path) -> dict[str, str]:
    return folder_hub.environment(tmp_path / "home")


def test_every_folder_of_data_files_is_a_dataset(folder_hub: Hub, hub_variables: dict[str, str]) -> None:
    ids, listed = ask(hub_variables, "toys", ["ids"], ["catalogue_twice"])
    assert ids == {"ids": IDS, "problems": [], "unreachable": False}
    assert [(entry["id"], entry["bytes"]) for entry in listed["first"]["entries"]] == [
        ("large", 4), (CAR, 15_030), ("small(red)/car/inner", 4), ("small(red)/car2", 5)
    ]  # fmt: skip
    assert listed["heard"] == [[4, 4]]


def test_one_listing_makes_the_catalogue_and_a_revision_is_a_commit(folder_hub: Hub, hub_variables) -> None:
    folder_hub.page_size = 1000
    ask_one(hub_variables, "toys", "catalogue")
    assert len(folder_hub.requests) == 2
    folder_hub.repositories["acme/toys"].refs.add("v1")
    there, gone = ask(hub_variables, "toys", ["describe", CAR, "v1"], ["describe", CAR, "v2"])
    assert there["revision"] == folder_hub.repositories["acme/toys"].commit
    assert "revision v2" in failed(gone, "DatasetNotFoundError").message


def test_a_dataset_is_the_files_of_exactly_its_folder(folder_hub: Hub, hub_variables: dict[str, str]) -> None:
    found = ask_one(hub_variables, "toys", "describe", CAR)
    commit = folder_hub.repositories["acme/toys"].commit
    assert (found["id"], found["revision"]) == (CAR, commit)
    assert found["address"] == f"hf://acme/toys@{commit}/kinds/{CAR}"
    small, large = (TOYS[f"kinds/{CAR}/a_seed{seed}.h5"] for seed in (0, 1))
    blob = hashlib.sha1(b"blob %d\0" % len(small) + small).hexdigest()
    assert [(file["path"], file["size"], file["checksum"]) for file in found["files"]] == [
        ("a_seed0.h5", len(small), f"git-sha1:{blob}"),
        ("a_seed1.h5", len(large), f"sha256:{hashlib.sha256(large).hexdigest()}"),
    ]
    assert not [path for path in folder_hub.paths() if "(" in path], "parentheses are quoted"
    assert [path for path in folder_hub.paths("/tree/") if unquote(path).partition("?")[0].endswith(f"/kinds/{CAR}")]


def test_an_id_is_never_a_part_of_a_name_or_a_folder_of_folders(hub_variables: dict[str, str]) -> None:
    names = ("small(red)", "small(red)/ca", "car", "stray", "other/car", "SMALL(RED)/car")
    for outcome in ask(hub_variables, "toys", *(["describe", name] for name in names)):
        failed(outcome, "DatasetNotFoundError")


def test_ids_that_leave_their_folder_are_refused(folder_hub: Hub, hub_variables: dict[str, str]) -> None:
    for outcome in ask(hub_variables, "toys", *(["describe", name] for name in ("../x", "/x", "a//b", "", "a/.git"))):
        failed(outcome, "UsageError")
    assert not folder_hub.requests


def test_the_files_come_verified(folder_hub: Hub, hub_variables: dict[str, str], tmp_path: Path) -> None:
    folder_hub.faults = [Fault("a_seed1", "corrupt")]
    found = ask_one(hub_variables, "toys", "fetch_dataset", CAR, str(tmp_path / "to"))
    assert found["heard"] == 15_030
    assert (tmp_path / "to" / "a_seed1.h5").read_bytes() == TOYS[f"kinds/{CAR}/a_seed1.h5"]
    folder_hub.faults = [Fault("a_seed1", "corrupt", times=99)]
    failed(ask_one(hub_variables, "toys", "fetch_dataset", CAR, str(tmp_path / "again")), "CorruptDataError")


@pytest.mark.parametrize(("kind", "error"), [
    ("status:500", "NetworkError"), ("status:403", "AuthorisationError"), ("reset", "NetworkError"),
])  # fmt: skip
def test_failures_have_the_error_of_their_cause(folder_hub: Hub, hub_variables, kind: str, error: str) -> None:
    folder_hub.faults = [Fault("/tree/", kind, times=99)]
    for outcome in ask(hub_variables, "toys", *TOY_CALLS):
        failed(outcome, error)


@pytest.mark.parametrize("variable", ["RBTOOL_OFFLINE", "HF_HUB_OFFLINE"])
def test_folders_where_the_network_is_forbidden(folder_hub: Hub, hub_variables: dict[str, str], variable: str) -> None:
    for outcome in ask({**hub_variables, variable: "1"}, "toys", *TOY_CALLS):
        assert variable in failed(outcome, "NetworkError").message
    assert not folder_hub.requests


def test_a_repository_without_data_has_no_datasets(folder_hub: Hub, hub_variables: dict[str, str], tmp_path) -> None:
    for name in TOYS:
        if name.startswith("kinds/"):
            (tmp_path / "hub" / "acme" / "toys" / name).unlink()
    folder_hub.rescan()
    assert "no datasets" in failed(ask_one(hub_variables, "toys", "ids"), "DatasetNotFoundError").message
