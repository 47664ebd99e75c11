"""Functions of users: how they are found and called, and that nothing else in the current folder runs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import each
from tensordict import TensorDict
from works import SURROUNDINGS, TASKS, Acting, block_of, job_of, started, surroundings, values_of

import rbtool
from rbtool import UsageError
from rbtool.cli.words import VERBS
from rbtool.core.engine.pool import WorkerPool
from rbtool.core.engine.tasks import FunctionFailed, Limits, error_text
from rbtool.core.preprocess.functions import (
    CloudpickleWrapper,
    FreshModules,
    FunctionProcessor,
    PickledFunction,
    find_function,
    imported_modules,
)
from rbtool.core.preprocess.processor import Unit
from rbtool.core.testing.datasets import write_walks


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def prep(folder: Path, text: str) -> Path:
    path = folder / "prep.py"
    path.write_text(text)
    return path


def test_functions_of_files_and_modules_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "function_offset.py").write_text("OFFSET = 40")
    path = prep(tmp_path, "from function_offset import OFFSET\ndef add(x):\n    return x + OFFSET\n")
    function = find_function(f"{path}:add")
    assert (function.label, list(function.inputs())) == ("prep.py:add", ["prep.py", "function_offset.py"])
    assert pickle.loads(pickle.dumps(function.portable())).load()(2) == 42
    monkeypatch.delitem(sys.modules, "function_offset")
    assert find_function("math:sqrt").load()(9) == 3
    assert find_function("os.path:basename").load()("a/b") == "b"
    (tmp_path / "only_here_51.py").write_text("def f(x): return x")
    monkeypatch.chdir(tmp_path)
    assert find_function("only_here_51:f").load()(7) == 7
    del sys.modules["only_here_51"]


def test_a_file_is_run_again_each_time_and_leaves_nothing_next_to_it(tmp_path: Path) -> None:
    path = prep(tmp_path, "def f(x): return 1")
    function, before = find_function(f"{path}:f"), find_function(f"{path}:f").inputs()
    assert function.load()(0) == 1
    prep(tmp_path, "def f(x): return 2")
    assert function.load()(0) == 2
    assert function.inputs() != before
    assert [entry.name for entry in tmp_path.iterdir()] == ["prep.py"]


def test_names_may_have_dots_and_files_dataclasses(tmp_path: Path) -> None:
    text = """
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Scale:
    factor: int = 3
    def __call__(self, x): return x * self.factor
class All:
    scale = Scale()
"""
    assert find_function(f"{prep(tmp_path, text)}:All.scale").load()(5) == 15


@each(
    ("name", "message"),
    [
        ("prep.py", "'prep.py' is not understood"),
        (":f", "':f' is not understood"),
        ("prep.py:", "'prep.py:' is not understood"),
        ("nowhere/prep.py:f", "there is no file nowhere/prep.py"),
    ],
)
def test_names_that_are_not_understood_are_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_function(name)


@each(
    ("text", "name", "message"),
    [
        ("def normalise(x): ...", "normalize", "has no function 'normalize'; did you mean 'normalise'?"),
        ("def normalise(x): ...", "zzz", "has no function 'zzz'; it has normalise"),
        ("import os", "zzz", "has no function 'zzz'$"),
        ("f = 3", "f", "'f' in .* is an int, expected a function"),
        ("def f(x:", "f", "cannot be imported: SyntaxError: "),
        ("import nowhere_51", "f", "cannot be imported: ModuleNotFoundError: No module named 'nowhere_51'"),
        ("1 / 0", "f", "cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_files_without_the_function_are_refused(tmp_path: Path, text: str, name: str, message: str) -> None:
    function = find_function(f"{prep(tmp_path, text)}:{name}")
    with pytest.raises(UsageError, match=message):
        function.load()


def test_functions_that_cannot_be_loaded_or_sent_are_refused() -> None:
    with pytest.raises(UsageError, match=r"module math has no function 'sqrtt'; did you mean 'sqrt'\?"):
        find_function("math:sqrtt").load()
    with pytest.raises(UsageError, match="module nowhere_51 cannot be imported: ModuleNotFoundError"):
        find_function("nowhere_51:f").load()
    lock = threading.Lock()
    with pytest.raises(UsageError, match="cannot be sent to worker processes: TypeError") as caught:
        find_function(lambda x: lock).portable()
    assert "num_workers=0" in caught.value.hint
    function = PickledFunction("there:f", b"cnowhere_51\nf\n.")
    with pytest.raises(UsageError, match="there:f does not load in a worker process: ModuleNotFoundError"):
        function.load()


def test_closures_are_sent_with_what_they_enclose() -> None:
    offset = 5
    function = find_function(lambda x: x + offset)
    assert function.label.endswith("test_closures_are_sent_with_what_they_enclose.<locals>.<lambda>")
    assert function.inputs() == {}
    assert function.load()(1) == 6
    assert pickle.loads(pickle.dumps(function.portable())).load()(1) == 6


@each(
    ("error", "text"),
    [
        (KeyError("x"), "KeyError 'x'"),
        (KeyError(("a", "b")), "KeyError ('a', 'b')"),
        (KeyError("it's no 'key' of this"), "KeyError: it's no 'key' of this"),
        (KeyError(), "KeyError"),
        (ValueError("one\ntwo"), "ValueError: one"),
        (ValueError("y" * 400), f"ValueError: {'y' * 300}…"),
        (StopIteration(), "StopIteration"),
    ],
)
def test_errors_are_shown_in_one_line(error: Exception, text: str) -> None:
    assert error_text(error) == text


@each(("key", "named"), [("('no',)", "'no'"), ("('next', 'no')", "('next', 'no')")])
def test_the_message_of_another_version_of_tensordict_is_understood(key: str, named: str) -> None:
    keys = "_TensorDictKeysView(['a', ('next', 'b'), 'next'],\n    include_nested=True,\n    leaves_only=False)."
    message = f"You are trying to pop key `{key}` which is not in dict without providing default value. Keys={keys}"
    failed = FunctionFailed.of(KeyError(message))
    assert (failed.text, failed.there) == (f"KeyError {named}", ("a", "next.b", "next"))


@each(
    ("act", "text", "there"),
    [
        (lambda td: td["no"], "KeyError 'no'", ("a", "next")),
        (lambda td: td.pop("no"), "KeyError 'no'", ("a", "next")),
        (lambda td: td["next", "no"], "KeyError 'no'", ("b",)),
        (lambda td: td.pop(("next", "no")), "KeyError ('next', 'no')", ("next.b", "a", "next")),
        (lambda td: {"a": 1}["no"], "KeyError 'no'", ()),
        (lambda td: [][0], "IndexError: list index out of range", ()),
    ],
)
def test_missing_keys_are_named_with_the_existing_ones(act, text: str, there: tuple[str, ...]) -> None:
    with pytest.raises(LookupError) as caught:
        act(TensorDict({"a": torch.ones(1), "next": {"b": torch.ones(1)}}))
    failed = pickle.loads(pickle.dumps(FunctionFailed.of(caught.value)))
    assert failed.text == text
    if failed.there != there:  # tensordict 0.14 lists the keys of a failed pop in another way
        assert act.__code__.co_names == ("pop",)
        assert failed.there == ("a", "next.b", "next")


def double(rows: Any) -> Any:
    return rows.set("twice", rows["observation", "x"] * 2)


@each(
    ("unit", "vmap", "arguments"),
    [
        ("step", None, {"unit": "step"}), ("episode", None, {"unit": "episode"}),
        ("row", None, {"unit": "row", "vmap": None}), ("row", False, {"unit": "row", "vmap": False}),
    ],
)  # fmt: skip
def test_the_provenance_has_the_function_and_its_unit(unit: Unit, vmap: bool | None, arguments: dict[str, Any]) -> None:
    work = FunctionProcessor(find_function("math:sqrt"), unit, vmap)
    assert work.arguments() == {"function": "math:sqrt", **arguments}
    assert (work.whole_episodes, work.needs_probing) == (unit == "episode", unit == "row" and vmap is None)


def test_units_that_make_no_sense_are_refused() -> None:
    unit: Any = "steps"
    with pytest.raises(UsageError, match="unit 'steps' is unknown; known: step, row, episode"):
        FunctionProcessor(find_function("math:sqrt"), unit)
    with pytest.raises(UsageError, match="and the unit is step"):
        FunctionProcessor(find_function("math:sqrt"), "step", True)


def test_a_function_is_settled_once_and_known_by_its_files(tmp_path: Path) -> None:
    work = FunctionProcessor(find_function("math:sqrt"), "row").with_probe(True)
    assert (work.arguments()["vmap"], work.needs_probing) == (True, False)
    path = tmp_path / "prep.py"
    path.write_text("from beside import f")
    (tmp_path / "beside.py").write_text("def f(rows): return rows")
    work = FunctionProcessor(find_function(f"{path}:f"))
    assert (list(work.inputs()), work.fingerprint(), work.user_modules()) == (["prep.py", "beside.py"], "", {"beside"})


@each("unit", ["step", "row", "episode"])
def test_a_closure_can_be_sent_and_stays_what_it_is(unit: Unit) -> None:
    offset = 40
    function = find_function(lambda rows: rows.set("more", rows["observation", "y"] + offset))
    work = FunctionProcessor(function, unit, None)
    sent = pickle.loads(pickle.dumps(work.portable()))
    assert (sent.label, sent.arguments(), sent.fingerprint()) == (work.label, work.arguments(), work.fingerprint())
    block = started(sent.function.load(), unit).apply(block_of([2, 3]))
    assert block.columns["more",].values.tolist() == [40, 41, 42, 43, 44]


def test_all_units_agree() -> None:
    results = [
        values_of(started(double, unit, vmap).apply(block_of([4, 1, 3])))
        for unit, vmap in (("step", None), ("row", False), ("row", True), ("episode", None))
    ]
    assert all(result == results[0] for result in results)
    assert results[0]["twice",] == ("float32", [[2 * step, 2 * step * step] for step in range(8)])


def test_an_edited_module_is_another_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an unfinished run is compared with: a module in the folder, or on the import path, with its package."""
    monkeypatch.chdir(tmp_path)
    for name in ("alone_51.py", "pack_51/__init__.py", "pack_51/deep.py", "pack_51/near.py", "path/on_path_51.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "pack_51/deep.py").write_text("import alone_51\nfrom . import near\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path / "path")
    modules = ("alone_51", "pack_51.deep", "on_path_51")
    parts = {"alone_51.py": "alone_51", "pack_51/near.py": "pack_51.deep", "path/on_path_51.py": "on_path_51"}
    for file, changed in parts.items():
        before = {name: find_function(f"{name}:f").fingerprint() for name in modules}
        (tmp_path / file).write_text(f"x = {file!r}")
        after = {name: find_function(f"{name}:f").fingerprint() for name in modules}
        assert {name for name in modules if before[name] != after[name]} == {changed}
    assert [find_function(f"{name}:f").fingerprint() for name in ("json", "torch.nn", "nowhere_51")] == [""] * 3


FILES = ("helper.py", "other.py", "pack/__init__.py", "pack/deep.py", "pack/inner/__init__.py", "pack/inner/leaf.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (*FILES, "space/part.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


def found(folder: Path, text: str | bytes) -> list[str]:
    (folder / "prep.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(imported_modules(folder / "prep.py"))


@each(
    ("text", "names"),
    [
        ("import helper", ["helper"]),
        ("import helper as h, other, nowhere_51, sys", ["helper", "other"]),
        ("from helper import x", ["helper"]),
        ("import pack.deep", ["pack", "pack.deep"]),
        ("from pack import inner, value", ["pack", "pack.inner"]),
        ("from pack.inner import leaf", ["pack", "pack.inner", "pack.inner.leaf"]),
        ("from pack import *", ["pack", "pack.deep", "pack.inner"]),
        ("import space.part", ["space.part"]),
        ("def f(td):\n    import helper\n", ["helper"]),
        ("try:\n    import gone_51\nexcept ImportError:\n    import other\n", ["other"]),
        ("import prep", ["prep"]),
        ("from . import helper", []),
        ("import helper.no.further", ["helper"]),
        ("x = 'import helper'", []),
        ("import helper\ndef f(:", []),
        ("# coding: latin-1\nx = '\xe9'\nimport helper".encode("latin-1"), ["helper"]),
        ("import helper\nx = '\\d'", ["helper"]),
        (b"import helper\0", []),
    ],
)
def test_statements_lead_to_files_of_the_folder(folder: Path, text: str, names: list[str]) -> None:
    assert found(folder, text) == names


@pytest.mark.parametrize(
    ("module", "text", "names"),
    [
        ("helper.py", "import other", ["helper", "other"]),
        ("helper.py", "import prep, helper", ["helper", "prep"]),
        ("pack/deep.py", "from . import inner", ["pack", "pack.deep", "pack.inner"]),
        ("pack/deep.py", "from .inner.leaf import x", ["pack", "pack.deep", "pack.inner", "pack.inner.leaf"]),
        ("pack/__init__.py", "from .inner import leaf", ["pack", "pack.deep", "pack.inner", "pack.inner.leaf"]),
        ("pack/deep.py", "from .. import helper", ["pack", "pack.deep"]),
    ],
)
def test_files_lead_to_further_files(folder: Path, module: str, text: str, names: list[str]) -> None:
    (folder / module).write_text(text)
    start = "import helper" if module == "helper.py" else "import pack.deep"
    assert found(folder, start) == names


def test_modules_are_set_aside_and_put_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "set_aside_51.py").write_text("VALUE = 1")
    monkeypatch.syspath_prepend(str(folder))
    import set_aside_51

    before = list(sys.path)
    fresh = FreshModules(frozenset({"set_aside_51", "rbtool", "sys", "numpy"}))
    assert "set_aside_51" not in sys.modules
    assert sys.modules["rbtool"] is rbtool
    assert {"sys", "numpy"} <= sys.modules.keys()
    sys.path.insert(0, "/nowhere")
    for _ in range(2):
        fresh.restore()
        assert sys.modules.pop("set_aside_51") is set_aside_51
        assert sys.path == before


# Code in the current folder does not run, but for the module that is named.


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_import_nothing_from_it(planted: Path, tmp_path: Path, method: str) -> None:
    write_walks(tmp_path / "walks", [(20, "terminated")])
    with WorkerPool(job_of(tmp_path / "walks", Acting(surroundings)), 1, Limits(), method) as pool:
        found = pool.call("measure", TASKS[0])
    assert found.pop("pid") != os.getpid()
    assert found == SURROUNDINGS
    assert not planted.exists()


@pytest.mark.parametrize("command", [["-m", "rbtool"], ["-mrbtool"], [str(Path(sys.executable).with_name("rbtool"))]])
def test_the_command_imports_nothing_from_it(planted: Path, command: list[str]) -> None:
    words = ["list", "--root", "."] if "list" in VERBS else ["--help"]
    done = subprocess.run([sys.executable, *command, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, planted.exists()) == (0, False), done.stderr


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "beside_us.py").write_text("OFFSET = 2")
    return tmp_path


def test_only_the_named_module_comes_from_it(here: Path) -> None:
    (here / "named_us.py").write_text("import beside_us\ndef f(x): return x + beside_us.OFFSET")
    before = list(sys.path), list(sys.meta_path)
    with pytest.raises(UsageError, match=r"module named_us cannot be imported: .*'beside_us'") as caught:
        find_function("named_us:f").load()
    assert (sys.path, sys.meta_path) == before
    assert caught.value.hint == "name the file, which also makes the modules in its folder importable: named_us.py:f"
    assert find_function("named_us.py:f").load()(5) == 7


@pytest.mark.parametrize("init", [True, False])
def test_a_package_comes_with_its_modules(here: Path, init: bool) -> None:
    package = here / "package_us"
    package.mkdir()
    (package / "one.py").write_text("from .two import f\ndef g(x):\n  from . import three\n  return three.f(x)")
    (package / "two.py").write_text("def f(x): return x + 2")
    (package / "three.py").write_text("def f(x): return x + 3")
    if init:
        (package / "__init__.py").touch()
    assert find_function("package_us.one:f").load()(5) == 7
    assert find_function("package_us.one:g").load()(5) == 8


def test_a_folder_of_data_is_not_taken_for_an_installed_package(here: Path) -> None:
    (here / "wave").mkdir()
    sys.modules.pop("wave", None)
    assert callable(find_function("wave:open").load())


def test_the_folder_is_the_one_where_it_was_named(here: Path) -> None:
    (here / "named_us.py").write_text("def f(x): return x")
    function = find_function("named_us:f")
    os.chdir("/")
    assert function.load()(5) == 5


def test_any_function_can_be_pickled_in_a_wrapper() -> None:
    factor = 3

    def scaled(number: int, *, more: int = 0) -> int:
        """Scale."""
        return factor * number + more

    wrapper = CloudpickleWrapper(scaled)
    assert (wrapper(2, more=1), wrapper.__name__, wrapper.__doc__) == (7, "scaled", "Scale.")  # type: ignore[attr-defined]
    copied = pickle.loads(pickle.dumps(wrapper))
    assert (type(copied), copied(2)) == (CloudpickleWrapper, 6)
    assert CloudpickleWrapper(wrapper) is wrapper
    with pytest.raises(TypeError, match="expected a function"):
        CloudpickleWrapper(3)  # type: ignore[arg-type]
