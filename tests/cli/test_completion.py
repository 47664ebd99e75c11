"""Completion: what can follow the words typed so far, also in real shells."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cases import each
from waiting import HANG

from rbtool.cli.complete import complete

STORED = "minari:cartpole/scripted-v0"
BREAKS = " \t\n\"'><=;|&(:"
SHELLS = {"bash": ["bash", "-i"], "zsh": ["zsh", "-i"], "fish": ["fish", "-i"]}
_NOISE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>]|[()][0-9A-Za-z]|\][^\x07]*\x07)|[\x00\x07\x0f\r]")


@pytest.fixture
def follows(template, monkeypatch):
    """What completes a line that is typed in the template; `breaks` are the marks at which bash breaks words."""
    monkeypatch.chdir(template)
    monkeypatch.setenv("RBTOOL_HOME", str(template / "home"))

    def run(line: str, shell: str = "zsh", breaks: str = "") -> list[str]:
        asked = {"_RBTOOL_COMPLETE": shell, "_RBTOOL_LINE": line, "_RBTOOL_BREAKS": breaks}
        return complete(asked).splitlines()

    return run


@each(
    ("line", "found"),
    [
        ("rbtool ch", {"check", "checkpoint"}),
        ("rbtool checkpoint ", {"save", "load", "verify"}),
        ("rbtool checkpoint save --as ", {"ted", "flat", "nested", "h5"}),
        ("rbtool check --fail-on ", {"error", "warn"}),
        ("rbtool mix --schema=", {"--schema=error", "--schema=intersect", "--schema=union"}),
        ("rbtool --color ", {"auto", "always", "never"}),
        ("rbtool --json ins", {"inspect"}),
        ("rbtool help chec", {"check", "checkpoint"}),
        ("rbtool inspect ", {STORED, "cartpole", "push"}),
        ("rbtool -q show mi", {STORED}),
        ("rbtool inspect 'minari:c", {STORED}),
        ("rbtool diff cartpole ", {STORED, "cartpole", "push"}),
        ("rbtool merge cartpole cartpole mi", {STORED}),
        ("rbtool rm ", {STORED, "cartpole", "push"}),
        ("rbtool download open", {"openml", "openx"}),
        ("rbtool list --remote open", {"openml", "openx"}),
        ("rbtool download minari ", {"D4RL/door/human-v2"}),
        ("rbtool convert x y --from d", {"dapg", "d3rlpy", "d4rl"}),
        ("rbtool stats cartpole --field next.re", {"next.reward"}),
        (f"rbtool stats {STORED} --field act", {"action"}),
        ("rbtool preprocess cartpole --select action,ob", {"action,observation"}),
        ("rbtool split cartpole --by c", {"content"}),
        ("rbtool inspect cartpole --he", {"--head", "--help"}),
        ("rbtool convert cartpole ", set()),
        ("rbtool bogus ", set()),
        ("rbtool cache bogus ", set()),
        ("rbtool stats missing --field ", set()),
    ],
)
def test_verbs_options_and_names_are_completed(line, found, follows):
    assert set(follows(line)) == found


def test_names_are_those_below_the_root_on_the_line(follows, template, tmp_path):
    assert follows(f"rbtool inspect --root {tmp_path} mi") == []
    assert follows(f"rbtool inspect --root {template / 'home'} mi") == [STORED]
    (tmp_path / "minari/.catalogue").mkdir(parents=True)
    (tmp_path / "minari/.catalogue/a.json").write_text('{"entries": [{"id": "a/b-v0"}, {"id": "c-v1"}]}')
    assert follows(f"rbtool download --root {tmp_path} minari ") == ["a/b-v0", "c-v1"]
    assert follows(f"rbtool download --root {tmp_path} minari:c") == ["minari:c-v1"]


def test_a_damaged_manifest_has_no_fields(follows, template, tmp_path):
    shutil.copytree(template / "cartpole/.rbtool", tmp_path / "odd/.rbtool")
    for text in ("{", "[]", '{"fields": 3}', '{"fields": [{}]}'):
        (tmp_path / "odd/.rbtool/manifest.json").write_text(text)
        assert follows(f"rbtool stats {tmp_path / 'odd'} --field ") == []


@each(
    ("line", "found"),
    [
        ("rbtool inspect minari:c", "cartpole/scripted-v0"),  # bash replaces what follows the colon
        ("rbtool inspect 'minari:c", STORED),
        (r"rbtool inspect minari\:c", STORED),
        ("rbtool convert x y --layout=p", "packed"),
    ],
)
def test_bash_gets_what_follows_the_last_break_of_a_word(line, found, follows):
    assert follows(line, "bash", BREAKS) == [found]


def test_names_with_characters_of_the_shell_are_escaped_for_bash(follows, template, tmp_path, monkeypatch):
    shutil.copytree(template / "cartpole", tmp_path / "my $data")
    monkeypatch.chdir(tmp_path)
    assert follows("rbtool inspect m", "bash", BREAKS) == ["minari:cartpole/scripted-v0", r"my\ \$data"]


def test_completion_imports_little_and_opens_no_socket(template, tmp_path):
    code = "import sys; from rbtool.cli.start import main; main(); print(*sys.modules)"
    asked = {"_RBTOOL_COMPLETE": "zsh", "RBTOOL_HOME": str(template / "home"), "_RBTOOL_LINE": "rbtool stats "}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=template, env=os.environ | asked, capture_output=True, text=True, check=True
    )
    *found, loaded = done.stdout.splitlines()
    assert STORED in found
    slow = {"torch", "tensordict", "numpy", "h5py", "pydantic", "rich", "socket", "httpx", "rbtool.cli.app"}
    assert not slow & set(loaded.split())


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home folder beside a command `rbtool`, where each shell has a prompt to wait for."""
    folder = tmp_path_factory.mktemp("home")
    home, command = folder / "user", folder / "bin" / "rbtool"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m rbtool "$@"\n')
    command.chmod(0o755)
    home.mkdir()
    (home / ".bashrc").write_text("PS1='ready> '\nbind 'set enable-bracketed-paste off'\n# no line end")
    (home / ".zshrc").write_text("PS1='ready> '\n")
    (home / ".config/fish").mkdir(parents=True)
    (home / ".config/fish/config.fish").write_text("function fish_prompt; echo -n 'ready> '; end\n")
    return home


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("rbtool insp\tx", "rbtool inspect x"),
        pytest.param("rbtool inspect min\t", f"rbtool inspect {STORED}", marks=pytest.mark.slow),
        ("rbtool inspect minari:car\t", f"rbtool inspect {STORED}"),
        (f"rbtool stats {STORED} --field next.re\t", f"rbtool stats {STORED} --field next.reward"),
        # Files, where no name fits.
        pytest.param("rbtool convert kit\t", "rbtool convert kitchen.hdf5", marks=pytest.mark.slow),
    ],
)
def test_a_shell_completes_the_line(shell, typed, line, home, template):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    environment = {
        "HOME": str(home), "RBTOOL_HOME": str(template / "home"), "TERM": "xterm", "COLUMNS": "200", "LANG": "C.UTF-8",
        "PATH": os.pathsep.join([str(home.parent / "bin"), os.environ["PATH"]]),
    }  # fmt: skip
    if not (home / f"{shell} has it").exists():
        installed = subprocess.run(
            ["rbtool", "--install-completion", shell], env=environment, capture_output=True, text=True, check=True
        )
        assert Path(installed.stdout.strip()).is_relative_to(home)
        (home / f"{shell} has it").touch()
    assert f"\n{line}" in _echoed(SHELLS[shell], typed, template, environment)


def _echoed(command: list[str], typed: str, folder: Path, environment: dict[str, str]) -> str:
    """Type into an interactive shell once it is ready, have it echo the line, and return all that is shown."""
    process, screen = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, environment)
    shown, until, waiting = "", time.monotonic() + HANG, f"{typed}\x01echo \rexit\r"
    while time.monotonic() < until:
        if select.select([screen], [], [], 0.2)[0]:
            try:
                shown += _NOISE.sub("", os.read(screen, 4096).decode())
            except OSError:  # the shell has ended
                break
        if waiting and "ready> " in shown:
            os.write(screen, waiting.encode())
            waiting = ""
    os.close(screen)
    os.waitpid(process, 0)
    return shown


def test_completion_is_installed_once_and_keeps_the_file(tmp_path):
    home, environment = tmp_path, os.environ | {"HOME": str(tmp_path)}
    (home / "files").mkdir()
    (home / "files/bashrc").write_text("PS1='ready> '\n# no line end")
    (home / ".bashrc").symlink_to("files/bashrc")
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-m", "rbtool", "--install-completion", "bash"], env=environment, check=True,
            capture_output=True,
        )  # fmt: skip
    assert (home / ".bashrc").is_symlink()
    text = (home / ".bashrc").read_text()
    assert text.count("source") == 1
    assert "# no line end\n" in text


def test_the_script_of_a_shell_is_printed(shell):
    for name in SHELLS:
        assert f"_RBTOOL_COMPLETE={name}" in shell(f"rbtool --show-completion {name}").stdout
