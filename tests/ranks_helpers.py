"""Cases that ranks run in one launch, and faults to plant in ranks, each with what the launch must say."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable

import torch
from torch import distributed

from memlab.ranks import RankError, run_ranks


def meet() -> None:
    """A collective with all ranks, with enough bytes that it takes a moment."""
    distributed.all_reduce(torch.ones(1 << 16))


class Cases(dict):
    """Functions by name, which all ranks of one launch call, one after another. As a decorator, it takes one in."""

    def __init__(self, world: int):
        super().__init__()
        self.world = world

    def __call__(self, fn: Callable[[], object]) -> Callable[[], object]:
        self[fn.__name__] = fn
        return fn

    @functools.cached_property
    def failures(self) -> dict[str, list[str | None]]:
        """How each failed, by rank: None where it did not. Launches the ranks."""
        try:
            return run_ranks(checks, self.world, dict(self))[0]
        except RankError as error:
            return dict.fromkeys(self, [str(error)])

    def assert_holds(self, name: str) -> None:
        failed = [failure for failure in self.failures[name] if failure]
        assert not failed, "\n".join(failed)


def checks(rank: int, cases: dict[str, Callable[[], object]]) -> dict[str, list[str | None]]:
    """Call every case on all ranks, which tell each other of failures and go on with the next."""
    found = {}
    for name, case in cases.items():
        failure, every = None, [None] * distributed.get_world_size()
        try:
            case()
        except Exception:
            failure = traceback.format_exc()
            print(f"{name}: {failure}")  # where the others hang because of it, this is shown
        distributed.all_gather_object(every, failure)
        found[name] = every
    return found


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


def leaves_without_a_word(rank, culprit):
    meet()
    if rank == culprit:
        os._exit(0)
    meet()


def returns_a_generator(rank, culprit):
    meet()
    return [1] if rank != culprit else (n for n in [1])


# What each does, and what the launch says.
FAULTS = {
    raises: r"rank {} raised ValueError: planted in {}",
    leaves_by_sys_exit: r"rank {} raised SystemExit: 0",
    is_killed_in_a_collective: r"rank {} was killed by SIGKILL, .*memory runs out",
    crashes: r"rank {} was killed by SIGSEGV",
    leaves_without_a_word: r"rank {} ended with exit code 0 before its function returned",
    returns_a_generator: r"rank {} returned a generator that cannot be sent .*cannot pickle 'generator'",
}


def planted(fault, culprit: int, world: int = 4) -> RankError:
    """The error of a launch in which one rank has a fault."""
    try:
        run_ranks(fault, world, culprit)
    except RankError as error:
        return error
    raise AssertionError(f"{fault.__name__} was not noticed")
