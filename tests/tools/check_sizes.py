"""Hold files, functions and classes to sizes a reader can take in, and annotations to all functions.

Prints one line for each thing found and exits with 1 if there was any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import source_tree

FILE_LINES = 420
FUNCTION_LINES = 70
CLASS_LINES = 320
LEFT_UNDONE = re.compile(r"\b(TO[D]O|FIX[M]E)\b")


def problems(file: Path, source: str, *, annotated: bool) -> Iterator[str]:
    """Yield what is wrong with one file; `annotated` asks for the return type of every function."""
    lines = source.splitlines()
    if len(lines) > FILE_LINES:
        yield f"{file}:1: {len(lines)} lines, at most {FILE_LINES} are allowed: one concept a file"
    for number, line in enumerate(lines, start=1):
        if found := LEFT_UNDONE.search(line):
            yield f"{file}:{number}: {found[0]}: finish it, or say in the docstring what is not done"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield from _too_long(file, node, CLASS_LINES)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _too_long(file, node, FUNCTION_LINES)
            if annotated and node.returns is None:
                yield f"{file}:{node.lineno}: {node.name} has no return annotation"


def _too_long(file: Path, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, limit: int) -> Iterator[str]:
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    if length > limit:
        yield f"{file}:{node.lineno}: {node.name} has {length} lines, at most {limit} are allowed"


def main() -> int:
    """Check every Python file of the checkout."""
    package, others = source_tree.package_files(), source_tree.other_files()
    found = [
        problem
        for file in (*package, *others)
        for problem in problems(
            file.relative_to(source_tree.ROOT), file.read_text(encoding="utf-8"), annotated=file in package
        )
    ]
    print("\n".join(found) if found else f"sizes: {len(package) + len(others)} files are within bounds")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
