"""Programs as options, TOML and JSON, cut into blocks or sent to a process; and operations of other packages."""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from scale_reward import ScaleReward

import rbtool
from rbtool.core.declarations import OPERATION_OPTIONS
from rbtool.core.errors import DatasetNotFoundError, SchemaError, UsageError
from rbtool.core.preprocess.operations.base import BoundOperation, FieldChanges, Fields, LazyColumn, RowOperation
from rbtool.core.preprocess.operations.built_in import Constants, NormalizeFields, Where
from rbtool.core.preprocess.operations.program import (
    OPERATIONS,
    Program,
    ProgramProcessor,
    pipeline_program,
    pipeline_text,
    program_of,
    program_of_documents,
)
from rbtool.core.preprocess.processor import Context
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import write_walks
from rbtool.core.testing.operations import sample_block

# Programs as options, as TOML and as JSON: all say the same, and what is not understood is told.

EVERYTHING = {
    "select": ["observation", "action,x"], "exclude": "y", "rename": ["a=b", "c.d=e"], "cast": "observation=float32",
    "cat": "obs=observation.a,observation.b", "normalize": ["observation", "action:min-max", "z:quantile"],
    "flatten": True, "n_step": 3, "gamma": 0.99, "return_to_go": True, "mc_return": True, "clip_reward": "-1:1",
    "filter": "length > 50 and return > 200", "where": "not truncated",
    "episodes": "0:100",
}  # fmt: skip
ORDER = [
    "episodes", "filter", "where", "rename", "cast", "cat", "flatten", "n-step", "return-to-go", "mc-return",
    "clip-reward", "normalize", "select", "exclude",
]  # fmt: skip

OF_LEAVES = {option.name for option in OPERATION_OPTIONS if ":" in (option.target or "")}


def test_options_come_in_a_fixed_order_and_either_spelling():
    names = [operation.name for operation in program_of(EVERYTHING).operations]
    assert list(dict.fromkeys(names)) == ORDER == [name for name in OPERATIONS if name not in OF_LEAVES]
    assert program_of({"n-step": 2, "gamma": 1}) == program_of({"n_step": 2, "gamma": 1.0})
    mapped, written = {"cat": {"o": ["a", "b"]}, "rename": {"x": "y"}}, {"cat": "o=a,b", "rename": ["x=y"]}
    assert program_of(mapped) == program_of(written)
    assert program_of({"select": "a", "exclude": None, "flatten": False, "cast": []}) == program_of({"select": ["a"]})


def test_files_and_json_give_the_same_program(tmp_path):
    program = program_of(EVERYTHING)
    place = tmp_path / "prep.toml"
    place.write_text(pipeline_text(program), encoding="utf-8")
    assert program_of(pipeline=place) == pipeline_program(place) == program
    assert program_of_documents(json.loads(json.dumps(program.describe())), "x") == program


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=40, deadline=None)
@given(st.text(), st.lists(st.tuples(NUMBERS, NUMBERS.map(lambda x: abs(x) or 1.0)), min_size=1), st.integers(0, 9))
def test_every_text_and_number_survives_toml(tmp_path_factory, key, pairs, nan):
    loc, scale = zip(*pairs, strict=True)
    program = Program(
        (Where("x[0] > 1e-7"), NormalizeFields(key, "min-max", (Constants(key, loc, scale, (0, 3), nan, 2),)))
    )
    place = tmp_path_factory.mktemp("toml") / "p.toml"
    place.write_text(pipeline_text(program), encoding="utf-8", errors="surrogatepass")
    assert pipeline_program(place) == program


def test_a_file_may_say_any_order(tmp_path, rows, do, work, apply):
    place = tmp_path / "prep.toml"
    cast = '[[operation]]\nname = "cast"\nkey = "observation"\ndtype = "float16"\n'
    place.write_text(f'[[operation]]\nname = "flatten"\n\n{cast}')
    made = rows([3])
    assert apply(work(made, program_of(pipeline=place)), *made).columns["observation",].dtype == "float16"


@each(
    ("text", "words"),
    [
        ("", "has no operations"),
        ("[[operations]]\n", "'operations', which is unknown; did you mean 'operation'"),
        ("operation = 3", "has no operations"),
        ("[[operation]]\n", "operation 1 has no name"),
        ("[[operation]]\nname = 'casst'\n", "operation 1 is 'casst', which does not exist; did you mean 'cast'"),
        ("[[operation]]\nname = 'cast'\nkey = 'a'\n", r"operation 1 \(cast\) lacks 'dtype'"),
        ("[[operation]]\nname = 'cast'\nkey = 'a'\ndtpe = 'x'\n", r"\(cast\) has 'dtpe', .* did you mean 'dtype'"),
        ("[[operation]]\nname = 'cast'\nkey = 'a'\ndtype = 3\n", r"\(cast\) has dtype = 3, expected a text"),
        ("[[operation]]\nname = 'cast'\nkey = 'a'\ndtype = 'flaot32'\n", "did you mean 'float32'"),
        ("[[operation]]\nname = 'select'\nkeys = 'a'\n", "keys = 'a', expected a list of texts"),
        ("[[operation]]\nname = 'n-step'\nn = 2.5\ngamma = 1\n", "n = 2.5, expected a whole number"),
        ("[[operation]]\nname = 'n-step'\nn = true\ngamma = 1\n", "n = True, expected a whole number"),
        ("[[operation]]\nname = 'flatten'\nkey = 'a'\n", "'key', which is unknown"),
        ("[[operation]]\nname = 'where'\ncondition = 'a >'\n", "is not understood"),
        ("[[operation]]\nname = 'flatten'\n[[operation]]\nname = 'episodes'\nnumbers = '0'\n", "comes after flatten"),
        (
            "[[operation]]\n".join(["", *["name = 'normalize'\nkey = 'a'\n", "name = 'flatten'\n"] * 2]),
            "normalize comes before and after flatten",
        ),
        (
            "[[operation]]\nname = 'normalize'\nkey = 'a'\nconstants = [{key = 'a', loc = [1], scale = [0]}]\n",
            "scales above 0",
        ),
        ("[[operation]]\nname = 'normalize'\nkey = 'a'\nconstants = [{key = 'a'}]\n", "lacks 'loc'"),
        ("[[operation]\n", "is not TOML"),
    ],
)  # fmt: skip
def test_files_that_are_not_understood_are_refused(tmp_path, text, words):
    place = tmp_path / "prep.toml"
    place.write_text(text)
    with pytest.raises(UsageError, match=words) as raised:
        program_of(pipeline=place)
    assert "prep.toml" in str(raised.value)
    assert "\n" not in raised.value.message or "TOML" in raised.value.message


def test_missing_files_and_misspelt_keys_are_named(tmp_path, rows, work):
    with pytest.raises(DatasetNotFoundError, match="expected a pipeline file"):
        program_of(pipeline=tmp_path / "no.toml")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        program_of(pipeline=tmp_path)
    with pytest.raises(DatasetNotFoundError, match="not found, expected a dataset"):
        program_of(replay=tmp_path / "no")
    place = tmp_path / "prep.toml"
    place.write_text("[[operation]]\nname = 'select'\nkeys = ['acton']\n")
    with pytest.raises(UsageError, match="did you mean 'action'"):
        work(rows([2]), program_of(pipeline=place))


@each(
    ("arguments", "words"),
    [
        (({},), "there are no operations"),
        (({"select": "a"}, "p.toml"), "operations and pipeline are set"),
        ((None, "p.toml", "m.json"), "pipeline and replay are set"),
        (({"sellect": "a"},), "no operation 'sellect'; did you mean 'select'"),
        (({"select": 3},), "expected a text or a list of texts"),
        (({"rename": "ab"},), "it is written old=new"),
    ],
)
def test_options_that_are_not_understood_are_refused(arguments, words):
    with pytest.raises(UsageError, match=words):
        program_of(*arguments)


@each("keys", ["keys = ['action', 'state']", "keys = ['state']"])
def test_a_list_of_fields_that_are_made_later_is_refused(keys, tmp_path, rows, work):
    place = tmp_path / "prep.toml"
    cat = "[[operation]]\nname = 'cat'\nkey = 'state'\nparts = ['action']\n"
    place.write_text(f"[[operation]]\nname = 'select'\n{keys}\n{cat}")
    with pytest.raises(UsageError, match="select names 'state', which cat makes only after it"):
        work(rows([2]), program_of(pipeline=place))


# A program gives the same however its rows are cut into blocks, and the same after a journey to another process.

PROGRAMS = [
    {"select": "observation"},
    {"cast": "observation.position=float32", "cat": "state=observation.position,observation.count"},
    {"flatten": True, "clip_reward": "-1:0.5", "normalize": ["observation", "reward:min-max"]},
    {"n_step": 3, "gamma": 0.9, "normalize": "observation:quantile", "exclude": "episode"},
    {"where": "reward > -0.5", "return_to_go": True, "rename": "observation=state"},
    {"where": ["observation.position[1] < 1 and not done", "1 < 2"], "n_step": 2, "mc_return": True, "gamma": 0.5},
]
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=5)
ENDS = st.lists(st.sampled_from(["terminated", "truncated", "open"]), min_size=1, max_size=3)


@pytest.mark.parametrize("operations", PROGRAMS)
@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, ends=ENDS, seed=st.integers(0, 99), data=st.data())
def test_any_cut_gives_the_same(operations, rows, work, apply, cut, columns, lengths, ends, seed, data):
    made = fields, block = rows(lengths, ends, seed)
    known = work(made, **operations)
    places = np.cumsum(lengths)[:-1].tolist() if known.whole_episodes else list(range(1, sum(lengths)))
    cuts = data.draw(st.lists(st.sampled_from(places))) if places else []
    whole = apply(known, fields, block)
    parts = [apply(pickle.loads(pickle.dumps(known)), fields, part) for part in cut(block, cuts)]
    found, expected = columns(parts), columns([whole])
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].tobytes() == values.tobytes(), name
    assert np.concatenate([part.pieces.rows for part in parts]).sum() == whole.rows
    if known.whole_episodes:
        for column in ("episode", "rows", "begins", "ends"):
            got = np.concatenate([getattr(part.pieces, column) for part in parts])
            assert got.tolist() == getattr(whole.pieces, column).tolist()


def test_no_rows_give_no_rows(rows, work, apply, cut, do):
    made = fields, block = rows([3, 2])
    empty = cut(block, [])[0].__class__(
        {key: column._replace(values=column.values[:0]) for key, column in block.columns.items()},
        block.pieces.of((), (), (), ()), 0,
    )  # fmt: skip
    for operations in PROGRAMS:
        assert apply(work(made, **operations), fields, empty).rows == 0
    made = rows([3, 2])
    found = do(made, where="episode > 5", n_step=2, gamma=0.9, return_to_go=True)
    assert all(not len(values) for values in found.values())


def test_the_source_is_left_as_it_is(rows, work):
    fields, block = rows([4, 3])
    before = {key: column.values.copy() for key, column in block.columns.items()}
    work((fields, block), **PROGRAMS[5])
    assert all(np.array_equal(column.values, before[key]) for key, column in block.columns.items())


# Operations of other packages, found by their entry points.

PIPELINE = '[[operation]]\nname = "scale-reward"\nfactor = 0.5\n\n[[operation]]\nname = "flatten"\n'


def installed(folder: Path, patch: pytest.MonkeyPatch, entry: str) -> Path:
    """Put a distribution with an entry point on the path, and write a pipeline that uses it."""
    info = folder / "scale_reward-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scale-reward\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rbtool.operations]\n{entry}\n")
    patch.syspath_prepend(str(folder))
    pipeline = folder / "pipeline.toml"
    pipeline.write_text(PIPELINE)
    return pipeline


def test_a_pipeline_uses_an_operation_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = installed(tmp_path, monkeypatch, "scale-reward = scale_reward:ScaleReward")
    assert pipeline_program(pipeline).operations[0] == ScaleReward(0.5)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("other = scale_reward:ScaleReward", "'scale-reward', which does not exist"),
        ("scale-reward = pathlib:Path", "pathlib:Path is not an operation"),
    ],
)
def test_a_name_without_an_operation_is_refused(tmp_path: Path, monkeypatch, entry: str, message: str) -> None:
    pipeline = installed(tmp_path, monkeypatch, entry)
    with pytest.raises(UsageError, match=message):
        pipeline_program(pipeline)


def test_results_of_foreign_code_are_known_by_its_fingerprint(tmp_path: Path, monkeypatch) -> None:
    pipeline = installed(tmp_path, monkeypatch, "scale-reward = scale_reward:ScaleReward")
    fields, _ = sample_block()
    foreign = ProgramProcessor(pipeline_program(pipeline), fields)
    assert not foreign.is_described()
    assert foreign.fingerprint() == ProgramProcessor(pipeline_program(pipeline), fields).fingerprint() != ""
    built_in = ProgramProcessor(program_of({"flatten": True}), fields)
    assert built_in.is_described()
    assert built_in.fingerprint() == ""


@dataclass(frozen=True)
class Computes(RowOperation):
    """Returns for the observation what a function makes of it."""

    name: ClassVar[str] = "computes"
    of: ClassVar[Callable[[Any], Any]]

    def plan(self, fields: Fields) -> BoundOperation:
        return FieldChanges.of(fields, [("observation",)], self.declared, self.computed)

    def declared(self, field: Field) -> Field:
        return field

    def computed(self, field: Field, column: LazyColumn) -> Any:
        return type(self).of(column.numbers)


def applied(compute: Callable[[Any], Any]) -> Any:
    """The observations before and after an operation that computes them."""
    kind = type("Kind", (Computes,), {"of": staticmethod(compute)})
    fields, block = sample_block()
    processor = ProgramProcessor(Program((kind(),)), fields)
    made = processor.load(Context(fields, None, 0)).apply(block)  # type: ignore[arg-type]
    return block.columns["observation",].values, made.columns["observation",].values


@each(
    ("compute", "what"),
    [
        (lambda rows: rows.astype(object), "rows of object"),
        (lambda rows: rows.astype(str), "rows of <U32"),
        (lambda rows: rows.astype(bytes), "rows of [|]S32"),
        (lambda rows: rows.astype("datetime64[s]"), "rows of datetime64"),
        (lambda rows: np.ma.masked_less(rows, 0), "rows of masked float32"),
        (lambda rows: rows.tolist(), "an object of type list"),
        (lambda rows: rows.sum(), "an object of type float32"),
        (lambda rows: np.array(rows.sum()), "no rows of float32"),
        (lambda rows: None, "nothing"),
        (lambda rows: LazyColumn.given("observation", "float32", rows.astype(object)), "[|]O"),
        (lambda rows: LazyColumn.given("observation", "float32", rows.astype(">f4")), ">f4"),
        (lambda rows: LazyColumn.given("observation", "float32", rows.astype("f8")), "<f8"),
    ],
)
def test_anything_but_rows_of_numbers_is_refused_by_the_name_of_the_operation(compute, what) -> None:
    with pytest.raises(SchemaError, match=f"computes computed .*{what}.* for 'observation'"):
        applied(compute)


def test_numbers_of_another_byte_order_stay_what_they_are() -> None:
    given, made = applied(lambda rows: rows.astype(">f4"))
    assert made.tobytes() == given.tobytes()


CACHING = """
import functools
from dataclasses import dataclass
from typing import ClassVar

from rbtool.core.preprocess.operations import FieldChanges, RowOperation


@dataclass(frozen=True)
class Doubles(RowOperation):
    name: ClassVar[str] = "doubles"

    def __post_init__(self):
        self.table  # what cannot be pickled is there before workers start

    @functools.cached_property
    def table(self):
        return lambda rows: rows * 2

    def plan(self, fields):
        keys = [("observation",)]
        return FieldChanges.of(fields, keys, lambda field: field, lambda field, column: self.table(column.numbers))


def local():
    class Local(Doubles):
        pass

    return Local


Local = local()
"""


@pytest.fixture
def pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write a module of operations, and a pipeline file that uses one of its classes."""
    (tmp_path / "caching_operations.py").write_text(CACHING)
    write_walks(tmp_path / "walks", [(40, "terminated"), (7, "truncated")])

    def write(kind: str) -> Path:
        pipeline = installed(tmp_path, monkeypatch, f"doubles = caching_operations:{kind}")
        pipeline.write_text('[[operation]]\nname = "doubles"\n')
        return pipeline

    return write


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_an_operation_that_caches_functions_is_sent_to_workers(tmp_path, pipelines, method) -> None:
    pipeline = pipelines("Doubles")
    run = functools.partial(rbtool.preprocess, tmp_path / "walks", pipeline=pipeline)
    here = run(dest=tmp_path / "here", num_workers=0)
    there = run(dest=tmp_path / "there", num_workers=2, start_method=method)
    assert there.content_digest == here.content_digest


def test_an_operation_that_workers_cannot_import_is_refused(tmp_path: Path, pipelines: Callable[[str], Path]) -> None:
    pipeline = pipelines("Local")
    run = functools.partial(rbtool.preprocess, tmp_path / "walks", dest=tmp_path / "made", num_workers=2)
    with pytest.raises(UsageError, match=r"doubles cannot be sent to worker processes: .*Local"):
        run(pipeline=pipeline, start_method="spawn")
    assert not (tmp_path / "made").exists()
    pipeline.write_text(pipeline.read_text() + '\n[[operation]]\nname = "normalize"\nkey = "observation"\n')
    with pytest.raises(UsageError, match="doubles cannot be sent to worker processes"):
        run(pipeline=pipeline)
