"""Downloads runs from mirrors of the DQN Replay dataset, or takes them from a folder of copies.

The dataset (Agarwal et al. 2020) has 60 games with five runs each. The bucket that Google published is closed: it
answers 403.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...core.errors import DatasetNotFoundError
from ...core.format.converter import Ids, LocalCache, RemoteFile
from ...core.remote.catalogue import not_found
from ...core.remote.http import MirrorSource

RUNS = (1, 2, 3, 4, 5)
GAMES = (
    "AirRaid", "Alien", "Amidar", "Assault", "Asterix", "Asteroids", "Atlantis", "BankHeist", "BattleZone", "BeamRider",
    "Berzerk", "Bowling", "Boxing", "Breakout", "Carnival", "Centipede", "ChopperCommand", "CrazyClimber",
    "DemonAttack", "DoubleDunk", "ElevatorAction", "Enduro", "FishingDerby", "Freeway", "Frostbite", "Gopher",
    "Gravitar", "Hero", "IceHockey", "Jamesbond", "JourneyEscape", "Kangaroo", "Krull", "KungFuMaster",
    "MontezumaRevenge", "MsPacman", "NameThisGame", "Phoenix", "Pitfall", "Pong", "Pooyan", "PrivateEye", "Qbert",
    "Riverraid", "RoadRunner", "Robotank", "Seaquest", "Skiing", "Solaris", "SpaceInvaders", "StarGunner", "Tennis",
    "TimePilot", "Tutankham", "UpNDown", "Venture", "VideoPinball", "WizardOfWor", "YarsRevenge", "Zaxxon",
)  # fmt: skip


_CHECKPOINTS = 50
_LOGS = "replay_logs"
_NAMES = ("$store$_observation", "$store$_action", "$store$_reward", "$store$_terminal", "add_count", "invalid_range")
_VARIABLE, _FOLDER = "ATARI_URL", "ATARI_DATASET_DIR"


class AtariSource(MirrorSource):
    """The bucket of the DQN Replay dataset, or the mirrors that `ATARI_URL` names: base URLs (http or https) in order.

    A run is the checkpoints from 0 to 49 that a mirror has. Each file is unpacked and must have the checksum that it
    states, before it is taken; the next mirror is asked where it has not. `ATARI_DATASET_DIR` names the folder of
    `--local`, which has runs as `Pong/1/replay_logs`.
    """

    name = "atari"
    title = "DQN Replay"
    variable = _VARIABLE
    defaults = ("https://storage.googleapis.com/atari-replay-datasets/dqn",)
    signatures = (b"\x1f\x8b",)
    server_hint = (
        "the published bucket has been closed since 2025 (it answers 403). RL Unplugged (gs://rl_unplugged, "
        "rlu_atari_checkpoints_ordered in TensorFlow Datasets) has the same frames. With files of your own: "
        f"rbtool convert FOLDER DEST, or --local with {_FOLDER}=DIR; {_VARIABLE}=BASE names a mirror"
    )
    local_cache = LocalCache("atari", _FOLDER, "~/dqn_replay")

    def list_ids(self) -> Ids:
        """List the ids, which are part of this package: nothing is requested."""
        return Ids(runs())

    def addresses(self, dataset_id: str) -> Mapping[str, Sequence[str]]:
        """Return the addresses of all files of all checkpoints, on each mirror."""
        paths = (path for number in range(_CHECKPOINTS) for path in _paths(number))
        return {path: [f"{base}/{dataset_id}/{path}" for base in self.bases] for path in paths}

    def find_files(self, dataset_id: str) -> Sequence[RemoteFile]:
        """Ask for size and version of all files of a run; DatasetNotFoundError if a checkpoint lacks one."""
        if dataset_id not in runs():
            raise not_found(dataset_id, list(runs()), self.name)
        with self.explained():
            addresses = self.addresses(dataset_id)
            return [file for number in range(_CHECKPOINTS) for file in self._checkpoint(addresses, number)]

    def _checkpoint(self, addresses: Mapping[str, Sequence[str]], number: int) -> list[RemoteFile]:
        """Describe the files of a checkpoint; none where it is not the first and its frames are not there."""
        found: list[RemoteFile] = []
        for path in _paths(number):
            try:
                found.append(self.described(path, addresses[path]))
            except DatasetNotFoundError:
                if found or not number:
                    raise
                return []
        return found

    def require_readable(self, path: Path) -> None:
        """Unpack a file; FormatError if it is no array, or has not the checksum that it states."""
        from ..files.npz import GzipArray  # numpy takes longer to load than a listing

        with GzipArray(path) as array:
            array.verify()


def _paths(number: int) -> list[str]:
    return [f"{_LOGS}/{name}_ckpt.{number}.gz" for name in _NAMES]


@functools.cache
def runs() -> tuple[str, ...]:
    """All ids, sorted: `Pong/1` to `Pong/5`, and so on."""
    return tuple(f"{game}/{run}" for game in sorted(GAMES) for run in RUNS)
