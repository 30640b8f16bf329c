"""Cuts rows and columns into parts: even ones, and row parts of equal expected load."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise

from embeddings.traffic import Load

# A part may have this many rows × columns above its even share (4 MB in fp32) for the sake of one
# stretch of rows per part.
MAX_EXCESS_ELEMENTS = 1 << 20
# Slices narrower than this would send more ids than values.
MIN_COLUMNS = 4

Stretch = tuple[int, int]


def even_stretches(size: int, num_parts: int) -> list[Stretch]:
    """`min(size, num_parts)` stretches of 0 … size whose lengths differ by 1 at most."""
    num_parts = min(size, num_parts)
    borders = [size * part // num_parts for part in range(num_parts + 1)]
    return list(pairwise(borders))


def cut_columns(dim: int, num_parts: int) -> list[Stretch]:
    """Column slices of at least `MIN_COLUMNS` columns, or one of all.

    A dim divisible by 4 is cut into slices divisible by 4, which the fused kernel can take.
    """
    unit = 4 if dim % 4 == 0 else 1
    num_parts = max(1, min(num_parts, dim // MIN_COLUMNS))
    return [(start * unit, stop * unit) for start, stop in even_stretches(dim // unit, num_parts)]


def cut_rows(rows: int, dim: int, num_parts: int, load: Load | None) -> list[list[Stretch]]:
    """Row stretches of at most `num_parts` parts; as many parts as there are rows, if fewer.

    Without a load the parts have equal rows. With one they have equal load, one stretch each, as
    long as none of them is much larger than its even share. Under a skew it would be: the part with
    the rarest ids would hold nearly all rows. Then rows *and* load are shared out evenly, with a
    second stretch for some parts.

    Args:
        rows: of the table.
        dim: columns of the table.
        num_parts: parts wanted.
        load: where the lookups lie.

    Returns:
        Per part its stretches, in rising order.
    """
    num_parts = min(rows, num_parts)
    if load is None or load.total == 0:
        return [[stretch] for stretch in even_stretches(rows, num_parts)]
    by_load = _equal_load(rows, num_parts, load)
    largest = max(stop - start for start, stop in by_load)
    if (largest - rows / num_parts) * dim <= MAX_EXCESS_ELEMENTS:
        return [[stretch] for stretch in by_load]
    return _equal_load_and_rows(rows, num_parts, load)


def _equal_load(rows: int, num_parts: int, load: Load) -> list[Stretch]:
    """One non-empty stretch per part, cut where the load before a row is nearest to its share."""
    borders = [0]
    for part in range(1, num_parts):
        row = load.row_at(load.total * part / num_parts)
        borders.append(min(max(row, borders[-1] + 1), rows - (num_parts - part)))
    return list(pairwise([*borders, rows]))


def _equal_load_and_rows(rows: int, num_parts: int, load: Load) -> list[list[Stretch]]:
    """Parts with equal rows and equal load, with at most 2 · (parts - 1) cuts in all.

    Read the rows as a circle and slide an arc of 1/k of them around it: its load passes through
    1/k of the whole, since the k arcs that tile the circle average that. Such an arc is a part;
    what is left, joined to a circle again, goes on with k - 1. Source: W. Stromquist, D. R.
    Woodall, "Sets on which several measures agree", J. Math. Anal. Appl. 108 (1985).
    """
    circle = _Circle([(0, rows)], load)
    parts = []
    for num_left in range(num_parts, 1, -1):
        part, rest = circle.split(circle.fair_start(num_left), circle.length // num_left)
        parts.append(part)
        circle = _Circle(rest, load)
    parts.append(circle.stretches)
    return parts


class _Circle:
    """Stretches of rows, read one after the other and from the last on to the first again."""

    def __init__(self, stretches: list[Stretch], load: Load) -> None:
        self.stretches = stretches
        self._load = load
        self._places = [0, *accumulate(stop - start for start, stop in stretches)]
        loads = (load.before(stop) - load.before(start) for start, stop in stretches)
        self._loads = [0.0, *accumulate(loads)]
        self.length = self._places[-1]

    def fair_start(self, num_parts: int) -> int:
        """Where an arc of 1/num_parts of the rows begins that has 1/num_parts of the load."""
        arc_length = self.length // num_parts
        target = self._loads[-1] / num_parts
        starts = [part * arc_length for part in range(num_parts)]
        arcs = [self._arc_load(start, arc_length) for start in starts]
        low = starts[arcs.index(min(arcs))]
        high = starts[arcs.index(max(arcs))]
        # One step to the next row changes the arc's load by two rows' worth at most.
        while abs(high - low) > 1:
            middle = (low + high) // 2
            if self._arc_load(middle, arc_length) <= target:
                low = middle
            else:
                high = middle
        return min(low, high, key=lambda place: abs(self._arc_load(place, arc_length) - target))

    def split(self, start: int, length: int) -> tuple[list[Stretch], list[Stretch]]:
        """The stretches of an arc and those of the rest, each in rising order."""
        wrapped = max(0, start + length - self.length)
        inside = self._between(0, wrapped) + self._between(start, start + length - wrapped)
        outside = self._between(wrapped, start) + self._between(start + length, self.length)
        return _joined(inside), _joined(outside)

    def _between(self, low: int, high: int) -> list[Stretch]:
        found = []
        for place, (start, stop) in zip(self._places, self.stretches, strict=False):
            first = start + max(0, low - place)
            last = min(stop, start + high - place)
            if first < last:
                found.append((first, last))
        return found

    def _arc_load(self, start: int, length: int) -> float:
        stop = start + length
        if stop <= self.length:
            return self._load_upto(stop) - self._load_upto(start)
        return self._loads[-1] - self._load_upto(start) + self._load_upto(stop - self.length)

    def _load_upto(self, place: int) -> float:
        index = min(bisect_right(self._places, place), len(self.stretches)) - 1
        start = self.stretches[index][0]
        row = start + place - self._places[index]
        return self._loads[index] + self._load.before(row) - self._load.before(start)


def _joined(stretches: list[Stretch]) -> list[Stretch]:
    joined: list[Stretch] = []
    for start, stop in stretches:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
