"""Sources of plain URLs that have mirrors: base URLs that the environment names, tried in order."""

from __future__ import annotations

import contextlib
import os
import re
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from ..errors import (
    AuthorisationError,
    CorruptDataError,
    DatasetNotFoundError,
    FormatError,
    NetworkError,
    RbtoolError,
    UsageError,
)
from ..format import fs
from ..format.sources import Advance, Note, RemoteFile
from .http import HttpSource
from .transport import require_network, retrying

_ADDRESS = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", re.ASCII)  # no password: addresses are recorded


class MirrorSource(HttpSource):
    """Files below base URLs (http or https), those that an environment variable names or the default ones.

    A file with a checksum must have it. Any other has to begin as its format does and to be readable, which
    `require_readable` decides, before it is taken; the next mirror is asked where it is not.
    """

    namespaced = False
    title: ClassVar[str]
    """The name of the format in sentences."""
    variable: ClassVar[str]
    """The environment variable that names base URLs, separated by blanks or commas, in the order to try them."""
    defaults: ClassVar[tuple[str, ...]]
    """The base URLs without that variable."""
    signatures: ClassVar[tuple[bytes, ...]]
    """What files begin with: one of these, which have the same length."""

    @abstractmethod
    def require_readable(self, path: Path) -> None:
        """Open a file that came; FormatError if it is not in the format."""

    def explained(self, file: RemoteFile) -> AbstractContextManager[None]:
        """Return a context that adds to errors of the network what can be done about them; nothing by default."""
        return contextlib.nullcontext()

    @property
    def bases(self) -> tuple[str, ...]:
        """The base URLs, without a slash at the end; UsageError if the variable has another form."""
        named = os.environ.get(self.variable, "").replace(",", " ").split()
        for base in named:
            if not _ADDRESS.fullmatch(base):
                raise UsageError(
                    f"{self.variable} has {re.sub('//[^/]*@', '//…@', base)!r}; base URLs like {self.defaults[0]} are "
                    "expected",
                    hint=f"unset it for {self.defaults[0]}",
                )
        return tuple(base.rstrip("/") for base in named) or self.defaults

    @property
    def remote(self) -> str:
        """The first base URL."""
        return self.bases[0]

    def described(self, path: str, addresses: Sequence[str]) -> RemoteFile:
        """Describe a file as the first mirror has it that sends the format, with that mirror and those after it."""
        failures: list[RbtoolError] = []
        for count, address in enumerate(addresses):
            require_network(f"asking {urlsplit(address).hostname}")
            try:
                size, version = retrying(lambda address=address: self._asked(path, address))  # type: ignore[misc]
            except RbtoolError as error:
                failures.append(error)
                continue
            return RemoteFile(path, size, None, tuple(addresses[count:]), version)
        raise failures[0]

    def _asked(self, path: str, address: str) -> tuple[int | None, str | None]:
        with self.transport.open_version(address, 0) as answer:
            head = b""
            while len(head) < len(self.signatures[0]) and (block := next(answer.blocks, b"")):
                head += block
            if not head.startswith(self.signatures):
                raise self._no_file(path, address, f"it begins with {head[:16]!r}")
            return answer.size, answer.version

    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Bring the files to `folder`."""
        for file in files:
            with self.explained(file):
                if file.checksum is not None:
                    super().download([file], folder, progress, note)
                else:
                    self._download_unverified(file, folder, progress, note)

    def _download_unverified(self, file: RemoteFile, folder: Path, progress: Advance, note: Note) -> None:
        """Bring a file whose checksum is not known from the first mirror that has it in the format."""
        failures: list[RbtoolError] = []
        for address in file.addresses:
            received = 0

            def count(amount: int) -> None:
                nonlocal received
                received += amount
                progress(amount)

            try:
                super().download([replace(file, addresses=(address,))], folder, count, note)
                self._require_readable(folder / file.path, address)
            except (FormatError, NetworkError, AuthorisationError, DatasetNotFoundError) as error:
                progress(-received)
                failures.append(error)
                if address != file.addresses[-1]:
                    note(f"{error.message}: the next mirror is asked")
                continue
            return
        raise failures[0]

    def _require_readable(self, path: Path, address: str) -> None:
        """Open what came, and remove it if it is not in the format."""
        try:
            self.require_readable(path)
        except FormatError as error:
            fs.remove(path)
            raise self._no_file(path.name, address, error.message) from error

    def _no_file(self, name: str, address: str, why: str) -> CorruptDataError:
        return CorruptDataError(
            f"{urlsplit(address).hostname} sends no {self.title} file as {name}, and nothing was kept: {why}",
            hint=f"try again later, or name another mirror: {self.variable}=BASE",
        )
