"""What works with rbtool's buffers, their parts and tokenizers in TorchRL, each a function.

    python torchrl_classes_checks.py rbtool|torchrl [NAME...]

imports that library first, runs all checks or those named, and prints a JSON document: how many ran, and a traceback
for each that failed.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import pickle
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule

warnings.simplefilter("ignore")

BUFFERS = (
    "ReplayBuffer", "TensorDictReplayBuffer", "PrioritizedReplayBuffer", "TensorDictPrioritizedReplayBuffer",
    "ReplayBufferEnsemble", "HERReplayBuffer", "RayReplayBuffer", "OfflineToOnlineReplayBuffer",
)  # fmt: skip
STORAGES = (
    "Storage", "TensorStorage", "LazyTensorStorage", "LazyMemmapStorage", "ListStorage", "LazyStackStorage",
    "CompressedListStorage", "StorageEnsemble",
)  # fmt: skip
SAMPLERS = (
    "Sampler", "RandomSampler", "SamplerWithoutReplacement", "ConsumingSampler", "SliceSampler",
    "SliceSamplerWithoutReplacement", "PrioritizedSampler", "PrioritizedSliceSampler", "StalenessAwareSampler",
    "PromptGroupSampler", "StreamingSliceSampler", "SamplerEnsemble",
)  # fmt: skip
WRITERS = (
    "Writer", "ImmutableDatasetWriter", "RoundRobinWriter", "TensorDictRoundRobinWriter", "TensorDictMaxValueWriter",
    "WriterEnsemble",
)  # fmt: skip
TOKENIZERS = ("ActionTokenizerBase", "UniformActionTokenizer", "VocabTailActionTokenizer")
FAMILIES = (BUFFERS, STORAGES, SAMPLERS, WRITERS, TOKENIZERS)


def parts(lib: Any) -> dict[str, Any]:
    """Objects made by the classes of a library, by the name of the class."""
    storage, sampler = lib.LazyTensorStorage(8), lib.RandomSampler()
    return {
        "ListStorage": lib.ListStorage(8),
        "LazyTensorStorage": storage,
        "LazyMemmapStorage": lib.LazyMemmapStorage(8),
        "RandomSampler": sampler,
        "SliceSampler": lib.SliceSampler(slice_len=2),
        "SamplerEnsemble": lib.SamplerEnsemble(lib.RandomSampler(), lib.RandomSampler()),
        "TensorDictRoundRobinWriter": lib.TensorDictRoundRobinWriter(),
        "TensorDictMaxValueWriter": lib.TensorDictMaxValueWriter(),
        "ReplayBuffer": lib.ReplayBuffer(storage=storage, sampler=sampler, batch_size=2),
        "TensorDictReplayBuffer": lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(8), batch_size=2),
        "UniformActionTokenizer": lib.UniformActionTokenizer(8, low=-1.0, high=1.0, action_dim=2),
        "VocabTailActionTokenizer": lib.VocabTailActionTokenizer(8, full_vocab_size=100),
    }


EARLY: dict[str, Any] = {}
"""Objects of ours that are older than the import of TorchRL, if there are any."""
if sys.argv[1] == "rbtool":
    EARLY = parts(importlib.import_module("rbtool"))
    assert not any(name.startswith("torchrl") for name in sys.modules)

import torchrl.data.replay_buffers.samplers as samplers  # noqa: E402
from torchrl import collectors, data, envs, modules, objectives, trainers  # noqa: E402
from torchrl.checkpoint import Checkpoint  # noqa: E402
from torchrl.data.replay_buffers import checkpointers, scheduler  # noqa: E402
from torchrl.trainers.algorithms import DQNTrainer, OfflineToOnlineTrainer, SACTrainer  # noqa: E402

import rbtool as rb  # noqa: E402


def theirs(name: str) -> Any:
    return getattr(data, name, None) or getattr(samplers, name)


def raises(error: type[Exception], act: Any) -> str:
    try:
        act()
    except error as raised:
        return str(raised)
    raise AssertionError("nothing was raised")


# isinstance -----------------------------------------------------------------------------------------


def classes_are_related_as_theirs() -> None:
    for family in FAMILIES:
        for one in family:
            for other in family:
                expected = issubclass(theirs(one), theirs(other))
                assert issubclass(getattr(rb, one), theirs(other)) == expected, (one, other)
                assert not issubclass(theirs(one), getattr(rb, other)), (one, other)


def families_stay_apart() -> None:
    for family in FAMILIES:
        for other in FAMILIES:
            if family is not other:
                assert not issubclass(getattr(rb, family[-1]), tuple(map(theirs, other)))
    assert not isinstance(torch.zeros(3), data.Storage | data.ReplayBuffer | samplers.Sampler)


def objects_are_instances() -> None:
    for found in (EARLY, parts(rb)):
        for name, one in found.items():
            assert isinstance(one, theirs(name)), name
            assert type(one) is getattr(rb, name)
            assert one.__class__ is type(one)


def subclasses_are_instances() -> None:
    class Mixin:
        extra = "mine"

    class Storage(rb.LazyTensorStorage, Mixin):
        pass

    class Buffer(rb.TensorDictReplayBuffer):
        pass

    class Sampler(rb.Sampler):
        def draw(self, storage: Any, batch_size: int) -> Any:
            return torch.arange(batch_size), {}

    assert isinstance(Storage(3), data.LazyTensorStorage)
    assert Storage(3).extra == "mine"
    assert isinstance(Buffer(storage=Storage(3)), data.TensorDictReplayBuffer)
    assert isinstance(Sampler(), samplers.Sampler)
    assert not isinstance(Sampler(), data.RandomSampler)


def buffers_on_datasets_are_instances() -> None:
    for name in ("BaseDatasetExperienceReplay", "MinariExperienceReplay"):
        assert issubclass(getattr(rb, name), data.TensorDictReplayBuffer)


def dispatch_by_type_takes_them_for_theirs() -> None:
    @functools.singledispatch
    def kind(_: object) -> str:
        return "other"

    kind.register(data.Storage)(lambda _: "storage")
    kind.register(samplers.Sampler)(lambda _: "sampler")
    kind.register(data.ReplayBuffer)(lambda _: "buffer")
    assert [kind(one) for one in (rb.ListStorage(3), rb.RandomSampler(), rb.ReplayBuffer(), 3)] == [
        "storage", "sampler", "buffer", "other"
    ]  # fmt: skip


# Nothing is inherited -------------------------------------------------------------------------------


def nothing_is_inherited() -> None:
    """What TorchRL's class defines and ours does not is not there; special methods are object's or torch's."""
    asked_for_politely = {"__setstate__", "__del__"}
    for name in (*BUFFERS, *STORAGES, *TOKENIZERS):
        own, peer = getattr(rb, name), theirs(name)
        for attribute in vars(peer):
            for kind in own.__mro__:
                if attribute in vars(kind):
                    assert not kind.__module__.startswith("torchrl") or attribute in (
                        "__annotations__", "__module__", "__doc__", "__dict__", "__weakref__"
                    ), (name, attribute)  # fmt: skip
                    break
            if attribute.startswith("__") and attribute not in asked_for_politely:
                assert hasattr(own, attribute), (name, attribute)


def deleted_objects_are_no_concern_of_theirs() -> None:
    found: list[Any] = []
    hook, sys.unraisablehook = sys.unraisablehook, found.append
    for name in ("LazyMemmapStorage", "LazyTensorStorage", "ListStorage"):
        getattr(rb, name)(3)
    gc.collect()
    sys.unraisablehook = hook
    assert not found, found


def copies_and_pickles_are_as_before() -> None:
    for name, one in {**parts(rb), **EARLY}.items():
        for again in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert type(again) is getattr(rb, name)
            assert isinstance(again, theirs(name)), name


def torchrl_can_be_reloaded() -> None:
    importlib.reload(data)
    objects_are_instances()


# Trainers -------------------------------------------------------------------------------------------


class Counting(envs.EnvBase):
    """An environment of TorchRL that counts steps and ends at the fifth."""

    batch_locked = True

    def __init__(self, action: Any = None) -> None:
        super().__init__(device="cpu", batch_size=[])
        self.observation_spec = data.Composite(observation=data.Unbounded((3,)))
        self.action_spec = data.Bounded(-1, 1, (2,)) if action is None else action
        self.reward_spec = data.Unbounded((1,))
        self.count = 0
        self.actions: list[Any] = []

    def _reset(self, _: Any = None, **__: Any) -> Any:
        self.count = 0
        flags = {key: torch.zeros(1, dtype=torch.bool) for key in ("done", "terminated")}
        return TensorDict({"observation": torch.randn(3), **flags}, [])

    def _step(self, step: Any) -> Any:
        self.count += 1
        self.actions.append(step["action"])
        flags = {key: torch.full((1,), self.count >= 5) for key in ("done", "terminated")}
        return TensorDict({"observation": torch.randn(3), "reward": torch.ones(1), **flags}, [])

    def _set_seed(self, seed: Any) -> None:
        torch.manual_seed(seed or 0)


def episodes(count: int, length: int = 5) -> Any:
    steps = count * length
    done = (torch.arange(1, steps + 1) % length == 0)[:, None]
    following = {"observation": torch.randn(steps, 3), "reward": torch.ones(steps, 1)}
    return TensorDict(
        {
            "observation": torch.randn(steps, 3), "action": torch.zeros(steps, 2), "number": torch.arange(steps),
            "episode": torch.arange(steps) // length,
            "next": {**following, "done": done, "terminated": done.clone(), "truncated": torch.zeros_like(done)},
        },
        [steps],
    )  # fmt: skip


def prioritised() -> list[Any]:
    storage = functools.partial(rb.LazyTensorStorage, 100)
    sampler = rb.PrioritizedSampler(100, 1.0, 1.0)
    slices = rb.PrioritizedSliceSampler(100, 1.0, 1.0, slice_len=1, traj_key="episode")
    named = {"batch_size": 8, "priority_key": "td_error"}
    return [
        rb.TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage(), **named),
        rb.TensorDictReplayBuffer(storage=storage(), sampler=sampler, **named),
        rb.TensorDictReplayBuffer(storage=storage(), sampler=slices, **named),
    ]


def hooks_update_priorities() -> None:
    for buffer in prioritised():
        hook = trainers.ReplayBufferTrainer(buffer, batch_size=8, flatten_tensordicts=True)
        hook.extend(episodes(4))
        batch = hook.sample(episodes(1))
        batch["td_error"] = torch.where(batch["number"] == batch["number"][0], 1e9, 1e-9)
        hook.update_priority(batch)
        others = buffer.storage[:]["number"]
        others = others[~torch.isin(others, batch["number"])]
        buffer.update_priority(others, torch.full((len(others),), 1e-9))
        assert (hook.sample(episodes(1))["number"] == batch["number"][0]).all(), type(buffer)
        hook.load_state_dict(hook.state_dict())


def hooks_refuse_priorities_without_keys() -> None:
    buffer = rb.ReplayBuffer(storage=rb.LazyTensorStorage(9), sampler=rb.PrioritizedSampler(9, 1.0, 1.0))
    assert "Prioritized" in raises(ValueError, lambda: trainers.ReplayBufferTrainer(buffer, batch_size=8))


def _settings(loss: Any) -> dict[str, Any]:
    return {
        "total_frames": 64, "frame_skip": 1, "optim_steps_per_batch": 2, "loss_module": loss, "batch_size": 8,
        "optimizer": torch.optim.Adam(loss.parameters()), "progress_bar": False, "enable_logging": False,
        "target_net_updater": objectives.SoftUpdate(loss, eps=0.9),
    }  # fmt: skip


def _collector(env: Any, policy: Any, **options: Any) -> Any:
    return collectors.Collector(env, policy, frames_per_batch=16, total_frames=64, **options)


def dqn_trainer_updates_priorities() -> None:
    torch.manual_seed(0)
    env = Counting(data.OneHot(4))
    actor = modules.QValueActor(torch.nn.Linear(3, 4), in_keys=["observation"], spec=env.action_spec)
    buffer = prioritised()[0]
    trainer = DQNTrainer(
        collector=_collector(env, actor), replay_buffer=buffer,
        **_settings(objectives.DQNLoss(actor, delay_value=True)),
    )  # fmt: skip
    trainer.train()
    assert len(buffer) == 64
    priorities = torch.as_tensor(buffer.sampler.state_dict()["_sum_tree"])[:64]
    assert len(priorities.unique()) > 20


def _sac(buffer: Any, kind: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    env = Counting()
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor())
    actor = modules.ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]), in_keys=["loc", "scale"], spec=env.action_spec,
        distribution_class=modules.TanhNormal,
    )  # fmt: skip
    value = modules.ValueOperator(modules.MLP(in_features=5, out_features=1), in_keys=["observation", "action"])
    loss = objectives.SACLoss(actor, value, action_spec=env.action_spec)
    return kind(collector=_collector(env, actor), replay_buffer=buffer, **_settings(loss), **more)


def sac_trainer_trains_and_saves() -> None:
    buffer = rb.TensorDictReplayBuffer(storage=rb.LazyTensorStorage(100), batch_size=8)
    trainer = _sac(buffer, SACTrainer)
    trainer.load_state_dict(trainer.state_dict())
    trainer.train()
    assert len(buffer) == 64


def offline_to_online_trainer_anneals_and_saves() -> None:
    offline = rb.TensorDictReplayBuffer(storage=rb.LazyTensorStorage(100), batch_size=8)
    offline.extend(Counting().rollout(40, break_when_any_done=False))
    buffer = rb.OfflineToOnlineReplayBuffer(offline, online_capacity=200, offline_fraction=0.5, batch_size=8)
    trainer = _sac(buffer, OfflineToOnlineTrainer, anneal_frames=64)
    state = trainer.state_dict()
    buffer.offline_fraction = 0.125
    trainer.load_state_dict(state)
    assert buffer.offline_fraction == 0.5
    seen: list[float] = []
    trainer.register_op("post_steps", lambda: seen.append(buffer.offline_fraction))
    trainer.train()
    assert seen == [0.375, 0.25, 0.125, 0.0]
    assert len(buffer.online_buffer) == 64


# Collectors, checkpoints, schedulers ----------------------------------------------------------------


def collectors_fill_buffers() -> None:
    for options in ({}, {"extend_buffer": True}):
        buffer = rb.TensorDictReplayBuffer(storage=rb.LazyTensorStorage(100), batch_size=8)
        collector = _collector(Counting(), None, replay_buffer=buffer, **options)
        for _ in collector:
            pass
        collector.shutdown()
        assert len(buffer) == buffer.write_count == 64
        assert (buffer.sample()["next", "reward"] == 1).all()


def collectors_of_processes_fill_buffers() -> None:
    for kind in (collectors.MultiSyncCollector, collectors.MultiAsyncCollector):
        buffer = rb.TensorDictReplayBuffer(storage=rb.LazyTensorStorage(100), batch_size=8, shared=True)
        collector = kind([Counting, Counting], None, frames_per_batch=16, total_frames=64, replay_buffer=buffer)
        for _ in collector:
            pass
        collector.shutdown()
        assert len(buffer) == buffer.write_count >= 64, kind
        assert (buffer[:]["next", "reward"] == 1).all()


def checkpoints_of_torchrl_save_buffers() -> None:
    with tempfile.TemporaryDirectory() as folder:
        one, other = (rb.TensorDictReplayBuffer(storage=rb.LazyTensorStorage(40), batch_size=8) for _ in range(2))
        one.extend(episodes(4))
        Checkpoint(replay_buffer=one).save(str(Path(folder) / "saved"))
        assert Checkpoint(replay_buffer=other).load(str(Path(folder) / "saved")).loaded == {"replay_buffer"}
        assert other[:]["number"].tolist() == list(range(20))


def schedulers_of_torchrl_change_ours() -> None:
    for obj in (prioritised()[0], prioritised()[0].sampler):
        steps = scheduler.LinearScheduler(obj, param_name="beta", final_value=0.0, num_steps=4)
        steps.step()
        assert getattr(obj, "sampler", obj).beta == 0.75


# Tokenizers and transforms --------------------------------------------------------------------------


def tokenizers_in_a_transform() -> None:
    for name in TOKENIZERS[1:]:
        tokens = []
        for lib in (data, rb):
            step = envs.ActionTokenizerTransform(parts(lib)[name])
            buffer = rb.TensorDictReplayBuffer(storage=rb.LazyTensorStorage(9), batch_size=9, transform=step)
            buffer.extend(TensorDict({"action": torch.linspace(-1, 1, 18).view(9, 2)}, [9]))
            torch.manual_seed(0)
            tokens.append(buffer.sample()["vla_action", "tokens"])
        assert torch.equal(*tokens)
        assert tokens[0].dtype == torch.int64


def tokenizers_in_an_environment() -> None:
    for name in TOKENIZERS[1:]:
        taken = []
        for lib in (data, rb):
            env = envs.TransformedEnv(Counting(), envs.ActionTokenizerTransform(parts(lib)[name]))
            step = env.reset()
            step["vla_action", "tokens"] = torch.tensor([3, 5]) + (93 if name.startswith("Vocab") else 0)
            env.step(step)
            taken.append(env.base_env.actions[-1])
        assert torch.allclose(*taken)


def transforms_of_torchrl_change_ours_as_theirs() -> None:
    for make in (
        lambda: envs.MultiStepTransform(3, 0.5),
        lambda: envs.RenameTransform(["observation"], ["seen"]),
        lambda: envs.Compose(
            envs.DTypeCastTransform(torch.float32, torch.float64), lambda step: step.set("two", step["number"] * 2)
        ),
        lambda: envs.ObservationNorm(loc=1.0, scale=2.0, in_keys=["observation"]),
        lambda: envs.CatTensors(["observation", "action"], "both", del_keys=False),
        lambda: envs.RewardScaling(loc=0.0, scale=2.0, in_keys=[("next", "reward")]),
        lambda: envs.ExcludeTransform("action"),
        lambda: lambda step: step.exclude("episode"),
    ):
        batches = []
        for lib in (data, rb):
            torch.manual_seed(0)
            buffer = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(20), batch_size=8, transform=make())
            buffer.extend(episodes(4))
            torch.manual_seed(0)
            batches.append(buffer.sample())
        assert set(batches[0].keys(True, True)) == set(batches[1].keys(True, True)), make()
        assert (batches[0] == batches[1]).all(), make()


def multipliers_draw_as_theirs() -> None:
    for options in ({"slice_len": 2}, {"num_slices": 4}):
        for multiplier in (1, 2, 3, None):
            sizes = []
            for lib in (data, rb):
                sampler = lib.SliceSampler(traj_key="episode", **options)
                assert type(sampler)._batch_size_multiplier == 1
                sampler._batch_size_multiplier = multiplier
                buffer = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(60), sampler=sampler, batch_size=8)
                buffer.extend(episodes(6, 10))
                sizes.append(buffer.sample().shape)
            assert sizes[0] == sizes[1], (options, multiplier)


# What is refused ------------------------------------------------------------------------------------


def parts_of_torchrl_are_refused() -> None:
    ring, their = rb.ReplayBuffer(storage=rb.LazyTensorStorage(4), batch_size=2), parts(data)
    storage, sampler, writer = (
        their[name] for name in ("LazyTensorStorage", "RandomSampler", "TensorDictRoundRobinWriter")
    )
    for name, acts in {
        "LazyTensorStorage": (
            lambda: rb.ReplayBuffer(storage=storage), lambda: rb.ReplayBuffer(storage=lambda: storage),
            lambda: ring.set_storage(storage), lambda: rb.StorageEnsemble(storage),
            lambda: rb.OfflineToOnlineReplayBuffer(ring, online_storage=storage),
        ),
        "RandomSampler": (
            lambda: rb.ReplayBuffer(sampler=sampler), lambda: rb.ReplayBuffer(sampler=data.RandomSampler),
            lambda: ring.set_sampler(sampler), lambda: rb.SamplerEnsemble(sampler),
        ),
        "TensorDictRoundRobinWriter": (
            lambda: rb.ReplayBuffer(writer=writer), lambda: ring.set_writer(writer), lambda: rb.WriterEnsemble(writer),
        ),
        "ReplayBuffer": (
            lambda: rb.ReplayBufferEnsemble(their["ReplayBuffer"]),
            lambda: rb.OfflineToOnlineReplayBuffer(their["ReplayBuffer"], online_capacity=3),
            lambda: rb.LinearScheduler(their["ReplayBuffer"], "beta", 1.0, 3),
        ),
        "Sequence": (lambda: rb.ReplayBuffer(sample_unit=data.Sequence(2)),),
        "TensorStorageCheckpointer": (
            lambda: rb.LazyTensorStorage(3, checkpointer=checkpointers.TensorStorageCheckpointer()),
            lambda: rb.ReplayBuffer(checkpointer=checkpointers.TensorStorageCheckpointer()),
        ),
    }.items():  # fmt: skip
        for act in acts:
            assert f"TorchRL's {name}: use rbtool.{name} instead" in raises(TypeError, act)
    assert (len(ring), type(ring.storage)) == (0, rb.LazyTensorStorage)


def subclasses_of_torchrls_are_refused() -> None:
    class Mine(data.ListStorage):
        pass

    said = raises(TypeError, lambda: rb.ReplayBuffer(storage=Mine(3)))
    assert "a Mine, which derives from TorchRL's ListStorage: derive it from rbtool.ListStorage instead" in said


def parts_of_ours_work_in_a_buffer_of_torchrl_together_only() -> None:
    def sampled(**given: Any) -> Any:
        buffer = data.TensorDictReplayBuffer(**{"storage": data.LazyTensorStorage(9), "batch_size": 4} | given)
        buffer.extend(episodes(1))
        return buffer.sample()

    ours: dict[str, Any] = {"storage": rb.LazyTensorStorage(9), "writer": rb.TensorDictRoundRobinWriter()}
    batch = sampled(**ours, sampler=rb.SliceSampler(slice_len=2))
    assert (batch["number"].view(2, 2).diff() == 1).all()
    for part in ("storage", "writer"):
        raises(AttributeError, functools.partial(sampled, **{part: ours[part]}))
    for sampler in (rb.RandomSampler(), rb.PrioritizedSampler(9, 1.0, 1.0)):
        raises(AttributeError, functools.partial(sampled, sampler=sampler))


# ----------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))
    from peer_checks import run_checks

    run_checks(dict(globals()), {"episodes", "parts", "prioritised", "raises", "theirs", "Counting"}, sys.argv[2:])
