"""The documentation agrees with the code, from links to generated pages, and the examples of docstrings run."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from pathlib import Path

import generated_pages
import noise_transform
import own_operations
import pytest
import torch
from source_tree import ROOT, module_name, package_files
from tensordict import TensorDict

import rbtool
from rbtool.cli.failures import EXIT_CODES
from rbtool.core import errors
from rbtool.core.format.manifest import Manifest
from rbtool.core.ted.rules import RULES

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "README.md"]
WRITTEN = {page: page.read_text(encoding="utf-8") for page in PAGES}
EXAMPLES = sorted((DOCS / "examples").glob("*.py"))


def test_links_lead_to_pages() -> None:
    links = [(page, link) for page, text in WRITTEN.items() for link in re.findall(r"\]\(([^)#\s]+)", text)]
    assert len(links) > 100
    assert [(page.name, link) for page, link in links if not (page.parent / link).is_file()] == []


def test_pages_can_be_read_without_a_build_and_are_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page, text in WRITTEN.items():
        assert "--8<--" not in text, page
        assert generated_pages.filled(text) == text, f"{page}: python docs/tools/generated_pages.py"
        assert not page.is_relative_to(DOCS) or f": {page.relative_to(DOCS)}\n" in navigation, page


def test_pages_and_hints_name_the_destination_of_preprocess_by_its_option() -> None:
    for file in [*PAGES, *(ROOT / "converters").rglob("*.py")]:
        assert not re.search(r"rbtool preprocess [A-Z]+ DEST", file.read_text(encoding="utf-8")), file


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_examples_are_included_short_and_use_no_private_name(example: Path) -> None:
    source = example.read_text(encoding="utf-8")
    assert f'```python title="{example.name}"\n{source}```\n' in (DOCS / "extend.md").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 40
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            assert not name.startswith("_") or name == "__init__"


def test_every_check_rule_has_a_section_with_its_severities_and_every_section_a_rule() -> None:
    page = (DOCS / "reference/checks.md").read_text(encoding="utf-8")
    found = set()
    for part in page.split("\n## Rules about ")[1:]:
        about, *sections = part.split("\n### ")
        for section in sections:
            title, _, text = section.partition("\n")
            worst = tuple(sorted(set(re.findall(r"\b(error|warning)\b", text.lower()))))
            found.add((*title.split(" ", 1), about.strip().removeprefix("the "), worst))
    assert found == {(one.rule, one.name, one.about, one.severities) for one in RULES}
    table = page.partition("<!-- rules -->\n\n")[2].partition("\n\n<!-- end of rules -->")[0].splitlines()[2:]
    assert [re.split(r" (?<!\\)\| ", row)[0] for row in table] == [f"| {one.rule}" for one in RULES]


def test_every_exit_code_and_every_error_has_its_row() -> None:
    page = (DOCS / "reference/errors.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == re.findall(r"^  (\d+) ", EXIT_CODES, re.MULTILINE)
    found = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.MULTILINE))
    kinds = {name: kind for name, kind in vars(errors).items() if name.endswith(("Error", "Failed")) and name[0] != "_"}
    assert found == {name: str(kind.exit_code) for name, kind in kinds.items()}


def test_every_entry_of_the_manifest_is_described() -> None:
    page = (DOCS / "reference/format.md").read_text(encoding="utf-8")
    entries = set(Manifest.__dataclass_fields__) - {"ranges"} | {"manifest_digest"}
    assert {entry for entry in entries if f"`{entry}`" not in page} == set()


def test_the_generated_pages_cover_the_code() -> None:
    text = {path: write() for path, write in generated_pages.PAGES.items()}
    for kind in ("check", "inspect", "cache verify", "checkpoint save", "stats"):
        assert f"## {kind}\n" in text["reference/json.md"]
    kinds = re.findall(r"^## (.*)$", text["reference/json.md"], re.MULTILINE)
    assert len(set(kinds)) == len(kinds) > 15
    for name in ("ReplayBuffer", "SliceSampler", "convert", "save"):
        assert f".{name}\n" in text["reference/api.md"]
    assert "| `rbtool.core.samplers.base` |" in text["modules.md"]
    assert "](docs/" not in text["contributing.md"]


def test_every_verb_has_a_manual_page_of_plain_requests() -> None:
    pages = generated_pages.manual()
    headings = re.findall(r"^## (rbtool.*)$", (DOCS / "reference/cli.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert list(pages) == [f"{heading.replace(' ', '-')}.1" for heading in headings]
    for page in pages.values():
        assert page.isascii()
        requests = set(re.findall(r"^(\.\S*)", page, re.MULTILINE))
        assert {".TH", ".SH"} <= requests <= {".TH", ".SH", ".TP", ".PP", ".B", ".nf", ".fi"}
        assert not re.search(r"^'|(?<!\\)-", page.partition(".SH NAME")[2], re.MULTILINE)


def test_type_checkers_see_the_names_of_the_list() -> None:
    assert (ROOT / "__init__.pyi").read_text(encoding="utf-8") == generated_pages.stub()
    for home, names in ((home, names) for homes in rbtool._NAMES.values() for home, names in homes.items()):
        module = importlib.import_module(home, "rbtool")
        assert all(hasattr(rbtool, name) and name in vars(module) for name in names.split()), home


def test_the_groups_of_public_names_are_in_the_reference_and_in_the_help() -> None:
    page = generated_pages.api_page()
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == [*rbtool._NAMES]
    assert "::: rbtool.core.samplers.slices.SliceSampler\n" in page.split("\n## Samplers\n")[1].split("\n## ")[0]
    assert "\n\nTransforms: " in (rbtool.__doc__ or "")


def test_every_part_on_the_floors_exists() -> None:
    floors = generated_pages.floors()
    assert {part for parts in floors for part in parts} >= {"samplers", "storages", "ted", "verbs"}
    assert all(
        (ROOT / "core" / part).exists() or (ROOT / f"core/{part}.py").exists() for parts in floors for part in parts
    )


def test_the_transforms_of_the_page() -> None:
    buffer = rbtool.TensorDictReplayBuffer(storage=rbtool.LazyTensorStorage(10), batch_size=4)
    buffer.append_transform(noise_transform.ObservationNoise(0.1))
    buffer.append_transform(noise_transform.ClippedReward())
    rows = TensorDict(
        {
            "observation": torch.zeros(4, 2),
            "next": {"observation": torch.ones(4, 2), "reward": torch.full((4, 1), 5.0)},
        },
        [4],
    )
    buffer.extend(rows)
    assert rows["next", "reward"].eq(5).all()
    stored = buffer.storage[:]
    assert stored["next", "reward"].eq(1).all()
    batch = buffer.sample()
    assert not batch["observation"].eq(0).any()
    assert (batch["next", "observation"] - 1).abs().max() < 1
    assert buffer.storage[:]["observation"].eq(0).all()


def test_the_functions_of_the_page() -> None:
    rows = TensorDict({"observation": torch.ones(4, 2), "next": {"reward": torch.full((4, 1), 5.0)}}, [4])
    assert own_operations.energy(rows)["energy"].tolist() == [[2.0]] * 4
    assert own_operations.scale_reward(rows)["next", "reward"].eq(0.5).all()
    assert len(own_operations.first_half(rows)) == 2


MODULES = [module_name(file) for file in package_files() if ">>>" in file.read_text(encoding="utf-8")]


def test_the_modules_are_those_of_the_installed_package() -> None:
    assert [Path(folder) for folder in rbtool.__path__] == [ROOT]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_show_what_they_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    done = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert done.failed == 0
    assert done.attempted
