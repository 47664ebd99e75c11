"""Scripts of checks beside another library, each a function: they run in a process of their own, in either order of
imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any


def run_checks(script: Mapping[str, Any], helpers: Collection[str], names: Sequence[str] = ()) -> None:
    """Run the functions and classes that a script defines, or those named, and print a JSON document: how many ran, and
    a traceback for each that failed.

    Args:
        script: the `globals()` of the script.
        helpers: the names in it that are not checks.
        names: the checks to run; by default all.
    """
    checks = {
        name: check
        for name, check in script.items()
        if getattr(check, "__module__", None) == script["__name__"] and name[0] != "_" and name not in helpers
    }
    failures = {}
    for name in names or checks:
        try:
            checks[name]()
        except Exception:
            failures[name] = traceback.format_exc()
    print(json.dumps({"checks": len(names or checks), "failures": failures}))


def require_checks(script: Path, first: str) -> str:
    """Run a script that imports the library `first` before the other one, fail where a check did, and return what it
    wrote to stderr.
    """
    done = subprocess.run([sys.executable, script, first], capture_output=True, text=True, check=True)
    failures = json.loads(done.stdout.splitlines()[-1])["failures"]
    assert not failures, "\n".join(f"{name}: {trace}" for name, trace in failures.items())
    return done.stderr
