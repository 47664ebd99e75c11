"""What the crash tests strike: a folder of sources, in memory or on a small disk, and the runner."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from struck_work import prepare

RUNNER = Path(__file__).with_name("runner.py")
Strike = Callable[..., dict[str, int]]


@pytest.fixture(scope="session")
def strike(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Strike]:
    """Run `runner.py` on a folder with these words; what it counted."""
    place = tmp_path_factory.mktemp("struck") / "printed"
    with subprocess.Popen(
        [sys.executable, RUNNER, "--serve"], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        asking, answers = server.stdin, server.stdout
        assert next(answers, "") == "ready\n"

        def run(work: Path, *words: str) -> dict[str, int]:
            print(json.dumps([str(place), str(work), *words]), file=asking, flush=True)
            code = int(next(answers))
            assert code == 0, Path(f"{place}.err").read_text()[-3000:]
            counts: dict[str, int] = json.loads(Path(f"{place}.out").read_text())
            return counts

        yield run
        asking.close()


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("prepared")
    prepare(work)
    return work


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory where there is such a place: thousands of fsyncs wait for no disk there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        yield Path(place)


@pytest.fixture
def work(prepared: Path, memory: Path) -> Path:
    """The jobs' folder."""
    return Path(shutil.copytree(prepared, memory / "work"))


@pytest.fixture
def small_disk(tmp_path: Path, prepared: Path) -> Iterator[Path]:
    """A real file system of 12 MB with what the jobs read."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small file system needs root: {mounted.stderr.decode().strip()}")
    try:
        shutil.copytree(prepared, place / "work")
        yield place / "work"
    finally:
        subprocess.run(["umount", "-l", place], check=True)
