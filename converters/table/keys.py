"""Keys of a map that are nearly those of TED: a field of such a name would be taken for the one that is meant."""

from __future__ import annotations

from ...core.errors import UsageError, nearest
from ...core.format.column_map import quoted_name
from ...core.ted.schema import EPISODE, FLAGS, NEXT, Key, key_name

_MEANT = {
    "observation": ("obs", "ob", "observ", "observations"),
    "action": ("act", "acts", "actions"),
    "reward": ("rew", "rews", "rwd", "rewards"),
    "state": ("states",),
    "pixels": ("pixel",),
    "next.observation": (
        "next_observation", "next_observations", "next_obs", "obs_next", "observation_next", "observations_next",
        "new_obs", "nextobservation",
    ),
    "next.state": ("next_state", "next_states", "state_next"),
    "next.reward": ("next_reward", "next_rewards"),
}  # fmt: skip
_MEANT_BY = {typed: key for key, names in _MEANT.items() for typed in names}
_ENDS = frozenset(
    {
        "done", "dones", "is_done", "terminal", "terminals", "is_terminal", "terminated", "termination", "terminations",
        "terminate", "truncated", "truncation", "truncations", "timeout", "timeouts",
    }
)  # fmt: skip
_FLAG_NAMES = frozenset({"done", "terminated", "truncated"})
_KNOWN = ("observation", "action", "reward", "state", "pixels", "terminated", "truncated")
_CUTOFF = 0.82


def require_ted_key(key: Key, columns: tuple[str, ...]) -> None:
    """Raise UsageError for a key that rbtool makes, and for one that is nearly a key of TED."""
    under_next = len(key) > 1 and key[0].lower() == NEXT
    own = key[1:] if under_next else key
    if own in FLAGS or own in {EPISODE, (NEXT,)}:
        how = "--episode-key COLUMN" if own == EPISODE else "--ends TERMINATED,TRUNCATED"
        raise UsageError(f"--map has the key {key_name(key)!r}, which rbtool makes", hint=f"use {how}")
    meant = _meant(own[0])
    if meant in _FLAG_NAMES:
        raise UsageError(
            f"--map has the key {key_name(key)!r}: flags are no fields of a map",
            hint="name their columns in --ends TERMINATED,TRUNCATED",
        )
    path = tuple((meant or own[0]).split("."))
    right = (NEXT, *path, *own[1:]) if under_next and path[0] != NEXT else (*path, *own[1:])
    if right == key or not (meant or under_next):
        return
    listed = ",".join(map(quoted_name, columns))
    raise UsageError(
        f"--map has the key {key_name(key)!r}; did you mean {key_name(right)!r}?",
        hint=f"write {key_name(right)}={listed}, or for a field of that name info.{key_name(own)}={listed}",
    )


def _meant(name: str) -> str:
    """The key of TED that a name at the root is, or is nearly; "" where it is none."""
    typed = name.lower()
    if typed in _ENDS:
        return "done"
    if typed in _MEANT_BY:
        return _MEANT_BY[typed]
    return nearest(typed, [one for one in _KNOWN if one[:2] == typed[:2]], cutoff=_CUTOFF, whole=True)
