"""A stand-in hub that is written to, too: repositories with branches and commits, git LFS objects, and their faults."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import yaml
from hub import Asked, Fault, Hub, Repository, StoredFile, _HubHandler, git_blob_sha1

__all__ = ["WRITER", "Asked", "Fault", "Snapshot", "UploadHub"]

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

    Files of `lfs_threshold` bytes or more, and those that are no text, are LFS objects; those of more than `part_size`
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
