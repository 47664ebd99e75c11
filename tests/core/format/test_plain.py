import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rbtool import FormatError
from rbtool.core.format.memmap.reader import PlainReader, TedReader
from rbtool.core.testing.datasets import write_walks

EPISODES = [(4, "terminated"), (1, "truncated"), (3, "both")]


@pytest.mark.parametrize("drop", [(), ("episode",)])
def test_a_folder_without_manifest_tells_its_episodes(tmp_path: Path, drop: tuple[str, ...]) -> None:
    write_walks(tmp_path / "data", EPISODES)
    TensorDict.load_memmap(tmp_path / "data").exclude(*drop).clone().memmap(tmp_path / "plain")
    with TedReader(tmp_path / "data") as sound, PlainReader(tmp_path / "plain") as plain:
        assert plain.episodes.episode.tolist() == [0, 1, 2]
        assert plain.episodes.end_reason.tolist() == [0, 1, 2]
        np.testing.assert_array_equal(plain.episodes.length, sound.episodes.length)
        np.testing.assert_array_equal(plain.episodes.total_reward, sound.episodes.total_reward)
        for field in plain.fields:
            np.testing.assert_array_equal(plain.read(field.key, 2, 7), sound.read(field.key, 2, 7))


def test_leaves_of_different_lengths_are_no_steps(tmp_path: Path) -> None:
    TensorDict({"a": torch.zeros(3), "b": torch.zeros(4)}, []).memmap(tmp_path / "odd")
    with pytest.raises(FormatError, match="not one row a step"):
        PlainReader(tmp_path / "odd")


def test_episodes_that_cannot_be_told_apart_are_an_error(tmp_path: Path) -> None:
    TensorDict({"a": torch.zeros(3)}, [3]).memmap(tmp_path / "bare")
    with pytest.raises(FormatError, match=r"neither 'episode' nor 'next.done'"):
        _ = PlainReader(tmp_path / "bare").episodes


@pytest.mark.parametrize("shape", [1.5, "3", [-1], [1.5], {"a": 1}])
def test_an_odd_batch_is_refused(shape: object, tmp_path: Path) -> None:
    TensorDict({"a": torch.zeros(3)}, [3]).memmap(tmp_path)
    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"shape": shape}))
    with pytest.raises(FormatError, match="as shape"):
        PlainReader(tmp_path)
