"""`clean`: write a new dataset with the changes that the findings of `check` propose.

`check` finds problems, and `convert` and `preprocess` write data. This module decides what to change for each finding,
and publishes the result of all steps at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from ..doctor.rows import KEPT_REST, least_length
from ..doctor.rules import BY_ID, DROPS, Thresholds
from ..engine.workspace import RESULT, require_same_run
from ..errors import CorruptDataError, OutOfSpaceError, RbtoolError, UsageError, did_you_mean
from ..format import fs
from ..format.contracts import StepReader
from ..format.converter import Reader
from ..format.documents import dump_json, load_json, parse_json, plain
from ..format.episodes import EpisodeTable
from ..format.files import LEAVES_OUT
from ..format.locate import find_dataset, open_source, require_apart
from ..format.manifest import SOURCE_DOCUMENTS, Manifest, Provenance, Request
from ..format.memmap.builder import provenance_step, write_documents
from ..format.staging import Outcome, Publication, Staging
from ..format.videos import fps_of
from ..open_steps import finished_manifest, open_steps
from ..options import takes
from ..preprocess.preprocess import preprocess
from ..progress import counted
from ..results import Published, given_options, published_entries, refuse_raw_options
from ..saved_steps import has_steps
from ..ted.episodes import runs_text
from ..ted.rules import RULE_BY_ID, Finding
from .check import CheckResult, check
from .convert import convert, digest_of_inputs
from .options import CleanOptions

FIXES: Mapping[str, tuple[str, ...]] = {
    "stats": ("MET001",), "totals": ("MET002",), "retime": ("TIM002", "TIM003", "TIM004", "TIM005"),
}  # fmt: skip
"""The rules whose findings each value of the option `fix` resolves."""
_IDLE, _SHORT, _ORPHANS, _GAPS, _RATE = "MOT006", "EPI004", "MET004", "TIM001", "TIM005"
_LIKE = ("EPI002", "EPI003")
"""Rules about episodes that are partly alike: their episodes are left out only on request."""
_PLAN = "clean.json"
"""The file in the folder of an unfinished run that identifies its work, for `resume`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change that resolves a finding: the rule, its message, and the episodes concerned.

    `what` is `drop` (the episodes are left out), `trim` (their ends are cut off) or `fix` (time stamps or metadata are
    corrected).
    """

    what: str
    rule: str
    name: str
    episodes: Sequence[int]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """A finding that is not resolved: `why` not, and in `mend` what may resolve it."""

    rule: str
    name: str
    severity: str
    episodes: Sequence[int]
    message: str
    why: str
    mend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanResult(Published):
    """The new dataset, its source, the `changes` that were made, and the findings that remain.

    `dropped` has the numbers of the episodes that were left out, by the id of the rule.
    """

    kind: ClassVar[str] = "clean"
    source: Path
    changes: tuple[Change, ...]
    remaining: tuple[Remaining, ...]
    dropped: Mapping[str, tuple[int, ...]]


@takes(CleanOptions)
def clean(asked: CleanOptions) -> CleanResult:
    """Write a new dataset with the changes that the findings of `check` propose.

    Without `drop`, `dedupe`, `min_length`, `trim_idle` and `fix`, all proposed changes are made, except leaving out
    episodes that are nearly equal to others or parts of them, or more than half of all episodes for one reason. With
    any of these, only the changes that they name are made. Findings that no change resolves, such as wrong names or
    rewards, are listed in `remaining`. A dataset of another library is converted first. The provenance of the result
    records the rule for which each episode was left out.

    Args:
        dataset: a path or `source:id`, of rbtool or of another library.
        dest: the folder to write.
        drop: ids of rules, or names for them, as a list or separated by commas: episodes with such findings are left
            out. `rbtool check --rules` lists the rules.
        dedupe: `exact` leaves out copies of episodes; `near` also leaves out nearly equal ones and parts of others.
        min_length: leave out episodes of fewer steps.
        trim_idle: cut off long idle starts and ends of episodes, except for 3 steps. The rewards and end flags of the
            steps that are cut off are moved to the remaining steps.
        fix: `stats` leaves out statistics that contradict the data (`export` computes new ones); `totals` corrects the
            totals; `retime` sets time stamps to the frame number divided by the stated rate.
        full, thresholds, baseline: as for `check`.
        num_workers: processes; 0: this one alone. Default: one per core, and one to read other libraries' datasets.
        resume: continue an interrupted run.
        root: where stored datasets are.
        force: replace what is at `dest`.
        dry_run: do everything but writing.
        format: the name of the format, instead of detecting it.
        progress: shows how far it is; default: nothing is shown.
        horizon, ends, filter_key, reward, map, episode_key, files, images, jpeg, trust_pickle, rlds_last: for some
            formats only, as in `convert`.

    Returns:
        What was written, what was changed, and what remains. An equal result is left as it is, and `already_there` is
        True.

    Raises:
        UsageError: arguments make no sense, no episode is left, or something else is at `dest`. `dest` is unchanged
            after any error.
        DatasetNotFoundError, FormatError, CorruptDataError: there is no dataset, or it cannot be read.
        OutOfSpaceError: the disk has no room for the result.

    Example:
        >>> import rbtool
        >>> found = rbtool.clean("reach", "reach-clean", drop=["duplicate", "short"], dry_run=True)  # doctest: +SKIP
        >>> found.dropped  # doctest: +SKIP
        {'EPI001': (17,)}
    """
    started, chosen = time.perf_counter(), _Chosen.of(asked)
    path, destination = find_dataset(asked.dataset, asked.root), fs.expanded(asked.dest).absolute()
    require_apart(path, destination)
    given = given_options(asked.of_reader())
    is_raw = not has_steps(path, raw=True, format=asked.format)
    if not is_raw:
        refuse_raw_options(path, asked.raw() | given)
    staging = Staging(destination, replace=asked.force)
    if _made_by_clean(destination) is None:
        staging.refuse_if_taken()  # before all is read
    limits = Thresholds.of(Path(asked.thresholds) if asked.thresholds is not None else {})
    limits = replace(limits, length=asked.min_length or limits.length)
    found = check(
        asked.dataset, root=asked.root, format=asked.format, full=asked.full, baseline=asked.baseline,
        progress=asked.progress, profile=chosen.profile,
        thresholds={name: limit for name, limit in asdict(limits).items() if limit}, **given,
    )  # fmt: skip
    opened = open_source(path, format=asked.format, options=given) if is_raw else open_steps(path, damaged=True)
    with opened as reader:
        return _Cleaning(asked, chosen, reader, path, destination, found, limits, given).run(started)


def _remaining(one: Finding, why: str) -> Remaining:
    return Remaining(
        rule=one.rule, name=one.name, severity=one.severity, episodes=one.episodes, message=one.message, why=why,
        mend=one.mend,
    )  # fmt: skip


@dataclass(frozen=True)
class _Chosen:
    """The chosen changes: the rules whose episodes are left out, whether idle ends are cut off, and what is fixed.

    `everything` is True if the user chose nothing, so that all proposed changes are made.
    """

    rules: frozenset[str]
    trim: bool
    fix: frozenset[str]
    everything: bool

    @classmethod
    def of(cls, asked: CleanOptions) -> _Chosen:
        """Read the options; UsageError for names that do not exist."""
        rules = {rule for name in _names(asked.drop) for rule in _rules_called(name)}
        if asked.dedupe not in (None, "exact", "near"):
            raise UsageError(f"dedupe is {asked.dedupe!r}, expected exact or near")
        if asked.dedupe is not None:
            rules |= {"EPI001"} if asked.dedupe == "exact" else {"EPI001", *_LIKE}
        if asked.min_length is not None:
            rules.add("EPI004")
        fix = frozenset(_names(asked.fix))
        for name in fix - FIXES.keys():
            raise UsageError(f"--fix has {name!r}{did_you_mean(name, FIXES)}", hint=f"it takes {', '.join(FIXES)}")
        if rules or asked.trim_idle or fix:
            return cls(frozenset(rules), asked.trim_idle, fix, everything=False)
        proposed = {entry.rule for entry in BY_ID.values() if entry.mend.startswith("leave out")} - set(_LIKE)
        return cls(
            frozenset(proposed.union(DROPS["unreadable"], DROPS["nan"])), True, frozenset(FIXES), everything=True
        )

    @property
    def profile(self) -> Literal["all"] | None:
        """The profile of the check: `all` if a chosen rule is about robots, else the default one."""
        asked_for = self.rules | self.fixed | ({_IDLE} if self.trim else set())
        robot = any(rule in BY_ID and BY_ID[rule].profile == "robot" for rule in asked_for)
        return "all" if robot and not self.everything else None

    @property
    def fixed(self) -> frozenset[str]:
        """The rules whose findings are resolved without leaving out episodes."""
        rules = {rule for name in self.fix for rule in FIXES[name]}
        return frozenset(rules - ({_RATE} if self.everything else set()))


def _names(given: str | Sequence[str] | None) -> list[str]:
    parts = [given] if isinstance(given, str) else given or ()
    return [name.strip() for part in parts for name in part.split(",") if name.strip()]


def _rules_called(name: str) -> tuple[str, ...]:
    if name in DROPS:
        return DROPS[name]
    known = {rule for rules in DROPS.values() for rule in rules}
    if name.upper() in known:
        return (name.upper(),)
    about = BY_ID.get(name.upper()) or RULE_BY_ID.get(name.upper())
    if about is not None:
        raise UsageError(
            f"--drop has {name}, {about.name}, which is not about single episodes", hint=f"it takes {', '.join(DROPS)}"
        )
    raise UsageError(f"--drop has {name!r}{did_you_mean(name, DROPS)}", hint=f"it takes {', '.join(DROPS)}")


def _made_by_clean(destination: Path) -> Manifest | None:
    """Return the manifest of what an earlier `clean` wrote there; None for anything else."""
    found = finished_manifest(destination)
    return found if found is not None and found.provenance and found.provenance[-1].verb == "clean" else None


@dataclass(frozen=True)
class _Cleaning:
    """One run of `clean`."""

    asked: CleanOptions
    chosen: _Chosen
    reader: Reader | StepReader
    path: Path
    destination: Path
    found: CheckResult
    limits: Thresholds
    given: Mapping[str, Any]

    @cached_property
    def _unread(self) -> set[int]:
        """The episodes that cannot be read."""
        damaged = [one for one in self.found.findings if one.rule in DROPS["unreadable"] and one.severity == "error"]
        found = {number for one in damaged for number in one.episodes}
        if damaged and not found:
            takes = f"rbtool convert {shlex.quote(str(self.path))} DEST --skip-bad"
            raise CorruptDataError(
                f"{self.path} is damaged: {damaged[0].message}", hint=f"{takes} keeps the sound episodes"
            )
        reader = self.reader
        there = len(reader.stated().episode_numbers if isinstance(reader, Reader) else reader.episodes)
        asked_for = self.chosen.rules.issuperset(one.rule for one in damaged)
        if found and (not asked_for or (self.chosen.everything and len(found) > 0.5 * there)):
            raise CorruptDataError(
                f"{len(found):,} of {counted(there, 'episode')} cannot be read, "
                f"first {damaged[0].message.removesuffix(LEAVES_OUT)}",
                hint="--drop unreadable leaves such episodes out",
            )
        return found

    @cached_property
    def _table(self) -> EpisodeTable:
        """The episodes that can be read."""
        if isinstance(self.reader, Reader):
            numbers = [one for one in self.reader.stated().episode_numbers if one not in self._unread]
            return self.reader.episode_table(numbers)
        return self.reader.episodes

    @cached_property
    def _numbers(self) -> list[int]:
        numbers: list[int] = self._table.episode.tolist()
        return numbers

    @cached_property
    def _concerned(self) -> dict[str, set[int]]:
        """For each rule, the episodes that its findings name."""
        found = defaultdict[str, set[int]](set)
        for one in self.found.findings:
            found[one.rule].update(one.episodes)
        return found

    def _share(self, rule: str) -> float:
        """Return the share of the episodes that findings of a rule name."""
        return len(self._concerned[rule].intersection(self._numbers)) / len(self._numbers)

    @cached_property
    def _decisions(self) -> tuple[list[tuple[str, Finding]], list[Remaining]]:
        """Return the findings that lead to changes, with the kind of change, and those that remain."""
        done, remaining = list[tuple[str, Finding]](), list[Remaining]()
        for one in self.found.findings:
            what, why = self._decision(one)
            if what:
                done.append((what, one))
            else:
                remaining.append(_remaining(one, why))
        return done, remaining

    def _decision(self, one: Finding) -> tuple[str, str]:
        """Return the kind of change that resolves a finding; "" and the reason if there is none."""
        everything, rule = self.chosen.everything, one.rule
        name = BY_ID[rule].drop if rule in BY_ID else rule
        if rule in self.chosen.rules:
            if not one.episodes:
                return "", "no episode is named that could be left out"
            if everything and self._share(rule) == 1:
                return "", "every episode is concerned"
            if everything and self._share(rule) > 0.5:
                return "", f"most episodes are concerned: --drop {name} leaves them out all the same"
            return "drop", ""
        if rule == _IDLE and self.chosen.trim:
            if isinstance(self.reader, Reader) and self._unread:
                return "", "idle ends cannot be cut off while some episodes cannot be read: clean the result again"
            return "trim", ""
        if rule in self.chosen.fixed:
            of_time = rule in FIXES["retime"]
            if of_time and self._rate is None:
                return "", "no rate is stated from which time stamps could be set"
            if of_time and everything and _RATE in self._concerned:
                return "", "the stated rate may be wrong: if it is not, --fix retime sets time stamps by it"
            if of_time and everything and self._share(_GAPS) > 0.5:
                return "", "new time stamps would hide gaps: --fix retime sets them all the same"
            return "fix", ""
        if rule == _ORPHANS and isinstance(self.reader, Reader):
            return "fix", ""  # a conversion does not take it over
        if rule == _RATE and everything:
            return "", "the rate is wrong, or the time stamps: if these are, --fix retime sets them"
        if everything:
            return "", f"--drop {name} leaves them out" if name and rule in BY_ID else "no option here mends it"
        if rule == _GAPS and "retime" in self.chosen.fix:
            return "", f"new time stamps hide it: --drop {name} leaves these episodes out"
        return "", "not chosen"

    @cached_property
    def _rate(self) -> float | None:
        return fps_of(self.reader.stated().documents if isinstance(self.reader, Reader) else self.reader.documents())

    @cached_property
    def _idle_rows(self) -> dict[int, tuple[int, int]]:
        """The idle rows that could be cut off at the start and the end of each episode, by its number."""
        table, found = self._table, dict[int, tuple[int, int]]()
        for start, stop in (place for what, one in self._decisions[0] if what == "trim" for place in one.steps):
            row = int(table.index_of_step(np.array([start]))[0])
            number, rest = int(table.episode[row]), max(0, stop - start - KEPT_REST)
            lead, tail = found.get(number, (0, 0))
            if start == table.start[row]:
                found[number] = rest, tail
            elif stop == table.start[row] + table.length[row]:  # not the end of a part of a very long episode
                found[number] = lead, rest
        return {number: ends for number, ends in found.items() if any(ends)}

    @cached_property
    def _short(self) -> list[Finding]:
        """Findings about episodes that are too short once their idle ends are cut off."""
        table, entry = self._table, BY_ID[_SHORT]
        kept = ~np.isin(
            table.episode, [number for what, one in self._decisions[0] if what == "drop" for number in one.episodes]
        )
        cut = np.array([sum(self._idle_rows.get(number, ())) for number in self._numbers])
        length = table.length - cut
        least = least_length(length[kept], self.limits, robot=True) if kept.any() else 0
        found = []
        for row in np.flatnonzero(kept & (cut > 0) & (length < least)).tolist():
            number, steps = self._numbers[row], counted(int(length[row]), "step")
            text = f"without its idle ends, episode {number} has {steps}, expected {least:.0f} or more"
            found.append(Finding(*entry.named, "warning", text, (), (number,)))
        return found

    @cached_property
    def _done(self) -> list[tuple[str, Finding]]:
        """The findings that lead to changes, including those about episodes that become too short by trimming."""
        more = [("drop", one) for one in self._short] if _SHORT in self.chosen.rules else []
        return [*self._decisions[0], *more]

    @cached_property
    def _dropped(self) -> dict[str, tuple[int, ...]]:
        """The episodes that are left out, by rule; an episode may be listed for several rules."""
        found: dict[str, set[int]] = {}
        for what, one in self._done:
            if what == "drop":
                found.setdefault(one.rule, set()).update(one.episodes)
        return {rule: tuple(sorted(numbers)) for rule, numbers in sorted(found.items())}

    @cached_property
    def _left_out(self) -> set[int]:
        return {number for numbers in self._dropped.values() for number in numbers}

    @cached_property
    def _cuts(self) -> dict[int, tuple[int, int]]:
        """The rows that are cut off at the start and the end of each remaining episode, by its number."""
        return {number: ends for number, ends in self._idle_rows.items() if number not in self._left_out}

    @cached_property
    def _fixes(self) -> list[str]:
        rules = {one.rule for what, one in self._done if what == "fix"}
        return [name for name, mended in FIXES.items() if rules.intersection(mended)]

    @cached_property
    def _operations(self) -> dict[str, Any]:
        """The operations that `preprocess` applies."""
        found: dict[str, Any] = {"episodes": self._kept} if self._left_out else {}
        if "retime" in self._fixes:
            found["retime"] = self._rate
        if self._cuts:
            found["trim_idle"] = self._cuts
        return found

    @property
    def _kept(self) -> str:
        return runs_text(sorted(set(self._numbers) - self._left_out))

    @property
    def _step(self) -> Provenance:
        """The step of the provenance: the arguments, and the changes that were made."""
        asked = self.asked
        arguments = {
            "dataset": os.fspath(asked.dataset), "drop": _names(asked.drop), "dedupe": asked.dedupe,
            "min_length": asked.min_length, "trim_idle": asked.trim_idle, "fix": _names(asked.fix), "full": asked.full,
            "thresholds": asked.thresholds and os.fspath(asked.thresholds),
            "baseline": asked.baseline and os.fspath(asked.baseline),
            "dropped": {rule: list(numbers) for rule, numbers in self._dropped.items()},
            "trimmed": {str(number): list(ends) for number, ends in self._cuts.items()},
            "fixed": self._fixes, "rate": self._operations.get("retime"),
        }  # fmt: skip
        given = dict(self.given) | ({} if asked.format is None else {"format": asked.format})
        inputs = {} if isinstance(self.reader, Reader) else self.reader.manifest.inputs
        return provenance_step("clean", {name: value for name, value in arguments.items() if value} | given, inputs)

    def run(self, started: float) -> CleanResult:
        _ = self._unread  # raises for damage that no episode can be blamed for, before anything is written
        changes = [
            Change(what=what, rule=one.rule, name=one.name, episodes=one.episodes, message=one.message)
            for what, one in self._done
        ]
        known = [one for one in self._decisions[1] if not one.episodes or not self._left_out.issuperset(one.episodes)]
        known += [] if _SHORT in self.chosen.rules else [_remaining(one, "not chosen") for one in self._short]
        if self._left_out.issuperset(self._numbers):
            raise UsageError(
                f"no episode of {self.path} would be left, because of {' and '.join(self._dropped) or 'damage'}"
            )
        publication = Publication(
            staging=Staging(
                self.destination, replace=self.asked.force, takes=self._is_same_run if self.asked.resume else None
            ),
            find=self._already_there,
            dry_run=self.asked.dry_run,
            name=RESULT,
        )
        made = publication.prepare(self._plan) or publication.publish(self._build, self._keeping)
        manifest, entries = made
        readers = [] if isinstance(self.reader, Reader) else [self.reader]
        return CleanResult(
            **{**published_entries(manifest, self.destination, started, *readers), **entries}, source=self.path,
            changes=tuple(changes), remaining=tuple(known), dropped=self._dropped,
        )  # fmt: skip

    def _already_there(self) -> Manifest | None:
        """Return the manifest at the destination if the same run has made it of the same data."""
        there = _made_by_clean(self.destination)
        if there is None:
            return None
        last, step = there.provenance[-1], self._step
        same = plain(last.arguments) == plain(step.arguments) and last.inputs == step.inputs
        if same and isinstance(self.reader, Reader):
            same = there.resolved_revision == digest_of_inputs(self.reader.digests())
        return there if same else None

    def _plan(self) -> Outcome[Manifest]:
        table = self._table
        rows = np.flatnonzero(~np.isin(table.episode, list(self._left_out)))
        steps = int(table.length[rows].sum()) - sum(map(sum, self._cuts.values()))
        planned = Manifest(
            kind="dataset", layout="ted", request=self._request(""), steps=steps, episodes=len(rows), fields=(),
            files=(), content_digest="", created_by="", boundary=table.chosen(rows).counts(),
        )  # fmt: skip
        return Outcome(planned, {"content_digest": None})

    def _request(self, id: str) -> Request:
        return Request(source="clean", asked=os.fspath(self.asked.dataset), id=id)

    def _identity(self) -> dict[str, Any]:
        found: dict[str, Any] = plain({"work": self._step.arguments, "source": self._step.inputs})
        return found

    def _is_same_run(self, folder: Path) -> bool:
        """Whether a folder holds an unfinished run of the same work; UsageError if it belongs to another one."""
        try:
            found = load_json(folder / _PLAN)
        except (RbtoolError, OSError):
            return False
        require_same_run(found, self._identity(), folder)
        return True

    @contextlib.contextmanager
    def _keeping(self, staging: Staging) -> Iterator[None]:
        """After an error, keep the working folders for a run that resumes, if they have finished parts."""
        try:
            yield
        except BaseException as error:
            finished = any(staging.path.glob(f".{RESULT}.*")) and not isinstance(error, UsageError)
            staging.kept = finished or staging.taken_up
            if isinstance(error, OutOfSpaceError):  # name the destination instead of the hidden working folders
                place = str(staging.path)
                error.message = error.message.replace(f"{place} has ", f"{self.destination.parent} has ")
                error.message = re.sub(rf"{re.escape(place)}/(source|{RESULT})\b", str(self.destination), error.message)
            raise
        staging.kept = False

    def _build(self, staging: Staging) -> Outcome[Manifest]:
        if not staging.taken_up:
            fs.write_file(staging.path / _PLAN, dump_json(self._identity()).encode())
        asked, source, result = self.asked, self.path, staging.path / RESULT
        operations = dict(self._operations)
        before: tuple[Provenance, ...] = ()
        if isinstance(self.reader, Reader):
            chosen = self._kept if self._left_out or self._unread else None
            operations.pop("episodes", None)
            source = staging.path / "source" if operations else result
            convert(
                self.path, source, episodes=chosen, format=asked.format, num_workers=asked.num_workers or 0,
                progress=asked.progress, **self.given,
            )  # fmt: skip
            before = Manifest.load(source).provenance
        else:
            before = self.reader.manifest.provenance
        shared = 0
        if operations:
            written = preprocess(
                source, dest=result, operations=operations, num_workers=asked.num_workers, resume=asked.resume,
                skip_bad=source == self.path and bool(self._unread), progress=asked.progress,
            )  # fmt: skip
            shared = written.shared_bytes if source == self.path else 0
        elif source != result:
            convert(source, result, progress=asked.progress)
        return Outcome(self._finished_manifest(result, before), {"shared_bytes": shared})

    def _finished_manifest(self, folder: Path, before: Sequence[Provenance]) -> Manifest:
        """Correct the metadata of the source, and record the whole run as one step of provenance."""
        manifest = Manifest.load(folder)
        with open_steps(folder) as made:
            documents, table = made.documents(), made.episodes
            lengths = dict(zip(table.episode.tolist(), table.length.tolist(), strict=True))
        changed = dict(self._corrected_documents(documents, manifest, lengths))
        touched = {name for name in documents if changed.get(name) != documents[name]}
        for name in touched:  # remove, not overwrite: the file may be a hard link shared with another dataset
            fs.remove(folder / SOURCE_DOCUMENTS / name)
        written = write_documents(folder, {name: changed[name] for name in touched & changed.keys()})
        gone = {f"{SOURCE_DOCUMENTS}{name}" for name in touched}
        files = sorted([*(one for one in manifest.files if one.path not in gone), *written])
        manifest = replace(
            manifest, files=tuple(files), request=self._request(manifest.request.id), provenance=(*before, self._step)
        )
        manifest.save(folder, at_once=True)
        return manifest

    def _corrected_documents(
        self, documents: Mapping[str, bytes], manifest: Manifest, lengths: Mapping[int, int]
    ) -> Iterable[tuple[str, bytes]]:
        """Yield the metadata of the source, without statistics and with totals of the result if rows have changed."""
        is_other = bool(self._operations or self._unread or {"stats", "totals"}.intersection(self._fixes))
        for name, data in documents.items():
            if is_other and name in _STATISTICS:
                continue
            if is_other and name in _WITH_TOTALS:
                about = {key: value for key, value in parse_json(data, name).items() if key not in _OTHER_TOTALS}
                stated = {"total_episodes": manifest.episodes}
                stated |= dict.fromkeys(("total_frames", "total_steps"), manifest.steps)
                about |= {key: value for key, value in stated.items() if key in about}
                yield name, dump_json(about).encode()
            elif is_other and name.endswith(".jsonl"):
                yield name, _of_episodes(data, name, lengths)
            else:
                yield name, data


def _of_episodes(data: bytes, name: str, lengths: Mapping[int, int]) -> bytes:
    """Keep the lines about the episodes in `lengths`, with these lengths; a document of another kind is unchanged."""
    rows = [parse_json(line, name) for line in data.splitlines() if line.strip()]
    if not all(isinstance(row, dict) and "episode_index" in row for row in rows):
        return data
    kept = [row for row in rows if row["episode_index"] in lengths]
    for row in kept:
        row |= {"length": lengths[row["episode_index"]]} if "length" in row else {}
    return "".join(f"{dump_json(row)}\n" for row in kept).encode()


_WITH_TOTALS = frozenset({"meta/info.json", "metadata.json"})
"""The documents of LeRobot and Minari that state the numbers of episodes and steps."""
_STATISTICS = frozenset({"meta/stats.json", "meta/stats.jsonl", "meta/episodes_stats.jsonl"})
_OTHER_TOTALS = frozenset({"total_videos", "total_tasks", "total_chunks"})
