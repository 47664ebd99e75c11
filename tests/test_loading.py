"""What is loaded, and under which name, when rbtool is imported and when its command line starts."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import source_tree
from hypothesis import settings

HEAVY = ["h5py", "minari", "tensordict", "torch"]

IMPORT = "import rbtool"
COMMAND = """
import sys
sys.argv = ["rbtool", *{words!r}]
from rbtool.cli.app import main
try:
    main()
except SystemExit as stop:
    assert stop.code in (0, None), stop.code
"""
REPORT = """
import sys
print("loaded:", *(name for name in {heavy!r} if name in sys.modules))
"""

EVERYTHING = """
import importlib, json, pkgutil, sys
import rbtool
for module in pkgutil.walk_packages(rbtool.__path__, "rbtool."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(json.dumps({name: file for name, module in sys.modules.items() if (file := getattr(module, "__file__", None))}))
"""


def python(code: str, folder: Path) -> str:
    """Run code in a fresh interpreter from an empty folder and return what it printed."""
    environment = os.environ | {"RBTOOL_HOME": str(folder / "home"), "RBTOOL_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def misnamed(modules: dict[str, str]) -> dict[str, str]:
    """Return the modules that lie in the checkout and go by another name than rbtool's."""
    aside = [*(source_tree.ROOT / name for name in ("tests", "benchmarks", "docs")), Path(sys.prefix)]
    return {
        name: file
        for name, file in modules.items()
        if Path(file).is_relative_to(source_tree.ROOT)
        and not any(Path(file).is_relative_to(folder) for folder in aside)
        and name != "rbtool"
        and not name.startswith("rbtool.")
    }


@pytest.mark.parametrize(
    "words", [None, ["--help"], ["--version"], ["list"], ["inspect", "--help"], ["check", "--help"]]
)
def test_nothing_heavy_is_loaded(words: list[str] | None, tmp_path: Path) -> None:
    start = IMPORT if words is None else COMMAND.format(words=words)
    printed = python(start + REPORT.format(heavy=HEAVY), tmp_path)
    assert printed.splitlines()[-1].split() == ["loaded:"]


def test_all_modules_go_by_the_name_of_the_package(tmp_path: Path) -> None:
    loaded = json.loads(python(EVERYTHING, tmp_path).splitlines()[-1])
    assert misnamed(loaded) == {}
    expected = {source_tree.module_name(file) for file in source_tree.package_files() if file.name != "__main__.py"}
    assert expected <= loaded.keys()


def test_the_test_run_itself_loads_nothing_twice() -> None:
    loaded = {name: file for name, module in sys.modules.items() if (file := getattr(module, "__file__", None))}
    assert misnamed(loaded) == {}


def test_hypothesis_draws_the_same_examples_in_every_run_unless_others_are_asked_for(
    pytestconfig: pytest.Config,
) -> None:
    asked = pytestconfig.getoption("--hypothesis-profile")
    assert settings.default is not None
    assert settings.default.derandomize is (asked != "random")
    assert settings.default.deadline is None


def test_a_star_import_hides_nothing_of_pythons() -> None:
    import rbtool

    assert not set(rbtool.__all__) & set(dir(builtins))
    assert all(hasattr(rbtool, name) for name in dir(rbtool))
    assert callable(rbtool.list)


def test_the_names_of_the_flags_are_those_of_torchrl() -> None:
    import rbtool

    assert rbtool.DEFAULT_DONE_KEYS == ("done", "truncated", "terminated")
