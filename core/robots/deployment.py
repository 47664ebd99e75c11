"""Converts the actions of a policy to actions of the robot and back: what `--action-space` did to a dataset, undone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import MissingKeyError, SchemaError, UsageError
from ..format.contracts import StepReader
from ..format.locate import find_dataset
from ..format.manifest import Manifest
from ..open_steps import open_steps
from ..preprocess.operations.program import manifest_at
from ..stats import Moments, QuantileSketch
from ..transforms.base import Past, Transform
from ..transforms.keyed import require_tensordict
from .action_space import OF_CHUNKS, Array, Group, Layout, Place, Runs

_QUANTILES = (0.01, 0.99)
_ANCHORS = 4096
"""The number of chunks that are read at a time for statistics."""


class _Scale(NamedTuple):
    """A field that was normalised: `value * scale + loc` undoes it."""

    key: str
    loc: Array
    scale: Array


class ActionMapping:
    """Converts between the actions of a dataset's source, which the robot takes, and those that a policy learns.

    `action_space` returns it. `steps` are the conversions, in the order in which `preprocess` made them.

    >>> from rbtool.core.robots.action_space import Layout
    >>> text = "0:2=numbers,as=relative,state=observation.state"
    >>> layout = Layout.of("action", [text], {"action": 3, "observation.state": 2}, {})
    >>> chunk = np.array([[0.5, 0.0, 1.0], [1.0, 0.0, 1.0]])
    >>> ActionMapping((layout,)).inverse(chunk, state=np.array([10.0, 20.0])).tolist()
    [[10.5, 20.0, 1.0], [11.0, 20.0, 1.0]]
    """

    def __init__(self, steps: tuple[Layout | _Scale, ...], source: Path | None = None) -> None:
        self.steps = steps
        self._source = source
        self._keys = tuple(dict.fromkeys(step.key for step in steps))

    def __repr__(self) -> str:
        groups = [group.text for step in self.steps if isinstance(step, Layout) for group in step.groups]
        return f"{type(self).__name__}({', '.join(map(repr, groups))})"

    def forward(self, actions: Any, state: Any = None, *, previous: Any = None) -> Any:
        """Convert actions of the dataset's source to actions that the policy learns.

        Args:
            actions: one action `[d]`, a batch of actions `[B, d]`, a chunk `[T, d]`, or a batch of chunks `[B, T, d]`,
                as arrays or tensors; a mapping by the name of the field if several fields were converted.
            state: the state that actions are relative to, as in the dataset: `[s]` or `[B, s]`; for chunks, the state
                at their start. A mapping by the name of the field if there are several. A state with as many dimensions
                as the actions belongs to single actions, a state with one dimension less to chunks.
            previous: for `delta`, except for the first action of an episode: the absolute action before, as in the
                source, with the leading dimensions of the state.

        Returns:
            Arrays or tensors like the actions, float32 unless the actions are float64.

        Raises:
            UsageError: (a ValueError) a state is missing or does not fit the actions.
        """
        return self._applied(actions, state, previous, inverse=False)

    def inverse(self, actions: Any, state: Any = None, *, previous: Any = None) -> Any:
        """Convert actions of the policy to actions for the robot: the inverse of `forward`.

        It takes the arguments of `forward`; `previous` is the last absolute action that the robot was given.
        """
        return self._applied(actions, state, previous, inverse=True)

    def transform(self) -> Transform:
        """Return the transform that makes the actions of a batch relative to the start of their chunk.

        Use it in buffers and loaders with windows: `load_dataset(path, windows={"action": (0, 16)},
        transform=space.transform())`. Actions become relative to the state of the sampled step, which without a window
        is their own step. For a dataset without `as=relative` or `as=chunk-delta`, the transform changes nothing.
        """
        return RelativeToChunk(tuple(_of_chunks(step) for step in self._layouts() if _in_chunks(step)))

    def statistics(self, horizon: int = 1) -> dict[str, Any]:
        """Return statistics to normalise the actions of a policy that predicts chunks of `horizon` steps.

        They are computed over all whole chunks: one begins at every step with enough steps of its episode after it.

        Returns:
            `count`, and `mean`, `std`, `min`, `max`, `q01` and `q99` as arrays `[horizon, d]`; a mapping of these by
            field if several fields were converted. Quantiles are as from `numpy.quantile`, with values accurate to
            0.2 %.
        """
        if self._source is None:
            raise UsageError("statistics need the dataset, but this action space was read from a manifest alone")
        if horizon < 1:
            raise UsageError(f"horizon is {horizon}, expected a number of steps from 1")
        found = {}
        with contextlib.closing(open_steps(self._source)) as reader:
            if (longest := int(reader.episodes.length.max(initial=0))) < horizon:
                raise UsageError(f"horizon is {horizon}, but the longest episode has {longest} steps")
            for key in self._keys:
                width = horizon * next(field.shape[0] for field in reader.fields if field.name == key)
                moments, sketch = Moments(width), QuantileSketch(width)
                for chunks in self._chunks(reader, key, horizon):
                    moments.merge(Moments.of(chunks))
                    sketch.update(chunks)
                shown = {"mean": moments.mean, "std": moments.std, "min": moments.min, "max": moments.max}
                low_high = sketch.quantiles(_QUANTILES, moments.min, moments.max, method="linear")
                shown |= dict(zip(("q01", "q99"), low_high, strict=True))
                arrays = {name: np.asarray(value).reshape(horizon, -1) for name, value in shown.items()}
                found[key] = {"count": int(moments.count.max(initial=0)), **arrays}
        return found[self._keys[0]] if len(self._keys) == 1 else found

    def _chunks(self, reader: StepReader, key: str, horizon: int) -> Iterator[Array]:
        """Yield the actions of whole chunks as a policy learns them, `[chunks, horizon * d]`."""
        layouts = [_of_chunks(step) for step in self._layouts() if step.key == key and _in_chunks(step)]
        table = reader.episodes
        for start, length in zip(table.start.tolist(), table.length.tolist(), strict=True):
            for low in range(start, start + length - horizon + 1, _ANCHORS):
                count = min(_ANCHORS, start + length - horizon + 1 - low)
                rows = reader.read(_path(key), low, low + count + horizon - 1)
                chunks = np.lib.stride_tricks.sliding_window_view(rows, horizon, 0).swapaxes(1, 2)
                for layout in layouts:
                    names = dict.fromkeys(place.key for place in layout.states())
                    states = {name: reader.read(_path(name), low, low + count) for name in names}
                    chunks = _of_layout(layout, chunks, states, None)
                yield chunks.reshape(count, -1).astype(np.float64)

    def _layouts(self) -> list[Layout]:
        return [step for step in self.steps if isinstance(step, Layout)]

    def _applied(self, actions: Any, state: Any, previous: Any, *, inverse: bool) -> Any:
        if not isinstance(actions, Mapping):
            if len(self._keys) != 1:
                raise UsageError(f"actions are an array, expected a mapping of {', '.join(self._keys)}")
            before = None if previous is None else {self._keys[0]: previous}
            return self._applied({self._keys[0]: actions}, state, before, inverse=inverse)[self._keys[0]]
        if previous is not None and not isinstance(previous, Mapping):
            raise UsageError("previous is an array, expected a mapping like the actions")
        found = {}
        for key, given in actions.items():
            if key not in self._keys:
                raise UsageError(f"{key!r} was not converted; the converted fields are {', '.join(self._keys)}")
            steps = [step for step in self.steps if step.key == key]
            last = None if previous is None else _numbers(previous[key])
            found[key] = _like(given, _changed(steps, _numbers(given), state, last, inverse=inverse))
        return found


def _changed(
    steps: list[Layout | _Scale], actions: Array, state: Any, previous: Array | None, *, inverse: bool
) -> Array:
    befores: list[Array | None] = []  # the previous action before each step, and after the last one
    for step in steps:
        befores.append(previous)
        if previous is not None and isinstance(step, Layout):
            stays = step.with_groups(Group.representation)
            rows = previous.reshape(-1, previous.shape[-1])
            previous = stays.changed(rows, Runs.of([1] * len(rows)), _no_states).reshape(*previous.shape[:-1], -1)
        elif previous is not None and isinstance(step, _Scale):
            previous = (previous - step.loc) / step.scale
    befores.append(previous)
    order = list(enumerate(steps))
    for place, step in reversed(order) if inverse else order:
        if isinstance(step, _Scale):
            actions = actions * step.scale + step.loc if inverse else (actions - step.loc) / step.scale
        else:
            actions = _of_layout(step.inverted() if inverse else step, actions, state, befores[place + inverse])
    return actions


def _no_states(place: Place) -> Any:
    raise AssertionError("nothing is relative")


def _of_layout(layout: Layout, actions: Array, state: Any, previous: Array | None) -> Array:
    if not actions.ndim or actions.shape[-1] != layout.width:
        raise UsageError(
            f"{layout.key} is {list(actions.shape)}, expected {layout.width} numbers in the last dimension"
        )
    known = _states(layout, state)
    single = all(one.ndim == actions.ndim for one in known.values()) if known else actions.ndim < 3
    lead = actions.shape[:-1] if single else actions.shape[:-2]
    for name, one in {**known, **({"previous": previous} if previous is not None else {})}.items():
        if one.shape[:-1] != lead:
            raise UsageError(
                f"{name} is {list(one.shape)} for {layout.key} {list(actions.shape)}, expected one for each action, or "
                "one for each chunk of actions"
            )
    rows = actions.reshape(-1, layout.width)
    count = int(np.prod(lead, dtype=np.int64))
    runs = Runs.of([1 if single else actions.shape[-2]] * count)

    def states(place: Place) -> tuple[Array | None, Array]:
        found = place.of(known[place.key].reshape(count, -1))
        return (found if single else None), found

    before = None if previous is None else previous.reshape(count, -1)
    found = layout.changed(rows, runs, states, before)
    return found.reshape(*actions.shape[:-1], found.shape[-1])


def _path(name: str) -> tuple[str, ...]:
    return tuple(name.split("."))


def _states(layout: Layout, state: Any) -> dict[str, Array]:
    """Return the states that a layout needs, by field."""
    places = layout.states()
    keys = list(dict.fromkeys(place.key for place in places))
    if keys and state is None:
        raise UsageError(f"state is missing: actions are relative to {', '.join(map(str, places))}")
    if keys and not isinstance(state, Mapping):
        if len(keys) > 1:
            raise UsageError(f"state is an array, expected a mapping of {', '.join(keys)}")
        state = {keys[0]: state}
    found = {}
    for place in places:
        if place.key not in state:
            raise UsageError(f"state lacks {place.key}: actions are relative to {place}")
        found[place.key] = one = _numbers(state[place.key])
        if one.shape[-1] < int(place.stop or 0):
            raise UsageError(f"{place.key} is {list(one.shape)}, but actions are relative to {place}")
    return found


def _numbers(value: Any) -> Array:
    return np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value, np.float64)


def _like(given: Any, found: Array) -> Any:
    """Return numbers as a tensor or an array like the given one, with its float type, or as float32."""
    if isinstance(given, torch.Tensor):
        dtype = given.dtype if given.is_floating_point() else torch.float32
        return torch.from_numpy(found).to(given.device, dtype)
    return found if np.asarray(given).dtype == np.float64 else found.astype(np.float32)


def _in_chunks(layout: Layout) -> bool:
    return any(group.becomes in OF_CHUNKS for group in layout.groups)


def _of_chunks(layout: Layout) -> Layout:
    """Return the rest of the conversion, for chunks in batches of the rows that `preprocess` wrote."""
    rows = layout.with_groups(Group.of_rows).inverted()  # has the ranges of the groups in these rows
    pairs = list(zip(layout.groups, rows.groups, strict=True))
    return Layout(layout.key, layout.made, tuple(asked.in_batches(made.place) for asked, made in pairs))


class RelativeToChunk(Transform):
    """Makes the actions of a batch relative to the state of the sampled step; see `ActionMapping.transform`.

    It is a transform for buffers that sample single steps, and runs after windows. It reads the state from the storage,
    so the state need not be in the batch.

    Raises:
        MissingKeyError: (a KeyError) the action is not in the batch, or the state is not stored.
        SchemaError: (a RuntimeError) the actions of the batch have another shape.
    """

    looks_back = 0

    def __init__(self, layouts: tuple[Layout, ...]) -> None:
        super().__init__()
        self.layouts = layouts

    def forward(self, data: Any) -> Any:
        if not self.layouts:
            return data
        raise SchemaError(
            f"{type(self).__name__} needs the state of each step of a batch, which only a buffer can provide",
            hint="pass it as transform= to load_dataset or torch_dataset",
        )

    def with_past(self, data: Any, past: Past) -> Any:
        """Return the batch with relative actions."""
        batch = require_tensordict(data, self).copy()
        lead = past.age.dim()
        for layout in self.layouts:
            key = _path(layout.key)
            value = batch.get(key, None)
            if value is None:
                raise MissingKeyError(f"{layout.key} is not in the batch, so it cannot become relative")
            if value.dim() not in (lead + 1, lead + 2) or value.shape[-1] != layout.width:
                raise SchemaError(
                    f"{layout.key} is {list(value.shape)}, expected {layout.width} numbers for each step of a window"
                )
            states = {}
            for name in dict.fromkeys(place.key for place in layout.states()):
                found, _ = past.window(_path(name), np.zeros((), np.int64))
                if found is None:
                    raise MissingKeyError(f"{name} is not stored, but actions are relative to it")
                states[name] = found
            batch.set(key, _like(value, _of_layout(layout, _numbers(value), states, None)))
        return batch

    def extra_repr(self) -> str:
        return ", ".join(group.text for layout in self.layouts for group in layout.groups)


def action_space(dataset: str | os.PathLike[str]) -> ActionMapping:
    """Return the conversion that `preprocess --action-space` applied to a dataset, to undo it for a policy's actions.

    It covers all runs of `preprocess` in the manifest, including `--normalize` of the converted fields: `inverse`
    returns actions as they were before the first run.

    Args:
        dataset: a path, `source:id`, or a `manifest.json`, which is enough for deployment.

    Raises:
        UsageError: (a ValueError) no action space was converted, or a field was also renamed or joined.
        DatasetNotFoundError: the dataset does not exist.
    """
    path = find_dataset(dataset)
    manifest = manifest_at(path)
    return ActionMapping(_steps(manifest, str(dataset)), None if path.is_file() else path)


def _steps(manifest: Manifest, name: str) -> tuple[Layout | _Scale, ...]:
    done: list[tuple[Mapping[str, Any], list[Any]]] = []
    for made in manifest.provenance:
        measured = iter(made.arguments.get("constants") or ())
        for document in made.arguments.get("operations") or ():
            constants = document.get("constants") or (next(measured, []) if document["name"] == "normalize" else [])
            done.append((document, constants))
    spaces = [document for document, _ in done if document["name"] == "action-space"]
    if not spaces:
        raise UsageError(f"no action space of {name} was converted", hint="preprocess --action-space does this")
    groups = [Group.parsed(text, document.get("key", "action")) for document in spaces for text in document["groups"]]
    keys = {group.place.key for group in groups}
    used = keys | {group.state.key for group in groups if group.state is not None}
    widths = {field.name: field.shape[0] for field in manifest.fields if field.shape}
    found: list[Layout | _Scale] = []
    for document, constants in reversed(done):  # backwards, because only the final widths are known
        key = document.get("key", "action")
        if document["name"] == "action-space":
            own = tuple(Group.parsed(text, key) for text in document["groups"])
            before = widths.get(key, 0) - sum(group.width - group.place.width for group in own)
            if any(step.key == key for step in found) and _in_chunks(Layout(key, before, own)):
                raise UsageError(
                    f"{key} was converted again after it became relative to chunks, which cannot be undone"
                )
            found.append(Layout(key, before, own))
            widths[key] = before
        elif document["name"] == "normalize":
            for part in constants:
                if part["key"] in keys:
                    found.append(_Scale(part["key"], np.array(part["loc"]), np.array(part["scale"])))
                elif part["key"] in used:
                    raise UsageError(
                        f"{part['key']}, to which actions are relative, was normalised, which cannot be undone here"
                    )
        elif document["name"] in ("rename", "cat") and used & {key, document.get("to"), *document.get("parts", ())}:
            raise UsageError(f"{key} was changed by {document['name']} of {name}, which cannot be undone here")
    return tuple(reversed(found))
