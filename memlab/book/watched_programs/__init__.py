"""Training programs that leak and that do not, from seeds, and the judge of whoever watches them.

Read the pages in this order: `models` (what is trained), `habits` (what healthy programs do), `faults` (what leaking
ones do), `programs` (both put together), `watching` (run one to the end of its budget), `judging` (a Monitor's calls
held against what happened).
"""

from memlab.book.watched_programs.judging import FIRST_SEED, Judgement, judge, judged, programs_of, verdicts
from memlab.book.watched_programs.programs import CLEAN, KINDS, MORE_KINDS, Program, clean, leaky
from memlab.book.watched_programs.watching import Watched, watch, watch_levels

__all__ = [
    "CLEAN",
    "FIRST_SEED",
    "KINDS",
    "MORE_KINDS",
    "Judgement",
    "Program",
    "Watched",
    "clean",
    "judge",
    "judged",
    "leaky",
    "programs_of",
    "verdicts",
    "watch",
    "watch_levels",
]
