"""Whatever Minari writes, the conversion gives back, and the size of pieces does not show in it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from minari_oracle import assert_equals_minari, make_episode, write_minari

from rbtool.converters.minari.reader import MinariReader
from rbtool.core.verbs.convert import convert

NAMES = st.text("abcxyz_ .-é", min_size=1, max_size=6).filter(lambda name: name.strip(". "))
DTYPES = st.sampled_from(["uint8", "int16", "int32", "uint64", "float16", "float32", "float64"])
SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)

LEAVES: st.SearchStrategy[spaces.Space[Any]] = st.one_of(
    st.builds(lambda shape, dtype: spaces.Box(0, 9, shape, np.dtype(dtype).type), SHAPES, DTYPES),
    st.builds(spaces.Discrete, st.integers(1, 9), start=st.integers(-5, 5)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 5), min_size=1, max_size=4)),
    st.builds(spaces.MultiBinary, st.integers(1, 9)),
    st.builds(lambda size: spaces.Text(size, min_length=0, charset="aé→𝄞 "), st.integers(1, 9)),
)
SPACES: st.SearchStrategy[spaces.Space[Any]] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(spaces.Dict, st.dictionaries(NAMES, inner, min_size=1, max_size=3)),
        st.builds(spaces.Tuple, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)
INFOS = st.dictionaries(
    NAMES,
    st.sampled_from(["number", "vector", "text", "constant", "nested"]),
    max_size=3,
)


def make_infos(kinds: dict[str, str], rows: int, draw: np.random.Generator) -> dict[str, Any]:
    made: dict[str, Any] = {
        "number": draw.integers(1 << 40, size=rows).tolist(),
        "vector": draw.normal(size=(rows, 3)),
        "text": [f"é{number}" for number in draw.integers(1 << 40, size=rows)],
        "constant": [f"all {rows}"] * rows,
        "nested": {"deep": draw.normal(size=rows).tolist()},
    }
    return {name: made[kind] for name, kind in kinds.items()}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    observations=SPACES,
    actions=SPACES,
    infos=INFOS,
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    data_format=st.sampled_from(["hdf5", "arrow", "parquet"]),
    piece_bytes=st.integers(1, 2000),
    seed=st.integers(0, 1 << 30),
)
def test_the_conversion_equals_minari(
    observations: spaces.Space[Any],
    actions: spaces.Space[Any],
    infos: dict[str, str],
    lengths: list[int],
    data_format: str,
    piece_bytes: int,
    seed: int,
) -> None:
    draw = np.random.default_rng(seed)
    episodes = [
        make_episode(observations, actions, steps, draw, infos=make_infos(infos, steps + 1, draw)) for steps in lengths
    ]
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        folder = write_minari(root, "made/any-v0", observations, actions, episodes, data_format=data_format)
        whole = convert(folder, root / "whole")
        assert whole.dropped_keys == ()
        assert assert_equals_minari(root / "whole", folder) > 0
        before, MinariReader.piece_bytes = MinariReader.piece_bytes, piece_bytes
        try:
            assert convert(folder, root / "cut").content_digest == whole.content_digest
        finally:
            MinariReader.piece_bytes = before
