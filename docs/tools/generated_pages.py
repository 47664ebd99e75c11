"""Generate documentation from the code: whole pages, at every build, and tables inside the written pages.

    python docs/tools/generated_pages.py

updates the tables and `__init__.pyi`; a test checks that they are up to date. The written pages are complete in the
repository, so that they can be read without a build. `--man FOLDER` writes manual pages, which a release contains.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import html
import importlib
import inspect
import pkgutil
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rbtool

__all__ = [
    "PAGES",
    "filled",
    "floors",
    "floors_table",
    "leaves_table",
    "manual",
    "result_classes",
    "rules_table",
    "stub",
    "torchrl_table",
]

ROOT = Path(__file__).resolve().parents[2]
_EXAMPLE = re.compile(r'(?<=^```python title=")([^"\n]+)"\n.*?(?=^```$)', re.DOTALL | re.MULTILINE)


_COMMON = "Options of every verb"


class _Help:
    """The help of a command: its usage, text, rows of options by section, notes, and examples."""

    def __init__(self, command: Any, name: str) -> None:
        context = command.context_class(command, info_name=name, **(command.context_settings or {}))
        self.name = name
        self.usage = " ".join([name, *command.collect_usage_pieces(context)])
        self.text = [" ".join(part.split()) for part in inspect.cleandoc(command.help or "").split("\n\n")]
        self.sections: dict[str, list[tuple[str, str]]] = {}
        command.format_options(context, self)
        self.notes, _, examples = (command.epilog or "").partition("Examples:\n")
        self.examples = "\n".join(line.removeprefix("  ") for line in examples.splitlines())

    @contextlib.contextmanager
    def section(self, title: str) -> Iterator[None]:
        """Begin a section, as a formatter of Click does."""
        self.sections[title] = []
        yield

    def write_dl(self, rows: list[tuple[str, str]]) -> None:
        """Add rows to the section that was begun last."""
        next(reversed(self.sections.values())).extend((name.strip(), what) for name, what in rows)


def _helps() -> list[_Help]:
    """Return the help of `rbtool` and of every verb, from the application itself."""
    import typer

    from rbtool.cli.app import app

    return [_Help(command, name) for name, command in _commands(typer.main.get_command(app), "rbtool")]


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for part in command.list_commands(None) if hasattr(command, "commands") else ():
        yield from _commands(command.commands[part], f"{name} {part}")


def verbs_reference() -> str:
    """Return a table of all verbs, and a section for each."""
    first, *verbs = _helps()
    text = ["| for | verbs |", "|---|---|"]
    for title, rows in first.sections.items():
        if title != "Options":
            text.append(f"| {title} | {', '.join(f'[{name}](#rbtool-{name})' for name, _ in rows)} |")
    text += ["", f"## {_COMMON}", "", "They may stand before the verb, too: `rbtool --json inspect DATASET`.", ""]
    text += _rows(next(one.sections[_COMMON] for one in verbs if _COMMON in one.sections))
    text += ["", "## rbtool", "", *_rows(first.sections["Options"])]
    for one in verbs:
        text += ["", f"## {one.name}", "", "\n\n".join(map(_cell, one.text)), "", "```text", one.usage, "```"]
        for title, rows in one.sections.items():
            if rows and title != _COMMON:
                text += ["", *([f"{title}:", ""] if title not in ("Arguments", "Options") else []), *_rows(rows)]
        if one.examples:
            text += ["", "```bash", one.examples, "```"]
    return "\n".join(text)


def _rows(rows: list[tuple[str, str]]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {_code(name)} | {' '.join(_cell(what).split())} |" for name, what in rows)]


def _code(text: str) -> str:
    """Format code for a cell of a table; hosts and MkDocs disagree on how to escape a bar between backticks."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def manual() -> dict[str, str]:
    """Return the manual pages, in troff, by their file names: one for `rbtool`, and one for each verb."""
    first, *verbs = _helps()
    pages = {}
    for one in (first, *verbs):
        name = one.name.replace(" ", "-")
        text = [
            f'.TH {name.upper()} 1 "" "rbtool {rbtool.__version__}"', ".SH NAME",
            f"{_troff(name)} \\- {_troff(one.text[0])}",
            ".SH SYNOPSIS", f".B {_troff(one.usage)}", ".SH DESCRIPTION", "\n.PP\n".join(map(_troff, one.text)),
        ]  # fmt: skip
        for title, rows in one.sections.items():
            text += (
                [f".SH {title.upper()}", *(f".TP\n.B {_troff(row)}\n{_troff(what)}" for row, what in rows)]
                if rows
                else []
            )
        if one.notes:
            text += [".SH NOTES", ".nf", *map(_troff, one.notes.strip().splitlines()), ".fi"]
        if one.examples:
            text += [".SH EXAMPLES", ".nf", *map(_troff, one.examples.splitlines()), ".fi"]
        others = [_troff(other.name.replace(" ", "-")) for other in verbs] if one is first else ["rbtool"]
        text += [".SH SEE ALSO", ", ".join(f"\\fB{other}\\fR(1)" for other in others)]
        pages[f"{name}.1"] = "\n".join(text) + "\n"
    return pages


def _troff(text: str) -> str:
    """Escape a line: a leading dot, which troff takes for a request, and characters that it would replace."""
    text = re.sub(r"[\\'`^~-]|[^\0-\x7f]", lambda found: _SIGNS.get(found[0], f"\\[u{ord(found[0]):04X}]"), text)
    return f"\\&{text}" if text.startswith(".") else text


_SIGNS = {"\\": "\\e", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti", "-": "\\-"}


def result_classes() -> list[type[Any]]:
    """Return the classes of all documents that `--json` prints, sorted by kind."""
    from rbtool.core import verbs
    from rbtool.core.results import Result

    for name in rbtool.__all__:
        getattr(rbtool, name)  # imports the module that defines it
    for found in pkgutil.iter_modules(verbs.__path__):
        importlib.import_module(f"{verbs.__name__}.{found.name}")
    return sorted(_named(Result), key=lambda kind: str(kind.kind))


def _named(parent: type[Any]) -> list[type[Any]]:
    """Return all subclasses that declare a kind; `slots` leaves copies of dataclasses, which are in no module."""
    found = []
    for child in parent.__subclasses__():
        found += _named(child)
        if getattr(sys.modules[child.__module__], child.__name__, None) is child:
            found.append(child)
    return [one for one in found if one.kind not in {"cache removal", "published"}]


def json_page() -> str:
    """Return the page with the entries of every document that `--json` prints."""
    text = [
        "# JSON documents", "",
        "With `--json` a verb prints one document on stdout. In Python, the verb returns the same entries as a frozen",
        "dataclass. `schema` is the version of the document and `kind` names it; paths are strings in JSON.",
        "An error is `{\"error\": {\"type\", \"message\", \"hint\", \"exit_code\"}}`.",
    ]  # fmt: skip
    for kind in result_classes():
        text += ["", f"## {kind.kind}", "", f"Schema {kind.schema}. {_first_paragraph(kind)}", "", "| entry | type |"]
        text += ["|---|---|"]
        text += [f"| `{part.name}` | {_type_text(part.type)} |" for part in dataclasses.fields(kind)]
    return "\n".join(text) + "\n"


def _type_text(found: Any) -> str:
    return _code(found if isinstance(found, str) else getattr(found, "__name__", str(found)))


def _first_paragraph(thing: Any) -> str:
    return " ".join((thing.__doc__ or "").split("\n\n")[0].split())


def api_page() -> str:
    """Return the page of all public names of `rbtool`, grouped by purpose."""
    text = ["# Python API", "", "All names are attributes of `rbtool`; the path of each shows where it is defined."]
    for title, homes in rbtool._NAMES.items():
        named = [(name, getattr(rbtool, name)) for names in homes.values() for name in names.split()]
        for _, verb in filter(lambda one: inspect.ismodule(one[1]), named[:]):
            named += [
                (name, vars(verb)[name])
                for name in ("ls", "prune", "rm", "save", "load", "verify")
                if name in vars(verb)
            ]
        places = [
            f"{found.__module__}.{getattr(found, '__qualname__', name)}"  # an instance has its own name
            for name, found in named
            if getattr(found, "__module__", "").startswith("rbtool.")  # not constants, and verbs that are modules
        ]
        text += ["", f"## {title}", *(f"\n::: {place}" for place in dict.fromkeys(places))]
    return "\n".join(text) + "\n"


def stub() -> str:
    """Return the text of `__init__.pyi`, which shows the public names to type checkers."""
    homes = sorted((home, names) for homes in rbtool._NAMES.values() for home, names in homes.items())
    text = [
        '"""The public names, for type checkers: docs/tools/generated_pages.py makes it of `__init__.py`."""',
        "",
    ]
    text += [f"from {home} import {name} as {name}" for home, names in homes for name in names.split()]
    return "\n".join(text) + "\n"


def modules_page() -> str:
    """Return the page of all modules, with the first paragraph of each docstring."""
    import source_tree

    rooms: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for file in source_tree.package_files():
        name = source_tree.module_name(file)
        doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        room = name if file.name == "__init__.py" else name.rpartition(".")[0]
        rooms[room].append((name, " ".join(doc.split("\n\n")[0].split())))
    text = ["# Modules", "", "Every package and its modules; see [Architecture](architecture.md) for the import rules."]
    for room, modules in sorted(rooms.items()):
        text += ["", f"## {room}", "", "| module | contents |", "|---|---|"]
        text += [f"| `{name}` | {_cell(doc)} |" for name, doc in sorted(modules)]
    return "\n".join(text) + "\n"


def _cell(text: str) -> str:
    return re.sub(r"([|<>\[\]])", r"\\\1", text)


def floors() -> list[list[str]]:
    """Return the parts of core, top floor first, from the test that enforces them."""
    tree = ast.parse((ROOT / "tests/test_imports.py").read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS"]
    return [sorted(parts) for parts in ast.literal_eval(found[0].value)]


def floors_table() -> str:
    """Return the floors as a table, each part with the first paragraph of its docstring."""
    text = ["| floor | part | contents |", "|---|---|---|"]
    levels = floors()
    for number, parts in enumerate(levels):
        for part in parts:
            place = ROOT / "core" / part
            file = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
            doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            text.append(f"| {len(levels) - number} | `{part}` | {_cell(' '.join(doc.split(chr(10) * 2)[0].split()))} |")
    return chr(10).join(text)


def leaves_table() -> str:
    """Return the table of leaves: the size of each, the leaves that it needs, and what a user loses without it."""
    tools = str(ROOT / "tests/tools")
    if tools not in sys.path:
        sys.path.append(tools)
    import leaves

    text = ["| leaf | tokens | needs | a user loses |", "|---|---|---|---|"]
    for name, leaf in leaves.leaves().items():
        needed = ", ".join(sorted(leaves.needs()[name]))
        text.append(f"| {name} | {leaves.rounded(leaves.tokens(name))} | {needed} | {_cell(leaf.loses)} |")
    return chr(10).join(text)


def torchrl_table() -> str:
    """Return the tables of names that behave differently from TorchRL's, and of names that rbtool lacks."""
    from rbtool.core.torchrl_classes import MISSING
    from rbtool.core.verbs.migrate import DIFFERENT

    text = ["| name | what behaves differently in rbtool |", "|---|---|"]
    text += [f"| `{name}` | {what} |" for name, what in DIFFERENT.items()]
    text += ["", "| name | why rbtool has none |", "|---|---|"]
    text += [f"| `{name}` | {why} |" for name, why in MISSING.items()]
    return "\n".join(text)


def rules_table() -> str:
    """Return the table of the rules of `check`."""
    from rbtool.core.ted.rules import RULES

    text = ["| rule | name | severity | what it checks |", "|---|---|---|---|"]
    text += [
        f"| {one.rule} | {_cell(one.name)} | {' or '.join(one.severities)} | {_cell(one.checks)} |" for one in RULES
    ]
    return chr(10).join(text)


def behaviour_table() -> str:
    """Return the table of the rules of `check` about behaviour."""
    from rbtool.core.declarations import from_leaf
    from rbtool.core.verbs.clean import FIXES

    mends = {rule: f"`--fix {name}`" for name, rules in FIXES.items() for rule in rules} | {"MOT006": "`--trim-idle`"}
    text = ["| rule | name | what holds | why | thresholds | `rbtool clean` |", "|---|---|---|---|---|---|"]
    text += [
        f"| {one.rule} | {_cell(one.name)} | {_cell(one.checks)} | {_cell(one.why)} | {', '.join(one.thresholds)} "
        f"| {f'`--drop {one.drop}`' if one.drop else mends.get(one.rule, '')} |"
        for one in from_leaf("behaviour")
    ]
    return chr(10).join(text)


def thresholds_table() -> str:
    """Return the table of thresholds of the rules about behaviour, from the docstring of their class."""
    import re

    from rbtool.core.declarations import from_leaf

    thresholds = from_leaf("thresholds")
    described = re.findall(r"^ {8}(\w+): ((?:.|\n {12})+)", thresholds.__doc__, re.MULTILINE)
    text = ["| name | default | what it is |", "|---|---|---|"]
    text += [
        f"| `{name}` | {getattr(thresholds(), name)} | {_cell(' '.join(what.split()).rstrip('.'))} |"
        for name, what in described
    ]
    return chr(10).join(text)


def formats_overview() -> str:
    """Return the table of all formats for the README: what can be done with each, and what ends an episode."""
    from rbtool.core.verbs.list import list_formats

    text = [
        "| format | reads | writes | downloads | streams | keeps video | what ends an episode |",
        "|---|" + ":-:|" * 5 + "---|",
    ]
    for one in list_formats().formats:
        page = ROOT / "docs/reference" / f"{one.name}.md"
        title = f"[{one.title}](docs/reference/{page.name})" if page.exists() else one.title
        marks = ("yes" if there else "" for there in (one.read, one.exported, one.remote, one.streams, one.keeps_video))
        text.append(f"| {' | '.join((title, *marks, _cell(one.ends)))} |")
    return "\n".join(text)


def formats_table() -> str:
    """Return the table of all formats for their page, from their declarations."""
    from rbtool.core.verbs.list import list_formats

    text = [
        "| format | found by | what ends an episode | observation after it | install | remote | `export --to` |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for one in list_formats().formats:
        page = ROOT / "docs/reference" / f"{one.name}.md"
        title = f"[{one.title}]({page.name})" if page.exists() else one.title
        extra = f"`rbtool[{one.extra}]`" if one.extra else ""
        remote, export = (f"`{one.name}`" if there else "" for there in (one.remote, one.exported))
        cells = (title, _cell(one.found), _cell(one.ends), one.final, extra, remote, export)
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def filled(page: str) -> str:
    """Return a written page with its generated tables, and its examples from docs/examples, brought up to date."""
    tables = {
        "floors": floors_table, "formats": formats_table, "formats overview": formats_overview,
        "leaves": leaves_table, "rules": rules_table, "behaviour": behaviour_table, "thresholds": thresholds_table,
        "torchrl": torchrl_table, "verbs": verbs_reference,
    }  # fmt: skip
    for name, table in tables.items():
        head, tail = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        if head in page:
            before, _, rest = page.partition(head)
            page = f"{before}{head}\n{table()}\n\n{tail}{rest.partition(tail)[2]}"
    return _EXAMPLE.sub(lambda found: f'{found[1]}"\n{_example(found[1])}', page)


def _example(name: str) -> str:
    return (ROOT / "docs/examples" / name).read_text(encoding="utf-8")


def contributing_page() -> str:
    """Return CONTRIBUTING.md, with links as they are inside the site."""
    return (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")


PAGES: dict[str, Callable[[], str]] = {
    "reference/api.md": api_page,
    "reference/json.md": json_page,
    "modules.md": modules_page,
    "contributing.md": contributing_page,
}
"""The generated pages by their path inside the site."""

if __name__ == "__main__":
    if sys.argv[1:2] == ["--man"]:
        folder = Path(sys.argv[2])
        folder.mkdir(parents=True, exist_ok=True)
        for name, page in manual().items():
            (folder / name).write_text(page, encoding="utf-8")
        raise SystemExit
    (ROOT / "__init__.pyi").write_text(stub(), encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
