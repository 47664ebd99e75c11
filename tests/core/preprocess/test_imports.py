from __future__ import annotations

import sys
from pathlib import Path

import pytest

import rbtool
from rbtool.core.preprocess.functions import FreshModules, imported_modules

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


@pytest.mark.parametrize(
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
