"""Help pages: arguments, the options of the verb, the common options, and examples; and suggestions for typos."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum
from typing import Any, ClassVar, NamedTuple, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from ..core.declarations import example_source
from ..core.errors import did_you_mean

EXAMPLE_SOURCE = example_source()
SOURCE = EXAMPLE_SOURCE.name
STORED = f"{SOURCE}:cartpole/scripted-v0"
"""The stored dataset that examples use."""

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
COMMON = {
    "as_json": "--json",
    "quiet": "--quiet",
    "verbose": "--verbose",
    "debug": "--debug",
    "log_file": "--log-file",
    "color": "--color",
    "no_color": "--no-color",
    "no_progress": "--no-progress",
    "offline": "--offline",
}
"""Options that all verbs have, by the name of their parameter."""


class Example(NamedTuple):
    """A command line, which the tests run, and its purpose."""

    command: str
    what: str


def examples_text(examples: Sequence[Example]) -> str:
    """Format examples for the end of a help page."""
    lines = [f"  # {example.what}\n  {example.command}" for example in examples]
    return "\n".join(["Examples:", *lines]) if lines else ""


_OF_EVERY_VERB = "Options of every verb"
_NEAR = 0.7
"""Least similarity to a mistyped word, from 0 to 1, for a suggestion."""


class VerbCommand(TyperCommand):
    """A verb, whose help lists the common options in a group of their own."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Name the arguments as the help does."""
        return ["[OPTIONS]", *(_name(parameter) for parameter in self.params if _is_argument(parameter))]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the verb."""
        _convert_lightly(self.get_params(ctx))
        try:
            return super().parse_args(ctx, _with_map_spread(args) if _has_map(self.get_params(ctx)) else args)
        except Exception as error:
            _offer_near(error)
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], _OF_EVERY_VERB: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if _is_argument(parameter):
                groups["Arguments"].append((_name(parameter).strip("[]"), getattr(parameter, "help", "") or ""))
            else:
                common = parameter.name in COMMON or parameter.name == "help"
                panel = getattr(parameter, "rich_help_panel", None) or "Options"
                groups.setdefault(_OF_EVERY_VERB if common else panel, []).append(record)
        groups[_OF_EVERY_VERB] = groups.pop(_OF_EVERY_VERB)  # last
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples as they are."""
        formatter.write(f"\n{self.epilog}\n" if self.epilog else "")


_PAIR = re.compile(r"[A-Za-z_][\w.]*=\S")


def _has_map(parameters: Sequence[Any]) -> bool:
    return any("--map" in parameter.opts for parameter in parameters)


def _with_map_spread(args: Sequence[str]) -> list[str]:
    """Give every pair of `--map KEY=COLUMN KEY=COLUMN …` an option of its own."""
    spread: list[str] = []
    follows = False  # whether the word before is a pair of --map
    for number, word in enumerate(args):
        if word == "--":
            return [*spread, *args[number:]]
        value = number > 0 and args[number - 1] == "--map"
        if follows and not value and _PAIR.match(word):
            spread.append("--map")
        else:
            follows = value and _PAIR.match(word) is not None
        spread.append(word)
    return spread


class VerbGroup(TyperGroup):
    """Verbs in the order in which they are added, with a hint if options are given before the verb."""

    sections: ClassVar[Mapping[str, Iterable[str]]] = {}
    """The verbs of each section of the help page; without any, there is one section."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the verb; for an unknown name add similar ones to the error."""
        self.suggest_commands = False  # the cutoff of Typer is too low
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if near := get_close_matches(args[0], self.commands, cutoff=_NEAR):
                names = " or ".join(map(repr, near[:2]))
                error.message = f"{error.message.rstrip('.')}. Did you mean {names}?"  # type: ignore[attr-defined]
            raise

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, and explain options that are given before the verb."""
        _convert_lightly(self.get_params(ctx))
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            option = getattr(error, "option_name", None)
            if option in {*COMMON.values(), "--root", "-q", "-v"}:
                error.message = f"{option} comes after the verb"  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
            _offer_near(error)
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs with their whole first sentences, where Click would cut them to one line."""
        verbs = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        shown = {name: verb.get_short_help_str(sys.maxsize) for name, verb in verbs.items() if verb and not verb.hidden}
        widest = max(map(len, shown), default=0)  # so that descriptions line up across sections
        for title, names in (self.sections or {"Commands": shown}).items():
            if records := [(name.ljust(widest), shown[name]) for name in names if name in shown]:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write exit codes and examples as they are."""
        formatter.write(f"\n{self.epilog}\n" if self.epilog else "")


def _offer_near(error: Any) -> None:
    """Reduce the suggested options to those that are similar to the given one."""
    if possible := getattr(error, "possibilities", None):
        names = {name.lstrip("-"): name for name in possible}
        typed = str(error.option_name).lstrip("-")
        near = [names[name] for name in get_close_matches(typed, names, cutoff=_NEAR)]
        error.possibilities = None
        if near:
            error.message = f"{error.message.rstrip('.')}. Did you mean {' or '.join(near[:2])}?"


def _convert_lightly(parameters: Iterable[Any]) -> None:
    """Give parameters a conversion that needs no pydantic, which takes 0.1 s to import."""
    for parameter in parameters:
        if getattr(parameter, "_runtime_param", parameter) is None:
            parameter._runtime_param = _Conversion()


class _Conversion:
    """Converts text to numbers and choices."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value if it has the wanted type, else convert it; other types are left to Typer."""
        wanted = param.type_descriptor.annotation
        if get_args(wanted) == (str,) and isinstance(value, list | tuple):
            return list(value)
        if value is None or isinstance(value, wanted):
            return value
        if isinstance(value, str) and isinstance(wanted, type) and issubclass(wanted, int | float | Enum):
            return _converted(value, wanted, param, ctx)
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _converted(value: str, wanted: type[Any], param: Any, ctx: Any) -> Any:
    """Convert text to a number or a choice; raise BadParameter, with what is expected, for anything else."""
    try:
        return wanted(value)
    except ValueError:
        words = ", ".join(str(choice.value) for choice in wanted) if issubclass(wanted, Enum) else ""
        expected = f"one of {words}" if words else "a number" if wanted is float else "a whole number"
        near = did_you_mean(value, words.split(", ")) if words else ""
        raise typer.BadParameter(f"{value!r} is not {expected}{near}", ctx=ctx, param=param) from None


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _name(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name)
