"""The command `rbtool`: completion, which has to be fast, or a verb."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Complete a command line for a shell, if the environment says so; else run the command line on `sys.argv`.

    Ctrl-C and SIGTERM during the imports, which take a moment, are reported as they are while a verb runs.
    """
    try:
        from .complete import SHELL_VARIABLE, complete

        if SHELL_VARIABLE in os.environ:
            from .output import Output

            Output().text(complete(os.environ))
            return
        from .failures import claim_streams, watch_signals

        claim_streams()
        watch_signals()
        from .app import main as run

        run()
    except BaseException as error:
        from .failures import Stopped, report
        from .output import Output

        if not isinstance(error, KeyboardInterrupt | Stopped):
            raise
        sys.exit(report(error, Output.from_arguments(sys.argv[1:])))
