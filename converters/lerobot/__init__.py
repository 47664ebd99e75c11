"""Datasets of LeRobot, v2.0, v2.1 and v3.0: Parquet files of frames, with videos."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="lerobot",
        package=__name__,
        order=18,
        reader="reader:LerobotReader",
        source="reader:LerobotSource",
        sink="export:LerobotExporter",
        written="LeRobot v3.0",
        opened=(
            "",
            "from lerobot.datasets.lerobot_dataset import LeRobotDataset; print(LeRobotDataset('local/data', root={}))",
        ),
        title="LeRobot",
        example=("lerobot/pusht", "pusht"),
        found="a folder with meta/info.json that states a codebase_version",
        layout="packed",
        ends="a change of episode_index; terminated by next.done or next.success, else truncated; or --ends",
        final="no",
        extra="video",
        streams=True,
        keeps_video=True,
    ),
)
