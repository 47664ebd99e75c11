"""`env`: versions, extras, folders and environment variables, for bug reports."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections import defaultdict
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import ClassVar

from .. import __version__
from ..declarations import declared
from ..format.locate import storage_root
from ..progress import redact
from ..results import Result

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)""")
_FOR_DEVELOPERS = frozenset({"dev", "docs", "peer"})
_OTHERS = re.compile(
    r"RBTOOL_\w+|HF_\w+|TFDS_DATA_DIR|(HTTPS?|NO|ALL)_PROXY|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|NO_COLOR|FORCE_COLOR"
    r"|CLICOLOR_FORCE|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES|NUMBA_\w+",
    re.IGNORECASE,
)
"""Environment variables that affect rbtool. Each source has more, its name with one of the endings below."""
_OF_SOURCES = ("URL", "REMOTE", "DATASET_DIR", "DATASETS_PATH")
_SECRET = re.compile(r"token|secret|password|key", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ExtraState:
    """Which packages of an extra are installed, with their versions, and which are missing."""

    packages: dict[str, str]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvResult(Result):
    """The facts about this machine that a bug report needs.

    Attributes:
        rbtool, python, system: versions, and the operating system.
        package: the folder that rbtool is imported from.
        processors: how many processors this process may use.
        packages: versions of the dependencies; None for one that is not installed.
        extras: the state of each extra.
        store: the folder of the datasets.
        free_bytes: the free space there; None before it exists.
        variables: the environment variables that affect rbtool, without secrets.
    """

    kind: ClassVar[str] = "env"
    rbtool: str
    python: str
    system: str
    package: Path
    processors: int
    packages: dict[str, str | None]
    extras: dict[str, ExtraState]
    store: Path
    free_bytes: int | None
    variables: dict[str, str]


def env() -> EnvResult:
    """Describe the environment: versions, extras, folders and variables.

    Finding versions imports nothing and uses no network. Values that look secret are replaced by `***`.

    Returns:
        The versions, folders and variables.

    >>> import rbtool
    >>> rbtool.env().packages["torch"] is not None
    True
    """
    needed, extras = _requirements()
    store = storage_root()
    return EnvResult(
        rbtool=__version__,
        python=f"{platform.python_version()} at {sys.executable}",
        system=platform.platform(),
        package=Path(__file__).parents[2],
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        packages={name: _version(name) for name in needed},
        extras={extra: _state(names) for extra, names in extras.items()},
        store=store,
        free_bytes=shutil.disk_usage(store).free if store.is_dir() else None,
        variables=_variables(),
    )


def _requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Return the names of the dependencies of rbtool, and of each extra."""
    needed, extras = [], defaultdict(list)
    try:
        lines = metadata.requires("rbtool") or []
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        lines = []
    for line in lines:
        found, extra = _NAME.match(line), _EXTRA.search(line)
        assert found is not None  # a requirement begins with a name
        if extra is None:
            needed.append(found[0])
        elif extra[1] not in _FOR_DEVELOPERS:
            extras[extra[1]].append(found[0])
    return sorted(needed), dict(sorted(extras.items()))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _state(names: list[str]) -> ExtraState:
    versions = {name: _version(name) for name in sorted(names)}
    return ExtraState(
        {name: version for name, version in versions.items() if version},
        tuple(name for name, version in versions.items() if version is None),
    )


def _variables() -> dict[str, str]:
    """Return the environment variables that affect rbtool, and no others, because those may be secret."""
    sources = declared()
    ours = {f"{source.name.upper()}_{what}" for source in sources for what in _OF_SOURCES}
    ours |= {source.cache_variable for source in sources}
    found = {name: value for name, value in os.environ.items() if name in ours or _OTHERS.fullmatch(name)}
    return {name: "***" if value and _SECRET.search(name) else redact(value) for name, value in sorted(found.items())}
