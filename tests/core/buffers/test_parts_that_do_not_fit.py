from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool import LazyTensorStorage, PrioritizedSampler, SliceSampler, TensorDictReplayBuffer


def steps(count: int) -> TensorDict:
    reward = torch.rand(count, 1)
    return TensorDict({"episode": torch.zeros(count).long(), "next": {"reward": reward}}, [count])


@pytest.mark.parametrize("make", [SliceSampler, rbtool.SliceSamplerWithoutReplacement])
def test_slices_are_not_cut_of_rows_that_a_ranking_put_anywhere(make: Any) -> None:
    storage, writer = LazyTensorStorage(8), rbtool.TensorDictMaxValueWriter()
    with pytest.raises(ValueError, match=f"{make.__name__} needs them in order"):
        TensorDictReplayBuffer(storage=storage, writer=writer, sampler=make(slice_len=2))
    buffer = TensorDictReplayBuffer(storage=storage, writer=writer)
    with pytest.raises(ValueError, match="needs them in order"):
        buffer.set_sampler(make(slice_len=2))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=make(slice_len=2))
    with pytest.raises(ValueError, match="needs them in order"):
        buffer.set_writer(rbtool.TensorDictMaxValueWriter())


def test_that_a_ranking_has_no_slices_is_said_first() -> None:
    sampler = rbtool.PrioritizedSliceSampler(2, 1.0, 1.0, slice_len=2)  # which is too small, besides
    with pytest.raises(ValueError, match="needs them in order"):
        rbtool.ReplayBuffer(
            storage=LazyTensorStorage(8, ndim=2), writer=rbtool.TensorDictMaxValueWriter, sampler=sampler
        )


@pytest.mark.parametrize("kind", [rbtool.ReplayBuffer, TensorDictReplayBuffer, rbtool.PrioritizedReplayBuffer])
@pytest.mark.parametrize("given", [{"transport": "shm"}, {"service_backend": "ray"}])
def test_arguments_that_are_not_built_yet_are_refused_in_a_sentence(kind: Any, given: dict[str, Any]) -> None:
    more = {"alpha": 1.0, "beta": 1.0} if kind is rbtool.PrioritizedReplayBuffer else {}
    (name,) = given
    with pytest.raises(NotImplementedError, match=f"{name} is .*, which rbtool does not support yet") as error:
        kind(storage=LazyTensorStorage(8), **more, **given)
    assert isinstance(error.value, ValueError)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bogus'"):
        kind(storage=LazyTensorStorage(8), **more, bogus=1)


def test_values_of_newer_arguments_that_ask_for_nothing_are_taken() -> None:
    nothing: dict[str, Any] = {"consume_after_n_samples": None, "sample_unit": None, "transport": "auto"}
    assert not len(TensorDictReplayBuffer(storage=LazyTensorStorage(8), service_backend="direct", **nothing))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SliceSampler(slice_len=2, end_keys="done"), "end_keys is 'done', expected a list"),
        (
            lambda: SliceSampler(slice_len=2, end_keys=("next", "done")),
            r"end_keys is \('next', 'done'\), expected a list",
        ),
        (lambda: SliceSampler(slice_len=2, end_keys=[]), r"end_keys is \[\], expected a list"),
        (lambda: SliceSampler(slice_len=2, use_gpu="foo"), "use_gpu is 'foo'"),
        (lambda: SliceSampler(slice_len=2, compile="yes"), "compile is 'yes'"),  # type: ignore[arg-type]
        (lambda: PrioritizedSampler(10, 1, 1, device="foo"), "device is 'foo', which is not the name of a device"),
        (lambda: PrioritizedSampler(10, 1, 1, device="meta"), "kept on the CPU or a CUDA device"),
    ],
)
def test_arguments_that_make_no_sense_are_told(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_told() -> None:
    with pytest.raises(ValueError, match="this machine has no CUDA device"):
        PrioritizedSampler(10, 1, 1, device="cuda")


@pytest.mark.parametrize("place", [slice(3, 6), torch.tensor([5, 3, 4]), 4])
def test_rows_that_are_replaced_keep_their_numbers(place: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    buffer.extend(steps(8))
    data = steps(3) if not isinstance(place, int) else steps(1)[0]
    buffer[place] = data
    assert data.get("index", None) is None
    assert buffer[:]["index"].tolist() == list(range(8))
    assert torch.equal(buffer[place]["next", "reward"], data["next", "reward"])
