"""Workloads as traces: what whole programs ask of an allocator, on an imagined card and the same on every machine.

Each function meters a program and gives its requests (see memlab/caching_allocator/trace.py). Sizes come from shapes
and from the committed list of lengths alone, never from a text.

    TRACES["steps of one shape"]()  the requests of one; MANAGERS has the allocators to replay them with
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from memlab.book.tables import Table
from memlab.book.workloads import GPT, lengths
from memlab.caching_allocator import (
    BestFit,
    Buddy,
    FirstFit,
    PlannedArena,
    Replay,
    Slab,
    Trace,
    plan,
    replay,
    requests,
)
from memlab.caching_allocator.trace import Allocator
from memlab.gradient_accumulation import token_batches
from memlab.memory_timeline import Meter, imagine

CARD = "H100-80GB"
SIZES = {"layers": 2, "width": 512, "heads": 8, "context": 4096}
ORDERS = {"shuffled": None, "shortest first": False, "longest first": True}


class Steps(list):
    """A trace that knows where its steps end: `ends` are positions in it, each right after a step's last request."""

    def __init__(self, trace: Trace, ends: list[int]):
        super().__init__(trace)
        self.ends = ends


class Training:
    """A GPT in training on an imagined card, and the meter that watches it: `with Training() as run: run.step(8, 512)`.

    The model is made under the meter, and so can be let go under it. AdamW is fused, as large runs have it: one op.
    """

    def __enter__(self) -> Training:
        with ExitStack() as stack:
            stack.enter_context(imagine(CARD))
            self._meter = stack.enter_context(Meter())
            self.model = GPT(**SIZES)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
            self._ends: list[int] = []
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *error) -> None:
        self._undo.__exit__(*error)

    def batch(self, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        """x and y, (rows, tokens) of int64, as they arrive on the card."""
        return torch.randint(256, (rows, tokens)), torch.randint(256, (rows, tokens))

    def update(self, loss: Tensor) -> None:
        """Backward and the optimizer's step."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._ends.append(len(self._meter.timeline))  # of the card's events: others are of main memory

    def step(self, rows: int, tokens: int) -> None:
        """One training step on a batch of that shape."""
        self.update(self.model(*self.batch(rows, tokens)))

    @property
    def trace(self) -> Steps:
        """What was asked for so far."""
        return Steps(requests(self._meter.timeline), self._ends)


def stepped(shapes: list[tuple[int, int]]) -> Steps:
    """One training step after the other, on batches of these (rows, tokens)."""
    with Training() as run:
        for rows, tokens in shapes:
            run.step(rows, tokens)
    return run.trace


@functools.cache
def training_steps(steps: int = 6) -> Steps:
    """Steps of one shape: from the second on, all ask for the same in the same order."""
    return stepped([(8, 1024)] * steps)


@functools.cache
def varying_lengths(order: str = "shuffled", batches: int = 12, rows: int = 16) -> Steps:
    """Steps on batches of `rows` documents of the committed list, padded to the longest.

    order: of the batches: "shuffled", "shortest first" or "longest first". The batches are the same.
    """
    drawn = random.Random(1).sample(lengths(), rows * batches)
    longest = [max(drawn[i : i + rows]) for i in range(0, len(drawn), rows)]
    if ORDERS[order] is not None:
        longest.sort(reverse=ORDERS[order])
    return stepped([(rows, tokens) for tokens in longest])


@functools.cache
def token_budget(batches: int = 12, max_tokens: int = 8192) -> Steps:
    """Steps on batches of like length with at most so many tokens each (chapter 07): no two of quite the same size."""
    drawn = token_batches(lengths(), max_tokens)[:batches]
    return stepped([(len(batch), max(lengths()[i] for i in batch)) for batch in drawn])


@functools.cache
def train_and_eval(rounds: int = 4, steps: int = 2) -> Steps:
    """Training steps, and after every few an evaluation, without gradients, of a batch three times as large."""
    with Training() as run:
        for _ in range(rounds):
            for _ in range(steps):
                run.step(8, 1024)
            with torch.no_grad():
                run.model(*run.batch(24, 1024))
    return run.trace


@functools.cache
def leak(steps: int = 8) -> Steps:
    """Steps that each keep a sample of 2 MiB of their logits; at the end all is let go of, except the samples."""
    samples = []
    with Training() as run:
        for _ in range(steps):
            x, y = run.batch(8, 1024)
            logits = run.model(x)
            samples.append(logits[:, :256].detach().clone())
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            del logits
            run.update(loss)
        del x, y, loss, run.model, run.optimizer
    return run.trace


@functools.cache
def growing_cache(tokens: int = 320, layers: int = 4, rows: int = 64, width: int = 512) -> Steps:
    """Text written token by token: `torch.cat` makes every layer's keys and values anew, one token longer each time."""
    with imagine(CARD), torch.no_grad(), Meter() as meter:
        caches = [torch.empty(rows, 64, width) for _ in range(2 * layers)]
        ends = []
        for _ in range(tokens):
            for i, cache in enumerate(caches):
                caches[i] = cache = torch.cat((cache, torch.empty(rows, 1, width)), 1)
            ends.append(len(meter.timeline))
    return Steps(requests(meter.timeline), ends)


Workloads = Mapping[str, Callable[[], Steps]]
Managers = Mapping[str, Callable[[Trace], Allocator]]

TRACES: Workloads = {
    "steps of one shape": training_steps,
    "lengths, shuffled": varying_lengths,
    "lengths, shortest first": functools.partial(varying_lengths, "shortest first"),
    "lengths, longest first": functools.partial(varying_lengths, "longest first"),
    "a token budget": token_budget,
    "training and evaluation": train_and_eval,
    "a leak": leak,
    "a growing cache": growing_cache,
}
MANAGERS: Managers = {
    "first fit": lambda trace: FirstFit(),
    "best fit": lambda trace: BestFit(),
    "buddy": lambda trace: Buddy(),
    "slab": lambda trace: Slab(),
    "static plan": lambda trace: PlannedArena(plan(trace)),
}


def driver_events(done: Replay) -> int:
    """At how many mallocs and frees bytes were taken from the driver, or given back.

    Each takes one call or more: cudaMalloc; cudaFree, which waits for the GPU; with expandable segments, one a page.
    """
    return sum(before != after for before, after in pairwise(done.reserved))


def times(traces: Workloads, managers: Managers, repeats: int = 3) -> Table:
    """Microseconds an event takes with every manager, on this machine: the fastest of some replays, over its events."""
    rows = []
    for workload, trace in traces.items():
        requested = trace()
        row: list[object] = [workload, len(requested)]
        for manager in managers.values():
            seconds = []
            for _ in range(repeats):
                allocator = manager(requested)
                start = time.perf_counter()
                replay(allocator, requested)
                seconds.append(time.perf_counter() - start)
            row.append(round(min(seconds) / len(requested) * 1e6, 1))
        rows.append(row)
    return Table(["workload", "events", *managers], rows)
