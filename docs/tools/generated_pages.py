"""What follows from the code: pages, made at every build, and parts of the written pages.

python docs/tools/generated_pages.py

brings those parts up to date; a test holds them so. Every written page can be read where the repository is hosted.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
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
    "result_classes",
    "rules_table",
    "torchrl_table",
]

ROOT = Path(__file__).resolve().parents[2]
_EXAMPLE = re.compile(r'(?<=^```python title=")([^"\n]+)"\n.*?(?=^```$)', re.DOTALL | re.MULTILINE)


def cli_page() -> str:
    """The help of every verb, from the application itself."""
    import typer

    from rbtool.cli.app import app

    root = typer.main.get_command(app)
    text = ["# Command line", "", "The help of each verb, as `rbtool VERB --help` prints it."]
    for name, command in _commands(root, "rbtool"):
        context = command.context_class(command, info_name=name, **(command.context_settings or {}))
        text += ["", f"## {name}", "", "```text", command.get_help(context).rstrip(), "```"]
    return "\n".join(text) + "\n"


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for part, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, f"{name} {part}")


def result_classes() -> list[type[Any]]:
    """The classes of all documents that `--json` prints, by kind."""
    from rbtool.core import verbs
    from rbtool.core.results import Result

    for name in rbtool.__all__:
        getattr(rbtool, name)  # imports the module that defines it
    for found in pkgutil.iter_modules(verbs.__path__):
        importlib.import_module(f"{verbs.__name__}.{found.name}")
    return sorted(_named(Result), key=lambda kind: str(kind.kind))


def _named(parent: type[Any]) -> list[type[Any]]:
    """The classes that declare a kind and have no subclass; `slots` leaves a twin of every dataclass, in no module."""
    found = []
    for child in parent.__subclasses__():
        found += _named(child)
        if getattr(sys.modules[child.__module__], child.__name__, None) is child:
            found.append(child)
    return [one for one in found if one.kind not in {"cache removal", "published"}]


def json_page() -> str:
    """The entries of every document that `--json` prints."""
    text = [
        "# JSON documents", "",
        "With `--json` a verb prints one document on stdout. In Python, the verb returns the same entries as a frozen",
        "dataclass. `schema` is the version of the document and `kind` names it; paths are strings in JSON.",
        "An error is `{\"error\": {\"type\", \"message\", \"hint\", \"exit_code\"}}`.",
    ]  # fmt: skip
    for kind in result_classes():
        text += ["", f"## {kind.kind}", "", f"Schema {kind.schema}. {_first_paragraph(kind)}", "", "| entry | type |"]
        text += ["|---|---|"]
        text += [f"| `{part.name}` | `{_type_text(part.type)}` |" for part in dataclasses.fields(kind)]
    return "\n".join(text) + "\n"


def _type_text(found: Any) -> str:
    text = found if isinstance(found, str) else getattr(found, "__name__", str(found))
    return text.replace("|", "\\|")


def _first_paragraph(thing: Any) -> str:
    return " ".join((thing.__doc__ or "").split("\n\n")[0].split())


def api_page() -> str:
    """Every public name of `rbtool`, grouped by the part of the library that defines it."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in [*rbtool.__all__, "list"]:
        found = getattr(rbtool, name)
        home = getattr(found, "__module__", None)
        if home is None or not home.startswith("rbtool"):
            continue  # constants, and verbs that are modules
        groups[home.split(".")[2]].append(
            f"{home}.{getattr(found, '__qualname__', name)}"
        )  # an instance has its own name
    for verb in ("cache", "checkpoint"):
        module = importlib.import_module(f"rbtool.core.verbs.{verb}")
        groups["verbs"] += [f"{module.__name__}.{name}" for name in ("ls", "prune", "rm", "save", "load", "verify")
                            if callable(getattr(module, name, None))]  # fmt: skip
    text = ["# Python API", "", "All names are attributes of `rbtool`; the path of each shows where it is defined."]
    for group, names in sorted(groups.items()):
        text += ["", f"## {group}"]
        text += [f"\n::: {name}" for name in dict.fromkeys(names)]
    return "\n".join(text) + "\n"


def modules_page() -> str:
    """All modules with the first sentence of their docstrings."""
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
    """The parts of core, top floor first, from the test that enforces them."""
    tree = ast.parse((ROOT / "tests/test_imports.py").read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS"]
    return [sorted(parts) for parts in ast.literal_eval(found[0].value)]


def floors_table() -> str:
    """The floors as a table, each part with the first sentence of its docstring."""
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
    """The leaves, from the tool that removes them: the size of each, what it needs, and what falls with it."""
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
    """What rbtool leaves to TorchRL, and what behaves differently, from the tables of `migrate`."""
    from rbtool.core.torchrl_names import DIFFERENT, MISSING

    text = ["| name | what behaves differently in rbtool |", "|---|---|"]
    text += [f"| `{name}` | {what} |" for name, what in DIFFERENT.items()]
    text += ["", "| name | why rbtool has none |", "|---|---|"]
    text += [f"| `{name}` | {why} |" for name, why in MISSING.items()]
    return "\n".join(text)


def rules_table() -> str:
    """The rules of `check`, from their table."""
    from rbtool.core.ted.rules import RULES

    text = ["| rule | name | severity | what it checks |", "|---|---|---|---|"]
    text += [
        f"| {one.rule} | {_cell(one.name)} | {' or '.join(one.severities)} | {_cell(one.checks)} |" for one in RULES
    ]
    return chr(10).join(text)


def formats_page() -> str:
    """All formats that can be read, from their declarations."""
    from rbtool.core.verbs.list import list_formats

    text = [
        "# Formats", "", "What `convert`, `check` and `inspect` read; `rbtool list --formats` prints it.", "",
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
    return "\n".join(text) + "\n"


def filled(page: str) -> str:
    """Return a written page with its tables, and the examples in docs/examples, as they are now."""
    tables = {"floors": floors_table, "leaves": leaves_table, "rules": rules_table, "torchrl": torchrl_table}
    for name, table in tables.items():
        head, tail = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        if head in page:
            before, _, rest = page.partition(head)
            page = f"{before}{head}\n{table()}\n\n{tail}{rest.partition(tail)[2]}"
    return _EXAMPLE.sub(lambda found: f'{found[1]}"\n{_example(found[1])}', page)


def _example(name: str) -> str:
    return (ROOT / "docs/examples" / name).read_text(encoding="utf-8")


def contributing_page() -> str:
    """CONTRIBUTING.md, with its links as they are inside the site."""
    return (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")


PAGES: dict[str, Callable[[], str]] = {
    "reference/api.md": api_page,
    "reference/cli.md": cli_page,
    "reference/formats.md": formats_page,
    "reference/json.md": json_page,
    "modules.md": modules_page,
    "contributing.md": contributing_page,
}
"""The generated pages by their path inside the site."""

if __name__ == "__main__":
    for path in sorted((ROOT / "docs").rglob("*.md")):
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
