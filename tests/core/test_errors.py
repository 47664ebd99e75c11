"""What errors say beyond their sentence: the nearest name, the hint, in tracebacks too, and misspelt arguments."""

from __future__ import annotations

import copy
import inspect
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rbtool
from rbtool.core.errors import FormatError, MissingKeyError, RbtoolError, UsageError, did_you_mean

NAMES = ["action", "observation.image", "next.reward", "observation.position"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("acton", "action"), ("ACTION", "action"), ("rewrd", "next.reward"), ("image", "observation.image"),
        ("act", "action"), ("info.imgae", "observation.image"), ("next.rewrd", "next.reward"),
    ],
)  # fmt: skip
def test_the_nearest_name(typed: str, meant: str) -> None:
    assert did_you_mean(typed, NAMES) == f"; did you mean {meant!r}?"


@pytest.mark.parametrize("typed", ["zzz", ""])
def test_no_name_is_offered_that_is_far_away(typed: str) -> None:
    assert did_you_mean(typed, NAMES) == ""


def _shown(error: RbtoolError) -> list[str]:
    return "".join(traceback.format_exception(error)).splitlines()[-2:]


@pytest.mark.parametrize("kind", [UsageError, MissingKeyError])
def test_a_traceback_ends_with_the_hint(kind: type[RbtoolError]) -> None:
    error = kind("no field", hint="take another")
    for one in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert [line.rpartition(": ")[2] for line in _shown(one)] == ["no field", "take another"]
        assert one.__notes__ == ["hint: take another"]


def test_a_hint_that_is_given_later_takes_the_place_of_the_first() -> None:
    error = UsageError("no field", hint="take another")
    error.add_note("of somebody else")
    error.hint = "take none"
    assert error.__notes__ == ["of somebody else", "hint: take none"]
    error.hint = ""
    assert (error.__notes__, error.hint) == (["of somebody else"], "")


def test_without_a_hint_there_is_no_note() -> None:
    assert not hasattr(UsageError("no field"), "__notes__")


def test_a_message_is_one_line_whatever_is_named_in_it() -> None:
    assert RbtoolError("dis\ncount\u2028 is missing").message == "dis\\ncount\\u2028 is missing"


def test_control_characters_of_names_are_escaped() -> None:
    error = FormatError("a.h5 has the key 'a\n\x1b[31mb', é is fine")
    assert str(error) == error.message == r"a.h5 has the key 'a\n\x1b[31mb', é is fine"
    assert pickle.loads(pickle.dumps(error)).message == error.message


# Misspelt arguments ---------------------------------------------------------------------------------


def _public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public functions that have more than one argument."""
    for name in rbtool.__all__:
        found = getattr(rbtool, name)
        members = vars(found) if inspect.ismodule(found) else {name: found}
        for member, function in members.items():
            own = not inspect.ismodule(found) or getattr(function, "__module__", "") == found.__name__
            own = own and inspect.isfunction(function) and not member.startswith("_")
            if own and len(inspect.signature(function).parameters) > 1:
                yield member, function


def test_every_public_function_names_the_argument_nearest_to_a_misspelt_one() -> None:
    functions = dict(_public_functions())
    assert {"convert", "download", "load_dataset", "prune", "sample", "save", "torch_dataset"} <= functions.keys()
    for name, function in functions.items():
        argument = max(inspect.signature(function).parameters, key=len)
        arguments = [torch.nn.Identity()] * 4 if name == "get_dataloader" else []  # those without a default come first
        if arguments:
            arguments[2] = rbtool.PromptData
        with pytest.raises(TypeError, match=rf"{name}\(\) .* '{argument}s'; did you mean '{argument}'"):
            function(*arguments, **{f"{argument}s": None})


STORAGE = rbtool.TensorStorage(torch.arange(4))


@pytest.mark.parametrize(
    ("call", "typed", "meant"),
    [
        (rbtool.load_dataset, "batchsize", "batch_size"),
        (rbtool.load_dataset, "horizont", "horizon"),
        (lambda **given: rbtool.load_dataset("x", streaming=True, **given), "cachesize", "cache_size"),
        (rbtool.ReplayBuffer, "batchsize", "batch_size"),
        (rbtool.ReplayBuffer, "consume_after_n_sample", "consume_after_n_samples"),
        (rbtool.TensorDictReplayBuffer, "prioritykey", "priority_key"),
        (lambda **given: rbtool.PrioritizedReplayBuffer(alpha=0.6, beta=0.4, **given), "epsilon", "eps"),
        (lambda **given: rbtool.ReplayBufferEnsemble(rbtool.ReplayBuffer(), **given), "temprature", "temperature"),
        (rbtool.RayReplayBuffer, "remote_confg", "remote_config"),
        (lambda **given: rbtool.OfflineToOnlineReplayBuffer("x", **given), "online_capasity", "online_capacity"),
        (lambda **given: rbtool.MinariExperienceReplay("x", 4, **given), "colate_fn", "collate_fn"),
        (lambda **given: rbtool.AtariDQNExperienceReplay("Pong/1", 4, **given), "prefech", "prefetch"),
        (lambda **given: rbtool.GenDGRLExperienceReplay("x", 4, **given), "batchsize", "batch_size"),
        (rbtool.SliceSampler, "slice_length", "slice_len"),
        (rbtool.SliceSampler, "replacment", "replacement"),
        (lambda **given: rbtool.StreamSliceSampler(slice_len=4, **given), "windw", "window"),
        (lambda **given: rbtool.VideoClipRef.from_file("x.mp4", **given), "num_frame", "num_frames"),
        (lambda **given: rbtool.VideoClipRef.from_file("x.mp4", **given), "autodecode", "auto_decode"),
        (lambda **given: rbtool.PromptData.from_dataset("train", **given), "tokeniser", "tokenizer"),
        (lambda **given: rbtool.PairwiseDataset.from_dataset("train", **given), "max_len", "max_length"),
        (lambda **given: rbtool.get_dataloader(1, 1, rbtool.PromptData, "cpu", **given), "tokeniser", "tokenizer"),
        (
            lambda **given: rbtool.TorchLoader(
                rbtool.torch_dataset(
                    rbtool.ReplayBuffer(storage=STORAGE, sampler=rbtool.SamplerWithoutReplacement()), 2
                ),
                **given,
            ),
            "num_worker",
            "num_workers",
        ),
    ],
)
def test_what_passes_arguments_on_names_the_nearest_one(call: Callable[..., Any], typed: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"{typed}'; did you mean '{meant}'"):
        call(**{typed: 4})


def test_arguments_with_errors_of_their_own_name_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no argument 'done_kye'; did you mean 'done_key'"):
        rbtool.H5StorageCheckpointer(done_kye="done")
    with pytest.raises(UsageError, match=r"spilt_trajs would be for an environment, .*; did you mean 'split_trajs'"):
        rbtool.D4RLExperienceReplay("hopper-medium-v2", 4, root=tmp_path, spilt_trajs=True)


def test_arguments_of_others_are_passed_on() -> None:
    rbtool.register_dataset("words", lambda name, **given: (name, given), replace=True)
    assert rbtool.load_dataset("words:a", batchsize=4) == ("a", {"batchsize": 4})  # type: ignore[call-arg]
