"""`score`: degraded copies are below the good episodes; scores are columns that the other verbs take."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rbtool
from rbtool.core.errors import CorruptDataError, UsageError
from rbtool.core.format.contracts import Piece
from rbtool.core.open_steps import open_steps
from rbtool.core.results import to_document
from rbtool.core.ted.schema import Field, Timing
from rbtool.core.testing.datasets import write_mixture, write_packed, write_pieces, write_walks
from rbtool.core.verbs.score import NAMES

DEGRADED = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "scores.py"))
KINDS, area = DEGRADED["KINDS"], DEGRADED["area"]
SIX = ("noise", "tremor", "pauses", "wrong target", "cut short", "backwards")


def pick(draw: np.random.Generator) -> tuple[Any, Any]:
    """Move six joints from home to a cube and on, smoothly; the cube is observed, actions are the next positions."""
    cube, steps = draw.uniform(-1, 1, 3), 90 + int(draw.integers(-8, 9))
    there = np.tanh(cube @ np.random.default_rng(7).normal(size=(3, 6)))
    points = np.array([np.linspace(-0.5, 0.5, 6), there + 0.3, there, np.full(6, 0.5)])
    along = np.linspace(0, 3, steps + 3)
    part = np.minimum(along.astype(int), 2)
    x = (along - part)[:, None]
    path = points[part] + (points[part + 1] - points[part]) * (10 * x**3 - 15 * x**4 + 6 * x**5)
    path += 2e-3 * draw.normal(size=path.shape)
    return np.column_stack((path[: steps + 1], np.tile(cube, (steps + 1, 1)))), path[2 : steps + 2]


def swing(draw: np.random.Generator) -> tuple[Any, Any]:
    """Hold a pendulum up, from an angle at which it was let go, with the torque of a linear controller."""
    angle, speed, states, actions = draw.uniform(-1.2, 1.2), draw.uniform(-1, 1), [], []
    for _ in range(80):
        states.append((np.cos(angle), np.sin(angle), speed))
        torque = -(10 * angle + 2 * speed) + 0.1 * draw.normal()
        actions.append((torque,))
        speed += (15 * np.sin(angle) + 3 * torque) * 0.05
        angle += speed * 0.05
    return np.array([*states, (np.cos(angle), np.sin(angle), speed)]), np.array(actions)


def demonstrations(script: Callable[[np.random.Generator], tuple[Any, Any]], count: int) -> Any:
    draw = np.random.default_rng(0)
    made = [[part.astype(np.float32) for part in script(draw)] for _ in range(count)]
    fields: list[tuple[Field, Timing]] = [
        (Field(("observation",), "float32", made[0][0].shape[1:], "observation"), "state"),
        (Field(("action",), "float32", made[0][1].shape[1:], "action"), "step"),
    ]
    episodes = [DEGRADED["Episode"]({("observation",): states}, actions, {}) for states, actions in made]
    return DEGRADED["Demonstrations"](fields, episodes)


@pytest.mark.parametrize("kind", SIX)
@pytest.mark.parametrize("script", [pick, swing])
def test_degraded_copies_are_below_the_good_ones(
    script: Callable[[np.random.Generator], tuple[Any, Any]], kind: str, tmp_path: Path
) -> None:
    good, draw = demonstrations(script, 32), np.random.default_rng(1)
    bad = [KINDS[kind](good.episodes[at], good, draw) for at in draw.choice(32, 8, replace=False)]
    good.write(tmp_path / "mixed", [*good.episodes, *bad])
    quality = np.array([one.quality for one in rbtool.score(tmp_path / "mixed").scores])
    assert area(quality[:32], quality[32:]) >= 0.9


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    write_walks(tmp_path / "walks", [(30 + 7 * (row % 5), "truncated") for row in range(12)])
    return tmp_path / "walks"


@pytest.fixture
def scored(walks: Path, tmp_path: Path) -> Path:
    rbtool.score(walks, tmp_path / "scored")
    return tmp_path / "scored"


def qualities(path: Path) -> list[float]:
    with open_steps(path) as reader:
        return np.asarray(reader.episodes.score("score.quality")).tolist()


def test_the_copy_has_the_scores_the_rows_and_the_digest(walks: Path, scored: Path, tmp_path: Path) -> None:
    result = rbtool.score(walks)
    assert [one.quality for one in result.scores] == qualities(scored)
    assert rbtool.inspect(scored).scores["score.quality"].max == max(qualities(scored))
    assert all(0 <= getattr(one, name) <= 1 for one in result.scores for name in NAMES)
    assert {rbtool.inspect(path).content_digest for path in (walks, scored)} == {result.content_digest}
    assert rbtool.check(scored, profile="form").findings == ()
    assert rbtool.score(walks, scored).already_there
    assert rbtool.score(scored, tmp_path / "again").content_digest == result.content_digest
    assert to_document(result)["scores"][0]["episode"] == 0
    write_walks(tmp_path / "taken", [(5, "truncated")])
    with pytest.raises(UsageError, match="already exists"):
        rbtool.score(walks, tmp_path / "taken")


def test_conditions_take_scores(scored: Path, walks: Path, tmp_path: Path) -> None:
    middle = float(np.median(qualities(scored)))
    condition = f"score.quality > {middle} and length > 0"
    made = rbtool.preprocess(scored, dest=tmp_path / "good", operations={"filter": [condition]})
    assert made.episodes == sum(one > middle for one in qualities(scored)) == len(qualities(tmp_path / "good"))
    for dataset, name in ((walks, "score.quality"), (scored, "score.qualty")):
        with pytest.raises(UsageError, match=name):
            rbtool.preprocess(dataset, dest=tmp_path / "bad", operations={"filter": [f"{name} > 0.5"]})
    with pytest.raises(UsageError, match="compares"):
        rbtool.preprocess(scored, dest=tmp_path / "bad", operations={"filter": ["score.quality"]})


@pytest.mark.parametrize("form", ["ted", "packed", "flat", "h5"])
def test_scores_stay_with_their_episodes(scored: Path, tmp_path: Path, form: str) -> None:
    if form == "packed":
        write_packed(scored, tmp_path / "form")
    else:
        rbtool.checkpoint.save(scored, tmp_path / "form", form=form)
    assert qualities(tmp_path / "form") == qualities(scored)
    if form != "packed":
        made = rbtool.checkpoint.load(tmp_path / "form", tmp_path / "back")
        assert made.content_digest == rbtool.inspect(scored).content_digest
        assert qualities(tmp_path / "back") == qualities(scored)


def test_parts_and_wholes_keep_scores(scored: Path, walks: Path, tmp_path: Path) -> None:
    parts = rbtool.split(scored, tmp_path / "parts", train=0.5, val=0.5, stratify="score.quality")
    rbtool.merge([part.path for part in parts.parts], tmp_path / "merged")
    assert qualities(tmp_path / "merged") == qualities(scored)
    means = [np.mean(qualities(part.path)) for part in parts.parts]
    assert abs(means[0] - means[1]) < np.std(qualities(scored))
    rbtool.merge([scored, walks], tmp_path / "half")
    with pytest.raises(UsageError, match=r"12 of 24 episodes have no score\.quality"):
        qualities(tmp_path / "half")
    shorter = rbtool.preprocess(
        scored, dest=tmp_path / "shorter", operations={"cast": ["action=float64"]}, num_frames=40
    )
    with open_steps(shorter.path) as reader:
        assert np.isnan(reader.episodes.scores["score.quality"]).tolist() == [False, True]


FILTER: Any = {"filter": ["length > 0"]}


@pytest.mark.parametrize(
    "work",
    [
        lambda source, dest, **how: rbtool.preprocess(source, dest=dest, operations=FILTER, **how),
        lambda source, dest, **how: rbtool.split(source, dest, train=0.5, val=0.5, **how),
        lambda source, dest, **how: rbtool.merge([source, source], dest, **how),
    ],
    ids=["preprocess", "split", "merge"],
)
def test_results_are_made_anew_once_there_are_scores(work: Any, scored: Path, walks: Path, tmp_path: Path) -> None:
    dest = tmp_path / "made"
    assert [work(walks, dest).already_there for _ in range(2)] == [False, True]
    with pytest.raises(UsageError, match="already exists"):
        work(scored, dest)
    work(scored, dest, force=True)
    assert work(scored, dest).already_there


def test_a_dataset_without_the_scores_is_another_one(scored: Path, walks: Path, tmp_path: Path) -> None:
    rbtool.convert(walks, tmp_path / "packed", layout="packed")
    with pytest.raises(UsageError, match="was made from another dataset"):
        rbtool.convert(scored, tmp_path / "packed", layout="packed")


@pytest.mark.parametrize("name", ["form.h5", "form.npz", "form.parquet", "form"])
def test_scores_come_back_from_plain_files(scored: Path, tmp_path: Path, name: str) -> None:
    done = rbtool.export(scored, tmp_path / name, to="parquet" if name == "form" else None, episodes="2:9")
    assert not any("scores" in one for one in done.notes)
    rbtool.convert(tmp_path / name, tmp_path / "back")
    assert qualities(tmp_path / "back") == qualities(tmp_path / name) == qualities(scored)[2:9]


def test_an_export_says_that_scores_are_not_read_back(scored: Path, walks: Path, tmp_path: Path) -> None:
    notes = {name: rbtool.export(name, tmp_path / f"{name.name}-new", to="rlds").notes for name in (scored, walks)}
    assert {name: any("scores of episodes" in note for note in said) for name, said in notes.items()} == {
        scored: True, walks: False,
    }  # fmt: skip


def test_steps_are_drawn_by_the_score_of_their_episode(scored: Path, walks: Path) -> None:
    buffer = rbtool.load_dataset(scored, 20_000, weights="score.quality", seed=0)
    drawn = np.bincount(buffer.sample()["episode"].reshape(-1).numpy(), minlength=12)
    with open_steps(scored) as reader:
        mass = reader.episodes.score("score.quality") * reader.episodes.length
    np.testing.assert_allclose(drawn / drawn.sum(), mass / mass.sum(), atol=0.012)
    slices = rbtool.PrioritizedSliceSampler(buffer.storage.max_size, 1.0, 0.0, slice_len=4)
    assert rbtool.load_dataset(scored, 16, weights="score.smooth", sampler=slices).sample().shape == (16,)
    whole = rbtool.load_dataset(scored, 8, weights="score.quality", split_trajs=True)
    assert whole.sample().shape[0] == 8
    for dataset, sampler in ((walks, None), (scored, rbtool.RandomSampler)):
        with pytest.raises(UsageError, match=r"score\.quality"):
            rbtool.load_dataset(dataset, 8, weights="score.quality", sampler=sampler)
    asked = {"sampler": "prioritized", "priority": "score.quality", "alpha": 1.0, "beta": 0.0, "seed": 0}
    assert len(rbtool.sample(scored, 8, **asked).steps) == 8


def test_trajectories_that_end_inside_an_episode_have_its_score(tmp_path: Path) -> None:
    def cut(td: Any) -> Any:
        td["next", "done"][2] = td["next", "truncated"][2] = True  # inside the first episode
        return td

    write_walks(tmp_path / "walks", [(5, "terminated"), (4, "truncated"), (3, "terminated")])
    rbtool.preprocess(tmp_path / "walks", cut, tmp_path / "cut", num_workers=0, chunk_size=12)
    rbtool.score(tmp_path / "cut", tmp_path / "scored")
    with open_steps(tmp_path / "scored") as reader:
        scores = reader.episodes.score("score.coverage")
    buffer = rbtool.load_dataset(tmp_path / "scored", 40_000, weights="score.coverage", split_trajs=True, seed=0)
    drawn = np.bincount(buffer.sample(return_info=True)[1]["index"].numpy(), minlength=4) / 40_000
    assert np.ptp(scores) > 0.2
    expected = scores[[0, 0, 1, 2]]
    np.testing.assert_allclose(drawn, expected / expected.sum(), atol=0.015)


def test_mixtures_weight_datasets_by_a_score(scored: Path, walks: Path, tmp_path: Path) -> None:
    quality = qualities(scored)
    best = f"score.quality > {sorted(quality)[5]}"
    rbtool.preprocess(scored, dest=tmp_path / "best", operations={"filter": [best]})
    made = rbtool.mix([scored, tmp_path / "best"], tmp_path / "mix.toml", p="score.quality")
    sums = []
    for path in (scored, tmp_path / "best"):
        with open_steps(path) as reader:
            sums.append(float(reader.episodes.score("score.quality") @ reader.episodes.length))
    assert [one.share for one in made.members] == pytest.approx([one / sum(sums) for one in sums])
    buffer = rbtool.load_dataset(tmp_path / "mix.toml", 64, weights="score.quality", seed=0)
    assert buffer.sample().shape == (64,)
    with pytest.raises(UsageError, match="walks: the episodes have no"):
        rbtool.mix([scored, walks], tmp_path / "no.toml", p="score.quality")
    with pytest.raises(UsageError, match="score"):
        rbtool.mix([scored, walks], tmp_path / "no.toml", p="quality")


ODD: dict[str, tuple[Field, Field]] = {
    "discrete": (
        Field(("observation",), "float32", (3,), "observation"), Field(("action",), "int64", (), "action"),
    ),
    "pictures": (
        Field(("observation", "image"), "uint8", (16, 12, 3), "observation"),
        Field(("action",), "float32", (2,), "action"),
    ),
    "no actions": (
        Field(("observation",), "float32", (3,), "observation"), Field(("other",), "float32", (), "info"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_a_score_is_left_out_where_data_lack_what_it_needs(kind: str, tmp_path: Path) -> None:
    draw, fields = np.random.default_rng(0), ODD[kind]
    pieces = []
    for number, steps in enumerate((9, 1, 12, 30, 9)):
        rows = [
            (draw.normal(size=(steps + more, *one.shape)) * 40 % 4).astype(one.numpy)
            for one, more in zip(fields, (1, 0), strict=True)
        ]
        last = np.arange(steps) == steps - 1
        columns = {one.key: array for one, array in zip(fields, rows, strict=True)}
        pieces.append(Piece(number, columns, last & False, last, first=True, last=True))
    write_pieces(tmp_path / "odd", [(fields[0], "state"), (fields[1], "step")], pieces)
    scores = rbtool.score(tmp_path / "odd").scores
    assert all(0 <= one.quality <= 1 for one in scores if one.quality is not None)
    assert (scores[0].moving is None) == (kind == "pictures")
    assert scores[0].smooth is not None
    assert scores[0].typical is not None


def test_what_cannot_be_scored_is_refused(walks: Path, tmp_path: Path) -> None:
    write_walks(tmp_path / "one", [(30, "truncated")])
    with pytest.raises(UsageError, match="has 1 episode"):
        rbtool.score(tmp_path / "one")
    write_walks(tmp_path / "other", [(30, "truncated")] * 3)
    with pytest.raises(UsageError, match="mixture"):
        rbtool.score(write_mixture(tmp_path / "mix.toml", walks, tmp_path / "other"))
    rbtool.checkpoint.save(walks, tmp_path / "c.h5", form="h5")
    assert len(rbtool.score(tmp_path / "c.h5").scores) == 12
    with pytest.raises(UsageError, match="not the folder of a dataset"):
        rbtool.score(tmp_path / "c.h5", tmp_path / "copy")
    nan = write_walks_with_nan(tmp_path / "nan")
    result = rbtool.score(nan)
    assert [one.quality == 0 for one in result.scores] == [False, True, False, False]
    assert ["only 4 episodes" in result.notes[0], "NaN or infinite values" in result.notes[1]] == [True, True]


def write_walks_with_nan(path: Path) -> Path:
    fields: list[tuple[Field, Timing]] = [
        (Field(("observation",), "float32", (2,), "observation"), "state"),
        (Field(("action",), "float32", (1,), "action"), "step"),
    ]
    draw, pieces = np.random.default_rng(0), []
    for number in range(4):
        states, actions = draw.normal(size=(21, 2)).astype(np.float32), draw.normal(size=(20, 1)).astype(np.float32)
        if number == 1:
            actions[3], states[5] = np.nan, np.inf
        last = np.arange(20) == 19
        columns = {("observation",): states, ("action",): actions}
        pieces.append(Piece(number, columns, last & False, last, first=True, last=True))
    write_pieces(path, fields, pieces)
    return path


def test_a_damaged_dataset_is_not_copied(walks: Path, tmp_path: Path) -> None:
    file = walks / "action.memmap"
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptDataError, match=r"action\.memmap"):
        rbtool.score(walks, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
