"""Stands in for the Hugging Face hub's HTTP API, with faults.

`<root>/<owner>/<repository>/...` are dataset repositories with one commit each, on the branch `main`. `UploadHub` is
written to, too: its repositories have branches and commits, and git LFS objects.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

import yaml
from loopback import Fault, Handler, Loopback

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


WRITER = "hf_writerwriterwriter"
"""The token that may write."""
_ATTRIBUTES = b"*.bin filter=lfs diff=lfs merge=lfs -text\n"


class Snapshot(Repository):
    """A repository at one commit."""

    def __init__(self, name: str, commit: str, files: Mapping[str, StoredFile], *, private: bool) -> None:
        self.name, self.commit, self.files, self.private = name, commit, dict(files), private
        self.refs = {"main", "refs/heads/main"}

    def info(self) -> dict[str, Any]:
        return {**super().info(), "private": self.private}


@dataclass
class History:
    """The commits of a repository, and where its branches are."""

    name: str
    private: bool = False
    commits: dict[str, dict[str, StoredFile]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def at(self, revision: str) -> Snapshot | None:
        """The repository at a branch or a commit."""
        commit = self.branches.get(revision.removeprefix("refs/heads/"), revision)
        files = self.commits.get(commit)
        return None if files is None else Snapshot(self.name, commit, files, private=self.private)

    def add(self, branch: str, files: Mapping[str, StoredFile], message: str) -> str:
        """Commit to a branch; each commit has another hash."""
        lines = "".join(f"{path}\0{file.sha256}\n" for path, file in sorted(files.items()))
        commit = hashlib.sha1(f"{len(self.commits)}{self.name}{branch}{message}\n{lines}".encode()).hexdigest()
        self.commits[commit], self.branches[branch] = dict(files), commit
        self.messages.append(message)
        return commit


class _UploadHandler(_HubHandler):
    server_state: UploadHub
    body = b""

    def do_GET(self) -> None:
        self.server_state.before(f"{self.command} {self.path}")
        super().do_GET()

    def do_POST(self) -> None:
        line = f"{self.command} {self.path}"
        broken = next((f for f in self.server_state.faults if f.kind.startswith("broken:") and f.times > 0), None)
        if broken is not None and re.search(broken.match, line):
            broken.times -= 1
            wanted = int(broken.argument("broken") or 0)
            self.rfile.read(min(wanted, int(self.headers.get("Content-Length", wanted))))
            self._reset()
            return
        self.body = self._read_body()
        self.do_GET()

    do_PUT = do_POST

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length")
        if length is not None:
            return self.rfile.read(int(length))
        parts = []
        while size := int(self.rfile.readline() or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def send(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None, kind: str = "application/json"
    ) -> None:
        """Answer, or lose the answer to what was done."""
        if self.fault.kind == "lost":
            self._reset()
        else:
            super().send(status, body, headers, kind)

    def answer(self) -> None:
        path, state = urlsplit(self.path).path, self.server_state
        if self.command in ("GET", "HEAD"):
            if found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/refs", path):
                self._refs(found[1])
            else:
                super().answer()
            return
        with state.writing:
            if not path.startswith("/lfs/objects/") and not self._may_write():
                return
            for pattern, method in _WRITES.items():
                if found := re.fullmatch(pattern, path):
                    getattr(self, method)(*map(unquote, found.groups()))
                    return
            self.send_json({"error": "not found"}, 404)

    def _may_write(self) -> bool:
        given = self.headers.get("Authorization")
        if given is None:
            self._refuse(401, "", "Invalid username or password.")
        elif given != f"Bearer {WRITER}":
            self._refuse(403, "", "You don't have the rights to write here")
        return given == f"Bearer {WRITER}"

    def _repository(self, name: str, revision: str | None) -> Repository | None:
        history = self.server_state.histories.get(name)
        if history is None or name in self.server_state.gated:
            return super()._repository(name, revision)
        found = history.at(revision or "main")
        if found is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    def _refs(self, name: str) -> None:
        if self._repository(name, None) is None:
            return
        branches = self.server_state.histories[name].branches
        listed = [{"name": one, "ref": f"refs/heads/{one}", "targetCommit": at} for one, at in branches.items()]
        self.send_json({"branches": listed, "converts": [], "tags": []})

    def _create(self) -> None:
        wanted = json.loads(self.body)
        name, url = f"{wanted['organization']}/{wanted['name']}", self.server_state.url
        if name in self.server_state.histories:
            self.send_json({"error": "You already created this dataset repo", "url": f"{url}/datasets/{name}"}, 409)
            return
        self.server_state.create(name, private=wanted.get("visibility") == "private")
        self.send_json({"url": f"{url}/datasets/{name}"})

    def _branch(self, name: str, branch: str) -> None:
        history = self.server_state.histories[name]
        if branch in history.branches:
            self.send_json({"error": "Reference already exists"}, 409)
            return
        history.branches[branch] = history.branches["main"]
        self.send_json({})

    def _validate(self) -> None:
        text = json.loads(self.body)["content"]
        try:
            yaml.safe_load(text.split("---\n")[1])
        except (yaml.YAMLError, IndexError) as error:
            self.send_json({"errors": [{"message": str(error)}], "warnings": []}, 400)
            return
        self.send_json({"errors": [], "warnings": []})

    def _preupload(self, name: str, revision: str) -> None:
        repository, asked = self._repository(name, revision), json.loads(self.body)
        if repository is None:
            return
        there = repository.files
        rules = asked.get("gitIgnore")
        if rules is None and ".gitignore" in there:
            rules = there[".gitignore"].path.read_text()
        answered = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if self.server_state.is_large(one) else "regular",
                "shouldIgnore": any(fnmatch(one["path"], rule) for rule in (rules or "").split()),
                "oid": _oid(there[one["path"]]) if one["path"] in there else None,
            }
            for one in asked["files"]
        ]
        self.send_json({"files": answered})

    def _batch(self, name: str) -> None:
        objects = [self._actions(one["oid"], one["size"]) for one in json.loads(self.body)["objects"]]
        self.send_json({"objects": objects, "transfer": "basic"})

    def _actions(self, oid: str, size: int) -> dict[str, Any]:
        state = self.server_state
        if oid in state.objects:
            return {"oid": oid, "size": size}
        place, header = f"{state.url}/lfs/objects/{oid}", {}
        if state.part_size and size > state.part_size:
            parts = -(-size // state.part_size)
            header = {str(n): f"{place}/parts/{n}" for n in range(1, parts + 1)} | {"chunk_size": str(state.part_size)}
            place += "/complete"
        verify = {"href": f"{state.verified_at}/lfs/verify"}
        return {"oid": oid, "size": size, "actions": {"upload": {"href": place, "header": header}, "verify": verify}}

    def _put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            self.send_json({"error": "BadDigest"}, 400)
            return
        self.server_state.keep_object(oid, self.body)
        self.send(200, b"", {"ETag": f'"{oid}"'})

    def _put_part(self, oid: str, number: str) -> None:
        self.server_state.parts[oid, int(number)] = self.body
        self.send(200, b"", {"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})

    def _complete(self, oid: str) -> None:
        numbers = [part["partNumber"] for part in json.loads(self.body)["parts"]]
        self.body = b"".join(self.server_state.parts.get((oid, number), b"") for number in numbers)
        self._put(oid)

    def _verify(self) -> None:
        asked = json.loads(self.body)
        self.send_json({}, 200 if asked["oid"] in self.server_state.objects else 404)

    def _commit(self, name: str, branch: str) -> None:
        state, lines = self.server_state, [json.loads(line) for line in self.body.splitlines()]
        history, header = state.histories[name], lines[0]["value"]
        head = history.branches.get(branch)
        if head is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {branch}")
            return
        if header.get("parentCommit", head) != head:
            self.send_json({"error": "A commit has happened since. Please refresh and try again."}, 412)
            return
        files = dict(history.commits[head])
        for line in lines[1:]:
            problem = self._change(files, line["key"], line["value"])
            if problem:
                self.send_json({"error": problem}, 400)
                return
        for path in [path for path in files if any(fnmatch(path, rule) for rule in state.drops)]:
            del files[path]
        commit = history.add(branch, files, header["summary"])
        state.show(name)
        self.send_json({"commitOid": commit, "commitUrl": f"{state.url}/datasets/{name}/commit/{commit}"})

    def _change(self, files: dict[str, StoredFile], key: str, value: Mapping[str, Any]) -> str:
        path, state = value["path"], self.server_state
        if key == "file":
            files[path] = state.keep(base64.b64decode(value["content"]), lfs=False)
        elif key == "lfsFile":
            if value["oid"] not in state.objects:
                return f"LFS pointer pointed to a file that does not exist: {path}"
            files[path] = state.objects[value["oid"]]
        elif key == "deletedFile":
            if files.pop(path, None) is None:
                return f"A file with this name doesn't exist: {path}"
        else:
            return f"unknown operation {key}"
        return ""


def _oid(file: StoredFile) -> str:
    return file.sha256 if file.lfs else file.git_sha1


_WRITES = {
    "/api/repos/create": "_create",
    "/api/validate-yaml": "_validate",
    "/api/datasets/([^/]+/[^/]+)/branch/([^/]+)": "_branch",
    "/api/datasets/([^/]+/[^/]+)/preupload/([^/]+)": "_preupload",
    "/api/datasets/([^/]+/[^/]+)/commit/([^/]+)": "_commit",
    "/datasets/([^/]+/[^/]+)\\.git/info/lfs/objects/batch": "_batch",
    "/lfs/objects/([0-9a-f]+)": "_put",
    "/lfs/objects/([0-9a-f]+)/parts/([0-9]+)": "_put_part",
    "/lfs/objects/([0-9a-f]+)/complete": "_complete",
    "/lfs/verify": "_verify",
}


class UploadHub(Hub):
    """A hub with the repositories that are uploaded to it; its files are kept below `folder`.

    Files of `lfs_threshold` bytes or more, and those that are not text, are LFS objects; those of more than `part_size`
    bytes, where that is set, are sent in parts; `verified_at` is the server that confirms their arrival. What fits a
    pattern of `drops` is left out of every commit. `before` is called with every request, before it is answered. Next
    to the faults of other stand-ins there are `lost` (done, but the answer does not arrive) and `broken:100` (the
    connection is closed after so many bytes of the request's body).
    """

    handler = _UploadHandler

    def __init__(self, folder: Path, *, lfs_threshold: int = 10_000, part_size: int | None = None) -> None:
        self.writing = threading.RLock()
        self.blobs = folder / "blobs"
        self.part_size = part_size
        self.histories: dict[str, History] = {}
        self.objects: dict[str, StoredFile] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.drops: list[str] = []
        self.before: Callable[[str], object] = lambda line: None
        (folder / "repositories").mkdir(parents=True, exist_ok=True)
        self.blobs.mkdir(exist_ok=True)
        super().__init__(folder / "repositories", lfs_threshold=lfs_threshold)
        self.verified_at = self.url

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def keep(self, data: bytes, *, lfs: bool) -> StoredFile:
        """Store the bytes of a file."""
        sha256 = hashlib.sha256(data).hexdigest()
        path = self.blobs / sha256
        path.write_bytes(data)
        return StoredFile(path, len(data), git_blob_sha1(data), sha256, lfs)

    def keep_object(self, oid: str, data: bytes) -> None:
        """Store an LFS object."""
        self.objects[oid] = self.keep(data, lfs=True)

    def is_large(self, asked: Mapping[str, Any]) -> bool:
        """Whether a file becomes an LFS object, by its size and its first bytes."""
        return asked["size"] >= self.lfs_threshold or b"\0" in base64.b64decode(asked["sample"])

    def create(self, name: str, *, private: bool = False) -> History:
        """Make an empty repository, as the hub does: with one commit."""
        history = self.histories[name] = History(name, private)
        history.add("main", {".gitattributes": self.keep(_ATTRIBUTES, lfs=False)}, "initial commit")
        self.show(name)
        return history

    def push(self, name: str, files: Mapping[str, bytes | None], branch: str = "main") -> str:
        """Commit files by hand, as another writer would; None removes one."""
        with self.writing:
            history = self.histories[name]
            there = dict(history.commits[history.branches[branch]])
            for path, data in files.items():
                there.pop(path, None)
                if data is not None:
                    there[path] = self.keep(data, lfs=len(data) >= self.lfs_threshold)
            commit = history.add(branch, there, "by hand")
            self.show(name)
            return commit

    def show(self, name: str) -> None:
        """List the repository as it is on its main branch."""
        found = self.histories[name].at("main")
        assert found is not None
        self.repositories[name] = found

    def tree(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """All files at a branch or a commit."""
        found = self.histories[name].at(revision)
        assert found is not None
        return {path: file.path.read_bytes() for path, file in found.files.items()}

    def sent(self) -> list[str]:
        """Paths of the objects and parts of objects that arrived, in order."""
        return [asked.path for asked in self.requests if asked.method == "PUT" and asked.status == 200]


def lay_out_hub(datasets: Path, root: Path, organisation: str = "farama-minari") -> Path:
    """Make every top-level namespace a repository with the index that decides what exists; return `root`."""
    for namespace in sorted(path for path in datasets.iterdir() if path.is_dir()):
        repository = root / organisation / namespace.name
        shutil.copytree(namespace, repository)
        ids = sorted(
            f"{namespace.name}/{path.parent.parent.relative_to(repository).as_posix()}"
            for path in repository.rglob("data/metadata.json")
        )
        namespaces = sorted(
            {"/".join(name.split("/")[:depth]) for name in ids for depth in range(1, name.count("/") + 1)}
        )
        index = {"datasets": ids, "namespaces": namespaces}
        (repository / "namespace_metadata.json").write_text(json.dumps(index), encoding="utf-8")
    return root


def lay_out_bucket(datasets: Path, root: Path, bucket: str = "minari-remote") -> Path:
    """Copy all datasets into a bucket; return `root`."""
    shutil.copytree(datasets, root / bucket, ignore=shutil.ignore_patterns("README.md"))
    return root
