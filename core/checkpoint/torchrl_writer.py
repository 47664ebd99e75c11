"""Writes TED rows in the layouts that TorchRL 0.14 reads: flat, nested and H5."""

from __future__ import annotations

from pathlib import Path

from ..errors import SchemaError
from ..format import Array, StepReader, fs
from ..progress import Progress
from ..ted import NEXT, Field, Key, field_named, key_name
from .compression import Compression
from .filled import FilledStorage
from .layout import CompactForm
from .rows import leaf_parts, with_ends
from .torchrl_header import TorchrlHeader, TorchrlKeys
from .torchrl_leaves import Counts
from .torchrl_parts import state_parts, step_ends
from .torchrl_plan import OWN_FORM, TorchrlPlan
from .torchrl_sinks import FolderSink, TorchrlSink

__all__ = ["write_torchrl"]


def write_torchrl(
    source: StepReader,
    target: Path,
    form: CompactForm,
    filled: FilledStorage,
    keys: TorchrlKeys,
    progress: Progress,
    compression: Compression | None = None,
) -> None:
    """Write rows that fill the storage `filled` to `target`, a folder in a staging area or, for `h5`, a file in one.

    SchemaError for what the layout cannot hold: ends of single agents, keys below `next` only, a root reward, root
    done flags that are set, next observations that are not the observations of the following row where no episode
    ends, numbers or names that the files cannot hold, more than two dimensions. What was written until then is no
    checkpoint.
    """
    plan = TorchrlPlan.of(source.fields, filled, keys, form)
    ends = step_ends(source, plan.done, plan.header)
    counts = Counts(plan.header, ends)
    fs.require_space(target.parent, plan.bytes(len(ends)) * plan.header.rows // plan.header.capacity)
    for key in plan.silent:
        _require_unset(source, key)
    with _sink(target, form, compression or Compression()) as sink:
        for key, leaf in plan.states.items():
            sink.begin(leaf, counts.states)
            _write_states(source, key, leaf, plan.header, ends, sink)
            sink.end()
        for key, leaf in plan.steps.items():
            sink.begin(leaf, counts.steps)
            _write_steps(source, key, leaf, plan.header, sink)
            sink.end()
        sink.finish(plan.header, keys)
    progress.advance(source.manifest.steps)


def _sink(target: Path, form: CompactForm, compression: Compression) -> TorchrlSink:
    if form == "h5":
        from .torchrl_groups import GroupSink  # loads h5py, which nothing else here needs

        return GroupSink(target, compression)
    return FolderSink(target, nested=form == "nested")


def _require_unset(source: StepReader, key: Key) -> None:
    field = field_named(source.fields, key)
    for start, stop in leaf_parts(source.manifest.steps, field.row_bytes):
        if source.read(key, start, stop).any():
            raise SchemaError(
                f"{key_name(key)} is set at the root, which TorchRL's layout cannot hold: it loads as false",
                hint=OWN_FORM,
            )


def _write_states(
    source: StepReader, key: Key, leaf: Field, header: TorchrlHeader, ends: Array, sink: TorchrlSink
) -> None:
    for lane in range(header.lanes):
        for part in state_parts(source, key, leaf, header, ends, lane):
            if part.broken is not None:
                raise SchemaError(
                    f"{NEXT}.{key_name(key)} of step {lane * header.rows + part.broken:,} is not what follows, though "
                    "no episode ends there, which TorchRL's layout cannot hold: it takes it from the following row",
                    hint=OWN_FORM,
                )
            sink.append(with_ends(part.root, part.after, part.ends))
        sink.skip(header.capacity - header.rows)


def _write_steps(source: StepReader, key: Key, leaf: Field, header: TorchrlHeader, sink: TorchrlSink) -> None:
    for lane in range(header.lanes):
        offset = lane * header.rows
        for start, stop in leaf_parts(header.rows, leaf.row_bytes):
            sink.append(source.read(key, offset + start, offset + stop))
        sink.skip(header.capacity - header.rows)
