"""Ranks that fail: each fault is planted for real, and the launch must end at once and name the right rank."""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import distributed

from memlab.data_parallelism import DataParallel
from memlab.ranks import RankError, exchange, processes, receive, run_ranks
from memlab.ranks.failures import Failure, culprit, of_death
from tests.ranks_helpers import FAULTS, crashes, meet, planted, raises

pytestmark = pytest.mark.skipif(os.name != "posix", reason="ranks are killed by signals here")


def no_rank_lives() -> bool:
    return not [rank for child in psutil.Process().children() for rank in child.children()]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_rank_that_is_to_blame_is_named_and_the_launch_ends(fault):
    error = planted(fault, culprit=2, world=3)
    assert error.rank == 2 and re.match(FAULTS[fault].format(2, 2), str(error))
    assert fault is not crashes or "ctypes.string_at(0)" in error.traceback  # the line that crashed
    assert no_rank_lives()


def test_the_traceback_of_the_rank_is_in_the_error_which_travels_and_its_exception_is_the_cause():
    error = planted(raises, culprit=1, world=2)
    assert 'raise ValueError(f"planted in {rank}")' in str(error) and str(error).count("Traceback") == 1
    assert error.traceback in str(error) + "\n" and "worker.py" not in error.traceback
    assert isinstance(error.__cause__, ValueError) and str(error.__cause__) == "planted in 1"
    again = pickle.loads(pickle.dumps(error))
    assert (again.rank, str(again), again.traceback) == (1, str(error), error.traceback)


def test_a_broken_connection_is_blamed_only_when_nothing_else_is_known():
    victim = Failure(0, 1.0, "raised RuntimeError: Connection closed by peer [127.0.0.1]:4711")
    from_it = Failure(0, 1.0, "raised ValueError: step 17 failed", traceback="RuntimeError: Connection reset by peer")
    death, late = of_death(1, 2.0, -9, ""), Failure(2, 3.0, "raised ValueError: of its own")
    assert culprit([victim, from_it, death, late]) is death and culprit([from_it, late]) is late
    assert culprit([victim, late]) is late and culprit([victim]) is victim
    assert not death.may_be_victim and of_death(0, 0.0, None, "").summary == "closed its connection to the launcher"
    assert "after its function returned" in of_death(1, 0.0, 3, "", returned=True).summary
    assert of_death(1, 0.0, -99, "").summary == "was killed by signal 99"


def test_of_several_that_raise_the_first_is_named_also_where_it_says_that_its_connection_broke():
    def both_raise(rank):
        distributed.barrier()
        time.sleep(0.3 * (1 - rank))
        raise RuntimeError(f"in {rank}: Connection closed by peer")  # and nobody died

    with pytest.raises(RankError, match="rank 1 raised RuntimeError: in 1"):
        run_ranks(both_raise, 2)


def test_a_result_that_cannot_be_read_here_names_its_rank():
    class Odd:
        def __reduce__(self):
            return int, ("no number",)

    with pytest.raises(RankError, match=r"rank 1 returned what cannot be read here: ValueError: invalid literal"):
        run_ranks(lambda rank: Odd() if rank else None, 2)


def test_a_thread_that_does_not_end_is_said(monkeypatch):
    def leaves_a_thread(rank):
        import threading

        if rank == 1:
            threading.Thread(target=time.sleep, args=(1000,)).start()

    monkeypatch.setattr(processes, "LEAVE_SECONDS", 1.0)
    with pytest.raises(RankError, match="rank 1 has returned, and its process did not end within 1 s: a thread"):
        run_ranks(leaves_a_thread, 2)
    assert no_rank_lives()


def never_arrives(rank):
    if rank == 1:
        time.sleep(1000)
    if rank != 2:
        distributed.all_reduce(torch.ones(4))


def test_who_never_arrived_is_named_with_its_place_and_who_waits_where():
    with pytest.raises(RankError) as caught:
        run_ranks(never_arrives, 4, timeout=1)
    lines = str(caught.value).splitlines()
    assert lines[0] == "after 1 s, ranks 1, 2 never arrived where ranks 0, 3 wait"
    number, here = never_arrives.__code__.co_firstlineno, Path(__file__).name
    waits = (
        f"waits in all_reduce: distributed.all_reduce(torch.ones(4))   (line {number + 4} of {here}, in never_arrives)"
    )
    assert lines[1] == f"  rank 0 {waits}" and lines[4] == f"  rank 3 {waits}"
    assert lines[2] == f"  rank 1 is at: time.sleep(1000)   (line {number + 2} of {here}, in never_arrives)"
    assert lines[3] == "  rank 2 has returned"
    assert caught.value.rank == 1 and "time.sleep(1000)" in caught.value.traceback
    assert no_rank_lives()


def in_different_collectives(rank):
    if rank == 0:
        distributed.all_reduce(torch.ones(4))
    else:
        distributed.all_gather([torch.ones(4)] * 2, torch.ones(4), async_op=True).wait()


def half_a_ring(rank):
    exchange(torch.ones(2), 1 - rank, torch.empty(2), 1 - rank) if rank else time.sleep(1000)


def both_receive_first(rank):
    if rank < 2:
        receive(torch.zeros(4), 1 - rank)


def stops(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    meet()


@pytest.mark.parametrize(
    ("fn", "ranks", "blamed", "words"),
    [
        (in_different_collectives, 2, 0, "wait for each other, and not in the same place…in all_reduce…in wait: "),
        (half_a_ring, 2, 0, "rank 1 waits for messages that did not come, or were not taken…in exchange: exchange("),
        # of those that had none to send it is no fault
        (both_receive_first, 4, 0, "ranks 0, 1 wait for messages that did not come"),
        (both_receive_first, 2, 0, "ranks 0, 1 wait for each other\n"),
        (lambda rank: time.sleep(1000), 2, 0, "after 0.8 s, ranks 0, 1 did not end"),
        (stops, 2, 1, "rank 1 never arrived where rank 0 waits…rank 1 is somewhere that cannot be told"),
    ],
    ids=["collectives", "half a ring", "messages of some", "messages of all", "slow", "stopped"],
)
def test_who_waits_for_whom_is_said(fn, ranks, blamed, words):
    with pytest.raises(RankError, match=re.escape(words).replace("…", r"[\s\S]*")) as caught:
        run_ranks(fn, ranks, timeout=0.8)
    assert caught.value.rank == blamed and no_rank_lives()


def one_step_less(rank, wrap):
    model = wrap(torch.nn.Linear(4, 4))
    for _ in range(1 if rank == 1 else 2):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    "wrap",
    [torch.nn.parallel.DistributedDataParallel, DataParallel],
    ids=["DDP", "ours"],
)
def test_a_rank_with_a_batch_less_is_blamed_and_not_those_that_wait_in_backward(wrap):
    with pytest.raises(RankError, match="rank 1 never arrived where ranks? 0") as caught:
        run_ranks(one_step_less, 2, wrap, timeout=1.5)
    assert caught.value.rank == 1


class LeavesPython(Exception):
    def __reduce__(self):
        return sys.exit, (9,)


def test_an_exception_that_cannot_be_made_again_does_not_end_the_launcher():
    def fails(rank):
        raise LeavesPython("as it is")

    with pytest.raises(RankError, match="raised .*LeavesPython: as it is") as caught:
        run_ranks(fails, 1)
    assert caught.value.__cause__ is None


def test_the_clock_starts_when_all_ranks_are_ready(monkeypatch):
    def slow_to_read():
        time.sleep(1)
        return None

    class SlowToRead:
        def __reduce__(self):
            return slow_to_read, ()

    assert run_ranks(lambda rank, slow: rank, 2, SlowToRead(), timeout=0.9) == [0, 1]
    monkeypatch.setattr(processes, "START_SECONDS", 0.2)
    with pytest.raises(RankError, match=r"after 0.5 s, ranks 0, 1 did not end\n  rank 0 has not started"):
        run_ranks(lambda rank, slow: rank, 2, SlowToRead(), timeout=0.5)
