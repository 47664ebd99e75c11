"""Operations of other packages, found by their entry points."""

from __future__ import annotations

from pathlib import Path

import pytest
from scale_reward import ScaleReward

from rbtool.core.errors import UsageError
from rbtool.core.preprocess.operations.documents import pipeline_program, program_of
from rbtool.core.preprocess.operations.program import ProgramProcessor
from rbtool.core.testing.operations import sample_block

PIPELINE = '[[operation]]\nname = "scale-reward"\nfactor = 0.5\n\n[[operation]]\nname = "flatten"\n'


def installed(folder: Path, patch: pytest.MonkeyPatch, entry: str) -> Path:
    """Put a distribution with an entry point on the path, and write a pipeline that uses it."""
    info = folder / "scale_reward-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scale-reward\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rbtool.operations]\n{entry}\n")
    patch.syspath_prepend(str(folder))
    pipeline = folder / "pipeline.toml"
    pipeline.write_text(PIPELINE)
    return pipeline


def test_a_pipeline_uses_an_operation_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = installed(tmp_path, monkeypatch, "scale-reward = scale_reward:ScaleReward")
    assert pipeline_program(pipeline).operations[0] == ScaleReward(0.5)


def test_without_the_package_the_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = installed(tmp_path, monkeypatch, "other = scale_reward:ScaleReward")
    with pytest.raises(UsageError, match="'scale-reward', which is none"):
        pipeline_program(pipeline)


def test_an_entry_point_that_is_no_operation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = installed(tmp_path, monkeypatch, "scale-reward = pathlib:Path")
    with pytest.raises(UsageError, match="pathlib:Path is no operation"):
        pipeline_program(pipeline)


def test_a_result_of_code_that_may_change_is_never_taken_for_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = installed(tmp_path, monkeypatch, "scale-reward = scale_reward:ScaleReward")
    fields, _ = sample_block()
    foreign = ProgramProcessor(pipeline_program(pipeline), fields)
    assert not foreign.is_described()
    assert foreign.fingerprint() == ProgramProcessor(pipeline_program(pipeline), fields).fingerprint() != ""
    built_in = ProgramProcessor(program_of({"flatten": True}), fields)
    assert built_in.is_described()
    assert built_in.fingerprint() == ""
