"""Faults to plant in ranks, each with what the launch must say.

`python -m tests.ranks_helpers` plants them all, many times over, and measures launches in a row.
"""

from __future__ import annotations

import ctypes
import os
import signal
import statistics
import sys
import time

import torch
from torch import distributed

from memlab.ranks import RankError, run_ranks


def meet() -> None:
    """A collective with all ranks, with enough bytes that it takes a moment."""
    distributed.all_reduce(torch.ones(1 << 16))


class Unfriendly(Exception):
    """An exception that can be pickled, and not read again."""

    def __init__(self, one, two):
        super().__init__("two arguments")


class FailsInBackward(torch.autograd.Function):
    """Hands on what it is given, and raises when its gradient comes."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("planted in backward")


def raises(rank, culprit):
    meet()
    if rank == culprit:
        raise ValueError(f"planted in {rank}")
    meet()


def raises_in_backward(rank, culprit):
    def hook(gradient):
        if rank == culprit:
            raise ArithmeticError(f"planted in {rank}")
        distributed.all_reduce(gradient)

    x = torch.ones(8, requires_grad=True)
    x.register_hook(hook)
    x.square().sum().backward()


def raises_what_cannot_travel(rank, culprit):
    if rank == culprit:
        raise Unfriendly(1, 2)
    meet()


def leaves_by_sys_exit(rank, culprit):
    if rank == culprit:
        sys.exit(0)
    meet()


def is_killed_in_a_collective(rank, culprit):
    work = distributed.all_reduce(torch.ones(1 << 22), async_op=True)
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    work.wait()
    meet()


def crashes(rank, culprit):
    meet()
    if rank == culprit:
        ctypes.string_at(0)
    meet()


def aborts(rank, culprit):
    meet()
    if rank == culprit:
        os.abort()
    meet()


def leaves_without_a_word(rank, culprit):
    meet()
    if rank == culprit:
        os._exit(0)
    meet()


def fails_after_the_others_died_of_it(rank, culprit):
    """The culprit's death is the last thing that is known."""
    meet()
    if rank == culprit:
        group = distributed.group.WORLD
        distributed.destroy_process_group()
        del group
        time.sleep(0.2)
        os._exit(3)
    meet()


def returns_a_generator(rank, culprit):
    meet()
    return [1] if rank != culprit else (n for n in [1])


# What each does, and what the launch says.
FAULTS = {
    raises: r"rank {} raised ValueError: planted in {}",
    raises_in_backward: r"rank {} raised ArithmeticError: planted in {}",
    raises_what_cannot_travel: r"rank {} raised (.*)Unfriendly: two arguments",
    leaves_by_sys_exit: r"rank {} raised SystemExit: 0",
    is_killed_in_a_collective: r"rank {} was killed by SIGKILL, .*memory runs out",
    crashes: r"rank {} was killed by SIGSEGV",
    aborts: r"rank {} was killed by SIGABRT",
    leaves_without_a_word: r"rank {} ended with exit code 0 before its function returned",
    fails_after_the_others_died_of_it: r"rank {} ended with exit code 3 before its function returned",
    returns_a_generator: r"rank {} returned a generator that cannot be sent .*cannot pickle 'generator'",
}


def planted(fault, culprit: int, world: int = 4) -> RankError:
    """The error of a launch in which one rank has a fault."""
    try:
        run_ranks(fault, world, culprit)
    except RankError as error:
        return error
    raise AssertionError(f"{fault.__name__} was not noticed")


def main(launches: int = 100, failures: int = 60) -> None:
    """Launch in a row, plant faults, and print how long it took and how often the right rank was named."""

    def same(rank):
        return rank

    run_ranks(same, 4)
    seconds = []
    for _ in range(launches):
        begin = time.perf_counter()
        assert run_ranks(same, 4) == [0, 1, 2, 3]
        seconds.append(time.perf_counter() - begin)
    print(f"{launches} launches of 4 ranks: median {statistics.median(seconds):.3f} s, most {max(seconds):.3f} s")
    kinds, named, seconds = list(FAULTS), 0, []
    for n in range(failures):
        fault, culprit = kinds[n % len(kinds)], n // len(kinds) % 4
        begin = time.perf_counter()
        error = planted(fault, culprit)
        seconds.append(time.perf_counter() - begin)
        named += error.rank == culprit
        if error.rank != culprit:
            print(f"{fault.__name__} in rank {culprit}: {error}")
    print(
        f"{failures} planted failures: {named} named the right rank, median {statistics.median(seconds):.3f} s, ",
        end="",
    )
    print(f"most {max(seconds):.3f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
