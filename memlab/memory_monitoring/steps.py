"""What is kept of a run: for each step the bytes held at its end and at its peak, in bounded memory.

A monitor that remembered every step of a month's run would itself be a leak. So there are at most `BLOCKS` blocks of
as many steps each; when they are full, neighbours are merged, and a block keeps what forecasts need: the least that
was held at an end of its steps, and the highest peak. What happened of late is also kept step by step, so that a leak
which begins after a long run is not lost in one block.
"""

from __future__ import annotations

from array import array

BLOCKS = 512
RECENT = 256


class StepHistory:
    """Steps in blocks: `ends[i]` is the least held at an end in block i, `peaks[i]` the highest peak, in bytes.

    Each block covers `steps_in_block` steps, a power of two; the last one may not be full yet. `steps` counts all.
    `recent_ends` and `recent_peaks` are those of the last RECENT steps, or up to twice as many, step by step.
    """

    __slots__ = ("_evenly", "_skipped", "ends", "peaks", "recent_ends", "recent_peaks", "steps", "steps_in_block")

    def __init__(self):
        self.ends, self.peaks = array("q"), array("q")
        self.recent_ends, self.recent_peaks = array("q"), array("q")
        self.steps_in_block, self.steps = 1, 0
        self._skipped, self._evenly = 0, False

    def append(self, end_bytes: int, peak_bytes: int) -> None:
        """A step is over: `end_bytes` are held now, `peak_bytes` were held at its peak.

        A peak below the end (a high-water mark read a moment before) is raised to the end. Raises TypeError for bytes
        that are not ints, ValueError for negative ones.
        """
        if type(end_bytes) is not int or type(peak_bytes) is not int:
            raise TypeError(f"expected bytes as ints, found {end_bytes!r} and {peak_bytes!r}; round them")
        if end_bytes < 0 or peak_bytes < 0:
            raise ValueError(f"expected bytes of 0 or more, found {end_bytes} at the end and {peak_bytes} at the peak")
        peak_bytes = max(peak_bytes, end_bytes)
        if self._skipped:
            self._fill(end_bytes, peak_bytes)
        self._append(end_bytes, peak_bytes)

    def skip(self, *, evenly: bool = False) -> None:
        """A step is over of which nothing is known. It gets its place as soon as a later one is known.

        It is taken to be as the last known one; evenly: to lie on the line from that to the next known one.
        """
        self._skipped, self._evenly = self._skipped + 1, evenly

    def _fill(self, end_bytes: int, peak_bytes: int) -> None:
        steps, self._skipped = self._skipped, 0
        end, peak = (self.recent_ends[-1], self.recent_peaks[-1]) if self.steps else (end_bytes, peak_bytes)
        rise, peaks_rise = (end_bytes - end, peak_bytes - peak) if self._evenly else (0, 0)
        for step in range(1, steps + 1):
            self._append(end + rise * step // (steps + 1), peak + peaks_rise * step // (steps + 1))

    def _append(self, end_bytes: int, peak_bytes: int) -> None:
        if self.steps % self.steps_in_block:
            self.ends[-1] = min(self.ends[-1], end_bytes)
            self.peaks[-1] = max(self.peaks[-1], peak_bytes)
        else:
            if len(self.ends) == BLOCKS:
                self._merge()
            self.ends.append(end_bytes)
            self.peaks.append(peak_bytes)
        if len(self.recent_ends) == 2 * RECENT:
            del self.recent_ends[:RECENT], self.recent_peaks[:RECENT]
        self.recent_ends.append(end_bytes)
        self.recent_peaks.append(peak_bytes)
        self.steps += 1

    def _merge(self) -> None:
        self.ends = array("q", map(min, self.ends[::2], self.ends[1::2]))
        self.peaks = array("q", map(max, self.peaks[::2], self.peaks[1::2]))
        self.steps_in_block *= 2
