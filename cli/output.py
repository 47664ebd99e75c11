"""The only module that prints: the result goes to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from ..core.progress import clean
from ..core.progress import readable_size as size
from .text import Cell, Line, Styled, clean_bytes, clean_json, clean_lines, counted, folded

if TYPE_CHECKING:
    from pathlib import Path

    from ..core.progress import Progress
    from ..core.verbs.results import Published
    from .progress import TerminalProgress


STDOUT = "standard output"
"""The name of stdout in errors, in place of a file name."""

_ANSI = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "33", "cyan": "36"}
_ASCII = str.maketrans(
    {"…": "...", "·": "|", "→": "->", "′": "'", "×": "x", "−": "-", "≥": ">=", "≤": "<="}
    | dict(zip("▁▂▃▄▅▆▇█", "_.:-=+*#", strict=True))
)


class Output:
    """Writes results as JSON, as one path per line or for people, with or without colour; and messages to stderr.

    No method raises if the reader of a pipe has closed it: the command runs to its end, and its further output is
    dropped.
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
        """Read the settings from arguments that could not be parsed."""
        words = set(arguments)
        return cls(as_json="--json" in words, debug="--debug" in words, no_colour="--no-color" in words)

    # The result ------------------------------------------------------------------------------------

    def show(self, result: Any, names: Iterable[str], lines: Callable[[int | None], Iterable[Line]]) -> None:
        """Write the result to stdout: its JSON document, `names` one per line, or `lines` for the screen width.

        The width is None if stdout is not a terminal: then lines are not wrapped.
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
        """Print the command to run next, on a terminal."""
        if not self.as_json and self._is_terminal(sys.stderr):
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
            self._write(sys.stdout, self._json({"error": document}))
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
        if self._no_colour:
            return False
        forced = [os.environ.get(name) for name in ("FORCE_COLOR", "CLICOLOR_FORCE")]
        return any(value not in (None, "", "0") for value in forced) or self._is_terminal(stream)

    @staticmethod
    def _is_terminal(stream: TextIO) -> bool:
        return stream.isatty() and os.environ.get("TERM") != "dumb"

    @staticmethod
    def _json(document: dict[str, Any]) -> str:
        """Format strict JSON; characters that stdout cannot encode, and lone surrogates, are escaped."""
        from ..core.format.documents import plain

        strict = plain(document)
        text = json.dumps(strict, ensure_ascii=False, allow_nan=False, indent=1)
        try:
            text.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            text = json.dumps(strict, allow_nan=False, indent=1)
        return f"{clean_json(text)}\n"

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
            _detach(stream)
            if error.errno != errno.EPIPE and stream is sys.stdout:
                error.filename = STDOUT
                raise


def claim_streams() -> None:
    """Open the standard streams that the process was started without (`>&-`) as the null device.

    Otherwise the first opened files get their descriptors, and receive what other libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor: this one
            os.set_inheritable(number, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr within the context, also for C libraries and child processes."""
    import ctypes  # few verbs need it

    sys.stdout.flush()
    _saved_stdout.append(os.dup(1))
    try:
        os.dup2(2, 1)
        yield
    finally:
        try:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(_saved_stdout[-1], 1)
            os.close(_saved_stdout.pop())


_saved_stdout: list[int] = []


def _close_saved_stdout() -> None:
    """Close the saved stdout in a forked child: left open, it keeps the reader of a pipe waiting."""
    while _saved_stdout:
        os.close(_saved_stdout.pop())


os.register_at_fork(after_in_child=_close_saved_stdout)


def release_streams() -> OSError | None:
    """Flush both streams for the last time; return the error, unless the reader of a pipe has closed it."""
    failed = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            _detach(stream)
            error.filename = STDOUT
            failed = error if stream is sys.stdout and error.errno != errno.EPIPE else failed
    return failed


def _detach(stream: TextIO) -> None:
    """Point a failed stream to the null device: otherwise the interpreter fails to flush it at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


_EXPLICIT = "explicit_next"
_REPEATED, _DROPPED = "final_repeated", "final_dropped"
_OTHERS = frozenset({_EXPLICIT, _REPEATED, _DROPPED})


def show_published(out: Output, result: Published, named: str | None = None, next_command: str | None = None) -> None:
    """Print the path as the user `named` it; summarise contents, omissions and the next command on stderr."""
    for line in _summary(result):
        out.summary(*line)
    path = named or str(result.path)
    try:
        out.show(result, [path], lambda width: [[path]])
    except OSError:
        if not result.dry_run:
            out.warn(f"{path} is there and whole, but stdout could not take its name")
        raise
    if not result.dry_run:
        out.suggest(next_command or f"rbtool inspect {shlex.quote(named) if named else short_name(result.path)}")


def _summary(result: Published) -> list[Line]:
    state = "nothing was written; this would be " if result.dry_run else ""
    state = "already there: " if result.already_there else state
    facts = [f"{counted(result.steps, 'step')} in {counted(result.episodes, 'episode')}"]
    facts += [size(result.bytes)] if result.bytes else []
    facts += [f"ends: {ends(result.boundary)}"] if result.episodes and result.boundary else []
    lines: list[Line] = [[Styled(state, "yellow"), " · ".join(facts)]]
    if apart := not_following(result.boundary):
        lines.append([f"next: {apart}"])
    if apart := without_final(result.boundary):
        lines.append([f"final: {apart} (--final-step)"])
    lines += [[f"renamed: {before} → {after}"] for before, after in result.renamed_keys.items()]
    lines += [[Styled("left out: ", "yellow"), f"{key['key']} ({key['why']})"] for key in result.dropped_keys]
    lines += [[f"note: {note}"] for note in result.notes]
    return lines


def ends(boundary: Mapping[str, int]) -> str:
    """Format the counts of how episodes end, without zeros."""
    names = {"end_of_file": "end of file (made truncated)"}
    found = [f"{count:,} {names.get(key, key)}" for key, count in boundary.items() if count and key not in _OTHERS]
    return " · ".join(found) or "none"


def not_following(boundary: Mapping[str, int], *, n_step: bool = False) -> str:
    """Format the number of episodes whose `next` is not the row that follows; "" for none."""
    count = boundary.get(_EXPLICIT, 0)
    ahead = "n steps ahead (steps_to_next_obs), " if n_step else ""
    return f"{ahead}in {counted(count, 'episode')} not the row that follows" if count else ""


def without_final(boundary: Mapping[str, int]) -> str:
    """Format what was done with last steps without a next observation; "" if there are none."""
    repeated, dropped = boundary.get(_REPEATED, 0), boundary.get(_DROPPED, 0)
    kept = f"the last observation is repeated in {counted(repeated, 'episode')}" if repeated else ""
    left = f"the last step is left out of {counted(dropped, 'episode')}" if dropped else ""
    return " · ".join(filter(None, (kept, left)))


def short_name(path: Path) -> str:
    """Return the shortest name of a dataset, quoted for the shell: `source:id`, or a path."""
    from ..core.format.locate import known_root

    root, full = known_root(), os.path.abspath(path)
    if root and os.path.commonpath([root, full]) == str(root) and full.count(os.sep) > str(root).count(os.sep) + 1:
        source, _, name = os.path.relpath(full, root).partition(os.sep)
        return shlex.quote(f"{source}:{name}")
    near = os.path.relpath(full)
    return shlex.quote(full if near.startswith("..") else near)
