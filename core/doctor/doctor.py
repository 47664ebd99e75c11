"""The doctor: runs all rules of behaviour in one pass over the rows, and checks the metadata of the source."""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..format.contracts import Array, SourceMetadata
from ..format.language import TASK, TASKS, tasks_of
from ..format.videos import reference_keys
from ..progress import counted
from ..ted.rules import Finding, Rows, Rule
from ..ted.schema import Field
from .pictures import MOST_PICTURES, Eye, PictureRules
from .rows import RowRules
from .rules import BY_ID, ENTRIES, Profile, Report, Thresholds, of_episodes

_INFO, _STATS, _EPISODE_STATS = "meta/info.json", "meta/stats.json", "meta/episodes_stats.jsonl"
_RANGE = re.compile(r"(\d+):(\d+)")
_FILES = (".parquet", ".mp4")
_MEASURE_OF = {"mean": "mean", "min": "low", "max": "high", "std": "variance"}
"""The stored statistics of an episode, and the measures of its rows that they are compared with."""
_LEAST_ROWS = 100
"""The number of rows from which quantiles are compared; of fewer rows, estimates from histograms are far off."""
_MOST_ALIKE = 256
"""The largest number of possible copies whose frames are decoded, if not all frames are decoded anyway."""
_MOST_TASKS, _MOST_PAIRS = 10_000, 300
"""The largest number of tasks that are compared, and the largest number that are compared in pairs for typos."""
_ARTICLES = frozenset({"a", "an", "the"})


class Doctor(Rule):
    """The rules of behaviour: they see all rows and the decoded frames of videos once, and report what is unusual.

    Args:
        fields: the fields of the rows.
        path: the dataset.
        is_raw: whether the dataset is in the format of another library.
        documents: the metadata files of the source, by name.
        renamed: the name of each field, by its name in the source.
        limits: the thresholds.
        profiles: which rules report; None for the rules about data, and also the rules about robots if the dataset has
            cameras, time stamps or a rate.
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
        """The number of rules that report."""
        return sum(one.profile in self.profiles for one in ENTRIES)

    def see(self, rows: Rows) -> None:
        with np.errstate(all="ignore"):  # TED007 reports values that are not finite
            self._rows.see(rows)
            if "robot" in self.profiles:
                self._pictures.see(rows)

    def has_frames(self, video: int, frames: int) -> None:
        """Set the number of frames of a video that rows refer to."""
        self._pictures.has_frames(video, frames)

    def eye(self, video: int) -> Eye | None:
        """Return an object that takes the frames of a video in order, in any thread; None if no rule needs them."""
        return self._pictures.eye(video) if "robot" in self.profiles else None

    def wanted_frames(self) -> list[tuple[int, int]]:
        """Return frames of episodes that may be copies, which have to be decoded: pairs of a video and a frame.

        Call it after all rows were seen.
        """
        if "robot" not in self.profiles or "data" not in self.profiles:
            return []
        self._rows.finish()
        alike = [number for same in self._rows.alike for number in same]
        return self._pictures.wanted(alike[:_MOST_ALIKE])

    @property
    def most_pictures(self) -> int:
        """The largest number of decoded frames that are compared; each takes about 90 bytes of memory."""
        return MOST_PICTURES

    @property
    def notes(self) -> list[str]:
        """Sentences about data that were not compared."""
        return self._pictures.notes()

    def findings(self) -> list[Finding]:
        """Return the findings of all rules that need neither texts nor files."""
        return self.findings_about({}, whole=False)

    def findings_about(
        self,
        texts: Mapping[int, Mapping[str, str]],
        *,
        whole: bool,
        steps: int | None = None,
        metadata: SourceMetadata | None = None,
    ) -> list[Finding]:
        """Return all findings.

        Args:
            texts: the texts of each episode, by its number.
            whole: whether all episodes of the source were seen, so that totals and statistics can be compared.
            steps: the number of steps in the source, including those that a conversion leaves out.
            metadata: the parsed metadata of the source.
        """
        report = Report(self._path, self._is_raw, rate=self._rate)
        with np.errstate(all="ignore"):
            self._rows.finish()
            self._rows.report(report, robot="robot" in self.profiles)
            if "robot" in self.profiles:
                self._pictures.report(report, self._rows, whole=whole and self._is_raw)
            tasks = {number: tuple(tasks_of(text)) for number, text in texts.items()}
            self._rows.report_copies(self._splits(), tasks, self._pictures.are_same)
        if "data" not in self.profiles:
            report.findings = [one for one in report.findings if BY_ID[one.rule].profile == "robot"]
            return report.findings
        if whole:
            if steps is not None:
                self._check_totals(report, steps, metadata)
            if self._rows.numbers and self._info.get("total_episodes") in (None, len(set(report.numbers))):
                self._check_statistics(report, steps, metadata)
        self._check_names(report)
        self._check_tasks(report, texts, metadata)
        self._check_files(report, metadata)
        return report.findings

    def findings_of_metadata(self, metadata: SourceMetadata) -> list[Finding]:
        """Return the findings about the metadata of a source alone, without reading any row."""
        report = Report(self._path, self._is_raw, rate=self._rate, numbers=sorted(metadata.lengths))
        lengths = [length or 0 for length in metadata.lengths.values()]
        self._check_totals(report, None if 0 in lengths else sum(lengths), metadata)
        self._check_statistics(report, None, metadata)
        self._check_names(report)
        self._check_tasks(report, metadata.texts, metadata)
        self._check_files(report, metadata)
        return report.findings

    def _splits(self) -> dict[str, range]:
        found: dict[str, range] = {}
        for name, place in _mapping(self._info.get("splits")).items():
            match = _RANGE.fullmatch(str(place))
            if match:
                found[name] = range(int(match[1]), int(match[2]))
        return found

    def _check_totals(self, report: Report, steps: int | None, metadata: SourceMetadata | None) -> None:
        episodes = len(set(report.numbers))  # a very long one has several parts here
        counts: dict[str, int | None] = {"total_episodes": episodes, "total_frames": steps}
        videos = [name for name, one in self._features.items() if _mapping(one).get("dtype") == "video"]
        counts["total_videos"] = episodes * len(videos)
        if metadata is not None:
            counts["total_tasks"] = len(metadata.tasks)
        elif (tasks := self._documents.get("meta/tasks.jsonl")) is not None:
            counts["total_tasks"] = len([line for line in tasks.splitlines() if line.strip()])
        for name, there in counts.items():
            stated = self._info.get(name)
            if isinstance(stated, int) and there is not None and stated != there:
                report.add("MET002", f"{_INFO} states {name} {stated:,}, but there are {there:,}", figure=there,
                           threshold=stated)  # fmt: skip
        self._check_splits(report)
        if metadata is not None and self._rows.has("index"):
            self._check_index(report, metadata)
        for text, numbers in metadata.contradictions if metadata is not None else ():
            report.add("MET002", text, episodes=numbers, figure=len(numbers))

    def _check_splits(self, report: Report) -> None:
        # A damaged file may state any bounds, so ranges of episodes are compared without listing them.
        splits = sorted((one for one in self._splits().values() if one), key=lambda one: one.start)
        known = set(report.numbers)
        counts = {number: sum(number in one for one in splits) for number in sorted(known)}
        lost = [number for number, count in counts.items() if not count]
        if splits and lost:
            report.add("MET002", f"{of_episodes(lost)}: in no split of {_INFO}", episodes=lost,
                       figure=len(lost))  # fmt: skip
        stop, parts = 0, list[range]()  # of the splits, without what an earlier split has
        for one in splits:
            parts.append(range(max(one.start, stop), max(one.stop, stop)))
            stop = max(one.stop, stop)
        missing = sum(one.stop - one.start for one in parts) - sum(map(bool, counts.values()))
        if missing:
            first = [*islice((number for one in parts for number in one if number not in known), 6)]
            report.add("MET002", f"{of_episodes(first, missing)}: in a split of {_INFO}, but not in the data",
                       figure=missing)  # fmt: skip
        if twice := [number for number, count in counts.items() if count > 1]:
            report.add("MET002", f"{of_episodes(twice)}: in more than one split of {_INFO}", episodes=twice,
                       figure=len(twice))  # fmt: skip

    def _check_index(self, report: Report, metadata: SourceMetadata) -> None:
        """Check that `index` counts the rows of the dataset, given the lengths of the episodes before each row."""
        lengths = [metadata.lengths[number] for number in sorted(metadata.lengths)]
        if None in lengths:
            return
        begins = dict(zip(sorted(metadata.lengths), np.cumsum([0, *lengths[:-1]]).tolist(), strict=True))
        seen, wrong = set[int](), list[int]()
        found = zip(report.numbers, self._rows.array("index").tolist(), self._rows.array("index_jumps"), strict=True)
        for number, index, jumps in found:
            if jumps or (number not in seen and begins.get(number, index) != index):
                wrong.append(number)
            seen.add(number)
        if wrong:
            text = f"{of_episodes(wrong)}: index is not the number of the row in the dataset"
            report.add("MET002", text, episodes=wrong, figure=len(wrong))

    def _check_statistics(self, report: Report, steps: int | None, metadata: SourceMetadata | None) -> None:
        stored = _document(self._documents.get(_STATS, b"{}"))
        moments = self._rows.moments() if self._rows.numbers else {}
        of_episodes_alone = self._info.get("codebase_version") == "v2.1" and not stored
        if not stored and self._features and _STATS not in self._documents and self._is_raw and not of_episodes_alone:
            report.add("MET001", f"there is no {_STATS}")
        required = self._features_with_statistics(
            stored, {*self._rows.states.components, *self._rows.actions.components}
        )
        for name in self._features if stored else ():
            key = self._key_of[name]
            feature = _mapping(self._features[name])
            if feature.get("dtype") in ("string", "bool", "language"):
                continue
            if name not in stored:
                if name in required:
                    report.add("MET001", f"{_STATS} has no statistics of {name}")
                continue
            found = _mapping(stored[name])
            problem = _odd_statistics(found)
            if not problem and key in moments:
                problem = self._contradiction(found, moments[key], steps)
            if problem:
                report.add("MET001", f"{_STATS}: {name}: {problem[0]}", figure=problem[1], threshold=problem[2])
        self._check_brightness(report, stored)
        if metadata is not None and moments:
            self._check_episode_statistics(report, metadata.statistics, required=of_episodes_alone)

    def _features_with_statistics(self, stored: Mapping[str, Any], seen: Collection[str]) -> set[str]:
        """Return the features that need statistics: observations and actions, and all cameras if one has statistics.

        If no camera has statistics, training code normalises pictures by constants.
        """
        cameras = {name for name, one in self._features.items() if _mapping(one).get("dtype") in ("image", "video")}
        vectors = {
            name for name, one in self._features.items()
            if "float" in str(_mapping(one).get("dtype")) and name.partition(".")[0] in ("observation", "action")
        }  # fmt: skip
        if seen:
            vectors &= {name for name, key in self._key_of.items() if key in seen}
        return vectors | (cameras if cameras & stored.keys() else set())

    def _check_brightness(self, report: Report, stored: Mapping[str, Any]) -> None:
        """Compare the stored means of pictures with the means of decoded frames, roughly: both are of samples."""
        for name, key in self._key_of.items():
            light = self._pictures.brightness.get(key)
            mean = _vector(_mapping(stored.get(name)).get("mean"), 3)
            if light is not None and mean is not None and abs(float(mean.mean()) - light / 255) > self._limits.picture:
                text = f"{_STATS}: {name}: mean is {mean.mean():.3f}, but {light / 255:.3f} in the pictures"
                report.add("MET001", text, figure=float(mean.mean()) - light / 255, threshold=self._limits.picture)

    def _contradiction(
        self, stored: Mapping[str, Any], found: Mapping[str, Any], steps: int | None
    ) -> tuple[str, float, float] | None:
        """Compare the stored statistics of a feature with its rows; return a sentence, the error and its threshold.

        A conversion may leave out the last step of each episode, so the statistics may cover more steps than the
        rows: the errors that the missing share of steps can explain are allowed.
        """
        limits, rows = self._limits, int(found["rows"])
        total = steps or self._info.get("total_frames")
        lost = min(max(0, total - rows), rows) / rows if isinstance(total, int) else 0.0
        width, span = np.maximum(found["std"], 1e-9), np.maximum(found["max"] - found["min"], 1e-9)
        unit = np.maximum(width, 1e-3 * np.abs(found["mean"]) + 1e-9)
        for name, room in (("mean", lost * span / unit), ("std", lost * (span / unit) ** 2)):
            value = _vector(stored.get(name), len(width))
            if value is None:
                continue
            apart = np.abs(value - found[name]) / unit
            at = int((apart - room).argmax())
            if apart[at] > limits.mean + room[at]:
                size = f"{apart[at]:.1f} standard deviations" if name == "mean" else f"{apart[at]:.0%}"
                return (
                    f"{name}[{at}] is {value[at]:.4g}, but {found[name][at]:.4g} in the data: it is off by {size}",
                    float(apart[at]), limits.mean,
                )  # fmt: skip
        for name, value in stored.items():
            quantile = _vector(value, len(width)) if name in found["quantiles"] and rows >= _LEAST_ROWS else None
            if quantile is None:
                continue
            low, high = found["quantiles"][name]
            beyond = np.maximum(low - quantile, quantile - high) / span
            if beyond[at := int(beyond.argmax())] > limits.quantile + lost:
                text = f"{name}[{at}] is {quantile[at]:.4g}, but about {low[at] / 2 + high[at] / 2:.4g} in the data"
                return text, float(beyond[at]), limits.quantile
        for name, sign in (("min", -1), ("max", 1)):
            value = _vector(stored.get(name), len(width))
            if value is None:
                continue
            beyond = sign * (found[name] - value) / span
            if beyond[at := int(beyond.argmax())] > limits.extreme:
                text = f"{name}[{at}] is {value[at]:.4g}, but the data reach {found[name][at]:.4g}"
                return text, float(beyond[at]), limits.extreme
            within = limits.extreme + (0.5 if lost else 0.0)
            if -beyond[at := int((-beyond).argmax())] > within:
                text = f"{name}[{at}] is {value[at]:.4g}, but the data only reach {found[name][at]:.4g}"
                return text, float(-beyond[at]), within
        count = _vector(stored.get("count"), 1)
        if count is not None and steps is not None and int(count[0]) != steps:
            return f"count is {int(count[0]):,}, but there are {counted(steps, 'step')}", float(count[0]), float(steps)
        return None

    def _check_episode_statistics(
        self, report: Report, statistics: Iterable[tuple[int, Mapping[str, Any]]], *, required: bool
    ) -> None:
        """Compare the statistics of single episodes with their rows; `required` if the dataset has no other ones."""
        wrong: dict[tuple[str, str], list[int]] = defaultdict(list)
        lacking: dict[str, list[int]] = defaultdict(list)
        numbers, each = self._rows.of_each()
        rows = {number: at for at, number in enumerate(numbers)}
        name_of = {key: name for name, key in self._key_of.items()}
        measures = {
            name_of[key]: {name: found[where] for name, where in _MEASURE_OF.items()}
            for key, found in each.items() if key in name_of
        }  # fmt: skip
        span = {name: np.median(one["max"] - one["min"], axis=0) for name, one in measures.items()}
        none = True
        for number, stored in statistics:
            at = rows.get(number, -1)
            for name, own in measures.items() if at >= 0 else ():
                found = _mapping(stored.get(name))
                if not found:
                    lacking[name].append(number)
                    continue
                none = False
                for measure, array in own.items():
                    value, here = _vector(found.get(measure), array.shape[1]), array[at].astype(np.float64)
                    here = np.sqrt(here) if measure == "std" else here
                    if value is None:
                        continue
                    if (np.abs(value - here) > self._limits.episode * span[name] + 1e-3 * np.abs(here) + 1e-6).any():
                        wrong[name, measure].append(number)
                        break
        for (name, measure), numbers in wrong.items():
            text = f"{of_episodes(numbers)}: the stored {measure} of {name} differs from that of the data"
            report.add("MET001", text, episodes=numbers, figure=len(numbers))
        if required and none:
            report.add("MET001", f"there is neither {_STATS} nor {_EPISODE_STATS}")
        elif required or wrong:
            for name, numbers in lacking.items():
                text = f"{of_episodes(numbers)}: no statistics of {name} are stored"
                report.add("MET001", text, episodes=numbers, figure=len(numbers))

    def _check_names(self, report: Report) -> None:
        for name, feature in self._features.items():
            shape, names = _mapping(feature).get("shape"), _names(feature)
            if names and isinstance(shape, list) and len(shape) == 1 and len(names) != shape[0]:
                report.add("MET005", f"{_INFO} has {counted(len(names), 'name')} for {shape[0]} components of {name}",
                           figure=len(names), threshold=shape[0])  # fmt: skip
            elif len(set(names)) < len(names):
                report.add("MET005", f"{_INFO} gives several components of {name} the same name",
                           figure=len(names) - len(set(names)))  # fmt: skip

        lists = [(name, _names(self._features.get(name))) for name in ("observation.state", "action")]
        (one, first), (other, second) = lists
        if first != second and sorted(first) == sorted(second) and first:
            at = next(at for at, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
            text = f"{_INFO} lists the same names for the components of {one} and of {other}, but in different orders"
            report.add("MET005", text, figure=at)

    def _check_tasks(
        self, report: Report, texts: Mapping[int, Mapping[str, str]], metadata: SourceMetadata | None
    ) -> None:
        if metadata is not None:
            self._check_task_numbers(report, texts, metadata)
        of_text: dict[str, list[int]] = defaultdict(list)
        for number, text in texts.items():
            if TASK in text:
                of_text[text[TASK]].append(number)
        if not of_text:
            return
        empty = [number for text, numbers in of_text.items() if not text.strip() for number in numbers]
        for task, numbers in of_text.items():
            if task.strip() and _is_no_task(task):
                named = json.dumps(task, ensure_ascii=False)
                report.add("MET003", f"{of_episodes(numbers)}: the task {named} is a placeholder or garbled text",
                           episodes=numbers, figure=len(numbers))  # fmt: skip
        lacking = sorted(set(texts) - {number for numbers in of_text.values() for number in numbers}
                         - {number for number, text in texts.items() if TASKS in text})  # fmt: skip
        if empty:
            report.add("MET003", f"{of_episodes(empty)}: the task description is empty", episodes=empty,
                       figure=len(empty))  # fmt: skip
        if lacking:
            report.add("MET003", f"{of_episodes(lacking)}: no task description", episodes=lacking,
                       figure=len(lacking))  # fmt: skip
        for same in _alike(list(of_text)):
            episodes = [number for text in same[1:] for number in of_text[text]]
            named = " and ".join(json.dumps(one, ensure_ascii=False)[:80] for one in same[:3])
            report.add("MET003", f"task descriptions that are nearly the same: {named}", episodes=episodes,
                       figure=len(same), threshold=1)  # fmt: skip

    def _check_task_numbers(
        self, report: Report, texts: Mapping[int, Mapping[str, str]], metadata: SourceMetadata
    ) -> None:
        """Compare the tasks of the rows with those in the metadata, and check that tasks are numbered from 0."""
        other = [
            number for number, text in texts.items()
            if (stated := metadata.texts.get(number)) and {*tasks_of(stated)} != {*tasks_of(text)}
        ]  # fmt: skip
        if other:
            text = f"{of_episodes(other)}: the task of the rows differs from the task in the metadata of the episode"
            report.add("MET003", text, episodes=other, figure=len(other))
        numbers = sorted(metadata.tasks)
        if numbers and numbers != list(range(len(numbers))):
            text = f"tasks are not numbered 0 to {len(numbers) - 1}: loaders that use the numbers as indices fail"
            report.add("MET003", text, figure=numbers[-1], threshold=len(numbers) - 1)

    def _check_files(self, report: Report, metadata: SourceMetadata | None) -> None:
        if metadata is None:
            return
        known = set(map(os.path.abspath, metadata.files))
        root = os.path.abspath(self._path)
        there = (f"{folder}/{name}" for folder, _, names in os.walk(root) for name in names)
        orphans = sorted(path for path in there if path.endswith(_FILES) and path not in known)
        if orphans:
            more = f" and {len(orphans) - 1:,} more" if len(orphans) > 1 else ""
            report.add(
                "MET004", f"{os.path.relpath(orphans[0], root)}{more}: no episode refers to it", figure=len(orphans)
            )


def _alike(tasks: list[str]) -> list[list[str]]:
    """Group tasks that are equal but for case, punctuation, articles and typos."""
    plain: dict[str, list[str]] = defaultdict(list)
    for task in tasks[:_MOST_TASKS]:
        plain[" ".join(re.findall(r"\w+", task.casefold()))].append(task)
    groups = [same for name, same in plain.items() if name]
    names = [name for name in plain if name]
    if len(names) > _MOST_PAIRS:
        return [same for same in groups if len(same) > 1]
    for at, name in enumerate(names):
        for back in range(at):
            if groups[back] and _is_typo(name, names[back]):
                groups[back] = groups[back] + groups[at]
                groups[at] = []
                break
    return [same for same in groups if len(same) > 1]


def _is_typo(one: str, other: str) -> bool:
    """Whether two texts differ by a typo in a single word (a missing letter, or two swapped ones), or in articles."""
    first, second = one.split(), other.split()
    if len(first) != len(second):  # a space or an article
        return one.replace(" ", "") == other.replace(" ", "") or [word for word in first if word not in _ARTICLES] == [
            word for word in second if word not in _ARTICLES
        ]
    differing = [(a, b) for a, b in zip(first, second, strict=True) if a != b]
    if len(differing) != 1:
        return False
    ((a, b),) = differing
    if any(letter.isdigit() for letter in a + b):
        return False
    if min(len(a), len(b)) < 4 and not {a, b} & _ARTICLES:
        return False
    shorter, longer = sorted((a, b), key=len)
    if len(longer) == len(shorter) + 1:
        return not longer.endswith("s") and any(longer[:at] + longer[at + 1 :] == shorter for at in range(len(longer)))
    odd = [at for at in range(len(a)) if a[at] != b[at]] if len(a) == len(b) else []
    return len(odd) == 2 and odd[1] == odd[0] + 1 and a[odd[0]] == b[odd[1]] and a[odd[1]] == b[odd[0]]


def _is_no_task(text: str) -> bool:
    """Whether a text is a placeholder, or has characters that could not be decoded."""
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
    """Return the names of the components of a vector, which LeRobot's metadata hold as a list, or in a mapping."""
    found = _mapping(feature).get("names")
    if isinstance(found, dict) and len(found) == 1:
        found = next(iter(found.values()))
    return [str(one) for one in found] if isinstance(found, list) and all(isinstance(one, str) for one in found) else []


def _vector(value: Any, width: int) -> Array | None:
    """Return a vector of `width` finite numbers; None if the value is anything else."""
    try:
        found = np.asarray(value, np.float64).reshape(-1)
    except (TypeError, ValueError):
        return None
    return found if len(found) == width and np.isfinite(found).all() else None


def _odd_statistics(stored: Mapping[str, Any]) -> tuple[str, float, float] | None:
    """Return a sentence, a figure and a threshold if statistics contradict each other, whatever the data."""
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
