"""The table of measured facts in the README, made from docs/facts.json, which benchmarks/facts.py writes.

python docs/tools/facts_table.py
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE, README = ROOT / "docs/facts.json", ROOT / "README.md"
_PLACE = re.compile(r"(?<=<!-- facts -->\n).*?(?=<!-- end of facts -->)", re.DOTALL)


@dataclass(frozen=True)
class Fact:
    """One row: what was measured, the figures of rbtool and TorchRL, and the command that measures them."""

    what: str
    rbtool: str
    torchrl: str
    command: str


@dataclass(frozen=True)
class Facts:
    """All rows, when they were measured, and with which versions."""

    date: str
    torch: str
    torchrl: str
    facts: tuple[Fact, ...]

    def table(self) -> str:
        """Return the table in Markdown."""
        heads = ("", "rbtool", f"TorchRL {self.torchrl}")
        rows = [(one.what, one.rbtool, one.torchrl) for one in self.facts]
        lines = [heads, ("---",) * len(heads), *rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("|  |", "| |")


def read() -> Facts:
    """Read docs/facts.json."""
    found = json.loads(FILE.read_text())
    return Facts(**found | {"facts": tuple(Fact(**one) for one in found["facts"])})


def shown(readme: str) -> str:
    """Return the table in the text of a README."""
    found = _PLACE.search(readme)
    assert found is not None, "the README has no place for the facts"
    return found[0]


def write(facts: Facts) -> None:
    """Write docs/facts.json, and the table of the README."""
    FILE.write_text(json.dumps(dataclasses.asdict(facts), indent=1, ensure_ascii=False) + "\n")
    README.write_text(_PLACE.sub(lambda _: facts.table(), README.read_text()))


if __name__ == "__main__":
    write(read())
