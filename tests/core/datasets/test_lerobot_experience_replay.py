"""`LeRobotExperienceReplay`: the documented constructor, over a hub on loopback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from download_machine import Machine
from forked_scripts import Interpreter
from hub import Hub
from lerobot_files import plain_rows

DATA = Path(__file__).parents[2] / "data" / "lerobot"
NAME = "someone/toy"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Interpreter]]:
    folder = tmp_path_factory.mktemp("hub")
    shutil.copytree(DATA / "v30", folder / NAME)
    with Hub(folder) as hub:
        machine = Machine(hub, tmp_path_factory.mktemp("machine"))
        running = Interpreter("rbtool.core.datasets.buffer", "huggingface_hub", environment=machine.variables)
        yield machine, running
        running.close()


def run(python: tuple[Machine, Interpreter], script: str) -> list[str]:
    machine, interpreter = python
    begin = "import json, numpy\nfrom rbtool import LeRobotExperienceReplay, load_dataset\n"
    ran = interpreter.run(begin + script, cwd=machine.folder, environment=machine.variables)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_steps_have_the_frames_and_texts_of_the_source(python: tuple[Machine, Interpreter]) -> None:
    lines = run(
        python,
        f"""
data = LeRobotExperienceReplay({NAME!r}, batch_size=8, key_map={{"observation.state": "state"}})
rows = data[:]
numpy.save("images.npy", rows["observation", "image", "top"].numpy())
print(json.dumps([rows["info", "index"].tolist(), list(rows["language_instruction"]), rows["state"].tolist()]))
print(data.data_path.relative_to(data.root), data.sample()["next", "observation", "image", "top"].shape[1:])
other = LeRobotExperienceReplay({NAME!r}, download=False, decode_video=False, batch_size=4, num_slices=2)
batch = other.sample()
print(batch["video", "observation", "image", "top"].shape, batch["frame"].reshape(2, 2).diff(dim=1).tolist())
""",
    )
    index, words, state = json.loads(lines[0])
    rows = plain_rows(DATA / "v30")
    assert index == list(range(42))
    assert words == [row["task"] for row in rows]
    assert state == [row["observation.state"] for row in rows]
    images = np.load(python[0].folder / "images.npy")
    assert np.array_equal(images, np.stack([row["observation.images.top"] for row in rows]).transpose(0, 3, 1, 2))
    assert lines[1:] == [f"{NAME} torch.Size([3, 48, 48])", "torch.Size([4, 2]) [[1], [1]]"]


def test_arguments_that_make_no_sense_are_refused(python: tuple[Machine, Interpreter]) -> None:
    lines = run(
        python,
        f"""
for arguments in ({{"num_slices": 2, "slice_len": 3}}, {{"download": "no"}}, {{"slice_len": 2, "sampler": object()}}):
    try:
        LeRobotExperienceReplay({NAME!r}, **arguments)
    except ValueError as error:
        print(error)
try:
    LeRobotExperienceReplay("someone/else", download=False)
except FileNotFoundError as error:
    print(error)
""",
    )
    assert "expected one of them" in lines[0]
    assert "expected True, False or 'force'" in lines[1]
    assert "sampler is set" in lines[2]
    assert "someone/else is not in" in lines[3]
