"""`rbtool.report`: the page, its size, what it shows of damaged data, and where it may be written."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import robot_sets
from damage import flip
from made_datasets import HOSTILE, write_shown

import rbtool
from rbtool.core.errors import DatasetNotFoundError, UsageError
from rbtool.core.format.episodes import EpisodeRow
from rbtool.core.format.manifest import Request
from rbtool.core.format.memmap.builder import DatasetBuilder, Origin
from rbtool.core.open_steps import open_steps
from rbtool.core.progress import Silent
from rbtool.core.report import page
from rbtool.core.report.figures import measure
from rbtool.core.report.page import MOST_BYTES
from rbtool.core.results import to_document
from rbtool.core.ted.episodes import EndReason
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, write_plan, write_walks

EPISODES = [(6, "terminated"), (1, "truncated"), (9, "open"), (4, "both")]


@pytest.fixture
def charts() -> None:
    """For a test that looks at charts."""


@pytest.fixture(autouse=True)
def without_charts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the charts out, which take most of the time: other tests, of charts and in a browser, have them."""
    if "charts" not in request.fixturenames:
        monkeypatch.setattr(page, "inline_svg", lambda *drawn, **options: '<svg class="chart"></svg>')


def page_of(tmp_path: Path, *datasets: Path) -> str:
    """Write a report and return the page."""
    result = rbtool.report(datasets, tmp_path / "page.html", force=True)
    written = result.path.read_text(encoding="utf-8")
    assert len(written.encode()) == result.bytes <= MOST_BYTES
    return written


def words(page: str) -> str:
    """The text of a page."""
    body = re.sub(r"(?s)<(script|style|svg).*?</\1>", " ", page)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


def numbers_of(page: str, label: str) -> list[float | None]:
    """The numbers in the row of the table of fields that begins with this name."""
    row = re.search(rf"<tr><th scope=\"row\"><code>{re.escape(label)}</code></th>(.*?)</tr>", page)
    assert row is not None
    cells = re.findall(r"<td>(.*?)</td>", row[1])[2:-1]
    return [_number(cell) for cell in cells]


def _number(cell: str) -> float | None:
    exact = re.search(r'value="([^"]*)"', cell)
    text = exact[1] if exact else cell.replace(",", "")
    return None if text == "–" else float(text)


def test_the_numbers_on_the_page_are_numpys(walks: Path, tmp_path: Path) -> None:
    page = page_of(tmp_path, walks)
    with open_steps(walks) as reader:
        rows = reader.read(("observation",), 0, 20)
    for place in range(3):
        column = rows[:, place]
        quantiles = np.quantile(column, (0.01, 0.25, 0.5, 0.75, 0.99))
        expected = [column.mean(), column.std(), column.min(), *quantiles, column.max()]
        assert numbers_of(page, f"observation[{place}]") == pytest.approx(expected, rel=1e-12)


@pytest.mark.usefixtures("charts")
def test_the_charts_are_those_of_the_figures(walks: Path, tmp_path: Path) -> None:
    page = page_of(tmp_path, walks)
    known = {name: unescape(found) for name, found in re.findall(r'<desc id="d1-([a-z]+)-desc">([^<]*)', page)}
    assert known.keys() == {"length", "return", "curve", "actions", "correlation"}
    assert known["length"].startswith("4 values in 9 bins from 0.5 to 9.5")
    with open_steps(walks) as reader:
        returns = reader.episodes.total_reward
    assert f"from {returns.min():.4g} to {returns.max():.4g}" in known["curve"]


def test_all_parts_are_there(walks: Path, tmp_path: Path) -> None:
    text = words(page_of(tmp_path, walks))
    for part in ("What it is", "Findings of rbtool check", "Episodes", "Episodes step by step", "Fields", "Actions",
                 "Correlation with the return", "Next observations", "How it was made"):  # fmt: skip
        assert part in text
    assert "1 terminated, 1 truncated, 1 both, 1 end of file" in text
    assert f"This page: rbtool report {walks} -o {tmp_path / 'page.html'}" in text


@pytest.mark.parametrize("episodes", [[], [(1, "open")], [(1, "terminated")] * 3, [(700, "truncated")]])
def test_any_episodes_make_a_page(tmp_path: Path, episodes: list[tuple[int, str]]) -> None:
    write_walks(tmp_path / "walks", episodes)
    result = rbtool.report(tmp_path / "walks", tmp_path / "page.html")
    (found,) = result.datasets
    assert (found.steps, found.episodes) == (sum(length for length, _ in episodes), len(episodes))
    text = words(result.path.read_text(encoding="utf-8"))
    assert ("There are no episodes." in text) == (not episodes)
    assert ("One step in 2 is shown" in text) == (episodes == [(700, "truncated")])


def test_odd_leaves_make_a_page(tmp_path: Path) -> None:
    leaves = tuple(leaf for leaf in ODD_LEAVES if leaf.key[0] != "reward")
    write_plan(DatasetPlan((3, 1, 4), ("terminated", "open", "both"), (True, False, False), leaves), tmp_path / "odd")
    text = words(page_of(tmp_path, tmp_path / "odd"))
    assert "observation.camera" in text
    assert "NaN" in text


def test_text_of_a_dataset_is_escaped(tmp_path: Path) -> None:
    page = page_of(tmp_path, write_shown(tmp_path / "hostile", hostile=True))
    assert "<script>document" not in page
    assert not re.search(r"<[^>]+\son\w+=", re.sub(r'"[^"]*"', '""', page))
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert HOSTILE[:20] in words(page)
    for data in re.findall(r'<script type="application/json">(.*?)</script>', page):
        assert {"steps", "frames", "traces"} == json.loads(data).keys()


def test_the_page_names_no_other_place_and_shows_images(tmp_path: Path) -> None:
    page = page_of(tmp_path, write_shown(tmp_path / "shown"))
    addresses = re.findall(r"(?:src|href|action|url)\s*[=(]\s*[\"']?([^\"')> ]{5})", page)
    assert {address for address in addresses if not address.startswith(("#", "data:"))} == set()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src &#x27;none&#x27;" in policy[1]
    assert "unsafe" not in policy[1]
    assert " style=" not in re.sub(r"(?s)<(script|style).*?</\1>", "", page)
    assert page.count('<img src="data:image/') == 1
    assert page.count("<image href") == 4
    assert "all 1,152 numbers of a row together" in page


def test_datasets_are_next_to_each_other(walks: Path, tmp_path: Path) -> None:
    other = write_shown(tmp_path / "shown")
    page = page_of(tmp_path, walks, other, walks)
    assert page.count('<th scope="col">') > 3
    assert [f"<h3>{name}</h3>" in page for name in (walks, other, f"{walks} (2)")] == [True] * 3


@pytest.mark.slow
def test_mixtures_and_splits_show_their_datasets(walks: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_walks(other, EPISODES, seed=1)
    rbtool.mix([walks, other], tmp_path / "mix.toml", p=[1, 3])
    rbtool.split(walks, tmp_path / "split", train=0.5, test=0.5)
    mixed = rbtool.report(tmp_path / "mix.toml", tmp_path / "mix.html")
    parts = rbtool.report(tmp_path / "split", tmp_path / "split.html")
    assert [one.path for one in mixed.datasets] == [walks, other]
    assert "share of the mixture 0.25 0.75" in words(mixed.path.read_text(encoding="utf-8"))
    assert [one.name for one in parts.datasets] == [f"{tmp_path / 'split'}/train", f"{tmp_path / 'split'}/test"]


def test_results_are_documents_and_checkpoints_have_reports(walks: Path, tmp_path: Path) -> None:
    result = rbtool.report(walks, tmp_path / "page.html")
    document = json.loads(json.dumps(to_document(result)))
    assert (document["kind"], document["datasets"][0]["steps"]) == ("report", 20)
    assert (result.failed(), result.datasets[0].path) == (False, walks)
    rbtool.checkpoint.save(walks, tmp_path / "walks.h5", form="h5")
    assert "checkpoint, layout h5" in words(page_of(tmp_path, tmp_path / "walks.h5"))


@pytest.mark.parametrize("name", ["action.memmap", ".rbtool/episodes/length.memmap"])
def test_damage_is_shown(walks: Path, tmp_path: Path, name: str) -> None:
    flip(walks / name, 3)
    result = rbtool.report(walks, tmp_path / "page.html")
    found = rbtool.check(walks)
    text = words(result.path.read_text(encoding="utf-8"))
    assert result.failed()
    assert result.datasets[0].errors == found.errors > 0
    for finding in found.findings:
        assert f"{finding.rule} {finding.name}: {finding.message}" in text


def test_rows_that_are_lost_are_named(walks: Path, tmp_path: Path) -> None:
    (walks / "action.memmap").write_bytes((walks / "action.memmap").read_bytes()[:-1])
    assert "only the first 19 of 20 rows, the others are lost" in words(page_of(tmp_path, walks))
    (walks / "action.memmap").unlink()
    assert words(page_of(tmp_path, walks)).count("action.memmap is missing") == 3


@pytest.mark.slow
def test_a_page_of_many_fields_is_small_and_states_what_is_left_out(tmp_path: Path) -> None:
    fields = [Field((f"observation_with_a_long_name_{n}",), "float32", (6,), "observation") for n in range(500)]
    rows = np.random.default_rng(0).normal(size=(400, 6)).astype(np.float32)
    with DatasetBuilder(tmp_path / "wide", fields) as builder:
        builder.append({field.key: rows for field in fields})
        builder.finish(
            [EpisodeRow(0, len(rows), 0.0, True, False, EndReason.TERMINATED)], Origin(Request("test", "test", "wide"))
        )
    text = words(page_of(tmp_path, tmp_path / "wide"))
    assert re.search(r"[\d,]+ rows left out, to limit the size of the page", text)


def test_large_images_make_a_small_page(tmp_path: Path) -> None:
    field = Field(("pixels",), "uint8", (128, 160, 3), "observation")
    noise = np.random.default_rng(0).integers(0, 256, (60, 128, 160, 3)).astype(np.uint8)
    others = [Field((f"pixels{n}",), "uint8", (128, 160, 3), "observation") for n in range(5)]
    with DatasetBuilder(tmp_path / "noise", [field, *others]) as builder:
        builder.append({one.key: noise for one in (field, *others)})
        builder.finish(
            [EpisodeRow(n, 20, 0.0, True, False, EndReason.TERMINATED) for n in range(3)],
            Origin(Request("test", "test", "noise")),
        )
    assert "2 more fields with images left out" in words(page_of(tmp_path, tmp_path / "noise"))


def test_nothing_is_overwritten_but_a_page(walks: Path, tmp_path: Path) -> None:
    rbtool.report(walks, tmp_path / "page.html")
    before = (tmp_path / "page.html").read_bytes()
    with pytest.raises(UsageError, match="already exists"):
        rbtool.report(walks, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes() == before
    (tmp_path / "mine.html").write_text("my notes")
    with pytest.raises(UsageError, match="left unchanged"):
        rbtool.report(walks, tmp_path / "mine.html", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.html", "page.html", "walks"]


@pytest.mark.parametrize("name", ["page.txt", "page", "walks/page.html", "walks/meta.json/page.html"])
def test_other_places_are_refused_before_any_work(walks: Path, tmp_path: Path, name: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError):
        rbtool.report(walks, tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_one_sentence(walks: Path, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(OSError, match="closed"):
        rbtool.report(walks, tmp_path / "closed" / "page.html")


def test_what_cannot_be_read_or_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DatasetNotFoundError):
        rbtool.report(tmp_path / "nothing", tmp_path / "page.html")
    raw = Path(shutil.copytree(Path(__file__).parents[2] / "data/minari/cartpole/scripted-v0", tmp_path / "raw"))
    with pytest.raises(UsageError, match="TED dataset"):
        rbtool.report(raw, tmp_path / "page.html")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="matplotlib") as raised:
        rbtool.report(tmp_path / "nothing", tmp_path / "page.html")
    assert raised.value.hint == "pip install 'rbtool[plot]'"


@pytest.mark.parametrize("count", [0, 9])
def test_too_few_and_too_many_datasets_are_refused(walks: Path, tmp_path: Path, count: int) -> None:
    with pytest.raises(UsageError, match=f"{count} datasets"):
        rbtool.report([walks] * count, tmp_path / "page.html")


def test_equal_data_give_equal_figures(walks: Path, tmp_path: Path) -> None:
    rbtool.convert(walks, tmp_path / "packed", layout="packed")
    with open_steps(walks) as one, open_steps(tmp_path / "packed") as other:
        assert measure(one, Silent()).fields == measure(other, Silent()).fields


def test_findings_are_shown_with_the_steps_and_frames_concerned(tmp_path: Path) -> None:
    made = robot_sets.make(robot_sets.Kind(cameras=1, episodes=8, length=60))
    for name in ("action spike", "black frames"):
        robot_sets.DEFECTS[name].change(made)
    rbtool.convert(robot_sets.write(made, tmp_path / "raw"), tmp_path / "set")
    rbtool.report(tmp_path / "set", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    items = re.findall(r"<li><strong.*?</li>", text, re.DOTALL)
    spike, black = (next(one for one in items if rule in one) for rule in ("rule-MOT001", "rule-PIC002"))
    assert "marked: step 40;" in spike
    assert spike.count('class="mark"') == spike.count('class="usual"') == 1
    assert "action[1]" in spike
    assert re.findall(r"docs/reference/\w+\.md, (?:MOT001|PIC002)", text) == [
        "docs/reference/behaviour.md, MOT001", "docs/reference/behaviour.md, PIC002"
    ]  # fmt: skip
    assert "marked: steps 30 to 44<" in black
    assert 'alt="observation.image.front at steps 27,' in black
    assert not re.search(r"<(?:polyline|rect|line|path)\b[^>]*[^/]>", text)  # they would hide what follows
