"""A source and a reader of a made-up format: one `.npz` file of transitions for each dataset, on a web server."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from rbtool.core.format import Ids, Piece, Reader, SourceFacts
from rbtool.core.remote import HttpSource
from rbtool.core.ted import Field

FIELDS = (
    (Field(("observation",), "float32", (3,), "observation"), "state"),
    (Field(("action",), "float32", (1,), "action"), "step"),
    (Field(("reward",), "float32", (), "reward"), "result"),
)


class HopSource(HttpSource):
    name = "hop"
    remote = property(lambda self: os.environ["HOP_URL"])

    def list_ids(self) -> Ids:
        return Ids(("hop-easy-v0", "hop-hard-v0"))

    def addresses(self, dataset_id: str) -> Mapping[str, Sequence[str]]:
        return {"hop.npz": [f"{self.remote}/{dataset_id}.npz"]}


class HopReader(Reader):
    piece_steps = 4096

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return (path / "hop.npz").is_file()

    def on_open(self) -> None:
        with (self.path / "hop.npz").open("rb") as raw, np.load(raw) as file:
            self.data = dict(file)

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        self.stops = np.flatnonzero(self.data["done"]) + 1
        return SourceFacts("hop", "hop", FIELDS, range(len(self.stops)), int(self.stops[-1]))

    def read_episode(self, number: int) -> Iterator[Piece]:
        begin, end = int(self.stops[number - 1]) if number else 0, int(self.stops[number])
        for start in range(begin, end, self.piece_steps):
            part = slice(start, min(start + self.piece_steps, end))
            columns = {("observation",): self.data["obs"][part], ("action",): self.data["act"][part]}
            columns[("reward",)] = self.data["rew"][part]
            following, done = {("observation",): self.data["next_obs"][part]}, self.data["done"][part]
            yield Piece(number, columns, done, np.zeros_like(done), start == begin, part.stop == end, next=following)

    def files(self) -> list[Path]:
        return [self.path / "hop.npz"]
