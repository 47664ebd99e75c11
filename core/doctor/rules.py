"""The rules of behaviour, their thresholds, and the report that collects their findings."""

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
    """A rule of behaviour: `why` it matters for training, how to mend it, and the `thresholds` that decide.

    `mend` is the kind of remedy, which `Report._mend` turns into a command, such as `leave out` or `cut`, or the
    advice itself; the text after a semicolon is for findings that concern all episodes. `drop` is the name for these
    findings in `rbtool clean --drop`.
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
"""Similar rules of other tools, by their names there."""

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
        "EPI001", "duplicate episodes",
        "No episode is an exact copy of another one: states, actions, rewards, flags, images and tasks.",
        "a copy is sampled twice as often, and one in a validation split makes results look better than they are",
        "leave out", "duplicate",
    ),
    _entry(
        "EPI002", "nearly equal episodes", "No episode has the length of another one and nearly the same values.",
        "an episode that was copied with a little noise is sampled twice as often", "leave out", "near-duplicate",
    ),
    _entry(
        "EPI003", "overlapping episodes", "No large part of an episode occurs bit for bit in another episode.",
        "the shared steps are sampled twice as often", "leave out", "contained",
    ),
    _entry(
        "EPI004", "very short episodes", "No episode is far shorter than the others.",
        "windows and action chunks that are longer than an episode consist mostly of padding", "leave out", "short",
    ),
    _entry(
        "EPI005", "constant episodes", "Observations and actions vary in every episode, if they vary in others.",
        "a policy learns to stand still", "leave out", "constant",
    ),
    _entry(
        "EPI006", "very long episodes", "No episode is far longer than the others.",
        "a large share of the sampled steps comes from it; perhaps the recording was not stopped", "look", "long",
    ),
    _entry(
        "EPI007", "outlying returns", "The return of every episode is in the range of the others.",
        "it dominates value targets, and weights that depend on the return", "look", "return",
    ),
    _entry(
        "EPI008", "no success", "If the data record success, at least one episode succeeds.",
        "no episode shows how the task is solved", "look",
    ),
    _entry(
        "EPI009", "equal motion",
        "No two episodes have the same states and actions, but different pictures, tasks or rewards.",
        "the pictures or texts may belong to another recording, unless the episodes were varied on purpose",
        "look", "equal-motion",
    ),
    _entry(
        "MET001", "statistics", "The stored statistics match the data, and no field that needs statistics lacks them.",
        "a policy normalises its inputs and actions with them", "export",
    ),
    _entry("MET002", "totals", "The numbers of steps, episodes, tasks and videos in the metadata match the data.",
           "loaders rely on these numbers", "export"),
    _entry(
        "MET003", "tasks", "Every episode has a task description, and no two descriptions are nearly the same.",
        "a policy that reads language gets an empty instruction, or several for the same task",
        "task", "task",
    ),
    _entry("MET004", "files", "Every data file and every video in the folder belongs to an episode.",
           "loaders ignore the file, and its data are lost for training", "remove the file, or add it to the metadata"),
    _entry("MET005", "names", "The metadata name every component of a vector, and no two components alike.",
           "a joint is mistaken for another one", "correct the names in the metadata of the source"),
    _entry(
        "MOT001", "spikes and jumps", "No value jumps in a single step by far more than in the other episodes.",
        "a single extreme value dominates the loss and the range that is used for normalisation",
        "leave out", "spike",
    ),
    _entry(
        "MOT002", "stuck components",
        "No component stands still while the others move, if it moves in the other episodes.",
        "the recorded state is not the state that the robot had", "leave out", "stuck",
    ),
    _entry(
        "MOT003", "frozen states", "States do not stand still while actions change.",
        "the sensor may have stopped, and actions seem to have no effect", "leave out", "frozen-state",
    ),
    _entry(
        "MOT004", "values at limits", "No component stays at its minimum or maximum while the others move.",
        "if values were clipped, the true values are lost",
        "leave out; record again without the limit, or with a wider one", "limit",
    ),
    _entry(
        "MOT005", "chatter", "No component alternates between distant values from step to step.",
        "a policy learns the average of the two values, which is neither of them", "leave out", "chatter",
    ),
    _entry(
        "MOT006", "idle ends", "No episode begins or ends with a long rest.",
        "a policy learns to wait", "cut",
    ),
    _entry(
        "MOT007", "lag of actions", "States follow actions with the same delay in every episode, and not before.",
        "actions are paired with the wrong observations", "leave out", "lag",
    ),
    _entry(
        "MOT008", "units", "No episode has values many times as large or as small as the others.",
        "an episode in other units distorts the normalisation", "leave out", "unit",
    ),
    _entry(
        "MOT009", "roughness", "Every episode is about as fast and as smooth as the others.",
        "a policy imitates the noise, or the unusual speed", "leave out", "rough",
    ),
    _entry(
        "MOT010", "disagreement", "The states and actions of every component agree as well as in the other episodes.",
        "components may be swapped, reversed or calibrated differently", "leave out", "disagreement",
    ),
    _entry(
        "MOT011", "pauses", "No episode pauses in the middle for far longer than the others.",
        "a policy learns to stop there, and no observation tells it to go on", "leave out", "pause",
    ),
    _entry(
        "PIC001", "frozen pictures", "No camera repeats the same picture while the robot moves.",
        "the policy sees an outdated scene", "leave out; leave the camera out: rbtool preprocess --exclude",
        "frozen-picture",
    ),
    _entry("PIC002", "black and white pictures", "No picture is all black or all white.",
           "the policy sees nothing", "leave out", "black"),
    _entry("PIC003", "glitches", "No picture differs from those before and after it while these two are alike.",
           "a broken frame adds noise to every window that contains it", "leave out", "glitch"),
    _entry("PIC004", "blur", "The pictures of an episode are as sharp as in other episodes.",
           "details that a grasp depends on are lost", "leave out", "blur"),
    _entry("PIC005", "exposure", "Brightness does not jump within an episode.",
           "the same scene looks different", "leave out", "exposure"),
    _entry("PIC006", "equal cameras", "No two cameras show the same pictures.",
           "one view is missing, and another one is stored twice",
           "leave out; leave one camera out: rbtool preprocess --exclude", "equal-cameras"),
    _entry("PIC007", "swapped cameras", "Every camera shows the same view in all episodes.",
           "a policy gets one camera's view as the input of another", "leave out", "swapped-cameras"),
    _entry("PIC008", "lag of pictures", "Pictures show the state of their step, not an earlier or later one.",
           "pictures and actions do not belong to the same moment", "leave out", "late-picture"),
    _entry("PIC009", "foreign pictures", "Pictures match the states of their episode, and run in the same direction.",
           "the pictures say nothing about the actions that were taken", "leave out", "foreign-picture"),
    _entry(
        "PIC010", "looks", "Every camera has the same brightness, colours, noise and view in all episodes.",
        "the same scene looks different", "leave out", "look",
    ),
    _entry("PIC011", "surplus pictures", "Every frame before, between and after the episodes of a video has a row.",
           "rows and frames may be shifted against each other", "look"),
    _entry("REW001", "constant rewards", "Rewards vary, or episodes terminate after different numbers of steps.",
           "no episode is better than another one", "look"),
    _entry("REW002", "shifted rewards", "Every reward is stored with its own step, not with the one before or after.",
           "credit goes to the wrong action", "compute the rewards again: rbtool preprocess --fn"),
    _entry("REW003", "summed rewards", "Rewards are not running sums.",
           "a return counts every reward many times", "compute the rewards again: rbtool preprocess --fn"),
    _entry("REW004", "time limits", "Not all episodes terminate after the same number of steps.",
           "if a time limit cut them off, a value of 0 is learned for states that go on", "limits"),
    _entry("REW005", "stored returns", "Stored returns equal the sums of the rewards.",
           "a policy is conditioned on, or weighted by, returns that it never got",
           "compute the returns again: rbtool preprocess --fn"),
    _entry("TIM001", "gaps", "No time step is much longer than the others.",
           "windows and action chunks treat the gap as a single step", "leave out", "gap"),
    _entry("TIM002", "jitter", "All time steps are equally long.",
           "loaders that compare time stamps with the frame rate reject the data, or pick other frames", "retime"),
    _entry("TIM003", "order of time", "Time stamps increase with every step.",
           "frames and rows are matched by time", "retime"),
    _entry("TIM004", "offset of time", "The time stamps of all episodes begin alike.",
           "frames of videos are looked up by time", "retime"),
    _entry("TIM005", "rate", "The time steps match the rate in the metadata.",
           "action chunks run faster or slower on a robot than they were recorded",
           "rate"),
)  # fmt: skip
"""All rules of behaviour, in the order of their ids."""

BY_ID = {entry.rule: entry for entry in ENTRIES}

DROPS: Mapping[str, tuple[str, ...]] = {
    "unreadable": ("TED011", "TED012", "TED013", "TED014", "TED017"), "nan": ("TED007",),
    **{entry.drop: (entry.rule,) for entry in ENTRIES if entry.drop},
}  # fmt: skip
"""The values of `rbtool clean --drop`, and the rules whose episodes each of them leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The thresholds of the rules of behaviour.

    An episode is compared with the other episodes of its dataset: "usual" means the median over all of them.

    Args:
        least: the number of steps that an episode needs to take part in comparisons.
        few: the largest share of episodes that can be outliers; what more episodes do is usual.
        several: the share of components from which more than a single joint is affected.
        most: the share of components that counts as nearly all.
        all: the share of episodes that counts as all.
        near: the largest difference between nearly equal episodes, as a share of the range.
        contained: the share of the steps of an episode that may occur in another one.
        length: the minimum length in steps, if it is known, in place of the next three; 0 if it is not.
        fewest: the minimum length of an episode in steps.
        short: the minimum length, as a share of the median length.
        shorter: the same for robots, for an episode that is also `outlier` deviations shorter.
        long: the maximum length, as a multiple of the median length, for an episode that is also `outlier`
            deviations longer.
        level: the smallest deviation of lengths that is assumed, as a share of their median.
        outlier: the number of robust deviations (1.48 MAD) from the median beyond which a value is an outlier.
        apart: the same for the logarithms of speed, roughness and errors of predicted actions.
        spike: the jump of a value in a single step, as a multiple of the usual largest one.
        jump: the jump of `several` components at once, as a multiple of the usual largest one.
        spike_range: the jump as a share of the range; half of it for `several` components at once.
        stuck: the share of the steps with motion in which a component may stand still.
        held: the range of a component that hardly moves, as a share of its usual range.
        regular: the range of a component that moves in every episode, as a share of its usual range.
        resting: the share of steps in which a component that moves in every episode usually stands still, at most.
        frozen: the number of steps for which all states may stand still while actions change.
        frozen_ratio: the same, as a multiple of the usual number; also for pauses.
        still: the change up to which a component stands still, as a share of its range.
        limits: the share of steps that may lie on a limit, over all episodes.
        clipped: the share of steps that may lie on a limit in one episode.
        chatter: the share of steps that may be large reversals.
        alternating: the number of large reversals in a row that is allowed.
        turn: the change from which a reversal is large, as a share of the range.
        idle: the share of an episode that may be rest at its beginning or end.
        idle_steps: the number of steps of rest at its beginning or end that is always allowed.
        pause: the number of steps of rest that is allowed in the middle of an episode.
        pause_seconds: the same in seconds, if the rate is known.
        pause_share: the same, as a share of the episode.
        slow: the speed up to which a robot rests, as a share of its mean speed.
        lag: by how many steps the delay of actions or pictures may differ from the usual one.
        lead: by how many seconds states may follow their actions, if the rate is known.
        precede: the number of steps from which states that precede their actions in all episodes are reported.
        agreement: the correlation of actions and states, or the share of the variance of actions that states
            explain, below which they are not compared.
        disagreement: how far the correlation of a component, or of pictures and states, may fall.
        offset: how far the mean distance of states and actions may be from the usual one, as a share of the range.
        units: the ratio of ranges from which values are taken to have another unit.
        rough: the ratio of jerk to the usual jerk, of `several` components at once.
        rougher: the same, as a median over all components.
        fast: the ratio of speed to the usual speed, of `most` components at once or as a median over all.
        noise: the smallest jerk that counts, as a share of the range.
        growing: the share of steps in which running sums grow.
        explained: the share of the variance of rewards that has to be explained before shifts are compared.
        shifted: how much more of that variance the rewards of a neighbouring step may explain.
        gap: the longest time step, as a multiple of the usual one.
        jitter: the allowed deviation of a time step, as a share of the usual one.
        jittered: the share of time steps that may deviate by more.
        tolerance: the deviation of a time step that is always allowed, in seconds.
        late: how far the first time stamp may be from the other episodes' first ones, in steps.
        mean: the allowed error of a stored mean, in standard deviations, and of a stored standard deviation, as a
            share of it.
        quantile: the allowed error of a stored quantile, as a share of the range.
        extreme: the allowed error of a stored minimum or maximum, as a share of the range.
        episode: the allowed error of a statistic of one episode, as a share of the usual range of an episode.
        picture: the allowed error of the stored mean of pictures, on a scale from 0 to 1.
        dark: the brightness up to which a picture is black, of 255; white ones are as near to 255.
        flat: the standard deviation of grey values below which a picture is of one colour, of 255.
        calm: the change up to which a picture stands still, as a share of a small change of its camera.
        frozen_pictures: the number of steps for which a picture may stand still while the robot moves.
        moved: the range of states from which the robot moves while a picture stands still, as a share of the usual.
        repeated: the share of pictures that may repeat the previous one.
        glitch: the change of a single picture, as a multiple of the usual one.
        sharp: the sharpness, as a share of the usual one.
        blurred: the share of pictures that may be less sharp than that, and at least 5 of them.
        exposure: the allowed jump in brightness, of 255.
        equal: the mean difference up to which pictures of two cameras show the same, of 255.
        brightness: how much the brightness of an episode may differ from the others', of 255.
        colours: the same for colours.
        view: the same for the parts of a picture, and for the pictures of two episodes that may be copies.
        grain: the same for noise, as a share of the usual sharpness.
        fit: the correlation of states with their prediction from pictures, below which they are not compared.
        surplus: the number of frames that may belong to no row before, between and after the episodes of a video.
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
        """Read thresholds from a mapping or a TOML file; those that are not named keep their defaults.

        Raises UsageError for an unknown name, and for a value that is not a positive number.
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
    """Collects the findings about the dataset at `path`; `numbers` are those of its episodes, in the order of rows."""

    path: Path
    is_raw: bool
    findings: list[Finding] = field(default_factory=list)
    numbers: Sequence[int] = ()
    rate: float | None = None
    """The steps per second that the metadata state."""

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
        """Add a finding; `figure` is the measured value, and `threshold` the value that it was compared with."""
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
        """Return the command that mends a finding about these episodes, or advice if there is no such command."""
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
            return otherwise or f"look at the episodes with rbtool inspect {place}"
        return how


def of_episodes(episodes: Collection[int], count: int | None = None) -> str:
    """Return the numbers of the first few of `count` episodes: `episode 3`, or `episodes 3, 5, 8 and 4 more`."""
    shown = [str(int(one)) for one in list(episodes)[:6]]
    if len(shown) == 1:
        return f"episode {shown[0]}"
    more = (len(episodes) if count is None else count) - len(shown)
    return f"episodes {', '.join(shown)}" + (f" and {more:,} more" if more else "")


def robust(values: Array) -> tuple[Array, Array]:
    """Return the median and 1.48 MAD of values, along the first axis."""
    middle = np.median(values, axis=0)
    return middle, 1.4826 * np.median(np.abs(values - middle), axis=0)
