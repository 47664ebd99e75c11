"""`D4RLExperienceReplay`: the documented constructor, over a loopback server, and what it refuses."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from static_server import StaticServer, mirror
from table_files import after_final_step, flat, plain_rows, random_episodes, write_d4rl

import rbtool
from rbtool import D4RLExperienceReplay
from rbtool.converters.d4rl.reader import dataset_named
from rbtool.core.errors import DatasetNotFoundError, UsageError

ID = "maze2d-umaze-v1"
COLUMNS = flat(random_episodes((5, 4, 7, 3), ends=("timeout", "terminal", "timeout", "none")))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StaticServer]:
    content = write_d4rl(tmp_path / "a.hdf5", COLUMNS).read_bytes()
    served = StaticServer({f"base/{dataset_named(ID).file}": content})
    with mirror(served, "D4RL_URL", monkeypatch, tmp_path / "store") as running:
        yield running


def test_rows_are_those_of_the_file_and_nothing_is_zero_or_shifted_at_ends(server: StaticServer) -> None:
    data = D4RLExperienceReplay(ID, 32)
    rows = data[:]
    expected = after_final_step(plain_rows(COLUMNS, [4, 8, 15]))
    assert len(data) == len(expected) == 16
    assert rows["next", "observation"].numpy().tobytes() == b"".join(row["next"].tobytes() for row in expected)
    assert rows["next", "reward"].shape == (16, 1)
    assert rows["next", "done"][:, 0].tolist() == [row["last"] for row in expected]
    assert not {"done", "terminated", "truncated", "reward"} & set(rows.keys())
    assert bool((rows["next", "observation"] != 0).any(-1).all())
    assert data.sample().batch_size == (32,)
    assert len(pickle.loads(pickle.dumps(data))) == 16


def test_it_is_opened_again_without_the_network(server: StaticServer, monkeypatch: pytest.MonkeyPatch) -> None:
    D4RLExperienceReplay("maze2d-umaze", 4)
    server.asked.clear()
    monkeypatch.setenv("RBTOOL_OFFLINE", "1")
    for download in (True, False):
        assert len(D4RLExperienceReplay(ID, 4, download=download)) == 16
    assert len(rbtool.load_dataset(f"d4rl:{ID}")) == 16
    assert server.asked == []


def test_arguments_by_position_and_those_without_effect(server: StaticServer, tmp_path: Path) -> None:
    sampler = rbtool.SamplerWithoutReplacement()
    data = D4RLExperienceReplay(
        ID, 4, sampler, None, None, False, None, None, False, True, True, False, False, True, tmp_path / "mine"
    )
    assert data.data_path == tmp_path / "mine" / ID
    assert sorted(np.concatenate([batch["episode"].numpy() for batch in data]).tolist())[:3] == [0, 0, 0]
    split = D4RLExperienceReplay(ID, 2, split_trajs=True, root=tmp_path / "mine")
    assert (len(split), split[:]["mask"].sum().item()) == (4, 16)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"terminate_on_end": True}, "terminate_on_end=True is not supported"),
        ({"use_truncated_as_done": False}, "use_truncated_as_done=False is not supported"),
        ({"max_episode_steps": 3}, "max_episode_steps would be for an environment"),
        ({"download": "again"}, "expected True, False or 'force'"),
    ],
)
def test_what_chooses_a_wrong_behaviour_is_refused(
    server: StaticServer, arguments: dict[str, object], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        D4RLExperienceReplay(ID, 4, **arguments)  # type: ignore[arg-type]
    assert server.asked == []


def test_what_is_not_there(server: StaticServer) -> None:
    with pytest.raises(FileNotFoundError, match="download is False"):
        D4RLExperienceReplay(ID, 4, download=False)
    with pytest.raises(DatasetNotFoundError, match="among 179"):
        D4RLExperienceReplay("maze2d-umaze-v9", 4)
    assert len(D4RLExperienceReplay.available_datasets) == 179
