"""Strikes a job at its n-th change of the file system, looks at what is left, and runs it again at once, twice.

    python runner.py WORK JOB [--fault kill|fill] [--strikes N] [--over]
    python runner.py --serve

WORK is a folder prepared by the test, with what jobs read. `kill` stops the process with SIGKILL; `fill` takes every
free byte of the file system (WORK is then on a small one of its own). The job runs in a forked child, so that hundreds
of faults cost one start of Python. Afterwards the destination must be absent, the old result or the new one, byte for
byte; the next two runs must succeed, give the same content and leave nothing behind. A job that can resume is run again
both so and from the start. What a download has fetched may stay until its second run. `--strikes` spreads so many
faults over the job, the last at its end; without it all operations are struck.

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import rbtool
from rbtool.core.format.packed.reader import ted_digest
from rbtool.core.opening import TorchrlSteps, open_steps

sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))

MODULES = {
    "exchange": ("rbtool.core.checkpointers", "buffers_of_episodes", "h5py"),
    "dump": ("rbtool.core.checkpointers", "buffers_of_episodes"),
    "preprocess": ("tensordict", "rbtool.core.verbs.preprocess"),
    "download": (
        "anyio", "h5py", "httpcore2", "httpx2", "tenacity", "truststore", "yaml",
        "rbtool.converters.minari.reader", "rbtool.converters.minari.source", "rbtool.core.verbs.download",
    ),
}  # fmt: skip
_FRESH = ("huggingface_hub.utils",)
"""What reads the variables that say where the hub is when it is imported."""
_FOLDERS = {"os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.link": 2, "os.mkdir": 2}
"""Where among the arguments of an event the folders begin that its paths count from, -1 for none."""
WATCHED = {"rbtool.fs", "open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link"}


def scale(rows: Any) -> Any:
    """Preprocess function of the crash jobs."""
    rows["observation"] = rows["observation"] * 2
    return rows


def shorten(rows: Any) -> Any:
    """Preprocess function whose result has fewer rows."""
    return rows[: len(rows) // 2 + 1]


_OFTEN = {"chunk_size": 20, "force": True, "resume": True}
PREPROCESSING: dict[str, dict[str, Any]] = {
    "preprocess": {"fn": scale, "num_workers": 0, **_OFTEN},
    "preprocess-fewer": {"fn": shorten, "unit": "episode", "num_workers": 0, **_OFTEN},
    "preprocess-parent": {"fn": scale, "num_workers": 2, "start_method": "fork", **_OFTEN},
    "preprocess-worker": {"fn": shorten, "unit": "episode", "num_workers": 2, "start_method": "fork", **_OFTEN},
}

CONVERTING = {f"convert-{layout}-{who}": layout for layout in ("ted", "packed") for who in ("parent", "worker")}
DOWNLOADED = "cartpole/scripted-v0"


def _download(dest: Path) -> None:
    rbtool.download("minari", DOWNLOADED, root=dest.parents[2], force=True)


def _dump(form: str, dest: Path, rows: int) -> None:
    """Save the episodes of a small buffer, which a killed process would have been training from."""
    from buffers_of_episodes import BufferPlan

    import rbtool

    storage = BufferPlan(rows, (rows, 9), ends=0.1, seed=rows, oddities=("jumps", "agents", "types")).buffer()._storage
    getattr(rbtool, f"{form.capitalize()}StorageCheckpointer")().dumps(storage, dest)


def _exchange(form: str, dest: Path, rows: int) -> None:
    """Save the episodes of a small buffer as TorchRL reads them."""
    from buffers_of_episodes import BufferPlan

    import rbtool

    storage = BufferPlan(rows, (rows,), ends=0.1, seed=rows, oddities=("specials",)).buffer()._storage
    getattr(rbtool, f"{form.capitalize()}StorageCheckpointer")(compatible=True).dumps(storage, dest)


def _destination(out: Path, job: str) -> Path:
    if job in {"dump-h5", "exchange-h5", "give-h5"}:
        return out / "result.h5"
    names = {"export": "export", "mix": "result.toml", "download": f"minari/{DOWNLOADED}"}
    return out / names.get(job.partition("-")[0], "result")


def _jobs(work: Path) -> dict[str, Callable[[Path], object]]:
    data, source, forms = work / "dataset", work / "source", ("ted", "flat", "nested", "h5")
    jobs: dict[str, Callable[[Path], object]] = {"download": _download}
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
        jobs[name] = lambda dest, options=options, **more: rbtool.preprocess(data, dest=dest, **options | more)  # type: ignore[misc]
    for form in forms[1:]:
        jobs[f"dump-{form}"] = lambda dest, form=form: _dump(form, dest, 60)  # type: ignore[misc]
        jobs[f"exchange-{form}"] = lambda dest, form=form: _exchange(form, dest, 60)  # type: ignore[misc]
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


def _forked(
    job: Callable[[Path], object], out: Path, dest: Path, fault: Callable[[], None] | None, at: int, who: str = ""
) -> tuple[int, int]:
    """Run the job in a child, with the fault at operation `at`; return its status and how many it counted."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 1
        try:
            _strike(fault, at, out, writing, who)
            job(dest)
            code = 0
        except rbtool.OutOfSpaceError as error:
            code = error.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        counted = len(pipe.read())
    _, status = os.waitpid(child, 0)
    return status, counted


def _strike(fault: Callable[[], None] | None, at: int, watch: Path, pipe: int, who: str) -> None:
    """Count the operations below `watch`, a byte into the pipe each, and call the fault at the n-th.

    `who` `parent` counts those of this process alone; `worker` those of the processes it forks, of which the first to
    get there is struck.
    """
    numbers, prefix, parent, struck = itertools.count(1), str(watch), os.getpid(), watch.parent / "struck"

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in WATCHED or not _changes(event, arguments, prefix):
            return
        if who and (who == "parent") != (os.getpid() == parent):
            return
        if who == "worker" and struck.exists():
            return
        number = next(numbers)  # in one step: a download has several threads
        os.write(pipe, b".")
        if number == at and fault is not None:
            if who == "worker":
                struck.touch()
            fault()

    sys.addaudithook(hook)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fill(filler: Path) -> Callable[[], None]:
    """Make a fault that leaves not one free block."""

    def fill() -> None:
        descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT)
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while os.write(descriptor, bytes(size)) == size:
                    pass
        os.close(descriptor)

    return fill


def _changes(event: str, arguments: tuple[Any, ...], prefix: str) -> bool:
    """Tell whether an event changes something below the watched folder."""
    if event == "open":
        path, _, flags = arguments
        return str(path).startswith(prefix) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    paths = [os.fsdecode(part) for part in arguments if isinstance(part, str | bytes | os.PathLike)]
    return any(path.startswith(prefix) for path in paths) or _is_below(event, arguments, prefix)


def _is_below(event: str, arguments: tuple[Any, ...], prefix: str) -> bool:
    """Tell whether a path of the event counts from a folder below the watched one that is open: rmtree works so."""
    folders = arguments[_FOLDERS[event] :] if event in _FOLDERS else ()
    return any(folder >= 0 and str(Path(f"/proc/self/fd/{folder}").readlink()).startswith(prefix) for folder in folders)


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
        if isinstance(reader, TorchrlSteps):  # no manifest is there to say it
            return ted_digest(reader)
        return reader.manifest.content_digest


def _digest(dest: Path) -> str:
    """Digest of every byte of what has no manifest: an export, or a mixture file."""
    files = [dest] if dest.is_file() else sorted(path for path in dest.rglob("*") if path.is_file())
    parts = [f"{path.relative_to(dest)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _trial(
    name: str, job: Callable[[Path], object], out: Path, dest: Path, at: int, fault: str, old: str | None, new: str
) -> str:
    filler, who = out.parent / "filler", _who(name)
    (out.parent / "struck").unlink(missing_ok=True)
    status, counted = _forked(job, out, dest, _fill(filler) if fault == "fill" else _kill, at, who)
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
        _twice(way, out, dest, new, f"struck at {at}")
    return "new" if found == new else "old"


def _ways(name: str, job: Callable[[Path], object], at: int) -> list[Callable[[Path], object]]:
    """How a job is run again: where it can resume, so and from the start, each on what the strike left.

    Where workers may outlive the strike by a moment, nothing can be copied: one way, in turn.
    """
    if name not in {*PREPROCESSING, *CONVERTING}:
        return [job]

    def from_the_start(dest: Path) -> object:
        return job(dest, resume=False)  # type: ignore[call-arg]

    return [(job, from_the_start)[at % 2]] if _who(name) else [job, from_the_start]


def _twice(job: Callable[[Path], object], out: Path, dest: Path, new: str, struck: str) -> None:
    for run in ("the first run after it", "the second run after it"):
        status, _ = _forked(job, out, dest, None, 0)
        assert status == 0, f"{struck}: {run} failed"
        assert _state(dest) == new, f"{struck}: {run} gave something else"
        _nothing_left(out, dest, f"{struck}: {run}")


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
    if options.job != "download" and not _who(options.job):  # which start threads and processes
        (options.work / "warm").mkdir()
        job(_destination(options.work / "warm", options.job))  # what it imports, no child has to
    new, operations = _reference(options, job)
    seen = {"old": 0, "new": 0}
    strikes = options.strikes or operations
    for at in sorted({round((number + 1) * operations / strikes) for number in range(strikes)}):
        out = options.work / f"out-{at}"
        out.mkdir()
        dest = _destination(out, options.job)
        old = _put_older(options, dest) if options.over else None
        seen[_trial(options.job, job, out, dest, at, options.fault, old, new)] += 1
        shutil.rmtree(out)
    return {"operations": operations, **seen}


@contextlib.contextmanager
def _hub(work: Path) -> Iterator[None]:
    """Serve the Minari dataset as its hub would."""
    hub, minari_hub = importlib.import_module("hub"), importlib.import_module("minari_hub")
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(work / "source", Path(place) / "minari" / DOWNLOADED)
        with hub.Hub(minari_hub.lay_out_hub(Path(place) / "minari", Path(place) / "hub")) as server:
            os.environ.update(server.environment(Path(place) / "hf"))
            yield


def _reference(options: argparse.Namespace, job: Callable[[Path], object]) -> tuple[str, int]:
    out = options.work / "reference"
    dest = _destination(out, options.job)
    out.mkdir()
    if options.over:
        _put_older(options, dest)
    status, operations = _forked(job, out, dest, None, 0, _who(options.job))
    digest = _state(dest)
    assert status == 0, status
    assert digest, "nothing was published"
    assert operations > (5 if options.job == "mix" else 20), operations
    return digest, operations


def _put_older(options: argparse.Namespace, dest: Path) -> str:
    """Put other data to the destination, for the job to replace."""
    verb, _, form = options.job.partition("-")
    if verb == "dump":
        _dump(form, dest, 20)
    elif verb == "exchange":
        _exchange(form, dest, 20)
    elif verb == "give":
        rbtool.checkpoint.save(options.work / "older", dest, form=form, for_library="torchrl")
    elif verb == "mix":
        rbtool.mix([options.work / "older", options.work / "dataset"], dest, p=[1, 2])
    elif verb == "export":
        rbtool.export(options.work / "older", dest, to=form)
    else:
        rbtool.checkpoint.save(options.work / "older", dest, form="ted")
    return _state(dest) or "nothing"


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        _serve()
    main(sys.argv[1:])
