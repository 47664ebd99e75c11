"""RLDS datasets prepared by TensorFlow Datasets: TFRecord or ArrayRecord shards, read without TensorFlow."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="rlds",
        package=__name__,
        order=17,
        reader="reader:RldsReader",
        source="reader:RldsSource",
        example=("bridge/0.1.0", "bridge 0.1.0"),
        cache_variable="TFDS_DATA_DIR",
        sink="export:RldsExporter",
        title="RLDS",
        found="a folder with features.json that has steps, dataset_info.json and TFRecord or ArrayRecord shards",
        ends="the end of the record; terminated by is_terminal in its last step, else truncated",
        written="RLDS of TensorFlow Datasets",
        opened=("", "import tensorflow_datasets as tfds; print(tfds.builder_from_directory({}).as_dataset())"),
        layout="packed",
        final="where stored",
    ),
)
