"""`rbtool preprocess`: operations as options, as a file and as a replay; output of functions."""

from __future__ import annotations

import json
import tomllib

import pytest
from waiting import HANG

ALL = (
    "--select observation --exclude episode --rename action=act --cat o=observation,act --cast observation=float64 "
    "--normalize observation:quantile --flatten --n-step 3 --gamma 0.9 --return-to-go --mc-return --clip-reward=-1:1 "
    "--crop image=9x9 --resize image=8x8 --encode h264 --filter 'length > 50' --where 'not truncated' --episodes 0:9"
)


def test_show_pipeline_needs_no_dataset(shell, tmp_path):
    done = shell(f"rbtool preprocess ./nowhere {ALL} --show-pipeline", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    names = [table["name"] for table in tomllib.loads(done.stdout)["operation"]]
    assert names == [
        "episodes", "filter", "where", "rename", "cast", "cat", "flatten", "crop", "resize", "encode", "n-step",
        "return-to-go", "mc-return", "clip-reward", "normalize", "select", "exclude",
    ]  # fmt: skip
    as_json = json.loads(shell(f"rbtool preprocess ./nowhere {ALL} --show-pipeline --json", tmp_path).stdout)
    assert [operation["name"] for operation in as_json["operations"]] == names
    assert as_json["text"] == done.stdout
    (tmp_path / "prep.toml").write_text(done.stdout)
    again = shell("rbtool preprocess ./nowhere --pipeline prep.toml --show-pipeline", tmp_path)
    assert again.stdout == done.stdout


@pytest.mark.slow
def test_options_file_and_replay_make_the_same(shell, folder):
    words = "--where 'observation[0] < 0.5' --n-step 2 --gamma 0.9 --normalize observation"
    lines = [
        f"rbtool preprocess ./cartpole {words} --dest ./a --num-workers 0 --json",
        f"rbtool preprocess ./cartpole {words} --show-pipeline > p.toml",
        "rbtool preprocess ./cartpole --pipeline p.toml --dest ./b --json",
        "rbtool preprocess ./cartpole --replay ./a --replay-filters --dest ./c --chunk-size 100 --json",
    ]
    found = [shell(line, folder) for line in lines]
    assert [done.returncode for done in found] == [0] * 4, [done.stderr for done in found]
    assert len({json.loads(done.stdout)["content_digest"] for done in found if done.stdout}) == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--fn prep.py:normalise --select action --dest x", 2, "there are a function and operations"),
        ("--fn prep.py:normalise --show-pipeline", 2, "--show-pipeline needs operations, not --fn"),
        ("--dest x", 2, "--fn FILE.py:NAME, operations like --select"),
        ("--return-to-go --gamma=-0.5 --dest x", 2, "-0.5"),
        ("--n-step 0 --gamma .9 --dest x", 2, "0"),
        ("--n-step 3 --gamma=-0.5 --dest x", 2, "-0.5"),
        ("--cast observation=uint8 --dest x", 1, "of 'observation' cannot be represented as uint8"),
        ("--replay ./nowhere --dest x", 4, "nowhere not found"),
        ("--select action --dest ./cartpole/in", 2, "overlap"),
        ("--select action --unit row --dest x", 2, "unit"),
    ],
)
def test_impossible_options_are_one_sentence(shell, words, code, said, template):
    done = shell(f"rbtool preprocess ./cartpole {words}")
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1
    assert not (template / "x").exists()


def test_dropped_fields_are_reported(shell, folder):
    done = shell("rbtool preprocess ./cartpole --select observation --dest ./few", folder)
    assert (done.returncode, done.stdout) == (0, "./few\n")
    assert "left out: action (not selected)" in done.stderr


def test_bytes_shared_with_a_read_only_source_are_reported(shell, folder):
    script = (
        "cp -r cartpole store; find store -name '*.memmap' -exec chmod a-w {} +; "
        "rbtool preprocess ./store --clip-reward=0:0.5 --dest ./clipped --num-workers 0"
    )
    done = shell(script, folder)
    assert done.returncode == 0, done.stderr
    assert " kB shared · " in done.stderr, done.stderr
    words = "rbtool preprocess ./store --clip-reward=0:0.5 --dest ./clipped --num-workers 0 --force --json"
    found = json.loads(shell(words, folder).stdout)
    assert 0 < found["shared_bytes"] < found["bytes"]
    assert shell("rbtool check ./clipped", folder).returncode == 0


NOISY = f"""
import ctypes, os, subprocess, time
def noisy(td):
    print('printed'); os.write(1, b'written\\n'); subprocess.run(['echo', 'started'], check=True)
    ctypes.CDLL(None).printf(b'kept by C\\n')
    if os.fork() == 0:
        os.setsid()
        for number in range(3): os.dup2(os.open(os.devnull, os.O_RDWR), number)
        ends = time.monotonic() + {HANG}
        while not os.path.exists('go') and time.monotonic() < ends: time.sleep(0.05)
        if not os.path.exists('go'): open('tired', 'w')
        os._exit(0)
    return td
"""


# In a process of its own: a forked one does not flush the buffers of C.
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_function_cannot_write_to_stdout_or_keep_it_open(shell, folder, workers, real):
    (folder / "noisy.py").write_text(NOISY)
    words = f"--fn noisy.py:noisy --dest ./noisy --num-workers {workers} --json"
    done = shell(f"rbtool preprocess ./cartpole {words} 2> said", folder, **real)
    (folder / "go").touch()
    said = (folder / "said").read_text()
    assert done.returncode == 0, said
    assert json.loads(done.stdout)["num_workers"] == workers
    assert all(word in said for word in ("printed", "written", "started"))
    assert not (folder / "tired").exists()
