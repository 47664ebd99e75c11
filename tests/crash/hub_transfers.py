"""Kills an upload to a hub, a download or a stream from one, at each request or change of files, and runs it again.

    python hub_transfers.py WORK upload|download|stream requests|operations [--every K]

WORK holds the dataset `walks`. After the kill the hub has the whole dataset in a commit or no commit of it, the machine
has the whole dataset or none of it; the next run completes, and sends or fetches only what was not there. A stream
gives the batches of the dataset on this disk, from a cache that was struck, too. Prints how many requests or operations
were struck.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))

from hub import WRITER, UploadHub
from machine import files_of
from streaming import batches_of
from strikes import forked, kill

import rbtool
from rbtool.core.remote.shards import SHARD_DIGESTS

WHERE = "hf://me/walks"
MODULES = (
    "huggingface_hub.hf_api", "huggingface_hub.lfs", "httpx2", "rbtool.core.verbs.download", "rbtool.core.verbs.upload",
    "tenacity", "yaml",
)  # fmt: skip
_NEXT_TO_IT = {"README.md", ".gitattributes", SHARD_DIGESTS}


class Trial:
    """One hub and one machine, of which the transfer is struck and then completed."""

    def __init__(self, hub: UploadHub, work: Path, verb: str) -> None:
        self.hub, self.verb = hub, verb
        self.out = work / "out"
        shutil.copytree(work / "walks", self.out / "walks")
        self.expected = files_of(self.out / "walks")
        self.stored = self.out / "store/hf/me/walks"
        if verb != "upload":
            files = {path: (self.out / "walks" / path).read_bytes() for path in self.expected}
            hub.create("me/walks")
            hub.push("me/walks", files)
        self.batches = batches_of(str(self.out / "walks"), window=2) if verb == "stream" else None

    def transfer(self, _: Path | None = None) -> None:
        """Upload or download, with a store of its own."""
        if self.verb == "upload":
            rbtool.upload(self.out / "walks", WHERE, root=self.out / "store")
        elif self.verb == "stream":
            assert batches_of(WHERE, root=str(self.out / "store"), window=2) == self.batches
        else:
            rbtool.download(WHERE, root=self.out / "store")

    def struck_at_request(self, number: int) -> bool:
        """Transfer in a child that is killed when the hub gets that request; return whether it came so far."""
        killed, child, count = [], [0], iter(range(1, 1 << 30))

        def before(line: str) -> None:
            if next(count) == number:
                killed.append(line)
                os.kill(child[0], signal.SIGKILL)

        self.hub.before = before
        child[0] = os.fork()
        if child[0] == 0:
            code = 1
            try:
                self.transfer()
                code = 0
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child[0], 0)[1])
        self.hub.before = lambda line: None
        assert code == (-signal.SIGKILL if killed else 0), f"struck at request {number}: exit {code}"
        return bool(killed)

    def struck_at_operation(self, number: int) -> bool:
        """Transfer in a child that is killed at that change of files; return whether it came so far."""
        status, _ = forked(self.transfer, self.out, self.stored, kill, number)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, -signal.SIGKILL), f"struck at operation {number}: exit {code}"
        return code != 0

    def require_whole_or_nothing(self) -> None:
        """Require that nobody sees half of the dataset."""
        assert files_of(self.out / "walks") == self.expected
        for files in list(self.hub.histories["me/walks"].commits.values())[1:] if self.hub.histories else ():
            assert files.keys() - _NEXT_TO_IT == self.expected.keys()
        assert not self.stored.exists() or files_of(self.stored) == self.expected

    def complete(self) -> None:
        """Run it again, twice, and require that only what is missing was transferred."""
        there, commits = set(self.hub.objects), self._commits()
        done = {path.name for path in self.out.rglob("*.memmap") if "files" in path.parts}
        self.hub.forget()
        assert os.waitstatus_to_exitcode(forked(self.transfer, self.out, self.stored, None, 0)[0]) == 0
        self.require_whole_or_nothing()
        if self.verb == "stream":
            return
        assert not {path.split("/")[3] for path in self.hub.sent()} & there
        if self.verb == "upload":
            assert self._commits() == max(commits, 2)
        else:
            assert len(self.hub.paths("/resolve/")) <= len(self.expected) + 1 - len(done)
            assert files_of(self.stored) == self.expected
        self.hub.forget()
        assert os.waitstatus_to_exitcode(forked(self.transfer, self.out, self.stored, None, 0)[0]) == 0
        assert {asked.method for asked in self.hub.requests} <= {"GET"}
        assert self.hub.paths("/resolve/.*memmap") == []
        assert list((self.out / "store").rglob(".*new-*")) == []

    def _commits(self) -> int:
        return len(self.hub.histories["me/walks"].commits) if self.hub.histories else 0


def strike(work: Path, verb: str, where: str, number: int, hub: UploadHub) -> bool:
    """Strike a fresh transfer at one place and complete it; return whether it came so far."""
    hub.histories.clear()
    hub.repositories.clear()
    hub.objects.clear()
    trial = Trial(hub, work, verb)
    struck: Callable[[int], bool] = trial.struck_at_request if where == "requests" else trial.struck_at_operation
    came = struck(number)
    hub.settle()  # with the requests of the process that was killed
    trial.require_whole_or_nothing()
    trial.complete()
    shutil.rmtree(trial.out)
    return came


def main() -> None:
    """Strike everywhere and print how often."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("verb", choices=["upload", "download", "stream"])
    parser.add_argument("where", choices=["requests", "operations"])
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    with UploadHub(options.work / "hub") as hub:
        os.environ |= hub.environment(options.work / "hf")
        os.environ |= {"HF_TOKEN": WRITER, "RBTOOL_RETRIES": "2:0.01"}
        for module in MODULES:
            importlib.import_module(module)  # once here, not in every child
        number, struck = 1, 0
        while strike(options.work, options.verb, options.where, number, hub):
            number, struck = number + options.every, struck + 1
    print(json.dumps({"struck": struck}))


if __name__ == "__main__":
    main()
