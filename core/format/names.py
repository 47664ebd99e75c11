"""The order of names with numbers in them."""

from __future__ import annotations

import re


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts names as people count: `seed2` comes before `seed10`.

    >>> sorted(["seed10", "seed2", "seed"], key=natural_order)
    ['seed', 'seed2', 'seed10']
    """
    parts = re.split(r"(\d+)", name)
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
