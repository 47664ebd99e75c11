"""Draw the pictures of the README: badges, and from real runs a terminal and the report that it wrote.

make pictures
"""

from __future__ import annotations

import contextlib
import html
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from rbtool.core.report.charts import COLOURS

IMAGES = Path(__file__).parents[1] / "images"
COMMANDS = (  # no plots: fonts without braille dots are stretched, and the dots of two lines no longer match
    "rbtool record Pendulum-v1 swing --policy expert --episodes 200 --seed 0",
    "rbtool inspect swing",
    "rbtool preprocess swing --filter 'return > -200' --dest good",
    "rbtool check good",
    "rbtool report swing -o swing.html",
)
COLUMNS, PANE, GAP, EDGE = 80, 640, 24, 28
FACTS = ("check", "form", "steps", "episodes", "length", "return")
CHARTS = ("d1-return", "d1-curve", "d1-action", "d1-correlation")
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
    """Draw the badges. Then run the commands in an empty folder, and draw a terminal beside the page of the report."""
    (IMAGES / "badges.svg").write_text(badges(), encoding="utf-8")
    shown = Text()
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            printed = Text.from_ansi(_run(command, folder))
            shown.append("$ ", "green").append(f"{command}\n", "bold").append_text(printed)
            shown.append("\n")
        page = Path(folder, "swing.html").read_text(encoding="utf-8")
    for name, theme in THEMES.items():
        console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
        console.print(shown, end="")
        terminal = console.export_svg(title="rbtool", theme=theme, code_format=_FORMAT, unique_id=name)
        (IMAGES / f"first-{name}.svg").write_text(_beside(terminal, page, name), encoding="utf-8")


def badges() -> str:
    """Return the badges: what pyproject.toml says of versions, systems and licence, in a file that needs no server."""
    project = tomllib.loads((IMAGES.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = [name.split(" :: ") for name in project["classifiers"]]
    pythons = [name[-1] for name in known if name[0] == "Programming Language" and "." in name[-1]]
    systems = [name[-1].replace("Mac", "mac") for name in known if name[0] == "Operating System"]
    tensordict = next(one for one in project["dependencies"] if one.startswith("tensordict"))
    said = {
        "version": project["version"],
        "python": " · ".join(pythons),
        "runs on": " · ".join(systems),
        "tensordict": " ".join(re.findall(r"[<>=]+[\d.]+", tensordict)).replace(">=", "≥ ").replace("<", "< "),
        "licence": project["license"],
    }
    parts, x = [], 0
    for name, value in said.items():
        left, right = (round(6.1 * len(words)) + 16 for words in (name, value))
        parts.append(f'<rect x="{x}" width="{left + right}" height="20" rx="4" fill="#0969da"/>')
        parts.append(f'<path d="M{x + left} 0H{x + 4}a4 4 0 0 0-4 4v12a4 4 0 0 0 4 4H{x + left}z" fill="#57606a"/>')
        for words, start, width in ((name, x, left), (value, x + left, right)):
            place = f'x="{start + 8}" y="14" textLength="{width - 16}"'
            parts.append(f"<text {place}>{html.escape(words)}</text>")
        x += left + right + 6
    style = 'font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" fill="#fff"'
    size = f'width="{x - 6}" height="20" viewBox="0 0 {x - 6} 20"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def _run(command: str, folder: str) -> str:
    """Return what a command writes to a terminal, without the progress that it would clear."""
    master, slave = os.openpty()
    with subprocess.Popen(
        f"{sys.executable} -m {command} --color always --no-progress", shell=True, cwd=folder, stdout=slave,
        stderr=slave, env=os.environ | {"COLUMNS": str(COLUMNS), "RBTOOL_HOME": f"{folder}/store"},
    ) as running:  # fmt: skip
        os.close(slave)
        written = b""
        with contextlib.suppress(OSError):  # the terminal has ended
            while part := os.read(master, 1 << 16):
                written += part
    os.close(master)
    assert running.returncode == 0, written.decode()
    return written.decode().replace("\r\n", "\n")


def _beside(terminal: str, page: str, theme: str) -> str:
    """Return a picture of a terminal and, right of it, of a page."""
    width, height = (float(size) for size in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', terminal)[0])
    shades = {name: getattr(colour, theme) for name, colour in COLOURS.items()}
    drawn = re.sub(r"var\(--chart-(\w+), \w+\)", lambda found: shades.get(found[1], "inherit"), _page(page, height))
    terminal = terminal.replace("<svg ", f'<svg width="{width:g}" height="{height:g}" ', 1)
    terminal = terminal.replace("rgba(255,255,255,0.35)", shades["grid"])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + GAP + PANE:g} {height:g}">\n{terminal}\n'
        f'<svg x="{width + GAP:g}" width="{PANE}" height="{height:g}" font-family="sans-serif">{drawn}</svg>\n</svg>\n'
    )


def _page(page: str, height: float) -> str:
    """Return a window with the title, facts, steps of an episode and charts of a report, in colours of the page."""
    title, made = re.findall(r"<h1>(.*?)</h1><p>(.*?)</p>", page)[0]
    facts = dict(re.findall(r'<th scope="row">([^<]+)</th><td>(.*?)</td>', page))
    parts = [
        f'<rect x="1" y="1" width="{PANE - 2}" height="{height - 2:g}" rx="8" fill="{_PAPER}" stroke="{_GRID}"/>',
        *(f'<circle cx="{26 + 22 * place}" cy="22" r="7" fill="{colour}"/>'
          for place, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))),
        _text(PANE / 2, 28, "swing.html", 18, "muted", 'text-anchor="middle"'),
        _text(EDGE, 76, title, 28, "ink", _BOLD), _text(EDGE, 104, made, 17, "muted"),
    ]  # fmt: skip
    y = 140
    for name in FACTS:
        value = html.unescape(re.sub(r"<[^>]+>", "", facts[name]))
        parts += [_text(EDGE, y, name, 19, "muted"), _text(EDGE + 108, y, value, 19, "3" if name == "check" else "ink")]
        y += 27
    episode = next(one for one in page.split("<article")[1:] if "<h4>" in one and "lowest return" in one)
    parts.append(_text(EDGE, y + 22, re.findall(r"<h4>(.*?)</h4>", episode)[0], 20, "ink", _BOLD))
    y += 36
    half = (PANE - 2 * EDGE - 20) // 2
    lane = r'<code>([^<]+)</code> <span>([^<]+)</span>.*?<svg class="lane (\w+)".*?points="([^"]+)"'
    lanes = re.findall(lane, episode)
    for place, (name, limits, kind, points) in enumerate(lanes):
        x, top = EDGE + place % 2 * (half + 20), y + place // 2 * 74
        box = f'x="{x}" y="{top + 22}" width="{half}" height="44" viewBox="0 0 1000 48" preserveAspectRatio="none"'
        stroke = f'stroke="{_var(_LANES[kind])}" stroke-width="2" vector-effect="non-scaling-stroke"'
        parts.append(_text(x, top + 16, f"{name}  {limits}", 17, "muted"))
        parts.append(f'<svg {box}><polyline points="{points}" fill="none" {stroke}/></svg>')
    y += -(-len(lanes) // 2) * 74 + 12
    for place, name in enumerate(CHARTS):
        found = re.search(rf'<svg xmlns[^>]*aria-labelledby="{name}-title.*?</svg>', page, re.DOTALL)
        assert found is not None, name
        box = f'x="{EDGE + place % 2 * (half + 20)}" y="{y + place // 2 * 190}" width="{half}" height="180"'
        chart = re.sub(r' width="\d+" height="\d+"', f" {box}", found[0], count=1)
        parts.append(chart.replace(' font-family="var(--chart-font, inherit)"', ""))
    return "\n".join(parts)


def _var(colour: str) -> str:
    """Name a colour of charts, as the charts of a page do."""
    return f"var(--chart-{colour}, none)"


_PAPER, _GRID, _BOLD = _var("paper"), _var("grid"), 'font-weight="bold"'
_LANES = {"observation": "1", "action": "2", "reward": "3"}


def _text(x: float, y: float, words: str, size: int, colour: str, more: str = "") -> str:
    """Return a line of text."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{_var(colour)}" {more}>{html.escape(words)}</text>'


if __name__ == "__main__":
    main()
