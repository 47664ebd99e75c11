"""Layout `ted` on disk: one memory-mapped file per field, as tensordict maps it. The rules of TED are in `core.ted`."""

from __future__ import annotations
