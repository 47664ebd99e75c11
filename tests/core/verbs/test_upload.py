"""The card of a dataset on a hub: nothing in the data changes its structure as YAML and Markdown."""

from __future__ import annotations

import re

import pytest
import yaml
from cases import each
from huggingface_hub import DatasetCard as TheirCard
from hypothesis import given
from hypothesis import strategies as st
from machine import ODD_PLAN

import rbtool
from rbtool.core.format.manifest import Dropped, Manifest, Provenance
from rbtool.core.progress import Silent
from rbtool.core.remote.hub_address import HubAddress
from rbtool.core.testing.datasets import relist, write_plan, write_walks
from rbtool.core.verbs.upload import DatasetCard, _size_category, code, license_of

EPISODES = [(40, "terminated"), (1, "truncated"), (1_100, "both")]

ADDRESS = HubAddress("me/walks")
NASTY = "`a` | **b** <script>x</script> [l](http://evil) <!-- -->\n---\n# head\x1b[31m ```\n- x $y$ @you \u202e"


def card_of(folder, before=b"", license="mit", **changes):
    manifest = relist(folder, **changes) if changes else Manifest.load(folder)
    card = DatasetCard(ADDRESS, manifest, rbtool.check(folder), license)
    return card.document(before, folder, folder.parent / "root", Silent()).decode()


def metadata_of(card):
    _, front, _ = card.split("---\n", 2)
    return yaml.safe_load(front)


def test_the_card_is_metadata_for_the_hub(walks):
    found = metadata_of(card_of(walks))
    assert (found["license"], found["pretty_name"]) == ("mit", "walks")
    assert found["task_categories"] == ["reinforcement-learning"]
    assert found["size_categories"] == ["1K<n<10K"]
    assert "rbtool" in found["tags"]
    assert TheirCard(card_of(walks)).data.license == "mit"


def test_the_card_describes_the_data_and_their_statistics(walks):
    card, manifest = card_of(walks), Manifest.load(walks)
    assert card.count("| `") == len(manifest.fields)
    for part in (
        "1,141 steps in 3 episodes", "| terminated | 1 |", "0 errors, 0 warnings", manifest.content_digest,
        "rbtool download hf://me/walks", 'rbtool.load_dataset("hf://me/walks"',
    ):  # fmt: skip
        assert part in card
    reward = next(one for one in rbtool.stats(walks).fields if one.key == ("next", "reward"))
    (line,) = [line for line in card_of(walks).splitlines() if line.startswith("| `next.reward`")]
    assert line.split(" | ")[3:5] == [f"{reward.mean[0]:.4g}", f"{reward.std[0]:.4g}"]


@each(
    ("steps", "category"),
    [(0, "n<1K"), (999, "n<1K"), (1_000, "1K<n<10K"), (99_999, "10K<n<100K"), (10**9, "1B<n<10B"), (10**13, "n>1T")],
)
def test_steps_have_a_size_category(steps, category):
    assert _size_category(steps) == category


def test_texts_of_the_data_stay_text(walks):
    step = Provenance("convert", {"path": "/home/somebody/secret/data.h5", "note": NASTY}, NASTY, {}, NASTY)
    card = card_of(walks, notes=(NASTY,), provenance=(step,), dropped_keys=(Dropped(NASTY, NASTY),))
    plain = re.sub(r"^```.*?^```$|`[^`\n]*`", "", card, flags=re.MULTILINE | re.DOTALL)
    assert not any(part in plain for part in ("script", "evil", "**", "head\n", "@you", "\x1b", "\u202e", "`"))
    assert "\n# head" not in card
    assert "/home/somebody" not in card
    assert "…/data.h5" in card
    assert card.count("<!--") == 2


@given(st.text(st.characters(exclude_categories=())))
def test_a_span_of_code_is_one_line_without_backticks(text):
    span = code(text)
    assert (span[0], span[-1], "`" in span[1:-1]) == ("`", "`", False)
    assert len(span.splitlines()) == 1
    assert "|" not in span
    span.encode()
    assert "<!--" not in span


def test_odd_names_stay_in_their_cells(tmp_path):
    write_plan(ODD_PLAN, tmp_path / "odd")
    card = card_of(tmp_path / "odd")
    table = [line for line in card.splitlines() if line.startswith("| `")]
    assert {line.count(" | ") for line in table} <= {6}
    assert len(table) == len(Manifest.load(tmp_path / "odd").fields)


def test_an_empty_dataset_has_a_card(tmp_path):
    write_walks(tmp_path / "empty", [])
    assert "0 steps in 0 episodes" in card_of(tmp_path / "empty")


def test_text_of_others_in_a_card_is_kept_and_ours_replaced(walks):
    before = b"---\r\nlanguage: de\r\ntags: [walk, rbtool]\r\nlicense: [mit, cc0-1.0]\r\n---\r\n# Mine\r\n"
    first = card_of(walks, before, license_of(before))
    assert (metadata_of(first)["language"], metadata_of(first)["license"]) == ("de", ["mit", "cc0-1.0"])
    assert metadata_of(first)["tags"].count("rbtool") == 1
    assert "# Mine" in first
    assert card_of(walks, first.encode(), "mit, cc0-1.0") == first
    assert card_of(walks, f"{first}\nafter".encode(), "mit, cc0-1.0").endswith("\nafter")


@each(
    ("card", "license"),
    [
        (b"", None), (b"# no metadata", None), (b"---\nlicense: mit\n---\n", "mit"), (b"---\nlicense:\n---\n", None),
        (b"\xef\xbb\xbf---\nlicense: mit\n---\n", "mit"), (b"---\nlicense: 3\n---\n", None), (b"---\n---\n", None),
        (b"---\nlicense: mit\n", None),
    ],
)  # fmt: skip
def test_the_licence_is_read_from_the_metadata_of_a_card(card, license):
    assert license_of(card) == license


BOMB = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))])
MERGES = "\n".join(["a0: &a0 {k: 1}", *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], k{n}: 1}}" for n in range(1, 30))])


@each(
    ("card", "said"),
    [
        (b"\xff", "not UTF-8"), (b"---\n- a\n---\n", "is a list, expected a mapping"),
        (b"---\na: [\n---\n", "not YAML"),
        (b"---\n!!python/object:x {}\n---\n", "the tag"), (b"---\na: !!timestamp x\n---\n", "the tag"),
        (b"---\na: !!int ''\n---\n", "the tag"), (f"---\na: {'1' * 5000}\n---\n".encode(), "not YAML"),
        (f"---\n{BOMB}\n---\n".encode(), "more than 10 references"),
        (f"---\n{MERGES}\n---\n".encode(), "more than 10 references"),
        (f"---\n- &a [x]\n- {BOMB.splitlines()[1][4:]}\n---\n".encode(), "cannot be parsed"),
        (f"---\na: {'[' * 900}{']' * 900}\n---\n".encode(), "more than 40 levels"),
        (b"---\na: " + b"[" * 60_000 + b"\n---\n", "more than 40 levels"),
        (b"---\n" + b"a: " + b"x" * 70_000 + b"\n---\n", "70,003 bytes, expected at most 65,536"),
        (b"---\n? [a]\n: b\n---\n", "not YAML"),
    ],
)  # fmt: skip
def test_a_card_that_cannot_be_parsed_is_refused(card, said):
    with pytest.raises(rbtool.FormatError, match=f"README.*{said}"):
        license_of(card)


def test_values_of_others_in_the_metadata_are_kept(walks):
    values = {
        "language": "no", "time": "1:30", "long": ":".join(["59"] * 400) + ".5", "code": "012",
        "date": "2024-01-01T10:00:00Z", "count": 3, "share": 0.5, "large": 1e300, "small": -2e-7, "on": True,
        "none": None, "list": [1, "yes", {"a": ".5.5"}],
    }  # fmt: skip
    lines = [f"{name}: {value}" for name, value in values.items() if isinstance(value, str)]
    before = "\n".join([
        "---", *lines, "count: 3", "share: .5", "large: 1e300", "small: -2.e-7", '"on": true', "none:",
        "list: &it [1, yes, {a: .5.5}]", "again: *it", "---",
    ])  # fmt: skip
    found = metadata_of(card_of(walks, before.encode()))
    assert {name: found[name] for name in values} == values
    assert found["again"] == values["list"]
