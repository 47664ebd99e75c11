"""Files of imitation, d3rlpy, SB3, Tianshou, DAPG, robomimic, RoboSet and RLlib, written and read without rbtool."""

from __future__ import annotations

import base64
import json
import pickle
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Episode:
    """Steps of an episode as they happened: `observations` has a row more than there are steps."""

    observations: Array
    actions: Array
    rewards: Array
    terminated: bool
    truncated: bool

    def __len__(self) -> int:
        return len(self.rewards)


def random_episodes(lengths: Sequence[int], ends: Sequence[str] | None = None, seed: int = 0) -> list[Episode]:
    """Make episodes that end `terminated`, `truncated`, or without a flag (`none`)."""
    draw = np.random.default_rng(seed)
    kinds = ends or [("terminated", "truncated")[number % 2] for number in range(len(lengths))]
    return [
        Episode(
            draw.normal(size=(length + 1, 3)).astype("float32"),
            draw.normal(size=(length, 2)).astype("float32"),
            draw.normal(size=length).astype("float32"),
            kind == "terminated",
            kind == "truncated",
        )
        for length, kind in zip(lengths, kinds, strict=True)
    ]


def write_imitation(path: Path, episodes: Sequence[Episode], infos: Sequence[Any] | None = None, **extra: Any) -> Path:
    """Write imitation's npz; `terminal` is set where an episode has a flag."""
    lengths = [len(one) for one in episodes]
    steps = sum(lengths)
    arrays: dict[str, Any] = {
        "obs": np.concatenate([one.observations for one in episodes]),
        "acts": np.concatenate([one.actions for one in episodes]),
        "infos": np.array(list(infos) if infos is not None else [{}] * steps, dtype=object),
        "terminal": np.array([one.terminated or one.truncated for one in episodes]),
        "indices": np.cumsum(lengths)[:-1],
        "rews": np.concatenate([one.rewards for one in episodes]),
    }
    arrays |= extra
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


def imitation_table(episodes: Sequence[Episode], *, limits: bool = False) -> pa.Table:
    """Lay episodes out as imitation's Hugging Face datasets: a trajectory a row."""

    def infos(one: Episode) -> list[str]:
        last = {"TimeLimit.truncated": one.truncated} if limits else {}
        return ["{}"] * (len(one) - 1) + [json.dumps(last)] if len(one) else []

    return pa.table(
        {
            "obs": pa.array([one.observations.tolist() for one in episodes], pa.list_(pa.list_(pa.float32()))),
            "acts": pa.array([one.actions.tolist() for one in episodes], pa.list_(pa.list_(pa.float32()))),
            "infos": pa.array([infos(one) for one in episodes], pa.list_(pa.string())),
            "terminal": pa.array([one.terminated or one.truncated for one in episodes]),
            "rews": pa.array([one.rewards.tolist() for one in episodes], pa.list_(pa.float32())),
        }
    )


def write_dataset_folder(folder: Path, table: pa.Table, parts: int = 2) -> Path:
    """Write a table as `save_to_disk` of the datasets library does."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{parts:05d}.arrow" for number in range(parts)]
    size = -(-table.num_rows // parts)
    for number, name in enumerate(names):
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table.slice(number * size, size))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def write_parquet_folder(folder: Path, table: pa.Table) -> Path:
    """Write a table as the Hugging Face hub keeps it."""
    (folder / "data").mkdir(parents=True)
    pq.write_table(table, folder / "data" / "train-00000-of-00001.parquet", row_group_size=2)
    return folder


def write_d3rlpy(path: Path, episodes: Sequence[Episode], *, version: str = "2.1", **extra: Any) -> Path:
    """Write d3rlpy's file: an array for each column of each episode."""
    with h5py.File(path, "w") as file:
        file["columns"] = ["observations", "actions", "rewards", "terminated"]
        file["num_episodes"], file["version"] = len(episodes), version
        for number, one in enumerate(episodes):
            file[f"observations_{number}"] = one.observations[:-1]
            file[f"actions_{number}"] = one.actions
            file[f"rewards_{number}"] = one.rewards.reshape(-1, 1)
            file[f"terminated_{number}"] = one.terminated
        for name, value in extra.items():
            if name in file:
                del file[name]
            if value is not None:
                file[name] = value
    return path


def write_dapg(path: Path, episodes: Sequence[Episode], protocol: int = 3, **extra: Any) -> Path:
    """Write DAPG's pickle."""
    paths = [
        {
            "observations": one.observations[:-1], "actions": one.actions, "rewards": one.rewards,
            "init_state_dict": {"qpos": one.observations[0]}, **extra,
        }
        for one in episodes
    ]  # fmt: skip
    path.write_bytes(pickle.dumps(paths, protocol))
    return path


def write_flagged_paths(path: Path, episodes: Sequence[Episode]) -> Path:
    """Write the pickle of paths with next observations and the flags of every step."""
    paths = []
    for one in episodes:
        flags = np.zeros((2, len(one)), bool)
        flags[:, -1:] = [[one.terminated], [one.truncated]]
        paths.append(
            {
                "observations": one.observations[:-1], "next_observations": one.observations[1:],
                "actions": one.actions, "rewards": one.rewards, "terminals": flags[0], "timeouts": flags[1],
            }
        )  # fmt: skip
    path.write_bytes(pickle.dumps(paths))
    return path


def ring(episodes: Sequence[Sequence[Episode]], size: int, *, memory: bool = False) -> dict[str, Array]:
    """Fill a buffer of Stable-Baselines3 with the episodes of each environment, as many steps as all of them have."""
    steps = min(sum(map(len, one)) for one in episodes)
    count = len(episodes)
    first = episodes[0][0]
    arrays = {
        "observations": np.zeros((size, count, *first.observations.shape[1:]), "float32"),
        "next_observations": np.zeros((size, count, *first.observations.shape[1:]), "float32"),
        "actions": np.zeros((size, count, *first.actions.shape[1:]), "float32"),
        "rewards": np.zeros((size, count), "float32"),
        "dones": np.zeros((size, count), "float32"),
        "timeouts": np.zeros((size, count), "float32"),
    }
    position = 0
    rows = [[(one, step) for one in stream for step in range(len(one))] for stream in episodes]
    for at in range(steps):
        for environment in range(count):
            one, step = rows[environment][at]
            last = step == len(one) - 1
            arrays["observations"][position, environment] = one.observations[step]
            after = arrays["observations"] if memory else arrays["next_observations"]
            after[(position + 1) % size if memory else position, environment] = one.observations[step + 1]
            arrays["actions"][position, environment] = one.actions[step]
            arrays["rewards"][position, environment] = one.rewards[step]
            arrays["dones"][position, environment] = last and (one.terminated or one.truncated)
            arrays["timeouts"][position, environment] = last and one.truncated
        position = (position + 1) % size
    if memory:
        del arrays["next_observations"]
    return arrays | {"pos": np.array(position), "full": np.array(steps >= size)}


def write_tianshou(
    path: Path, streams: Sequence[Sequence[Episode]], size: int, *, following: bool = True, **changed: Any
) -> Path:
    """Write the buffer of Tianshou with a ring of `size` places for the steps of each stream, as `save_hdf5` does.

    `changed` are arrays and attributes by their names in the file, with `_meta__NAME` for the rows; None is left out.
    """
    first, places = streams[0][0], size * len(streams)
    rows: dict[str, Array] = {
        "obs": np.zeros((places, *first.observations.shape[1:]), "float32"),
        "act": np.zeros((places, *first.actions.shape[1:]), "float32"), "rew": np.zeros(places, "float32"),
        **{name: np.zeros(places, bool) for name in ("terminated", "truncated", "done")},
        "info/t": np.zeros(places, "int64"),
    }  # fmt: skip
    rows |= {"obs_next": np.zeros_like(rows["obs"])} if following else {}
    lengths, newest = [], []
    for number, stream in enumerate(streams):
        steps = [(one, at) for one in stream for at in range(len(one))]
        for count, (one, at) in enumerate(steps):
            row, last = number * size + count % size, at == len(one) - 1
            values = {
                "obs": one.observations[at], "obs_next": one.observations[at + 1], "act": one.actions[at],
                "rew": one.rewards[at], "info/t": count, "terminated": last and one.terminated,
                "truncated": last and one.truncated, "done": last and (one.terminated or one.truncated),
            }  # fmt: skip
            for name in rows:
                rows[name][row] = values[name]
        lengths.append(min(len(steps), size))
        newest.append(number * size + max(0, len(steps) - 1) % size)
    attributes: dict[str, Any] = {"maxsize": places, "stack_num": 1, "_size": 0, "_insertion_idx": 0}
    parts: dict[str, Any] = {"last_index": newest, "_indices": np.arange(places)}
    if len(streams) == 1:
        following_row = sum(map(len, streams[0])) % size if lengths[0] == size else lengths[0]
        attributes |= {"_size": lengths[0], "_insertion_idx": following_row}
    else:
        edges = np.arange(len(streams) + 1) * size
        attributes["buffer_num"] = len(streams)
        parts |= {"_extend_offset": edges, "_offset": edges[:-1], "_lengths": lengths}
    parts |= {f"_meta/{name}": values for name, values in rows.items()}
    for name, value in changed.items():
        name = name.replace("_meta__", "_meta/").replace("__", "/")
        (attributes if name in attributes else parts)[name] = value
    with h5py.File(path, "w") as file:
        file.attrs.update({name: value for name, value in attributes.items() if value is not None})
        for name, value in parts.items():
            if value is not None:
                file[name] = value
                file[name].attrs["__data_type__"] = "ndarray"
    return path


@dataclass(frozen=True)
class Demo:
    """An episode: `columns` by their path in the group, `attributes` of the group."""

    columns: Mapping[str, Array]
    attributes: Mapping[str, Any] = field(default_factory=dict)


def robomimic_demo(
    steps: int, *, seed: int = 0, next_obs: bool = True, rewards: bool = True, success: bool = True, obs: bool = True
) -> Demo:
    """Make a demonstration of random numbers; its last step has `dones`, and a reward of 1 with `success`."""
    draw = np.random.default_rng(seed)
    hand, cubes = draw.normal(size=(steps + 1, 3)), draw.normal(size=(steps + 1, 2, 2)).astype("f4")
    columns: dict[str, Array] = {"actions": draw.normal(size=(steps, 2)), "states": draw.normal(size=(steps, 5))}
    if obs:
        columns |= {"obs/hand": hand[:-1], "obs/scene/cubes": cubes[:-1]}
        columns |= {"next_obs/hand": hand[1:], "next_obs/scene/cubes": cubes[1:]} if next_obs else {}
    if rewards:
        columns["rewards"], columns["dones"] = np.zeros(steps), np.zeros(steps, "i8")
        columns["rewards"][steps - 1 :], columns["dones"][steps - 1 :] = float(success), 1
    return Demo(columns, {"num_samples": steps})


def roboset_trial(steps: int, *, seed: int = 0, done: bool = False) -> Demo:
    """Make a trial of random numbers; its last step has `done`, if asked for."""
    draw = np.random.default_rng(seed)
    columns: dict[str, Array] = {
        "observations": draw.normal(size=(steps, 4)), "actions": draw.normal(size=(steps, 2)),
        "rewards": draw.normal(size=steps), "done": np.zeros(steps, bool),
        "env_infos/time": np.arange(steps, dtype="f8"), "env_infos/obs_dict/qp": draw.normal(size=(steps, 3)),
    }  # fmt: skip
    columns["done"][steps - 1 :] = done
    return Demo(columns)


def write_groups(
    path: Path, groups: Mapping[str, Demo], *, attributes: Mapping[str, Mapping[str, Any]] | None = None,
    more: Mapping[str, Any] | None = None, **options: Any,
) -> Path:  # fmt: skip
    """Write groups by their path; `attributes` by the path of a group, `more` are further datasets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, demo in groups.items():
            group = file.create_group(name)
            for column, values in demo.columns.items():
                group.create_dataset(column, data=values, **(options if np.size(values) else {}))
            group.attrs.update(demo.attributes)
        for name, values in (attributes or {}).items():
            file.require_group(name).attrs.update(values)
        for name, value in (more or {}).items():
            file[name] = value
    return path


def write_demos(path: Path, demos: Mapping[int, Demo], *, masks: Mapping[str, Sequence[str]] | None = None) -> Path:
    """Write demonstrations by their numbers, as robomimic does, with splits."""
    attributes = {"data": {"total": sum(len(demo.columns.get("actions", ())) for demo in demos.values())}}
    more = {f"mask/{key}": np.array(names, "S") for key, names in (masks or {}).items()}
    return write_groups(
        path, {f"data/demo_{number}": demo for number, demo in demos.items()}, attributes=attributes, more=more
    )


def write_trials(path: Path, trials: Mapping[int, Demo]) -> Path:
    """Write trials by their numbers, as RoboHive does."""
    return write_groups(path, {f"Trial{number}": trial for number, trial in trials.items()})


def leaves(group: Any, prefix: str = "") -> dict[str, Array]:
    """Read all arrays below a group of an open file, by their paths."""
    found: dict[str, Array] = {}
    for name in group:
        item = group[name]
        if isinstance(item, h5py.Group):
            found |= leaves(item, f"{prefix}{name}/")
        else:
            found[prefix + name] = item[()]
    return found


def plain_episodes(path: Path, inside: str, prefix: str) -> dict[int, dict[str, Array]]:
    """Read all episodes by number, in numeric order."""
    with h5py.File(path) as file:
        found = {int(name.removeprefix(prefix)): leaves(file[inside][name]) for name in file[inside]}
    return dict(sorted(found.items()))


def after_final_step(columns: Mapping[str, Array], *, terminated: bool, choice: str = "auto") -> dict[str, Array]:
    """Rows of an episode without a last observation, once it is decided about its last step; `next:` follows."""
    repeat = choice == "repeat" or (choice == "auto" and terminated)
    rows = len(columns["actions"]) - (not repeat)
    kept = {name: values[:rows] for name, values in columns.items()}
    following = {
        f"next:{name}": np.concatenate((values[1:], values[-1:])) if repeat else values[1:]
        for name, values in columns.items()
    }
    return kept | following


DATA = Path(__file__).parents[1] / "data"
DOOR = "DAPG(expert)/door_v2d-v1"
LIFT = "lift/ph/low_dim"
ROBOSET_IDS = [DOOR, f"{DOOR}b", "FK1-v4(human)/human_demos_by_playdata"]
ROBOMIMIC_IDS = ["can/ph/low_dim_v141", "can/ph/low_dim_v15", "lift/ph/demo", LIFT]


def lay_out_folders(root: Path) -> Path:
    """Make both repositories; return `root`."""
    roboset = root / "jdvakil" / "RoboSet_Sim"
    shutil.copytree(DATA / "roboset" / DOOR, roboset / DOOR)
    write_trials(roboset / f"{DOOR}b" / "door_seed0.h5", {0: roboset_trial(4, seed=7, done=True)})
    for number in (60, 9):
        name = f"FK1_RelaxFixed_v2d-v4_{number}_trace.h5"
        write_trials(roboset / "FK1-v4(human)/human_demos_by_playdata" / name, {number: roboset_trial(5, seed=number)})
    (roboset / "README.md").write_text("MIT", encoding="utf-8")
    robomimic = root / "robomimic" / "robomimic_datasets"
    lift = robomimic / "v1.5/lift/ph"
    lift.mkdir(parents=True)
    shutil.copy(DATA / "robomimic" / "low_dim_v15.hdf5", lift / "low_dim_v15.hdf5")
    write_demos(lift / "demo_v15.hdf5", {0: robomimic_demo(4, obs=False, rewards=False)})
    for path in ("v1.5/can/ph/low_dim_v15.hdf5", "v1.4/can/ph/low_dim_v141.hdf5"):
        write_demos(robomimic / path, {0: robomimic_demo(6, seed=len(path)), 3: robomimic_demo(3, seed=3)})
    return root


Row = dict[str, Any]


def rows_of_episode(
    eps_id: Any, length: int, *, end: str = "terminated", seed: int = 0, flags: str = "dones", following: bool = True
) -> list[Row]:
    """Make the transitions of an episode that ends `terminated`, `truncated`, or without a flag (`none`)."""
    draw = np.random.default_rng(seed)
    observations = draw.normal(size=(length + 1, 3)).round(6).tolist()
    rows: list[Row] = []
    for step in range(length):
        last = step == length - 1
        row: Row = {
            "eps_id": eps_id, "t": step, "obs": observations[step], "actions": int(draw.integers(4)),
            "rewards": round(float(draw.normal()), 6), "infos": {}, "action_prob": round(float(draw.random()), 6),
        }  # fmt: skip
        if following:
            row["new_obs"] = observations[step + 1]
        if flags == "dones":
            row["dones"] = last and end != "none"
        else:
            row["terminateds"], row["truncateds"] = last and end == "terminated", last and end == "truncated"
        rows.append(row)
    return rows


def without(rows: Sequence[Row], *names: str) -> list[Row]:
    """Leave columns out."""
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


def as_batch(rows: Sequence[Row], kind: str = "SampleBatch") -> Row:
    """Lay rows out as a SampleBatch."""
    return {"type": kind, **{name: [row[name] for row in rows] for name in rows[0]}}


def packed(values: Any, dtype: str = "float32") -> str:
    """Compress a column as RLlib does: base64 of an LZ4 frame of a pickled array."""
    data = pickle.dumps(np.asarray(values, dtype))
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "lz4") as stream:
        stream.write(data)
    return base64.b64encode(sink.getvalue().to_pybytes()).decode()


def write_lines(path: Path, documents: Sequence[Row]) -> Path:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in documents))
    return path


def write_parquet(path: Path, rows: Sequence[Row], **options: Any) -> Path:
    """Write a Parquet file of transitions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(without(rows, "infos")), path, **options)
    return path


def plain_lines(path: Path) -> list[Row]:
    """Read transitions from lines, batches or transitions, in the order of the file."""
    rows: list[Row] = []
    for line in path.read_text().splitlines():
        document = json.loads(line)
        if document.pop("type", None) is None:
            rows.append(document)
        else:
            count = len(document["rewards"])
            rows += [{name: values[at] for name, values in document.items()} for at in range(count)]
    return rows


def plain_parquet(paths: Sequence[Path]) -> list[Row]:
    """Read transitions from Parquet files, in the order of the files."""
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def entries(data: Any, lookback: int = 0) -> dict[str, Any]:
    """A part of an episode of the new API stack."""
    return {"data": data, "lookback": lookback, "finalized": False, "space": None}


def packed_episode(rows: Sequence[Row], *, repeats: int = 0, first: int = 0, **extra: Any) -> bytes:
    """Pack transitions as a piece of an episode whose first `repeats` rows repeat the end of the piece before it."""
    column = {name: [row[name] for row in rows] for name in rows[0]}
    episode = {
        "id_": str(rows[0]["eps_id"]), "agent_id": None, "module_id": None,
        "observations": entries([*column["obs"], column["new_obs"][-1]], repeats),
        "actions": entries(column["actions"], repeats), "rewards": entries(column["rewards"], repeats),
        "infos": entries([{}] * (len(rows) + 1), repeats),
        "extra_model_outputs": {"action_prob": entries(column["action_prob"], repeats)},
        "is_terminated": rows[-1]["terminateds"], "is_truncated": rows[-1]["truncateds"],
        "t_started": first, "t": first + len(rows) - repeats, "custom_data": {},
    } | extra  # fmt: skip
    return bytes(msgpack.packb(episode, default=_as_msgpack_numpy))


def _as_msgpack_numpy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        kind = b"O" if value.dtype.hasobject else b""
        data = pickle.dumps(value) if kind else value.tobytes()
        return {b"nd": True, b"type": value.dtype.str, b"kind": kind, b"shape": value.shape, b"data": data}
    return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}


def write_items(path: Path, items: Sequence[bytes]) -> Path:
    """Write packed episodes as `ray.data.from_items` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"item": pa.array(items, pa.binary())}), path, row_group_size=2)
    return path


def tensors(rows: np.ndarray[Any, Any], *, stated: str | bytes | None = None) -> tuple[pa.Field, pa.Array]:
    """A column of tensors as Ray writes it: lists, and the shape of a row in the metadata of the field."""
    flat = pa.array(rows.reshape(len(rows), -1).tolist(), pa.large_list(pa.from_numpy_dtype(rows.dtype)))
    return extended("ray.data.arrow_tensor_v2", stated or json.dumps(rows.shape[1:]), flat)


def extended(name: str, about: str | bytes, values: pa.Array) -> tuple[pa.Field, pa.Array]:
    """A column of an extension type that pyarrow does not know."""
    metadata = {"ARROW:extension:name": name, "ARROW:extension:metadata": about}
    return pa.field("", values.type, metadata=metadata), values


def write_extended(path: Path, columns: dict[str, Any]) -> Path:
    """Write columns to Parquet: lists, arrays of Arrow, or what `extended` returns."""
    made = {
        name: one if isinstance(one, tuple) else (pa.field("", pa.array(one).type), pa.array(one))
        for name, one in columns.items()
    }
    fields = [field.with_name(name) for name, (field, _) in made.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_arrays([array for _, array in made.values()], schema=pa.schema(fields)), path)
    return path
