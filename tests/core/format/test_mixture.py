"""Mixture files: what is written is read again, and what is wrong in one is named in one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases import each
from hypothesis import given
from hypothesis import strategies as st

from rbtool.core.errors import FormatError, UsageError
from rbtool.core.format.mixture import Member, Mixture, read_mixture
from rbtool.core.samplers.ensemble import SamplerEnsemble
from rbtool.core.samplers.uniform import RandomSampler

HEAD = 'format = "rbtool mix"\nversion = 1\n'
TWO = '[[dataset]]\npath = "A"\nweight = 1\n[[dataset]]\nid = "minari:door/human-v2"\nweight = 0.5\n'
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
NUMBERS = st.floats(0, 1e300, allow_subnormal=True)


def written(folder: Path, text: str) -> Path:
    place = folder / "mix.toml"
    place.write_text(text)
    return place


@given(
    names=st.lists(NAMES, min_size=1, max_size=3),
    weight=NUMBERS.filter(bool),
    temperature=st.floats(1e-3, 1e6),
    schema=st.sampled_from(["error", "union", "intersect"]),
)
def test_a_mixture_is_read_as_it_was_written(tmp_path_factory, names, weight, temperature, schema):
    members = tuple(Member(path=name, weight=weight, content_digest="xxh3-128:0") for name in names)
    mixture = Mixture(dataset=members, schema=schema, temperature=temperature)
    assert read_mixture(written(tmp_path_factory.mktemp("m"), mixture.text())) == mixture


def test_names_and_files_that_are_no_mixture_are_refused(tmp_path):
    with pytest.raises(UsageError, match="is not UTF-8, which a TOML file cannot hold"):
        Mixture(dataset=(Member(path="\udcff"),)).text()
    with pytest.raises(FormatError, match="no mixture file is larger"):
        read_mixture(written(tmp_path, "#" * (2 << 20)))


@each(
    ("text", "words"),
    [
        ("", r"is not a mixture of datasets: it has no line format = \"rbtool mix\""),
        ("[[operation]]\nname = 'select'", "is not a mixture of datasets"),
        ("[[dataset", "is not TOML"),
        ("a = " + "[" * 9000, "nested too deeply|is not TOML"),
        ("a = 1" + "0" * 9000, "is not TOML"),
        ("format = 'rbtool mix'\n" + TWO, "has None as version, expected 1"),
        ("format = 'rbtool mix'\nversion = 2\n" + TWO, "has version 2, this rbtool reads up to 1"),
        (HEAD, r"names no datasets, expected \[\[dataset\]\] tables"),
        (HEAD + "dataset = 3", "names no datasets"),
        (HEAD + "dataset = [3]", r"has 3 as dataset\[0\], expected an object"),
        (HEAD + "wieghts = 'size'\n" + TWO, "has 'wieghts', which is unknown; did you mean 'weights'"),
        (HEAD + TWO + "pat = 'B'", "dataset 1 has 'pat', which is unknown; did you mean 'path'"),
        (HEAD + "schema = 'onion'\n" + TWO, "has 'onion' as schema, expected one of error, intersect, union"),
        (HEAD + "temperature = 0\n" + TWO, "has 0 as temperature, expected a number above 0"),
        (HEAD + "temperature = inf\n" + TWO, "has inf as temperature, expected a number above 0"),
        (HEAD + TWO.replace("0.5", "-0.5"), r"has -0.5 as dataset\[1\].weight, expected a number from 0"),
        (HEAD + TWO.replace("0.5", "nan"), "expected a number from 0"),
        (HEAD + TWO.replace("0.5", "'half'"), r"has 'half' as dataset\[1\].weight, expected a number"),
        (HEAD + TWO.replace("0.5", "true"), r"has True as dataset\[1\].weight, expected a number"),
        (HEAD + TWO.replace("0.5", "1" + "0" * 400), "expected a number of double precision"),
        (HEAD + TWO.replace("0.5", "0").replace("1\n[", "0\n["), "has the weight 0 for every dataset"),
        (HEAD + TWO.replace("weight = 1\n", ""), "has no weight for A, and one for others, expected all or none"),
        (HEAD + "weights = 'size'\n" + TWO, "and a weight of a dataset, expected one"),
        (HEAD + TWO + "path = 'B'", "dataset 1 has both path and id, expected one of them"),
        (HEAD + "[[dataset]]", "dataset 0 has neither path nor id"),
        (HEAD + "[[dataset]]\nid = 'door/human-v2'", r"has 'door/human-v2' as dataset\[0\].id, expected source:id"),
        (HEAD + '[[dataset]]\npath = "a\\u0000b"', r"as dataset\[0\].path, expected text"),
    ],
)
def test_errors_in_a_mixture_file_are_named(text, words, tmp_path):
    with pytest.raises(FormatError, match=words) as caught:
        read_mixture(written(tmp_path, text))
    assert str(caught.value).startswith(str(tmp_path / "mix.toml"))
    assert "\n" not in caught.value.message


@given(sizes=st.lists(st.integers(1, 10**9), min_size=3, max_size=3), temperature=st.floats(0.1, 100))
@pytest.mark.parametrize("weights", [None, "size", [0.0, 1e-300, 3.0], [1.0, 1.0, 2.0]])
def test_shares_are_those_of_the_ensemble(weights, sizes, temperature):
    stated = weights if isinstance(weights, list) else [None] * 3
    mixture = Mixture(
        dataset=tuple(Member(path="A", weight=weight) for weight in stated),
        weights="size" if weights == "size" else None, temperature=temperature,
    )  # fmt: skip
    sampler = SamplerEnsemble(*(RandomSampler() for _ in sizes), p=mixture.p(sizes), temperature=temperature)
    np.testing.assert_allclose(mixture.shares(sizes), sampler.shares(sizes), rtol=1e-9, atol=1e-300)
