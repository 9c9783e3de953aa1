"""What healthy training programs do that moves their memory: up for a while, up and down, or up once and no more.

A habit is made by a function of the program (which draws its details from the program's seed) and is called after
each step with the step's number, from 0. `program.settles` is the step from which on it has reached its highest.
What rises evenly, like a cache that fills, does so for at most `RISE` steps: no program that goes on rising is healthy.
"""

from __future__ import annotations

import copy
import gc
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

RISE = 32
Habit = Callable[[int], object]


def filled(nbytes: float) -> Tensor:
    """A tensor of about so many bytes, written, so that the system must find pages for it."""
    return torch.full((max(1, round(nbytes / 4)),), 1.0)


class Cycle:
    """An object that refers to itself: only the garbage collector frees it, and what it holds."""

    def __init__(self, held: Tensor):
        self.held, self.me = held, self


def saturating_cache(program) -> Habit:
    """A cache over a finite set of keys: fast at first, then ever slower, then full."""
    keys, cache = program.chance.randint(4, 14), {}
    nbytes = program.state_bytes * program.chance.uniform(0.2, 0.8) / keys
    program.settles = max(program.settles, 4 * keys)

    def habit(step: int) -> None:
        key = program.chance.randrange(keys)
        if key not in cache:
            cache[key] = filled(nbytes * (0.5 + key / keys))

    return habit


def least_recently_used(program) -> Habit:
    """A cache, or a replay buffer, of bounded length: it rises evenly until it is full, and then replaces."""
    length = program.chance.randint(8, RISE)
    kept = deque(maxlen=length)
    nbytes = program.state_bytes * program.chance.uniform(0.1, 0.6) / length
    program.settles = max(program.settles, length)
    return lambda step: kept.append(filled(nbytes * program.chance.uniform(0.7, 1.3)))


def evaluation(program) -> Habit:
    """Every so often an evaluation on larger batches, whose results are held until the next, or let go at once."""
    every, batches = program.chance.randint(10, 40), program.chance.randint(1, 3)
    holds, results = program.chance.random() < 0.5, []
    program.settles = max(program.settles, every + 1)

    def habit(step: int) -> None:
        if step % every == every - 1:
            results.clear()
            with torch.no_grad():
                for _ in range(batches):
                    results.append(program.trained.run(program.trained.batch(1.0))[1])
            if not holds:
                results.clear()

    return habit


def cycles(program) -> Habit:
    """Reference cycles, with the collector called every so often by the program itself: a sawtooth.

    In a real process it is left to the collector when that is.
    """
    every, nbytes = program.chance.randint(5, 30), program.state_bytes * program.chance.uniform(0.01, 0.03)
    by_itself = program.scale > 1 and program.chance.random() < 0.5
    if not by_itself:
        program.disable_collector()
        program.settles = max(program.settles, every)

    def habit(step: int) -> None:
        Cycle(filled(nbytes))
        if not by_itself and step % every == every - 1:
            gc.collect(1)  # what is old by now has been looked at: the whole heap would take long

    return habit


def curriculum(program) -> Habit:
    """Batches that grow in two to four stages, and then stay as they are."""
    stages, length = program.chance.randint(2, 4), program.chance.randint(8, RISE)
    program.settles = max(program.settles, length)

    def habit(step: int) -> None:
        program.part = min(1.0, (1 + (step + 1) * stages // length) / (stages + 1))

    habit(-1)
    return habit


def moving_average(program) -> Habit:
    """A moving average of the weights (EMA), begun late: one stair of the weights' size."""
    begins, average = program.chance.randint(10, 60), {}
    program.settles = max(program.settles, begins)

    def habit(step: int) -> None:
        if step == begins:
            average.update(copy.deepcopy(program.trained.module.state_dict()))
        elif step > begins:
            for name, tensor in program.trained.module.state_dict().items():
                if tensor.is_floating_point():
                    average[name].lerp_(tensor, 0.01)

    return habit


def unfreezing(program) -> Habit:
    """Gradual unfreezing: each time, more parameters get gradients and optimizer states. A few stairs, then none."""
    parameters = list(program.trained.module.parameters())[:-2]
    parts = program.chance.randint(1, 3)
    moments = sorted(program.chance.sample(range(8, 80), parts))
    program.settles = max(program.settles, moments[-1])
    for parameter in parameters:
        parameter.requires_grad_(False)

    def habit(step: int) -> None:
        if step in moments:
            number = moments.index(step)
            size = -(-len(parameters) // parts)
            for parameter in parameters[::-1][number * size : (number + 1) * size]:
                parameter.requires_grad_(True)

    return habit


def accumulation(program) -> Habit:
    """Gradients of several steps are added before the optimizer's turn: the ends of steps alternate."""
    program.micro_steps = program.chance.randint(2, 5)
    return lambda step: None


def prefetching(program) -> Habit:
    """A queue of batches that is filled by others: sometimes long, sometimes short."""
    queue, most = deque(), program.chance.randint(2, 6)

    def habit(step: int) -> None:
        wanted = program.chance.randint(0, most)
        while len(queue) > wanted:
            queue.popleft()
        while len(queue) < wanted:
            queue.append(program.trained.batch(program.amount()))

    return habit


def saving(program) -> Habit:
    """Every so often a copy of weights and optimizer states, as for a file, which is let go at once: a tall peak."""
    every = program.chance.randint(20, 60)
    program.settles = max(program.settles, every)

    def habit(step: int) -> None:
        if step % every == every - 1:
            copy.deepcopy((program.trained.module.state_dict(), program.optimizer.state_dict()))

    return habit


def metrics(program) -> Habit:
    """A list of losses as plain numbers, as everybody keeps: 24 bytes a step, which is no leak that ends a run."""
    losses = []
    return lambda step: losses.append(program.loss.item())


HABITS = (
    saturating_cache,
    least_recently_used,
    evaluation,
    cycles,
    curriculum,
    moving_average,
    unfreezing,
    accumulation,
    prefetching,
    saving,
    metrics,
)
