"""What is loaded, and under which name, when rbtool is imported and when its command line starts."""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import source_tree
from hypothesis import settings
from processes import Interpreter

import rbtool
from rbtool.core.testing.datasets import write_walks

HEAVY = ["h5py", "minari", "tensordict", "torch"]

IMPORT = "import rbtool"
COMMAND = """
import sys
sys.argv = ["rbtool", *{words!r}]
from rbtool.cli.start import main
try:
    main()
except SystemExit as stop:
    assert stop.code in (0, None), stop.code
"""
REPORT = """
import sys
print("loaded:", *(name for name in {heavy!r} if name in sys.modules))
"""

EVERYTHING = """
import importlib, json, pkgutil, sys
import rbtool
for module in pkgutil.walk_packages(rbtool.__path__, "rbtool."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(json.dumps({name: file for name, module in sys.modules.items() if (file := getattr(module, "__file__", None))}))
"""


def python(code: str, folder: Path) -> str:
    """Run code in a fresh interpreter from an empty folder and return what it printed."""
    environment = os.environ | {"RBTOOL_HOME": str(folder / "home"), "RBTOOL_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def misnamed(modules: dict[str, str]) -> dict[str, str]:
    """Return the modules that lie in the checkout and go by another name than rbtool's."""
    aside = [*(source_tree.ROOT / name for name in ("tests", "benchmarks", "docs")), Path(sys.prefix)]
    return {
        name: file
        for name, file in modules.items()
        if Path(file).is_relative_to(source_tree.ROOT)
        and not any(Path(file).is_relative_to(folder) for folder in aside)
        and name != "rbtool"
        and not name.startswith("rbtool.")
    }


@pytest.mark.parametrize(
    "words", [None, ["--help"], ["--version"], ["list"], ["inspect", "--help"], ["check", "--help"]]
)
def test_nothing_heavy_is_loaded(words: list[str] | None, tmp_path: Path) -> None:
    start = IMPORT if words is None else COMMAND.format(words=words)
    printed = python(start + REPORT.format(heavy=HEAVY), tmp_path)
    assert printed.splitlines()[-1].split() == ["loaded:"]


def test_all_modules_go_by_the_name_of_the_package(tmp_path: Path) -> None:
    loaded = json.loads(python(EVERYTHING, tmp_path).splitlines()[-1])
    assert misnamed(loaded) == {}
    expected = {source_tree.module_name(file) for file in source_tree.package_files() if file.name != "__main__.py"}
    assert expected <= loaded.keys()


def test_the_test_run_itself_loads_nothing_twice() -> None:
    loaded = {name: file for name, module in sys.modules.items() if (file := getattr(module, "__file__", None))}
    assert misnamed(loaded) == {}


def test_hypothesis_draws_the_same_examples_in_every_run_unless_others_are_asked_for(
    pytestconfig: pytest.Config,
) -> None:
    asked = pytestconfig.getoption("--hypothesis-profile")
    assert settings.default is not None
    assert settings.default.derandomize is (asked != "random")
    assert settings.default.deadline is None


def test_a_star_import_hides_nothing_of_pythons() -> None:
    assert not set(rbtool.__all__) & set(dir(builtins))
    assert all(hasattr(rbtool, name) for name in dir(rbtool))
    assert callable(rbtool.list)


def test_the_names_of_the_flags_are_those_of_torchrl() -> None:
    assert rbtool.DEFAULT_DONE_KEYS == ("done", "truncated", "terminated")


# A clone beside the script ------------------------------------------------------------------------

VERSION = "import rbtool; print(rbtool.__version__)"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The folder above a clone of another version, of which there is only what is imported at once."""
    (tmp_path / "rbtool/core").mkdir(parents=True)
    shutil.copy(rbtool.__file__, tmp_path / "rbtool")
    (tmp_path / "rbtool/core/__init__.py").write_text('__version__ = "cloned"')
    (tmp_path / "train.py").write_text(VERSION)
    return tmp_path


@pytest.mark.parametrize("words", [["-c", VERSION], ["train.py"], ["-m", "rbtool", "--version"]])
def test_an_installed_rbtool_is_imported_and_not_a_clone_beside_the_script(words: list[str], clone: Path) -> None:
    done = subprocess.run([sys.executable, *words], cwd=clone, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == rbtool.__version__


@pytest.mark.parametrize(("words", "path"), [(["-S", "train.py"], ""), (["train.py"], ".")])
def test_a_clone_stays_where_nothing_is_installed_or_the_path_names_its_place(
    words: list[str], path: str, clone: Path
) -> None:
    variables = os.environ | {"PYTHONPATH": path and str(clone)}
    done = subprocess.run(
        [sys.executable, *words], cwd=clone, env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout == "cloned\n"


# First uses ---------------------------------------------------------------------------------------

FIRST_USE = """
import doctest, pickle, sys, warnings
import torch
from tensordict import TensorDict
import rbtool

name, use, dataset, packed = sys.argv[1:]
kind = getattr(rbtool, name)
found = doctest.DocTestFinder(recurse=False).find(kind, name, globs=dict(vars(sys.modules[kind.__module__])))
for example in found:
    assert not doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(example).failed

end = torch.tensor([[False], [False], [True]] * 2)
after = {"pixels": torch.ones(6, 3, 4, 4), "reward": torch.ones(6, 1), "done": end, "terminated": end}
steps = TensorDict({"pixels": torch.ones(6, 3, 4, 4), "step_count": torch.arange(6), "next": after}, [6])
ids = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "attention_mask": torch.ones(2, 3, dtype=torch.int64)}

def member(spec):
    assert pickle.loads(pickle.dumps(spec)).is_in(spec.rand())

def through(transform):
    transform.load_state_dict(transform.state_dict())
    return transform(steps)

def filled(storage, rows=steps):
    storage.set(range(len(rows)), rows)
    return storage

def saved(storage):
    storage.dumps("saved")
    return storage

def checkpointed(checkpointer):
    saved(filled(rbtool.LazyTensorStorage(6, checkpointer=checkpointer)))
    storage = rbtool.LazyTensorStorage(6, checkpointer=kind())
    storage.loads("saved")
    assert len(storage) == 6

def buffer(**options):
    made = rbtool.TensorDictReplayBuffer(storage=rbtool.LazyTensorStorage(6), batch_size=4, **options)
    made.extend(steps)
    return made

def missing(*arguments):
    try:
        kind("none/none-v0", *arguments, root="root", download=False)
    except (FileNotFoundError, rbtool.UsageError):
        return
    raise AssertionError("a dataset that is not there was opened")

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".* is now called", DeprecationWarning)
    exec(use)
"""

STORED = "saved(filled(kind(10)))\nkind(10).loads('saved')"
SHARED_USES = {
    "type('Own', (kind,), {})":
        "ActionTokenizerBase BaseDatasetExperienceReplay Box ParameterScheduler RolloutFromModel SampleUnit "
        "StreamDataset TensorMap TensorSpec",
    "missing()": "AtariDQNExperienceReplay GenDGRLExperienceReplay LeRobotExperienceReplay OpenXExperienceReplay",
    "kind(3)": "BinaryBox CategoricalBox",
    "member(kind(3))": "BinaryDiscreteTensorSpec DiscreteTensorSpec OneHotDiscreteTensorSpec",
    "member(kind(0, 1, (2,)))": "BoundedContinuous BoundedTensorSpec",
    "through(kind())": "Compose ReturnToGo",
    STORED: "CompressedListStorage LazyMemmapStorage LazyStackStorage LazyTensorStorage ListStorage",
    "missing(4)": "D4RLExperienceReplay MinariExperienceReplay RobosetExperienceReplay VD4RLExperienceReplay",
    "through(kind('pixels'))": "ExcludeTransform NextStateReconstructor",
    "kind()": "Flat2TED H5Combine H5Split Nested2TED TED2Flat TED2Nested",
    "checkpointed(kind())":
        "FlatStorageCheckpointer H5StorageCheckpointer NestedStorageCheckpointer TensorStorageCheckpointer",
    "member(kind([2, 3]))": "MultiDiscreteTensorSpec MultiOneHotDiscreteTensorSpec",
    "kind(str, 3, padding=False)": "PromptTensorDictTokenizer TensorDictTokenizer",
    "member(kind((2,)))":
        "UnboundedContinuous UnboundedContinuousTensorSpec UnboundedDiscrete UnboundedDiscreteTensorSpec",
}  # fmt: skip
FIRST_USES = {name: use for use, names in SHARED_USES.items() for name in names.split()} | {
    "BackgroundDump": "assert isinstance(buffer().dumps('saved', background=True), kind)",
    "BoundedDiscrete": "member(kind(0, 3, (2,)))",
    "BoxList": "kind(())",
    "CompositeSpec": "member(kind(a=rbtool.Unbounded((2,))))",
    "CompressedListStorageCheckpointer": "storage = filled(rbtool.CompressedListStorage(6))\n"
    "storage.checkpointer = kind()\nsaved(storage)",
    "ConditionalUpdateResult": "kind(torch.ones(2) > 0)",
    "ConstantKLController": "kind(kl_coef=0.1).update([0.2])",
    "ContinuousBox": "kind(torch.zeros(2), torch.ones(2))",
    "DecodeText": "kind()(TensorDict({'text': [b'a', b'b']}, [2]))",
    "DecodeVideo": "kind(dataset, 'pixels')",
    "DensifyReward": "kind()(steps.select('next').unsqueeze(0))",
    "FrameStack": "kind(2)(steps.unsqueeze(0))",
    "HindsightStrategy": "assert kind('future') is kind.FUTURE",
    "LambdaScheduler": "kind(buffer(sampler=rbtool.PrioritizedSampler(6, 0.6, 0.4)), 'beta', float).step()",
    "LazyStackedCompositeSpec": "member(kind(*[rbtool.Composite(a=rbtool.Unbounded((2,)))] * 2, dim=0))",
    "LazyStackedTensorSpec": "member(kind(*[rbtool.Unbounded((2,))] * 2, dim=0))",
    "ListStorageCheckpointer": "storage = filled(rbtool.ListStorage(6))\nstorage.checkpointer = kind()\nsaved(storage)",
    "MultiStep": "through(kind(0.9, 2))",
    "MultiStepTransform": "buffer(transform=kind(2, 0.9)).sample()",
    "NonTensorSpec": "kind((2,)).rand()",
    "OfflineToOnlineReplayBuffer": "kind(dataset, online_capacity=10, batch_size=4).sample()",
    "OpenMLExperienceReplay": "assert issubclass(kind, rbtool.TensorDictReplayBuffer)",
    "PackedRecording": "len(kind('recording'))",
    "PackedStorage": "saved(kind(packed))",
    "PackedStorageCheckpointer": "saved(rbtool.PackedStorage(packed, checkpointer=kind()))",
    "PairwiseDataset": "kind(*[rbtool.RewardData(**ids, batch_size=[2])] * 2, batch_size=[2])",
    "PromptData": "rows = kind(**ids, prompt_rindex=torch.ones(2), batch_size=[2])\n"
    "saved(filled(rbtool.LazyTensorStorage(2), rows))",
    "RandomProjectionHash": "kind()(torch.ones(2, 3))",
    "RayReplayBuffer": "assert issubclass(kind, object)",
    "RecordEpisodes": "import gymnasium\nenv = kind(gymnasium.make('CartPole-v1'), 'recorded')\n"
    "env.reset(seed=0)\nenv.close()",
    "RecordVectorEpisodes": "import gymnasium\nenv = kind(gymnasium.make_vec('CartPole-v1', 2), 'recorded')\n"
    "env.reset(seed=0)\nenv.close()",
    "RenameTransform": "through(kind('pixels', 'image'))",
    "Resize": "through(kind(2))",
    "RewardData": "saved(filled(rbtool.LazyTensorStorage(2), kind(**ids, batch_size=[2])))",
    "SchedulerList": "kind([]).step()",
    "SliceSampler": "assert buffer(sampler=kind(slice_len=2, replacement=False)).sample().shape == (4,)",
    "StepScheduler": "kind(buffer(sampler=rbtool.PrioritizedSampler(6, 0.6, 0.4)), 'beta').step()",
    "StorageEnsembleCheckpointer": "storage = rbtool.StorageEnsemble(filled(rbtool.LazyTensorStorage(6)))\n"
    "storage.checkpointer = kind()\nsaved(storage)",
    "StreamSampler": "pickle.loads(pickle.dumps(kind()))",
    "StreamSliceSampler": "pickle.loads(pickle.dumps(kind(slice_len=2)))",
    "TensorStorage": "saved(kind(steps))",
    "TokenizedDatasetLoader": "kind('train', 3, dataset, rbtool.TensorDictTokenizer, from_disk=True, tokenizer=str)",
    "TorchDataset": "next(iter(rbtool.torch_dataset(dataset, 4)))",
    "TorchMapDataset": "rbtool.torch_dataset(dataset, 4, style='map')[0]",
    "Trajectory": "kind(steps[:3])",
    "TrajectoryPredicate": "rbtool.traj.reward",
    "Transition": "assert buffer(sample_unit=kind()).sample().shape == (4,)",
    "VLAAction": "saved(filled(rbtool.LazyTensorStorage(2), kind(chunk=torch.ones(2, 3), batch_size=[2])))",
    "VLAImages": "kind(image=torch.ones(2, 3), batch_size=[2])",
    "VLAObservation": "kind(state=torch.ones(2, 3), batch_size=[2])",
    "VideoClipRef": "kind('a.mp4', torch.arange(2), torch.zeros(2), batch_size=[2])",
}  # fmt: skip
"""A use of each public class whose docstring has no example, or of what that leaves out."""

PUBLIC_CLASSES = {name: kind for name in rbtool.__all__ if inspect.isclass(kind := getattr(rbtool, name))}
FIRST_OF_MODULES = {kind.__module__: name for name, kind in reversed(PUBLIC_CLASSES.items())}.values()
"""A class of each module: what the others of a module import, it imports as well."""


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A dataset in layout `ted` and the same in layout `packed`."""
    folder = tmp_path_factory.mktemp("first")
    write_walks(folder / "ted", [(5, "terminated"), (4, "truncated")])
    rbtool.convert(folder / "ted", folder / "packed", layout="packed")
    return folder / "ted", folder / "packed"


@pytest.mark.parametrize(
    "name",
    [name if name in FIRST_OF_MODULES else pytest.param(name, marks=pytest.mark.slow) for name in PUBLIC_CLASSES],
)
def test_a_public_class_may_be_the_first_thing_that_a_process_uses(
    name: str, datasets: tuple[Path, Path], interpreter: Interpreter, tmp_path: Path
) -> None:
    kind = getattr(rbtool, name)
    use = FIRST_USES.get(name, "assert str(kind('text'))" if issubclass(kind, rbtool.RbtoolError) else "")
    assert use or ">>>" in (kind.__doc__ or ""), "neither FIRST_USES nor its docstring has a use of it"
    variables = os.environ | {"OMP_NUM_THREADS": "1", "RBTOOL_HOME": str(tmp_path), "RBTOOL_OFFLINE": "1"}
    done = interpreter.run(FIRST_USE, name, use, *datasets, cwd=tmp_path, environment=variables)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("made", ["rbtool.LazyTensorStorage(6)", "rbtool.ListStorage(6)"])
def test_a_storage_that_was_passed_to_another_process_is_saved_there(
    made: str, interpreter: Interpreter, tmp_path: Path
) -> None:
    writes = (
        "import os, pathlib, pickle, rbtool, torch\nfrom tensordict import TensorDict\n"
        f"storage = {made}\nstorage.set(range(3), TensorDict({{'a': torch.arange(3)}}, [3]))\n"
        "pathlib.Path('passed').write_bytes(pickle.dumps(storage))\nos._exit(0)  # its files stay"
    )
    reads = (
        "import pathlib, pickle\nstorage = pickle.loads(pathlib.Path('passed').read_bytes())\n"
        "storage.dumps('saved')\nassert len(storage) == 3"
    )
    for script in (writes, reads):
        done = interpreter.run(script, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")


def test_checkpoints_of_our_own_classes_need_no_import(interpreter: Interpreter, tmp_path: Path) -> None:
    writes = (
        "import rbtool, torch\nbuffer = rbtool.ReplayBuffer(storage=rbtool.LazyTensorStorage(3))\n"
        "buffer.extend(rbtool.VLAAction(chunk=torch.ones(3, 2), batch_size=[3]))\nbuffer.dumps('saved')"
    )
    reads = (
        "import rbtool\nbuffer = rbtool.ReplayBuffer(storage=rbtool.LazyTensorStorage(3))\nbuffer.loads('saved')\n"
        "print(type(buffer[:]).__name__)"
    )
    assert interpreter.run(writes, cwd=tmp_path).returncode == 0
    done = interpreter.run(reads, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "VLAAction\n", "")


# TorchRL's deep paths.


@pytest.mark.parametrize("path", ["data.replay_buffers.samplers", "replay_buffers.samplers", "tensor_specs", "data"])
def test_torchrls_modules_offer_the_public_names(path: str) -> None:
    module = importlib.import_module(f"rbtool.{path}")
    assert functools.reduce(getattr, path.split("."), rbtool) is module
    assert module.SliceSampler is rbtool.SliceSampler
    assert (module.__all__, dir(module)) == (rbtool.__all__, dir(rbtool))
    pickled = pickle.dumps(module.SliceSampler)
    assert (b"rbtool.core.samplers" in pickled, path.encode() in pickled) == (True, False)


@pytest.mark.parametrize("path", ["nothing", "data.data", "samplers", "data.replay_buffers.sampler", "core.data"])
def test_no_other_module_is_made_up(path: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"'rbtool.{path}'"):
        importlib.import_module(f"rbtool.{path}")
    with pytest.raises(ImportError, match="Nothing"):
        from rbtool.data.replay_buffers import Nothing  # noqa: F401


def test_a_name_that_only_torchrl_has_gives_advice() -> None:
    for module in (rbtool, importlib.import_module("rbtool.data.replay_buffers.storages")):
        with pytest.raises(AttributeError, match="'StoreStorage': it needs a server; a LazyMemmapStorage"):
            module.StoreStorage  # noqa: B018
    with pytest.raises(AttributeError, match=r"'Nothing'$"):
        rbtool.Nothing  # type: ignore[attr-defined]  # noqa: B018


def test_torchrls_modules_cost_nothing_that_imports_none(tmp_path: Path) -> None:
    loaded = "print('loaded:', *(name for name in sys.modules if name.endswith(('torchrl_classes', 'rbtool.data'))))"
    assert python(f"import sys, rbtool; {loaded}; import rbtool.data; {loaded}", tmp_path).splitlines() == [
        "loaded:",
        "loaded: rbtool.core.torchrl_classes rbtool.data",
    ]
