"""Measure all speeds that have a limit, next to TorchRL, in one run: `make bench`.

    python benchmarks/table.py [--rows 1000000] [--rounds 15] [--only PART] [--cpu] [--json build/bench.json]

TorchRL has to be installed in the same environment; without it, only rbtool's times are shown. TorchRL's priority trees
require certain versions of torch; with another version they are left out. The parts come from storages.py, samplers.py,
checkpointers.py, incremental.py and preprocess.py. All sides take turns in one process with one torch thread on rows of
758 bytes; figures are medians, each with its limit. Random batches are also compared with two lower bounds: the same
bytes gathered by NumPy's `take` from one array, and copied in one piece. The versions of all libraries are printed
first, with a warning if tensordict or TorchRL is older than the version that this repository tests with. facts.py makes
the table of the README from the JSON.

A virtual machine that returns free memory to its host (free page reporting) needs 8 µs for each page that it takes
back, five times the time of writing the page: figures for new files and new memory then mostly measure the host. As
root, `echo 11 > /sys/module/page_reporting/parameters/page_reporting_order` switches this off, if the file exists.
"""

from __future__ import annotations

import checkpointers
import incremental
import preprocess
import samplers
import storages
from shared.claims import main

PARTS = (
    storages.random, storages.images, storages.writes, storages.steps, samplers.slices,
    samplers.prioritized_slices_of_torchrl, samplers.prioritized_slices, samplers.priorities, *checkpointers.PARTS,
    incremental.incremental, preprocess.chunk,
)  # fmt: skip

if __name__ == "__main__":
    main(__doc__, PARTS)
