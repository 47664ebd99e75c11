"""D4RL's flat HDF5 files: read, downloaded, exported, and opened as buffers."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="d4rl",
        package=__name__,
        order=1,
        reader="reader:D4rlReader",
        source="reader:D4rlSource",
        sink="export:D4rlExporter",
        title="D4RL",
        written="flat HDF5",
        opened=("", "import h5py; h5py.File({}).visititems(print)"),
        example=("hopper-medium-v2", "hopper-medium"),
        cache_variable="D4RL_DATASET_DIR",
        found="HDF5 with observations, actions, rewards and terminals at the root",
        ends="terminals or timeouts, or episode_terminals; without them the time limit of the id, or --horizon",
        final="where stored",
    ),
)
