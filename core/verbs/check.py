"""`check`: test a dataset or checkpoint against the rules of TED and its manifest, or a raw dataset of another library.

The rules about rows are in `core.ted.rules`. This module runs the rules over each kind of input, and has `VideoRule`,
which decodes kept videos.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, Unpack, get_args

import numpy as np

from ..datasets.mixtures import open_mixture
from ..declarations import LEAVES, ReaderOptions, from_leaf
from ..encodings.compact import BUFFER, STORAGE
from ..encodings.video import VideoFile, VideoIndex, require_pyav
from ..errors import (
    CorruptDataError,
    FormatError,
    RbtoolError,
    SchemaError,
    UsageError,
    require_choice,
    suggests_keywords,
)
from ..format.checks import FOLDER_RULES, UNVERIFIED, EpisodeTableRule, SourcePass, readable_rows, with_hint
from ..format.contracts import Array, StepReader
from ..format.converter import Reader
from ..format.documents import parse_json
from ..format.episodes import EpisodeTable
from ..format.files import read_regular
from ..format.locate import find_dataset, open_source
from ..format.manifest import VIDEOS
from ..format.mixture import is_mixture, read_mixture
from ..format.open_files import ListedFiles
from ..format.returns import return_field_of
from ..format.videos import VideoContents, index_name, reference_keys, video_name
from ..open_steps import open_steps
from ..options import PathLike
from ..progress import Progress, Silent, counted
from ..results import (
    DatasetsResult,
    Result,
    given_options,
    refuse_map_alone,
    refuse_raw_options,
    seconds_since,
    to_document,
)
from ..saved_steps import has_steps, is_of_buffer, is_unknown, open_saved
from ..ted.episodes import BoundaryCounts, EndReason
from ..ted.rules import DATA_RULES, RULE_BY_ID, Finding, Places, Rows, Rule, RuleEntry, data_rules, known_rules
from ..ted.schema import Field, ted_fields
from .saved_buffers import BUFFER_RULES, NO_DIGESTS, buffer_findings

_IN_ANY = (
    "there are no digests of single episodes: the damage in a file may be in any of them, also in episodes that no "
    "finding names"
)
_NO_DATA = "rows and images were not read, and the rules about them did not run (--no-data)"
_TAKEN = f"this was made from a damaged dataset with --skip-bad, and its digests do not reveal that: {UNVERIFIED}"
Profile: TypeAlias = Literal["form", "data", "robot", "all"]
"""Which rules run besides those about form: none (`form`), those about data, those about robots, or all."""
_DIGESTS, _OPENS = RULE_BY_ID["TED013"].named, RULE_BY_ID["TED014"].named


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult(Result):
    """The findings of the rules. `skipped` names the rules that cannot run on damaged files.

    `unfinished` counts the episodes without an end, which is valid for the last ones in the checkpoint of a buffer.
    `notes` state what could not be checked, and why. `boundary` counts the episodes of a raw dataset by their end.
    """

    kind: ClassVar[str] = "check"
    path: Path
    steps: int
    episodes: int
    findings: tuple[Finding, ...]
    rules: int
    skipped: tuple[str, ...]
    errors: int
    warnings: int
    unfinished: int = 0
    notes: tuple[str, ...] = ()
    boundary: Mapping[str, int] = field(default_factory=dict)
    seconds: float

    def failed(self, fail_on: Literal["error", "warn"] = "error") -> bool:
        """Return whether there are errors or, with `warn`, any findings."""
        return bool(self.errors or (fail_on == "warn" and self.warnings))


@dataclass(frozen=True, slots=True)
class _Asked:
    """The arguments of a check: which rules about behaviour run, with which thresholds, and what is read.

    With `full`, all frames are decoded; without `data`, only metadata is read.
    """

    full: bool
    data: bool
    profile: Profile | None
    thresholds: Any
    root: PathLike | None
    progress: Progress

    def doctor(self, fields: Sequence[Field], path: Path, **known: Any) -> Any:
        """Make the rules about behaviour; None if they are not wanted or not installed."""
        if self.profile == "form" or "doctor" not in LEAVES:
            return None
        chosen = {None: None, "all": ("data", "robot")}.get(self.profile, (self.profile,))
        return from_leaf("doctor")(fields, path, limits=self.thresholds, profiles=chosen, **known)


@suggests_keywords(*ReaderOptions.__annotations__)
def check(
    dataset: PathLike,
    *,
    format: str | None = None,
    profile: Profile | None = None,
    full: bool = False,
    data: bool = True,
    thresholds: PathLike | Mapping[str, float] | None = None,
    baseline: PathLike | None = None,
    root: PathLike | None = None,
    progress: Progress | None = None,
    **options: Unpack[ReaderOptions],
) -> CheckResult:
    """Run every rule on a dataset, a checkpoint, or a TED folder that another tool wrote.

    Rules about form are errors. Rules about behaviour are warnings: they find data that has the right form and still
    spoils training, such as stuck joints, frozen cameras, copies of episodes, or statistics of other data. They compare
    the episodes with each other, so that the thresholds fit any robot.

    All files are read once for the digests and once for the rows, in bounded memory. The parts of a saved buffer
    (rbtool's or TorchRL's) are also compared with each other; its elements need not be steps, and its last episodes may
    be unfinished. For a dataset of another library, the rules about rows run on the rows that a conversion would write.
    For a mixture, each dataset is checked, and that none has changed since it was mixed.

    Args:
        dataset: a path or `source:id`.
        format: the name of the format, instead of detecting it, as in `convert`.
        profile: `form` for only the rules about form; `data` for those about episodes, rewards and metadata as well,
            `robot` for those about motion, time and images, `all` for both. Default: `data`, and `robot` if there are
            cameras or a rate.
        full: decode all frames of kept videos that rows refer to; by default a sample, evenly spread. A note states its
            size.
        data: read rows and images. False compares only the metadata with itself and with the files: their existence,
            sizes and numbers of rows. For datasets of rbtool and of LeRobot.
        thresholds: thresholds of the rules about behaviour by name, or a TOML file of them; the others have their
            defaults.
        baseline: a file with the output of an earlier `check --json`, whose findings are not reported again. If it is
            about several datasets, those of this one.
        root: where stored datasets are.
        progress: shows how far it is; default: nothing is shown.
        options: for some formats only, as in `convert`.

    Returns:
        The findings. A file that is listed in a valid manifest and cannot be read by this version is one of them.

    Raises:
        DatasetNotFoundError, FormatError: there is no data to check.
        UsageError: arguments make no sense.
    """
    if profile is not None:
        require_choice("profile", profile, get_args(Profile))
    if not data and (full or profile == "robot"):
        raise UsageError(
            f"--no-data reads no rows and no images, which {'--full' if full else '--profile robot'} needs",
            hint="leave one of them out",
        )
    named = thresholds if thresholds is None or isinstance(thresholds, Mapping) else Path(thresholds)
    limits = None if named is None else from_leaf("thresholds").of(named)
    started, path = time.perf_counter(), find_dataset(dataset, root)
    accepted = frozenset() if baseline is None else _accepted(Path(baseline), os.fspath(dataset), path)
    asked = _Asked(full, data, profile, limits, root, progress or Silent())
    result = _checked(path, format, given_options(options), asked, started)
    flags = ["--full"] if full else []
    flags += [] if format is None else ["--from", format]
    flags += ["--thresholds", str(named)] if isinstance(named, Path) else []
    if flags:  # so that `clean` finds the same
        result = replace(result, findings=tuple(_with_flags(one, shlex.join(flags)) for one in result.findings))
    if not accepted:
        return result
    entries = to_document(result)["findings"]
    new = tuple(one for one, entry in zip(result.findings, entries, strict=True) if accepted.isdisjoint(_marks(entry)))
    if len(new) == len(result.findings):
        return result
    failing = sum(one.severity == "error" for one in new)
    told = (*result.notes, f"{counted(len(result.findings) - len(new), 'finding')} of {baseline} left out")
    return replace(result, findings=new, errors=failing, warnings=len(new) - failing, notes=told)


def _with_flags(one: Finding, flags: str) -> Finding:
    return replace(one, mend=f"{one.mend} {flags}") if one.mend.startswith("rbtool clean ") else one


def _marks(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what identifies a finding in JSON: its message and, if it has places, these with the measured value.

    Places and value stay the same if another version of rbtool words the message differently.
    """
    yield entry["rule"], entry["message"]
    places = [entry.get(name) for name in ("steps", "episodes", "components")]
    if any(places):
        yield entry["rule"], json.dumps([*places, entry.get("figure")])


def _accepted(path: Path, dataset: str, place: Path) -> frozenset[tuple[str, str]]:
    """Return the marks of the findings in a file that `check --json` printed; UsageError for other files.

    If the file is about several datasets, only the findings about the one named `dataset` or at `place` count.
    """
    try:
        document = parse_json(read_regular(path), str(path))
        documents = [document]
        if document["kind"] == DatasetsResult.kind:
            several = document["datasets"].items()
            documents = [one for name, one in several if name == dataset or one.get("path") == str(place)]
            documents = [one for one in documents if "error" not in one]
        return frozenset(mark for each in documents for one in each["findings"] for mark in _marks(one))
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror}"
    except FormatError as error:
        why = str(error)
    except (KeyError, TypeError, AttributeError):
        why = f"{path} has no findings of rbtool check"
    raise UsageError(f"the baseline {why}", hint="rbtool check DATASET --json prints such a file")


def _checked(path: Path, format: str | None, given: Mapping[str, Any], asked: _Asked, started: float) -> CheckResult:
    """Run the rules that apply to the kind of data at `path`."""
    if is_mixture(path):
        refuse_raw_options(path, {"format": format, **given})
        return _check_mixture(path, asked, started)
    if (path / BUFFER).is_file():
        refuse_raw_options(path, {"format": format, **given})
        if not asked.data:
            raise UsageError(
                f"{path} is a saved buffer, whose metadata cannot be checked without its data",
                hint="leave out --no-data",
            )
        return _check_buffer(path, asked, started)
    of_storage = is_of_buffer(path)
    if given and format is None and not of_storage and is_unknown(path):
        refuse_map_alone(path, given)
    if not of_storage and not has_steps(path, raw=True, format=format):
        return _check_raw(path, format, given, asked, started)
    refuse_raw_options(path, {"format": format, **given})
    try:
        reader = (open_saved if of_storage else open_steps)(path, damaged=True)
    except FormatError as error:
        return _unopened(path, error, started)
    with reader:
        if not asked.data:
            return _without_data(reader, started)
        findings = [finding for rule in FOLDER_RULES for finding in rule.findings(reader)]
        suspect = any(finding.rule in {"TED012", "TED013"} for finding in findings)
        proven = reader.proven_episodes() if suspect else None
        damaged = any(finding.rule == "TED011" or finding.episodes for finding in findings)
        manifest = reader.manifest
        kept: Mapping[str, bytes] = {}
        with contextlib.suppress(FormatError):  # a rule reports it
            kept = reader.documents()
        doctor = asked.doctor(reader.fields, path, is_raw=False, documents=kept, renamed=manifest.renamed_keys)
        videos = VideoRule(reader.fields, _videos(reader), path / VIDEOS, asked.progress, doctor, full=asked.full)
        data_findings, episodes, skipped = _data_findings(reader, asked.progress, videos, doctor, damaged=damaged)
        if proven is not None:
            findings += _episodes_found(reader.episodes, ~proven, "do not match their digests", _DIGESTS)
        findings = _proposing([*data_findings, *findings], path, reader.manifest.episodes)
        result = _result(path, findings, reader.manifest.steps, episodes, skipped, started)
        ran = result.rules + (0 if doctor is None or skipped else doctor.count)
        notes = [] if reader.has_digests else [NO_DIGESTS]
        notes += [_IN_ANY] if suspect and proven is None else []
        notes += _without_final(reader)
        notes += [*videos.notes, *([] if doctor is None else doctor.notes)]
        notes += [_TAKEN] if UNVERIFIED in reader.manifest.notes else []
        return replace(result, rules=ran, unfinished=0 if skipped else _unfinished(reader), notes=tuple(notes))


_DAMAGE = frozenset({"TED011", "TED012", "TED013", "TED014", "TED017"})


def _proposing(findings: Sequence[Finding], path: Path, episodes: int) -> list[Finding]:
    """Add commands to findings: to leave out episodes with NaN or infinite values, and damaged episodes."""
    place = shlex.quote(str(path))
    damaged = [one for one in findings if one.rule in _DAMAGE and one.severity == "error"]
    named = {number for one in damaged for number in one.episodes}
    mends = {"TED007": "nan"} | (dict.fromkeys(_DAMAGE, "unreadable") if 0 < len(named) < episodes else {})
    found = []
    for one in findings:
        mend = ""
        if one.rule in mends and (one.episodes or one.rule in _DAMAGE) and "doctor" in LEAVES:
            mend = f"rbtool clean {place} DEST --drop {mends[one.rule]}"
        elif one in damaged and one.rule != "TED014":
            mend = f"make the dataset again, or keep its sound episodes: rbtool convert {place} DEST --skip-bad"
        found.append(replace(one, mend=mend) if mend and not one.mend else one)
    return found


def _check_mixture(path: Path, asked: _Asked, started: float) -> CheckResult:
    """Check that a mixture can be opened, and each of its datasets; their names precede their findings and notes."""
    mixture, findings, places = read_mixture(path), list[Finding](), dict[Path, str]()
    try:
        places = {one.path: one.member.name for one in open_mixture(path, lambda reader: None, asked.root).datasets}
    except (RbtoolError, OSError) as error:
        hint = error.hint if isinstance(error, RbtoolError) else ""
        findings = [Finding(*_OPENS, "error", f"{error}; {hint}" if hint else str(error))]
        for member in mixture.dataset:  # the datasets that exist; nested mixtures are left out
            with contextlib.suppress(RbtoolError, OSError):
                places[member.place(path, asked.root)] = member.name
        places = {place: name for place, name in places.items() if not is_mixture(place)}
    results = []
    for place, name in places.items():
        try:
            results.append((name, _checked(place, None, {}, asked, started)))
        except (RbtoolError, OSError) as error:
            findings.append(Finding(*_OPENS, "error", f"{name}: {error}"))
    findings += [replace(one, message=f"{name}: {one.message}") for name, result in results for one in result.findings]
    steps, episodes = (sum(getattr(result, count) for _, result in results) for count in ("steps", "episodes"))
    skipped = list(dict.fromkeys(rule for _, result in results for rule in result.skipped))
    notes = tuple(f"{name}: {note}" for name, result in results for note in result.notes)
    ran = max((result.rules for _, result in results), default=1)
    return replace(_result(path, findings, steps, episodes, skipped, started), rules=ran, notes=notes)


def _check_raw(
    path: Path, format: str | None, options: Mapping[str, Any], asked: _Asked, started: float
) -> CheckResult:
    with open_source(path, format=format, options=options) as reader:
        if not asked.data:
            return _check_metadata(reader, asked, started)
        report = check_source(reader, asked)
    findings = _proposing(report.findings, path, report.episodes + report.unread)
    result = _result(path, findings, report.steps, report.episodes, [], started)
    ran = len(DATA_RULES) + 2 + report.behaviour
    return replace(result, rules=ran, notes=report.notes, boundary=report.boundary.to_dict())


def _check_metadata(reader: Reader, asked: _Asked, started: float) -> CheckResult:
    """Check the metadata of a raw dataset and the existence and sizes of its files, without reading rows."""
    path = reader.path
    try:
        metadata = reader.stated_metadata(files=True)
        if metadata is None:
            raise UsageError(
                f"the format of {path} has no metadata that could be checked without its rows",
                hint="leave out --no-data",
            )
        findings = [
            Finding(*_OPENS, "error", text, episodes=Places(np.array(numbers, np.int64)))
            for text, numbers in metadata.problems
        ]
        doctor = replace(asked, profile="data").doctor((), path, is_raw=True, documents=metadata.documents, renamed={})
        findings += [] if doctor is None else doctor.findings_of_metadata(metadata)
    except FormatError as error:
        found = [Finding(*_READS, "error", with_hint(str(error), error.hint))]
        return replace(_result(path, found, 0, 0, [], started), rules=1, notes=(_NO_DATA,))
    steps = sum(length or 0 for length in metadata.lengths.values())
    result = _result(path, findings, steps, len(metadata.lengths), [], started)
    about = sum(one.about == "metadata" for one in known_rules())
    return replace(result, rules=1 + about, notes=(_NO_DATA,))


def _without_data(reader: StepReader, started: float) -> CheckResult:
    """Check the existence and sizes of a dataset's files and its episode table, without reading rows."""
    rules = [rule for rule in FOLDER_RULES if rule.rule_id != _DIGESTS[0]]
    findings = [finding for rule in rules for finding in rule.findings(reader)]
    steps = reader.manifest.steps
    try:
        findings += EpisodeTableRule(reader.fields, steps, reader.episodes, None).findings()
    except (CorruptDataError, FormatError) as error:
        findings.append(Finding(*RULE_BY_ID[EpisodeTableRule.rule_id].named, "error", str(error)))
    result = _result(reader.path, findings, steps, reader.manifest.episodes, [], started)
    return replace(result, rules=len(rules) + 1, notes=(_NO_DATA,))


def _check_buffer(path: Path, asked: _Asked, started: float) -> CheckResult:
    """Run the rules about saved buffers and, if the buffer holds steps of episodes, the rules about rows."""
    findings, verified = buffer_findings(path)
    notes = () if verified else (NO_DIGESTS,)
    names = [*(rule.rule_id for rule in DATA_RULES), EpisodeTableRule.rule_id]
    total = len(BUFFER_RULES) + len(names)
    try:
        reader = None if findings else open_saved(path)
    except CorruptDataError as error:
        findings, reader = [Finding(*_OPENS, "error", str(error))], None
    except (FormatError, SchemaError, UsageError):  # its contents are not steps: rules about rows do not apply
        reader, names = None, []
    if reader is None:
        return replace(_result(path, findings, 0, 0, names, started), rules=len(BUFFER_RULES), notes=notes)
    with reader:
        found, episodes, skipped = _data_findings(reader, asked.progress, None, None, damaged=False)
        result = _result(path, found, reader.manifest.steps, episodes, skipped, started)
        return replace(
            result, rules=total - len(skipped), notes=notes, unfinished=0 if skipped else _unfinished(reader)
        )


def _is_of_buffer(reader: StepReader) -> bool:
    return reader.manifest.request.source == STORAGE


def _unfinished(reader: StepReader) -> int:
    """Count the unfinished episodes of the checkpoint of a buffer; in a dataset every episode has an end."""
    if not _is_of_buffer(reader):
        return 0
    table = reader.episodes
    return int(((table.end_reason == EndReason.END_OF_FILE) & ~table.truncated).sum())


def _without_final(reader: StepReader) -> list[str]:
    """Return notes on the episodes whose last step has no next observation in the source."""
    counts = reader.manifest.boundary
    repeated, dropped = counts.final_repeated, counts.final_dropped
    notes = [f"the last next observation of {counted(repeated, 'episode')} is a copy: the source has none"]
    notes += [f"the last step of {counted(dropped, 'episode')} was left out: the source has no observation after it"]
    return [note for note, count in zip(notes, (repeated, dropped), strict=True) if count]


def _unopened(path: Path, error: FormatError, started: float) -> CheckResult:
    """Report why a dataset cannot be opened and, if its manifest is valid, which other files are damaged."""
    try:
        files = ListedFiles.at(path)
    except (FormatError, OSError):
        if not isinstance(error, CorruptDataError):
            raise error from None
        files = None
    found = [Finding(*_OPENS, "error", f"{error}; {error.hint}" if error.hint else str(error))]
    tried: list[str] = []
    if files is not None:
        with files:
            others = (finding for rule in FOLDER_RULES for finding in rule.findings_of_files(files))
            found += [finding for finding in others if finding.message != str(error)]
        tried = [rule.rule_id for rule in FOLDER_RULES if rule.listed]
    return _result(path, found, 0, 0, [rule for rule in _all_rules() if rule not in tried], started)


def _all_rules() -> list[str]:
    """Return the ids of all rules that run on an open dataset."""
    return [
        *(rule.rule_id for rule in DATA_RULES),
        VideoRule.rule_id,
        EpisodeTableRule.rule_id,
        *(rule.rule_id for rule in FOLDER_RULES),
    ]


def _result(
    path: Path, findings: list[Finding], steps: int, episodes: int, skipped: list[str], started: float
) -> CheckResult:
    errors = sum(finding.severity == "error" for finding in findings)
    return CheckResult(
        path=path,
        steps=steps,
        episodes=episodes,
        findings=tuple(sorted(findings, key=lambda finding: (finding.severity, finding.rule))),
        rules=len(_all_rules()) + 1 - len(skipped),
        skipped=tuple(skipped),
        errors=errors,
        warnings=len(findings) - errors,
        seconds=seconds_since(started),
    )


def _data_findings(
    reader: StepReader, progress: Progress, videos: VideoRule | None, doctor: Any, *, damaged: bool
) -> tuple[list[Finding], int, list[str]]:
    """Run the rules that read rows; return their findings, the number of episodes, and the ids of the rules not run.

    No rule runs if files are damaged or the episode table cannot be read.
    """
    names = [*(rule.rule_id for rule in DATA_RULES), *([VideoRule.rule_id] if videos else []), EpisodeTableRule.rule_id]
    if damaged:
        return [], reader.manifest.episodes, names
    steps = reader.manifest.steps
    try:
        rules = [
            *data_rules(reader.fields, steps, _spaces(reader), unfinished=_is_of_buffer(reader)),
            *([videos] if videos else []),
            EpisodeTableRule(
                reader.fields, steps, reader.episodes, return_field_of(reader.manifest), repeated=_as_converted(reader)
            ),
        ]
    except (CorruptDataError, FormatError) as error:
        return (
            [Finding(*RULE_BY_ID[EpisodeTableRule.rule_id].named, "error", str(error))],
            reader.manifest.episodes,
            names,
        )
    episodes = len(reader.episodes)
    if not episodes or reader.episodes.steps != steps:
        return list(_findings(rules[-1:] if steps else rules)), episodes, names[:-1] if steps else []
    seeing = rules if doctor is None else [*rules, doctor]
    progress.start("checking", steps, "steps")
    lost = np.zeros(episodes, bool)
    for start, stop in reader.chunks():
        for rows in readable_rows(reader, start, stop, lost):
            for rule in seeing:
                rule.see(rows)
        progress.advance(stop - start)
    progress.done()
    found = [*_findings(rules), *_episodes_found(reader.episodes, lost, "cannot be read", _OPENS)]
    if doctor is not None:
        texts = dict(zip(reader.episodes.episode.tolist(), reader.episode_text or [], strict=False))
        found += doctor.findings_about(texts, whole=_as_converted(reader) and not lost.any())
    return found, episodes, []


def _episodes_found(table: EpisodeTable, lost: Array, what: str, rule: tuple[str, str]) -> Iterator[Finding]:
    """Yield one finding about the marked episodes of a table, with all their steps, if there are any."""
    if lost.any():
        text = f"{int(lost.sum()):,} of {counted(len(lost), 'episode')} {what}"
        steps = np.column_stack((table.start[lost], (table.start + table.length)[lost]))
        yield Finding(*rule, "error", text, Places(steps), Places(table.episode[lost]))


def _videos(reader: StepReader) -> dict[str, Path]:
    """Return the paths of kept videos and their indexes, by name."""
    names = (file.path for file in reader.manifest.files if file.path.startswith(VIDEOS))
    return {name.removeprefix(VIDEOS): reader.path / name for name in names}


def _as_converted(reader: StepReader) -> bool:
    """Return whether the provenance has only steps that leave observations unchanged."""
    return {step.verb for step in reader.manifest.provenance} <= {"convert", "download"}


def _spaces(reader: StepReader) -> Mapping[str, Any]:
    """Return the recorded spaces; {} after `preprocess`, whose rows need not be in them."""
    made = any(step.verb == "preprocess" for step in reader.manifest.provenance)
    return {} if made else reader.manifest.spaces


def _findings(rules: Sequence[Rule]) -> Iterator[Finding]:
    for rule in rules:
        yield from rule.findings()


# Kept videos -----------------------------------------------------------------------------------------


_SAMPLED_FRAMES = 1_000
"""About how many frames of a dataset are decoded without `full`."""
_SAMPLED_PIXELS, _LEAST_PIXELS = 400_000_000, 20_000
"""About how many pixels are decoded if rules look at images, and the fixed cost of a frame in pixels."""
_AT_ONCE = 8
"""The decoded frames that a thread has in memory."""
_LEAST_GROUPS = 64
"""The groups of frames per thread from which a video is decoded by several threads."""


class VideoRule(Rule):
    """Checks that the frames of kept videos to which rows refer exist and can be decoded.

    `videos` are the files and their indexes by name; `folder` is where missing ones would be. Frames are decoded in
    groups, from one key frame to the next: with `full` all groups that rows refer to, else a sample, evenly spread.
    """

    rule_id = "TED017"

    def __init__(
        self,
        fields: Sequence[Field],
        videos: VideoContents,
        folder: Path,
        progress: Progress,
        doctor: Any,
        *,
        full: bool,
    ) -> None:
        super().__init__(fields, 0)
        self._keys = reference_keys(fields)
        self._videos = videos
        self._folder = folder
        self._progress = progress
        self._full = full
        self._doctor = doctor
        # For each video, the references of episodes to it: number of the episode, first and last frame.
        self._uses: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self.notes: list[str] = []

    def see(self, rows: Rows) -> None:
        """Collect the frames that the episodes in these rows refer to; the id 0 is padding."""
        for key in self._keys:
            references = rows.columns[key].reshape(len(rows), 2)
            edges = (np.diff(references[:, 0]) != 0) | (np.diff(rows.episode) != 0)
            for run in np.split(np.arange(len(rows)), np.flatnonzero(edges) + 1):
                video, frames = int(references[run[0], 0]), references[run, 1]
                if video:
                    self._uses[video].append((int(rows.episode[run[0]]), int(frames.min()), int(frames.max())))

    def findings(self) -> list[Finding]:
        """Compare the references with the indexes, and decode frames."""
        found: list[Finding] = []
        indexes: dict[int, VideoIndex] = {}
        parts = [np.empty((0, 3), np.int64)]
        for video, uses in self._uses.items():
            try:
                index = indexes[video] = self._index(video)
                if self._doctor is not None:
                    self._doctor.has_frames(video, len(index))
            except RbtoolError as error:
                found.append(self._finding(video, str(error)))
                continue
            odd = [use for use in uses if use[1] < 0 or use[2] >= len(index)]
            if odd:
                frame = odd[0][1] if odd[0][1] < 0 else odd[0][2]
                text = f"{self._place(video)} has {len(index):,} frames, rows refer to frame {frame:,}"
                found.append(self._finding(video, text, [(use[1], use[2] + 1) for use in odd]))
            else:
                parts.append(self._groups(video, index))
        groups = np.concatenate(parts)
        if not len(groups):
            return found
        wanted = _holding(groups, [] if self._doctor is None else self._doctor.wanted_frames())
        some = np.ones(len(groups), bool) if self._full else _marked(groups, self._budget(indexes)) | wanted
        chosen = groups[some]
        try:
            if len(chosen):
                require_pyav()
        except UsageError as error:
            self.notes.append(f"frames of kept videos were not decoded: {error}; {error.hint}")
            return found
        seen = np.zeros(len(chosen), bool)
        if self._doctor is not None:
            seen = _marked(chosen, self._doctor.most_pictures) | wanted[some]
        chosen = np.column_stack((chosen, seen))
        frames, total = _frames(chosen), _frames(groups)
        self._progress.start("decoding", frames, "frames")
        parts = np.split(chosen, np.flatnonzero(np.diff(chosen[:, 0])) + 1) if len(chosen) else []
        workers = min(8, os.cpu_count() or 1)
        pieces = [
            piece for part in parts for piece in np.array_split(part, min(workers, -(-len(part) // _LEAST_GROUPS)))
        ]
        with ThreadPoolExecutor(workers) as pool:
            jobs = [pool.submit(self._decoded, int(one[0, 0]), indexes[int(one[0, 0])], one[:, 1:]) for one in pieces]
            for piece, job in zip(pieces, jobs, strict=True):
                found += job.result()
                self._progress.advance(_frames(piece))
        self._progress.done()
        if frames < total:
            self.notes.append(
                f"{frames:,} of {counted(total, 'frame')} of kept videos were decoded; --full decodes all of them"
            )
        if self._doctor is not None and not seen.all():
            looked = _frames(chosen[chosen[:, 3] > 0])
            self.notes.append(f"the images of {looked:,} of the decoded frames were compared, evenly spread")
        return found

    def _budget(self, indexes: Mapping[int, VideoIndex]) -> int:
        """Return how many frames are decoded without `full`; if rules look at images, more for small images."""
        if self._doctor is None or not indexes:
            return _SAMPLED_FRAMES
        video, index = next(iter(indexes.items()))
        try:
            with VideoFile(self._place(video), index, threads=1) as opened:
                return max(_SAMPLED_FRAMES, _SAMPLED_PIXELS // (opened.shape[0] * opened.shape[1] + _LEAST_PIXELS))
        except RbtoolError:
            return _SAMPLED_FRAMES

    def _index(self, video: int) -> VideoIndex:
        """Read the index of a video; FormatError if the video or its index is missing or damaged."""
        path, index = self._place(video), self._videos.get(index_name(video))
        if not path.is_file() or index is None or (isinstance(index, Path) and not index.is_file()):
            missing = path if not path.is_file() else path.with_name(index_name(video))
            raise FormatError(f"{missing} is missing: rows refer to its frames")
        data = index if isinstance(index, bytes) else read_regular(index)
        return VideoIndex.from_bytes(data, str(path.with_name(index_name(video))))

    def _place(self, video: int) -> Path:
        """Return the path of a video, whether it exists or not."""
        place = self._videos.get(video_name(video))
        return place if isinstance(place, Path) else self._folder / video_name(video)

    def _groups(self, video: int, index: VideoIndex) -> Array:
        """Return the groups of frames that rows refer to, int64 `[n, 3]`: the video, the first frame, the one after.

        `used` is +1 where a reference begins and -1 after its end, so that its running sum counts the references to
        each frame. `before[k]` counts the used frames below k: a group is used if it differs at the two bounds.
        """
        bounds, used = np.append(index.keys, len(index)), np.zeros(len(index) + 1, np.int64)
        for _, first, last in self._uses[video]:
            used[first] += 1
            used[last + 1] -= 1
        before = np.append(0, np.cumsum(np.cumsum(used[:-1]) > 0))
        some = before[bounds[1:]] > before[bounds[:-1]]
        return np.column_stack((np.full(some.sum(), video), bounds[:-1][some], bounds[1:][some]))

    def _decoded(self, video: int, index: VideoIndex, groups: Array) -> list[Finding]:
        """Decode groups of frames of a video; return a finding about those that cannot be decoded."""
        bad, problem = list[tuple[int, int]](), ""
        eye = None if self._doctor is None else self._doctor.eye(video)
        try:
            with VideoFile(self._place(video), index, threads=1) as opened:
                for start, stop, is_seen in groups.tolist():
                    try:
                        for first in range(start, stop, _AT_ONCE):
                            images = opened.read(np.arange(first, min(first + _AT_ONCE, stop)))
                            if eye is not None and is_seen:
                                eye.take(first, images)
                    except RbtoolError as error:
                        bad.append((start, stop))
                        problem = problem or str(error)
        except UsageError as error:  # no decoder of this codec
            self.notes.append(f"frames were not decoded: {error}; {error.hint}")
            return []
        except RbtoolError as error:
            return [self._finding(video, str(error))]
        return [self._finding(video, problem, bad)] if bad else []

    def _finding(self, video: int, message: str, groups: Sequence[tuple[int, int]] | None = None) -> Finding:
        """Return a finding about a video, with the episodes that refer to frames in `groups`, or to any frame."""
        episodes = {
            episode
            for episode, first, last in self._uses[video]
            if groups is None or any(first < stop and last >= start for start, stop in groups)
        }
        return replace(self.report("error", message), episodes=Places(np.array(sorted(episodes), np.int64)))


def _frames(groups: Array) -> int:
    return int((groups[:, 2] - groups[:, 1]).sum())


def _holding(groups: Array, frames: Sequence[tuple[int, int]]) -> Array:
    """Mark the groups that contain one of `frames`, which are pairs of a video and a frame, bool `[n]`."""
    found, by_video = np.zeros(len(groups), bool), defaultdict[int, list[int]](list)
    for video, frame in frames:
        by_video[video].append(frame)
    for video, wanted in by_video.items():
        at = np.flatnonzero(groups[:, 0] == video)
        place = np.searchsorted(groups[at, 1], wanted, side="right") - 1
        found[at[place[place >= 0]]] = True
    return found


def _marked(groups: Array, most: int) -> Array:
    """Mark evenly spread groups that have about `most` frames together, bool `[n]`."""
    total = _frames(groups)
    if total <= most:
        return np.ones(len(groups), bool)
    found = np.zeros(len(groups), bool)
    found[np.linspace(0, len(groups) - 1, max(2, len(groups) * most // total)).round().astype(np.int64)] = True
    return found


_READS = RULE_BY_ID["TED014"].named


@dataclass(frozen=True, slots=True)
class SourceReport:
    """The findings about a raw dataset, the steps and episodes that a conversion would have, and how those end.

    `behaviour` counts the rules about behaviour that ran, `unread` the episodes that cannot be read.
    """

    findings: tuple[Finding, ...]
    steps: int
    episodes: int
    boundary: BoundaryCounts
    notes: tuple[str, ...]
    behaviour: int = 0
    unread: int = 0


def check_source(reader: Reader, asked: _Asked) -> SourceReport:
    """Run the rules on the rows of all readable episodes of a raw dataset; a finding names each other episode.

    Memory is bounded by a piece of an episode. Errors of `Reader.facts` other than FormatError are raised.
    """
    try:
        stated = reader.stated()
        fields, contents = ted_fields(stated.fields), reader.videos_of(stated.episode_numbers)
        doctor = asked.doctor(fields, reader.path, is_raw=True, documents=stated.documents, renamed=stated.renamed_keys)
        videos = VideoRule(fields, contents, reader.folder, asked.progress, doctor, full=asked.full)
        run = SourcePass(reader, None, asked.progress, videos, *([] if doctor is None else [doctor]))
    except FormatError as error:
        return SourceReport((Finding(*_READS, "error", with_hint(str(error), error.hint)),), 0, 0, BoundaryCounts(), ())
    findings = [finding for rule in run.rules if rule is not doctor for finding in rule.findings()]
    findings += [
        Finding(*_READS, "error", f"episode {one}: {with_hint(*error)}", episodes=(one,))
        for one, error in run.unread.items()
    ]
    table, notes = run.table, run.facts.notes
    try:
        notes = reader.facts().notes
    except FormatError as error:  # about the source as a whole, or an episode that a finding names already
        findings += [] if run.unread else [Finding(*_READS, "error", with_hint(str(error), error.hint))]
    if doctor is not None:
        texts = dict(zip(table.episode.tolist(), run.text, strict=True))
        findings += doctor.findings_about(
            texts, whole=not run.unread, steps=stated.steps, metadata=reader.stated_metadata()
        )
        notes = (*notes, *doctor.notes)
    ran = 0 if doctor is None else doctor.count
    notes = (*notes, *videos.notes)
    return SourceReport(tuple(findings), table.steps, len(table), table.counts(), notes, ran, len(run.unread))


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesResult(Result):
    """The rules of `check`: id, name, subject, severities of the findings, and what the rule checks."""

    kind: ClassVar[str] = "rules"
    rules: tuple[RuleEntry, ...] = field(default_factory=known_rules)
