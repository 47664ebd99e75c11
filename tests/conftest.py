"""What holds for every test."""

import gc
import signal


def pytest_configure() -> None:
    """Give signals that whoever started us ignores (`nohup`, `&` in a script) their usual meaning back.

    An ignored signal stays ignored in every process that a test starts, and would never end it.
    """
    usual = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL, "SIGHUP": signal.SIG_DFL}
    for name, handler in usual.items():
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_finish() -> None:
    """Take what was imported out of the garbage collection: a test that collects then visits its own objects alone."""
    gc.collect()
    gc.freeze()
