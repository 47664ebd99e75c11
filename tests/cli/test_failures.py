"""Failures, interrupts and missing resources: one sentence, the right exit code, a document with `--json`."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import each
from waiting import HANG

import rbtool
from rbtool.cli.failures import Stopped, as_given, final_names, report
from rbtool.cli.output import Output
from rbtool.core import errors
from rbtool.core.format.staging import new_sibling
from rbtool.core.testing.datasets import DatasetPlan, PlannedLeaf, write_plan

FAILING = [
    ("rbtool inspect ./nothing", 4, "DatasetNotFoundError", "nothing not found"),
    ("rbtool inspect minari:no/such-v0", 4, "DatasetNotFoundError", "minari:no/such-v0 is not in"),
    ("rbtool inspect ''", 2, "UsageError", "one of the datasets is empty"),
    ("rbtool stats cartpole --write-lerobot ''", 2, "UsageError", "--write-lerobot is empty"),
    ("rbtool stats cartpole --field ''", 2, "UsageError", "a value of --field is empty"),
    ("rbtool convert minari/tuple/trunc-v0 prep.py", 2, "UsageError", "left unchanged"),
    ("rbtool convert prep.py x", 1, "FormatError", "prep.py"),
    ("rbtool download minari no/such-v0 --local", 4, "DatasetNotFoundError", "minari"),
    ("rbtool download minari ../x --local", 2, "UsageError", "not a dataset id"),
    ("rbtool download minari", 2, "UsageError", "no dataset named"),
    ("rbtool convert minari/tuple/trunc-v0 x --episodes 9", 2, "UsageError", "--episodes"),
    ("rbtool list --log-file /no/such/folder/x", 2, "UsageError", "log file"),
    ("rbtool lst", 2, "UsageError", "no such command 'lst'. Did you mean 'list'?"),
    ("rbtool help inspct", 2, "UsageError", "no such command 'inspct'. Did you mean 'inspect'?"),
    ("rbtool list --color sometimes", 2, "UsageError", "'sometimes' is not one of auto, always, never"),
    ("rbtool download minari nobody/there-v0 --offline", 5, "NetworkError", "RBTOOL_OFFLINE=1 forbids"),
    ("rbtool export cartpole x", 2, "UsageError", "x: the format to export is unclear; expected one of the suffixes"),
    ("rbtool export cartpole out.csv", 2, "UsageError", "out.csv: .csv files are not written; expected one of the"),
    ("rbtool mix a.toml cartpole:1 cartpole:1", 2, "UsageError", "the destination comes last, and cartpole:1 does not"),
    ("rbtool checkpoint save cartpole x", 2, "UsageError", "--as is missing: ted, flat, nested or h5"),
    ("rbtool stats minari/tuple/trunc-v0", 2, "UsageError", "a TED dataset is needed; minari/tuple/trunc-v0 is Minari"),
    ("rbtool inspect minari/tuple/trunc-v0/data/main_data.hdf5", 2, "UsageError", "is one file of a Minari dataset"),
    ("rbtool checkpoint sav", 2, "UsageError", "no such command 'sav'. Did you mean 'save'?"),
    ("rbtool convert x", 2, "UsageError", "missing argument 'DEST'"),
    ("rbtool sample --rot x", 2, "UsageError", "no such option: --rot. Did you mean --root?"),
    ("rbtool inspect x --episode two", 2, "UsageError", "'--episode': 'two' is not a whole number"),
    ("rbtool stats cartpole x y", 2, "UsageError", "too many arguments: x y"),
    ("rbtool inspect kitchen.hdf5 --from csv", 2, "UsageError", "is unknown; tables are of format 'table'"),
    ("rbtool export cartpole x --to parqet", 2, "UsageError", "parquet, mcap; did you mean 'parquet'?"),
    ("rbtool inspect cartpole/next", 2, "UsageError", "cartpole/next is part of a dataset"),
    ("rbtool checkpoint save x y --as zip", 2, "UsageError", "'zip' is not one of ted, flat, nested, h5"),
    ("rbtool mix prep.py:0.5 cartpole:0.5 x.toml", 1, "FormatError", "prep.py is not"),
    ("rbtool repair ./prep.py", 1, "FormatError", "./prep.py is not a recording"),
    ("rbtool repair nothere/", 4, "DatasetNotFoundError", "nothere not found"),
    ("rbtool plot cartpole -o prep.py/x.svg", 2, "UsageError", "prep.py is a file, and the destination prep.py/x.svg"),
    ("rbtool report cartpole --output=cartpole/x.html", 2, "UsageError", "cartpole/x.html is inside the dataset cart"),
    ("rbtool merge cartpole cartpole.h5 prep.py", 2, "UsageError", "prep.py already exists"),
    ("rbtool record CartPole-v1 cartpole --episodes 1", 2, "UsageError", "cartpole exists already"),
]


UNKNOWN_FIELDS = [
    ("stats cartpole --field rewrd", "next.reward"),
    ("stats cartpole.h5 --field obs", "observation"),
    ("sample cartpole --sampler prioritized --priority next.rewrd", "next.reward"),
    ("preprocess cartpole --dest x --select action,observaton", "observation"),
    ("preprocess cartpole --dest x --exclude next.observaton", "next.observation"),
    ("preprocess cartpole --dest x --filter 'lenght > 3'", "length"),
    ("preprocess cartpole --dest x --where 'rewrd > 3'", "reward"),
    ("preprocess cartpole --dest x --rename acton=move", "action"),
    ("preprocess cartpole --dest x --cast ACTION=float32", "action"),
    ("preprocess cartpole --dest x --cat all=observation,acton", "action"),
    ("preprocess cartpole --dest x --resize observaton=8x8", "observation"),
    ("preprocess cartpole --dest x --normalize observaton", "observation"),
    ("convert cartpole x --layout packed --compress observaton=zstd", "observation"),
    ("convert minari/cartpole/scripted-v0 x --layout packed --compress observaton=zstd", "observation"),
    ("download minari cartpole/scripted-v0 --local --layout packed --compress observaton=zstd", "observation"),
    ("checkpoint load cartpole.h5 x --layout packed --compress observaton=zstd", "observation"),
    ("plot cartpole --field rewrd", "next.reward"),
    ("split cartpole --train 0.5 --test 0.5 --dest x --by observaton", "observation"),
    ("preprocess cartpole --dest x --fn prep.py:normalise --hindsight future --goal-key observaton", "observation"),
]


@each(("line", "near"), UNKNOWN_FIELDS)
def test_an_unknown_field_is_a_usage_error_that_names_a_similar_one(line, near, shell):
    done = shell(f"rbtool {line}")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"; did you mean {near!r}?\nhint: " in done.stderr


def test_an_unknown_option_or_verb_without_a_similar_one_has_no_advice(shell):
    assert shell("rbtool inspect cartpole --bogus").stderr.splitlines()[0] == "error: no such option: --bogus"
    assert shell("rbtool zzz").stderr.splitlines()[0] == "error: no such command 'zzz'"


@pytest.mark.parametrize(("line", "code", "kind", "said"), FAILING)
def test_a_failure_is_one_sentence_and_a_document(line, code, kind, said, shell, template):
    done = shell(line)
    assert (done.returncode, done.stdout) == (code, "")
    first, *rest = done.stderr.splitlines()
    assert first.startswith("error: ")
    assert said in first
    assert str(template) not in first or "is not in" in first  # paths are shown as they were given
    assert all(line.startswith("hint: ") for line in rest)
    done = shell(f"{line} --json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["exit_code"], error["type"]) == (code, code, kind)
    assert said in error["message"]
    assert done.stderr.startswith(f"error: {error['message']}")
    assert set(error) == {"type", "message", "hint", "exit_code"}


@each("option", ["--json", "-q", "--root x"])
def test_options_without_a_verb_are_explained(option, shell):
    done = shell(f"rbtool {option}")
    assert done.returncode == 2
    assert f"{option.split()[0]} comes after the verb" in done.stderr


def test_tracebacks_are_shown_on_request_and_logged(shell, tmp_path):
    assert "Traceback" not in shell("rbtool inspect ./nothing").stderr
    assert shell("rbtool inspect ./nothing --debug").stderr.count("Traceback") == 1
    done = shell(f"rbtool inspect ./nothing --debug --log-file {tmp_path}/log")
    assert done.stderr.count("hint: ") == 1
    assert (tmp_path / "log").read_text().count("hint: ") == 1
    assert shell(f"rbtool inspect ./nothing -q --log-file {tmp_path}/log").returncode == 4
    log = (tmp_path / "log").read_text()
    assert "DatasetNotFoundError" in log
    assert "Traceback" in log


@each(
    ("line", "said"),
    [
        ("convert a.csv b.csv c.csv out --from table", "too many arguments: c.csv out\nhint: quote a pattern"),
        ("split cartpole a --train 0.5 --test 0.5", "hint: the destination is an option: --dest DEST; rbtool "),
        ("preprocess cartpole x --select action", "hint: the destination is an option: --dest DEST; rbtool "),
        ("inspect minari/tuple/trunc-v0/data/main_data.hdf5", "minari/tuple/trunc-v0\n"),
        ("download door-human-v1", "name it, like: rbtool download minari door-human-v1"),
        ("download 'a b'", "name it, like: rbtool download minari 'a b'"),
        ("download minri", "error: source 'minri' is unknown; did you mean 'minari'?\nhint: known: atari, d4rl"),
        ("download lerobot/pusht", "hint: write: rbtool download lerobot lerobot/pusht\n"),
        ("download d4rl/hopper-medium-v2", "hint: write: rbtool download d4rl hopper-medium-v2\n"),
        ("download minari/D4RL/door/human-v2", "hint: write: rbtool download minari D4RL/door/human-v2\n"),
        ("mix a.toml cartpole:1 more:3", "hint: write: rbtool mix cartpole:1 more:3 a.toml\n"),
        ("merge there cartpole cartpole", "hint: the destination comes last: rbtool merge A B DEST\n"),
        ("export cartpole out.csv", "hint: add --to minari, d4rl, robomimic, rlds, lerobot, lance, zarr, d3rlpy"),
        ("download minari", "name one, like: rbtool download minari D4RL/door/human-v2"),
        ("download d4rl", "name one, like: rbtool download d4rl hopper-medium-v2"),
        ("inspect arcade:pong", "hint: there is no source 'arcade' here; known: minari, d4rl"),
        ("inspect kitchen.hdf5 --from minari", "hint: the content is in format d4rl: leave out --from"),
        ("check log.csv", "hint: its columns can be mapped: rbtool convert log.csv DEST --from table"),
        ("stats cartpol", "hint: did you mean cartpole?"),
        ("stats cartpole/scripted-v0", "hint: did you mean minari:cartpole/scripted-v0, which is stored?"),
        ("convert cartpole there --frame-stack 4", "rbtool sample --frame-stack N, or the transform rbtool.StoredFra"),
        ("convert cartpole there --episodes 1:", "hint: rbtool preprocess cartpole --episodes 1: --dest there\n"),
        ("convert cartpole there --max-episodes 2", "hint: rbtool preprocess cartpole --episodes 0:2 --dest there\n"),
        ("download atari Pong/1 --frame-stack=4", "rbtool sample --frame-stack N, or the transform rbtool.StoredFra"),
        ("convert cartpole there --frame-stak 4", "error: no such option: --frame-stak\nhint: rbtool convert --help\n"),
        ("cache rm cartpole/scripted-v0 -y", "hint: did you mean minari:cartpole/scripted-v0?"),
    ],
)
def test_a_hint_proposes_what_was_meant(line, said, shell):
    assert said in shell(f"rbtool {line}").stderr


ALLOCATOR = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000 bytes."


def noted(error: BaseException) -> BaseException:
    error.add_note("hint: 2 chunks are kept")
    return error


@each(
    ("error", "code", "said"),
    [
        (errors.OutOfSpaceError("no room"), 6, "error: no room"),
        (OSError(errno.ENOSPC, "x", "/there"), 6, "error: /there: no space left on device\nhint: free some space"),
        (OSError(errno.EDQUOT, "x", "/there"), 6, "error: /there: "),
        (OSError(errno.EFBIG, "x", "/there"), 6, "error: /there: "),
        (PermissionError(errno.EACCES, "x", "/there"), 1, "error: /there: permission denied\n"),
        (KeyError("observatoin"), 1, "error: internal error: KeyError: 'observatoin'\nhint: add --debug"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, "error: internal error: BrokenPipeError"),
        (MemoryError(), 1, "error: out of memory\nhint: free some"),
        (noted(MemoryError()), 1, "error: out of memory\nhint: free some memory, or raise the limit: ulimit -v; 2 chu"),
        (noted(KeyboardInterrupt()), 130, "error: interrupted\nhint: 2 chunks are kept\n"),
        (noted(KeyError("x")), 1, "error: internal error: KeyError: 'x'\nhint: add --debug for the traceback; 2 chu"),
        (OSError(errno.ENOMEM, "x"), 1, "error: out of memory\n"),
        (RuntimeError(ALLOCATOR), 1, "error: out of memory: 8000 bytes more needed\n"),
        (ImportError("libtorch.so: failed to map segment from shared object"), 1, "error: out of memory"),
        (RuntimeError("something else"), 1, "error: internal error: RuntimeError: something else"),
        (errors.MissingKeyError("no field 'x'", hint="take y"), 1, "error: no field 'x'\nhint: take y"),
        (errors.CheckFailed("bad"), 3, "error: bad"),
        (errors.NetworkError("far"), 5, "error: far"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (Stopped(143), 143, "error: terminated\n"),
        (Stopped(129), 129, "error: the terminal was closed\n"),
    ],
)
def test_every_error_has_a_code_and_a_sentence(error, code, said, capsys):
    assert report(error, Output()) == code
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("allocate", ["np.empty(1 << 60, np.uint8)", "torch.empty(1 << 60)", "bytearray(1 << 60)"])
def test_a_failed_allocation_is_one_sentence(allocate, capsys):
    with pytest.raises((MemoryError, RuntimeError)) as raised:
        eval(allocate, {"np": np, "torch": torch})
    assert report(raised.value, Output()) == 1
    assert capsys.readouterr().err.startswith("error: out of memory")


@pytest.mark.parametrize("word", ["list", "--help", "--version"])
def test_a_full_disk_behind_stdout_is_reported(word, shell):
    done = shell(f"rbtool {word} > /dev/full")
    assert done.returncode == 6
    assert done.stderr.startswith("error: standard output cannot be written: no space left on device")
    assert "Exception ignored" not in done.stderr


def test_a_finished_result_is_reported_even_if_stdout_is_full(folder, shell):
    done = shell("rbtool convert minari/tuple/trunc-v0 there > /dev/full", folder)
    assert done.returncode == 6
    assert "there is complete" in done.stderr
    assert rbtool.inspect(folder / "there").steps == 48


@pytest.mark.parametrize(
    ("built", "final"),
    [
        ("no room for /a/.r.html.rbtool-new-27b362da/report.html: 0 bytes", "no room for /a/r.html: 0 bytes"),
        (".r.html.rbtool-new-0ad7f929: read-only", "r.html: read-only"),
        ("x/.my data.rbtool-old-0ad7f929/next/reward.memmap: full", "x/my data/next/reward.memmap: full"),
        ("a/.d.rbtool-new-0ad7f929/.rbtool/a.json and .hidden/b", "a/d/.rbtool/a.json and .hidden/b"),
    ],
)
def test_messages_name_the_final_place_of_a_result(built: str, final: str) -> None:
    assert final_names(built) == final


def test_paths_are_shown_as_they_were_given(tmp_path: Path, monkeypatch) -> None:
    for aside in (False, True):
        assert final_names(str(new_sibling(tmp_path / "my data", aside=aside))) == f"{tmp_path}/my data"
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    assert as_given(f"{here}/a/b and '{here}/a'.", ["convert", "a"]) == "a/b and 'a'."
    assert as_given(f"{here}/a2 {here}/a.h5 /x{here}/a", ["a"]) == f"{here}/a2 {here}/a.h5 /x{here}/a"
    assert as_given(f"{here}/a {here}", [f"{here}/a", "-v"]) == f"{here}/a {here}"
    assert as_given(f"{here}/x is there", ["."]) == "./x is there"


WAITING = """
def wait(rows):
    with open("started", "w") as file:
        file.write("!")
    open("never").read()
"""


SLOW = pytest.mark.slow
SAID = {
    signal.SIGINT: (130, "error: interrupted\n"),
    signal.SIGTERM: (143, "error: terminated\n"),
    signal.SIGHUP: (129, "error: the terminal was closed\n"),
}


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGINT, 2), pytest.param(signal.SIGTERM, 0, marks=SLOW), pytest.param(signal.SIGINT, 0, marks=SLOW),
        pytest.param(signal.SIGTERM, 2, marks=SLOW), pytest.param(signal.SIGHUP, 0, marks=SLOW),
        pytest.param(signal.SIGHUP, 2, marks=SLOW),
    ],
)  # fmt: skip
def test_a_signal_ends_a_run_in_one_word_and_leaves_nothing(number, workers, folder, variables):
    code, said = SAID[number]
    (folder / "waiting.py").write_text(WAITING)
    for name in ("started", "never"):
        os.mkfifo(folder / name)
    before = sorted(path.name for path in folder.iterdir())
    words = ["preprocess", "cartpole", "--fn", "waiting.py:wait", "--dest", "there", "--num-workers", str(workers)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(["rbtool", *words], cwd=folder, env=variables, text=True, **pipes) as process:
        assert (folder / "started").read_text().startswith("!")
        process.send_signal(number)
        try:
            out, err = process.communicate(timeout=HANG)
        finally:
            process.kill()  # in case it did not end
    assert (process.returncode, out, err) == (code, "", said)
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == before


def test_signals_that_the_caller_ignores_stay_ignored(folder, variables):
    command = "trap '' TERM; rbtool convert minari/tuple/trunc-v0 there & kill -TERM $!; wait $!"
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "there\n")


SPLIT = ["split", "ted", "--dest", "parts", "--train", "0.5", "--val", "0.5", "--seed", "0"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 160 files."""
    folder = tmp_path_factory.mktemp("wide")
    leaves = tuple(PlannedLeaf(("extra", f"x{number}"), "float32", (2,), "state") for number in range(77))
    write_plan(DatasetPlan((5, 3, 7, 3), ("terminated",) * 4, (False,) * 4, leaves), folder / "ted")
    return folder


def split(folder: Path, soft: int, hard: int, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rbtool", *SPLIT, *words], cwd=folder, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_a_low_limit_on_open_files_is_raised(wide: Path, layout: str) -> None:
    done = split(wide, 64, resource.getrlimit(resource.RLIMIT_NOFILE)[1], "--layout", layout, "--force")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("limit", [100, 200, 250, 310])
def test_too_many_open_files_are_one_sentence_and_leave_nothing(wide: Path, limit: int) -> None:
    before = {path.name for path in wide.iterdir()}
    done = split(wide, limit, limit, "--layout", "ted", "--force")
    assert done.returncode != 0
    message, hint = done.stderr.splitlines()[-2:]
    assert f"too many open files (limit {limit})" in message or "more files than this process may hold" in message
    assert "ulimit -n" in hint
    assert {path.name for path in wide.iterdir()} == before
