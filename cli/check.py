"""`rbtool check`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import UsageError
from ..core.progress import clean, counted
from .help import Example
from .options import FromFormat, ReaderOptions, Root, ends, verb
from .output import Output
from .several import SomeDatasets, of_each, require_datasets
from .text import Cell, Line, Style, Styled, Table, first_of, folded

if TYPE_CHECKING:
    from ..core.ted.rules import Finding
    from ..core.verbs.check import CheckResult, RulesResult

EXAMPLES = (
    Example("rbtool check ./cartpole", "exit code 3 if there are errors"),
    Example("rbtool check ./cartpole.h5 --fail-on error --json", "a checkpoint, as JSON"),
    Example("rbtool check ./cartpole ./cartpole.h5", "several, one after the other"),
    Example("rbtool check ./cartpole --profile form", "only the form, without rules about behaviour"),
    Example("rbtool check ./cartpole --no-data", "only metadata and file sizes; takes a moment"),
    Example("rbtool check ./cartpole --format sarif", "for a CI server; also junit and github"),
    Example("rbtool check --rules", "what is checked"),
)
_INDENT = 4
_COLOURS: Mapping[str, Style] = {"error": "red", "warning": "yellow"}


class FailOn(StrEnum):
    """The least severity that makes the check fail."""

    ERROR = "error"
    WARN = "warn"


class Profile(StrEnum):
    """Which rules run."""

    FORM = "form"
    DATA = "data"
    ROBOT = "robot"
    ALL = "all"


class Format(StrEnum):
    """How findings are written."""

    TEXT = "text"
    JSON = "json"
    JUNIT = "junit"
    SARIF = "sarif"
    GITHUB = "github"
    MARKDOWN = "markdown"


@verb("check", EXAMPLES)
def check(
    datasets: SomeDatasets = None,
    *,
    out: Output,
    fail_on: Annotated[
        FailOn, typer.Option("--fail-on", help="The least severity that makes the check fail, with exit code 3.")
    ] = FailOn.ERROR,
    rules: Annotated[bool, typer.Option("--rules", help="List the rules, and check nothing.")] = False,
    profile: Annotated[
        Profile | None,
        typer.Option(
            "--profile",
            help="Rules to run. form: only those about the form; data: also about episodes, rewards and metadata; "
            "robot: also about motion, time and images; all. Default: data, and robot if there are cameras or a rate.",
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Decode all frames of kept videos, not a sample.")] = False,
    no_data: Annotated[
        bool,
        typer.Option("--no-data", help="Read only metadata and file sizes, no rows and no images."),
    ] = False,
    thresholds: Annotated[
        str | None,
        typer.Option("--thresholds", metavar="FILE", help="A TOML file with thresholds of the rules about behaviour."),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="FILE", help="Accept the findings that an earlier --json wrote to FILE."),
    ] = None,
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="How to write findings: text; json, like --json; junit or sarif, for CI servers; github, as "
            "annotations of a workflow; markdown, as a table.",
        ),
    ] = Format.TEXT,
    root: Root = None,
    source_format: FromFormat = None,
    raw: ReaderOptions,
) -> int:
    """Check a dataset or a checkpoint against every rule of TED, or a raw dataset before it is converted.

    Reads everything: files against their digests, rows against the rules. Data that has the right form but spoils
    training, such as stuck joints, frozen cameras or copies of episodes, gives warnings, with the command that mends
    it. Problems are listed on stdout, one per line. With several datasets, -q prints those that fail, and the exit code
    is the highest.
    """
    if rules:
        _show_rules(datasets, out)
        return 0
    from ..core.verbs.check import check as run

    if form in _WRITERS and out.as_json:
        raise UsageError(f"--format {form.value} and --json are two forms", hint="leave one of them out")
    out.as_json = out.as_json or form is Format.JSON
    results: dict[str, CheckResult | Exception] = {}
    chosen: dict[str, Any] = {
        "profile": profile and profile.value, "full": full, "data": not no_data, "thresholds": thresholds,
        "baseline": baseline, "root": root,
    }  # fmt: skip

    def check_one(dataset: str, out: Output) -> int:
        result = out.run(run, dataset, format=source_format, **chosen, **raw)
        failed = result.failed("warn" if fail_on is FailOn.WARN else "error")
        if form in _WRITERS:
            results[dataset] = result
            return 3 if failed else 0
        names = [dataset] * failed if out.is_part else dict.fromkeys(finding.rule for finding in result.findings)
        out.show(result, names, lines)
        return 3 if failed else 0

    def written() -> None:
        if form in _WRITERS and results:
            out.end_progress()
            out.text(_WRITERS[form](results, fail_on is FailOn.WARN))

    try:
        code = of_each("check", require_datasets(datasets), root, out, check_one, failed=results.__setitem__)
    except Exception:  # the document says why nothing was checked
        written()
        raise
    written()
    return code


def _show_rules(datasets: list[str] | None, out: Output) -> None:
    from ..core.verbs.check import RulesResult

    if datasets:
        raise UsageError("--rules lists the rules and checks nothing", hint="leave the dataset or --rules out")
    result = RulesResult()
    out.show(result, [entry.rule for entry in result.rules], rule_lines)


def rule_lines(result: RulesResult, width: int | None) -> list[list[Cell]]:
    """Return a row for each rule: id, severities, name, what it checks, and the names that other tools have for it."""
    rows: list[Line] = []
    for entry in result.rules:
        worst = Styled(" or ".join(entry.severities), _COLOURS[entry.severities[0]])
        also = f" ({', '.join(entry.also)})" if entry.also else ""
        rows.append([Styled(entry.rule, "bold"), worst, entry.name, f"{entry.checks}{also}"])
    return Table(rows).lines(width)


def lines(result: CheckResult, width: int | None = None) -> list[list[Cell]]:
    """Return the findings and a line with totals, wrapped at `width` columns."""
    rows = [row for _, same in groupby(result.findings, key=_kind) for row in _finding_rows(list(same))]
    facts = [
        f"{counted(result.steps, 'step')} in {counted(result.episodes, 'episode')}",
        *([f"{result.unfinished:,} of them unfinished"] if result.unfinished else []),
        *([f"ends: {ends(result.boundary)}"] if result.episodes and result.boundary else []),
        counted(result.errors, "error"),
        counted(result.warnings, "warning"),
        counted(result.rules, "rule"),
        f"{result.seconds:.1f} s",
    ]
    skipped: list[list[Cell]] = []
    if result.skipped:
        skipped = [[Styled("not tried, because the files are damaged: ", "yellow"), ", ".join(result.skipped)]]
    notes: list[list[Cell]] = [[Styled("note: ", "yellow"), note] for note in result.notes]
    lines: list[Line] = [*notes, *skipped, [" · ".join(facts)]]
    return [*Table(rows).lines(width), *(part for line in lines for part in folded(line, width, _INDENT))]


def _kind(finding: Finding) -> tuple[str, ...]:
    return finding.severity, finding.rule, finding.name


def _finding_rows(same: Sequence[Finding]) -> Iterator[Line]:
    """Yield a row for each of the first findings of a rule, one that counts the rest, and one with their reason."""
    severity, rule, name = _kind(same[0])
    one_way = len({finding.mend for finding in same}) == 1
    for text in first_of([one.message if one_way else _joined(one.message, one.mend) for one in same]):
        yield [Styled(severity, _COLOURS[severity]), Styled(rule, "bold"), name, text]
    if why := _joined(same[0].why, same[0].mend if one_way else ""):
        yield ["", "", "", why]


def _joined(text: str, mend: str) -> str:
    return "; ".join(filter(None, (text, mend and _advice(mend))))


def _advice(mend: str) -> str:
    return mend if mend.startswith("look at") else f"to mend it: {mend}"


# Forms for machines -----------------------------------------------------------------------------------


def _sentence(one: Finding) -> str:
    return clean(_joined("; ".join(filter(None, (one.message, one.why))), one.mend))


def _failure(error: Exception) -> str:
    return clean("; ".join(filter(None, (str(error), getattr(error, "hint", "")))))


def _junit(results: Mapping[str, CheckResult | Exception], warnings_fail: bool) -> str:
    """Write JUnit XML: a suite per dataset, a case per rule with findings. Warnings that do not fail are its output."""
    from xml.etree.ElementTree import Element, SubElement, indent, tostring

    suites = Element("testsuites", name="rbtool check")
    for dataset, result in results.items():
        if isinstance(result, Exception):
            suite = SubElement(suites, "testsuite", name=dataset, tests="1", failures="0", errors="1")
            case = SubElement(suite, "testcase", classname="rbtool", name="check")
            SubElement(case, "error", type=type(result).__name__, message=_failure(result))
            continue
        suite = SubElement(suites, "testsuite", name=dataset, time=str(result.seconds))
        for (severity, rule, title), same in groupby(result.findings, key=_kind):
            case = SubElement(suite, "testcase", classname=rule, name=f"{rule} {title}")
            text = "\n".join(map(_sentence, same))
            if severity == "error" or warnings_fail:
                SubElement(case, "failure", type=severity, message=text.partition("\n")[0]).text = text
            else:
                SubElement(case, "system-out").text = text
        if not result.findings:
            SubElement(suite, "testcase", classname="rbtool", name=f"{counted(result.rules, 'rule')} found nothing")
        suite.set("tests", str(len(suite)))
        suite.set("failures", str(len(suite.findall("testcase/failure"))))
    indent(suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tostring(suites, encoding="unicode")}'


def _sarif(results: Mapping[str, CheckResult | Exception], warnings_fail: bool) -> str:
    """Write SARIF 2.1.0: one run, with the rules that have findings. Locations are the paths of datasets."""
    import json
    from urllib.parse import quote

    from ..core import __version__
    from ..core.ted.rules import known_rules

    checked = [result for result in results.values() if not isinstance(result, Exception)]
    found = [(result.path, one) for result in checked for one in result.findings]
    used = {one.rule for _, one in found}
    rules = [
        {"id": entry.rule, "name": entry.name, "shortDescription": {"text": entry.checks}}
        for entry in known_rules()
        if entry.rule in used
    ]
    listed = [
        {
            "ruleId": one.rule,
            "level": one.severity,
            "message": {"text": _sentence(one)},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": quote(path.as_posix())}}}],
            "properties": {"episodes": [*one.episodes], "steps": [[*pair] for pair in one.steps]},
        }
        for path, one in found
    ]
    driver = {"name": "rbtool check", "version": __version__, "rules": rules}
    run: dict[str, Any] = {"tool": {"driver": driver}, "results": listed}
    failures = [
        {
            "level": "error",
            "message": {"text": _failure(error)},
            "descriptor": {"id": type(error).__name__},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": quote(name)}}}],
        }
        for name, error in results.items()
        if isinstance(error, Exception)
    ]
    if failures:
        run["invocations"] = [{"executionSuccessful": False, "toolExecutionNotifications": failures}]
    document = {"version": "2.1.0", "$schema": _SARIF, "runs": [run]}
    return json.dumps(document, indent=1)


_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


def _github(results: Mapping[str, CheckResult | Exception], warnings_fail: bool) -> str:
    """Write a GitHub workflow command for each finding."""
    lines = []
    for name, result in results.items():
        if isinstance(result, Exception):
            lines.append(f"::error file={_escaped(name, ':,')},title=rbtool check::{_escaped(_failure(result))}")
            continue
        file = _escaped(str(result.path), ":,")
        lines += [
            f"::{one.severity} file={file},title={one.rule} {one.name}::{_escaped(_sentence(one))}"
            for one in result.findings
        ]
    return "\n".join(lines)


def _escaped(text: str, more: str = "") -> str:
    """Percent-encode the characters that would end a part of a workflow command: line ends, `%` and `more`."""
    return "".join(f"%{ord(letter):02X}" if letter in f"%\r\n{more}" else letter for letter in text)


def _markdown(results: Mapping[str, CheckResult | Exception], warnings_fail: bool) -> str:
    """Write a heading for each dataset, and a table of its findings."""
    parts = []
    for name, result in results.items():
        if isinstance(result, Exception):
            parts.append(f"## {name}\n\nnot checked: {_failure(result)}")
            continue
        text = [f"## {name}", "", f"{counted(result.errors, 'error')}, {counted(result.warnings, 'warning')}"]
        rows = [
            f"| {' | '.join(map(_cell, (one.severity, one.rule, one.name, one.message, one.why, one.mend)))} |"
            for one in result.findings
        ]
        head = ["", "| severity | rule | name | found | why | to mend it |", "|---|---|---|---|---|---|"]
        parts.append("\n".join([*text, *(head if rows else []), *rows]))
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    return clean(text).replace("|", "\\|")


_WRITERS: Mapping[Format, Callable[[Mapping[str, CheckResult | Exception], bool], str]] = {
    Format.JUNIT: _junit, Format.SARIF: _sarif, Format.GITHUB: _github, Format.MARKDOWN: _markdown,
}  # fmt: skip
