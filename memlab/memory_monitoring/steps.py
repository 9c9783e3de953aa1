"""What is kept of a run: for each step the bytes held at its end and at its peak, in bounded memory.

A monitor that remembered every step of a month's run would itself be a leak. So there are at most `BLOCKS` blocks of
as many steps each; when they are full, neighbours are merged, and a block keeps what forecasts need: the least that
was held at an end of its steps, and the highest peak.
"""

from __future__ import annotations

from array import array

BLOCKS = 512


class StepHistory:
    """Steps in blocks: `ends[i]` is the least held at an end in block i, `peaks[i]` the highest peak, in bytes.

    Each block covers `steps_in_block` steps, a power of two; the steps of a block that is not full wait in it.
    """

    def __init__(self):
        self.ends, self.peaks = array("q"), array("q")
        self.steps_in_block, self.steps = 1, 0

    def append(self, end_bytes: int, peak_bytes: int) -> None:
        """A step is over: `end_bytes` are held now, `peak_bytes` were held at its peak."""
        if self.steps % self.steps_in_block:
            self.ends[-1] = min(self.ends[-1], end_bytes)
            self.peaks[-1] = max(self.peaks[-1], peak_bytes)
        else:
            if len(self.ends) == BLOCKS:
                self._merge()
            self.ends.append(end_bytes)
            self.peaks.append(peak_bytes)
        self.steps += 1

    def _merge(self) -> None:
        self.ends = array("q", map(min, self.ends[::2], self.ends[1::2]))
        self.peaks = array("q", map(max, self.peaks[::2], self.peaks[1::2]))
        self.steps_in_block *= 2
