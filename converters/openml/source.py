"""Downloads tables of OpenML through its JSON interface; neither scikit-learn nor pandas is needed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from ...core.errors import (
    CorruptDataError,
    DatasetNotFoundError,
    FormatError,
    NetworkError,
    UsageError,
)
from ...core.format import fs
from ...core.format.converter import Advance, Ids, Note, RemoteDataset, RemoteFile
from ...core.format.documents import parse_json
from ...core.remote.http import HttpSource
from ...core.remote.transport import matches, read_small, require_network
from .reader import DATASETS, DESCRIPTION, OpenmlDataset, dataset_named, description_in

_URL = "OPENML_URL"
_DEFAULT = "https://api.openml.org"
_ADDRESS = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", re.ASCII)  # no password: addresses are recorded
_ANSWER_BYTES = 16 << 20
_MD5 = re.compile(r"[0-9a-f]{32}", re.ASCII)


class OpenmlSource(HttpSource):
    """OpenML, or the server that `OPENML_URL` names; the tables are compared with the md5 that OpenML states."""

    name = "openml"
    namespaced = False

    def __init__(self) -> None:
        super().__init__()
        self._md5: dict[str, str] = {}
        """By path, of files whose size is not known before all of it is there."""

    @property
    def remote(self) -> str:
        """The base URL, without a slash at the end; UsageError if the variable has another form."""
        named = os.environ.get(_URL) or _DEFAULT
        if not _ADDRESS.fullmatch(named):
            raise UsageError(
                f"{_URL} has {re.sub('//[^/]*@', '//…@', named)!r}, expected a base URL like {_DEFAULT}",
                hint=f"unset it for {_DEFAULT}",
            )
        return named.rstrip("/")

    def list_ids(self) -> Ids:
        """List the ids, which are part of this package: nothing is requested."""
        return Ids(tuple(sorted(DATASETS)))

    def addresses(self, dataset_id: str) -> Mapping[str, Sequence[str]]:
        """Return the address of the table and of its description, which OpenML is asked for."""
        file, description, _ = self._resolved(dataset_named(dataset_id))
        return {**file, **description}

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Ask OpenML which file the table is, and its server for the size."""
        if revision is not None:
            raise UsageError(f"{self.remote} keeps no revisions", hint="leave out --revision")
        dataset = dataset_named(dataset_id)
        file, description, md5 = self._resolved(dataset)
        ((path, places),) = file.items()
        try:
            table = self.probe(path, places, md5)
        except NetworkError:
            table = self.probe(path, places)  # of unknown size: then the md5 is compared once all of it is there
            if table.size is not None or md5 is None:
                raise
            self._md5[path] = md5
        ((name, where),) = description.items()
        address = f"{self.remote}: {dataset.table}, version {dataset.version}"
        return RemoteDataset(dataset_id, address, None, (self.probe(name, where), table))

    def _resolved(self, dataset: OpenmlDataset) -> tuple[dict[str, list[str]], dict[str, list[str]], str | None]:
        """Return the addresses of the table and of its description, and the checksum of the table."""
        require_network(f"asking {urlsplit(self.remote).hostname}")
        number = self._number_of(dataset)
        where = f"{self.remote}/api/v1/json/data/{number}"
        found = description_in(read_small(self.transport, where, limit=_ANSWER_BYTES), where)
        if (found.get("name"), str(found.get("version"))) != (dataset.table, str(dataset.version)):
            raise FormatError(
                f"{where} describes {found.get('name')!r} in version {found.get('version')!r}, expected "
                f"{dataset.table!r} in version {dataset.version}"
            )
        md5 = found.get("md5_checksum")
        if md5 is not None and not (isinstance(md5, str) and _MD5.fullmatch(md5.lower())):
            raise FormatError(f"{where} states the md5 {md5!r}, expected 32 hexadecimal digits")
        places = (
            [f"{self.remote}/data/v1/download/{quote(str(found['file_id']), safe='')}"] if "file_id" in found else []
        )
        stated = found.get("url")
        if isinstance(stated, str) and re.match("https?://", stated):
            places.append(stated)
        if not places:
            raise FormatError(f"{where} does not state where the file is")
        checksum = None if md5 is None else f"md5:{md5.lower()}"
        return {f"{dataset.table}.arff": list(dict.fromkeys(places))}, {DESCRIPTION: [where]}, checksum

    def _number_of(self, dataset: OpenmlDataset) -> int:
        """The number of the table, by which OpenML is asked for anything else."""
        where = (
            f"{self.remote}/api/v1/json/data/list/data_name/{quote(dataset.table, safe='')}/limit/2/data_version/"
            f"{dataset.version}"
        )
        try:
            document: Any = parse_json(read_small(self.transport, where, limit=_ANSWER_BYTES), where)
        except NetworkError as error:
            if "412" in error.message:  # OpenML's answer where no table is found
                raise DatasetNotFoundError(
                    f"{self.remote} has no table {dataset.table!r} in version {dataset.version}"
                ) from error
            raise
        try:
            listed = document["data"]["dataset"]
            numbers = [int(one["did"]) for one in listed if (one["name"], int(one["version"])) == _wanted(dataset)]
        except (TypeError, LookupError, ValueError) as error:
            raise FormatError(f"{where} is no list of tables of OpenML") from error
        if not numbers:
            raise DatasetNotFoundError(f"{self.remote} has no table {dataset.table!r} in version {dataset.version}")
        return numbers[0]

    def reader_options(self, dataset_id: str) -> Mapping[str, Any]:
        """The id, which states the encoding."""
        return {"id": dataset_id}

    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Bring the files to `folder`; CorruptDataError for a table of another md5 than OpenML states."""
        super().download(files, folder, progress, note)
        for file in files:
            path, md5 = folder / file.path, self._md5.get(file.path)
            if file.checksum is None and md5 is not None and not matches(path, path.stat().st_size, md5):
                fs.remove(path)
                raise CorruptDataError(
                    f"{file.path} has not the {md5} that OpenML states, and is not kept", hint="try again later"
                )


def _wanted(dataset: OpenmlDataset) -> tuple[str, int]:
    return dataset.table, dataset.version
