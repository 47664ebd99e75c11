"""`StreamSampler` and `StreamSliceSampler`: epochs over shards, a few of which are needed at a time."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import ListedShards, stream_buffer

import rbtool
from rbtool.core.errors import EmptyPartError
from rbtool.core.storages.dataset import StreamStorage

LENGTHS = st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=1, max_size=7).filter(lambda parts: any(parts))
OPTIONS = st.fixed_dictionaries(
    {"window": st.integers(1, 5), "ahead": st.integers(0, 3), "shuffle": st.booleans(), "seed": st.integers(0, 9)}
)


def drawn(buffer: Any) -> list[int]:
    """The steps of an epoch."""
    return torch.cat([batch["x"] for batch in buffer]).tolist()


@settings(max_examples=60)
@given(LENGTHS, OPTIONS, st.integers(1, 9), st.booleans())
def test_an_epoch_has_every_element_once(parts: Any, options: Any, batch: int, known: bool) -> None:
    buffer = stream_buffer(parts, rbtool.StreamSampler(**options), batch, known=known)
    steps = list(range(sum(map(sum, parts))))
    for _ in range(3):
        found = drawn(buffer)
        assert (found if not options["shuffle"] else sorted(found)) == steps
    limit = options["ahead"] + 1 + (options["window"] if options["shuffle"] else 1)
    for expected in buffer.storage.shards.expected:
        assert len(set(expected)) == len(expected) <= limit


@given(LENGTHS, OPTIONS, st.integers(1, 4))
def test_parts_have_every_element_once_together(parts: Any, options: Any, count: int) -> None:
    found: list[int] = []
    for number in range(min(count, len(parts))):
        sampler = rbtool.StreamSampler(**options, part=(number, count))
        buffer = stream_buffer(parts, sampler, 3)
        with contextlib.suppress(EmptyPartError):  # without steps: what it then lacks, no other part has
            found += drawn(buffer)
    expected = list(range(sum(map(sum, parts))))
    assert sorted(found) == expected if count <= len(parts) else set(found) <= set(expected)


@pytest.mark.parametrize("index", [torch.zeros(0, dtype=torch.int64), slice(5, 5)])
def test_no_elements_of_a_stream_are_a_batch_without_rows(index: Any) -> None:
    found = StreamStorage(ListedShards([[2], [3]]))[index]
    assert (found.batch_size, found["x"].shape, found["x"].dtype) == ((0,), (0,), torch.int64)


class FailingShards(ListedShards):
    """Shards that fail every time they are taken first."""

    def __init__(self, lengths: Any) -> None:
        super().__init__(lengths)
        self.failed: set[int] = set()

    def take(self, number: int) -> Any:
        if number not in self.failed:
            self.failed.add(number)
            raise rbtool.NetworkError("the network failed")
        return super().take(number)


@given(LENGTHS, OPTIONS, st.integers(1, 9), st.booleans())
def test_a_batch_that_fails_comes_again(parts: Any, options: Any, batch: int, drop_last: bool) -> None:
    batch = min(batch, sum(map(sum, parts)))
    expected = [one["x"].tolist() for one in stream_buffer(parts, _sampler(options, drop_last), batch)]
    sampler, storage = _sampler(options, drop_last), StreamStorage(FailingShards(parts))
    found: list[list[int]] = []
    while not sampler.ran_out:
        try:
            found.append(storage.get(sampler.sample(storage, batch)[0])["x"].tolist())
        except rbtool.NetworkError:
            continue
    assert found == expected


def _sampler(options: Any, drop_last: bool) -> rbtool.StreamSampler:
    return rbtool.StreamSampler(**options, drop_last=drop_last)


def test_slices_can_be_shorter_after_a_refusal() -> None:
    storage = stream_buffer([[3], [4, 6]], rbtool.StreamSampler(), 4).storage
    sampler = rbtool.StreamSliceSampler(num_slices=1, seed=0)
    with pytest.raises(rbtool.SchemaError, match="nothing to draw"):
        sampler.sample(storage, 7)
    assert [len(sampler.sample(storage, 3)[0][0]) for _ in range(3)] == [3, 3, 3]
    assert sampler.ran_out


def test_slices_of_a_refused_batch_are_not_drawn_from() -> None:
    storage = stream_buffer([[3], [4, 6]], rbtool.StreamSampler(), 4).storage
    sampler = rbtool.StreamSliceSampler(num_slices=4, drop_last=True, seed=0)
    with pytest.raises(rbtool.UsageError, match="at most the 1 of an epoch"):
        sampler.sample(storage, 4 * 6)
    sampler.measure = rbtool.StreamSliceSampler(num_slices=3).measure
    assert sampler.sample(storage, 3 * 3)[0][0].reshape(3, 3).diff().eq(1).all()


@given(LENGTHS, OPTIONS, st.integers(1, 5), st.integers(0, 12))
def test_a_state_continues_with_the_next_element(parts: Any, options: Any, batch: int, taken: int) -> None:
    first = stream_buffer(parts, rbtool.StreamSampler(**options), batch)
    for _ in range(taken):
        first.sample()
    again = stream_buffer(parts, rbtool.StreamSampler(**options | {"seed": None}), batch)
    again.load_state_dict(first.state_dict())
    for _ in range(8):
        one, other = first.sample(), again.sample()
        assert one["x"].tolist() == other["x"].tolist()
        assert first.sampler.ran_out == again.sampler.ran_out


@settings(max_examples=60)
@given(LENGTHS, OPTIONS, st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_slices_are_of_every_trajectory_once(parts: Any, options: Any, size: int, count: int, strict: bool) -> None:
    lengths = [length for part in parts for length in part]
    taken = [number for number, length in enumerate(lengths) if length >= (size if strict else 1)]
    sampler = rbtool.StreamSliceSampler(slice_len=size, strict_length=strict, **options)
    buffer = stream_buffer(parts, sampler, size * count)
    if not taken:
        with pytest.raises(rbtool.SchemaError):
            buffer.sample()
        return
    seen: list[int] = []
    for batch in buffer:
        ends = batch["next", "truncated"].flatten().nonzero().flatten() + 1
        for run in batch.split(ends.diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()):
            assert run["episode"].unique().numel() == 1
            assert run["x"].diff().eq(1).all()
            assert len(run) == min(size, lengths[int(run["episode"][0])])
            seen.append(int(run["episode"][0]))
    assert sorted(seen) == taken


def test_every_start_of_a_slice_comes() -> None:
    buffer = stream_buffer([[5]], rbtool.StreamSliceSampler(slice_len=3, seed=0), 3)
    assert {int(batch["x"][0]) for _ in range(60) for batch in buffer} == {0, 1, 2}


def test_padded_slices_have_a_mask() -> None:
    sampler = rbtool.StreamSliceSampler(slice_len=3, strict_length=False, pad_output=True, shuffle=False)
    batch = stream_buffer([[2], [4]], sampler, 6).sample()
    assert batch["x"].tolist() == [0, 1, 1, 2, 3, 4]
    assert batch["collector", "mask"].tolist() == [True, True, False, True, True, True]


def test_incomplete_batches_are_left_out() -> None:
    buffer = stream_buffer([[4], [5]], rbtool.StreamSampler(drop_last=True, seed=0), 4)
    assert [[len(batch) for batch in buffer] for _ in range(2)] == [[4, 4], [4, 4]]
    with pytest.raises(rbtool.UsageError, match="expected at most the 9 of an epoch"):
        stream_buffer([[4], [5]], rbtool.StreamSampler(drop_last=True), 10).sample()


def test_a_batch_larger_than_the_rest_of_the_epoch_starts_another() -> None:
    storage = stream_buffer([[4], [5]], rbtool.StreamSampler(), 4).storage
    sampler = rbtool.StreamSampler(drop_last=True, seed=0)
    assert [len(sampler.sample(storage, size)[0]) for size in (4, 8, 1)] == [4, 8, 1]
    assert sampler.epoch == 2


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    parts = [[5, 5]] * 8
    orders = {tuple(drawn(stream_buffer(parts, rbtool.StreamSampler(seed=seed), 10))) for seed in range(5)}
    buffer = stream_buffer(parts, rbtool.StreamSampler(seed=0), 10)
    orders |= {tuple(drawn(buffer)) for _ in range(5)}
    assert len(orders) == 9


def test_a_window_of_all_shards_is_uniform_in_its_middle() -> None:
    counts = torch.zeros(4)
    for seed in range(400):
        buffer = stream_buffer([[30]] * 4, rbtool.StreamSampler(seed=seed, window=2), 30)
        counts[next(iter(buffer))["x"][0] // 30] += 1
    assert ((counts / 400 - 0.25).abs() < 0.08).all()


def test_elements_are_numbered_as_in_the_whole_dataset_where_sizes_are_known() -> None:
    known = stream_buffer([[3], [2, 2]], rbtool.StreamSampler(shuffle=False), 7)
    assert known.sample()["index"].tolist() == list(range(7))
    assert len(known) == 7
    unknown = stream_buffer([[3], [2, 2]], rbtool.StreamSampler(shuffle=False), 7, known=False)
    index = unknown.sample()["index"]
    assert index.tolist() == [0, 1, 2, *(2**32 + row for row in range(4))]
    assert unknown[index]["x"].tolist() == list(range(7))
    with pytest.raises(TypeError, match="is unknown until"):
        len(unknown)
    assert repr(unknown.storage) == "StreamStorage(listed shards)"
    assert "StreamStorage(listed shards)" in repr(unknown)


@pytest.mark.parametrize("index", [7, -1, [0, 7], torch.tensor([3, -1])])
def test_an_element_that_is_not_there_is_an_index_error(index: Any) -> None:
    storage = StreamStorage(ListedShards([[3], [2, 2]]))
    with pytest.raises(IndexError):
        storage.get(index)


def test_a_stream_is_read_only() -> None:
    buffer = stream_buffer([[3]], rbtool.StreamSampler(), 2)
    for write in (
        buffer.storage.empty,
        lambda: buffer.storage.set(0, buffer[0]),
        lambda: buffer.extend(buffer[[0, 1]]),
    ):
        with pytest.raises(rbtool.SchemaError):
            write()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"ahead": -1}, "ahead is -1"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"part": (2, 2)}, "part is 2 of 2"),
    ],
)
def test_arguments_without_sense_are_refused(options: Any, message: str) -> None:
    with pytest.raises(rbtool.UsageError, match=message):
        rbtool.StreamSampler(**options)


def test_a_state_of_other_slices_is_refused() -> None:
    state = rbtool.StreamSliceSampler(slice_len=2, strict_length=False).state_dict()
    with pytest.raises(rbtool.SchemaError, match="the state has strict_length=False"):
        rbtool.StreamSliceSampler(slice_len=2).load_state_dict(state)


def test_a_storage_that_is_no_stream_is_refused() -> None:
    buffer = rbtool.ReplayBuffer(storage=rbtool.TensorStorage(torch.arange(3)), sampler=rbtool.StreamSampler())
    with pytest.raises(rbtool.SchemaError, match="draws from a stream, found a TensorStorage"):
        buffer.sample(2)


def test_a_part_without_a_shard_is_refused() -> None:
    with pytest.raises(rbtool.SchemaError, match="has 1 shard, and part 1 of 2 has none"):
        stream_buffer([[3]], rbtool.StreamSampler(part=(1, 2)), 2).sample()


def test_shards_with_other_fields_are_refused() -> None:
    class Changing(ListedShards):
        def take(self, number: int) -> Any:
            found = super().take(number)
            other = rbtool.TensorStorage(found.storage.get(slice(None)).exclude("episode"))
            return found._replace(storage=other) if number else found

    storage = StreamStorage(Changing([[3], [2]]))
    with pytest.raises(rbtool.SchemaError, match=r"episode is int64 \[\] in shard 0 .* and missing in shard 1"):
        storage.get([0, 3])


@pytest.mark.parametrize("change", [{"window": 2}, {"part": (0, 2)}, {"shuffle": False}])
def test_a_state_of_another_order_is_refused(change: Any) -> None:
    first = stream_buffer([[3], [4]], rbtool.StreamSampler(seed=0), 2)
    first.sample()
    other = stream_buffer([[3], [4]], rbtool.StreamSampler(seed=0, **change), 2)
    with pytest.raises(rbtool.SchemaError, match="the state has"):
        other.sampler.load_state_dict(first.sampler.state_dict())
