from __future__ import annotations

import functools
import random
import re
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from processes import Interpreter, run_forked

from rbtool.core.errors import RbtoolError, SchemaError
from rbtool.core.open_steps import open_steps
from rbtool.core.preprocess.functions import fingerprint_of
from rbtool.core.preprocess.preprocess import preprocess
from rbtool.core.preprocess.processor import Unit
from rbtool.core.testing.datasets import write_walks

FACTOR = 2


def helper(x: Any) -> Any:
    return x * FACTOR


def made(offset: Any = 1) -> Any:
    return lambda x: helper(x) + offset


@dataclass
class Scale:
    by: Any = 1.0
    done: list[Any] = field(default_factory=list)

    def __call__(self, x: Any) -> Any:
        return x * self.by

    def method(self, x: Any) -> Any:
        return x / self.by


@dataclass(slots=True)
class Slotted:
    by: int


class Point(NamedTuple):
    x: int
    y: int


def kind_of(offset: int, base: type = object) -> type:
    """A class whose methods, and those of its objects, depend on what is around it."""

    class Kind(base):
        def helper(self, x: int) -> int:
            return x + offset

        def __call__(self, x: int) -> int:
            return self.helper(x)

    return Kind


def kind_with(**body: Any) -> type:
    return type("Kind", (), {"__module__": __name__, **body})


def circle() -> Any:
    around: list[Any] = []
    around.append(around)
    return lambda x: around


def different() -> list[Any]:
    """Functions and classes of which no two do the same, made anew by each call."""
    linear = torch.nn.Linear(1, 1).requires_grad_(False).apply(lambda m: m.weight.fill_(1) and m.bias.fill_(2))
    alone: list[Any] = [1, [1, {"a": (2, None)}], {"b", "a", "cc"}, linear, kind_of(5)]
    rows = [np.arange(6).reshape(2, 3), np.arange(12).reshape(2, 6)[:, ::2], torch.arange(6.0), torch.arange(6.0)[2:]]
    numbers: list[Any] = [2.5, np.float32(2), np.float32(3), np.float64(3), torch.float32, torch.float64]
    numbers += [np.dtype("f4"), np.dtype("f8")]
    containers = [
        kind(value)
        for kind in (
            Slotted, slice, timedelta, lambda n: Point(1, n), lambda n: np.array([n, "a"], object),
            lambda n: OrderedDict(a=n), lambda n: defaultdict(int, a=n), lambda n: deque([n]),
        )
        for value in (1, 2)
    ]  # fmt: skip
    texts = [kind(text) for kind in (Counter, Path, re.compile, lambda text: bytearray(text.encode())) for text in "ab"]
    functions = [helper, made, np.sqrt, len, lambda x: x + 1, lambda x: x + 2, lambda x: x.a, lambda x: x.b]
    functions += [lambda x, y=1: x, lambda x, y=2: x, *(functools.partial(helper, y=y) for y in (3, 4))]
    objects = [Scale, Scale(3.0), Scale(4.0), Scale(3.0).method, Scale(4.0).method]
    kinds = [kind_of(1), kind_of(2), kind_of(1)(), kind_of(2)(), kind_of(2)().helper]
    kinds += [
        functools.partial(kind_of(1), y=3),
        kind_of(1, kind_of(3)),
        kind_of(1, kind_of(4)),
        kind_of(1, torch.nn.Module),
    ]
    bodies = ["a", "b", property(lambda self: 1), property(lambda self: 2), staticmethod(lambda: 1)]
    bodies += [staticmethod(lambda: 2), classmethod(lambda cls: 1)]
    closures = map(made, [*alone, *rows, *numbers, *containers, *texts])
    return [*closures, *functions, *objects, *kinds, *(kind_with(key=body) for body in bodies)]


def test_equal_functions_have_equal_fingerprints_and_others_do_not() -> None:
    one, again = (list(map(fingerprint_of, different())) for _ in range(2))
    assert one == again
    assert len(set(one)) == len(one) == 74


def test_globals_count_and_installed_classes_are_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint_of(made())
    monkeypatch.setitem(globals(), "FACTOR", 3)
    assert fingerprint_of(made()) != before
    before = fingerprint_of(kind_of(1, torch.nn.Linear))
    monkeypatch.setattr(torch.nn.Linear, "forward", helper)
    assert fingerprint_of(kind_of(1, torch.nn.Linear)) == before


def test_cycles_and_opaque_objects_have_a_fingerprint() -> None:
    assert fingerprint_of(circle()) == fingerprint_of(circle())
    for one, other in (
        (threading.Lock(), threading.Lock()),
        (np.random.default_rng(), np.random.default_rng()),
        (np.random.RandomState(0).rand, np.random.RandomState(1).rand),
        (torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)),
    ):  # the state of a generator differs between runs and processes
        assert fingerprint_of(made(one)) == fingerprint_of(made(other))

    class Loud:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

        __repr__ = __call__ = __eq__ = __hash__ = __iter__ = __len__ = __reduce__ = __getattr__  # type: ignore[assignment]

    assert len(fingerprint_of(made(Loud()))) == len(fingerprint_of(Loud())) == 64


def test_other_processes_compute_the_same_fingerprint(interpreter: Interpreter) -> None:
    code = (
        "from rbtool.core.preprocess.functions import fingerprint_of\n"
        "names = {'north', 'south', 'east', 'west'}\n"
        "def f(x, y=frozenset('abcdef')):\n    return x in {'k', 'l', 'm', 'n'} and names\n"
        "import dataclasses, enum, torch, tensordict\n"
        "class Colour(enum.Enum):\n    RED = 1\n"
        "class Rows(tensordict.TensorClass):\n    entry: torch.Tensor\n    def paint(self):\n        return Colour\n"
        "@dataclasses.dataclass\nclass Both:\n    x: int = 1\n    names = names\n    def __call__(self):\n"
        "        return Rows\n"
        "before = [fingerprint_of(one) for one in (f, Both, Both(), Rows)]\n"
        "Rows(entry=torch.zeros(2), batch_size=[2]).clone().paint()\n"
        "assert before == [fingerprint_of(one) for one in (f, Both, Both(), Rows)]\n"
        "print(before)"
    )
    here, there = run_forked(code), interpreter.run(code)  # each with its own order of sets
    assert (here.stdout, here.returncode) == (there.stdout, 0), there.stderr


EPISODES = [(1 + (7 * number) % 11, "terminated") for number in range(40)]
CUTS = [(65536, 0), (37, 0), (1, 2), (64, 3)]


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("walks") / "walks"
    write_walks(path, EPISODES)  # type: ignore[arg-type]
    return path


def noise(row: Any) -> Any:
    return row.set("noise", torch.rand(2) + random.random() + np.random.rand())  # noqa: NPY002


def rarely(row: Any) -> Any:
    return row.set("noise", torch.rand(()) if int(row["episode"]) % 13 == 12 else torch.zeros(()))


def crop(td: Any) -> Any:
    start = random.randrange(len(td))
    return td[start : start + 1 + int(torch.randint(0, 5, ()))]


def some(td: Any) -> Any:
    """Nothing of the first episodes, not even keys, then each third one twice, moved."""
    number = int(td["episode"][0])
    if number % 3 or number < 15:
        return td.select()[:0]
    return torch.cat([td, td]).set("moved", torch.rand(2 * len(td)))


@pytest.mark.parametrize(
    ("function", "unit"),
    [
        (noise, "row"),
        pytest.param(rarely, "row", marks=pytest.mark.slow),
        pytest.param(lambda row: row.set("x", row["action"] * 2), "row", marks=pytest.mark.slow),
        (crop, "episode"),
        pytest.param(some, "episode", marks=pytest.mark.slow),
    ],
)
def test_chunks_and_workers_change_nothing(walks, tmp_path, function: Callable[[Any], Any], unit: Unit) -> None:
    results = [
        preprocess(walks, function, tmp_path / str(place), unit=unit, vmap=False if unit == "row" else None,
                   chunk_size=chunk_size, num_workers=workers)
        for place, (chunk_size, workers) in enumerate(CUTS)
    ]  # fmt: skip
    assert len({result.content_digest for result in results}) == 1
    other = preprocess(walks, function, tmp_path / "other", unit=unit, seed=1, num_workers=0)
    assert (other.content_digest == results[0].content_digest) is (function.__name__ == "<lambda>")


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("unit", "change", "error", "message"),
    [
        ("row", lambda row: None, SchemaError, r"step 17\b.*episode 3\b.*it returned None"),
        ("row", lambda row: 1 / 0, RbtoolError, r"step 17\b.*episode 3\b.*ZeroDivisionError"),
        ("row", lambda row: row.set("action", row["action"].double()), SchemaError, r"step 17\b.*came out as float64"),
        ("episode", lambda td: None, SchemaError, r"steps 9 to 12\b.*episode 2\b.*it returned None"),
    ],
)
def test_the_message_names_the_row_and_the_episode(walks, tmp_path, unit, change, error, message, workers) -> None:
    with open_steps(walks) as reader:
        first = float(reader.read(("action",), 17 if unit == "row" else 9, 18)[0, 0])

    def function(td: Any) -> Any:
        return change(td) if float(td["action"].flatten()[0]) == first else td

    with pytest.raises(error, match=message):
        preprocess(walks, function, tmp_path / "new", unit=unit, vmap=None, num_workers=workers, retries=0)
    assert not (tmp_path / "new").exists()
