"""Misspelt arguments of every public function and class name the nearest one, and no word passes for a flag."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import each

import rbtool
from rbtool.core.errors import UsageError, as_kind, simple_kinds


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


def test_every_public_function_refuses_arguments_of_another_type() -> None:
    checked = 0
    for _name, function in _public_functions():
        if not hasattr(function, "__keywords__"):
            continue
        parameters = inspect.signature(function).parameters
        kinds = simple_kinds({name: one.annotation for name, one in parameters.items()})
        arguments = {  # of the right type, as the first wrong one is named
            name: {"str": "x", "int": 1, "float": 1.0, "bool": True}.get(
                min(kinds.get(name, {""})), torch.nn.Identity()
            )
            for name, one in parameters.items()
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        }
        for name, kind in kinds.items():
            wrong = {1} if "str" in kind else "no"
            with pytest.raises(UsageError, match=rf"^{name} is {re.escape(repr(wrong))}, expected "):
                function(**arguments | {name: wrong})
            if parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY:
                earlier = list(parameters)[: [*parameters].index(name)]
                before = [arguments.get(one, parameters[one].default) for one in earlier]
                with pytest.raises(UsageError, match=rf"^{name} is {re.escape(repr(wrong))}, expected "):
                    function(
                        *before, wrong, **{one: arguments[one] for one in arguments if one not in {*earlier, name}}
                    )
            checked += 1
    assert checked > 250


@each(
    ("value", "kinds", "found"),
    [
        (np.bool_(True), {"bool"}, True),
        (1, {"bool"}, True),
        (None, {"int", "None"}, None),
        (np.int64(3), {"int"}, 3),
        (torch.tensor(3), {"int", "str"}, 3),
        (np.float32(0.5), {"float"}, 0.5),
        (2, {"float"}, 2),
        ("a", {"str", "Sequence[str]"}, "a"),
        (("a", "b"), {"str", "Sequence[str]"}, ("a", "b")),
    ],
)
def test_an_argument_of_a_simple_type_becomes_pythons(value: Any, kinds: set[str], found: Any) -> None:
    assert as_kind("x", value, kinds) == found
    assert type(as_kind("x", value, kinds)) is type(found)


@each(
    ("value", "kinds", "expected"),
    [
        ("no", {"bool", "None"}, "True or False"),
        (2, {"bool"}, "True or False"),
        (True, {"int", "None"}, "a whole number"),
        (1.0, {"int"}, "a whole number"),
        (None, {"float"}, "a number"),
        (1, {"str", "None"}, "text"),
        ("a", {"Sequence[str]"}, "several texts"),
        ([1], {"str", "Sequence[str]"}, "text or several texts"),
    ],
)
def test_an_argument_of_another_type_is_refused(value: Any, kinds: set[str], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        as_kind("x", value, kinds)
    assert caught.value.message == f"x is {value!r}, expected {expected}"


def test_every_method_of_a_spec_takes_no_words_for_flags() -> None:
    two, three = rbtool.Binary(2), rbtool.Binary(3)
    specs: list[Any] = [
        rbtool.Bounded(0, 1, (2,)), rbtool.Categorical(3), two, rbtool.MultiCategorical((2, 3)), rbtool.OneHot(3),
        rbtool.MultiOneHot((2, 3)), rbtool.NonTensor(), rbtool.Choice([two]), rbtool.Composite(),
        rbtool.Stacked(two, three, dim=0),
        rbtool.StackedComposite(rbtool.Composite(a=two), rbtool.Composite(a=three), dim=0),
    ]  # fmt: skip
    checked = set()
    for spec in specs:
        for name, method in inspect.getmembers(spec, inspect.ismethod):
            parameters = {} if name.startswith("_") else inspect.signature(method).parameters
            arguments = [None for one in parameters.values() if one.default is one.empty and one.kind < 2]
            for flag in (one.name for one in parameters.values() if one.annotation in ("bool", "bool | None")):
                with pytest.raises(UsageError, match=f"{flag} is 'no', expected True or False"):
                    method(*arguments, **{flag: "no"})
                checked.add(f"{name}.{flag}")
    flags = "include_nested", "leaves_only", "step_mdp_static_only"
    assert {"enumerate.use_mask", "encode.ignore_device", "to_numpy.safe", "to_one_hot.safe"} <= checked
    assert {f"{name}.{flag}" for name in ("keys", "values", "items") for flag in flags} <= checked


STORAGE = rbtool.TensorStorage(torch.arange(4))
BUFFER = rbtool.TensorDictReplayBuffer(storage=STORAGE)
EXACT = rbtool.ReplayBufferEnsemble(BUFFER, batch="exact")


@each(
    ("make", "name"),
    [
        (lambda word: BUFFER.sample(2, word), "return_info"),
        (lambda word: BUFFER.sample(2, include_info=word), "include_info"),
        (lambda word: EXACT.sample_counts([2], return_info=word), "return_info"),
        (lambda word: BUFFER.empty(word), "empty_write_count"),
        (lambda word: EXACT.empty(empty_write_count=word), "empty_write_count"),
        (lambda word: BUFFER.share(word), "shared"),
        (lambda word: BUFFER.update_({}, clone=word), "clone"),
        (lambda word: BUFFER.update_if_present(index=0, generation=0, patch={}, require_newer=word), "require_newer"),
        (lambda word: rbtool.FlatStorageCheckpointer(compatible=word), "compatible"),
        (lambda word: rbtool.RecordEpisodes(None, "nowhere", resume=word), "resume"),  # type: ignore[arg-type]
        (lambda word: rbtool.MCTSForest(stochastic=word), "stochastic"),
        (lambda word: rbtool.Composite(step_mdp_static=word), "step_mdp_static"),
        (lambda word: rbtool.OneHot(3, use_register=word), "use_register"),
        (lambda word: rbtool.MultiCategorical((2,), remove_singleton=word), "remove_singleton"),
        (lambda word: rbtool.NonTensor(batched=word), "batched"),
        (lambda word: rbtool.MinariExperienceReplay("nowhere", 4, split_trajs=word), "split_trajs"),
        (lambda word: rbtool.MinariExperienceReplay("x", 4, load_from_local_minari=word), "load_from_local_minari"),
        (lambda word: rbtool.D4RLExperienceReplay("nowhere", 4, from_env=word), "from_env"),
        (lambda word: rbtool.D4RLExperienceReplay("nowhere", 4, direct_download=word), "direct_download"),
        (lambda word: rbtool.D4RLExperienceReplay("nowhere", 4, terminate_on_end=word), "terminate_on_end"),
        (lambda word: rbtool.D4RLExperienceReplay("nowhere", 4, use_truncated_as_done=word), "use_truncated_as_done"),
        (lambda word: rbtool.VD4RLExperienceReplay("nowhere", 4, totensor=word), "totensor"),
        (lambda word: rbtool.AtariDQNExperienceReplay("nowhere", 4, replacement=word), "replacement"),
        (lambda word: rbtool.OpenXExperienceReplay("nowhere", 4, streaming=word), "streaming"),
        (lambda word: rbtool.LeRobotExperienceReplay("nowhere", decode_video=word), "decode_video"),
        (lambda word: rbtool.LeRobotExperienceReplay.from_columns({}, rehydrate=word), "rehydrate"),
        (lambda word: rbtool.VideoClipRef.from_file("nowhere", 1, auto_decode=word), "auto_decode"),
    ],
)
def test_classes_and_buffers_take_no_words_for_flags(make: Callable[[Any], Any], name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is 'no', expected True or False"):
        make("no")


@each(
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
def test_functions_that_pass_arguments_on_name_the_nearest_one(
    call: Callable[..., Any], typed: str, meant: str
) -> None:
    with pytest.raises(TypeError, match=f"{typed}'; did you mean '{meant}'"):
        call(**{typed: 4})


def test_arguments_with_errors_of_their_own_name_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no argument 'done_kye'; did you mean 'done_key'"):
        rbtool.H5StorageCheckpointer(done_kye="done")
    with pytest.raises(UsageError, match=r"spilt_trajs would be for an environment, .*; did you mean 'split_trajs'"):
        rbtool.D4RLExperienceReplay("hopper-medium-v2", 4, root=tmp_path, spilt_trajs=True)


def test_arguments_of_registered_loaders_are_passed_on() -> None:
    rbtool.register_dataset("words", lambda name, **given: (name, given), replace=True)
    assert rbtool.load_dataset("words:a", batchsize=4) == ("a", {"batchsize": 4})  # type: ignore[call-arg]
