"""Writes datasets as TensorFlow Datasets does, and reads them plainly: TFRecord shards, Examples, and two documents."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from PIL import Image

Spec = Mapping[str, Any]
"""Features by name: a mapping, or a tuple of `tensor`, `text`, `image`, `label` or `sequence` and what describes it."""
FLAGS: Spec = dict.fromkeys(("is_first", "is_last", "is_terminal"), ("tensor", "bool", ()))
PLAIN: Spec = {
    **FLAGS, "observation": ("tensor", "float32", (3,)), "action": ("tensor", "float32", (2,)),
    "reward": ("tensor", "float32", ()),
}  # fmt: skip
RICH: Spec = {
    **FLAGS,
    "observation": {
        "image": ("image", (6, 5, 3), "png"), "wrist": ("image", (6, 5, 3), "jpeg"),
        "depth": ("image", (4, 3, 1), "png"),
        "state": ("tensor", "float64", (2, 2)), "task": ("text",), "ids": ("tensor", "uint8", (3,)),
        "nothing": ("tensor", "float32", (0,)), "count": ("tensor", "int64", ()),
    },
    "action": {"world": ("tensor", "float32", (2,)), "gripper": ("tensor", "bool", ()), "mode": ("label", 4)},
    "reward": ("tensor", "float32", ()), "discount": ("tensor", "float32", ()), "language_instruction": ("text",),
    "points": ("sequence", ("tensor", "float32", (2,)), -1), "taps": ("sequence", ("tensor", "int32", ()), -1),
    "pair": ("sequence", ("tensor", "int16", ()), 2), "raw": ("tensor", "uint16", (2, 3), "bytes"),
    "packed": ("tensor", "float32", (4,), "zlib"),
}  # fmt: skip
METADATA: Spec = {
    "episode_metadata": {
        "file_path": ("text",), "invalid": ("tensor", "bool", ()), "number": ("tensor", "int32", ()),
        "scale": ("tensor", "float32", (2,)),
    }
}  # fmt: skip
_CLASS = "tensorflow_datasets.core.features."


def described(spec: Any) -> dict[str, Any]:
    """The description of features as in `features.json`."""
    if isinstance(spec, Mapping):
        inner = {name: described(part) for name, part in spec.items()}
        return {"pythonClassName": f"{_CLASS}features_dict.FeaturesDict", "featuresDict": {"features": inner}}
    kind, *more = spec
    if kind == "tensor":
        dtype, shape, encoding = (*more, "none")[:3]
        stated = {"dimensions": [str(length) for length in shape]} if shape else {}
        return {"pythonClassName": "Tensor", "tensor": {"shape": stated, "dtype": dtype, "encoding": encoding}}
    if kind == "image":
        dtype = more[2] if len(more) > 2 else "uint8"
        shape = {"dimensions": [str(length) for length in more[0]]}
        return {"pythonClassName": "Image", "image": {"shape": shape, "dtype": dtype, "encodingFormat": more[1]}}
    if kind == "label":
        return {"pythonClassName": "ClassLabel", "classLabel": {"numClasses": str(more[0])}}
    if kind == "sequence":
        return {"pythonClassName": "Sequence", "sequence": {"feature": described(more[0]), "length": str(more[1])}}
    return {"pythonClassName": "Text", "text": {}} if kind == "text" else {"pythonClassName": f"x.{kind}"}


def described_before(node: Any) -> dict[str, Any]:
    """The same description as TensorFlow Datasets wrote it before 4.6."""
    if "featuresDict" in node:
        kind, parts = "features_dict.FeaturesDict", node["featuresDict"]["features"]
        content: Any = {name: described_before(part) for name, part in parts.items()}
    elif "sequence" in node:
        length = int(node["sequence"]["length"])
        kind = "sequence_feature.Sequence"
        content = {"feature": described_before(node["sequence"]["feature"]), "length": None if length < 0 else length}
    else:
        entry = next(name for name in node if name != "pythonClassName")
        kind = {"tensor": "tensor_feature.Tensor", "text": "text_feature.Text", "image": "image_feature.Image"}.get(
            entry, "class_label_feature.ClassLabel"
        )
        before = {"numClasses": "num_classes", "encodingFormat": "encoding_format"}
        content = {before.get(name, name): value for name, value in node[entry].items()}
        if "num_classes" in content:
            content["num_classes"] = int(content["num_classes"])
        if "shape" in content:
            shape = [int(length) for length in content["shape"].get("dimensions", ())]
            content["shape"] = [None if length < 0 else length for length in shape]
    return {"type": f"{_CLASS}{kind}", "content": content}


def varint(number: int) -> bytes:
    """A number as protobuf writes it; a negative one takes ten bytes."""
    number &= 0xFFFFFFFFFFFFFFFF
    made = bytearray()
    while number >= 0x80:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def message(number: int, data: bytes) -> bytes:
    """A field that has a length."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def feature(values: Any) -> bytes:
    """A Feature: byte strings, floats or integers."""
    if isinstance(values, list) and (not values or isinstance(values[0], bytes)):
        return message(1, b"".join(message(1, value) for value in values))
    array = np.asarray(values).reshape(-1)
    if array.dtype.kind == "f":
        return message(2, message(1, array.astype("<f4").tobytes()))
    return message(3, message(1, b"".join(varint(int(value)) for value in array)))


def example(lists: Mapping[str, Any]) -> bytes:
    """An Example with these lists; names are in the order given."""
    entries = (message(1, message(1, name.encode()) + message(2, feature(values))) for name, values in lists.items())
    return message(1, b"".join(entries))


def encoded(pixels: Any, form: str) -> bytes:
    """An image file of pixels `[height, width, channels]`."""
    held = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(held, form)
    return held.getvalue()


def stored(spec: Any, values: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The lists of a feature of steps: one after the other, as TensorFlow Datasets flattens them."""
    if isinstance(spec, Mapping):
        for part, inner in spec.items():
            yield from stored(inner, values[part], f"{name}/{part}")
    elif spec[0] == "image":
        yield name, [encoded(one, spec[2]) for one in values]
    elif spec[0] == "text":
        yield name, [one.encode() for one in values]
    elif spec[0] == "sequence":  # also those of a stated length
        flat = [np.asarray(one, spec[1][1]).reshape(-1) for one in values]
        yield f"{name}/ragged_flat_values", np.concatenate([np.zeros(0, spec[1][1]), *flat])
        yield f"{name}/ragged_row_lengths_0", np.array([len(one) for one in values], "i8")
    elif spec[0] == "tensor" and spec[-1] in ("bytes", "zlib"):
        raw = [np.ascontiguousarray(one).tobytes() for one in values]
        yield name, [zlib.compress(one) for one in raw] if spec[-1] == "zlib" else raw
    elif np.asarray(values).size:
        yield name, values


def record(steps: Spec, episode: Mapping[str, Any], metadata: Spec | None = None) -> bytes:
    """The Example of an episode."""
    lists = dict(stored(steps, episode["steps"], "steps"))
    for top, parts in (metadata or {}).items():
        for name, spec in parts.items():
            value = episode[top][name]
            lists[f"{top}/{name}"] = [value.encode()] if spec[0] == "text" else value
    return example(lists)


def masked(data: bytes) -> bytes:
    """The checksum of TFRecord."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def shard_of(records: Sequence[bytes]) -> bytes:
    """A TFRecord file."""
    framed = (struct.pack("<Q", len(one)) + masked(struct.pack("<Q", len(one))) + one + masked(one) for one in records)
    return b"".join(framed)


def write_shard(path: Path, records: Sequence[bytes]) -> Path:
    """Write a TFRecord file."""
    path.write_bytes(shard_of(records))
    return path


def write_dataset(
    folder: Path,
    splits: Mapping[str, Sequence[Sequence[bytes]]],
    steps: Spec,
    metadata: Spec | None = None,
    name: str = "toy",
) -> Path:
    """Write a version of a dataset: `splits` are the records of each shard; return its folder."""
    folder.mkdir(parents=True)
    for split, shards in splits.items():
        for number, records in enumerate(shards):
            write_shard(folder / f"{name}-{split}.tfrecord-{number:05}-of-{len(shards):05}", records)
    top = {"steps": ("sequence", steps, -1), **(metadata or {})}
    (folder / "features.json").write_text(json.dumps(described(top), indent=1))
    info = {
        "name": name, "version": folder.name, "fileFormat": "tfrecord",
        "splits": [
            {"name": split, "shardLengths": [str(len(shard)) for shard in shards], "numBytes": "1",
             "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"}
            for split, shards in splits.items()
        ],
    }  # fmt: skip
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


def random_values(spec: Any, steps: int, draw: np.random.Generator) -> Any:
    """Values of a feature for each step."""
    if isinstance(spec, Mapping):
        return {name: random_values(part, steps, draw) for name, part in spec.items()}
    if spec[0] == "image":
        return draw.integers(0, 256, (steps, *spec[1]), np.uint8)
    if spec[0] == "text":
        return [draw.choice(["", "pick up", "grüße", "open the drawer"]) for _ in range(steps)]
    if spec[0] == "label":
        return draw.integers(1, spec[1], steps)
    if spec[0] == "sequence":
        lengths = [int(draw.integers(0, 4)) for _ in range(steps)] if spec[2] < 0 else [spec[2]] * steps
        return [random_values(spec[1], length, draw) for length in lengths]
    shape, dtype = (steps, *spec[2]), np.dtype(spec[1])
    if dtype.kind == "f":
        return (draw.normal(size=shape) + 3).astype("f4").astype(dtype)
    if dtype.kind == "b":
        return draw.integers(0, 2, shape) == 1
    low = 1 if dtype.kind == "u" else np.iinfo(dtype).min
    return draw.integers(low, np.iinfo(dtype).max, shape, dtype)


def random_episode(
    steps: int, spec: Spec = PLAIN, *, seed: int = 0, last: str = "observation", ends: bool = True
) -> Any:
    """An episode of so many steps; the `last` is an observation only, with zeros for an action, or a step."""
    draw = np.random.default_rng(seed)
    values = random_values(spec, steps, draw)
    values |= {name: np.zeros(steps, bool) for name in FLAGS}
    if steps:
        values["is_first"][0] = True
        values["is_last"][-1] = ends
        values["is_terminal"][-1] = ends and seed % 2 == 0
        if last == "observation":
            for column in [values["reward"], *leaves(values["action"])]:
                column[-1] = 0
    metadata = {
        "file_path": f"/data/{seed}",
        "invalid": seed == 3,
        "number": seed - 1,
        "scale": np.array([0.1, seed], "f4"),
    }
    return {"steps": values, "episode_metadata": metadata}


def leaves(values: Any) -> list[Any]:
    """The arrays of a feature."""
    return [one for part in values.values() for one in leaves(part)] if isinstance(values, dict) else [values]


def plain_records(path: Path) -> Iterator[dict[str, Any]]:
    """Read a TFRecord file the plain way: the lists of each Example by name."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        [size] = struct.unpack_from("<Q", data, at)
        body = data[at + 12 : at + 12 + size]
        assert data[at + 8 : at + 12] == masked(data[at : at + 8])
        assert data[at + 12 + size : at + 16 + size] == masked(body)
        yield dict(plain_lists(body))
        at += 16 + size


def plain_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: number, and bytes or an integer."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = number()
        if tag & 7 == 0:
            yield tag >> 3, number()
        else:
            size = number() if tag & 7 == 2 else 4
            yield tag >> 3, data[at : at + size]
            at += size


def plain_lists(data: bytes) -> Iterator[tuple[str, Any]]:
    """The lists of an Example."""
    for _, features in plain_fields(data):
        for _, entry in plain_fields(features):
            parts = dict(plain_fields(entry))
            for kind, values in plain_fields(parts[2]):
                found = [value for _, value in plain_fields(values)]
                if kind == 2:
                    yield parts[1].decode(), np.frombuffer(b"".join(found), "<f4")
                elif kind == 3:
                    packed = [one for part in found for _, one in plain_fields(as_fields(part))]
                    yield parts[1].decode(), np.array(packed, np.uint64).astype(np.int64)
                else:
                    yield parts[1].decode(), found


def as_fields(packed: bytes) -> bytes:
    """Packed integers as fields of their own, each with the tag of field 1."""
    made, begins = bytearray(), True
    for byte in packed:
        made += bytes([8, byte] if begins else [byte])
        begins = byte < 0x80
    return bytes(made)
