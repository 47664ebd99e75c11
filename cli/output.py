"""Output of the command line: results on stdout, everything else on stderr. No other module writes there.

Progress is a moving bar in a terminal, and lines elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from ..core.progress import Silent, clean
from .text import Cell, Line, Styled, amount, clean_bytes, clean_json, clean_lines, folded

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import Task, TaskID
    from rich.text import Text

    from ..core.progress import Progress


T = TypeVar("T")
STDOUT = "standard output"
"""The name of stdout in errors, in place of a file name."""

_ANSI = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "33", "cyan": "36"}
_UPPER, _LOWER = 0b00011011, 0b11100100
"""The bits of a braille character that are its upper and its lower dots."""
_ASCII = str.maketrans(
    {"…": "...", "·": "|", "→": "->", "′": "'", "×": "x", "−": "-", "≥": ">=", "≤": "<="}
    | dict(zip("▁▂▃▄▅▆▇█", "_.:-=+*#", strict=True))
    | {"│": "|", "─": "-", "└": "+", "┤": "+"}
    | {chr(0x2800 + dots): " '.:"[bool(dots & _UPPER) + 2 * bool(dots & _LOWER)] for dots in range(256)}
)

_EVERY = 0.1  # seconds between two refreshes
_QUICK = 1.0  # seconds before a stage is reported
_WIDE, _NARROW = 100, 45
_SPEED_WIDTH = 26  # of `999.9k steps/s  0:03 left`, with a gap
_PAST = {"looking over": "looked over"}


class Output:
    """Writes results as JSON, as one path per line or for people, with or without colour; and messages to stderr.

    No method raises if the reader of a pipe has closed it: the command runs to its end, and its further output is
    dropped.
    """

    def __init__(
        self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False, debug: bool = False,
        colour: str = "auto", no_progress: bool = False,
    ) -> None:  # fmt: skip
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose or debug
        self.debug = debug
        self._no_colour = colour == "never" or (colour == "auto" and bool(os.environ.get("NO_COLOR")))
        self._colour = colour == "always"
        self._no_progress = no_progress
        self._live: TerminalProgress | None = None
        self._keep: Callable[[dict[str, Any]], None] | None = None
        self._heading: Sequence[Line] = ()
        self.shown = False

    @classmethod
    def from_arguments(cls, arguments: Iterable[str]) -> Output:
        """Read the settings from arguments that could not be parsed."""
        words = set(arguments)
        colour = "never" if "--no-color" in words or "--color=never" in words else "auto"
        return cls(as_json="--json" in words, debug="--debug" in words, colour=colour)

    def part(self, heading: Sequence[Line], keep: Callable[[dict[str, Any]], None]) -> Output:
        """Return the output of one of several runs: text follows a heading, and `keep` receives JSON documents."""
        part = copy.copy(self)
        part._heading, part._keep = heading, keep
        return part

    @property
    def is_part(self) -> bool:
        """Whether this is the output of one of several runs."""
        return self._keep is not None

    # The result ------------------------------------------------------------------------------------

    def show(
        self, result: T, names: Iterable[str], lines: Callable[[T, int | None], Iterable[Line]] | None = None
    ) -> None:
        """Write the result to stdout: as a JSON document (`--json`), as `names`, one per line (`-q`), or as `lines`.

        `lines` is called with the result and the width of the terminal, or None if stdout is not one: then lines are
        not wrapped. Without `lines`, the names are written.
        """
        self.end_progress()
        self.shown = True
        if self.as_json:
            from ..core.results import entries_of

            self.document(entries_of(result))
        elif self.quiet or lines is None:
            self._write(sys.stdout, "".join(f"{clean(name)}\n" for name in names))
        else:
            width = shutil.get_terminal_size().columns if self._is_terminal(sys.stdout) else None
            text = (f"{self._paint(line, sys.stdout)}\n" for line in (*self._heading, *lines(result, width)))
            self._write(sys.stdout, "".join(text))

    def document(self, document: dict[str, Any]) -> None:
        """Write a JSON document to stdout; of one of several runs it is kept."""
        if self._keep is not None:
            self._keep(document)
            return
        for piece in _json_pieces(document):
            self._write(sys.stdout, piece)

    def text(self, text: str) -> None:
        """Write plain text, such as a help page, to stdout."""
        self._write(sys.stdout, f"{text}\n")

    # Messages --------------------------------------------------------------------------------------

    def say(self, *line: Cell) -> None:
        """Write a line to stderr; not with `-q`."""
        if not self.quiet:
            self._to_stderr(line)

    def summary(self, *line: Cell) -> None:
        """Write a line to stderr, wrapped; not with `--json`, because the document contains the same facts."""
        if not self.as_json:
            for part in folded(line, self.stderr_width, 2):
                self.say(*part)

    @property
    def stderr_width(self) -> int | None:
        """Columns of the terminal at stderr, None without one."""
        return shutil.get_terminal_size().columns if self._is_terminal(sys.stderr) else None

    def warn(self, text: str) -> None:
        """Warn on stderr, also with `-q`."""
        self._to_stderr([Styled("warning: ", "yellow"), text])

    def suggest(self, command: str) -> None:
        """Print the command to run next, on a terminal; not after one of several runs."""
        if not self.as_json and self._keep is None and self._is_terminal(sys.stderr):
            self.say(Styled(f"try: {command}", "dim"))

    @property
    def can_ask(self) -> bool:
        """Whether stdin and stderr are terminals."""
        return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()

    def ask(self, question: str) -> bool:
        """Ask on stderr, also with `-q`, and wait; any answer but yes is no."""
        self.end_progress()
        self._write(sys.stderr, self._paint([Styled(question, "bold"), " [y/N] "], sys.stderr))
        answer = sys.stdin.readline()
        if not answer.endswith("\n"):  # end of input: the cursor is still behind the question
            self._write(sys.stderr, "\n")
        return answer.strip().lower() in {"y", "yes"}

    def fail(self, document: dict[str, Any], trace: str = "") -> None:
        """Report an error: a sentence and a hint on stderr, and with `--json` a document on stdout."""
        self.end_progress()
        if self.as_json:
            self.document({"error": document})
        self._to_stderr([Styled("error: ", "red"), document["message"]])
        if document["hint"]:
            self._to_stderr([Styled("hint: ", "cyan"), document["hint"]])
        if trace:
            self._write(sys.stderr, clean_lines(trace))

    def log(self, text: str) -> None:
        """Write a log record to stderr, for `-v`."""
        for line in text.split("\n"):
            self._to_stderr([Styled(line, "dim")])

    def run(self, verb: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call the function of a verb, and show its progress."""
        with self.progress() as progress:
            return verb(*arguments, progress=progress, **options)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress]:
        """Yield a progress display: a bar in a terminal, a line per tenth elsewhere, none with `-q`."""
        if self.quiet:
            yield Silent()
        elif self._no_progress:
            yield NotesOnly(self._note)
        elif self._is_terminal(sys.stderr) and not self._no_colour:
            self._live = TerminalProgress(sys.stderr, self._note)
            try:
                yield self._live
            finally:
                self.end_progress()
        else:
            yield LineProgress(self.say, self._note)

    def _note(self, text: str) -> None:
        """Write a note of the work to stderr and the log; commands are in bold."""
        logging.getLogger("rbtool").info(text, extra={"shown": True})
        if text.startswith("$ "):
            self.say()
        self.say(Styled(text, "bold" if text.startswith("$ ") else ""))

    def end_progress(self) -> None:
        """Stop drawing; the bar stays on the screen."""
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError):
                live.close()

    # Streams ---------------------------------------------------------------------------------------

    def _to_stderr(self, line: Line) -> None:
        text = self._paint(line, sys.stderr)
        if self._live is None or not self._live.above(text):
            self._write(sys.stderr, f"{text}\n")

    def _paint(self, line: Line, stream: TextIO) -> str:
        colour, painted = self._has_colour(stream), ""
        for cell in line:
            text, style = cell if isinstance(cell, Styled) else (cell, "")
            text = clean(text)
            painted += f"\x1b[{_ANSI[style]}m{text}\x1b[0m" if colour and style and text else text
        return painted

    def _has_colour(self, stream: TextIO) -> bool:
        if self._no_colour or self._colour:
            return self._colour
        forced = [os.environ.get(name) for name in ("FORCE_COLOR", "CLICOLOR_FORCE")]
        return any(value not in (None, "", "0") for value in forced) or self._is_terminal(stream)

    @staticmethod
    def _is_terminal(stream: TextIO) -> bool:
        return stream.isatty() and os.environ.get("TERM") != "dumb"

    @staticmethod
    def _write(stream: TextIO, text: str) -> None:
        encoding = stream.encoding or "utf-8"  # None for io.StringIO
        try:
            text.encode(encoding, "surrogateescape")
        except UnicodeEncodeError:
            text = text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
        if stream.isatty():
            text = clean_bytes(text)
        try:
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="surrogateescape")  # writes file names that are not UTF-8 as their bytes
            stream.write(text)
            stream.flush()
        except OSError as error:
            detach(stream)
            if error.errno != errno.EPIPE and stream is sys.stdout:
                error.filename = STDOUT
                raise


def _json_pieces(document: dict[str, Any]) -> Iterator[str]:
    """Yield strict JSON in pieces. Long entries have a method `json_pieces`, which avoids one large string.

    A random mark takes the place of each long entry in the document, which is split there.
    """
    from ..core.format.documents import plain

    mark, long = secrets.token_hex(16), list[Any]()

    def marked(value: Any) -> Any:
        if hasattr(value, "json_pieces"):
            long.append(value)
            return mark
        if isinstance(value, dict):
            return {key: marked(item) for key, item in value.items()}
        return [marked(item) for item in value] if isinstance(value, list) else value

    first, *texts = _json(plain(marked(document))).split(f'"{mark}"')
    yield first
    for entry, text in zip(long, texts, strict=True):
        yield from entry.json_pieces()
        yield text


def _json(strict: Any) -> str:
    """Format strict JSON; characters that stdout cannot encode, and lone surrogates, are escaped."""
    text = json.dumps(strict, ensure_ascii=False, allow_nan=False, indent=1)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(strict, allow_nan=False, indent=1)
    return f"{clean_json(text)}\n"


def detach(stream: TextIO) -> None:
    """Redirect a failed stream to the null device: otherwise the interpreter fails to flush it at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


# Displays of progress ---------------------------------------------------------------------------


class NotesOnly(Silent):
    """Shows the notes of the work, and no progress, for `--no-progress`."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def note(self, text: str) -> None:
        """Show the user a message that is not an error."""
        self._note(text)


class LineProgress:
    """Writes a line at each tenth of a stage, or one at its end if the total is unknown.

    In the first second of a stage, only its last line is written.
    """

    def __init__(self, write: Callable[[str], None], note: Callable[[str], None]) -> None:
        self._write = write
        self.note = note
        self._label, self._unit = "", ""
        self._total: int | None = None
        self._count = self._tenths = 0
        self._started = 0.0

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Start a stage."""
        self._label, self._total, self._unit = label, total, unit
        self._count = self._tenths = 0
        self._started = time.monotonic()

    def advance(self, amount: int) -> None:
        """Add to the count; write a line at each tenth."""
        self._count += amount
        tenths = self._count * 10 // self._total if self._total else 0
        if tenths > self._tenths and (tenths >= 10 or time.monotonic() - self._started >= _QUICK):
            self._tenths = tenths
            self._write(f"{self._label} {self._tenths * 10} % ({self._progress()}{self._pace()})")

    def done(self, remark: str = "") -> None:
        """End the stage."""
        if self._total is None or remark:
            over = _PAST.get(self._label)
            text = remark or self._progress()
            self._write(f"{over} {text}" if over else f"{self._label} done ({text})")

    def _pace(self) -> str:
        """Return the rate and the remaining time; "" in the first second and at the end."""
        seconds = time.monotonic() - self._started
        if not self._total or self._tenths >= 10 or seconds < _QUICK:
            return ""
        return f", {_short(self._count / seconds, self._unit)}/s, {_left(self._count, self._total, seconds)}"

    def _progress(self) -> str:
        if self._total is None:
            return amount(self._count, self._unit)
        of = amount(self._total, self._unit)
        return f"{amount(self._count, self._unit) if self._unit == 'bytes' else f'{self._count:,}'} of {of}"


class TerminalProgress:
    """Draws one bar per stage, without a thread of its own, so that worker processes can be forked at any time."""

    def __init__(self, stream: TextIO, note: Callable[[str], None]) -> None:
        self._stream = stream
        self.note = note
        self._bars: Bars | None = None
        self._console: Console | None = None
        self._task: TaskID | None = None
        self._unit = ""
        self._total: int | None = None
        self._count = 0
        self._started = self._drawn = 0.0

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Start a stage below the previous one."""
        self._finish_stage()
        self._unit, self._total, self._count = unit, total, 0
        self._started = time.monotonic()
        bars = self._open()
        self._task = bars.add_task(clean(label), total=total, count="", speed="")
        self._draw(self._started)

    def advance(self, amount: int) -> None:
        """Add to the count; redraw at most every `_EVERY` seconds."""
        self._count += amount
        now = time.monotonic()
        if now - self._drawn >= _EVERY:
            self._draw(now)

    def done(self, remark: str = "") -> None:
        """End the stage; its line stays on the screen."""
        self._finish_stage(remark)

    def above(self, text: str) -> bool:
        """Write text above the moving bar; return False, with nothing written, if there is none."""
        if self._task is None:
            self.close()  # text then goes below the finished bars
        if self._bars is None or self._console is None:
            return False
        from rich.text import Text

        self._console.print(Text.from_ansi(text), soft_wrap=True)
        return True

    def close(self) -> None:
        """Stop drawing."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _open(self) -> Bars:
        if self._bars is None:
            from rich.console import Console
            from rich.progress import Progress, ProgressColumn

            class Stage(ProgressColumn):
                def render(self, task: Task) -> Text:
                    return _stage_line(task, console.width)

            console = self._console = Console(file=self._stream, force_terminal=True, highlight=False)
            self._bars = Progress(Stage(), console=console, auto_refresh=False, redirect_stdout=False)
            self._bars.start()
        return self._bars

    def _draw(self, now: float, remark: str = "") -> None:
        if self._bars is None or self._task is None:
            return
        seconds, self._drawn = now - self._started, now
        speed = f"{_short(self._count / seconds, self._unit)}/s" if self._count and seconds > 0 else ""
        if speed and self._total and self._count < self._total and seconds >= _QUICK:
            speed += f"  {_left(self._count, self._total, seconds)}"
        self._bars.update(
            self._task, completed=self._count, count=amount(self._count, self._unit), speed=remark or speed
        )
        self._bars.refresh()

    def _finish_stage(self, remark: str = "") -> None:
        if self._bars is None or self._task is None:
            return
        self._draw(time.monotonic(), clean(remark))
        if self._total is None:
            self._bars.update(self._task, total=1, completed=1)
            self._bars.refresh()
        self._task = None


def _stage_line(task: Task, width: int) -> Text:
    """Draw a stage in one line. On a narrow screen the bar is shortened, then the speed left out, never the count."""
    from rich.text import Text

    label, count = (14, 18) if width >= _WIDE else (10, 15)
    bar = min(20, max(8 if width >= _NARROW else 0, width - label - count - _SPEED_WIDTH - 12))
    total, done = task.total or 0, task.finished
    filled = bar * int(task.completed) // int(total) if total else 0
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"  {task.description:<{label}} ", "bold")
    line.append(f"{task.fields['count']:>{count}} ")
    line.append("━" * filled, "bar.finished" if done else "bar.complete")
    line.append("━" * (bar - filled) + " " * bool(bar), "bar.back")
    line.append(f"{task.percentage:>3.0f} %" if task.total is not None else "     ", "progress.percentage")
    room = width - line.cell_len - 1
    speed, _, left = task.fields["speed"].partition("  ")
    for text in (task.fields["speed"], left, speed):
        if text and len(text) <= room:
            return line.append(f" {text}", "dim")
    return line


def _left(count: int, total: int, seconds: float) -> str:
    """Return the estimated remaining time."""
    rest = round((total - count) * seconds / max(count, 1))
    hours, minutes = divmod(rest // 60, 60)
    return f"{hours}:{minutes:02}:{rest % 60:02} left" if hours else f"{minutes}:{rest % 60:02} left"


def _short(rate: float, unit: str) -> str:
    if unit == "bytes":
        return amount(rate, unit)
    for factor, letter in ((1e6, "M"), (1e3, "k")):
        if rate >= factor:
            return f"{rate / factor:.1f}{letter} {unit}"
    return f"{rate:.0f} {unit}"
