"""The command `rbtool`: completion, which has to be fast, or a verb."""

from __future__ import annotations

import os

from .complete import SHELL_VARIABLE, complete


def main() -> None:
    """Complete the words in the environment where a shell asks for it; else run the command line on `sys.argv`."""
    if SHELL_VARIABLE in os.environ:
        from .output import Output

        Output().text(complete(os.environ))
        return
    from .app import main as run

    run()
