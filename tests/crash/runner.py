"""Strikes a job at its n-th change of the file system, looks at what is left, and runs it again at once, twice.

    python runner.py WORK JOB [--fault kill|fill] [--strikes N | --changes] [--over]
    python runner.py --serve

WORK is a folder prepared by the test, with what jobs read. `kill` stops the process with SIGKILL; `fill` takes every
free byte of the file system (WORK is then on a small one of its own). The job runs in a forked child, so that hundreds
of faults cost one start of Python. Afterwards the destination must be absent, the old result or the new one, byte for
byte; the next two runs must succeed, give the same content and leave nothing behind: they run in this process, which a
fork and its copies of pages would take three times as long, unless they start threads or processes. A job that can
resume is run again both so and from the start. What a download has fetched may stay until its second run.

All operations are struck. `--changes` leaves out those before which no file has changed since the operation before:
they leave what is left by that one. `--strikes` spreads so many faults over the job, the last at its end.

`--serve` reads lines of such arguments, each a JSON list that begins with a path for what is printed, runs each in a
forked child, and answers with its exit code: 40 tests then start Python and torch once, which takes 6 s.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import rbtool
from rbtool.core.format.packed.reader import ted_digest
from rbtool.core.open_steps import ForeignSteps, open_steps

sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))

from strikes import Course, Job, course_of, filling, forked, kill, spread

MODULES = {
    "exchange": ("rbtool.core.checkpointers", "buffers_of_episodes", "h5py"),
    "dump": ("rbtool.core.checkpointers", "buffers_of_episodes"),
    "preprocess": ("tensordict", "rbtool.core.preprocess.preprocess"),
    "download": (
        "anyio", "h5py", "httpcore2", "httpx2", "tenacity", "truststore", "yaml",
        "rbtool.converters.minari.reader", "rbtool.converters.minari.source", "rbtool.core.verbs.download",
    ),
}  # fmt: skip
_FRESH = ("huggingface_hub.utils",)
"""What reads the variables that say where the hub is when it is imported."""


def scale(rows: Any) -> Any:
    """Preprocess function of the crash jobs."""
    rows["observation"] = rows["observation"] * 2
    return rows


def shorten(rows: Any) -> Any:
    """Preprocess function whose result has fewer rows."""
    return rows[: len(rows) // 2 + 1]


def negate(rows: Any) -> Any:
    """Preprocess function whose result shares other leaves with its source."""
    rows["action"] = -rows["action"]
    return rows


_OF_VIDEOS = {"where": "frame >= 2", "action_space": "0:2=numbers,as=delta,state=observation.state[0:2]"}
"""The videos of both cameras are kept. What is encoded again is left out: its bytes may differ from run to run."""
_OFTEN = {"chunk_size": 20, "force": True, "resume": True}
PREPROCESSING: dict[str, dict[str, Any]] = {
    "preprocess": {"fn": scale, "num_workers": 0, **_OFTEN},
    "preprocess-fewer": {"fn": shorten, "unit": "episode", "num_workers": 0, **_OFTEN},
    "preprocess-shared": {"fn": scale, "num_workers": 0, **_OFTEN, "chunk_size": 200},
    "preprocess-videos": {"operations": _OF_VIDEOS, "num_workers": 0, **_OFTEN},
    "preprocess-parent": {"fn": scale, "num_workers": 2, "start_method": "fork", **_OFTEN},
    "preprocess-worker": {"fn": shorten, "unit": "episode", "num_workers": 2, "start_method": "fork", **_OFTEN},
}

CONVERTING = {f"convert-{layout}-{who}": layout for layout in ("ted", "packed") for who in ("parent", "worker")}
DOWNLOADED = "cartpole/scripted-v0"


def _download(dest: Path) -> None:
    rbtool.download("minari", DOWNLOADED, root=dest.parents[2], force=True)


def _dump(form: str, dest: Path, rows: int, *, compatible: bool = False) -> None:
    """Save the episodes of a small buffer, from which a killed process would have trained; if asked, for TorchRL."""
    from buffers_of_episodes import BufferPlan

    import rbtool

    plan = BufferPlan(rows, (rows, 9), ends=0.1, seed=rows, oddities=("jumps", "agents", "types"))
    if compatible:
        plan = BufferPlan(rows, (rows,), ends=0.1, seed=rows, oddities=("specials",))
    checkpointer = getattr(rbtool, f"{form.capitalize()}StorageCheckpointer")(compatible=compatible)
    checkpointer.dumps(plan.buffer()._storage, dest)


def _preprocess(source: Path, options: Mapping[str, Any], dest: Path, **more: Any) -> None:
    rbtool.preprocess(source, dest=dest, **{**options, **more})


_SHARED = {"preprocess-shared": "frozen", "preprocess-videos": "kept"}
"""Datasets of read-only files, to which results have hard links, by job."""


def _destination(out: Path, job: str) -> Path:
    if job in {"dump-h5", "exchange-h5", "give-h5"}:
        return out / "result.h5"
    names = {"export": "export", "mix": "result.toml", "download": f"minari/{DOWNLOADED}"}
    return out / names.get(job.partition("-")[0], "result")


def _jobs(work: Path) -> dict[str, Job]:
    data, source, forms = work / "dataset", work / "source", ("ted", "flat", "nested", "h5")
    jobs: dict[str, Job] = {"download": _download}
    for name, raw in {"archive": "archive.tar.xz", "episodes": "episodes"}.items():
        options: dict[str, Any] = {"force": True, "trust_pickle": True}
        jobs[f"convert-{name}"] = lambda dest, raw=raw, options=options: rbtool.convert(work / raw, dest, **options)  # type: ignore[misc]
    raws = ("source", "-blocks table.hdf5", "-checkpoints run", "-shards shards", "-videos videos")
    for name, _, raw in (one.rpartition(" ") for one in raws):
        jobs[f"convert{name}"] = lambda dest, raw=raw: rbtool.convert(work / raw, dest, force=True)  # type: ignore[misc]
    for name, layout in CONVERTING.items():
        options = {"force": True, "num_workers": 2, "layout": layout, "resume": True}
        jobs[name] = lambda dest, options=options, **more: rbtool.convert(source, dest, **options | more)  # type: ignore[misc]
    for name, options in PREPROCESSING.items():
        jobs[name] = partial(_preprocess, work / _SHARED.get(name, "dataset"), options)
    for form in forms[1:]:
        jobs[f"dump-{form}"] = partial(_dump, form, rows=60)
        jobs[f"exchange-{form}"] = partial(_dump, form, rows=60, compatible=True)
        jobs[f"give-{form}"] = lambda dest, form=form: rbtool.checkpoint.save(  # type: ignore[misc]
            data, dest, form=form, for_library="torchrl", force=True
        )
    for form in forms:
        jobs[f"save-{form}"] = lambda dest, form=form: rbtool.checkpoint.save(data, dest, form=form, force=True)  # type: ignore[misc]
        jobs[f"load-{form}"] = lambda dest, form=form: rbtool.checkpoint.load(work / f"saved-{form}", dest, force=True)  # type: ignore[misc]
    jobs["merge"] = lambda dest: rbtool.merge([data, work / "saved-h5"], dest, force=True)
    jobs["mix"] = lambda dest: rbtool.mix([data, work / "older"], dest, p="size", force=True)
    jobs["split"] = lambda dest: rbtool.split(data, dest, train=0.5, val=0.25, test=0.25, force=True)
    for form in ("h5", "lerobot", "minari", "npz", "parquet", "rlds"):
        jobs[f"export-{form}"] = lambda dest, form=form: rbtool.export(data, dest, to=form, force=True)  # type: ignore[misc]
    return jobs


def _state(dest: Path) -> str | None:
    """Content digest of what is whole at the destination, None if nothing is there."""
    if not dest.exists():
        return None
    if dest.name in {"export", "result.toml"}:
        return _digest(dest)
    if (dest / "split.json").is_file():
        return " ".join(f"{part.name} {_state(part)}" for part in sorted(dest.iterdir()) if part.is_dir())
    with open_steps(dest) as reader:
        reader.verify_files()
        if isinstance(reader, ForeignSteps):  # no manifest is there to say it
            return ted_digest(reader)
        return reader.manifest.content_digest


def _digest(dest: Path) -> str:
    """Digest of every byte of what has no manifest: an export, or a mixture file."""
    files = [dest] if dest.is_file() else sorted(path for path in dest.rglob("*") if path.is_file())
    parts = [f"{path.relative_to(dest)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _trial(name: str, job: Job, out: Path, dest: Path, at: int, fault: str, old: str | None, new: str) -> str:
    filler, who = out.parent / "filler", _who(name)
    (out.parent / "struck").unlink(missing_ok=True)
    status, counted = forked(job, out, dest, filling(filler) if fault == "fill" else kill, at, who)
    code = os.waitstatus_to_exitcode(status)
    expected = {0, 6} if fault == "fill" else {-signal.SIGKILL}
    if job is _download and counted < at:  # what comes over a network comes in more or fewer pieces
        expected.add(0)
    if who == "worker":  # another one takes its place in preprocess, and a conversion ends with an error
        expected = {0, 1} if name in CONVERTING else {0}  # 0 where neither of them has so many operations
    assert code in expected, f"struck at operation {at}: exit {code}"
    found = _state(dest)
    assert found in ({new} if code == 0 else {old, new}), f"struck at {at}: {found}, expected {old} or {new}"
    if code == 1:
        assert found == old, f"struck at {at}: {found} was published"
    if name in _SHARED:
        assert _state(out.parent / _SHARED[name]), f"struck at {at}: the source is gone"  # it has the bytes that it had
    if fault == "fill":
        if job is not _download and name not in {*PREPROCESSING, *CONVERTING}:  # those continue where they ended
            _nothing_left(out, dest, f"struck at {at}")
        filler.unlink(missing_ok=True)
    kept = out.with_name(f"{out.name}-kept")
    ways = _ways(name, job, at)
    if len(ways) > 1:
        shutil.copytree(out, kept, symlinks=True)
    for number, way in enumerate(ways):
        if number:
            shutil.rmtree(out)
            kept.rename(out)
        _twice(way, out, dest, new, f"struck at {at}", apart=not _stays_alone(name))
        if name in _SHARED:
            assert _state(out.parent / _SHARED[name]), f"struck at {at}: the source is gone after another run"
            assert any(one.stat().st_nlink > 1 for one in dest.rglob("*") if one.is_file()), "nothing is shared"
    return "new" if found == new else "old"


def _ways(name: str, job: Job, at: int) -> list[Job]:
    """How a job is run again: where it can resume, so and from the start, each on what the strike left.

    Where workers may outlive the strike by a moment, nothing can be copied: one way, in turn.
    """
    if name not in {*PREPROCESSING, *CONVERTING}:
        return [job]

    def from_the_start(dest: Path) -> object:
        return job(dest, resume=False)  # type: ignore[call-arg]

    return [(job, from_the_start)[at % 2]] if _who(name) else [job, from_the_start]


def _twice(job: Job, out: Path, dest: Path, new: str, struck: str, *, apart: bool) -> None:
    for run in ("the first run after it", "the second run after it"):
        if apart:
            status, _ = forked(job, out, dest, None, 0)
            assert status == 0, f"{struck}: {run} failed"
        else:
            job(dest)
        assert _state(dest) == new, f"{struck}: {run} gave something else"
        _nothing_left(out, dest, f"{struck}: {run}")


def _stays_alone(name: str) -> bool:
    """Tell whether a job starts no threads and processes."""
    return name != "download" and not _who(name)


def _who(name: str) -> str:
    return name.rpartition("-")[2] if name in {"preprocess-parent", "preprocess-worker", *CONVERTING} else ""


def _nothing_left(out: Path, dest: Path, when: str) -> None:
    left = sorted(
        str(path.relative_to(out))
        for path in out.rglob("*")
        if not path.is_relative_to(dest) and not (path.is_dir() and dest.is_relative_to(path))
        if path.name != ".originals"
    )
    assert not left, f"{when}: {left} were left behind"


def main(words: Sequence[str]) -> None:
    """Strike one job at all its operations and print the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("job")
    parser.add_argument("--fault", choices=["kill", "fill"], default="kill")
    parser.add_argument("--strikes", type=int, help="how many operations to strike; all by default")
    parser.add_argument("--changes", action="store_true", help="strike those between which files change")
    parser.add_argument("--over", action="store_true", help="put an older result at the destination first")
    options = parser.parse_args(words)
    with _hub(options.work) if options.job == "download" else contextlib.nullcontext():
        for module in (*MODULES.get(options.job.partition("-")[0], ()), *(_FRESH if options.job == "download" else ())):
            importlib.import_module(module)  # once here, not in every child
        print(json.dumps(_strike_everywhere(options)), flush=True)


def _serve() -> NoReturn:
    """Run what each line of the standard input asks for, until it ends."""
    for module in itertools.chain.from_iterable(MODULES.values()):
        importlib.import_module(module)
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            place, *words = json.loads(line)
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{place}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            code = 1
            try:
                main(words)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()


def _strike_everywhere(options: argparse.Namespace) -> dict[str, int]:
    job = _jobs(options.work)[options.job]
    if _stays_alone(options.job):
        (options.work / "warm").mkdir()
        job(_destination(options.work / "warm", options.job))  # what it imports, no child has to
    old = None
    (options.work / "before").mkdir()
    if options.over:
        old = _put_older(options, _destination(options.work / "before", options.job))
    new, course = _reference(options, job)
    seen = {"old": 0, "new": 0}
    places = course.changes if options.changes else tuple(range(1, course.operations + 1))
    for at in spread(places, options.strikes):
        out = options.work / f"out-{at}"
        shutil.copytree(options.work / "before", out, symlinks=True)
        dest = _destination(out, options.job)
        seen[_trial(options.job, job, out, dest, at, options.fault, old, new)] += 1
        shutil.rmtree(out)
    return {"operations": course.operations, "changes": len(course.changes), **seen}


@contextlib.contextmanager
def _hub(work: Path) -> Iterator[None]:
    """Serve the Minari dataset as its hub would."""
    hub = importlib.import_module("hub")
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(work / "source", Path(place) / "minari" / DOWNLOADED)
        with hub.Hub(hub.lay_out_hub(Path(place) / "minari", Path(place) / "hub")) as server:
            os.environ.update(server.environment(Path(place) / "hf"))
            yield


def _reference(options: argparse.Namespace, job: Job) -> tuple[str, Course]:
    out = options.work / "reference"
    dest = _destination(out, options.job)
    shutil.copytree(options.work / "before", out, symlinks=True)
    course = course_of(job, out, dest, _who(options.job))
    digest = _state(dest)
    assert course.status == 0, course.status
    assert digest, "nothing was published"
    assert course.operations > (5 if options.job == "mix" else 20), course.operations
    return digest, course


def _put_older(options: argparse.Namespace, dest: Path) -> str:
    """Put other data to the destination, for the job to replace."""
    verb, _, form = options.job.partition("-")
    if verb in {"dump", "exchange"}:
        _dump(form, dest, 20, compatible=verb == "exchange")
    elif verb == "give":
        rbtool.checkpoint.save(options.work / "older", dest, form=form, for_library="torchrl")
    elif verb == "mix":
        rbtool.mix([options.work / "older", options.work / "dataset"], dest, p=[1, 2])
    elif options.job == "preprocess-shared":
        rbtool.preprocess(options.work / "frozen", negate, dest, num_workers=0)
    elif verb == "export":
        rbtool.export(options.work / "older", dest, to=form)
    else:
        rbtool.checkpoint.save(options.work / "older", dest, form="ted")
    return _state(dest) or "nothing"


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        _serve()
    main(sys.argv[1:])
