"""`python -m rbtool` does what `rbtool` does."""

from __future__ import annotations

from .cli.start import main

if __name__ == "__main__":
    main()
