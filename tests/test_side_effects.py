"""One module writes files and one prints: held by reading the source of all the others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import source_tree
from cases import each

WRITER = "core/format/fs.py"
PRINTER = "cli/output.py"

WRITING = {
    *("np.save", "np.savetxt", "np.savez", "np.savez_compressed", "torch.save"),
    *("os.link", "os.rename", "os.renames", "os.replace", "os.symlink", "os.truncate"),
    *("shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copyfileobj", "shutil.copytree"),
    *("shutil.move", "shutil.rmtree", "shutil.unpack_archive"),
}
WRITING_METHODS = {"extractall", "hardlink_to", "rename", "symlink_to", "tofile", "touch", "write_bytes", "write_text"}
PRINTING = {
    *("click.echo", "print", "rich.print", "rich.print_json", "typer.echo", "typer.secho"),
    *("sys.stderr.write", "sys.stderr.writelines", "sys.stdout.write", "sys.stdout.writelines"),
}
WRITE_MODE = re.compile(r"(?=.*[wax+])[rwaxbt+]{1,3}(:\w*)?")
WRITE_FLAG = re.compile(r"\bO_(WRONLY|RDWR|CREAT|TRUNC|APPEND)\b")


class Call(NamedTuple):
    """One call: what is called as it was written, and the node."""

    name: str
    node: ast.Call

    def __str__(self) -> str:
        return f"line {self.node.lineno}: {ast.unparse(self.node)}"


def written(node: ast.expr) -> str:
    """Return an expression as it was written."""
    if isinstance(node, ast.Name):  # these two are nearly all there are, and `unparse` takes long
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{written(node.value)}.{node.attr}"
    return ast.unparse(node)


def calls_in(source: str) -> Iterator[Call]:
    """Yield every call of a module, under the full name of what is called."""
    nodes = list(ast.walk(ast.parse(source)))
    full = {"numpy": "np"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not node.level:
            full |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            full |= {alias.asname: alias.name for alias in node.names if alias.asname and alias.asname != "np"}
    for node in nodes:
        if isinstance(node, ast.Call):
            head, dot, tail = written(node.func).partition(".")
            yield Call(f"{full.get(head, head)}{dot}{tail}", node)


def writes(call: Call) -> bool:
    """Say whether a call writes, moves or removes files."""
    method = call.node.func.attr if isinstance(call.node.func, ast.Attribute) else ""
    if call.name.startswith("fs."):
        return False
    if call.name == "os.open" and ast.unparse(call.node.args[0]) == "os.devnull":
        return False
    if call.name == "os.open":
        return bool(WRITE_FLAG.search(ast.unparse(call.node)))
    if call.name == "torch.save" and "io.BytesIO()" in ast.unparse(call.node.args[1]):
        return False
    if call.name == "open" and ast.unparse(call.node.args[0]) in {"1", "2"}:
        return False  # the process's own streams
    if call.name in {"archive.open", "av.open"}:
        return False  # a member of an archive, or a video, whose own file `fs` has opened
    if call.name in {"open", "io.open", "os.fdopen"} or method == "open":
        return opens_for_writing(call)
    return call.name in WRITING or method in WRITING_METHODS


def opens_for_writing(call: Call) -> bool:
    """Say whether an `open` may write; a mode that is only known when it runs may."""
    builtin = call.name in {"open", "io.open", "os.fdopen"}
    given = [
        *call.node.args[1 if builtin else 0 : 2],
        *(word.value for word in call.node.keywords if word.arg == "mode"),
    ]
    for mode in given:
        if isinstance(mode, ast.Constant):
            if isinstance(mode.value, str) and WRITE_MODE.fullmatch(mode.value):
                return True
        elif builtin:
            return True
    return False


def prints(call: Call) -> bool:
    """Say whether a call writes to the terminal."""
    return call.name in PRINTING


def test_one_module_only_writes_and_one_prints() -> None:
    found = [
        f"{name}, {call}"
        for file in source_tree.package_files()
        if (name := file.relative_to(source_tree.ROOT).as_posix())
        for call in calls_in(file.read_text(encoding="utf-8"))
        if (name != WRITER and writes(call)) or (name != PRINTER and prints(call))
    ]
    assert found == []


@each(
    "source",
    [
        "open(path, 'w')",
        "open(path, mode='r+b')",
        "open(path, mode)",
        "path.open('xb')",
        "gzip.open(path, 'wt')",
        "tarfile.open(path, 'w:gz')",
        "os.open(path, os.O_RDWR | os.O_CREAT)",
        "from os import replace\nreplace(a, b)",
        "import shutil as sh\nsh.rmtree(path)",
        "Path(path).write_text('x')",
        "import numpy\nnumpy.save(path, array)",
        "torch.save(state, path)",
    ],
)
def test_writing_is_seen(source: str) -> None:
    assert any(writes(call) for call in calls_in(source))


@each(
    "source",
    [
        "open(path)",
        "fs.rename(a, b)",
        "open(path, 'rb')",
        "archive.open('data.bin')",
        "os.open(path, os.O_RDONLY)",
        "os.open(os.devnull, os.O_WRONLY)",
        "open(1, 'w', closefd=False)",
        "torch.save(state, io.BytesIO())",
        "text.replace('a', 'b')",
    ],
)
def test_reading_is_let_pass(source: str) -> None:
    assert not any(writes(call) for call in calls_in(source))


@pytest.mark.parametrize(
    "source", ["print(1)", "import typer\ntyper.echo(1)", "from sys import stdout\nstdout.write('')"]
)
def test_printing_is_seen(source: str) -> None:
    assert any(prints(call) for call in calls_in(source))
