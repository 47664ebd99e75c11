"""Code in the current folder does not run, but for the module that is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from acting_work import SURROUNDINGS, TASKS, Acting, job_of, surroundings

from rbtool import UsageError
from rbtool.core.engine.pool import WorkerPool
from rbtool.core.engine.tasks import Limits
from rbtool.core.preprocess.functions import find_function
from rbtool.core.testing.datasets import write_walks


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
    done = subprocess.run(
        [sys.executable, *command, "list", "--root", "."], capture_output=True, text=True, check=False
    )
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
    (here / "package_us").mkdir()
    (here / "package_us" / "one.py").write_text(
        "from .two import f\ndef g(x):\n  from . import three\n  return three.f(x)"
    )
    (here / "package_us" / "two.py").write_text("def f(x): return x + 2")
    (here / "package_us" / "three.py").write_text("def f(x): return x + 3")
    if init:
        (here / "package_us" / "__init__.py").touch()
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
