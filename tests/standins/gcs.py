"""Stands in for the parts of the JSON API of Google Cloud Storage that anonymous readers use.

`<root>/<bucket>/<name of the object>`; `STORAGE_EMULATOR_HOST` points the real client here.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import google_crc32c
from loopback import Asked, Fault, Handler, Loopback

__all__ = ["Asked", "Fault", "Gcs"]


_HASHES = {"md5": "md5Hash", "crc32c": "crc32c"}


class _GcsHandler(Handler):
    server_state: Gcs

    def answer(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if bucket := re.fullmatch(r"/storage/v1/b/([^/]+)", parts.path):  # the client looks, for its traces
            self.send_json({"kind": "storage#bucket", "id": bucket[1], "name": bucket[1], "location": "US"})
            return
        found = re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)/o(?:/([^/]+))?", parts.path)
        if found is None:
            self._refuse(404, "Not Found")
        elif found[1] in self.server_state.denied:
            self._refuse(401, "Anonymous caller does not have storage.objects.list access to the bucket.")
        elif not (self.server_state.root / found[1]).is_dir():
            self._refuse(404, "The specified bucket does not exist.")
        elif found[2] is None:
            self._list(found[1], query)
        else:
            self._object(found[1], unquote(found[2]), query)

    def _refuse(self, status: int, why: str) -> None:
        self.send_json({"error": {"code": status, "message": why}}, status)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        base = self.server_state.root / bucket
        names = sorted(path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file())
        names = [name for name in names if name.startswith(query.get("prefix", ""))]
        first, size = int(query.get("pageToken", 0)), self.server_state.page_size
        items = [self._facts(bucket, name) for name in names[first : first + size]]
        more = {"nextPageToken": str(first + size)} if first + size < len(names) else {}
        self.send_json({"kind": "storage#objects", "items": items, **more})

    def _object(self, bucket: str, name: str, query: dict[str, str]) -> None:
        path = self.server_state.root / bucket / name
        if not path.is_file() or query.get("generation") not in (None, self._generation(path)):
            self._refuse(404, f"No such object: {bucket}/{name}")
        elif query.get("alt") != "media":
            self.send_json(self._facts(bucket, name))
        else:
            facts = self._facts(bucket, name)
            digests = ",".join(f"{key}={facts[name]}" for key, name in _HASHES.items() if name in facts)
            self.send_file(path.read_bytes(), {"X-Goog-Hash": digests, "X-Goog-Generation": facts["generation"]})

    def _generation(self, path: Path) -> str:
        """A number that another content of the object does not have."""
        return str(int(hashlib.md5(path.read_bytes()).hexdigest()[:12], 16))

    def _facts(self, bucket: str, name: str) -> dict[str, Any]:
        path = self.server_state.root / bucket / name
        data, address = path.read_bytes(), f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}"
        facts = {
            "kind": "storage#object", "id": f"{bucket}/{name}/1", "name": name, "bucket": bucket, "etag": "x",
            "generation": self._generation(path), "metageneration": "1", "size": str(len(data)),
            "crc32c": base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode(),
            "selfLink": f"{self.server_state.url}{address}",
            "mediaLink": f"{self.server_state.url}/download{address}?alt=media",
        }  # fmt: skip
        if not self.server_state.without_md5:
            facts["md5Hash"] = base64.b64encode(hashlib.md5(data).digest()).decode()
        return facts


class Gcs(Loopback):
    """Buckets below `root`; those in `denied` refuse everybody. Composite objects have no MD5: `without_md5`."""

    handler = _GcsHandler

    def __init__(self, root: Path, *, page_size: int = 1000) -> None:
        super().__init__()
        self.root, self.page_size = root, page_size
        self.denied: set[str] = set()
        self.without_md5 = False

    def environment(self) -> dict[str, str]:
        """Variables for a process that is to use this server."""
        unset = ("RBTOOL_OFFLINE", "MINARI_REMOTE", "GOOGLE_APPLICATION_CREDENTIALS")
        inherited = {name: value for name, value in os.environ.items() if name not in unset}
        loopback = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        return {**inherited, **loopback, "STORAGE_EMULATOR_HOST": self.url}
