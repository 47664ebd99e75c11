"""Sources with next observations of their own, and episodes without one after the last step, in every layout."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import flip
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rbtool
from rbtool.core.errors import CorruptDataError, FormatError, UsageError
from rbtool.core.format.contracts import Array, Piece, SourceFacts
from rbtool.core.format.converter import Reader
from rbtool.core.format.episodes import EPISODES, EpisodeTable
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.episodes import EndReason, Final
from rbtool.core.ted.schema import Field, Key
from rbtool.core.testing.datasets import relist

OBSERVATION, GOAL, ACTION, REWARD = ("observation",), ("goal",), ("action",), ("reward",)
FIELDS = (
    (Field(OBSERVATION, "float32", (2,), "observation"), "state"),
    (Field(GOAL, "int16", (), "state"), "state"),
    (Field(ACTION, "float32", (1,), "action"), "step"),
    (Field(REWARD, "float64", (), "reward"), "result"),
)


@dataclass(frozen=True)
class Plan:
    """One episode of a source: `jumps` are the steps whose next observation does not follow, `end` the last flags."""

    length: int
    jumps: tuple[int, ...] = ()
    end: str = "truncated"
    missing: bool = False


class PlanReader(Reader):
    """Reads episodes that a JSON file plans; their values are drawn with the number of the episode as seed."""

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return path.suffix == ".plan"

    def on_open(self) -> None:
        document = json.loads(self.path.read_bytes())
        self.episodes = [Plan(**{**entry, "jumps": tuple(entry["jumps"])}) for entry in document["episodes"]]
        self.cut = document["cut"]

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        numbers, steps = range(len(self.episodes)), sum(one.length for one in self.episodes)
        missing = any(one.missing for one in self.episodes)
        return SourceFacts("plan", "plan/x-v0", FIELDS, numbers, steps, final_missing=missing)

    def read_episode(self, number: int) -> Iterator[Piece]:
        plan = self.episodes[number]
        for start in range(0, plan.length, self.cut):
            yield self.piece(number, plan, start, min(start + self.cut, plan.length))

    def piece(self, number: int, plan: Plan, start: int, stop: int) -> Piece:
        before, after = observations(number, plan)
        goal = goals(number, plan)
        last = stop == plan.length
        more = 0 if last and plan.missing else 1
        columns: dict[Key, Array] = {
            GOAL: goal[start : stop + more], ACTION: actions(number, plan)[start:stop],
            REWARD: np.arange(start, stop) + 0.5 + number,
        }  # fmt: skip
        apart = {} if plan.missing else {OBSERVATION: after[start:stop]}
        columns[OBSERVATION] = before[start : stop + (more if plan.missing else 0)]
        flags = np.zeros((2, stop - start), bool)
        if last:
            flags[0, -1], flags[1, -1] = plan.end in ("terminated", "both"), plan.end in ("truncated", "both")
        final = Final.MISSING if plan.missing else Final.OBSERVED
        return Piece(number, columns, flags[0], flags[1], start == 0, last, seed=number, next=apart, final=final)

    def files(self) -> list[Path]:
        return [self.path]


def observations(number: int, plan: Plan) -> tuple[Array, Array]:
    draw = np.random.default_rng(number)
    walk = draw.normal(size=(plan.length + 1, 2)).astype(np.float32)
    walk[draw.random(plan.length + 1) < 0.2, 0] = np.nan
    after = walk[1:].copy()
    for step in plan.jumps:
        after[step, 1] += 1
    return walk[: plan.length + (0 if plan.missing else 1)], after


def goals(number: int, plan: Plan) -> Array:
    return np.random.default_rng(1000 + number).integers(0, 99, plan.length + (not plan.missing)).astype(np.int16)


def actions(number: int, plan: Plan) -> Array:
    return np.random.default_rng(2000 + number).normal(size=(plan.length, 1)).astype(np.float32)


def expected(plans: list[Plan], choice: str) -> tuple[dict[str, Array], list[dict[str, Any]]]:
    """Rows and episodes by a plain loop over single steps."""
    rows: dict[str, list[Any]] = {name: [] for name in ("o", "no", "g", "ng", "a", "r", "term", "trunc", "episode")}
    table = []
    for number, plan in enumerate(plans):
        (before, after), goal = observations(number, plan), goals(number, plan)
        terminated, truncated = plan.end in ("terminated", "both"), plan.end in ("truncated", "both")
        steps, final = plan.length, Final.OBSERVED
        if plan.missing and (choice == "repeat" or (choice == "auto" and terminated)):
            final = Final.REPEATED
            after[-1] = before[-1]
            goal = np.append(goal, goal[-1])
        elif plan.missing:
            final, steps, terminated, truncated = Final.DROPPED, plan.length - 1, False, True
        if not steps:
            continue
        for step in range(steps):
            last = step == steps - 1
            values = (
                before[step], after[step], goal[step], goal[step + 1], actions(number, plan)[step], step + 0.5 + number,
                last and terminated, last and (truncated or not terminated), number,
            )  # fmt: skip
            for column, value in zip(rows.values(), values, strict=True):
                column.append(value)
        inner = {step for step in plan.jumps if step < steps - 1}
        table.append({"length": steps, "explicit_next": bool(inner), "final": final, "terminated": terminated})
    return {name: np.array(values) for name, values in rows.items()}, table


@pytest.fixture(autouse=True)
def plugged(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("plan", f"{__name__}:PlanReader", "rbtool.readers")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == entry.group else [])


def write(folder: Path, plans: list[Plan], cut: int = 1 << 20) -> Path:
    document = {"cut": cut, "episodes": [{**vars(plan), "jumps": list(plan.jumps)} for plan in plans]}
    path = folder / f"{len(list(folder.iterdir()))}.plan"
    path.write_text(json.dumps(document))
    return path


def check_content(made: Path, plans: list[Plan], choice: str) -> None:
    rows, table = expected(plans, choice)
    with open_steps(made) as reader:
        steps = reader.manifest.steps
        assert steps == len(rows["r"])
        keys = {
            "o": OBSERVATION, "no": ("next", *OBSERVATION), "g": GOAL, "ng": ("next", *GOAL), "a": ACTION,
            "r": ("next", "reward"), "term": ("next", "terminated"), "trunc": ("next", "truncated"),
            "episode": ("episode",),
        }  # fmt: skip
        for name, key in keys.items():
            found = reader.read(key, 0, steps)
            assert found.tobytes() == rows[name].astype(found.dtype).tobytes(), key
        episodes, counts = reader.episodes, reader.manifest.boundary
        for name in ("length", "explicit_next", "final", "terminated"):
            assert getattr(episodes, name).tolist() == [row[name] for row in table]
        assert counts.explicit_next == sum(row["explicit_next"] for row in table)
        assert counts.final_repeated == sum(row["final"] is Final.REPEATED for row in table)
        assert counts.final_dropped == sum(row["final"] is Final.DROPPED for row in table)
    found = rbtool.check(made)
    assert {finding.rule for finding in found.findings if finding.severity == "error"} <= {"TED007"}  # NaN is data here
    assert any("is a copy" in note for note in found.notes) == bool(counts.final_repeated)
    assert any("left out" in note for note in found.notes) == bool(counts.final_dropped)


PLANS = [
    Plan(5, jumps=(1, 2)), Plan(4, end="terminated"), Plan(3, jumps=(2,)), Plan(1, end="both"), Plan(6, jumps=(0,))
]  # fmt: skip
WITHOUT = [
    Plan(5, missing=True), Plan(4, end="terminated", missing=True), Plan(1, missing=True),
    Plan(2, end="open", missing=True),
    Plan(1, end="terminated", missing=True), Plan(3, jumps=(0,), end="terminated"),
]  # fmt: skip


def test_conversions_between_layouts_keep_the_content(tmp_path: Path) -> None:
    plans = [*PLANS, *WITHOUT]
    ted = rbtool.convert(write(tmp_path, plans), tmp_path / "ted")
    packed = rbtool.convert(ted.path, tmp_path / "packed", layout="packed")
    straight = rbtool.convert(write(tmp_path, plans), tmp_path / "straight", layout="packed")
    assert packed.content_digest == straight.content_digest
    assert rbtool.convert(packed.path, tmp_path / "again").content_digest == ted.content_digest
    for form in ("flat", "nested", "h5"):
        saved = rbtool.checkpoint.save(ted.path, tmp_path / form, form=form)
        loaded = rbtool.checkpoint.load(saved.path, tmp_path / f"{form}-loaded")
        check_content(loaded.path, plans, "auto")


def test_split_merge_and_preprocess_keep_next_observations_and_final_steps(tmp_path: Path) -> None:
    plans = [*PLANS, *WITHOUT]
    made = rbtool.convert(write(tmp_path, plans), tmp_path / "made").path
    parts = rbtool.split(made, tmp_path / "parts", train=0.5, val=0.5).parts
    check_content(rbtool.merge([part.path for part in parts], tmp_path / "merged").path, plans, "auto")
    clip = {"clip_reward": "-99:99"}
    check_content(rbtool.preprocess(made, dest=tmp_path / "clipped", operations=clip, chunk_size=5).path, plans, "auto")


def test_an_episode_that_loses_its_only_step_is_noted(tmp_path: Path) -> None:
    made = rbtool.convert(write(tmp_path, WITHOUT), tmp_path / "made")
    assert len(made.notes) == 1
    assert made.notes[0].startswith("episode 2 is left out: one step, without an observation after it")
    assert (made.episodes, made.steps) == (5, 4 + 4 + 1 + 1 + 3)
    chosen = rbtool.convert(write(tmp_path, WITHOUT), tmp_path / "few", episodes="1:4")
    assert (chosen.episodes, chosen.steps) == (2, 4 + 1)
    with pytest.raises(FormatError, match="no step is left"):
        rbtool.convert(write(tmp_path, WITHOUT[2:3]), tmp_path / "nothing")


def test_the_choice_of_the_final_step_is_part_of_the_request(tmp_path: Path) -> None:
    source = write(tmp_path, WITHOUT)
    rbtool.convert(source, tmp_path / "made")
    assert rbtool.convert(source, tmp_path / "made").already_there
    with pytest.raises(UsageError, match="already exists"):
        rbtool.convert(source, tmp_path / "made", final_step="drop")
    with pytest.raises(UsageError, match="--final-step is 'keep', expected one of auto, drop, repeat"):
        rbtool.convert(source, tmp_path / "made", final_step="keep")
    with pytest.raises(UsageError, match="--final-step is about raw datasets"):
        rbtool.convert(tmp_path / "made", tmp_path / "again", final_step="drop")
    observed = write(tmp_path, PLANS)  # there is nothing to decide: the same dataset
    made = rbtool.convert(observed, tmp_path / "observed", final_step="drop")
    assert "final_step" not in made.request


def test_inspect_shows_a_raw_dataset_and_one_of_its_episodes(tmp_path: Path) -> None:
    source = write(tmp_path, [*PLANS, *WITHOUT])
    shown = rbtool.inspect(source, episode=0)
    assert (shown.ends.explicit_next, shown.ends.final_repeated, shown.ends.final_dropped) == (3, 2, 2)
    assert shown.episode is not None
    before, after = observations(0, PLANS[0])
    for row in shown.episode.rows:
        np.testing.assert_array_equal(row.values["observation"], before[row.step])
        np.testing.assert_array_equal(row.values["next.observation"], after[row.step])
        assert row.values["next.goal"] == goals(0, PLANS[0])[row.step + 1]
    made = rbtool.convert(source, tmp_path / "made").path
    assert rbtool.inspect(made).ends == shown.ends
    assert [rbtool.inspect(made, episode=number).episode.final for number in (0, 5, 6)] == [
        "observed", "dropped", "repeated"
    ]  # fmt: skip


def test_complete_episodes_need_no_entries_for_final_steps(tmp_path: Path) -> None:
    made = rbtool.convert(write(tmp_path, PLANS), tmp_path / "made").path
    document = json.loads((made / ".rbtool" / "manifest.json").read_bytes())
    assert not [name for name in document["boundary"] if name.startswith("final")]
    assert "final_step" not in document["request"]
    assert not (made / EPISODES / "final.memmap").exists()


def test_check_compares_repeated_observations_with_the_table(tmp_path: Path) -> None:

    made = rbtool.convert(write(tmp_path, WITHOUT), tmp_path / "made").path
    with open_steps(made) as reader:
        table = reader.episodes
    end = int((table.start + table.length - 1)[np.flatnonzero(table.final == Final.REPEATED)[0]])
    flip(made / "next" / "observation.memmap", end * 8)
    relist(made)
    found = [finding for finding in rbtool.check(made).findings if finding.rule == "TED010"]
    assert "is not a repetition, although the table states one" in found[0].message


def test_an_unknown_number_in_the_table_is_refused(tmp_path: Path) -> None:

    made = rbtool.convert(write(tmp_path, WITHOUT), tmp_path / "made").path
    with (made / EPISODES / "final.memmap").open("r+b") as file:
        file.write(b"\x07")
    relist(made)
    with pytest.raises(CorruptDataError, match="has the number 7 in 'final'"):
        rbtool.inspect(made)


def test_a_choice_of_episodes_keeps_their_final_steps(tmp_path: Path) -> None:
    made = rbtool.convert(write(tmp_path, WITHOUT), tmp_path / "made").path
    with open_steps(made) as reader:
        table: EpisodeTable = reader.episodes
    kept = EpisodeTable.from_columns({name: column[1:3] for name, column in table.columns().items()})
    assert kept.final.tolist() == [Final.REPEATED, Final.DROPPED]


class ForgetfulReader(PlanReader):
    """Forgets the last observation, and does not say so."""

    def read_episode(self, number: int) -> Iterator[Piece]:
        for piece in super().read_episode(number):
            yield replace(piece, columns={**piece.columns, GOAL: piece.columns[GOAL][:-1]}) if piece.last else piece


def test_a_missing_observation_that_nobody_declares_is_refused(tmp_path: Path) -> None:
    with ForgetfulReader(write(tmp_path, PLANS)) as reader, pytest.raises(FormatError, match="'goal' has 5 rows for 5"):
        list(reader.pieces())


ANY_PLAN = st.builds(
    lambda length, jumps, end, missing: Plan(
        length, () if missing else tuple(sorted({step for step in jumps if step < length})), end, missing
    ),
    st.integers(1, 7),
    st.lists(st.integers(0, 6), max_size=3),
    st.sampled_from(["terminated", "truncated", "both", "open"]),
    st.booleans(),
)


def vanishes(plan: Plan, choice: str) -> bool:
    """Whether an episode has no other step than the one that is left out."""
    kept = choice == "repeat" or (choice == "auto" and plan.end in ("terminated", "both"))
    return plan.missing and plan.length == 1 and not kept


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    plans=st.lists(ANY_PLAN, min_size=1, max_size=6), choice=st.sampled_from(["auto", "drop", "repeat"]),
    cut=st.integers(1, 8), layout=st.sampled_from(["ted", "packed"]),
)  # fmt: skip
def test_any_episodes_are_converted_exactly(
    tmp_path_factory, plans: list[Plan], choice: str, cut: int, layout: str
) -> None:
    folder = tmp_path_factory.mktemp("any")
    source = write(folder, plans, cut)
    if all(vanishes(plan, choice) for plan in plans):
        with pytest.raises(FormatError, match="no step is left"):
            rbtool.convert(source, folder / "made", layout=layout, final_step=choice)
        return
    made = rbtool.convert(source, folder / "made", layout=layout, final_step=choice)
    check_content(made.path, plans, choice)
    with open_steps(made.path) as reader:
        explicit, dropped = reader.episodes.explicit_next, reader.episodes.final == Final.DROPPED
        assert set(reader.episodes.end_reason[dropped].tolist()) <= {EndReason.TRUNCATED}
        assert reader.manifest.request.final_step == (choice if any(plan.missing for plan in plans) else "auto")
    assert (made.path / "explicit_next.bin").is_file() == (layout == "packed" and explicit.any())
