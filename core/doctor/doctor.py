"""The doctor: all rules of behaviour in one pass, and those about the metadata that a source keeps."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..format.contracts import Array
from ..format.videos import VIDEO, image_key, reference_keys
from ..progress import counted
from ..ted.rules import Finding, Rows, Rule
from ..ted.schema import Field, key_name
from .pictures import Eye, PictureRules
from .rows import RowRules
from .rules import BY_ID, ENTRIES, Profile, Report, Thresholds, of_episodes

_INFO, _STATS, _EPISODE_STATS = "meta/info.json", "meta/stats.json", "meta/episodes_stats.jsonl"
_MADE = frozenset({"timestamp", "frame_index", "episode_index", "index", "task_index"})
"""Features that need no statistics: nothing is normalised with them."""
_RANGE = re.compile(r"(\d+):(\d+)")
_FILES = frozenset({".parquet", ".mp4"})


class Doctor(Rule):
    """Sees all rows once, and the decoded frames of videos, and reports what is unusual.

    Args:
        fields: the fields of the rows.
        path: the dataset; `is_raw` states that it is of another library.
        documents: the metadata files of the source by name.
        renamed: the names of fields by the names that the source has for them.
        limits: the thresholds.
        profiles: which rules report; None for those about data, and those about robots where there are cameras or a
            rate.
    """

    rule_id = ""

    def __init__(
        self,
        fields: Sequence[Field],
        path: Path,
        *,
        is_raw: bool,
        documents: Mapping[str, bytes],
        renamed: Mapping[str, str],
        limits: Thresholds | None = None,
        profiles: Collection[Profile] | None = None,
    ) -> None:
        super().__init__(fields, 0)
        self._path = path
        self._is_raw = is_raw
        self._documents = documents
        self._info = _document(documents.get(_INFO, b"{}"))
        self._features = _mapping(self._info.get("features"))
        self._key_of = {name: renamed.get(name, name) for name in self._features}
        rate = self._info.get("fps")
        self._rate = float(rate) if isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0 else None
        names = {self._key_of[name]: _names(feature) for name, feature in self._features.items()}
        self._limits = limits or Thresholds()
        self._rows = RowRules(fields, self._limits, rate=self._rate, names=names)
        self._pictures = PictureRules(fields, self._limits)
        has_robot = (
            self._rate is not None or bool(reference_keys(fields)) or ("timestamp",) in {one.key for one in fields}
        )
        self.profiles: frozenset[Profile] = frozenset(
            ({"data", "robot"} if has_robot else {"data"}) if profiles is None else profiles
        )

    @property
    def count(self) -> int:
        """How many rules report."""
        return sum(one.profile in self.profiles for one in ENTRIES)

    def see(self, rows: Rows) -> None:
        with np.errstate(all="ignore"):  # other rules report what is not finite
            self._rows.see(rows)
            if "robot" in self.profiles:
                self._pictures.see(rows)

    def eye(self, video: int) -> Eye | None:
        """Return what takes frames of a video in order, from any thread; None where nothing looks at them."""
        return self._pictures.eye(video) if "robot" in self.profiles else None

    def findings(self) -> list[Finding]:
        """Return what was found without texts and files."""
        return self.findings_about({}, whole=False)

    def findings_about(
        self,
        texts: Mapping[int, Mapping[str, str]],
        *,
        whole: bool,
        steps: int | None = None,
        files: Iterable[Path] = (),
    ) -> list[Finding]:
        """Return all findings.

        Args:
            texts: the texts of each episode by its number.
            whole: whether all episodes of the source were seen: then totals and statistics are compared.
            steps: the steps of a source, with those that a conversion leaves out.
            files: the files of the source that belong to it.
        """
        report = Report(self._path, self._is_raw, rate=self._rate)
        with np.errstate(all="ignore"):
            self._rows.finish()
            self._rows.report(report, robot="robot" in self.profiles, splits=self._splits())
            if "robot" in self.profiles:
                self._pictures.report(report, self._rows)
        if "data" not in self.profiles:
            report.findings = [one for one in report.findings if BY_ID[one.rule].profile == "robot"]
            return report.findings
        if whole:
            if steps is not None:
                self._check_totals(report, steps)
            if self._rows.numbers and self._info.get("total_episodes") in (None, len(set(report.numbers))):
                self._check_statistics(report)
        self._check_names(report)
        self._check_tasks(report, texts)
        self._check_files(report, files)
        return report.findings

    def _splits(self) -> dict[str, Sequence[int]]:
        found: dict[str, Sequence[int]] = {}
        for name, place in _mapping(self._info.get("splits")).items():
            match = _RANGE.fullmatch(str(place))
            if match:
                found[name] = range(int(match[1]), int(match[2]))
        return found

    def _check_totals(self, report: Report, steps: int) -> None:
        episodes = len(set(report.numbers))  # a very long one has several parts here
        counts = {"total_episodes": episodes, "total_frames": steps}
        videos = [name for name, one in self._features.items() if _mapping(one).get("dtype") == "video"]
        counts["total_videos"] = episodes * len(videos)
        if (tasks := self._documents.get("meta/tasks.jsonl")) is not None:
            counts["total_tasks"] = len([line for line in tasks.splitlines() if line.strip()])
        for name, there in counts.items():
            stated = self._info.get(name)
            if isinstance(stated, int) and stated != there:
                report.add("MET002", f"{_INFO} states {name} {stated:,}, there are {there:,}", figure=there,
                           threshold=stated)  # fmt: skip
        covered = {number for numbers in self._splits().values() for number in numbers}
        if covered and (lost := sorted(set(report.numbers) - covered)):
            report.add("MET002", f"{of_episodes(lost)}: in no split that {_INFO} states", episodes=lost,
                       figure=len(lost))  # fmt: skip

    def _check_statistics(self, report: Report) -> None:
        stored = _document(self._documents.get(_STATS, b"{}"))
        moments = self._rows.moments()
        if not stored:
            return
        for name in self._features:
            key = self._key_of[name]
            feature = _mapping(self._features[name])
            if name in _MADE or feature.get("dtype") in ("string", "bool", "language"):
                continue
            if name not in stored:
                if key in moments:
                    report.add("MET001", f"{_STATS} has nothing about {name}")
                continue
            found = _mapping(stored[name])
            problem = _odd_statistics(found)
            if not problem and key in moments:
                problem = self._contradiction(found, moments[key])
            if problem:
                report.add("MET001", f"{_STATS}: {name}: {problem[0]}", figure=problem[1], threshold=problem[2])
        for key, light in self._pictures.brightness.items():
            for name in (name for name, one in self._key_of.items() if one == key and name in stored):
                mean = _vector(_mapping(stored[name]).get("mean"), 3)
                if mean is not None and abs(float(mean.mean()) - light / 255) > 0.1:
                    text = f"{_STATS}: {name}: mean is {mean.mean():.3f}, pictures have {light / 255:.3f}"
                    report.add("MET001", text, figure=float(mean.mean()) - light / 255, threshold=0.1)
        self._check_episode_statistics(report)

    def _contradiction(self, stored: Mapping[str, Any], found: Mapping[str, Array]) -> tuple[str, float, float] | None:
        limit, width = self._limits.mean, np.maximum(found["std"], 1e-9)
        for name in ("mean", "std"):
            value = _vector(stored.get(name), len(width))
            if value is None:
                continue
            apart = np.abs(value - found[name]) / np.maximum(width, 1e-3 * np.abs(found["mean"]) + 1e-9)
            if (at := int(apart.argmax())) >= 0 and apart[at] > limit:
                unit = "standard deviations" if name == "mean" else "of it"
                return (
                    f"{name}[{at}] is {value[at]:.4g}, the data have {found[name][at]:.4g}: {apart[at]:.1f} {unit}",
                    float(apart[at]), limit,
                )  # fmt: skip
        span = np.maximum(found["max"] - found["min"], 1e-9)
        for name, sign in (("min", -1), ("max", 1)):
            value = _vector(stored.get(name), len(width))
            if value is None:
                continue
            beyond = sign * (found[name] - value) / span
            at = int(beyond.argmax())
            if beyond[at] > 1e-3:
                return f"{name}[{at}] is {value[at]:.4g}, the data go to {found[name][at]:.4g}", float(beyond[at]), 1e-3
            at = int((-beyond).argmax())
            if -beyond[at] > 0.5:
                return (
                    f"{name}[{at}] is {value[at]:.4g}, the data only go to {found[name][at]:.4g}",
                    float(-beyond[at]), 0.5,
                )  # fmt: skip
        return None

    def _check_episode_statistics(self, report: Report) -> None:
        """Compare the statistics of single episodes, as v2.1 stores them, with those episodes."""
        wrong: dict[str, list[int]] = defaultdict(list)
        rows = {number: at for at, number in enumerate(report.numbers)}
        measures = {
            self._key_of[name]: name for name in self._features if self._key_of[name] in self._rows.moments()
        }  # fmt: skip
        signals = (self._rows.states, self._rows.actions)
        arrays = {
            key: (one.array("low")[:, place], one.array("high")[:, place], one.array("mean")[:, place])
            for one in signals if one.names for key, place in one.components.items() if key in measures
        }  # fmt: skip
        for line in self._documents.get(_EPISODE_STATS, b"").splitlines():
            entry = _document(line)
            at = rows.get(entry.get("episode_index", -1), -1)
            for key, (low, high, mean) in arrays.items() if at >= 0 else ():
                stored = _mapping(_mapping(entry.get("stats")).get(measures[key]))
                value = _vector(stored.get("mean"), mean.shape[1])
                if value is not None and (np.abs(value - mean[at]) > 0.2 * (high[at] - low[at]) + 1e-6).any():
                    wrong[measures[key]].append(report.numbers[at])
        for name, numbers in wrong.items():
            report.add("MET001", f"{_EPISODE_STATS}: {name} of {of_episodes(numbers)} has another mean than the data",
                       episodes=numbers, figure=len(numbers))  # fmt: skip

    def _check_names(self, report: Report) -> None:
        for name, feature in self._features.items():
            shape, names = _mapping(feature).get("shape"), _names(feature)
            if names and isinstance(shape, list) and len(shape) == 1 and len(names) != shape[0]:
                report.add("MET005", f"{_INFO} has {counted(len(names), 'name')} for {shape[0]} components of {name}",
                           figure=len(names), threshold=shape[0])  # fmt: skip
            elif len(set(names)) < len(names):
                report.add("MET005", f"{_INFO} has a name twice for {name}", figure=len(names) - len(set(names)))

    def _check_tasks(self, report: Report, texts: Mapping[int, Mapping[str, str]]) -> None:
        of_text: dict[str, list[int]] = defaultdict(list)
        for number, text in texts.items():
            if "language_instruction" in text:
                of_text[text["language_instruction"]].append(number)
        if not of_text:
            return
        empty = [number for text, numbers in of_text.items() if not text.strip() for number in numbers]
        for task, numbers in of_text.items():
            if task.strip() and _is_no_task(task):
                named = json.dumps(task, ensure_ascii=False)
                report.add("MET003", f"{of_episodes(numbers)}: the task {named} says nothing", episodes=numbers,
                           figure=len(numbers))  # fmt: skip
        lacking = sorted(set(texts) - {number for numbers in of_text.values() for number in numbers}
                         - {number for number, text in texts.items() if "language_instructions" in text})  # fmt: skip
        if empty:
            report.add("MET003", f"{of_episodes(empty)}: the task is an empty text", episodes=empty, figure=len(empty))
        if lacking:
            report.add("MET003", f"{of_episodes(lacking)}: no task", episodes=lacking, figure=len(lacking))
        plain: dict[str, list[str]] = defaultdict(list)
        for task in of_text:
            plain[" ".join(re.findall(r"\w+", task.casefold()))].append(task)
        for same in plain.values():
            if len(same) > 1 and same[0].strip():
                episodes = [number for text in same[1:] for number in of_text[text]]
                named = " and ".join(json.dumps(one, ensure_ascii=False)[:80] for one in same[:3])
                report.add("MET003", f"nearly equal tasks: {named}", episodes=episodes, figure=len(same), threshold=1)

    def _check_files(self, report: Report, files: Iterable[Path]) -> None:
        known = {path.absolute() for path in files}
        folder = self._path
        if not known or not self._features:
            return
        fields = {key_name(image_key(one.key) if one.key[0] == VIDEO else one.key) for one in self.fields}
        lacking = {name for name in self._features if self._key_of[name] not in fields}  # such as maps of depths
        there = (path for path in sorted(folder.rglob("*")) if path.suffix in _FILES and path.is_file())
        orphans = [
            path.relative_to(folder).as_posix()
            for path in there
            if path.absolute() not in known and lacking.isdisjoint(path.relative_to(folder).parts)
        ]
        if orphans:
            more = f" and {len(orphans) - 1:,} more" if len(orphans) > 1 else ""
            report.add("MET004", f"{orphans[0]}{more}: no episode refers to it", figure=len(orphans))


def _is_no_task(text: str) -> bool:
    """Whether a text is a placeholder, or was decoded wrongly."""
    plain = text.strip().casefold().strip(".<>[]_- ")
    return (
        plain in {"", "task", "todo", "test", "none", "null", "nan", "n/a", "na", "tbd", "default", "unknown"}
        or "\ufffd" in text
    )


def _document(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _mapping(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def _names(feature: Any) -> list[str]:
    """Return the names of the components of a vector, as LeRobot's metadata have them: a list, or one in a mapping."""
    found = _mapping(feature).get("names")
    if isinstance(found, dict) and len(found) == 1:
        found = next(iter(found.values()))
    return [str(one) for one in found] if isinstance(found, list) and all(isinstance(one, str) for one in found) else []


def _vector(value: Any, width: int) -> Array | None:
    """Return numbers as a vector; None where they are not as many."""
    try:
        found = np.asarray(value, np.float64).reshape(-1)
    except (TypeError, ValueError):
        return None
    return found if len(found) == width and np.isfinite(found).all() else None


def _odd_statistics(stored: Mapping[str, Any]) -> tuple[str, float, float] | None:
    """Say what is wrong with statistics by themselves."""
    values: dict[str, Array] = {}
    for name, value in stored.items():
        try:
            values[name] = np.asarray(value, np.float64).reshape(-1)
        except (TypeError, ValueError):
            return f"{name} is not made of numbers", 0.0, 0.0
        if not np.isfinite(values[name]).all():
            return f"{name} is not finite", math.nan, 0.0
    order = [name for name in ("min", "q01", "q10", "q50", "q90", "q99", "max") if name in values]
    for low, high in pairwise(order):
        if (
            values[low].shape == values[high].shape
            and (values[low] > values[high] + 1e-4 * np.abs(values[high]) + 1e-6).any()
        ):
            return f"{low} is above {high}", float((values[low] - values[high]).max()), 0.0
    if "std" in values and (values["std"] < 0).any():
        return "std is below 0", float(values["std"].min()), 0.0
    return None
