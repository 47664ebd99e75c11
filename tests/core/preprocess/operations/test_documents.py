"""Programs as options, as TOML and as JSON: all say the same, and what is not understood is told."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool.core.errors import DatasetNotFoundError, UsageError
from rbtool.core.preprocess.operations.filters import Where
from rbtool.core.preprocess.operations.program import (
    OPERATIONS,
    Program,
    pipeline_program,
    pipeline_text,
    program_of,
    program_of_documents,
)
from rbtool.core.preprocess.operations.values import Constants, NormalizeFields

EVERYTHING = {
    "select": ["observation", "action,x"], "exclude": "y", "rename": ["a=b", "c.d=e"], "cast": "observation=float32",
    "cat": "obs=observation.a,observation.b", "normalize": ["observation", "action:min-max", "z:quantile"],
    "flatten": True, "n_step": 3, "gamma": 0.99, "return_to_go": True, "mc_return": True, "clip_reward": "-1:1",
    "resize": ["image=84x84", "depth=8x9:chw"], "filter": "length > 50 and return > 200", "where": "not truncated",
    "episodes": "0:100",
}  # fmt: skip
ORDER = [
    "episodes", "filter", "where", "rename", "cast", "cat", "flatten", "resize", "n-step", "return-to-go", "mc-return",
    "clip-reward", "normalize", "select", "exclude",
]  # fmt: skip


def test_options_come_in_their_fixed_order():
    names = [operation.name for operation in program_of(EVERYTHING).operations]
    assert list(dict.fromkeys(names)) == ORDER == list(OPERATIONS)


def test_names_of_options_may_be_written_either_way():
    assert program_of({"n-step": 2, "gamma": 1}) == program_of({"n_step": 2, "gamma": 1.0})
    assert program_of({"cat": {"o": ["a", "b"]}, "rename": {"x": "y"}}) == program_of(
        {"cat": "o=a,b", "rename": ["x=y"]}
    )
    assert program_of({"select": "a", "exclude": None, "flatten": False, "cast": []}) == program_of({"select": ["a"]})


def test_a_pipeline_file_gives_the_same_program(tmp_path):
    program = program_of(EVERYTHING)
    place = tmp_path / "prep.toml"
    place.write_text(pipeline_text(program), encoding="utf-8")
    assert program_of(pipeline=place) == pipeline_program(place) == program


def test_json_gives_the_same_program():
    program = program_of(EVERYTHING)
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
    place.write_text(
        '[[operation]]\nname = "flatten"\n\n[[operation]]\nname = "cast"\nkey = "observation"\ndtype = "float16"\n'
    )
    made = rows([3])
    assert apply(work(made, program_of(pipeline=place)), *made).columns["observation",].dtype == "float16"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no operations"),
        ("[[operations]]\n", "'operations', which is unknown; did you mean 'operation'"),
        ("operation = 3", "has no operations"),
        ("[[operation]]\n", "operation 1 has no name"),
        ("[[operation]]\nname = 'casst'\n", "operation 1 is 'casst', which is none; did you mean 'cast'"),
        ("[[operation]]\nname = 'cast'\nkey = 'a'\n", r"operation 1 \(cast\) lacks 'dtype'"),
        ("[[operation]]\nname = 'cast'\nkey = 'a'\ndtpe = 'x'\n", r"\(cast\) has 'dtpe', .* did you mean 'dtype'"),
        ("[[operation]]\nname = 'cast'\nkey = 'a'\ndtype = 3\n", r"\(cast\) has dtype = 3, expected a text"),
        ("[[operation]]\nname = 'cast'\nkey = 'a'\ndtype = 'flaot32'\n", "did you mean 'float32'"),
        ("[[operation]]\nname = 'select'\nkeys = 'a'\n", "keys = 'a', expected a list of texts"),
        ("[[operation]]\nname = 'n-step'\nn = 2.5\ngamma = 1\n", "n = 2.5, expected a whole number"),
        ("[[operation]]\nname = 'n-step'\nn = true\ngamma = 1\n", "n = True, expected a whole number"),
        ("[[operation]]\nname = 'flatten'\nkey = 'a'\n", "'key', which it does not know"),
        ("[[operation]]\nname = 'where'\ncondition = 'a >'\n", "is not understood"),
        ("[[operation]]\nname = 'flatten'\n[[operation]]\nname = 'episodes'\nnumbers = '0'\n", "comes after flatten"),
        (
            "[[operation]]\nname = 'normalize'\nkey = 'a'\nconstants = [{key = 'a', loc = [1], scale = [0]}]\n",
            "scales above 0",
        ),
        ("[[operation]]\nname = 'normalize'\nkey = 'a'\nconstants = [{key = 'a'}]\n", "lacks 'loc'"),
        ("[[operation]\n", "is not TOML"),
    ],
)  # fmt: skip
def test_files_that_are_not_understood(tmp_path, text, words):
    place = tmp_path / "prep.toml"
    place.write_text(text)
    with pytest.raises(UsageError, match=words) as raised:
        program_of(pipeline=place)
    assert "prep.toml" in str(raised.value)
    assert "\n" not in raised.value.message or "TOML" in raised.value.message


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(DatasetNotFoundError, match="expected a pipeline file"):
        program_of(pipeline=tmp_path / "no.toml")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        program_of(pipeline=tmp_path)
    with pytest.raises(DatasetNotFoundError, match="there is no"):
        program_of(replay=tmp_path / "no")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (({},), "there is no operation"),
        (({"select": "a"}, "p.toml"), "operations and pipeline are set"),
        ((None, "p.toml", "m.json"), "pipeline and replay are set"),
        (({"sellect": "a"},), "no operation 'sellect'; did you mean 'select'"),
        (({"select": 3},), "expected a text or a list of them"),
        (({"rename": "ab"},), "it is written old=new"),
    ],
)
def test_options_that_are_not_understood(arguments, words):
    with pytest.raises(UsageError, match=words):
        program_of(*arguments)


def test_a_misspelt_key_in_a_file_is_told_at_once(tmp_path, rows, work):
    place = tmp_path / "prep.toml"
    place.write_text("[[operation]]\nname = 'select'\nkeys = ['acton']\n")
    with pytest.raises(UsageError, match="did you mean 'action'"):
        work(rows([2]), program_of(pipeline=place))


@pytest.mark.parametrize("keys", ["keys = ['action', 'state']", "keys = ['state']"])
def test_a_list_that_names_what_is_made_later_is_told_so(keys, tmp_path, rows, work):
    place = tmp_path / "prep.toml"
    cat = "[[operation]]\nname = 'cat'\nkey = 'state'\nparts = ['action']\n"
    place.write_text(f"[[operation]]\nname = 'select'\n{keys}\n{cat}")
    with pytest.raises(UsageError, match="select names 'state', which cat makes only after it"):
        work(rows([2]), program_of(pipeline=place))
