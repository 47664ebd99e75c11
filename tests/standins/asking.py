"""Asks a hub, a bucket or a source in a process of its own, whose environment is set before any of them.

`main` reads what to do from stdin and prints the outcomes; `ask` is the other end of that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forked_commands import folder_of_commands
from waiting import HANG

__all__ = ["Failed", "ask", "ask_one", "failed"]

_VARIABLES = {"RBTOOL_RETRIES": "3:0.01", "RBTOOL_TIMEOUT": str(HANG)}


@dataclasses.dataclass(frozen=True)
class Failed:
    """An error that rbtool raised on purpose, with the names of its types."""

    types: list[str]
    message: str
    hint: str


def ask(environment: Mapping[str, str], made: str, *calls: list[Any], arguments: tuple[str, ...] = ()) -> list[Any]:
    """Make a `hub`, a `bucket` or a `source:NAME` (`source` is Minari's), call its methods, and return their results.

    What a call raised on purpose is Failed. Nothing may reach stderr, and the token must be in nothing that is said.
    """
    order = json.dumps({"made": made, "arguments": arguments, "calls": calls})
    ran = subprocess.run(
        [folder_of_commands() / "ask"], env={**_VARIABLES, **environment}, input=order, capture_output=True, text=True,
        timeout=HANG, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr, ran.stderr
    assert environment.get("HF_TOKEN", "no token") not in ran.stdout
    outcomes = json.loads(ran.stdout)
    return [Failed(**outcome["failed"]) if "failed" in outcome else outcome["result"] for outcome in outcomes]


def ask_one(environment: Mapping[str, str], made: str, *call: Any, arguments: tuple[str, ...] = ()) -> Any:
    """Make one call and return what it returned, or Failed."""
    return ask(environment, made, list(call), arguments=arguments)[0]


def failed(outcome: object, kind: str) -> Failed:
    """Return the failure if the outcome is one of that type."""
    assert isinstance(outcome, Failed), outcome
    assert kind in outcome.types, outcome
    return outcome


def main() -> None:
    """Do what stdin says."""
    from rbtool.core.errors import RbtoolError

    order = json.load(sys.stdin)
    outcomes: list[dict[str, Any]] = []
    with _make(order["made"], order["arguments"]) as made:
        for name, *arguments in order["calls"]:
            try:
                outcomes.append({"result": _call(made, name, arguments)})
            except RbtoolError as error:
                types = [kind.__name__ for kind in type(error).__mro__]
                outcomes.append({"failed": {"types": types, "message": error.message, "hint": error.hint}})
    print(json.dumps(outcomes, default=dataclasses.asdict))


def _make(what: str, arguments: list[str]) -> Any:
    from rbtool.core.format.locate import source_class
    from rbtool.core.remote.bucket import Bucket
    from rbtool.core.remote.hub import Hub

    makers: dict[str, Any] = {"hub": Hub, "bucket": Bucket, "source": source_class("minari"), "toys": _toys}
    kind, _, name = what.partition(":")
    return (source_class(name) if name else makers[kind])(*arguments)


def _toys() -> Any:
    """A source of folders in the repository `acme/toys`, whose ids are paths below `kinds`."""
    from rbtool.core.remote.hub import HubFolderSource

    return type("Toys", (HubFolderSource,), {
        "name": "toys", "repository": "acme/toys", "folder": "kinds", "suffixes": (".h5", ".npz"),
    })()  # fmt: skip


def _call(made: Any, name: str, arguments: list[Any]) -> Any:
    if name in _OWN:
        return _OWN[name](made, *arguments)
    found = getattr(made, name)
    return found(*arguments) if callable(found) else found


def _read(transport: Any, address: str, limit: int = 1 << 20) -> str:
    """Text of a small file."""
    from rbtool.core.remote.transport import read_small

    return read_small(transport, address, limit=limit).decode()


def _digest_of(bucket: Any, index: int, offset: int, how: str = "once") -> str:
    """SHA-256 of what comes from an offset on of an object, by its place in the list."""
    from rbtool.core.remote.transport import retrying

    listed = bucket.objects()[index]

    def read() -> str:
        digest = hashlib.sha256()
        with bucket.open(listed.address, offset) as (start, blocks):
            for block in blocks:
                digest.update(block)
        assert start == offset
        return digest.hexdigest()

    return retrying(read) if how == "retried" else read()


def _describe(source: Any, dataset_id: str, revision: str | None = None) -> Any:
    """A dataset with its steps and episodes."""
    return source.describe(dataset_id, revision, totals=True)


def _fetch(source: Any, dataset_id: str, folder: str, episodes: str | None = None) -> dict[str, Any]:
    """Fetch what is needed of a dataset; return it and how many bytes were heard of."""
    from rbtool.core.format.episodes import parse_episodes

    found = source.describe(dataset_id, totals=True)
    files = source.needed(found, parse_episodes(episodes) if episodes else None)
    heard: list[int] = []
    source.fetch(files, Path(folder), progress=heard.append)
    return {"dataset": found, "files": [file.path for file in files], "heard": sum(heard)}


def _fetch_again(source: Any, files: list[dict[str, Any]], folder: str) -> None:
    """Fetch files that were described some time ago."""
    from rbtool.core.format.converter import RemoteFile

    listed = [RemoteFile(**{**file, "addresses": tuple(file["addresses"])}) for file in files]
    source.fetch(listed, Path(folder))


def _catalogue_twice(source: Any) -> dict[str, Any]:
    """List all, and once more with what is known from the first time; `heard` is the progress of the first."""
    heard: list[tuple[int, int]] = []
    first = source.catalogue(progress=lambda done, total: heard.append((done, total)))
    return {"first": first, "second": source.catalogue(first), "heard": heard}


_OWN = {
    "describe": _describe,
    "read": _read,
    "digest_of": _digest_of,
    "fetch_dataset": _fetch,
    "fetch_listed": _fetch_again,
    "catalogue_twice": _catalogue_twice,
}
