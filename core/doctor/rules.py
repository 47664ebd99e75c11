"""The rules of behaviour: which there are, their thresholds, and the findings that are made of them."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from ..errors import UsageError, did_you_mean
from ..format.contracts import Array
from ..format.files import read_regular
from ..ted.episodes import runs_of
from ..ted.rules import Finding, Places, RuleEntry

Profile: TypeAlias = Literal["data", "robot"]


@dataclass(frozen=True, slots=True)
class BehaviourEntry(RuleEntry):
    """A rule of behaviour: `why` it matters for training, what mends it, and the `thresholds` that decide.

    `mend` is what to do with the episodes: `leave out`, `cut`, `export` again, or words; after a semicolon, what to do
    where all of them are concerned. `drop` is the name by which `clean` leaves episodes with such findings out.
    """

    profile: Profile = "data"
    why: str = ""
    mend: str = ""
    drop: str = ""
    thresholds: tuple[str, ...] = ()


def _entry(rule: str, name: str, checks: str, why: str, mend: str, drop: str = "") -> BehaviourEntry:
    about = _ABOUT[rule[:3]]
    profile: Profile = "robot" if rule[:3] in {"MOT", "TIM", "PIC"} else "data"
    return BehaviourEntry(
        rule, name, about, ("warning",), checks, _ALSO.get(rule, ()), profile, why, mend, drop, _DECIDE.get(rule, ())
    )


_ALSO: Mapping[str, tuple[str, ...]] = {
    "EPI001": ("physlint duplication.exact_episodes",), "EPI002": ("lerobot-doctor anomalies",),
    "EPI004": ("lerobot-doctor episodes",), "EPI005": ("lerobot-doctor anomalies",),
    "MET001": ("lerobot-doctor statistics",), "MET002": ("lerobot-doctor metadata",),
    "MET003": ("lerobot-doctor metadata",), "MET004": ("lerobot-doctor portability",),
    "MOT001": ("lerobot-doctor actions", "physlint numeric.discontinuity"), "MOT002": ("lerobot-doctor anomalies",),
    "MOT003": ("lerobot-doctor actions",), "MOT004": ("lerobot-doctor actions",),
    "MOT007": ("physlint temporal.observation_action_delay",), "PIC001": ("physlint video.frozen_frames",),
    "PIC002": ("physlint video.black_frames",), "TIM001": ("lerobot-doctor temporal", "physlint temporal.max_gap"),
    "TIM002": ("lerobot-doctor temporal", "physlint temporal.sampling_interval"),
    "TIM003": ("lerobot-doctor temporal", "physlint temporal.monotonic"),
    "TIM005": ("lerobot-doctor temporal", "physlint temporal.sampling_interval"),
}  # fmt: skip
"""Names of like rules of other tools."""

_DECIDE: Mapping[str, tuple[str, ...]] = {
    "EPI001": ("least", "view"), "EPI002": ("least", "near"), "EPI003": ("least", "contained"),
    "EPI004": ("length", "fewest", "short", "shorter", "outlier", "level", "few"), "EPI005": ("least", "few"),
    "EPI006": ("long", "outlier", "level"), "EPI007": ("outlier", "few"), "EPI009": ("least", "view"),
    "MET001": ("mean", "quantile", "extreme", "episode", "picture"),
    "MOT001": ("spike", "jump", "spike_range", "several", "few"),
    "MOT002": ("stuck", "still", "held", "regular", "resting", "few"),
    "MOT003": ("frozen", "frozen_ratio", "still", "slow", "few"), "MOT004": ("limits", "clipped", "few"),
    "MOT005": ("chatter", "alternating", "turn"), "MOT006": ("idle", "idle_steps", "slow"),
    "MOT007": ("lag", "lead", "precede", "agreement", "few"), "MOT008": ("units", "several", "few"),
    "MOT009": ("rough", "rougher", "fast", "apart", "noise", "several", "most", "few"),
    "MOT010": ("offset", "disagreement", "agreement", "apart", "few"),
    "MOT011": ("pause", "pause_seconds", "pause_share", "frozen_ratio", "slow", "few"),
    "PIC001": ("frozen_pictures", "calm", "moved", "repeated"), "PIC002": ("dark", "flat"),
    "PIC003": ("glitch", "view"), "PIC004": ("sharp", "blurred"), "PIC005": ("exposure",), "PIC006": ("equal", "flat"),
    "PIC008": ("lag", "fit"), "PIC009": ("fit", "disagreement"),
    "PIC010": ("brightness", "colours", "view", "grain"), "PIC011": ("surplus",),
    "REW002": ("explained", "shifted", "all"), "REW003": ("growing", "all"), "REW004": ("all", "least"),
    "REW005": ("all",), "TIM001": ("gap",), "TIM002": ("jitter", "jittered", "tolerance", "gap"),
    "TIM004": ("late", "few"), "TIM005": ("jitter",),
}  # fmt: skip
"""The thresholds of each rule."""


_ABOUT: Mapping[str, Any] = {
    "EPI": "episodes", "MET": "metadata", "MOT": "motion", "PIC": "pictures", "REW": "rewards", "TIM": "time",
}  # fmt: skip

ENTRIES: tuple[BehaviourEntry, ...] = (
    _entry(
        "EPI001", "duplicate episodes", "No episode is the same as another one, in all that is stored.",
        "a copy counts twice, and one in another split makes the evaluation too good", "leave out", "duplicate",
    ),
    _entry(
        "EPI002", "nearly equal episodes", "No episode is nearly equal to another one, step by step.",
        "a copy with a little noise counts twice", "leave out", "near-duplicate",
    ),
    _entry(
        "EPI003", "episodes in others", "No part of an episode is in another episode, bit for bit.",
        "the steps count twice", "leave out", "contained",
    ),
    _entry(
        "EPI004", "very short episodes", "No episode is far shorter than the others.",
        "windows and action chunks consist of padding", "leave out", "short",
    ),
    _entry(
        "EPI005", "constant episodes", "Observations and actions vary in every episode, if they vary in others.",
        "a policy learns to stand still", "leave out", "constant",
    ),
    _entry(
        "EPI006", "very long episodes", "No episode is far longer than the others.",
        "it dominates draws of steps, and a recording may not have been stopped", "look", "long",
    ),
    _entry(
        "EPI007", "returns out of family", "No return is far from the returns of other episodes.",
        "targets of values and weights by return are dominated by it", "look", "return",
    ),
    _entry(
        "EPI008", "no success", "Where success is recorded, some episode has it.",
        "nothing shows what the task is", "look",
    ),
    _entry(
        "EPI009", "equal motion", "No episode has the states and actions of another one with other pictures or tasks.",
        "pictures or texts are of another recording, unless episodes were varied on purpose", "look", "equal-motion",
    ),
    _entry(
        "MET001", "statistics", "The stored statistics agree with the data, and no field lacks them.",
        "a policy normalises its inputs and actions with them", "export",
    ),
    _entry("MET002", "totals", "The metadata state as many steps, episodes and tasks as there are.",
           "loaders trust the totals", "export"),
    _entry(
        "MET003", "tasks", "Every episode has a text for its task, and no two texts are nearly equal.",
        "a policy that reads language gets an empty or a second instruction for one task",
        "task", "task",
    ),
    _entry("MET004", "files", "Every data file and video in the folder of a source belongs to an episode.",
           "what is not read is lost for training", "remove the file, or add it to the metadata"),
    _entry("MET005", "names", "As many names are stated for the components of a vector as it has.",
           "joints are taken for others", "correct the names in the metadata of the source"),
    _entry(
        "MOT001", "spikes and jumps", "No value leaps in a single step, compared with the other episodes.",
        "one wild target dominates the loss and the range of normalisation", "leave out", "spike",
    ),
    _entry(
        "MOT002", "stuck components", "What moves in other episodes does not stand still while the rest moves.",
        "the state that a policy sees is not the state that the robot had", "leave out", "stuck",
    ),
    _entry(
        "MOT003", "frozen states", "States do not stand still while actions move.",
        "the sensor stopped, and actions seem to have no effect", "leave out", "frozen-state",
    ),
    _entry(
        "MOT004", "values at limits", "Values do not rest on their least or largest value while the rest moves.",
        "the true value is lost where it was clipped", "leave out; record without the limit, or widen it", "limit",
    ),
    _entry(
        "MOT005", "chatter", "No component alternates between far values from step to step.",
        "a policy averages the two values, and neither is reached", "leave out", "chatter",
    ),
    _entry(
        "MOT006", "idle ends", "Episodes do not begin or end with long rest.",
        "a policy learns to wait", "cut",
    ),
    _entry(
        "MOT007", "lag of actions", "States follow actions by as many steps as in the other episodes, and not before.",
        "an action is learned with the wrong observation", "leave out", "lag",
    ),
    _entry(
        "MOT008", "units", "No episode has values many times as large or as small as the others.",
        "one episode in other units rules the normalisation", "leave out", "unit",
    ),
    _entry(
        "MOT009", "roughness", "Speed and jerk of an episode are like in the others.",
        "a policy imitates the noise", "leave out", "rough",
    ),
    _entry(
        "MOT010", "disagreement", "The actions and states of a component agree as in the other episodes.",
        "a joint was swapped, turned or calibrated otherwise", "leave out", "disagreement",
    ),
    _entry(
        "MOT011", "pauses", "Episodes do not rest in the middle for far longer than the others.",
        "a policy learns to stop there, and sees nothing that tells it to go on", "leave out", "pause",
    ),
    _entry(
        "PIC001", "frozen pictures", "A camera does not show the same picture while the robot moves.",
        "the policy sees an outdated scene", "leave out; leave the camera out: rbtool preprocess --exclude",
        "frozen-picture",
    ),
    _entry("PIC002", "black and white pictures", "No picture is all black or all white.",
           "there is nothing to see", "leave out", "black"),
    _entry("PIC003", "glitches", "No single picture differs from both of its neighbours, which are alike.",
           "a broken frame is noise in every window that holds it", "leave out", "glitch"),
    _entry("PIC004", "blur", "The pictures of an episode are as sharp as in other episodes.",
           "details that a grasp depends on are gone", "leave out", "blur"),
    _entry("PIC005", "exposure", "Brightness does not jump inside an episode.",
           "the same scene looks like another one", "leave out", "exposure"),
    _entry("PIC006", "equal cameras", "No two cameras show the same.",
           "a view is missing, and another one counts twice",
           "leave out; leave one camera out: rbtool preprocess --exclude", "equal-cameras"),
    _entry("PIC007", "swapped cameras", "The cameras of an episode show what they show in the others.",
           "a policy gets the views in the wrong places", "leave out", "swapped-cameras"),
    _entry("PIC008", "lag of pictures", "Pictures show the state of their step, not an earlier or later one.",
           "a policy acts on what it saw long before", "leave out", "late-picture"),
    _entry("PIC009", "foreign pictures", "Pictures belong to the states of their episode, and run in their direction.",
           "observation and action have nothing to do with each other", "leave out", "foreign-picture"),
    _entry(
        "PIC010", "looks", "A camera has the brightness, colours, noise and view of the other episodes.",
        "the same scene looks like another one", "leave out", "look",
    ),
    _entry("PIC011", "surplus pictures", "Videos have no frames before or after an episode that belong to no row.",
           "rows and frames may be shifted against each other", "look"),
    _entry("REW001", "constant rewards", "Rewards vary, or episodes terminate.",
           "no episode is better than another one", "look"),
    _entry("REW002", "shifted rewards", "A reward belongs to its own step, not to the one before or after.",
           "credit goes to the wrong action", "make the rewards again: rbtool preprocess --fn"),
    _entry("REW003", "summed rewards", "Rewards are not running sums.",
           "returns count every reward many times", "make the rewards again: rbtool preprocess --fn"),
    _entry("REW004", "time limits", "Not all episodes terminate after the same number of steps.",
           "a value of zero is learned for states that are cut off by a time limit", "limits"),
    _entry("REW005", "stored returns", "A field of returns has the sums of the rewards.",
           "a policy is conditioned on returns, or weighted by them, that it never got",
           "make the field again: rbtool preprocess --fn"),
    _entry("TIM001", "gaps", "Time does not skip steps.", "windows and action chunks span the gap as if it were a step",
           "leave out", "gap"),
    _entry("TIM002", "jitter", "Steps are equally long.",
           "loaders that compare time stamps with the rate refuse the data or take other frames", "retime"),
    _entry("TIM003", "order of time", "Time goes on with every step.", "frames and rows are matched by time", "retime"),
    _entry("TIM004", "offset of time", "Every episode begins at the time at which the others begin.",
           "frames of videos are found by time", "retime"),
    _entry("TIM005", "rate", "The steps are as long as the stated rate says.",
           "action chunks last longer or shorter than the robot takes for them",
           "rate"),
)  # fmt: skip
"""All rules of behaviour, in the order of their ids."""

BY_ID = {entry.rule: entry for entry in ENTRIES}

DROPS: Mapping[str, tuple[str, ...]] = {
    "unreadable": ("TED011", "TED012", "TED013", "TED014", "TED017"), "nan": ("TED007",),
    **{entry.drop: (entry.rule,) for entry in ENTRIES if entry.drop},
}  # fmt: skip
"""The rules of which `clean` leaves episodes with findings out, by the names that its option has for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The thresholds of the rules of behaviour. A family is all episodes of a dataset; it is described by its median.

    Args:
        least: steps of an episode from which it takes part in comparisons.
        few: the largest share of episodes that can be out of family: what more of them do is the family.
        several: the share of components at once that is more than one joint.
        most: the share of components at once that is nearly all.
        all: the share of episodes that stands for all.
        near: the largest difference of nearly equal episodes, as a share of the range.
        contained: the share of the steps of an episode that may be in another one.
        length: the least length in steps where it is known, in place of the next three; 0 where it is not.
        fewest: the least length of an episode in steps.
        short: the least length, as a share of the family's.
        shorter: the same for robots, for an episode that is also `outlier` deviations shorter.
        long: the largest length, as a multiple of the family's, for an episode that is also `outlier`
            deviations longer.
        level: the least deviation of lengths, as a share of their median.
        outlier: how many robust deviations (1.48 MAD) from the median are out of family.
        apart: the same for speed, roughness and predicted actions, whose logarithms are compared.
        spike: a leap, as a multiple of the family's largest.
        jump: a leap of `several` components at once, as a multiple of the family's largest.
        spike_range: a leap, as a share of the range; half of it for `several` components at once.
        stuck: the share of steps that a component may stand still while others move.
        held: the range of a component that hardly moves, as a share of the family's.
        regular: the range of a component that moves in every episode, as a share of the family's.
        resting: the share of steps at which a component that moves in every episode stands still as a rule.
        frozen: the steps that all states may stand still while actions move.
        frozen_ratio: the same, as a multiple of the family's; also of pauses.
        still: the change of a component that stands still, as a share of its range.
        limits: the share of steps that may lie on a limit, over all episodes.
        clipped: the share of steps that may lie on a limit in one episode.
        chatter: the share of steps that may reverse by far.
        alternating: the reversals in a row that may be.
        turn: the changes that count as reversals, as a share of the range.
        idle: the share of an episode that may be rest at its beginning or end.
        idle_steps: the steps that may be.
        pause: the steps of rest that may be in the middle of an episode.
        pause_seconds: the same in seconds, where the rate is known.
        pause_share: the same, as a share of the episode.
        slow: the speed below which a robot rests, as a share of the mean speed.
        lag: by how many steps the lag of actions or pictures may differ.
        lead: the seconds that a state may follow its action, where the rate is known.
        precede: the steps by which states may not precede actions in all episodes.
        agreement: the correlation of actions and states, or the share of the variance of actions that states
            explain, below which they are not compared.
        disagreement: how far the correlation of a component, or of pictures and states, may fall.
        offset: how far states may be from actions on average, as a share of the range.
        units: the ratio of ranges that is taken for another unit.
        rough: the ratio of jerk, of `several` components at once.
        rougher: the ratio of jerk, as a median over all components.
        fast: the ratio of speeds, of `most` components at once or as a median over all.
        noise: the least jerk that counts, as a share of the range.
        growing: the share of steps at which running sums grow.
        explained: the share of the variance of rewards that has to be explained for a comparison of shifts.
        shifted: how much more of it another step may explain.
        gap: a step in time, as a multiple of the usual one.
        jitter: the deviation of a step in time, as a share of the usual one.
        jittered: the share of steps that may deviate as far.
        tolerance: the deviation of a step in time that never counts, in seconds.
        late: how far the first time stamp may be from the others', in steps.
        mean: the error of a stored mean, in standard deviations; of a stored deviation, as a share of it.
        quantile: the error of a stored quantile, as a share of the range.
        extreme: the error of a stored least or largest value, as a share of the range.
        episode: the error of a statistic of one episode, as a share of the usual range of an episode.
        picture: the error of the stored mean of pictures, of 1.
        dark: the brightness of black pictures, of 255; white ones are as near to 255.
        flat: the deviation of the grey values of a picture of one colour, of 255.
        calm: the change of a picture that stands still, as a share of a small change of its camera.
        frozen_pictures: the steps that a picture may stand still while the robot moves.
        moved: the range of states, as a share of the usual one, with which a picture that stands still is frozen.
        repeated: the share of pictures that may repeat the one before.
        glitch: the change of a single picture, as a multiple of the usual one.
        sharp: the sharpness, as a share of the family's.
        blurred: the share of pictures that may be as blurred, and at least 5 of them.
        exposure: the jump in brightness, of 255.
        equal: the difference of pictures of two cameras that show the same, of 255.
        brightness: how far the brightness of an episode may be from the others', of 255.
        colours: the same for colours.
        view: the same for the parts of a picture, also of two episodes that may be copies.
        grain: the same for noise, as a share of the sharpness.
        fit: the correlation of states with what pictures predict of them, below which they are not compared.
        surplus: the frames of a video that may belong to no row, where rows begin and end.
    """

    least: int = 10
    few: float = 0.3
    several: float = 0.3
    most: float = 0.6
    all: float = 0.9
    near: float = 1e-3
    contained: float = 0.5
    length: int = 0
    fewest: int = 4
    short: float = 0.1
    shorter: float = 0.6
    long: float = 2.5
    level: float = 0.03
    outlier: float = 12.0
    apart: float = 6.0
    spike: float = 6.0
    jump: float = 4.0
    spike_range: float = 0.3
    stuck: float = 0.3
    held: float = 0.03
    regular: float = 0.3
    resting: float = 0.05
    frozen: int = 8
    frozen_ratio: float = 3.0
    still: float = 1e-6
    limits: float = 0.04
    clipped: float = 0.12
    chatter: float = 0.3
    alternating: int = 8
    turn: float = 0.3
    idle: float = 0.25
    idle_steps: int = 15
    pause: int = 40
    pause_seconds: float = 0.8
    pause_share: float = 0.1
    slow: float = 0.1
    lag: int = 4
    lead: float = 0.4
    precede: int = 3
    agreement: float = 0.6
    disagreement: float = 0.5
    offset: float = 0.15
    units: float = 15.0
    rough: float = 4.0
    rougher: float = 2.5
    fast: float = 1.7
    noise: float = 1e-3
    growing: float = 0.98
    explained: float = 0.8
    shifted: float = 0.01
    gap: float = 1.5
    jitter: float = 0.02
    jittered: float = 0.05
    tolerance: float = 1e-4
    late: float = 1.5
    mean: float = 0.1
    quantile: float = 0.15
    extreme: float = 0.01
    episode: float = 0.2
    picture: float = 0.1
    dark: float = 8.0
    flat: float = 4.0
    calm: float = 0.25
    frozen_pictures: int = 10
    moved: float = 0.2
    repeated: float = 0.4
    glitch: float = 5.0
    sharp: float = 0.7
    blurred: float = 0.1
    exposure: float = 15.0
    equal: float = 0.75
    brightness: float = 20.0
    colours: float = 10.0
    view: float = 6.0
    grain: float = 0.4
    fit: float = 0.5
    surplus: int = 2

    @classmethod
    def of(cls, given: Mapping[str, Any] | Path) -> Thresholds:
        """Take thresholds by their names, or from a TOML file; those that are not named keep their defaults.

        UsageError for a name that does not exist, and a value that is not a positive number.
        """
        origin = "thresholds"
        if isinstance(given, Path):
            origin = str(given)
            try:
                given = tomllib.loads(read_regular(given).decode())
            except OSError as error:
                raise UsageError(f"{origin} cannot be read: {error.strerror}") from None
            except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
                raise UsageError(f"{origin} cannot be read as TOML: {error}") from None
        known = {one.name: one for one in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise UsageError(f"{origin}: there is no threshold {name!r}{did_you_mean(name, known)}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise UsageError(f"{origin}: {name} is {value!r}, expected a positive number")
        return cls(**given)


@dataclass
class Report:
    """Gathers findings of rules of behaviour about the dataset at `path`, whose episodes have these `numbers`."""

    path: Path
    is_raw: bool
    findings: list[Finding] = field(default_factory=list)
    numbers: Sequence[int] = ()
    rate: float | None = None
    """How many steps a second the metadata state."""

    def add(
        self,
        rule: str,
        message: str,
        *,
        episodes: Iterable[int] = (),
        steps: Iterable[tuple[int, int]] = (),
        figure: float = 0.0,
        threshold: float = 0.0,
        components: Sequence[str] = (),
    ) -> None:
        """Add a finding; `figure` is what was measured, and `threshold` what it was compared with."""
        entry = BY_ID[rule]
        concerned = sorted({int(one) for one in episodes})
        places = np.array(sorted({(int(start), int(stop)) for start, stop in steps}), np.int64).reshape(-1, 2)
        self.findings.append(
            Finding(
                rule, entry.name, "warning", message, Places(places), Places(np.array(concerned, np.int64)),
                figure=round(float(figure), 6), threshold=round(float(threshold), 6), why=entry.why,
                mend=self._mend(entry, concerned), components=tuple(components),
            )
        )  # fmt: skip

    def _mend(self, entry: BehaviourEntry, episodes: Collection[int]) -> str:
        """Write the command that mends it."""
        how, _, otherwise = entry.mend.partition("; ")
        place = shlex.quote(str(self.path))
        if how == "leave out" and episodes and len(set(self.numbers) - set(episodes)):
            return f"rbtool clean {place} DEST --drop {entry.drop}"
        if how == "cut":
            return f"rbtool clean {place} DEST --trim-idle"
        if how == "retime" and self.rate:
            return f"rbtool clean {place} DEST --fix retime"
        first, dataset = (f"rbtool convert {place} STEP && ", "STEP") if self.is_raw else ("", place)
        if how == "task" and episodes:
            given = " ".join(f"--task {start}:{stop}=TEXT" for start, stop in runs_of(sorted(episodes)))
            return f"{first}rbtool preprocess {dataset} --dest DEST {given}"
        if how in {"export", "retime"}:
            return f"{first}rbtool export {dataset} DEST --to lerobot"
        if how == "rate":
            return (
                f"rbtool clean {place} DEST --fix retime if the time stamps are wrong, and if the rate is: "
                f"{first}rbtool export {dataset} DEST --to lerobot --fps RATE"
            )
        if how == "limits":
            return (
                f"rbtool convert {place} DEST --ends truncated"
                if self.is_raw
                else "convert again with --ends truncated"
            )
        if how in {"look", "leave out", "task"}:
            return otherwise or f"look at it with rbtool inspect {place}"
        return how


def of_episodes(episodes: Collection[int]) -> str:
    """Write a few numbers of episodes: `episode 3`, or `episodes 3, 5, 8 and 4 more`."""
    shown = [str(int(one)) for one in list(episodes)[:6]]
    if len(episodes) == 1:
        return f"episode {shown[0]}"
    more = len(episodes) - len(shown)
    return f"episodes {', '.join(shown)}" + (f" and {more:,} more" if more else "")


def robust(values: Array) -> tuple[Array, Array]:
    """Return the median and 1.48 MAD of values, along the first axis."""
    middle = np.median(values, axis=0)
    return middle, 1.4826 * np.median(np.abs(values - middle), axis=0)
