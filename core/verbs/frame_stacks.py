"""The option `frame_stack` of `sample`, validated before torch is imported, and the transform made from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..ted.schema import Field, Key, key_called, key_name, state_keys, unknown_field

if TYPE_CHECKING:
    from ..transforms.base import Compose

_OBSERVATION: Key = ("observation",)
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameStacks:
    """How many frames are stacked, and which: by default all images, else `observation`. None stacks nothing.

    UsageError for a number below 1, and for keys without a number.
    """

    frames: int | None = None
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.frames is None and self.keys:
            raise UsageError("--frame-key names the frames to stack, and none are stacked", hint="add --frame-stack 4")
        if self.frames is not None and self.frames < 1:
            raise UsageError(f"--frame-stack is {self.frames}, expected a number of frames from 1")

    def given(self) -> dict[str, Any]:
        """Return the options that were given, by name."""
        if self.frames is None:
            return {}
        return {"frame_stack": self.frames} | ({"frame_key": list(self.keys)} if self.keys else {})

    def transform(self, fields: Iterable[Field]) -> Compose | None:
        """Make the transform for steps of these fields; UsageError for a key that is not one of states."""
        if self.frames is None:
            return None
        chosen = self._chosen(list(fields))
        from ..transforms.base import Compose  # lazy: torch takes seconds, and an invalid request fails before
        from ..transforms.frames import StoredFrameStack

        return Compose([StoredFrameStack(self.frames, [field.key], dim=_dimension(field.shape)) for field in chosen])

    def _chosen(self, fields: list[Field]) -> list[Field]:
        states = set(state_keys(fields))
        known = {field.key: field for field in fields if field.key in states}
        chosen = []
        for name in self.keys:
            key = key_called(name, known)
            if key is None:
                raise unknown_field(name, map(key_name, known))
            chosen.append(known[key])
        if chosen:
            return chosen
        images = [field for field in known.values() if len(field.shape) > 1]
        found = images or [field for field in known.values() if field.key == _OBSERVATION]
        if not found:
            raise UsageError(
                f"--frame-stack stacks images, or {key_name(_OBSERVATION)}, and there are none",
                hint=f"--frame-key names others: {', '.join(sorted(map(key_name, known)))}" if known else "",
            )
        return found


def _dimension(shape: tuple[int, ...]) -> int:
    """The dimension to join frames along: that of the channels of an image, for all others a new one in front."""
    if len(shape) != 3:
        return -len(shape) - 1
    return -1 if shape[-1] in _CHANNELS and shape[0] not in _CHANNELS else -3
