"""No input ends in "internal error": every verb, on every kind of input, with anything in it changed."""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from rlds_files import METADATA, RICH, record, write_dataset
from rlds_files import random_episode as random_steps
from shard_files import random_dgrl as random_archive
from shard_files import random_openx as random_robot_episodes
from shard_files import random_rows, write_dgrl, write_openx, write_run
from table_files import WRITERS, flat, named, random_episodes

import rbtool
from rbtool.cli import app
from rbtool.core.format.documents import dump_json
from rbtool.core.format.files import digest_bytes

DATA = Path(__file__).parents[1] / "data" / "minari"
MINARI = ("tuple/trunc-v0", "cartpole/scripted-v0")
TABLES = ("hdf5", "npz", "npy", "parquet", "csv")
SMALL = {
    "rllib.jsonl": "rllib/cartpole-v1.jsonl", "rllib": "rllib/cartpole-v1_large/1_000000_000000.parquet",
    "imitation": "imitation/cartpole_expert_4.npz", "d3rlpy": "d3rlpy/tuple.h5", "sb3": "sb3/memory.npz",
    "tianshou": "tianshou/replay_wrapped.hdf5",
    "dapg": "dapg/door-v0_demos_3.pickle",
}  # fmt: skip
KINDS = (
    "ted", "packed", "flat", "nested", "h5", "torchrl", "plain", "d4rl", "isaac", "roboset",
    "ogbench", "vd4rl", "calvin", "lance", "atari", "gen_dgrl", "openx", "rlds", *TABLES, *MINARI, *SMALL,
)  # fmt: skip
IN, OUT = "IN", "OUT"
AS_TABLE = "--map observation=obs,action=act,reward=r --ends dead,late"
VERBS = [
    f"inspect {IN}", f"inspect {IN} --episode 0", f"inspect {IN} --json", f"check {IN}", f"stats {IN}",
    f"sample {IN} --batch 2", f"repair {IN}", f"convert {IN} {OUT}", f"convert {IN} {OUT} --layout packed",
    *(f"export {IN} {OUT} --to {library}" for library in ("npz", "h5", "parquet", "minari", "rlds")),
    *(f"checkpoint save {IN} {OUT} --as {form}" for form in ("flat", "nested", "h5")),
    f"preprocess {IN} --dest {OUT} --cast action=float32 --num-workers 0",
    f"merge {IN} {IN} {OUT}", f"split {IN} --train 0.5 --val 0.5 --dest {OUT}", f"diff {IN} {IN}",
    f"check {IN} --from table {AS_TABLE}", f"convert {IN} {OUT} --from table {AS_TABLE}",
]  # fmt: skip
ODD: list[Any] = [
    None, True, -1, 0, 1 << 70, 1.5, "", "x", "\ud800", "a/../b", [], [[]], {}, {"a": 1}, [None], ["x", "y"],
    [1 << 62, 1 << 62], 10**400, float("nan"), "inf",
]  # fmt: skip
REMOVED = object()
COMMAND = functools.cache(typer.main.get_command)
"""Builds the command once: most of the time that a verb takes in a process where all is imported already."""


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One sound input of every kind."""
    folder = tmp_path_factory.mktemp("originals")
    rbtool.convert(DATA / MINARI[0], folder / "ted")
    rbtool.convert(DATA / MINARI[0], folder / "packed", layout="packed")
    for form in ("flat", "nested", "h5"):
        rbtool.checkpoint.save(folder / "ted", folder / form, form=form)
    rbtool.checkpoint.save(folder / "ted", folder / "torchrl", form="nested", for_library="torchrl")
    shutil.copytree(folder / "ted", folder / "plain", ignore=lambda *_: [".rbtool"])
    shutil.copy(DATA.parent / "d4rl" / "hopper_random-v2.hdf5", folder / "d4rl")
    shutil.copy(DATA.parent / "robomimic" / "isaac_stack_cube.hdf5", folder / "isaac")
    shutil.copytree(DATA.parent / "roboset" / "DAPG(expert)" / "door_v2d-v1", folder / "roboset")
    shutil.copytree(DATA.parent / "ogbench", folder / "ogbench", ignore=shutil.ignore_patterns("*.md"))
    shutil.copytree(DATA.parent / "vd4rl" / "64px", folder / "vd4rl")
    shutil.copytree(DATA.parent / "lance" / "lerobot_lance", folder / "lance")
    shutil.copytree(DATA.parent / "calvin", folder / "calvin", ignore=shutil.ignore_patterns("*.md"))
    write_run(folder / "atari", random_rows((5, 3), tail=4), (4,))
    write_dgrl(folder / "gen_dgrl", random_archive((3, 2)))
    write_openx(folder / "openx", [random_robot_episodes((3, 2)), random_robot_episodes((2,))])
    records = [record(RICH, random_steps(length, RICH), METADATA) for length in (4, 3)]
    write_dataset(folder / "rlds", {"train": [records]}, RICH, METADATA)
    for kind, name in SMALL.items():
        shutil.copy(DATA.parent / name, folder / kind)
    columns = named(flat(random_episodes((4, 3))))
    tables = {kind: WRITERS[kind](folder / f"table_{kind}", columns) for kind in TABLES}
    return {kind: DATA / kind if "/" in kind else tables.get(kind, folder / kind) for kind in KINDS}


def sites(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a document something can be put."""
    yield path
    named = document.items() if isinstance(document, dict) else enumerate(document) if type(document) is list else ()
    for name, part in list(named)[:20]:
        yield from sites(part, (*path, name))


def put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Put a value at a place of a document, or remove what is there."""
    if not path:
        return None if value is REMOVED else value
    inner = document
    for name in path[:-1]:
        inner = inner[name]
    if value is REMOVED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return document


def with_odd_entry(document: Any, chance: random.Random) -> Any:
    """Change one entry of a document, or of a space that it holds as text."""
    value = chance.choice([*ODD, REMOVED])
    spaces = [name for name in ("observation_space", "action_space") if type(document.get(name)) is str]
    if spaces and chance.random() < 0.4:
        name = chance.choice(spaces)
        space = json.loads(document[name])
        document[name] = json.dumps(put(space, chance.choice(list(sites(space))), value))
        return document
    changed = put(document, chance.choice(list(sites(document))), value)
    if isinstance(changed, dict) and "manifest_digest" in changed:
        rest = {name: part for name, part in changed.items() if name != "manifest_digest"}
        changed["manifest_digest"] = digest_bytes(dump_json(rest, sort_keys=True).encode())
    return changed


def damage(place: Path, chance: random.Random) -> str:
    """Change something in one file of an input; say what."""
    files = [place] if place.is_file() else sorted(file for file in place.rglob("*") if file.is_file())
    documents = [file for file in files if file.suffix == ".json"]
    file = chance.choice(documents if documents and chance.random() < 0.6 else files)
    data = bytearray(file.read_bytes())
    if file.suffix == ".json" and chance.random() < 0.85:
        deep = chance.random() < 0.05
        file.write_text("[" * 100_000 if deep else json.dumps(with_odd_entry(json.loads(data), chance)))
    elif chance.random() < 0.1:
        file.unlink()
    elif chance.random() < 0.3:
        file.write_bytes(data[: chance.randrange(len(data) + 1)])
    elif data:
        for _ in range(chance.choice([1, 1, 4, 40])):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
    return file.name


def copy_of(original: Path, place: Path) -> Path:
    copied = shutil.copytree(original, place) if original.is_dir() else shutil.copy(original, place)
    return Path(copied)


def strike(original: Path, work: Path, chance: random.Random, verbs: list[str], capsys: Any) -> None:
    """Damage a copy of an input and run verbs on it: none may end in "internal error"."""
    place, result = copy_of(original, work / "input"), work / "result"
    changed = damage(place, chance)
    for verb in verbs:
        words = [{IN: str(place), OUT: str(result)}.get(word, word) for word in verb.split()]
        code = app._run(words)
        said = capsys.readouterr().err
        assert "internal error" not in said, (changed, verb, said)
        assert code in range(7), (changed, verb, said)
        for left in (place, result) if verb is verbs[-1] else (result,):
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RBTOOL_OFFLINE", "1")
    monkeypatch.setattr(typer.main, "get_command", COMMAND)


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_damaged_inputs(kind: str, originals: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    chance = random.Random(kind)
    for _ in range(2):
        strike(originals[kind], tmp_path, chance, chance.sample(VERBS, 2), capsys)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_many_damaged_inputs(seed: int, kind: str, originals: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    chance = random.Random(f"{kind} {seed}")
    for _ in range(30):
        strike(originals[kind], tmp_path, chance, chance.sample(VERBS, 4), capsys)
