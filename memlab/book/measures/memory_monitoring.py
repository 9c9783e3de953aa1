"""Chapter 05: leaks called and false alarms on programs that nobody tuned for, and what a Monitor costs."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from memlab.book.measures.timing import seconds, spread
from memlab.book.watched_programs import (
    CLEAN,
    KINDS,
    MORE_KINDS,
    Judgement,
    Program,
    judge,
    judged,
    programs_of,
    watch_levels,
)
from memlab.memory_monitoring import Monitor

STEP_SECONDS, STEPS_IN_BLOCK, STEPS_BEFORE, STEPS_TO_SETTLE = 0.010, 50, 1000, 20
BLOCKS_IN_ROUND = 3
QUICK_ROUNDS = 5
WIDEST = 1000.0  # times the steps that were left: nobody minds how much wider an interval without an end is
PROCESS_LEVELS = ("heap", "resident")


# ---- leaks and false alarms


def _called(judgements: list[Judgement], level: str) -> list[tuple]:
    groups: dict[str, list[Judgement]] = {}
    for one in judgements:
        groups.setdefault(one.watched.kind, []).append(one)
    healthy = groups.pop(CLEAN, [])
    caught = {kind: sum(one.in_time for one in group) for kind, group in groups.items()}
    parts = [f"{kind} {caught[kind]} of {len(group)}" for kind, group in groups.items()]
    five = [caught[kind] == len(groups[kind]) for kind in KINDS if kind in groups]
    called = [one for one in judgements if one.inside is not None]
    inside = sum(one.inside for one in called)
    widths = spread([min(one.width, WIDEST) for one in called], "{:.1f}") if called else "none"
    theirs = sum(one.watched.model_name.startswith("transformers") for one in judgements)
    note = f"; {theirs} of the {len(judgements)} programs train models that are not ours"
    return [
        (f"unseen leaks called before the last 20 % of the budget ({level})", "; ".join(parts) + note, ""),
        (f"… of chapter 05's kinds, those of which all were ({level})", f"{sum(five)} of {len(five)}",
         f"{len(five)} of {len(five)}"),
        (f"… false alarms on unseen healthy programs ({level})", f"{sum(one.false_alarm for one in healthy)} of "
         f"{len(healthy)}", "0"),
        (f"… forecasts whose interval held the step of the OOM ({level})", f"{inside} of {len(called)}; interval / "
         f"steps that were left {widths}", ""),
    ]  # fmt: skip


def leaks_by_the_meter(device: str, rounds: int) -> list[tuple]:
    """Every kind of leak and twenty healthy programs, at level storages."""
    programs = _programs(rounds, of_each=5, healthy=20)
    return _called(judge(p for p in programs if p.kind != "main memory"), "storages")  # of that a meter sees nothing


def leaks_of_processes(device: str, rounds: int) -> list[tuple]:
    """Every kind of leak and healthy programs, each in a process of its own, at levels heap and resident."""
    runs = [watch_levels(program, PROCESS_LEVELS) for program in _programs(rounds, of_each=2, healthy=10)]
    rows = []
    for level, of_level in zip(PROCESS_LEVELS, zip(*runs, strict=True), strict=True):
        rows += _called([judged(watched) for watched in of_level], level)
    return rows


def _programs(rounds: int, of_each: int, healthy: int) -> list[Program]:
    """Programs to judge; with few rounds one that leaks and one that does not."""
    if rounds < QUICK_ROUNDS:
        return programs_of(kinds=KINDS[:1], of_each=1, healthy=1)
    return programs_of(kinds=KINDS + MORE_KINDS, of_each=of_each, healthy=healthy)


# ---- what it costs


def computing(goal_seconds: float) -> Callable[[], object]:
    """A step that multiplies matrices for about so long on this machine."""
    a = torch.randn(192, 192)
    times = max(1, round(goal_seconds / min(seconds(lambda: a @ a) for _ in range(50))))

    def step() -> None:
        for _ in range(times):
            a @ a

    return step


class Block(NamedTuple):
    """A block of steps: seconds of each by the clock; on the CPU, of the steps, of `step()`, of the thread."""

    clock: list[float]
    on_cpu: float
    in_step: float = 0.0
    in_thread: float = 0.0


def plain_block(step: Callable[[], object]) -> Block:
    """A block that nobody watches."""
    began = time.thread_time()
    clock = [seconds(step) for _ in range(STEPS_IN_BLOCK)]
    return Block(clock, time.thread_time() - began)


def watched_block(step: Callable[[], object]) -> Block:
    """A block under a Monitor whose history is long."""
    others, clock, in_step = set(threading.enumerate()), [], 0.0
    with Monitor("1 TiB") as monitor:
        for _ in range(STEPS_BEFORE):
            monitor.step()
        for _ in range(STEPS_TO_SETTLE):  # the monitor learns how slow its looks are
            step()
            monitor.step()
        threads = [thread.ident for thread in threading.enumerate() if thread not in others]
        before, began = [_cpu_seconds(ident) for ident in threads], time.thread_time()
        for _ in range(STEPS_IN_BLOCK):
            start = time.perf_counter()
            step()
            stepped = time.thread_time()
            monitor.step()
            in_step += time.thread_time() - stepped
            clock.append(time.perf_counter() - start)
        on_cpu = time.thread_time() - began - in_step
        after = [_cpu_seconds(ident) for ident in threads]
    return Block(clock, on_cpu, in_step, sum(after) - sum(before))


def _cpu_seconds(thread: int) -> float:
    if not hasattr(time, "pthread_getcpuclockid"):  # Windows
        return math.nan
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def monitor_cost(device: str, rounds: int) -> list[tuple]:
    """A Monitor around steps of 10 ms that compute: its own CPU time, and by the clock, blocks with and without it.

    By the clock each block's median step counts: what other programs do to a machine comes in bursts.
    """
    step, plain, watched = computing(STEP_SECONDS), [], []
    plain_block(step)
    for number in range(BLOCKS_IN_ROUND * rounds):
        runs = [(plain, plain_block), (watched, watched_block)]
        for found, run in runs if number % 2 else runs[::-1]:
            found.append(run(step))
    ratios = [
        100 * (statistics.median(a.clock) / statistics.median(b.clock) - 1) for a, b in zip(watched, plain, strict=True)
    ]
    own = [100 * (one.in_step + one.in_thread) / one.on_cpu for one in watched]
    in_step, in_thread = (
        spread([1e6 * part / STEPS_IN_BLOCK for part in parts], "{:.0f}")
        for parts in ([one.in_step for one in watched], [one.in_thread for one in watched])
    )
    step_ms = 1e3 * statistics.median(one.on_cpu for one in plain) / STEPS_IN_BLOCK
    middle = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
    return [
        (
            f"Monitor's own CPU time as a share of a step of {step_ms:.1f} ms",
            f"{spread(own)} %: step() {in_step} µs, thread {in_thread} µs a step",
            "≤ 1 %",
        ),
        (
            f"… the median step by the clock, longer by (median and quartiles of {len(ratios)} blocks)",
            f"{middle[1]:+.2f} % ({middle[0]:+.2f} to {middle[2]:+.2f})",
            "≤ 1 %",
        ),
    ]
