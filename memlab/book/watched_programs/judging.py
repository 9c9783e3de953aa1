"""The judge: what a Monitor says about programs that nobody tuned it on, held against what really happened.

A run that was watched is played to a Monitor step by step, with its budget. The first alarm about growth is the call.
A leak is called in time if that was before the last 20 % of the budget were in use; any call of a healthy program is a
false alarm. The interval that came with the call is held against the step at which the budget was really full.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Iterable
from typing import NamedTuple

from memlab.book.tables import Table
from memlab.book.watched_programs.programs import CLEAN, KINDS, Program, clean, leaky
from memlab.book.watched_programs.watching import Watched, watch
from memlab.memory_monitoring import MemoryWarning, Monitor

FIRST_SEED = 1_000_000
IN_TIME = 0.8


class Judgement(NamedTuple):
    """One program at one level. Steps are counted from 1.

    called_at: the step after which growth was called, None for never. share: how much of the budget was in use at that
    moment, counted from what was held before the model was built. earliest, latest: the forecast's interval as steps
    of the run. fills_at: the step at which the budget was reached, None for never.
    """

    watched: Watched
    called_at: int | None
    share: float
    earliest: float
    latest: float

    @property
    def false_alarm(self) -> bool:
        """Whether a healthy program was called."""
        return self.watched.kind == CLEAN and self.called_at is not None

    @property
    def in_time(self) -> bool:
        """Whether a leak was called before the last 20 % of the budget."""
        return self.watched.kind != CLEAN and self.called_at is not None and self.share <= IN_TIME

    @property
    def inside(self) -> bool | None:
        """Whether the budget was full within the interval; None where it never was, or nothing was called."""
        if self.called_at is None or self.watched.fills_at is None:
            return None
        return self.earliest <= self.watched.fills_at <= self.latest

    @property
    def width(self) -> float:
        """The interval's width as a multiple of the steps that were really left; nan where `inside` is None."""
        if self.inside is None:
            return math.nan
        return (self.latest - self.earliest) / max(1, self.watched.fills_at - self.called_at)


class _Played:
    """A source for a Monitor that says again what was noted."""

    def __init__(self, watched: Watched):
        self.name, self._watched, self.step = "played", watched, 0

    def read(self) -> dict[str, int]:
        return {self._watched.level: self._watched.ends[self.step]}

    def peaks(self) -> dict[str, int]:
        return {self._watched.level: self._watched.peaks[self.step]}


def judged(watched: Watched) -> Judgement:
    """Play a run that was watched to a Monitor with its budget, to the step at which it would have died."""
    source = _Played(watched)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MemoryWarning)
        with Monitor(watched.budget_bytes, sources=[source], watch=watched.level, every=3600) as monitor:
            for step in range(watched.fills_at or len(watched.ends)):
                source.step = step
                monitor.step()
                call = next((alarm for alarm in monitor.alarms if alarm.kind == "growth"), None)
                if call is not None:
                    break
    if call is None:
        return Judgement(watched, None, math.nan, math.nan, math.nan)
    used = max(watched.peaks[: step + 1]) - watched.start_bytes
    share = used / (watched.budget_bytes - watched.start_bytes)
    said = call.forecast
    return Judgement(watched, step + 1, share, said.step + said.earliest, said.step + said.latest)


def programs_of(first_seed: int = FIRST_SEED, kinds: Iterable[str] = KINDS, of_each: int = 5, healthy: int = 20):
    """Programs to judge: `of_each` leaks of each kind and `healthy` clean ones, with seeds from `first_seed` on."""
    leaks = [leaky(kind, first_seed + i) for kind in kinds for i in range(of_each)]
    return leaks + [clean(first_seed + i) for i in range(healthy)]


def judge(candidates: Iterable[Program] | None = None, level: str = "storages") -> list[Judgement]:
    """Run programs (by default `programs_of()`) and judge a Monitor that watches them at a level of `watch`."""
    return [judged(watch(program, level)) for program in (programs_of() if candidates is None else candidates)]


def verdicts(judgements: Iterable[Judgement]) -> Table:
    """A row for each kind: how many there are, called, called in time, the share of the budget, and the interval."""
    groups: dict[str, list[Judgement]] = {}
    for judgement in judgements:
        groups.setdefault(judgement.watched.kind, []).append(judgement)
    rows = []
    for kind, group in groups.items():
        called = [one for one in group if one.called_at is not None]
        inside = [one.inside for one in called if one.inside is not None]
        shares = [one.share for one in called]
        rows.append(
            (
                kind,
                len(group),
                len(called),
                sum(one.in_time for one in group) if kind != CLEAN else "",
                f"{statistics.median(shares):.0%} – {max(shares):.0%}" if shares else "",
                f"{sum(inside)} of {len(inside)}" if inside else "",
            )
        )
    columns = ["program", "runs", "called", "in time", "budget in use at the call (median – most)", "interval holds"]
    return Table(columns, rows)
