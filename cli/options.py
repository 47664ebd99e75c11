"""Code that the verbs share: common options, the `verb` decorator, the summary of a written dataset, and logging."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import logging
import os
import platform
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_type_hints

import typer
from typer.models import OptionInfo

from ..core import __version__
from ..core.errors import UsageError
from ..core.options import Option, RawOptions, VerbOptions
from ..core.progress import counted
from ..core.progress import readable_size as size
from ..core.verbs.options import ConvertOptions, FramesOptions
from .failures import Stopped, report
from .help import CONTEXT, EXAMPLE_SOURCE, SOURCE, Example, VerbCommand, VerbGroup, examples_text
from .output import Output
from .text import Line, Styled, clean_lines
from .words import VERBS

if TYPE_CHECKING:
    from pathlib import Path

    from ..core.results import Published

_Function: TypeAlias = Callable[..., int | None]


ColorName = enum.StrEnum("ColorName", {"AUTO": "auto", "ALWAYS": "always", "NEVER": "never"})


def _typed(name: str, about: Option) -> Any:
    """Return Typer's option for the field `name`."""
    flags = (about.flag or f"--{name.replace('_', '-')}").split()
    return typer.Option(*flags, metavar=about.metavar, help=about.help, rich_help_panel=about.panel)


_CONVERT, _FRAMES = ConvertOptions.described(), FramesOptions.described()

Dataset: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="DATASET", help=f"A path, or a stored dataset like {SOURCE}:{EXAMPLE_SOURCE.example[0]}."),
]
DryRun: TypeAlias = Annotated[bool, _typed("dry_run", _CONVERT["dry_run"])]
Episodes: TypeAlias = Annotated[str | None, _typed("episodes", _CONVERT["episodes"])]
Force: TypeAlias = Annotated[bool, _typed("force", _CONVERT["force"])]
ForceFile: TypeAlias = Annotated[bool, _typed("force", _FRAMES["force"])]
FromFormat: TypeAlias = Annotated[str | None, _typed("format", _CONVERT["format"])]
Root: TypeAlias = Annotated[str | None, _typed("root", _CONVERT["root"])]
Streaming: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--streaming",
        help="Fetch shards as they are needed: of hf://OWNER/NAME, s3:// or gs://BUCKET/FOLDER, a URL or SOURCE:ID.",
        rich_help_panel="Streams",
    ),
]
CacheSize: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--cache-size",
        metavar="SIZE",
        help="Disk space for cached shards, like 2GB. Default: $RBTOOL_CACHE_SIZE, else 8 GiB.",
        rich_help_panel="Streams",
    ),
]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before removing.")]


def _common(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only paths or ids, one a line.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print more, on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    log_file: Annotated[
        str | None, typer.Option("--log-file", metavar="FILE", help="Append all messages to a file.")
    ] = None,
    color: Annotated[
        ColorName, typer.Option("--color", help="When to use colours. Default: auto, in terminals.", show_default=False)
    ] = ColorName.AUTO,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours or moving bars, like $NO_COLOR.")] = False,
    no_progress: Annotated[
        bool, typer.Option("--no-progress", help="Show no progress, only notes and the result.")
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Make no network request, like $RBTOOL_OFFLINE=1.")
    ] = False,
) -> Output:
    """Make the output of a verb; the parameters are the options that every verb has."""
    if offline:
        os.environ["RBTOOL_OFFLINE"] = "1"  # worker processes inherit it
    colour = "never" if no_color else color.value
    out = Output(as_json=as_json, quiet=quiet, verbose=verbose, debug=debug, colour=colour, no_progress=no_progress)
    _start_logs(out, log_file)
    return out


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """The annotation of a parameter that receives several options as a dict, by the names of their `parameters`.

    `sets` maps a switch that does not set True to the value that it sets.
    """

    parameters: tuple[inspect.Parameter, ...]
    sets: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: type[VerbOptions], **after: Sequence[inspect.Parameter]) -> OptionGroup:
        """Return the options of a verb, as its class of arguments describes them.

        `after` maps a field to options that follow it on the help page and exist on the command line only.
        """
        types, known = get_type_hints(options), {one.name: one for one in dataclasses.fields(options)}
        described = options.described()
        made = {name: (_parameter(name, types[name], known[name].default, one),) for name, one in described.items()}
        return cls(
            tuple(one for name in made for one in (*made[name], *after.get(name, ()))),
            {name: one.sets for name, one in described.items() if one.sets is not None},
        )

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the given options as keyword arguments; options that are not given have the function's defaults."""
        found = {one.name: given[one.name] for one in self.parameters if given[one.name] is not None}
        found = {name: self.sets.get(name, value) for name, value in found.items() if name not in self.sets or value}
        return {name: value.value if isinstance(value, enum.Enum) else value for name, value in found.items()}


def _parameter(name: str, values: Any, default: Any, about: Option) -> inspect.Parameter:
    default = ... if default is dataclasses.MISSING else default
    if about.choices:
        names = enum.StrEnum(name.title(), {one.upper(): one for one in about.choices})  # type: ignore[misc]
        default = None if default is None or about.unset else default if default is ... else names(default)
        values = names if default is not None else names | None
    elif about.values is not None:
        values, default = about.values | None, default or None
    elif about.sets is not None:
        values, default = bool, False
    return optional(name, values, _typed(name, about), default)


def optional(name: str, values: Any, option: Any, default: Any = None) -> inspect.Parameter:
    """Return the parameter of an option; `values` is the type of its value, and `option` what typer returns."""
    return inspect.Parameter(
        name.replace("-", "_"), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[values, option]
    )


def switch_or_value(name: str, values: Any, option: Any) -> inspect.Parameter:
    """Return the parameter of a switch, False by default, or of an option with a value, None by default."""
    return optional(name, bool, option, False) if values is bool else optional(name, values | None, option)


ReaderOptions: TypeAlias = Annotated[dict[str, Any], OptionGroup.of(RawOptions)]


def _group_of(parameter: inspect.Parameter) -> OptionGroup | None:
    metadata = getattr(parameter.annotation, "__metadata__", ())
    return next((part for part in metadata if isinstance(part, OptionGroup)), None)


_FUNCTIONS: dict[str, tuple[_Function, Sequence[Example]]] = {}
"""The functions of the imported verbs, with their examples, by `VERB` or `GROUP VERB`."""


def verb(name: str, examples: Sequence[Example]) -> Callable[[_Function], _Function]:
    """Make a function the verb `name`, which also has the common options.

    The function is called with its own parameters and `out`, and returns the exit code, None for 0. An exception is
    reported as one sentence. The name of a verb in a group starts with the name of the group: `cache ls`.
    """

    def register(function: _Function) -> _Function:
        _FUNCTIONS[name] = function, examples
        return function

    return register


def add_verb(app: typer.Typer, name: str) -> None:
    """Add a verb to the command line, or a group of verbs, which shows its help page if none of them is given."""
    importlib.import_module(f".{name}", __package__)
    about = VERBS[name].group
    if not about:
        _add(app, name, name)
        return
    names = [one for one in _FUNCTIONS if one.startswith(f"{name} ")]
    examples = examples_text(_FUNCTIONS[names[0]][1])
    group = typer.Typer(cls=VerbGroup, context_settings=CONTEXT, rich_markup_mode=None, epilog=examples)

    def without_verb(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            Output().text(context.get_help())

    group.callback(invoke_without_command=True, help=about)(without_verb)
    for one in names:
        _add(group, one, one.removeprefix(f"{name} "))
    app.add_typer(group, name=name)


def _add(app: typer.Typer, name: str, short: str) -> None:
    """Add the function of a verb as the command `short`."""
    function, examples = _FUNCTIONS[name]
    own = inspect.signature(function, eval_str=True)
    common = inspect.signature(_common, eval_str=True).parameters
    groups = {name: group for name, parameter in own.parameters.items() if (group := _group_of(parameter))}

    def run(**given: Any) -> int:
        colour = "never" if given["no_color"] else given["color"].value
        out = Output(as_json=given["as_json"], debug=given["debug"], colour=colour)
        try:
            _refuse_empty(given, parameters)
            out = _common(**{option: given.pop(option) for option in common})
            grouped = {name: group.values(given) for name, group in groups.items()}
            options = {option.name for group in groups.values() for option in group.parameters}
            single = {option: value for option, value in given.items() if option not in options}
            return _logged(name, lambda: function(**single, **grouped, out=out), given)
        except (Exception, KeyboardInterrupt, Stopped) as error:
            return report(error, out)

    parameters = [
        option
        for parameter in own.parameters.values()
        if parameter.name != "out"
        for option in (groups[parameter.name].parameters if parameter.name in groups else (parameter,))
    ]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*parameters, *common.values())]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = function.__doc__
    app.command(short, cls=VerbCommand, epilog=examples_text(examples), context_settings=CONTEXT)(run)


def _logged(name: str, run: Callable[[], int | None], given: Mapping[str, Any]) -> int:
    """Call a function; log its options before and its exit code after."""
    logger, started = logging.getLogger("rbtool"), time.perf_counter()
    options = {option: value for option, value in given.items() if value not in (None, False)}
    logger.info("rbtool %s %s %s, Python %s on %s", __version__, name, options, platform.python_version(), sys.platform)
    code = run() or 0
    logger.info("exit code %d after %.2f s", code, time.perf_counter() - started)
    return code


def _refuse_empty(given: Mapping[str, Any], parameters: Sequence[inspect.Parameter]) -> None:
    """Raise UsageError for an empty value: it is usually a variable that is not set, or a failed $(...)."""
    for parameter in parameters:
        value = given[parameter.name]
        if value == "" or (isinstance(value, list) and "" in value):
            text, flag = parameter.name.replace("_", " "), _flag_of(parameter)
            subject = (flag or text) if value == "" else f"a value of {flag}" if flag else f"one of the {text}"
            raise UsageError(f"{subject} is empty", hint="is a variable not set?")


def _flag_of(parameter: inspect.Parameter) -> str | None:
    """Return an option as users type it, None for an argument."""
    parts = getattr(parameter.annotation, "__metadata__", ())
    # Until it builds the command, Typer keeps the first flag of an option as its `default`.
    found = [part for part in parts if isinstance(part, OptionInfo)]
    names = [str(name) for option in found for name in (option.default, *(option.param_decls or ()))]
    return next((name.partition("/")[0] for name in names if name.startswith("--")), None)


def _start_logs(out: Output, file: str | None) -> None:
    """Send log records, and the warnings of other libraries, to the log file and, with `-v`, to stderr.

    Records of level WARNING, for example about a server that does not answer, are shown without `-v`, but not with
    `-q`.
    """
    logger = logging.getLogger("rbtool")
    handlers: list[logging.Handler] = []
    if out.verbose:
        handlers.append(_StderrHandler(out))
        handlers[0].setFormatter(_Redacting())
        handlers[0].setLevel(logging.DEBUG if out.debug else logging.INFO)
    if file is not None:
        try:
            handlers.append(logging.FileHandler(file, encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"the log file {file} cannot be written: {error.strerror}") from error
        handlers[-1].setFormatter(_Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    notes = [] if out.verbose or out.quiet else [_StderrHandler(out)]
    for handler in notes:
        handler.setFormatter(_Redacting())
        handler.setLevel(logging.WARNING)
    logging.raiseExceptions = False
    logging.captureWarnings(True)
    warnings.simplefilter("default" if handlers else "ignore")
    for log, own in ((logger, [*handlers, *notes]), (logging.getLogger("py.warnings"), handlers)):
        log.propagate = False
        log.handlers = own or [logging.NullHandler()]
        log.setLevel(logging.DEBUG if handlers else logging.WARNING if own else logging.CRITICAL)


class _Redacting(logging.Formatter):
    """Formats records without secrets, such as tokens and the passwords of proxies, and without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        from ..core.progress import redact

        return clean_lines(redact(super().format(record)))


class _StderrHandler(logging.Handler):
    """Writes log records to stderr through `Output`."""

    def __init__(self, out: Output) -> None:
        super().__init__()
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "shown", False):  # `Output` has printed it
            self._out.log(self.format(record))


# Published datasets ----------------------------------------------------------------------------------

_EXPLICIT = "explicit_next"
_REPEATED, _DROPPED = "final_repeated", "final_dropped"
_OTHERS = frozenset({_EXPLICIT, _REPEATED, _DROPPED})


def show_published(out: Output, result: Published, named: str | None = None, next_command: str | None = None) -> None:
    """Print the path as the user `named` it on stdout, and a summary and the next command on stderr."""
    for line in _summary(result):
        out.summary(*line)
    path = named or str(result.path)
    try:
        out.show(result, [path])
    except OSError:
        if not result.dry_run:
            out.warn(f"{path} is complete, but its name could not be written to stdout")
        raise
    if not result.dry_run:
        out.suggest(next_command or f"rbtool inspect {shlex.quote(named) if named else short_name(result.path)}")


def _summary(result: Published) -> list[Line]:
    state = "nothing was written; this would be " if result.dry_run else ""
    state = "already there: " if result.already_there else state
    facts = [f"{counted(result.steps, 'step')} in {counted(result.episodes, 'episode')}"]
    facts += [size(result.bytes)] if result.bytes else []
    facts += [f"{size(result.shared_bytes)} shared"] if result.shared_bytes else []
    facts += [f"ends: {ends(result.boundary)}"] if result.episodes and result.boundary else []
    lines: list[Line] = [[Styled(state, "yellow"), " · ".join(facts)]]
    if apart := not_following(result.boundary):
        lines.append([f"next: {apart}"])
    if apart := without_final(result.boundary):
        chosen = " (--final-step)" if result.kind in ("convert", "download") else ""  # other verbs lack the option
        lines.append([f"final: {apart}{chosen}"])
    lines += [[f"renamed: {before} → {after}"] for before, after in result.renamed_keys.items()]
    lines += [[Styled("left out: ", "yellow"), f"{key['key']} ({key['why']})"] for key in result.dropped_keys]
    lines += [[f"note: {note}"] for note in result.notes]
    return lines


def ends(boundary: Mapping[str, int]) -> str:
    """Format the counts of how episodes end, without zeros."""
    names = {"end_of_file": "end of file (made truncated)"}
    found = [f"{count:,} {names.get(key, key)}" for key, count in boundary.items() if count and key not in _OTHERS]
    return " · ".join(found) or "none"


def not_following(boundary: Mapping[str, int]) -> str:
    """Format the number of episodes whose `next` is not the row that follows; "" for none."""
    count = boundary.get(_EXPLICIT, 0)
    return f"differs from the following row in {counted(count, 'episode')}" if count else ""


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


def refuse_stream_options(cache_size: str | None, options: Mapping[str, Any]) -> None:
    """Raise UsageError for options that only streams have, given without `--streaming`."""
    given = [name for name, value in {"cache_size": cache_size, **options}.items() if value not in (None, False)]
    if given:
        option = given[0].replace("_", "-")
        raise UsageError(f"--{option} needs --streaming", hint="add --streaming, or leave it out")
