"""Draw the terminal of the README from real runs, in light and dark colours: `make pictures`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

IMAGES = Path(__file__).parents[1] / "images"
COMMANDS = (  # no plots: fonts without braille dots are stretched, and the dots of two lines no longer match
    "rbtool record CartPole-v1 cartpole --episodes 200 --seed 0",
    "rbtool inspect cartpole",
    "rbtool preprocess cartpole --normalize observation --n-step 3 --gamma 0.99 --dest ready",
    "rbtool check ready",
)
WIDTH = 96
_ANSI = [
    (1, 1, 1), (207, 34, 46), (17, 99, 41), (154, 103, 0), (9, 105, 218), (130, 80, 223), (27, 124, 131),
    (110, 119, 129),
]  # fmt: skip
_BRIGHT = [
    (72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34), (88, 166, 255), (188, 140, 255), (57, 197, 207),
    (177, 186, 196),
]  # fmt: skip
THEMES = {
    "light": TerminalTheme((255, 255, 255), (36, 41, 47), _ANSI),
    "dark": TerminalTheme((13, 17, 23), (230, 237, 243), _BRIGHT),
}
# The fonts that rich names are on a server; a picture has to be whole without a network.
_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
_FORMAT = _FORMAT.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


def main() -> None:
    """Run the commands in an empty folder, and write what a terminal shows of them."""
    shown = Text()
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            done = subprocess.run(
                [sys.executable, "-m", *command.split(), "--color", "always"],
                cwd=folder,
                env=os.environ | {"COLUMNS": str(WIDTH), "RBTOOL_HOME": f"{folder}/store"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=True,
            )
            shown.append("$ ", "green").append(f"{command}\n", "bold").append_text(Text.from_ansi(done.stdout))
            shown.append("\n")
    for name, theme in THEMES.items():
        console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
        console.print(shown, end="")
        console.save_svg(
            str(IMAGES / f"terminal-{name}.svg"), title="rbtool", theme=theme, code_format=_FORMAT, unique_id=name
        )


if __name__ == "__main__":
    main()
