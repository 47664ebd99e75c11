"""`load_dataset` of a mixture: an ensemble whose batches are those of the datasets, nothing else."""

from __future__ import annotations

import pickle
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import rbtool
from rbtool.core.errors import UsageError
from rbtool.core.testing.datasets import write_walks

WALKS = {
    "ragged": [(4, "open"), (1, "terminated"), (3, "truncated"), (1, "both")],
    "ones": [(1, "terminated"), (1, "open"), (1, "truncated")],
    "long": [(30, "open")],
}


@pytest.fixture(params=["ted", "packed"])
def mixed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A mixture of three datasets, of which one or none is packed, with the weights 5, 3 and 0."""
    for name, walks in WALKS.items():
        write_walks(tmp_path / name, walks)
    rbtool.convert(tmp_path / "long", tmp_path / "packed", layout=request.param)
    rbtool.mix([tmp_path / name for name in ("ragged", "packed", "ones")], tmp_path / "m.toml", p=[5, 3, 0])
    return tmp_path / "m.toml"


def members_of(path: Path) -> list[rbtool.ReplayBuffer]:
    return [rbtool.load_dataset(member.path) for member in rbtool.inspect(path).members]


def test_every_row_is_one_of_the_dataset_that_is_named(mixed):
    members, buffer = members_of(mixed), rbtool.load_dataset(mixed, 64, seed=1)
    batch = buffer.sample()
    assert batch.batch_size == torch.Size([64])
    for row, source, index in zip(batch, batch["source_id"].tolist(), batch["index", "index"].tolist(), strict=True):
        found = members[source][index]
        for key in found.keys(True, True):
            assert torch.equal(row[key], found[key]), key
    counts = np.bincount(batch["source_id"], minlength=3)
    assert counts.tolist() == [40, 24, 0]


def test_the_same_seed_gives_the_same_batches_and_those_of_sample(mixed):
    one, other = (rbtool.load_dataset(mixed, 16, seed=7, prefetch=ahead) for ahead in (None, 3))
    first = one.sample()
    assert tuple(first["index", "index"].tolist()) == rbtool.sample(mixed, 16, seed=7).indices
    assert torch.equal(other.sample()["observation"], first["observation"])
    assert torch.equal(other.sample()["observation"], one.sample()["observation"])


@pytest.mark.parametrize("slice_len", [1, 3, 8])
def test_slices_stay_in_their_episode(mixed, slice_len):
    sampler = rbtool.SliceSampler(slice_len=slice_len, strict_length=False, pad_output=True)
    batch = rbtool.load_dataset(mixed, 8 * slice_len, seed=0, sampler=sampler).sample()
    episodes, sources = (batch[key].reshape(-1, slice_len) for key in ("episode", "source_id"))
    steps = batch["index", "index"].reshape(-1, slice_len)
    assert (episodes == episodes[:, :1]).all()
    assert (sources == sources[:, :1]).all()
    assert set(steps.diff(dim=1).unique().tolist()) <= {0, 1}
    given = rbtool.sample(mixed, 8 * slice_len, seed=0, sampler="slice", slice_len=slice_len, pad=True)
    assert given.indices == tuple(batch["index", "index"].tolist())
    assert sum(one.length + one.padding for one in given.slices) == 8 * slice_len


def test_each_dataset_gets_its_own_copy_of_the_sampler(mixed):
    sampler = rbtool.SamplerWithoutReplacement()
    buffer = rbtool.load_dataset(mixed, 4, sampler=sampler, seed=0)
    assert len({id(buffer[number].sampler) for number in range(3)}) == len(buffer) == 3
    with pytest.raises(UsageError, match="has weights of its own"):
        rbtool.load_dataset(mixed, 4, sampler=rbtool.SamplerEnsemble(sampler, sampler, sampler))


def test_arguments_have_the_meaning_that_they_have_for_a_dataset(mixed):
    collated = rbtool.load_dataset(mixed, 8, seed=0, collate_fn=lambda rows: rows.select("action")).sample()
    assert set(collated.keys()) == {"action", "index", "source_id"}
    changed = rbtool.load_dataset(mixed, 8, seed=0, transform=lambda rows: rows.set("n", rows["action"].sum(-1)))
    assert changed.sample()["n"].shape == (8,)
    rbtool.load_dataset(mixed, verify=True)
    with pytest.raises(UsageError, match="split_trajs pads all trajectories to one length"):
        rbtool.load_dataset(mixed, split_trajs=True)
    with pytest.raises(UsageError, match="batch_size"):
        rbtool.load_dataset(mixed, batch_size=0)


def test_without_a_seed_workers_draw_different_batches_and_a_copy_too(mixed):
    buffer = rbtool.load_dataset(mixed, 32)
    batches = islice(DataLoader(buffer, batch_size=None), 2)
    drawn = [batch["index", "index"].tolist() for batch in batches]
    assert drawn[0] != drawn[1]
    copy = pickle.loads(pickle.dumps(buffer))
    assert copy.sample()["source_id"].bincount().tolist() == [20, 12]


def test_weights_change_in_training(mixed):
    buffer = rbtool.load_dataset(mixed, 30, seed=0)
    buffer.p = [0, 0, 1]
    assert set(buffer.sample()["source_id"].tolist()) == {2}


def test_a_mixture_in_a_mixture_keeps_its_shares(mixed, tmp_path):
    write_walks(tmp_path / "new", [(9, "open")])
    rbtool.mix([mixed, tmp_path / "new"], tmp_path / "n.toml", p=[1, 1])
    batch = rbtool.load_dataset(tmp_path / "n.toml", 160, seed=0).sample()
    assert np.bincount(batch["source_id"], minlength=4).tolist() == [50, 30, 0, 80]
    assert rbtool.sample(tmp_path / "n.toml", 160, seed=0).sources == tuple(batch["source_id"].tolist())


def test_offline_to_online_takes_a_mixture(mixed):
    buffer = rbtool.OfflineToOnlineReplayBuffer(mixed, online_capacity=10, batch_size=8, seed=0)
    assert buffer.sample().batch_size == torch.Size([8])
