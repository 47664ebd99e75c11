"""`rbtool migrate`: every form of import, what stays, what is noted, files as they are kept, and TorchRL's pages."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import stat
from pathlib import Path

import pytest
from cases import each
from processes import Interpreter

import rbtool
from rbtool.core.errors import DatasetNotFoundError, UsageError
from rbtool.core.torchrl_classes import MISSING, MODULES
from rbtool.core.verbs.migrate import DIFFERENT, MigratedFile

TESTS = Path(__file__).parents[2]
BLOCKS, README = TESTS / "data/torchrl_reference/blocks.txt", TESTS.parent / "README.md"


def migrated(path: Path, source: str) -> MigratedFile:
    """Migrate a file with this text; nothing is said of one without anything of TorchRL's."""
    path.write_bytes(source.encode())
    result = rbtool.migrate(path)
    return result.files[0] if result.files else MigratedFile(path=path, changed=False)


@each(
    ("before", "after"),
    [
        ("from torchrl.data import ReplayBuffer", "from rbtool import ReplayBuffer"),
        ("from torchrl.data.replay_buffers.samplers import SliceSampler as S", "from rbtool import SliceSampler as S"),
        (
            "from torchrl.data import (\n    Storage,  # kept\n    Writer,\n)  # noqa",
            "from rbtool import (\n    Storage,  # kept\n    Writer,\n)  # noqa",
        ),
        (
            "from torchrl.data import (\n    Storage,  # kept\n    StoreStorage,\n    Writer,  # too\n)",
            (
                "from rbtool import (\n    Storage,  # kept\n    Writer,  # too\n)\n"
                "from torchrl.data import (\n    StoreStorage,\n)"
            ),
        ),
        (
            "def f():\n    from torchrl.data import Storage, StoreStorage\n",
            "def f():\n    from rbtool import Storage\n    from torchrl.data import StoreStorage\n",
        ),
        (
            "if x: from torchrl.data import Storage, StoreStorage",
            "if x: from rbtool import Storage; from torchrl.data import StoreStorage",
        ),
        (
            "if TYPE_CHECKING:\n\tfrom torchrl.data import Storage\n\timport torchrl.data as d\nx: d.Writer",
            "if TYPE_CHECKING:\n\tfrom rbtool import Storage\n\timport rbtool as d\nx: d.Writer",
        ),
        ("from torchrl import data, envs\ndata.Writer", "import rbtool as data\nfrom torchrl import envs\ndata.Writer"),
        (
            "from torchrl.data import replay_buffers as rb\nrb.samplers.SliceSampler()",
            "import rbtool as rb\nrb.SliceSampler()",
        ),
        (
            "import torchrl.data.datasets, os\ntorchrl.data.datasets.minari_data.MinariExperienceReplay.available",
            "import rbtool\nimport os\nrbtool.MinariExperienceReplay.available",
        ),
        (
            "import torchrl.data as d\nd.Writer, d.StoreStorage",
            "import rbtool\nimport torchrl.data as d\nrbtool.Writer, d.StoreStorage",
        ),
        (
            "import torchrl\ntorchrl.data.Writer, torchrl.envs.GymEnv",
            "import rbtool\nimport torchrl\nrbtool.Writer, torchrl.envs.GymEnv",
        ),
        ("import torchrl\ntorchrl.data.Writer", "import rbtool\nrbtool.Writer"),
        ("import torchrl as t\nt.data.Writer, t.envs", "import rbtool\nimport torchrl as t\nrbtool.Writer, t.envs"),
        (
            "import torchrl as t, torchrl.envs as e\nt.data.Writer",
            "import rbtool\nimport torchrl.envs as e\nrbtool.Writer",
        ),
        ("import torchrl.envs\ntorchrl.data.Writer", "import rbtool\nimport torchrl.envs\nrbtool.Writer"),
        ("import torchrl.data as d\ngetattr(d, 'Writer')", "import rbtool as d\ngetattr(d, 'Writer')"),
        ("import torchrl.data\nf(torchrl.data)", "import rbtool\nf(rbtool)"),
        (
            "if x:\n    import torchrl.data\nelse:\n    import torchrl.data\ntorchrl.data.Writer, torchrl.data.Nothing",
            (
                "if x:\n    import rbtool\n    import torchrl.data\nelse:\n    import rbtool\n    import torchrl.data\n"
                "rbtool.Writer, torchrl.data.Nothing"
            ),
        ),
        ("from torchrl.data import *\nWriter(__file__)", "from rbtool import Writer\nWriter(__file__)"),
        (
            "from torchrl.data import *\nfrom torchrl.envs import *\nWriter(Compose)",
            "from torchrl.data import *\nfrom rbtool import Writer\nfrom torchrl.envs import *\nWriter(Compose)",
        ),
        ("from torchrl.data import *\n", "from rbtool import *\n"),
        ("# -*- coding: latin-1 -*-\r\nimport torchrl.data\r\nx = 'torchrl'\r\n", None),
        ("\ufeffimport torchrl.data", "\ufeffimport rbtool"),
        ("from torchrl.data import (\r\n  Writer,\r\n  StoreStorage)\r\n", None),
    ],
)
def test_an_import_is_rewritten(before: str, after: str | None, tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    assert migrated(path, before).changed
    text = path.read_bytes().decode()
    assert after is None or text == after
    assert text.count("\r") == before.count("\r") + text.count("\n") - before.count("\n") if "\r" in before else True
    ast.parse(text.removeprefix("\ufeff"))
    assert not migrated(path, text).changed


@each(
    "source",
    [
        "from torchrl.envs import GymEnv\nimport torchrl",
        "from torchrl.data import StoreStorage as S, _private\n",
        "import torchrl.data as d\nd.StoreStorage",
        "from torchrl import envs\n",
        "from .torchrl.data import Writer\nfrom torchrl.database import Writer",
        "def f(torchrl):\n    return torchrl.data.Writer\n",
        "import torchrl.data.unheard_of as d\nd.Writer",
        "'''As `torchrl.data.Writer` does.'''\n",
    ],
)
def test_what_is_torchrls_stays(source: str, tmp_path: Path) -> None:
    file = migrated(tmp_path / "code.py", source)
    assert (file.changed, file.names, (tmp_path / "code.py").read_text()) == (False, (), source)


def test_what_is_left_is_listed_line_by_line(tmp_path: Path) -> None:
    file = migrated(
        tmp_path / "code.py",
        "import torchrl.data as d\nfrom torchrl.data import StoreStorage, SliceSampler\nimport torchrl.data.utils\n"
        "d.StoreStorage, d.Unheard, d.SliceSampler, vars(d)\npatch('torchrl.data.Writer')\n",
    )
    found = [(note.line, note.kind, note.name) for note in file.notes]
    assert found == [
        (2, "stays", "torchrl.data.StoreStorage"), (2, "differs", "SliceSampler"),
        (4, "stays", "torchrl.data.Unheard"), (4, "look", "torchrl.data"), (5, "look", "torchrl.data.Writer"),
    ]  # fmt: skip
    assert file.names == ("SliceSampler",)
    assert "import torchrl.data.utils" in (tmp_path / "code.py").read_text()  # for the text
    (note,) = migrated(tmp_path / "code.py", "from torchrl.data import *\nWriter(Unheard)").notes
    assert (note.kind, note.text.endswith(": Unheard")) == ("look", True)


def test_files_are_replaced_at_once_and_keep_mode_and_links(tmp_path: Path, synced: list[str]) -> None:
    code, link, other = tmp_path / "code.py", tmp_path / "link.py", tmp_path / "other.py"
    code.write_text("import torchrl.data\n")
    code.chmod(0o751)
    link.symlink_to(code)
    other.write_text("import torchrl\n")
    before = other.stat()
    assert rbtool.migrate(link, dry_run=True).changed == 1
    assert synced == []
    rbtool.migrate([link, other])
    assert link.is_symlink()
    assert (code.read_text(), stat.S_IMODE(code.stat().st_mode)) == ("import rbtool\n", 0o751)
    assert (other.stat().st_ino, other.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert "file" in synced
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code.py", "link.py", "other.py"]


def test_folders_are_searched_and_one_bad_file_stops_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.py")
    for name in ("a.py", "b.pyi", "in/c.py", ".hidden/d.py", "venv/d.py", "in/__pycache__/d.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import torchrl.data\n")
    (tmp_path / "venv/pyvenv.cfg").touch()
    (tmp_path / "bad.py").write_text("import torchrl.data\ndef f(:\n")
    (tmp_path / "odd.py").write_bytes(b"import torchrl.data\n'\xff'\n")
    (tmp_path / "null.py").write_bytes(b"import torchrl.data\n'\0'\n")
    result = rbtool.migrate(tmp_path)
    assert (result.examined, result.changed) == (7, 3)
    errors = {file.path.name: file.error for file in result.files if file.error}
    assert errors.keys() == {"bad.py", "null.py", "odd.py", "fifo.py"}
    assert errors["fifo.py"] == "it is not a regular file"
    assert errors["bad.py"].startswith("line 2 is not Python: ")
    assert (tmp_path / "in/c.py").read_text() == "import rbtool\n"
    assert (tmp_path / "venv/d.py").read_text() == "import torchrl.data\n"
    with pytest.raises(DatasetNotFoundError):
        rbtool.migrate([tmp_path, tmp_path / "none.py"])


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "libcst", None)
    with pytest.raises(UsageError, match="libcst") as raised:
        rbtool.migrate(tmp_path)
    assert raised.value.hint == "pip install 'rbtool[migrate]'"


def test_the_tables_name_what_is_missing_and_what_is_there() -> None:
    assert MISSING.keys() & set(rbtool.__all__) == set()
    assert DIFFERENT.keys() - set(rbtool.__all__) == set()


# The code blocks of TorchRL's pages -------------------------------------------------------------------

WRONG = {"unit8": "uint8", "Comopse": "Compose", '"_data", ': ""}
FOUND = re.findall(r"^== (.*): (.*)\n((?:.+\n)+)", BLOCKS.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("needs", "block"), [pytest.param(*rest, id=name) for name, *rest in FOUND])
def test_the_blocks_of_torchrls_pages_are_rewritten_and_run(
    needs: str, block: str, tmp_path: Path, interpreter: Interpreter
) -> None:
    code = re.sub(r"^(>>>|\.\.\.) ?", "", block, flags=re.MULTILINE)
    for wrong, right in WRONG.items():
        code = code.replace(wrong, right)
    file = migrated(tmp_path / "code.py", code)
    text = (tmp_path / "code.py").read_text()
    assert (file.changed, "torchrl.data" in text) == (True, False)
    assert {note.kind for note in file.notes} <= {"differs"}
    if needs == "transforms":  # TorchRL's need torchvision, ours have the same names
        text = text.replace("from torchrl.envs", "from rbtool")
    if needs in {"nothing", "transforms"}:
        done = interpreter.run(text, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


# Beside TorchRL ---------------------------------------------------------------------------------------


@pytest.mark.peer
def test_all_modules_and_names_of_torchrl_are_known() -> None:
    spec = importlib.util.find_spec("torchrl")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    files = [file for file in (root / "data").rglob("*.py") if "/_" not in f"/{file.stem}".replace("/__init__", "")]
    names = [".".join(("torchrl", *file.relative_to(root).with_suffix("").parts)) for file in files]
    assert {name.removesuffix(".__init__") for name in names} <= MODULES
    tree = ast.parse((root / "data/__init__.py").read_text(encoding="utf-8"))
    lists = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    listed = set(ast.literal_eval(lists[0]))
    assert listed - set(rbtool.__all__) <= MISSING.keys()
    said = re.search(r"of the (\d+) names listed there, it\s+has (\d+)", README.read_text("utf-8"))
    assert said is not None
    assert (int(said[1]), int(said[2])) == (len(listed), len(listed & set(rbtool.__all__)))


@pytest.mark.slow
@pytest.mark.peer
def test_torchrls_own_scripts_are_rewritten() -> None:
    spec = importlib.util.find_spec("torchrl")
    assert spec is not None
    assert spec.origin is not None
    result = rbtool.migrate(Path(spec.origin).parents[1] / "sota-implementations", dry_run=True)
    assert [file.path for file in result.files if file.error] == []
    assert result.changed > 30
    assert json.dumps([file.diff for file in result.files]).count("+from rbtool import") > 60
