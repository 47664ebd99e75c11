"""The trunk of rbtool and its leaves: what can be removed without anything else noticing.

python tests/tools/leaves.py                     lists the leaves: size, needs
python tests/tools/leaves.py edges               lists the imports that keep a leaf from falling off
python tests/tools/leaves.py copy FOLDER NAME... makes a copy of the tree without these leaves; `all` for all of them

A leaf is a set of packages and modules that the trunk knows by one declaration and by nothing else: an entry in
`FORMATS` of its package, in `VERBS` of the command line, or in `core/declarations.py` (`LEAVES`, or options of
`preprocess`). With a leaf fall the leaves that
import it, the tests that mirror its modules, and its public names. Whatever else uses it - tests of several leaves,
benchmarks, examples - falls file by file. What a leaf needs is read from the imports of the tree, also those in
functions and under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import sys
import tokenize
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import source_tree

ROOT = source_tree.ROOT


class Leaf(NamedTuple):
    """A leaf: its packages and modules as paths from the root without a suffix, and what a user loses without it."""

    paths: tuple[str, ...]
    loses: str


# Packages of `converters` are leaves by themselves, see `leaves()`.
_LEAVES = {
    "specs": Leaf(("core/specs",), "specs of observations and actions, and the spaces of gymnasium made of them"),
    "maps and trees": Leaf(("core/maps",), "maps keyed by rows of tensors, and trees of rollouts"),
    "text": Leaf(("core/text",), "conversations, tokens, batches of text, KL controllers, rewards for language models"),
    "robots": Leaf(
        ("core/robots",), "robot data in `preprocess`: action spaces, idle ends, rates, tasks and pictures"
    ),
    "vla": Leaf(("core/vla",), "vision-language-action models: tokens of actions, steps and images"),
    "report": Leaf(("core/report", "core/verbs/report", "cli/report"), "`rbtool report` and charts"),
    "recording": Leaf(
        ("core/recording", "core/verbs/record", "cli/record"), "recording environments: wrappers and `rbtool record`"
    ),
    "ray": Leaf(
        ("core/buffers/ray_buffer", "core/verbs/ray_data"),
        "`RayReplayBuffer`, buffers in actors of a Ray cluster, and datasets of Ray Data",
    ),
    "remote": Leaf(("core/remote",), "transfers over the network: HTTP, hubs, buckets"),
    "streams": Leaf(("core/streams",), "datasets that are read from a server without being downloaded"),
    "experience replay": Leaf(
        ("core/experience_replay",), "classes such as `MinariExperienceReplay`, which download a dataset and open it"
    ),
    "torchrl": Leaf(("core/torchrl",), "checkpoints in TorchRL's own layouts of episodes"),
    "convert": Leaf(("core/verbs/convert", "core/verbs/convert_workers", "cli/convert"), "`rbtool convert`"),
    "doctor": Leaf(("core/doctor",), "rules of `rbtool check` about behaviour: stuck joints, frozen cameras, copies"),
    "repair": Leaf(("cli/repair",), "`rbtool repair`"),
    "preprocess": Leaf(("cli/preprocess",), "`rbtool preprocess`"),
    "score": Leaf(("core/verbs/score", "cli/score"), "`rbtool score`: how good each episode is"),
    "bench": Leaf(
        ("core/verbs/bench", "core/verbs/bench_libraries", "cli/bench"),
        "`rbtool bench`: how fast libraries read a dataset",
    ),
    **{
        verb: Leaf((f"core/verbs/{verb}", f"cli/{verb}"), f"`rbtool {verb}`")
        for verb in (
            "plot", "frames", "download", "schema", "env", "export", "merge", "split", "diff", "check", "clean",
            "checkpoint", "cache", "list", "demo", "inspect", "migrate", "mix", "sample", "stats", "upload",
        )
    },
}  # fmt: skip

# Tests of several leaves together. Each falls with any leaf that it imports; the other tests outside of leaves are the
# trunk's, and import no leaf.
TOGETHER = (
    "tests/arguments", "tests/cli", "tests/converters", "tests/core/golden", "tests/core/verbs", "tests/crash",
    "tests/docs", "tests/doctests", "tests/examples", "tests/fuzz", "tests/imports", "tests/loading",
    "tests/packaging", "tests/side_effects", "tests/standins", "tests/system", "tests/tools",
)  # fmt: skip

# Tests of the whole tree, which fall with the first leaf: they hold that everything on a list is there.
WHOLE = frozenset({"tests/test_examples.py", "tests/test_leaves.py"})

_ASIDE = ("benchmarks", "docs", "examples", "tests")
_PATHS = ("docs/examples", "docs/tools", "tests/tools", "tests/standins")  # `pythonpath` of pytest


@functools.cache
def leaves() -> dict[str, Leaf]:
    """Return all leaves by name: those above, and the packages of `converters` that are not in one of them."""
    taken = {path for leaf in _LEAVES.values() for path in leaf.paths}
    found = dict(_LEAVES)
    for folder in sorted((ROOT / "converters").iterdir()):
        path = folder.relative_to(ROOT).as_posix()
        if (folder / "__init__.py").is_file() and path not in taken:
            doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
            name = folder.name if folder.name not in found else f"{folder.name} files"
            found[name] = Leaf((path,), doc.split("\n")[0].rstrip("."))
    return found


@functools.cache
def leaf_of(path: str) -> str | None:
    """Return the leaf to which a file belongs, also a test that mirrors one of its modules; None for the trunk.

    `tests/core/verbs/test_convert_ray.py` mirrors `core/verbs/convert`, where no longer name fits.
    """
    mirrored = path.removeprefix("tests/").replace("/test_", "/").removesuffix(".py").removesuffix("/conftest")
    best, found = "", None
    for name, leaf in leaves().items():
        for one in leaf.paths:
            fits = (
                mirrored == one
                or mirrored.startswith(f"{one}/")
                or (path.startswith("tests/") and mirrored.startswith(f"{one}_"))
            )
            if fits and len(one) > len(best):
                best, found = one, name
    return found


@functools.cache
def is_of_trunk(path: str) -> bool:
    """Say whether a file stays when all leaves fall: it belongs to no leaf and to nothing that may use leaves."""
    if leaf_of(path) is not None or path.startswith(("benchmarks/", "docs/", "examples/", "core/testing/")):
        return False
    mirrored = path.replace("/test_", "/").removesuffix(".py")
    return not any(mirrored == one or mirrored.startswith(f"{one}/") for one in TOGETHER)


@functools.cache
def _product_files() -> tuple[str, ...]:
    return tuple(file.relative_to(ROOT).as_posix() for file in source_tree.package_files())


@functools.cache
def _files() -> tuple[str, ...]:
    return (*_product_files(), *(file.relative_to(ROOT).as_posix() for file in source_tree.other_files()))


def _dotted(path: str) -> str:
    return ".".join(("rbtool", *path.removesuffix(".py").split("/"))).removesuffix(".__init__")


@functools.cache
def _modules() -> dict[str, str]:
    """Return the file of each module of the package."""
    return {_dotted(path): path for path in _product_files()}


@functools.cache
def _beside() -> dict[str, str]:
    """Return the file of each module that tests and tools import by its bare name."""
    return {Path(path).stem: path for path in _files() if str(Path(path).parent) in _PATHS}


@functools.cache
def _public() -> dict[str, str]:
    """Return the file of each public name, from the list that is made of the table of them."""
    return {line.split()[-1]: file for line in _lines("__init__.pyi") if (file := _home(line))}


def _home(line: str) -> str | None:
    """Return the file that a line of `__init__.pyi` imports from."""
    words = line.split()
    if words[:1] != ["from"]:
        return None
    home = f"rbtool{words[1]}"
    return _modules().get(f"{home}.{words[-1]}") or _modules()[home]


_NAMED = re.compile(r"\brbtool((?:\.\w+)+)")
_LISTED = re.compile(r'( {8}"\.[\w.]+": )("[\w ]+"|\([^)]+\)),\n')
_FROM = re.compile(r"\bfrom rbtool((?:\.\w+)*) import \(?([\w, ]+)")
_OPTION = re.compile(r' {4}OperationOption\(\n {8}"[\w-]+", "rbtool\.([\w.]+):\w+",[\s\S]*?\n {4}\),\n')
_DECLARED = re.compile(r' {4}"\w+": "rbtool\.([\w.]+):\w+",\n')


@functools.cache
def imports(path: str) -> frozenset[str]:
    """Return the files of the tree that a file imports, uses as `rbtool.NAME`, or names in a string of a test."""
    found = {one for above in Path(path).parents if (ROOT / (one := f"{above.as_posix()}/conftest.py")).is_file()}
    package = _dotted(path) if path.endswith("__init__.py") else _dotted(path).rpartition(".")[0]

    def use(dotted: str) -> None:
        parts = dotted.split(".")
        if parts[0] != "rbtool":
            if parts[0] in _beside() and path.startswith(_ASIDE):
                found.add(_beside()[parts[0]])
        elif len(parts) > 1 and parts[1] in _public():
            found.add(_public()[parts[1]])
        else:
            names = (".".join(parts[:end]) for end in range(len(parts), 1, -1))
            found.update([_modules()[name] for name in names if name in _modules()][:1])

    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                use(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            stem = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                use(f"{stem}.{alias.name}")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rbtool":
            use(f"rbtool.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path.startswith(_ASIDE):
            for match in _FROM.finditer(node.value):
                for word in match[2].replace(",", " ").split():
                    use(f"rbtool{match[1]}.{word}")
            for match in _NAMED.finditer(node.value):
                use(f"rbtool{match[1]}")
    return frozenset(found - {path})


@functools.cache
def needs() -> dict[str, frozenset[str]]:
    """Return the other leaves that each leaf imports."""
    found: dict[str, set[str]] = {name: set() for name in leaves()}
    for path in _product_files():
        if (own := leaf_of(path)) is not None:
            found[own] |= {other for one in imports(path) if (other := leaf_of(one)) not in (None, own)}  # type: ignore[misc]
    return {name: frozenset(others) for name, others in found.items()}


def tokens(name: str) -> int:
    """Return how many tokens the modules of a leaf have, without comments and docstrings."""
    return sum(_count(path) for path in _product_files() if leaf_of(path) == name)


def rounded(count: int) -> str:
    """Round to a series of about equal steps, so that small changes of the code leave the table as it is."""
    steps = [step * 10**power for power in range(2, 6) for step in (10, 15, 20, 30, 40, 50, 70)]
    return f"{min(steps, key=lambda step: abs(step - count)):,}"


_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def _count(path: str) -> int:
    """Count the tokens of a file; an f-string is one, although it has parts since Python 3.12."""
    count = inside = 0
    with (ROOT / path).open(encoding="utf-8") as file:
        for one in tokenize.generate_tokens(file.readline):
            kind = tokenize.tok_name[one.type]
            inside += (kind == "FSTRING_START") - (kind == "FSTRING_END")
            documents = kind == "STRING" and one.string.startswith(('"""', 'r"""'))
            count += not (inside or documents or one.type in _LAYOUT)
    return count


def falling(names: Collection[str]) -> frozenset[str]:
    """Return these leaves and all that need one of them, directly or not."""
    fallen = set(names)
    while more := {name for name, others in needs().items() if others & fallen} - fallen:
        fallen |= more
    return frozenset(fallen)


def removed_files(names: Collection[str]) -> frozenset[str]:
    """Return the files that fall with these leaves: theirs, and those outside of the trunk that use them."""
    fallen = falling(names)
    gone = {path for path in _files() if leaf_of(path) in fallen} | WHOLE
    while more := {path for path in _files() if imports(path) & gone and not _stays(path)} - gone:
        gone |= more
    return frozenset(gone)


def _stays(path: str) -> bool:
    """Say whether a file has to do without a leaf that falls: the trunk, its tests, and the product files of leaves."""
    return is_of_trunk(path) or not path.startswith((*_ASIDE, "core/testing/"))


class Edge(NamedTuple):
    """An import that dangles when a leaf falls: who imports, what, and the leaf."""

    importer: str
    imported: str
    leaf: str


def edges() -> list[Edge]:
    """Return what the trunk and its tests import of leaves, directly or through what falls with a leaf."""
    found = []
    for name in leaves():
        gone = removed_files([name])
        for path in _files():
            if path not in gone and leaf_of(path) != name:
                found += [Edge(path, one, name) for one in imports(path) & gone if leaf_of(one) in (name, None)]
    return sorted(set(found))


def unknown_edges() -> list[Edge]:
    """Return the edges that no list below names."""
    return [
        edge
        for edge in edges()
        if edge.importer not in TESTS_WITH_EDGES and edge.leaf not in ROOMS_WITH_EDGES.get(_room(edge.importer), ())
    ]


def _room(path: str) -> str:
    """Return `core/buffers` for `core/buffers/editing.py`."""
    return "/".join(path.removesuffix(".py").split("/")[:2])


# Rooms that import leaves still, and test files of the trunk that do. Both lists only get shorter.
ROOMS_WITH_EDGES: dict[str, frozenset[str]] = {}
TESTS_WITH_EDGES = frozenset({})


def copy(folder: Path, names: Collection[str]) -> None:
    """Make a copy of the tree at `folder / "rbtool"`, without these leaves and what falls with them.

    Files are hard links where that is possible, those of `__pycache__` too: change none of them in place.
    """
    gone = removed_files(names)
    target = folder / "rbtool"
    for file in _all_files(ROOT):
        path = file.relative_to(ROOT)
        source = path.parent.parent / f"{path.name.split('.')[0]}.py" if path.parent.name == "__pycache__" else path
        if source.as_posix() not in gone:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, target / path)
            except OSError:
                shutil.copy2(file, target / path)
    for leaf in falling(names):
        for one in leaves()[leaf].paths:
            shutil.rmtree(target / one, ignore_errors=True)  # data files of packages
    _replace(target / "__init__.pyi", [line for line in _lines("__init__.pyi") if _home(line) not in gone])
    _replace(target / "__init__.py", [_LISTED.sub(lambda entry: _entry(entry, gone), "".join(_lines("__init__.py")))])
    for path in ("core/declarations.py", "cli/words.py"):
        text = _OPTION.sub(lambda option: "" if _file(option[1]) in gone else option[0], "".join(_lines(path)))
        kept = [one for one in text.splitlines(keepends=True) if not _declared(one) & gone]
        _replace(target / path, kept)
    kept = [line for line in _lines("pyproject.toml") if not _package(line) & gone]
    _replace(target / "pyproject.toml", kept)


def _all_files(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if folder == ROOT and (entry.name.startswith(".") or entry.name in {"build", "dist", "rbtool-demo"}):
            continue
        if entry.is_dir():
            yield from _all_files(entry)
        else:
            yield entry


def _lines(path: str) -> list[str]:
    return (ROOT / path).read_text(encoding="utf-8").splitlines(keepends=True)


def _replace(path: Path, lines: list[str]) -> None:
    path.unlink()
    path.write_text("".join(lines), encoding="utf-8")


def _entry(entry: re.Match[str], gone: Collection[str]) -> str:
    """Return an entry of the table of public names without those whose files are gone."""
    names = ast.literal_eval(entry[2]).split()
    left = [name for name in names if _public()[name] not in gone]
    return entry[0] if left == names else f'{entry[1]}"{" ".join(left)}",\n' if left else ""


def _declared(line: str) -> set[str]:
    """Return the file that a line of `LEAVES` in core/declarations.py, or of `VERBS` in cli/words.py, declares."""
    if found := _DECLARED.fullmatch(line):
        return {_file(found[1])}
    found = re.fullmatch(r' {8}"([a-z]+)": Verb\(.*\n', line)
    return set() if found is None else {f"cli/{found[1]}.py"}


def _file(module: str) -> str:
    """Return the file of a module, without `rbtool.` in front of its name."""
    return f"{module.replace('.', '/')}.py"


def _package(line: str) -> set[str]:
    """Return the file of the package that a line of pyproject.toml lists, by itself or for its data."""
    found = re.match(r' *"rbtool\.([\w.]+)"[,\s]', line)
    return set() if found is None else {f"{found[1].replace('.', '/')}/__init__.py"}


def missing_declarations() -> list[str]:
    """Return the declared files that do not exist."""
    paths = ("core/declarations.py", "cli/words.py")
    files = {file for path in paths for line in _lines(path) for file in _declared(line)}
    files |= {_file(option[1]) for option in _OPTION.finditer("".join(_lines(paths[0])))}
    return [file for file in sorted(files) if not (ROOT / file).is_file()]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["edges"]:
            for edge in edges():
                print(*edge)
        case ["copy", folder, *names]:
            copy(Path(folder), leaves() if names == ["all"] else names)
        case _:
            for name in leaves():
                print(name, ", ".join(sorted(needs()[name])), sep=": ")
