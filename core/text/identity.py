"""What a token cache is made of: data, tokenizer and arguments, as a request by which it is found again."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..format.digest import digest_bytes, read_regular
from ..format.documents import dump_json
from ..format.locate import dataset_folder
from ..format.manifest import Manifest, Request
from ..preprocess.fingerprints import fingerprint_of
from ..verbs.results import existing_result

SOURCE = "tokens"
_VERSION = 1
"""Changes when our own tokenizers make other rows of the same text."""
_OF_THE_CALL = ("truncation", "padding")
_OF_THE_PLACE = ("name_or_path", "is_local", "local_files_only", "special_tokens_map_file", "tokenizer_file")


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A token cache: `rows` rows of a split; `data`, `tokenizer`, `function` and `hook` are digests."""

    dataset: str
    split: str
    max_length: int
    rows: int
    data: str
    tokenizer: str
    function: str
    hook: str | None

    @property
    def request(self) -> Request:
        """What was asked for, as manifests have it."""
        options = {name: value for name, value in asdict(self).items() if name not in ("dataset", "split")}
        name = f"{self.dataset}/{self.split}-{self.max_length}"
        return Request(SOURCE, f"{SOURCE}:{name}", name, options={**options, "version": _VERSION})

    def folder(self, root: Path) -> Path:
        """Where the token cache is below the storage root."""
        return dataset_folder(self.request, root)

    def existing(self, root: Path) -> Manifest | None:
        """Return the manifest of the token cache, None if there is none; UsageError for a damaged one."""
        return existing_result(self.folder(root), self.request)


def function_digest(function: Callable[..., Any]) -> str:
    """Return the name of a class of this package, or a digest of the code of anything else."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if module.startswith(f"{__name__.rpartition('.')[0]}.") and "." not in name:
        return f"{module.rpartition('.')[2]}:{name}"
    return f"{name or type(function).__qualname__}:{fingerprint_of(function)}"


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of what a tokenizer does: of the files that its `save_pretrained` writes.

    The options of its last call and the place it was loaded from do not count. That of a callable without
    `save_pretrained` is a digest of its code and its values.
    """
    save = getattr(tokenizer, "save_pretrained", None)
    if save is None:
        return function_digest(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        if not files:
            raise UsageError(f"the {type(tokenizer).__name__} saves no files, by which it could be recognised")
        parts = {path.relative_to(folder).as_posix(): digest_bytes(_stable(read_regular(path))) for path in files}
    kind = f"{type(tokenizer).__module__}:{type(tokenizer).__qualname__}"
    sides = [str(getattr(tokenizer, side, "")) for side in ("padding_side", "truncation_side")]
    return digest_bytes(dump_json({"files": parts, "class": kind, "sides": sides}).encode())


def _stable(data: bytes) -> bytes:
    """The bytes of a file without what does not change tokens."""
    with contextlib.suppress(ValueError):
        document = json.loads(data)
        if isinstance(document, dict):
            rest = {name: value for name, value in document.items() if name not in (*_OF_THE_CALL, *_OF_THE_PLACE)}
            return json.dumps(rest, sort_keys=True).encode()
    return data
