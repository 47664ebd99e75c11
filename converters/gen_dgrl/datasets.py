"""The 128 datasets of Gen-DGRL (Mediratta et al. 2023): 16 games of Procgen in eight categories."""

from __future__ import annotations

import functools
from pathlib import Path

GAMES = (
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot", "heist", "jumper",
    "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
)  # fmt: skip
CATEGORIES = {
    "1M_E": "1M/level_200/expert",
    "1M_S": "1M/level_200/suboptimal",
    "10M": "10M/level_200/expert",
    "25M": "25M/level_200/expert",
    "level_1_E": "100k/level_1/expert",
    "level_1_S": "100k/level_1/suboptimal",
    "level_40_E": "100k/level_40/expert",
    "level_40_S": "100k/level_40/suboptimal",
}
"""The folder of each category below the base URL."""
SUFFIX = ".tar.xz"


@functools.cache
def published() -> dict[str, str]:
    """The path of each archive below the base URL, by id, in the order of the ids."""
    found = {
        f"{game}-{category}": f"{folder}/{game}{SUFFIX}"
        for game in GAMES
        for category, folder in CATEGORIES.items()
    }  # fmt: skip
    return dict(sorted(found.items()))


def id_of(path: Path) -> str:
    """The id of a published archive, unpacked or not, by the folders that it is in; else the name of the file."""
    parts = path.absolute().as_posix()
    plain = (parts.removesuffix(ending) for ending in (SUFFIX, ".tar", "") if parts.endswith(ending))
    end = f"{next(plain)}{SUFFIX}"
    known = next((name for name, file in published().items() if end.endswith(f"/{file}")), None)
    return known or path.name.partition(".")[0]
