"""The one place that prints. stdout carries the result and nothing else; all that is said beside it goes to stderr."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from .text import Cell, Line, Styled, clean, clean_bytes, clean_json, clean_lines, folded

if TYPE_CHECKING:
    from ..core.progress import Progress
    from .progress import TerminalProgress

__all__ = ["STDOUT", "Output", "claim_streams", "release_streams", "stdout_aside"]

STDOUT = "standard output"
"""How errors name it, in the place of a file."""

_ANSI = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "33", "cyan": "36"}
_ASCII = str.maketrans(
    {"…": "...", "·": "|", "→": "->", "′": "'", "×": "x", "−": "-", "≥": ">=", "≤": "<="}
    | dict(zip("▁▂▃▄▅▆▇█", "_.:-=+*#", strict=True))
)


class Output:
    """What a command says, and how: as JSON, one path a line, or for people; in colour or not.

    Nothing here raises when the reader of a pipe has gone away: the command goes on to its end, and what it would
    still have said is dropped.
    """

    def __init__(
        self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False, debug: bool = False,
        no_colour: bool = False,
    ) -> None:  # fmt: skip
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose or debug
        self.debug = debug
        self._no_colour = no_colour or bool(os.environ.get("NO_COLOR"))
        self._live: TerminalProgress | None = None

    @classmethod
    def from_arguments(cls, arguments: Iterable[str]) -> Output:
        """Guess the settings from words that could not be parsed."""
        words = set(arguments)
        return cls(as_json="--json" in words, debug="--debug" in words, no_colour="--no-color" in words)

    # The result ------------------------------------------------------------------------------------

    def show(self, result: Any, names: Iterable[str], lines: Callable[[int | None], Iterable[Line]]) -> None:
        """Put the result on stdout: its document, or `names` one a line, or `lines` set for a screen width.

        The width is None where stdout is no terminal: nothing is cut there.
        """
        self.end_progress()
        if self.as_json:
            from ..core.verbs.results import to_document

            self._write(sys.stdout, self._json(to_document(result)))
        elif self.quiet:
            self._write(sys.stdout, "".join(f"{clean(name)}\n" for name in names))
        else:
            width = shutil.get_terminal_size().columns if self._is_terminal(sys.stdout) else None
            self._write(sys.stdout, "".join(f"{self._paint(line, sys.stdout)}\n" for line in lines(width)))

    def text(self, text: str) -> None:
        """Put ready text, such as a help page, on stdout."""
        self._write(sys.stdout, f"{text}\n")

    # Beside the result -----------------------------------------------------------------------------

    def say(self, *line: Cell) -> None:
        """Tell people something on stderr; not with `-q`."""
        if not self.quiet:
            self._beside(line)

    def summary(self, *line: Cell) -> None:
        """Tell people on stderr what the JSON document holds anyway, in lines that the terminal has room for."""
        if not self.as_json:
            for part in folded(line, self.width_beside, 2):
                self.say(*part)

    @property
    def width_beside(self) -> int | None:
        """Columns of the terminal that stderr is, None if it is none."""
        return shutil.get_terminal_size().columns if self._is_terminal(sys.stderr) else None

    def warn(self, text: str) -> None:
        """Warn on stderr, also with `-q`."""
        self._beside([Styled("warning: ", "yellow"), text])

    def suggest(self, command: str) -> None:
        """Print the command to run next, on a terminal."""
        if not self.as_json and self._is_terminal(sys.stderr):
            self.say(Styled(f"try: {command}", "dim"))

    @property
    def can_ask(self) -> bool:
        """Whether somebody sits at a terminal who can read a question and type the answer."""
        return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()

    def ask(self, question: str) -> bool:
        """Ask on stderr, also with `-q`, and wait; whatever is not a yes is a no."""
        self.end_progress()
        self._write(sys.stderr, self._paint([Styled(question, "bold"), " [y/N] "], sys.stderr))
        answer = sys.stdin.readline()
        if not answer.endswith("\n"):  # the end of input, which leaves the cursor behind the question
            self._write(sys.stderr, "\n")
        return answer.strip().lower() in {"y", "yes"}

    def fail(self, document: dict[str, Any], trace: str = "") -> None:
        """Say why it failed: a sentence and a hint on stderr, and with `--json` the document on stdout."""
        self.end_progress()
        if self.as_json:
            self._write(sys.stdout, self._json({"error": document}))
        self._beside([Styled("error: ", "red"), document["message"]])
        if document["hint"]:
            self._beside([Styled("hint: ", "cyan"), document["hint"]])
        if trace:
            self._write(sys.stderr, clean_lines(trace))

    def log(self, text: str) -> None:
        """Show a log record on stderr, for `-v`."""
        for line in text.split("\n"):
            self._beside([Styled(line, "dim")])

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress]:
        """Give what shows how far the work is: a bar in a terminal, a line every tenth elsewhere, nothing with `-q`."""
        from .progress import LineProgress, TerminalProgress

        if self.quiet:
            from ..core.progress import Silent

            yield Silent()
        elif self._is_terminal(sys.stderr) and not self._no_colour:
            self._live = TerminalProgress(sys.stderr, self._note)
            try:
                yield self._live
            finally:
                self.end_progress()
        else:
            yield LineProgress(self.say, self._note)

    def _note(self, text: str) -> None:
        """Pass on what the work tells, to the log file as well; a command that it tells stands out."""
        logging.getLogger("rbtool").info(text, extra={"told": True})
        if text.startswith("$ "):
            self.say()
        self.say(Styled(text, "bold" if text.startswith("$ ") else ""))

    def end_progress(self) -> None:
        """Leave the bar as it is and stop drawing."""
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError):
                live.close()

    # How -------------------------------------------------------------------------------------------

    def _beside(self, line: Line) -> None:
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
        if self._no_colour:
            return False
        forced = [os.environ.get(name) for name in ("FORCE_COLOR", "CLICOLOR_FORCE")]
        return any(value not in (None, "", "0") for value in forced) or self._is_terminal(stream)

    @staticmethod
    def _is_terminal(stream: TextIO) -> bool:
        return stream.isatty() and os.environ.get("TERM") != "dumb"

    @staticmethod
    def _json(document: dict[str, Any]) -> str:
        """One strict document; characters that stdout cannot write, and halves of a pair, are escaped."""
        from ..core.format import plain

        strict = plain(document)
        text = json.dumps(strict, ensure_ascii=False, allow_nan=False, indent=1)
        try:
            text.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            text = json.dumps(strict, allow_nan=False, indent=1)
        return f"{clean_json(text)}\n"

    @staticmethod
    def _write(stream: TextIO, text: str) -> None:
        encoding = stream.encoding or "utf-8"  # an io.StringIO in the place of a stream has none
        try:
            text.encode(encoding, "surrogateescape")
        except UnicodeEncodeError:
            text = text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
        if stream.isatty():
            text = clean_bytes(text)
        try:
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="surrogateescape")  # file names come out as the bytes they are
            stream.write(text)
            stream.flush()
        except OSError as error:
            _let_go(stream)
            if error.errno != errno.EPIPE and stream is sys.stdout:
                error.filename = STDOUT
                raise


def claim_streams() -> None:
    """Give the process the streams that it was started without (`>&-`): what is said there goes nowhere.

    Left closed, the numbers of the streams would go to the first files opened, and what other libraries print into
    those.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            os.set_inheritable(number, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


@contextlib.contextmanager
def stdout_aside() -> Iterator[None]:
    """Let all that is printed meanwhile go to stderr, also by C libraries and by programs that a function starts."""
    import ctypes  # few verbs need it

    sys.stdout.flush()
    _aside.append(os.dup(1))
    try:
        os.dup2(2, 1)
        yield
    finally:
        try:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(_aside[-1], 1)
            os.close(_aside.pop())


_aside: list[int] = []


def _forget_aside() -> None:
    """Close what this process inherited by fork: held open, it would keep the reader of a pipe waiting."""
    while _aside:
        os.close(_aside.pop())


os.register_at_fork(after_in_child=_forget_aside)


def release_streams() -> OSError | None:
    """Flush both streams for the last time; return what went wrong, unless the reader of a pipe has gone away."""
    failed = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            _let_go(stream)
            error.filename = STDOUT
            failed = error if stream is sys.stdout and error.errno != errno.EPIPE else failed
    return failed


def _let_go(stream: TextIO) -> None:
    """Point a stream that takes no more to nowhere, or the interpreter would fail on it when it shuts down."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
