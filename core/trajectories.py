"""Trajectories inside a batch of steps: where they end, and each in a row of its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor

from .errors import MissingKeyError, SchemaError, suggests_keywords
from .ted.schema import DEFAULT_DONE_KEYS, TRAJECTORY_KEYS

NestedKey: TypeAlias = str | tuple[str, ...]

_MASKS: tuple[tuple[str, ...], ...] = (("collector", "mask"), ("mask",))


def key_path(key: NestedKey) -> tuple[str, ...]:
    """Write a key as the tuple of its parts."""
    return (key,) if isinstance(key, str) else tuple(key)


def leaves(td: TensorDictBase) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every leaf with its path, those that are no tensors too."""
    for key, value in td.items(True, True, is_leaf=is_leaf_nontensor):
        yield key_path(key), value


def require_steps(data: Any) -> None:
    """Raise SchemaError (a RuntimeError) unless `data` is a tensordict with at least a dimension of time."""
    if not isinstance(data, TensorDictBase):
        raise SchemaError(f"expected a tensordict of steps, found a {type(data).__name__}")
    if not data.ndim:
        raise SchemaError("the tensordict has no batch dimension, expected one of time")


def step_ends(
    td: TensorDictBase, done_key: NestedKey = "done", flags: Sequence[str] = DEFAULT_DONE_KEYS
) -> torch.Tensor:
    """Return where steps end a trajectory, bool `[..., T]`: any flag of the family of `done_key` under `next`.

    The family is the key itself and those of its siblings `flags` that exist. A flag with several values a step,
    such as one an agent, ends the trajectory where any of them is set. MissingKeyError (a KeyError) if none is there.
    """
    path = key_path(done_key)
    family = dict.fromkeys(("next", *path[:-1], name) for name in (path[-1], *flags))
    # with a dimension of its own behind it, a flag of one value a step is flattened like any other, without steps too
    found = [
        value.bool().unsqueeze(-1).flatten(td.batch_dims).any(-1)
        for key in family
        if (value := td.get(key, None)) is not None
    ]
    if not found:
        raise MissingKeyError(f"no {'.'.join(('next', *path))} here; without it, where trajectories end is not known")
    return torch.stack(found).any(0)


def _per_step(td: TensorDictBase, key: tuple[str, ...]) -> torch.Tensor:
    """Return an entry with one value a step in the shape of the batch."""
    value: torch.Tensor = td.get(key)
    if value.shape == (*td.batch_size, 1):
        value = value.squeeze(-1)
    if value.shape != td.batch_size:
        expected = [*td.batch_size, 1]
        raise SchemaError(f"{'.'.join(key)} is {list(value.shape)}, expected one value a step: {expected}")
    return value


def trajectory_ids(td: TensorDictBase) -> torch.Tensor | None:
    """Return the ids of the trajectories that steps belong to, like the batch, or None where there are none."""
    return next((ids for key in TRAJECTORY_KEYS["batches"] if (ids := _one_per_step(td, key)) is not None), None)


def step_mask(td: TensorDictBase, key: NestedKey | None = None) -> torch.Tensor | None:
    """Return which steps are no padding, bool like the batch, or None where there is no mask.

    Without a key, what is at `("collector", "mask")` or "mask" is taken if it has one value a step. SchemaError (a
    RuntimeError) where `key` has another shape.
    """
    if key is None:
        found = next((mask for path in _MASKS if (mask := _one_per_step(td, path)) is not None), None)
    else:
        path = key_path(key)
        found = None if td.get(path, None) is None else _per_step(td, path)
    return None if found is None else found.bool()


def is_cut_behind(td: TensorDictBase, mask: torch.Tensor | None) -> torch.Tensor:
    """Return where the next step is of another trajectory, or padding, regardless of the flags; bool like the batch.

    Trajectories are known by their ids, and `mask` marks the steps that are no padding.
    """
    found = torch.zeros(td.batch_size, dtype=torch.bool, device=td.device)
    for value in (trajectory_ids(td), mask):
        if value is not None:
            found[..., :-1] |= value[..., 1:] != value[..., :-1]
    return found


def _one_per_step(td: TensorDictBase, key: tuple[str, ...]) -> torch.Tensor | None:
    """Return an entry in the shape of the batch, or None where there is none with one value a step."""
    value = td.get(key, None)
    if not isinstance(value, torch.Tensor) or value.numel() != td.batch_size.numel():
        return None
    return value.reshape(td.batch_size)


@suggests_keywords()
def split_trajectories(
    td: TensorDictBase,
    *,
    prefix: NestedKey | None = None,
    trajectory_key: NestedKey | None = None,
    done_key: NestedKey | None = None,
    as_nested: bool | torch.layout = False,
) -> TensorDictBase:
    """Put every trajectory of a batch `[T]` or `[..., T]` into a row of its own, in the order in which they begin.

    Returns `[N, T_max]`, padded with zeros, with a bool mask `[N, T_max]` of what is no padding; with `as_nested`
    (True, or a `torch.layout`) a tensordict `[N, -1]` of ragged tensors, `[N, T]` if they are of one length, `[N]` for
    `torch.jagged`, and no mask. What is no tensor is padded with the trajectory's last value. `td` is left as it is.

    Ids lie at `trajectory_key`, else at `(prefix, "traj_ids")`, where the prefix is "collector" if there is such an
    entry, else at "traj_ids"; the mask is next to them. A trajectory is a run of one id along the last dimension:
    an id that comes again later, or in another row of the batch, is another trajectory. Where there are no ids,
    trajectories end where `("next", done_key)`, "terminated" or "truncated" next to it is set, and at the ends of
    rows; they are numbered, and the numbers kept as ids. Steps that a mask in `td` rules out are left out, so that
    splitting what is split changes nothing.

    MissingKeyError (a KeyError) where neither ids nor ends are there, and where there is no `trajectory_key`
    although one was given; SchemaError (a RuntimeError) for a batch without time and for ids or flags that have no
    value a step. Name and layout are those of TorchRL's function.
    """
    require_steps(td)
    ids_key, mask_key = _ids_and_mask(td, prefix, trajectory_key)
    position = torch.arange(td.batch_size.numel(), device=td.device)
    if td.get(mask_key, None) is not None:
        position = position[_per_step(td, mask_key).bool().reshape(-1)]
    begins = _begins(td, ids_key, done_key, position)
    steps = td.exclude(mask_key).reshape(-1)
    steps = steps.copy() if len(position) == td.batch_size.numel() else steps[position]
    if td.get(ids_key, None) is None:
        steps.set(ids_key, begins.cumsum(0) - 1)
    starts = begins.nonzero().squeeze(-1)
    lengths = torch.diff(starts, append=starts.new_tensor([len(position)]))
    if as_nested is not False:
        return _ragged(steps, lengths, torch.strided if as_nested is True else as_nested)
    return _padded(steps, starts, lengths, mask_key)


def _ids_and_mask(
    td: TensorDictBase, prefix: NestedKey | None, trajectory_key: NestedKey | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if trajectory_key is not None:
        path = key_path(trajectory_key)
        if td.get(path, None) is None:
            found = ", ".join(".".join(key) for key, _ in leaves(td)) or "no entries"
            raise MissingKeyError(
                f"the trajectory_key {'.'.join(path)} is not here, there are {found}",
                hint="leave trajectory_key out to number trajectories by their done flags",
            )
        return path, (*path[:-1], "mask")
    if prefix is None:
        prefix = ("collector",) if "collector" in td.keys() else ()  # noqa: SIM118  # not a dict
    return (*key_path(prefix), "traj_ids"), (*key_path(prefix), "mask")


def _begins(
    td: TensorDictBase, ids_key: tuple[str, ...], done_key: NestedKey | None, position: torch.Tensor
) -> torch.Tensor:
    """Return for every kept step whether a trajectory begins with it, bool `[steps]`."""
    begins = torch.ones(len(position), dtype=torch.bool, device=position.device)
    time = max(td.shape[-1], 1)
    apart = (position.diff() != 1) | ((position // time).diff() != 0)
    if td.get(ids_key, None) is not None:
        ids = _per_step(td, ids_key).reshape(-1)[position]
        begins[1:] = apart | (ids[1:] != ids[:-1])
    else:
        ends = step_ends(td, "done" if done_key is None else done_key).reshape(-1)[position]
        begins[1:] = apart | ends[:-1]
    return begins


def _padded(
    steps: TensorDictBase, starts: torch.Tensor, lengths: torch.Tensor, mask_key: tuple[str, ...]
) -> TensorDictBase:
    longest = int(lengths.max()) if len(lengths) else 0
    column = torch.arange(longest, device=starts.device)
    mask = column < lengths[:, None]
    if len(steps) == mask.numel():
        rows = steps.reshape(len(lengths), longest)
    else:
        # Padding repeats a step of its own trajectory first, so that what is no tensor is padded too.
        rows = steps[starts[:, None] + torch.minimum(column, lengths[:, None] - 1)]
        padding = ~mask
        for value in rows.values(True, True):
            if isinstance(value, torch.Tensor):
                value[padding] = 0
    rows.set(mask_key, mask)
    return rows


def _ragged(steps: TensorDictBase, lengths: torch.Tensor, layout: torch.layout) -> TensorDictBase:
    if not len(lengths):
        raise SchemaError("there is no step here, and ragged tensors need at least one trajectory")
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    sizes = lengths.tolist()

    def leaf(value: Any) -> torch.Tensor:
        if layout == torch.jagged:
            return torch.nested.nested_tensor_from_jagged(value, offsets=offsets)
        return torch.nested.as_nested_tensor(list(value.split(sizes)), layout=layout)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
        nest: dict[tuple[str, ...], torch.Tensor] = {}
        for path, value in leaves(steps):
            if not isinstance(value, torch.Tensor):
                raise SchemaError(f"{'.'.join(path)} is no tensor, and only tensors can be ragged")
            nest[path] = leaf(value)
        # tensordict has a ragged dimension only for strided tensors, and only if their lengths differ
        time = [] if layout == torch.jagged else [-1] if len(set(sizes)) > 1 else sizes[:1]
        out = TensorDict({}, batch_size=[len(sizes), *time])
        for path, value in nest.items():
            out.set(path, value)
    return out
