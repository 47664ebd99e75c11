"""`split`: which episode goes into which part, and that none is lost, divided or in two parts."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st

import rbtool
from rbtool.core.errors import UsageError
from rbtool.core.format.checks import SoundSteps
from rbtool.core.format.manifest import Manifest
from rbtool.core.format.memmap.builder import Origin
from rbtool.core.format.packed.builder import write_dataset
from rbtool.core.open_steps import open_steps
from rbtool.core.testing.datasets import DatasetPlan, dataset_plans, write_plan, write_walks
from rbtool.core.verbs.split import Groups, assign, identical_episodes, require_shares, targets

EPISODES = [(4, "open"), (3, "terminated"), (1, "both"), (2, "truncated"), (5, "terminated"), (1, "truncated"),
         (6, "open"), (2, "both"), (9, "terminated"), (3, "open")]  # fmt: skip


def numbers_of(path: Path) -> list[int]:
    with open_steps(path) as reader:
        return reader.episodes.episode.tolist()


def digest(path: Path) -> str:
    return Manifest.load(path).content_digest


def chosen(source: Path, rows: Sequence[int], dest: Path) -> Path:
    """Write some episodes of a dataset, in this order; one may be there several times."""
    with open_steps(source) as reader:
        view = SoundSteps(reader, np.array(rows))
        write_dataset(view, dest, "ted", Origin.of(view.manifest, view.documents()))
    return dest


def halve(source: Path, dest: Path, **options):
    return rbtool.split(source, dest, train=0.5, val=0.5, **options)


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_parts_are_datasets_with_whole_episodes_texts_and_documents(walks, tmp_path, layout):
    result = rbtool.split(walks, tmp_path / "s", train=0.7, val=0.2, test=0.1, seed=1, layout=layout)
    assert [(part.name, part.episodes) for part in result.parts] == [("train", 7), ("val", 2), ("test", 1)]
    found: dict[int, int] = {}
    with open_steps(walks) as source:
        for part in result.parts:
            assert rbtool.check(part.path).errors == 0
            assert Manifest.load(part.path).layout == layout
            with open_steps(part.path) as reader:
                assert reader.documents() == source.documents()
                assert reader.manifest.spaces == source.manifest.spaces
                assert reader.manifest.provenance[-1].arguments["part"] == part.name
                _require_episodes_of(reader, source, found)
    assert sorted(found) == list(range(10))
    first = json.loads((tmp_path / "s" / "split.json").read_text())["made"][0]
    assert first["content_digest"] == digest(tmp_path / "s" / "train")


def _require_episodes_of(reader, source, found) -> None:
    table, theirs = reader.episodes, source.episodes
    assert table.episode.tolist() == sorted(table.episode.tolist())
    for row, number in enumerate(table.episode.tolist()):
        found[number] = found.get(number, 0) + 1
        for name in ("length", "total_reward", "terminated", "truncated", "end_reason", "seed", "explicit_next"):
            assert getattr(table, name)[row] == getattr(theirs, name)[number]
        assert reader.episode_text[row] == source.episode_text[number]
        spans = [(int(t.start[r]), int(t.start[r] + t.length[r])) for t, r in ((table, row), (theirs, number))]
        for field in source.fields:
            assert reader.read(field.key, *spans[0]).tobytes() == source.read(field.key, *spans[1]).tobytes()


def test_a_seed_always_gives_the_same_parts(walks, tmp_path):
    seeds = [
        [digest(part.path) for part in halve(walks, tmp_path / f"s{n}", seed=seed).parts]
        for n, seed in enumerate((0, 0, 1, None))
    ]
    assert seeds[0] == seeds[1] == seeds[3] != seeds[2]
    # A stored split can be made again by any later version: raw Philox draws do not change.
    part_of = assign(Groups(np.arange(10)), {"train": 0.6, "val": 0.4}, seed=7)
    assert part_of.tolist() == [0, 0, 0, 0, 1, 0, 1, 1, 0, 1]


def test_in_order_gives_the_first_episodes_to_train(walks, tmp_path):
    result = rbtool.split(walks, tmp_path / "s", train=0.6, val=0.3, test=0.1, in_order=True)
    assert [numbers_of(part.path) for part in result.parts] == [[0, 1, 2, 3, 4, 5], [6, 7, 8], [9]]
    assert result.seed is None


def test_merging_the_parts_of_a_split_restores_the_dataset_and_nothing_else(walks, tmp_path):
    """Combining two split views of four episodes gave eight elsewhere: what was left out came back."""
    result = rbtool.split(walks, tmp_path / "s", train=0.5, val=0.3, test=0.2, seed=3)
    parts = [part.path for part in result.parts]
    for order in (parts, parts[::-1]):
        shutil.rmtree(tmp_path / "back", ignore_errors=True)
        merged = rbtool.merge(order, tmp_path / "back")
        assert merged.content_digest == digest(walks)
        assert merged.restored is True
        assert merged.episodes == 10
        assert not merged.renumbered
    two = rbtool.merge(parts[:2], tmp_path / "two")
    assert two.restored is None
    assert numbers_of(tmp_path / "two") == sorted([*numbers_of(parts[0]), *numbers_of(parts[1])])
    rest = halve(tmp_path / "two", tmp_path / "again")
    assert sum(part.episodes for part in rest.parts) == 8


SHARES = st.sampled_from([(0.5, 0.5, None), (0.8, 0.1, 0.1), (0.34, 0.33, 0.33), (None, 0.9, 0.1), (0.25, None, 0.75)])


ANY_SPLIT = given(
    plan=dataset_plans(max_episodes=7), shares=SHARES, seed=st.integers(0, 2**64 - 1), in_order=st.booleans(),
    layouts=st.tuples(*[st.sampled_from(["ted", "packed"])] * 2), order=st.none() | st.integers(0, 99),
)  # fmt: skip


@settings(max_examples=8)
@ANY_SPLIT
def test_splitting_and_merging_any_dataset_gives_it_back(plan, shares, seed, in_order, layouts, order):
    require_restored(plan, shares, None if in_order else seed, layouts, order)


@pytest.mark.slow
@settings(max_examples=150)
@ANY_SPLIT
def test_splitting_and_merging_many_datasets_gives_them_back(plan, shares, seed, in_order, layouts, order):
    require_restored(plan, shares, None if in_order else seed, layouts, order)


def require_restored(
    plan: DatasetPlan, shares: tuple[float | None, ...], seed: int | None, layouts: tuple[str, str], order: int | None
) -> None:
    """Split a dataset, whose episodes are shuffled if there is an `order`, and merge the parts in another order."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        work = Path(place)
        write_plan(plan, work / "plan")
        rows = list(range(len(plan.lengths)))
        if order is not None and rows:
            random.Random(order).shuffle(rows)
        source = chosen(work / "plan", rows, work / "source") if rows else work / "plan"
        if layouts[0] == "packed":
            source = rbtool.convert(source, work / "packed", layout="packed").path
        given_shares = [share for share in shares if share is not None]
        arguments = dict(zip(("train", "val", "test"), shares, strict=True)) | {"layout": layouts[1]}
        arguments |= {"in_order": True} if seed is None else {"seed": seed}
        if not rows or min(largest_remainders(given_shares, len(rows))) == 0:
            with pytest.raises(UsageError, match=r"would be empty|no episodes to split"):
                rbtool.split(source, work / "s", allow_duplicates=True, **arguments)
            assert not (work / "s").exists()
            return
        result = rbtool.split(source, work / "s", allow_duplicates=True, **arguments)
        owners = [number for part in result.parts for number in numbers_of(part.path)]
        assert sorted(owners) == sorted(numbers_of(source))
        parts = [part.path for part in result.parts]
        random.Random(order).shuffle(parts)
        merged = rbtool.merge(parts, work / "back", layout=layouts[0])
        assert merged.content_digest == digest(source)
        assert merged.restored is True


def largest_remainders(shares: Sequence[float], count: int) -> list[int]:
    """Round so many shares of `count` as `targets` does, in floating point."""
    exact = [round(share * count, 9) for share in shares]
    found = [int(part) for part in exact]
    for part in sorted(range(len(exact)), key=lambda part: (found[part] - exact[part], part))[: count - sum(found)]:
        found[part] += 1
    return found


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=30), seed=st.integers(0, 2**64 - 1),
    percent=st.tuples(st.integers(1, 98), st.integers(1, 98)), in_order=st.booleans(), spread=st.booleans(),
)  # fmt: skip
def test_no_group_is_on_two_sides_and_shares_are_met(sizes, seed, percent, in_order, spread):
    train, val = percent
    shares = {"train": train / 100, "val": val / 100, "test": (100 - train - val) / 100}
    if train + val >= 100:
        shares = {"train": train / 100, "test": (100 - train) / 100}
    of_episode = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    groups = Groups(np.unique(of_episode, return_inverse=True)[1])
    returns = np.arange(len(of_episode), dtype=float) if spread and not in_order else None
    try:
        wanted = targets(shares, len(of_episode))
        part_of = assign(groups, shares, seed=seed, in_order=in_order, returns=returns)
    except UsageError:
        assert len(sizes) < len(shares) or max(sizes) > 1 or 0 in largest_remainders([*shares.values()], len(sizes))
        return
    for group in range(len(sizes)):
        assert len(set(part_of[groups.of_episode == group].tolist())) == 1
    counts = np.bincount(part_of, minlength=len(shares))
    assert (counts > 0).all()
    assert sum(wanted) == len(of_episode)
    if max(sizes) == 1:
        assert counts.tolist() == wanted


def test_shares_are_rounded_by_largest_remainder():
    assert targets({"train": 0.8, "val": 0.1, "test": 0.1}, 10) == [8, 1, 1]
    assert targets({"train": 0.8, "val": 0.2}, 4) == [3, 1]
    assert targets({"train": 1 / 3, "val": 1 / 3, "test": 1 / 3}, 100) == [34, 33, 33]
    with pytest.raises(UsageError, match=r"the part test would be empty: 0\.1 of 4 episodes"):
        targets({"train": 0.8, "val": 0.1, "test": 0.1}, 4)


@each(
    ("shares", "what"),
    [((0.8, 0.3, None), r"0.8 \+ 0.3 add up to 1.1, expected 1"), ((0.5, 0.2, 0.2), "add up to 0.9"),
     ((1.5, None, None), "--train is 1.5, expected a fraction above 0"), ((1.2, -0.2, None), "--train is 1.2"),
     ((None, None, None), "^no fraction"), ((0.5, None, None), "--train is the only fraction"),
     ((0.8, 0.2, 0.0), "--test is 0"), ((float("nan"), 0.5, None), "--train is nan")],
)  # fmt: skip
def test_fractions_have_to_make_up_the_whole(shares, what):
    with pytest.raises(UsageError, match=what):
        require_shares(*shares)
    assert require_shares(0.7, 0.2, 0.1) == {"train": 0.7, "val": 0.2, "test": 0.1}
    assert require_shares(1 / 3, 1 / 3, 1 / 3)


def test_identical_episodes_are_in_one_part_unless_allowed(walks, tmp_path):
    """Byte-identical episodes in train and val make a model look better than it is."""
    source = chosen(walks, [*range(10), 4, 4, 8], tmp_path / "repeated")
    with pytest.raises(UsageError, match="have a byte-identical one in another part") as caught:
        halve(source, tmp_path / "s", seed=0)
    assert "--by content" in caught.value.hint
    assert not (tmp_path / "s").exists()
    for seed in range(5):
        with contextlib.suppress(UsageError):
            assert halve(source, tmp_path / "s", seed=seed, force=True).duplicates == 0
    allowed = halve(source, tmp_path / "s", seed=0, allow_duplicates=True, force=True)
    assert allowed.duplicates >= 2
    together = halve(source, tmp_path / "c", seed=0, by="content")
    assert (together.duplicates, together.groups) == (0, 10)
    assert rbtool.merge([part.path for part in allowed.parts], tmp_path / "back").restored


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_a_group_is_in_one_part(walks, tmp_path, layout):
    source = rbtool.convert(walks, tmp_path / "in", layout=layout).path
    with pytest.raises(UsageError, match="action changes within episode 0"):
        halve(source, tmp_path / "s", by="action")
    for by in ("seed", "task"):
        assert halve(source, tmp_path / by, by=by).groups == 10
    grouped = tmp_path / "grouped"
    rbtool.preprocess(source, lambda rows: rows.set("scene", rows["episode"] // 3), grouped, num_workers=0)
    for seed in range(4):
        result = rbtool.split(grouped, tmp_path / "g", train=0.5, test=0.5, by="scene", seed=seed, force=True)
        scenes = [{number // 3 for number in numbers_of(part.path)} for part in result.parts]
        assert result.groups == 4
        assert not scenes[0] & scenes[1]


def test_missing_or_single_groups_are_refused(walks, tmp_path):
    with pytest.raises(UsageError, match="--by 'scene' names no field"):
        halve(walks, tmp_path / "s", by="scene")
    write_plan(DatasetPlan((2, 3, 1), ("open", "both", "open"), (False,) * 3, (), seed=1), tmp_path / "plan")
    with pytest.raises(UsageError, match="episode 13 has no seed"):
        halve(tmp_path / "plan", tmp_path / "s", by="seed")
    one = tmp_path / "one"
    rbtool.preprocess(walks, lambda rows: rows.set("scene", rows["episode"] * 0), one, num_workers=0)
    with pytest.raises(UsageError, match="1 group by scene cannot fill 2 parts"):
        halve(one, tmp_path / "s", by="scene")


@each("seed", range(20))
def test_stratified_parts_have_close_mean_returns(seed):
    draw = np.random.default_rng(seed)
    returns = draw.pareto(1.5, 400) * 100
    shares = {"train": 0.8, "val": 0.1, "test": 0.1}
    part_of = assign(Groups(np.arange(400)), shares, seed=seed, returns=np.minimum(returns, 1000))
    assert np.bincount(part_of).tolist() == [320, 40, 40]
    ranks = np.argsort(np.argsort(returns))
    for part in range(3):
        assert abs(ranks[part_of == part].mean() - 199.5) < 4.5


def test_stratify_by_return_draws_at_random_and_needs_returns(walks, tmp_path):
    first, other = (halve(walks, tmp_path / f"s{seed}", stratify="return", seed=seed).parts[0] for seed in (0, 1))
    assert first.content_digest != other.content_digest
    with open_steps(first.path) as reader:
        assert first.mean_return == pytest.approx(reader.episodes.total_reward.mean())
    plain = tmp_path / "plain"
    rbtool.preprocess(walks, dest=plain, operations={"exclude": ["next.reward"]}, num_workers=0)
    with pytest.raises(UsageError, match="the dataset has no return"):
        halve(plain, tmp_path / "p", stratify="return")
    assert halve(plain, tmp_path / "p").parts[0].mean_return is None


def test_another_split_is_replaced_with_force(walks, tmp_path):
    first = halve(walks, tmp_path / "s")
    assert halve(walks, tmp_path / "s").parts == first.parts
    with pytest.raises(UsageError, match="already exists"):
        halve(walks, tmp_path / "s", seed=1)
    assert halve(walks, tmp_path / "s", seed=1, force=True).parts != first.parts
    assert halve(walks, tmp_path / "s", force=True).parts == first.parts


def test_foreign_files_among_the_parts_are_never_replaced(walks, tmp_path):
    halve(walks, tmp_path / "s")
    (tmp_path / "s" / "val" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes.txt is not part of the dataset"):
        halve(walks, tmp_path / "s", seed=1, force=True)
    (tmp_path / "s" / "val" / "notes.txt").unlink()
    (tmp_path / "s" / "plots").mkdir()
    with pytest.raises(UsageError, match="plots is not part"):
        halve(walks, tmp_path / "s", seed=1, force=True)


def test_the_folder_of_the_parts_is_no_dataset_and_has_a_default(walks, tmp_path, monkeypatch):
    halve(walks, tmp_path / "s")
    with pytest.raises(UsageError, match="holds the parts of a split, expected one of them: train, val"):
        rbtool.merge([tmp_path / "s", walks], tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    result = rbtool.split(walks, train=0.5, val=0.5)
    assert [part.path for part in result.parts] == [tmp_path / "walks-split" / name for name in ("train", "val")]


def test_a_dry_run_tells_the_parts(walks, tmp_path):
    planned = halve(walks, tmp_path / "s", dry_run=True)
    made = halve(walks, tmp_path / "s")
    assert [(part.steps, part.episodes, part.mean_return) for part in planned.parts] == [
        (part.steps, part.episodes, part.mean_return) for part in made.parts
    ]
    assert planned.parts[0].content_digest is None


def test_contradicting_and_impossible_options_are_refused(walks, tmp_path):
    for arguments, what in (
        ({"in_order": True, "seed": 1}, "--in-order and --seed are both set, expected one"),
        ({"in_order": True, "stratify": "return"}, "--in-order and --stratify are both set"),
        ({"stratify": "length"}, "--stratify is 'length'"),
        ({"seed": -1}, "--seed is -1"),
    ):
        with pytest.raises(UsageError, match=what):
            halve(walks, tmp_path / "s", **arguments)
    with pytest.raises(rbtool.FormatError, match="is not a dataset"):
        halve(tmp_path, tmp_path.parent / "s")


def test_compression_is_kept_and_restored(walks, tmp_path):
    source = rbtool.convert(walks, tmp_path / "in", layout="packed", compress=["observation=zstd:3"]).path
    result = halve(source, tmp_path / "s")
    assert result.layout == "packed"
    merged = rbtool.merge([part.path for part in result.parts], tmp_path / "back")
    assert merged.content_digest == digest(source)


@pytest.mark.parametrize("lengths", [[2, 3], [2, 2, 3]])
def test_progress_of_comparing_episodes_reaches_the_end(tmp_path, lengths):
    write_walks(tmp_path / "walks", [(length, "open") for length in lengths])
    seen: list[int] = []
    with open_steps(tmp_path / "walks") as reader:
        assert identical_episodes(reader, seen.append).tolist() == list(range(len(lengths)))
    assert sum(seen) == sum(lengths)
