"""The operations of a job, and those of them between which files change."""

import os
import signal
from pathlib import Path

from strikes import course_of, forked, kill, spread


def job(dest: Path) -> None:
    """Write, do nothing, write the same, replace, link and remove."""
    dest.mkdir()  # 1
    dest.mkdir(exist_ok=True)  # 2
    (dest / "one").write_bytes(b"1")  # 3
    with open(dest / "one", "r+b") as file:  # 4: the first one that finds the byte
        file.write(b"2")
    with open(dest / "one", "r+b") as file:  # 5: the first one that finds the other
        file.write(b"2")
    (dest / "two").write_bytes(b"")  # 6
    os.rename(dest / "two", dest / "three")  # noqa: PTH104  7
    (dest / "three").chmod(0o600)
    (dest / "three").unlink()  # 8
    dest.with_name("away").mkdir()  # 9


def files_of(folder: Path) -> list[tuple[str, int, bytes]]:
    return sorted(
        (str(path.relative_to(folder)), path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    )


def test_a_course_has_the_operations_and_those_before_which_files_changed(tmp_path: Path) -> None:
    course = course_of(job, tmp_path, tmp_path / "made")
    assert os.waitstatus_to_exitcode(course.status) == 0
    assert course.operations == 9
    assert course.changes == (1, 2, 4, 5, 7, 8, 9)


def test_a_kill_at_any_operation_leaves_what_one_at_a_change_leaves(tmp_path: Path) -> None:
    left = {}
    for at in range(1, 10):
        out = tmp_path / str(at)
        out.mkdir()
        status, counted = forked(job, out, out / "made", kill, at)
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert counted == at
        left[at] = files_of(out)
    changes = [at for at in left if left[at] != left.get(at - 1)]
    assert changes == [1, 2, 4, 5, 7, 8, 9]


def test_places_are_spread_with_the_last_one_among_them() -> None:
    assert spread((1, 2, 4, 5, 7), None) == [1, 2, 4, 5, 7]
    assert spread((1, 2, 4, 5, 7), 2) == [2, 7]
    assert spread((3, 9), 30) == [3, 9]
