"""Compiled loops that copy rows of several columns, or packed records; importing this module imports numba.

numba caches the machine code in files, which later processes load: in the folder of this module if it is writable,
otherwise in the user's cache folder; the environment variable `NUMBA_CACHE_DIR` overrides both.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from .addresses import BLOCK, ask_for, copy_1, copy_4, copy_8, copy_bytes, copy_row, fence, stream_block

# How many rows ahead to prefetch: enough to keep as many reads in flight as the processor supports, and few enough that
# they are still in the cache when needed. After the first lines of wide rows the processor prefetches by itself.
_AHEAD = 16
_REACH = 8 * BLOCK
# A column of up to this many bytes stays in the caches of a core.
_NEAR = 1 << 19
# If at least this many rows are consecutive on average, as in slices of trajectories, runs are copied in one piece.
_SHORT = 4
# Writes of at least this many bytes bypass the caches: the rows are not read again soon, and the processor need not
# load the cache lines that it overwrites.
_STREAMED = 8192


@numba.njit(inline="always")
def _find_runs(numbers: NDArray[np.int64], rows: int, stops: NDArray[np.int64]) -> int:
    """Find the ends of runs of consecutive rows; return the number of runs.

    `stops` gets, for each run, the position in `numbers` behind its last row. Returns -1 if there are more runs than
    fit into `stops`, or if a row does not exist.
    """
    found = 0
    for number in range(1, numbers.size + 1):
        if number == numbers.size or numbers[number] != numbers[number - 1] + 1:
            if found == stops.size:
                return -1
            first = numbers[stops[found - 1] if found else 0]
            if first < 0 or numbers[number - 1] >= rows:
                return -1
            stops[found] = number
            found += 1
    return found


@numba.njit("void(int64, int64, int64, int64[::1], int64)", nogil=True, cache=True)
def _gather_column(place: int, width: int, target: int, numbers: NDArray[np.int64], rows: int) -> None:
    """Copy the rows `numbers` of one column to the address `target`; all of these rows must exist.

    Only wide rows of a large column are prefetched. The processor overlaps the reads of narrow rows by itself, and a
    column that fits into its caches is read quickly: there, prefetching takes longer than it saves.
    """
    count = numbers.size
    if width == 8:
        for number in range(count):
            copy_8(target + 8 * number, place + 8 * numbers[number])
    elif width == 1:
        for number in range(count):
            copy_1(target + number, place + numbers[number])
    elif width == 4:
        for number in range(count):
            copy_4(target + 4 * number, place + 4 * numbers[number])
    elif rows * width <= _NEAR:
        for number in range(count):
            copy_bytes(target + number * width, place + numbers[number] * width, width)
    else:
        for number in range(min(count, _AHEAD)):
            ask_for(place + numbers[number] * width, width, _REACH)
        for number in range(count):
            if number + _AHEAD < count:
                ask_for(place + numbers[number + _AHEAD] * width, width, _REACH)
            copy_bytes(target + number * width, place + numbers[number] * width, width)


@numba.njit("int64(int64[::1], int64[::1], int64[::1], int64[::1], int64)", nogil=True, cache=True)
def gather_rows(
    places: NDArray[np.int64],
    widths: NDArray[np.int64],
    targets: NDArray[np.int64],
    numbers: NDArray[np.int64],
    rows: int,
) -> int:
    """Copy the rows `numbers` of every column, one after another, to the addresses `targets`.

    Columns are at the addresses `places` and have `widths` bytes a row. Negative numbers count from the end of the
    first `rows` rows. Returns -1; or, if a row does not exist, its position in `numbers`, in which case the contents of
    the targets are undefined.
    """
    count = numbers.size
    stops = np.empty(count // _SHORT, np.int64)
    runs = _find_runs(numbers, rows, stops) if stops.size else -1
    for column in range(places.size if runs > 0 else 0):
        place, width, target = places[column], widths[column], targets[column]
        begin = 0
        for run in range(runs):
            size = (stops[run] - begin) * width
            if run + 1 < runs:
                ask_for(place + numbers[stops[run]] * width, width, _REACH)
            copy_bytes(target, place + numbers[begin] * width, size)
            target += size
            begin = stops[run]
    if runs > 0:
        return -1
    known = np.empty(count, np.int64)
    for number in range(count):
        row = numbers[number]
        if row < 0:
            row += rows
        if row < 0 or row >= rows:
            return number
        known[number] = row
    for column in range(places.size):
        _gather_column(places[column], widths[column], targets[column], known, rows)
    return -1


@numba.njit(
    "int64(int64[:, ::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1])",
    nogil=True,
    cache=True,
)
def gather_parts(
    places: NDArray[np.int64],
    widths: NDArray[np.int64],
    targets: NDArray[np.int64],
    numbers: NDArray[np.int64],
    members: NDArray[np.int64],
    stops: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> int:
    """Copy rows of several tables with the same columns, as `gather_rows` does for one.

    Numbers before `stops[0]` belong to the table `members[0]`, whose columns are at `places[members[0]]` and have
    `rows[0]` rows, and so on.
    """
    begin, ends = 0, targets.copy()
    for part in range(stops.size):
        stop = stops[part]
        if part + 1 < stops.size and widths.size:
            place = places[members[part + 1], 0]
            for number in range(stop, min(stops[part + 1], stop + _AHEAD)):
                ask_for(place + numbers[number] * widths[0], widths[0], _REACH)
        beyond = gather_rows(places[members[part]], widths, ends, numbers[begin:stop], rows[part])
        if beyond >= 0:
            return begin + beyond
        ends += (stop - begin) * widths
        begin = stop
    return -1


@numba.njit("void(float64[::1], int64[::1], int64[::1], int64[::1])", nogil=True, cache=True)
def scale_parts(
    chances: NDArray[np.float64], stops: NDArray[np.int64], sizes: NDArray[np.int64], numbers: NDArray[np.int64]
) -> None:
    """Scale fractions in [0, 1) to integers: those before `stops[0]` below `sizes[0]`, and so on."""
    begin = 0
    for part in range(stops.size):
        for place in range(begin, stops[part]):
            numbers[place] = int(chances[place] * sizes[part])
        begin = stops[part]


@numba.njit(
    "void(int64[::1], float64[::1], int64[::1], int64[::1], int64, int64, int64, int64[::1])", nogil=True, cache=True
)
def choose_goals(
    rows: NDArray[np.int64],
    chances: NDArray[np.float64],
    firsts: NDArray[np.int64],
    lasts: NDArray[np.int64],
    oldest: int,
    capacity: int,
    strategy: int,
    found: NDArray[np.int64],
) -> None:
    """Choose, for each row of a ring, the row of its trajectory whose goal replaces its own (hindsight relabelling).

    Steps have absolute numbers that increase with every write; the row of a step is its number modulo `capacity`.
    `firsts` and `lasts` are the first and last steps of the trajectories, oldest first; the oldest step in the ring is
    `oldest`. `strategy` is 0 for the step itself or a later one, 1 for the last one, 2 for any one of the trajectory.
    `found` gets the chosen rows.

        row              0   1   2   3   4   5        capacity 6, oldest 9: turn = 9 % 6 = 3
        step            12  13  14   9  10  11        rows before `turn` hold the newer steps
    """
    count, turn = rows.size, oldest % capacity
    runs, steps = np.zeros(count, np.int64), np.empty(count, np.int64)
    for number in range(count):
        steps[number] = oldest - turn + rows[number] + (capacity if rows[number] < turn else 0)
    left = lasts.size
    while left > 1:  # one bisection step for all rows at a time, so that neither reads nor branches stall
        half = left >> 1
        for number in range(count):
            runs[number] += half * np.int64(lasts[runs[number] + half - 1] < steps[number])
        left -= half
    for number in range(count):
        last = lasts[runs[number]]
        first = firsts[runs[number]] if strategy == 2 else steps[number]
        row = (last if strategy == 1 else first + int(chances[number] * (last - first + 1))) - oldest + turn
        found[number] = row - capacity if row >= capacity else row


@numba.njit(
    "int64(int64[:, ::1], int64[::1], int64[::1], int64, float64[::1], int64[::1], int64[::1], int64, int64, int64)",
    nogil=True,
    cache=True,
)
def gather_in_hindsight(
    table: NDArray[np.int64],
    targets: NDArray[np.int64],
    numbers: NDArray[np.int64],
    rows: int,
    chances: NDArray[np.float64],
    firsts: NDArray[np.int64],
    lasts: NDArray[np.int64],
    oldest: int,
    capacity: int,
    strategy: int,
) -> int:
    """Copy rows of every column as `gather_rows` does, and replace the goals of the first rows (hindsight relabelling).

    For each column, `table` holds its address, its width, and either 0 or the address of the equally wide column from
    which goals are taken. The first rows, as many as there are `chances`, get the goals of the rows that `choose_goals`
    chooses; strategy 3 chooses from all rows, in any trajectory. Negative numbers are not allowed. Returns -1; or a
    number from 0, with nothing copied, if a row is not one of the first `rows` rows.
    """
    count = chances.size
    for number in range(numbers.size):
        if numbers[number] < 0 or numbers[number] >= rows:
            return number
    found = np.empty(count, np.int64)
    if strategy == 3:
        for number in range(count):
            found[number] = int(chances[number] * rows)
    elif lasts.size:
        choose_goals(numbers[:count], chances, firsts, lasts, oldest, capacity, strategy, found)
    else:
        return 0
    for number in range(count):
        if found[number] < 0 or found[number] >= rows:  # another thread has changed the trajectories
            return number
    for column in range(table.shape[1]):
        place, width, goals, target = table[0, column], table[1, column], table[2, column], targets[column]
        if goals:
            _gather_column(goals, width, target, found, rows)
            _gather_column(place, width, target + count * width, numbers[count:], rows)
        else:
            _gather_column(place, width, target, numbers, rows)
    return -1


@numba.njit("void(int64[::1], int64[::1], int64[::1], int64, int64)", nogil=True, cache=True)
def copy_runs(
    places: NDArray[np.int64], widths: NDArray[np.int64], sources: NDArray[np.int64], start: int, count: int
) -> None:
    """Copy `count` rows into every column, to the rows from `start` on.

    The new rows of each column are contiguous in memory, at the addresses `sources`.
    """
    for column in range(places.size):
        size = widths[column] * count
        target, source = places[column] + widths[column] * start, sources[column]
        if size >= _STREAMED:
            head = -target & (BLOCK - 1)
            copy_bytes(target, source, head)
            stop = target + size
            target += head
            source += head
            while target + BLOCK <= stop:
                stream_block(target, source)
                target += BLOCK
                source += BLOCK
            size = stop - target
        copy_bytes(target, source, size)
    fence()  # the counters that announce these rows to other threads are written later


# Packed records ------------------------------------------------------------------------------------

# How many records ahead to prefetch, as for rows of columns.
_RECORDS_AHEAD = 12
_RECORDS_REACH = 16 * BLOCK


@numba.njit(inline="always")
def _locate(
    numbers: NDArray[np.int64], table: NDArray[np.int64], head: NDArray[np.int64], found: NDArray[np.int64]
) -> int:
    """Find, for each of some steps, the addresses of its record and of the record that holds its `next`.

    An episode of n steps has n + 1 records, so step s of episode e is in record s + e. Its `next` is in the following
    record, unless the episode stores its next rows explicitly. To find the episode of a step, `table` has the episode
    of every `1 << shift`-th step; a bisection between two of these finds the exact one.

    Args:
        numbers: the steps; negative ones count from the end.
        table: the first step of each episode, followed by the number of steps; the start of each episode's explicit
            next rows, or -1; and the episode of every `1 << shift`-th step.
        head: the number of episodes, the shift, the addresses of the records and of the explicit next rows, and the
            bytes of a record.
        found: gets the two addresses of the first step, then the two of the second, and so on.

    Returns:
        -1, or the position in `numbers` of a step that does not exist.
    """
    episodes, shift, base, explicit, size = head[0], head[1], head[2], head[3], head[4]
    coarse = 2 * episodes + 1
    steps = table[episodes]
    for position in range(numbers.size):
        step = numbers[position]
        if step < 0:
            step += steps
        if step < 0 or step >= steps:
            return position
        low, high = table[coarse + (step >> shift)], table[coarse + (step >> shift) + 1]
        while low < high:
            middle = (low + high + 1) >> 1
            if table[middle] <= step:
                low = middle
            else:
                high = middle - 1
        address = base + (step + low) * size
        found[2 * position] = address
        start = table[episodes + 1 + low]
        found[2 * position + 1] = address + size if start < 0 else explicit + (start + step - table[low]) * size
    return -1


@numba.njit("int64(int64[::1], int64[::1], int64[::1], int64[:, ::1], uint8[::1])", nogil=True, cache=True)
def gather_fields(
    numbers: NDArray[np.int64],
    table: NDArray[np.int64],
    head: NDArray[np.int64],
    fields: NDArray[np.int64],
    memory: NDArray[np.uint8],
) -> int:
    """Copy fields of the records of some steps to `memory`: the rows of each field are contiguous there.

    Each of `fields` is an offset in the record, a width, and where in `memory` its rows begin; the first `head[6]` come
    from the step's record, the others from the record after it. From each record on, `head[5]` bytes are prefetched.
    See `_locate` for the other arguments and the result.
    """
    found = np.empty(2 * numbers.size, np.int64)
    beyond = _locate(numbers, table, head, found)
    if beyond >= 0:
        return beyond
    span, first_after, count = head[5], head[6], fields.shape[0]
    ends = fields[:, 2] + memory.ctypes.data
    for position in range(numbers.size):
        coming = position + _RECORDS_AHEAD
        if coming < numbers.size:
            ask_for(found[2 * coming], span, _RECORDS_REACH)
        source = found[2 * position]
        for field in range(count):
            if field == first_after:
                source = found[2 * position + 1]
            width = fields[field, 1]
            copy_row(ends[field], source + fields[field, 0], width)
            ends[field] += width
    return -1


@numba.njit("int64(int64[::1], int64[::1], int64[::1], int64)", nogil=True, cache=True)
def gather_spans(numbers: NDArray[np.int64], table: NDArray[np.int64], head: NDArray[np.int64], target: int) -> int:
    """Copy the record of each step and the beginning of the record after it, `head[5]` bytes together, to `target`.

    See `_locate` for the other arguments and the result.
    """
    found = np.empty(2 * numbers.size, np.int64)
    beyond = _locate(numbers, table, head, found)
    if beyond >= 0:
        return beyond
    size, span = head[4], head[5]
    for position in range(numbers.size):
        coming = position + _RECORDS_AHEAD
        if coming < numbers.size:
            ask_for(found[2 * coming], span, _RECORDS_REACH)
        here, after = found[2 * position], found[2 * position + 1]
        if after == here + size:
            copy_bytes(target, here, span)
        else:
            copy_bytes(target, here, size)
            copy_bytes(target + size, after, span - size)
        target += span
    return -1
