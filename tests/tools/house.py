"""Print the figures by which the layout of the code is judged, over the package or the folders that are named.

    python tests/tools/house.py [--list] [FOLDER ...]
    python tests/tools/house.py --words

`--list` names each thing behind a figure: modules with one importer, class names that occur twice, retired words,
accesses to private members of other objects. `--words` prints the retired words of the package, of README.md,
CONTRIBUTING.md and docs/ as file:line:word and exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import source_tree

RETIRED_WORDS = re.compile(
    r"\b(told|tells?|telling|lies|lying|begun|begins? anew|beside|besides|whoever|whatever is|stands|standing|stood|"
    r"hears?|heard|hands? over|handed over|lets? go|dealt|deals?|dealer|crew|goes on|go on|going on|"
    r"knows?|says?|said|speaks?|anew|thereof|therein|wherein)\b",
    re.IGNORECASE,
)
"""Words of everyday speech for which the glossary has a standard term."""

IN_MESSAGES = frozenset({"besides", "go on", "going on", "know", "knows", "said", "say", "says"})
"""Retired words that messages and help still contain: their wording is part of the interface."""


def header_lines(tree: ast.Module) -> int:
    """Count the lines of the docstring, the imports and `__all__` at the top of a file."""
    lines = 0
    for node in tree.body:
        documented = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        imported = isinstance(node, ast.Import | ast.ImportFrom)
        exported = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        if not (documented or imported or exported):
            break
        lines = node.end_lineno or lines
    return lines


def words_of(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the retired words of docstrings and comments, with their lines."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for expression in body if isinstance(body, list) else ():
            value = getattr(expression, "value", None) if isinstance(expression, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                for number, line in enumerate(value.value.splitlines()):
                    yield from ((value.lineno + number, found[0]) for found in RETIRED_WORDS.finditer(line))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from ((token.start[0], found[0]) for found in RETIRED_WORDS.finditer(token.string))


def messages_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the retired words of other texts, such as messages and help, with their lines; names are no texts."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            for found in RETIRED_WORDS.finditer(node.value):
                if not node.value.isidentifier() and found[0].lower() not in IN_MESSAGES:
                    yield node.lineno, found[0]


def retired_words() -> Iterator[str]:
    """Yield `file:line:word` for each retired word in the package and in the documentation."""
    for file in source_tree.package_files():
        name, source = file.relative_to(source_tree.ROOT).as_posix(), file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        yield from (f"{name}:{line}:{word}" for line, word in sorted([*words_of(source, tree), *messages_of(tree)]))
    root = source_tree.ROOT
    for file in (root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))):
        for line, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            yield from (f"{file.relative_to(root)}:{line}:{found[0]}" for found in RETIRED_WORDS.finditer(text))


def private_accesses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield accesses to private members of anything but the class's own instances, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-zA-Z]", node.attr):
            owner = node.value
            own = isinstance(owner, ast.Name) and owner.id in {"self", "cls", "other", "made", "new"}
            inherited = isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "super"
            if not own and not inherited and node.attr not in {"_fields", "_asdict", "_replace", "_exit", "_MEIPASS"}:
                yield node.lineno, ast.unparse(node)


def importers_of(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Map each module to those that import it; a re-export by its own package is no import."""
    users: dict[str, set[str]] = defaultdict(set)
    for name, tree in modules.items():
        package = name if (source_tree.ROOT / _path(name) / "__init__.py").exists() else name.rpartition(".")[0]
        for node in ast.walk(tree):
            targets: list[str] = []
            if isinstance(node, ast.ImportFrom):
                base = package.rsplit(".", node.level - 1)[0] if node.level else ""
                module = ".".join(filter(None, (base, node.module)))
                targets = [f"{module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            for target in targets:
                found = next((part for part in (target, target.rpartition(".")[0]) if part in modules), None)
                if found and found != name and found.rpartition(".")[0] != name:
                    users[found].add(name)
    return users


def _path(module: str) -> str:
    return module.removeprefix("rbtool").lstrip(".").replace(".", "/")


def main() -> int:
    """Print the figures, or the retired words; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--list", action="store_true", help="name each thing behind a figure")
    parser.add_argument("--words", action="store_true", help="print retired words; exit with 1 if there are any")
    parser.add_argument("folders", nargs="*", type=Path, help="of the package; all by default")
    options = parser.parse_args()
    if options.words:
        found = list(retired_words())
        print("\n".join(found) if found else "words: no retired word is used")
        return 1 if found else 0
    chosen = [folder.resolve() for folder in options.folders] or [source_tree.ROOT]
    every = {source_tree.module_name(file): file for file in source_tree.package_files()}
    trees = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in every.items()}
    files = {name: file for name, file in every.items() if any(file.is_relative_to(folder) for folder in chosen)}
    sources = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    lengths = [source.count("\n") for source in sources.values() if source.strip()]
    listed: dict[str, list[str]] = {"modules with one importer": [], "class names twice or more": []}
    stub = ast.parse((source_tree.ROOT / "__init__.pyi").read_text(encoding="utf-8"))
    users = importers_of(trees | {"rbtool": ast.Module([*trees["rbtool"].body, *stub.body], [])})
    for name in sorted(files):
        if len(users[name]) == 1 and files[name].name not in {"__init__.py", "__main__.py"}:
            listed["modules with one importer"].append(f"{name} <- {next(iter(users[name]))}")
    classes = Counter(node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for name in sorted(files):
        for node in ast.walk(trees[name]):
            if isinstance(node, ast.ClassDef) and classes[node.name] > 1:
                listed["class names twice or more"].append(f"{node.name}: {name}:{node.lineno}")
    for title, find in (("retired words", words_of), ("private members of others", None)):
        listed[title] = [
            f"{name}:{line} {what}"
            for name in sorted(files)
            for line, what in (find(sources[name], trees[name]) if find else private_accesses(trees[name]))
        ]
    print(f"files {len(lengths)}, lines {sum(lengths)}, median {statistics.median(lengths):g}")
    print(f"header share {sum(header_lines(trees[name]) for name in files) / sum(lengths):.1%}")
    for title, entries in listed.items():
        count = len({entry.partition(":")[0] for entry in entries}) if title.startswith("class") else len(entries)
        print(f"{title} {count}")
        for entry in entries if options.list else ():
            print(f"  {entry}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
