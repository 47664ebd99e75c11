"""Completion in bash, zsh and fish: the words that can follow those typed so far.

The completion scripts run `rbtool` with `_RBTOOL_COMPLETE` set to the shell and `_RBTOOL_LINE` to the text before the
cursor. Completion has to be fast: it uses no network, and imports a table of the verbs, at most the module of one verb,
and nothing that reads data.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from .words import GROUPS, SHORT_NAMES, VERBS, in_order

SHELL_VARIABLE, _LINE = "_RBTOOL_COMPLETE", "_RBTOOL_LINE"
_MANIFEST = (".rbtool", "manifest.json")
_SPECIAL = re.compile(r"[^\w@%+=:,./-]")
"""Characters that have a meaning in bash."""

_MOST = 500
"""The most stored datasets that are listed."""

_BASH = r"""
_rbtool() {
    local IFS=$'\n'
    COMPREPLY=( $(_RBTOOL_COMPLETE=bash _RBTOOL_LINE="${COMP_LINE:0:COMP_POINT}" _RBTOOL_BREAKS="$COMP_WORDBREAKS" \
        "$1" 2>/dev/null) )
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[/=:] ]]; then compopt -o nospace; fi
}
complete -o default -o nosort -F _rbtool rbtool
"""
_ZSH = r"""
#compdef rbtool
_rbtool() {
    local -a found open
    local one
    for one in "${(@f)$(_RBTOOL_COMPLETE=zsh _RBTOOL_LINE="${(j: :)words[1,CURRENT]}" "${words[1]}" 2>/dev/null)}"; do
        if [[ $one == *[/=:] ]]; then open+=("$one"); elif [[ -n $one ]]; then found+=("$one"); fi
    done
    if (( ${#found} + ${#open} )); then
        compadd -a found
        compadd -S '' -a open
    else
        _files
    fi
}
if [[ $funcstack[1] == _rbtool ]]; then _rbtool "$@"; else compdef _rbtool rbtool; fi
"""
_FISH = """
function __rbtool_complete
    set -g __rbtool_found (env _RBTOOL_COMPLETE=fish _RBTOOL_LINE=(commandline -cp | string collect) rbtool 2>/dev/null)
    test -n "$__rbtool_found"
end
complete -c rbtool -n __rbtool_complete -f -a '$__rbtool_found'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
"""The completion script of each shell."""


def complete(environment: Mapping[str, str]) -> str:
    """Return the words that can follow the line in `environment`, one per line; for "", the shell offers files."""
    line = environment.get(_LINE, "")
    words, current, quoted = _split(line)
    found = [one for one in candidates(words[1:], current) if one.startswith(current) and one.isprintable()]
    if environment[SHELL_VARIABLE] == "bash" and not quoted:  # bash replaces only the part after the last break
        breaks = [mark for mark in ":=" if mark in environment.get("_RBTOOL_BREAKS", "")]
        kept = 1 + max((current.rfind(mark) for mark in breaks), default=-1)
        found = [_SPECIAL.sub(r"\\\g<0>", one[kept:]) for one in found]
    return "\n".join(dict.fromkeys(found))


def _split(line: str) -> tuple[list[str], str, bool]:
    """Split a line into its complete words, the word under the cursor, and whether that has quotes or escapes."""
    for end in ("", '"', "'"):
        try:
            *words, current = shlex.split(f"{line}_{end}")
        except ValueError:
            continue
        current = current[:-1]
        return words, current, not f" {line}".endswith(f" {current}")
    return [], "", False


def candidates(words: Sequence[str], current: str) -> Iterable[str]:
    """Return the words that can replace `current` after `words`, which lack the name of the program."""
    if words[:1] == ["help"]:
        words = words[1:]
    path = in_order(words, GROUPS)
    if not path or path[0].startswith("-"):
        from .help import COMMON

        if words[-1:] == ["--color"]:
            return ["auto", "always", "never"]
        return [*COMMON.values(), "--help", "--version"] if current.startswith("-") else [*VERBS, *SHORT_NAMES, "help"]
    verb = VERBS.get(path[0])
    if verb is None:
        return ()
    import typer

    from .options import add_verb

    part = typer.Typer()
    add_verb(part, path[0])  # imports the module of this verb only
    command: Any = typer.main.get_group(part)
    command = command.commands[path[0]]
    if verb.group:
        if len(path) == 1:
            return ["--help"] if current.startswith("-") else list(command.commands)
        command = command.commands.get(path[1])
        if command is None:
            return ()
    return _Parsed.of(command.params, path[2 if verb.group else 1 :]).following(current)


class _Parsed(NamedTuple):
    """The words typed after a verb: its possible options and arguments, those given, and the option without a value.

    `options` are by flag; `values` are the given values by first flag; `open` is the option whose value comes next, or
    None.
    """

    options: dict[str, Any]
    arguments: list[Any]
    given: list[str]
    values: dict[str, str]
    open: Any

    @classmethod
    def of(cls, parameters: Iterable[Any], words: Iterable[str]) -> _Parsed:
        parameters = list(parameters)
        options = {
            name: one
            for one in parameters
            if one.param_type_name == "option"
            for name in (*one.opts, *one.secondary_opts)
        }
        arguments = [one for one in parameters if one.param_type_name == "argument"]
        given: list[str] = []
        values: dict[str, str] = {}
        waiting: Any = None
        for word in words:
            name, equals, value = word.partition("=")
            if waiting is not None:
                values[waiting.opts[0]], waiting = word, None
            elif name not in options:
                given.append(word)
            elif equals:
                values[options[name].opts[0]] = value
            elif not options[name].is_flag:
                waiting = options[name]
        return cls(options, arguments, given, values, waiting)

    def following(self, current: str) -> Iterable[str]:
        """Return the words that can replace `current`."""
        if self.open is not None:
            return self._values_of(self.open, current)
        name, equals, value = current.partition("=")
        if equals and name in self.options:
            return (f"{name}={one}" for one in self._values_of(self.options[name], value))
        if current.startswith("-"):
            return [*(name for name in self.options if name.startswith("--")), "--help"]
        position = len(self.given)
        if position >= len(self.arguments) and not (self.arguments and self.arguments[0].nargs == -1):
            return ()
        several = self.arguments[0].nargs == -1 or position >= len(self.arguments)
        return self._values_of(self.arguments[0 if several else position], current)

    def _values_of(self, parameter: Any, current: str) -> Iterable[str]:
        """Return possible values of an option or argument: its choices, or what its metavar (DATASET, …) stands for."""
        choices = parameter.type_descriptor.annotation
        for kind in (choices, *get_args(choices)):
            if isinstance(kind, type) and issubclass(kind, enum.Enum):
                return [str(one.value) for one in kind]
        name = str(parameter.metavar or "").strip("[]")
        before, comma, _ = current.rpartition(",")
        if name.startswith("DATASET") or name in _DATASETS:
            return [*_stored(self.root), *_nearby()]
        if name.startswith("FIELD") or name == "KEY":
            return (f"{before}{comma}{one}" for one in self._field_names())
        if "|" in name and "FILE" not in name:
            *words, last = name.split("|")
            return [*words, *(self._field_names() if last == "KEY" else [last])]
        if name == "SOURCE":
            return _sources(current, self.root)
        if name == "ID" and self.given:
            return _known_ids(self.given[0], self.root)
        return _formats() if name == "FORMAT" else ()

    @property
    def root(self) -> Path | None:
        """The storage root, None for a user without a home folder."""
        return _root(self.values.get("--root"))

    def _field_names(self) -> list[str]:
        """Return the names of the fields of the dataset that is named on the line."""
        for name in self.given[:1]:
            folder = Path(name).expanduser() if ":" not in name else None
            if folder is None and self.root is not None:
                folder = self.root.joinpath(*name.split(":", 1))
            document = _document(folder.joinpath(*_MANIFEST)) if folder else {}
            with contextlib.suppress(AttributeError, KeyError, TypeError):  # a damaged file
                return [".".join(field["key"]) for field in document.get("fields", ())]
        return []


_DATASETS = frozenset({"A", "B", "NAME...", "PATTERN"})
"""Metavars that stand for datasets, besides those that start with DATASET."""


def _root(given: str | None) -> Path | None:
    from platformdirs import user_cache_path

    try:
        named = given or os.environ.get("RBTOOL_HOME")
        return Path(named).expanduser() if named else user_cache_path("rbtool", appauthor=False)
    except RuntimeError:
        return None


def _stored(root: Path | None) -> Iterator[str]:
    """Yield the names of stored datasets, `source:id`."""
    left = _MOST
    for folder, names, _ in os.walk(root) if root is not None else ():
        names[:] = sorted(name for name in names if not name.startswith("."))
        if Path(folder, *_MANIFEST).is_file():
            names.clear()
            source, _, name = os.path.relpath(folder, root).partition(os.sep)
            if name:
                yield f"{source}:{name}"
                left -= 1
        if not left:
            return


def _nearby() -> list[str]:
    """Return the datasets in the current folder."""
    try:
        return sorted(one.name for one in os.scandir() if one.is_dir() and Path(one, *_MANIFEST).is_file())
    except OSError:
        return []


def _document(path: Path) -> dict[str, Any]:
    try:  # a plain read, for speed; `is_file` excludes a FIFO, which would block
        found = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _sources(current: str, root: Path | None) -> list[str]:
    """Return the names of sources; after a colon, the datasets that one is known to offer."""
    from ..core.declarations import declared

    source, colon, _ = current.partition(":")
    if colon:
        return [f"{source}:{name}" for name in _known_ids(source, root)]
    return [one.name for one in declared() if one.source is not None]


def _known_ids(source: str, root: Path | None) -> list[str]:
    """Return the ids of the datasets of a source, as they were last listed; without a listing, its example."""
    from ..core.declarations import declared

    listings = (root / source / ".catalogue").glob("*.json") if root is not None else ()
    found: set[str] = set()
    for path in listings:
        with contextlib.suppress(AttributeError, TypeError):  # a damaged file
            found |= {str(one["id"]) for one in _document(path).get("entries", ()) if "id" in one}
    return sorted(found) or [one.example[0] for one in declared() if one.name == source and one.example[0]]


def _formats() -> list[str]:
    from ..core.declarations import declared

    return [one.name for one in declared() if one.reader is not None]


# Installation ----------------------------------------------------------------------------------------

_PLACES = {
    "bash": (".bash_completions/rbtool.sh", ".bashrc", "source ~/.bash_completions/rbtool.sh"),
    "zsh": (".zfunc/_rbtool", ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit"),
    "fish": (".config/fish/completions/rbtool.fish", "", ""),
}
"""For each shell: the file of the script and the startup file, below the home folder, and the line that loads it."""


def install(shell: str) -> Path:
    """Write the completion script of a shell below the home folder, have new shells load it, and return its path."""
    from ..core.format import fs
    from ..core.format.files import read_regular

    script, profile, line = _PLACES[shell]
    home = fs.expanded("~")
    place = home / script
    fs.make_folder(place.parent)
    fs.replace_file(place, SCRIPTS[shell].lstrip().encode())
    if profile:
        loaded = (home / profile).resolve()  # often a symbolic link into a repository of dotfiles
        there = read_regular(loaded) if loaded.exists() else b""
        if line.encode() not in there:
            descriptor = fs.open_to_append(loaded)
            try:
                fs.write(descriptor, memoryview(b"\n" * (not there.endswith(b"\n")) + f"{line}\n".encode()), loaded)
            finally:
                os.close(descriptor)
    return place
