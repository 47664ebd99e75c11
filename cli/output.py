"""The result goes to stdout, everything else to stderr; only this module and the displays of progress write there."""

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from ..core.progress import Silent, clean
from .progress import LineProgress, NotesOnly, TerminalProgress
from .text import Cell, Line, Styled, clean_bytes, clean_json, clean_lines, folded

if TYPE_CHECKING:
    from ..core.progress import Progress


STDOUT = "standard output"
"""The name of stdout in errors, in place of a file name."""

_ANSI = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "33", "cyan": "36"}
_UPPER, _LOWER = 0b00011011, 0b11100100
"""The dots of a braille letter, as bits: of its upper half and of its lower half."""
_ASCII = str.maketrans(
    {"…": "...", "·": "|", "→": "->", "′": "'", "×": "x", "−": "-", "≥": ">=", "≤": "<="}
    | dict(zip("▁▂▃▄▅▆▇█", "_.:-=+*#", strict=True))
    | {"│": "|", "─": "-", "└": "+", "┤": "+"}
    | {chr(0x2800 + dots): " '.:"[bool(dots & _UPPER) + 2 * bool(dots & _LOWER)] for dots in range(256)}
)


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

    def show(self, result: Any, names: Iterable[str], lines: Callable[[int | None], Iterable[Line]]) -> None:
        """Write the result to stdout: its JSON document, `names` one per line, or `lines` for the screen width.

        The width is None if stdout is not a terminal: then lines are not wrapped.
        """
        self.end_progress()
        self.shown = True
        if self.as_json:
            from ..core.results import entries_of

            self.document(entries_of(result))
        elif self.quiet:
            self._write(sys.stdout, "".join(f"{clean(name)}\n" for name in names))
        else:
            width = shutil.get_terminal_size().columns if self._is_terminal(sys.stdout) else None
            text = (f"{self._paint(line, sys.stdout)}\n" for line in (*self._heading, *lines(width)))
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
        """Write to stderr, wrapped, what the JSON document contains as well; not with `--json`."""
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
    """Yield strict JSON; entries that write themselves, because they may be long, come piece by piece."""
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
    """Point a failed stream to the null device: otherwise the interpreter fails to flush it at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
