"""Stands in for the parts of the Hugging Face hub's HTTP API that those who only read use.

`<root>/<owner>/<repository>/...` are dataset repositories with one commit each, on the branch `main`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from loopback import Asked, Fault, Handler, Loopback

__all__ = ["ALWAYS", "Asked", "Fault", "Hub", "fault_table", "git_blob_sha1"]
ALWAYS = 1_000
"""How often a fault happens that is always there."""


def fault_table(asked: str) -> dict[str, tuple[Fault, int, str]]:
    """Return faults of the answers to requests that match `asked`: each with the exit code and what is said."""
    return {
        "cut once": (Fault(asked, "cut:500"), 0, ""),
        "reset once": (Fault(asked, "reset"), 0, ""),
        "too many requests once": (Fault(asked, "status:429", headers={"Retry-After": "0"}), 0, ""),
        "corrupt once": (Fault(asked, "corrupt"), 0, ""),
        "no ranges": (Fault(asked, "norange", ALWAYS), 0, ""),
        "always corrupt": (Fault(asked, "corrupt", ALWAYS), 1, "is not what was announced"),
        "always down": (Fault(asked, "status:503", ALWAYS), 5, ""),
        "refused": (Fault(asked, "status:403", ALWAYS), 5, ""),
        "gone": (Fault(asked, "status:404", ALWAYS), 4, ""),
    }


def git_blob_sha1(data: bytes) -> str:
    """The name that git gives to a file's bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a repository; a large one is kept by git LFS, which names it by its SHA-256."""

    path: Path
    size: int
    git_sha1: str
    sha256: str
    lfs: bool


class Repository:
    """One commit of a dataset repository; `refs` are the names it has beside its hash."""

    def __init__(self, root: Path, name: str, lfs_threshold: int) -> None:
        self.name = name
        self.refs = {"main", "refs/heads/main"}
        self.files: dict[str, StoredFile] = {}
        digest = hashlib.sha1()
        for path in sorted(path for path in (root / name).rglob("*") if path.is_file()):
            data, below = path.read_bytes(), path.relative_to(root / name).as_posix()
            sha256 = hashlib.sha256(data).hexdigest()
            self.files[below] = StoredFile(path, len(data), git_blob_sha1(data), sha256, len(data) >= lfs_threshold)
            digest.update(f"{below}\0{sha256}\n".encode())
        self.commit = digest.hexdigest()

    def info(self) -> dict[str, Any]:
        """What the hub says of the repository."""
        return {
            "_id": self.commit[:24], "id": self.name, "author": self.name.split("/")[0], "sha": self.commit,
            "lastModified": "2025-01-01T00:00:00.000Z", "createdAt": "2025-01-01T00:00:00.000Z", "private": False,
            "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0,
        }  # fmt: skip

    def tree(self, folder: str, *, recursive: bool) -> Iterator[dict[str, Any]]:
        """Entries of a folder, in the hub's words."""
        prefix = f"{folder}/" if folder else ""
        folders: set[str] = set()
        for path, file in self.files.items():
            if not path.startswith(prefix):
                continue
            parts = path.removeprefix(prefix).split("/")
            for depth in range(1, len(parts)):
                inner = prefix + "/".join(parts[:depth])
                if inner not in folders and (recursive or depth == 1):
                    folders.add(inner)
                    oid = hashlib.sha1(inner.encode()).hexdigest()
                    yield {"type": "directory", "oid": oid, "size": 0, "path": inner}
            if recursive or len(parts) == 1:
                lfs = {"lfs": {"oid": file.sha256, "size": file.size, "pointerSize": 130}} if file.lfs else {}
                yield {"type": "file", "oid": file.git_sha1, "size": file.size, "path": path, **lfs}


class _HubHandler(Handler):
    server_state: Hub

    def answer(self) -> None:
        parts = urlsplit(self.path)
        path, query = parts.path, {name: values[0] for name, values in parse_qs(parts.query).items()}
        token = self.server_state.token
        if token and self.headers.get("Authorization") != f"Bearer {token}":
            self._refuse(401, "RepoNotFound", "Repository Not Found / invalid credentials")
        elif path == "/api/datasets":
            self._list(query)
        elif found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/(.*))?)?", path):
            self._api(*(part and unquote(part) for part in found.groups()), query)
        elif found := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*map(unquote, found.groups()))
        else:
            self.send_json({"error": "not found"}, 404)

    def _refuse(self, status: int, code: str, why: str) -> None:
        """The hub says what is missing in a header of its own."""
        self.send_json({"error": why}, status, {"X-Error-Code": code, "X-Error-Message": why})

    def _list(self, query: Mapping[str, str]) -> None:
        author, search = query.get("author"), query.get("search", "").lower()
        names = [name for name in sorted(self.server_state.repositories) if search in name.lower()]
        names = [name for name in names if author in (None, name.split("/")[0])]
        self._page([self.server_state.repositories[name].info() for name in names], query)

    def _page(self, entries: list[dict[str, Any]], query: Mapping[str, str]) -> None:
        """One page, and the address of the next in the Link header."""
        page, size = int(query.get("cursor", 0)), self.server_state.page_size
        headers = {}
        if (page + 1) * size < len(entries):
            kept = "&".join(f"{name}={value}" for name, value in query.items() if name != "cursor")
            address = f"{self.server_state.link_base}{urlsplit(self.path).path}?{kept}&cursor={page + 1}"
            headers = {"Link": f'<{address}>; rel="next"'}
        self.send_json(entries[page * size : (page + 1) * size], headers=headers)

    def _repository(self, name: str, revision: str | None) -> Repository | None:
        repository = self.server_state.repositories.get(name)
        if repository is None:
            self._refuse(401 if self.server_state.hide_missing else 404, "RepoNotFound", "Repository not found")
        elif name in self.server_state.gated:
            self._refuse(403, "GatedRepo", f"Access to dataset {name} is restricted")
        elif revision is not None and revision not in {repository.commit, *repository.refs}:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repository
        return None

    def _api(
        self, name: str, what: str | None, revision: str | None, folder: str | None, query: Mapping[str, str]
    ) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        if what != "tree":
            self.send_json(repository.info())
            return
        entries = list(repository.tree(folder or "", recursive=query.get("recursive", "").lower() in {"true", "1"}))
        if folder and not entries:
            self._refuse(404, "EntryNotFound", f"{folder} does not exist on {revision}")
        else:
            self._page(entries, query)

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        file = repository.files.get(path)
        if file is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        etag = file.sha256 if file.lfs else file.git_sha1
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": repository.commit, "Accept-Ranges": "bytes"}
        headers["Content-Disposition"] = f"inline; filename*=UTF-8''{quote(Path(path).name)}"
        if file.lfs:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(file.size)}
        self.send_file(file.path.read_bytes(), headers)


class Hub(Loopback):
    """A hub with the repositories below `root`; `rescan` takes in what changed there, under a new commit.

    With a `token` every request has to bear it. Repositories in `gated` refuse everybody. A repository that is not
    there is answered with 401 like the real hub does, or with 404 without `hide_missing`. Links to the next page begin
    with `link_base`: a mirror passes on those of the hub it mirrors.
    """

    handler = _HubHandler

    def __init__(self, root: Path, *, lfs_threshold: int = 10_000, page_size: int = 1000) -> None:
        super().__init__()
        self.root, self.lfs_threshold, self.page_size = root, lfs_threshold, page_size
        self.token: str | None = None
        self.gated: set[str] = set()
        self.hide_missing = True
        self.link_base = self.url
        self.rescan()

    def rescan(self) -> None:
        """Look at the files anew; only the newest commit is kept."""
        names = [
            f"{owner.name}/{path.name}"
            for owner in self.root.iterdir()
            if owner.is_dir()
            for path in owner.iterdir()
            if path.is_dir()
        ]
        self.repositories = {name: Repository(self.root, name, self.lfs_threshold) for name in names}

    def environment(self, home: Path) -> dict[str, str]:
        """Variables for a process that is to use this hub; its client reads them when it is imported."""
        unset = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "RBTOOL_OFFLINE", "MINARI_REMOTE")
        inherited = {name: value for name, value in os.environ.items() if name not in unset}
        loopback = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        quiet = dict.fromkeys(("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS"), "1")
        return {**inherited, **loopback, **quiet, "HF_ENDPOINT": self.url, "HF_HOME": str(home)}
