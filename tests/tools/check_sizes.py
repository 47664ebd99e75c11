"""Point at very long files and functions: each is a question to a reviewer, not an error. The exit status is 0."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import source_tree

FILE_LINES = 1000
FUNCTION_LINES = 100


def long_parts(file: Path, source: str) -> Iterator[str]:
    """Yield a line for the file if it is very long, and one for each such function."""
    if (lines := source.count("\n")) > FILE_LINES:
        yield f"{file}:1: warning: {lines} lines: is it one concept?"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{file}:{node.lineno}: warning: {node.name} has {length} lines: is it one step?"


if __name__ == "__main__":
    for path in source_tree.package_files():
        for line in long_parts(path.relative_to(source_tree.ROOT), path.read_text(encoding="utf-8")):
            print(line)
