"""`plot`: the plotted numbers equal the rows, spikes are kept, and files appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made_datasets import write_fields

import rbtool
from rbtool.core.errors import UsageError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.report.charts import Bars, Histogram, Lines
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs.mix import mix
from rbtool.core.verbs.plot import plot

EPISODES = [(300, "terminated"), (1, "truncated"), (90, "open")]


def titles(charts: tuple[Lines | Histogram | Bars, ...]) -> list[str]:
    return [chart.labels.title for chart in charts]


def test_without_a_field_returns_and_lengths_are_plotted(walks: Path) -> None:
    result = plot(walks)
    returns, spread, lengths, bins = result.charts
    with TedReader(walks) as reader:
        assert np.array_equal(returns.series[0].y, reader.episodes.total_reward)
        assert np.array_equal(lengths.series[0].y, [300, 1, 90])
        counts, edges = np.histogram(reader.episodes.total_reward, 20)
    assert np.array_equal(spread.counts, counts)
    assert np.array_equal(spread.edges, edges)
    assert bins.counts.sum() == 3
    assert result.episodes == (0, 1, 2)


def test_a_field_is_plotted_over_the_steps_of_chosen_episodes(walks: Path) -> None:
    result = plot(walks, fields=["reward", "observation"], episodes="0,2")
    with TedReader(walks) as reader:
        rewards = reader.read(("next", "reward"), 0, 391)
        states = reader.read(("observation",), 0, 391).reshape(391, -1)
    assert titles(result.charts)[:2] == ["next.reward", "observation[0]"]
    assert [one.name for one in result.charts[0].series] == ["episode 0", "episode 2"]
    assert np.array_equal(result.charts[0].series[1].y, rewards[301:391, 0])
    for column, chart in enumerate(result.charts[1:]):
        assert np.array_equal(chart.series[0].y, states[:300, column].astype(float))
    assert result.charts[0].series[1].x.tolist() == [*range(90)]


def test_columns_and_episodes_can_be_chosen(walks: Path) -> None:
    assert titles(plot(walks, fields=["observation[1]"], episodes="1").charts) == ["observation[1], episode 1"]
    assert titles(plot(walks, fields=["observation[0:2]"], episodes="0:2").charts) == [
        "observation[0]", "observation[1]"
    ]  # fmt: skip
    result = plot(walks, fields=["observation[1]", "observation[0:2]", "observation"])
    assert titles(result.charts)[:2] == ["observation[1], episode 0", "observation[0], episode 0"]
    assert len({*titles(result.charts)}) == len(result.charts)
    assert all(len(chart.series) == 1 for chart in result.charts)
    result = plot(walks, fields=["reward"])
    assert (result.episodes, result.notes) == ((0,), ("episode 0 of 3; --episodes chooses others",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": ["observatoin"]}, "did you mean 'observation'"),
        ({"fields": ["observation[9]"]}, "observation has"),
        ({"fields": ["observation[1:1]"]}, "observation has"),
        ({"episodes": "9"}, "episode 9, which is not there"),
        ({"output": "a.jpg"}, r"ends in \.jpg"),
        ({"output": "picture"}, "ends in no suffix"),
    ],
)
def test_impossible_plots_are_refused(walks: Path, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plot(walks, **options)


def test_images_and_complex_numbers_are_not_plotted(tmp_path: Path) -> None:
    images, phase = np.zeros((5, 16, 16, 3), np.uint8), np.zeros((4, 2), complex)
    made = write_fields(tmp_path / "images", {"reward": np.zeros(4), "pixels": images, "phase": phase})
    with pytest.raises(UsageError, match="pixels holds images") as caught:
        plot(made, fields=["pixels"])
    assert f"rbtool frames {made} --episode K --field pixels" in caught.value.hint
    with pytest.raises(UsageError, match="phase holds complex numbers"):
        plot(made, fields=["phase"])


def test_many_columns_and_episodes_are_cut_with_a_note(tmp_path: Path) -> None:
    one = {"reward": np.zeros(2), "wide": np.arange(80.0).reshape(2, 40)}
    made = write_fields(tmp_path / "wide", *[one] * 30)
    result = plot(made, fields=["wide"], episodes=":")
    assert (len(result.charts), len(result.episodes)) == (16, 24)
    assert result.notes == (
        "the first 24 of 30 episodes; --episodes chooses others",
        "wide has 40 columns; the first 16 are plotted, --field 'wide[16:32]' plots more",
    )
    assert len(plot(made, fields=["wide[16:32]"]).charts) == 16


@pytest.mark.parametrize("place", [0, 77_777, 199_999])
def test_a_spike_and_a_gap_of_one_step_are_kept(tmp_path: Path, place: int) -> None:
    rewards = np.sin(np.arange(200_000) / 9)
    rewards[place], rewards[100_000] = 50, np.nan
    result = plot(write_fields(tmp_path / "long", {"reward": rewards}), fields=["reward"])
    line = result.charts[0].series[0]
    assert len(line.x) <= 5 * 1001
    assert line.x[np.nanargmax(line.y)] == place
    assert 100_000 in line.x[np.isnan(line.y)]
    assert np.array_equal(line.y, rewards[line.x.astype(int)], equal_nan=True)


def test_blocks_of_a_long_episode_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = np.random.default_rng(0).normal(size=50_000)
    made = write_fields(tmp_path / "long", {"reward": rewards})
    whole = plot(made, fields=["reward"]).charts[0].series[0]
    monkeypatch.setattr("rbtool.core.verbs.plot._BLOCK_BYTES", 4096)
    parts = plot(made, fields=["reward"]).charts[0].series[0]
    assert (np.diff(parts.x) > 0).all()
    for part in np.split(np.arange(50_000), 1000):
        for line in (whole, parts):
            kept = line.y[(line.x >= part[0]) & (line.x <= part[-1])]
            assert (kept.min(), kept.max()) == (rewards[part].min(), rewards[part].max())


def test_gaps_and_empty_datasets_are_plotted(tmp_path: Path) -> None:
    made = write_fields(tmp_path / "gaps", {"reward": np.array([np.nan, np.inf, 1.0])})
    assert np.isnan(plot(made, fields=["reward"]).charts[0].series[0].y[0])
    assert plot(made).charts[1].counts.sum() == 0
    plot(made, output=tmp_path / "gaps.png")
    write_walks(tmp_path / "empty", [])
    assert [chart.counts.size for chart in plot(tmp_path / "empty", output=tmp_path / "a.svg").charts[1::2]] == [0, 0]
    with pytest.raises(UsageError, match="no steps"):
        plot(tmp_path / "empty", fields=["reward"])


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_a_picture_is_written_once_and_replaced_only_with_force(walks: Path, tmp_path: Path, suffix: str) -> None:
    place = tmp_path / f"a{suffix}"
    assert plot(walks, output=place).output == place
    written = place.read_bytes()
    with pytest.raises(UsageError, match="already exists"):
        plot(walks, fields=["reward"], output=place)
    assert place.read_bytes() == written
    plot(walks, fields=["reward"], output=place, force=True)
    assert place.read_bytes() != written
    assert sorted(path.name for path in tmp_path.iterdir()) == [place.name, "walks"]


def test_only_pictures_are_replaced(walks: Path, tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text("my notes")
    (tmp_path / "b.svg").mkdir()
    for place in ("a.svg", "b.svg", "walks/c.svg"):
        with pytest.raises(UsageError):
            plot(walks, output=tmp_path / place, force=True)
    assert (tmp_path / "a.svg").read_text() == "my notes"


def test_a_checkpoint_is_plotted_as_its_dataset(walks: Path, tmp_path: Path) -> None:
    rbtool.checkpoint.save(walks, tmp_path / "walks.h5", form="h5")
    one, other = plot(walks).charts, rbtool.plot(tmp_path / "walks.h5").charts
    assert np.array_equal(one[0].series[0].y, other[0].series[0].y)


@pytest.fixture
def mixture(walks: Path, tmp_path: Path) -> Path:
    """Three datasets, one of them in a mixture in the mixture, and one that lacks actions."""
    write_walks(tmp_path / "more", [(20, "terminated")] * 2)
    write_fields(tmp_path / "bare", {"reward": np.arange(7.0), "observation": np.zeros((8, 3))})
    mix([walks, tmp_path / "more"], tmp_path / "inner.toml", p=[3, 1])
    mix([tmp_path / "inner.toml", tmp_path / "bare"], tmp_path / "mix.toml", p=[0.6, 0.4], schema="intersect")
    return tmp_path / "mix.toml"


def test_a_mixture_is_plotted_by_weights_and_episodes_of_each_dataset(mixture: Path) -> None:
    result = plot(mixture)
    shares, steps, *others = result.charts
    assert [Path(name).name for name in shares.names] == ["walks", "more", "bare"]
    assert np.allclose(shares.values, [45, 15, 40])
    assert steps.values.tolist() == [391, 40, 7]
    lengths = next(chart for chart in others if chart.labels.title == "Length of each episode")
    assert [line.y.tolist() for line in lengths.series] == [[300, 1, 90], [20, 20], [7]]
    assert [one.episodes for one in result.datasets] == [(0, 1, 2), (0, 1), (0,)]
    assert [len(chart.series) for chart in others if chart.labels.title == "Return of each episode"] == [3]
    assert result.notes == ()


def test_fields_of_a_mixture_are_plotted_by_dataset(mixture: Path) -> None:
    result = plot(mixture, fields=["action[1]", "reward"], episodes="0")
    shares, _, actions, rewards = result.charts
    first, second, bare = shares.names
    assert [line.name for line in actions.series] == [f"{first}, episode 0", f"{second}, episode 0"]
    assert [len(line.y) for line in rewards.series] == [300, 20, 7]
    assert result.notes == (f"{bare} has no field action[1]",)
    with pytest.raises(UsageError, match=r"did you mean 'next\.reward'"):
        plot(mixture, fields=["rewerd"])
    with pytest.raises(UsageError, match=f"^{second}: --episodes asks for episode 2, which is not there"):
        plot(mixture, episodes="2")


def test_a_mixture_of_many_datasets_shows_the_episodes_of_the_first(walks: Path, tmp_path: Path) -> None:
    mix([walks] * 10, tmp_path / "mix.toml")
    result = plot(tmp_path / "mix.toml", output=tmp_path / "mix.svg")
    assert (len(result.charts[0].names), len(result.charts[2].series)) == (10, 8)
    assert len({*result.charts[0].names}) == 10
    assert result.notes == ("the first 8 of 10 datasets",)
    assert b"Share of the drawn steps" in (tmp_path / "mix.svg").read_bytes()
