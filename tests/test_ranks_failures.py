"""Ranks that fail: each fault is planted for real, and the launch must end at once and name the right rank."""

from __future__ import annotations

import functools
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

from memlab.data_parallelism import DataParallel, ring_all_reduce
from memlab.ranks import RankError, processes, run_ranks
from memlab.ranks.failures import Failure, culprit, of_death
from tests.ranks_helpers import FAULTS, meet, planted, raises

pytestmark = pytest.mark.skipif(os.name != "posix", reason="ranks are killed by signals here")


def no_rank_lives() -> bool:
    return not [rank for child in psutil.Process().children() for rank in child.children()]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_rank_that_is_to_blame_is_named_and_the_launch_ends(fault):
    error = planted(fault, culprit=2, world=3)
    assert error.rank == 2 and re.match(FAULTS[fault].format(2, 2), str(error))
    assert no_rank_lives()


def test_the_traceback_of_the_rank_is_in_the_error_and_its_exception_is_the_cause():
    error = planted(raises, culprit=1, world=2)
    assert 'raise ValueError(f"planted in {rank}")' in str(error) and str(error).count("Traceback") == 1
    assert error.traceback in str(error) + "\n" and "worker.py" not in error.traceback
    assert isinstance(error.__cause__, ValueError) and str(error.__cause__) == "planted in 1"


def test_a_crash_leaves_the_line_that_crashed():
    def crashes(rank):
        import ctypes

        ctypes.string_at(0)  # the line

    with pytest.raises(RankError, match=r"rank 0 was killed by SIGSEGV") as caught:
        run_ranks(crashes, 1)
    assert "ctypes.string_at(0)  # the line" in caught.value.traceback


def test_of_several_failures_the_first_is_named():
    def both(rank):
        distributed.barrier()
        time.sleep(0.3 * (1 - rank))
        raise ValueError(f"in {rank}")

    with pytest.raises(RankError, match="rank 1 raised ValueError: in 1"):
        run_ranks(both, 2)


def test_a_broken_connection_is_blamed_only_when_nothing_else_is_known():
    victim = Failure(0, 1.0, "raised RuntimeError: Connection closed by peer [127.0.0.1]:4711")
    death, late = of_death(1, 2.0, -9, ""), Failure(2, 3.0, "raised ValueError: of its own")
    assert culprit([victim, death, late]) is death and culprit([victim, late]) is late and culprit([victim]) is victim
    assert not death.may_be_victim and of_death(0, 0.0, None, "").summary == "closed its connection to the launcher"


def test_a_rank_that_says_its_connection_broke_is_believed_when_nobody_died():
    def says(rank):
        if rank == 1:
            raise RuntimeError("Connection closed by peer")
        meet()

    with pytest.raises(RankError, match="rank 1 raised RuntimeError: Connection closed by peer"):
        run_ranks(says, 2)


def test_memory_that_runs_out_is_said():
    def greedy(rank):
        import resource

        if rank == 1:
            resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**26, -1))
            torch.ones(2**40)
        meet()

    with pytest.raises(RankError, match=r"rank 1 raised RuntimeError: .*(memory|allocate)"):
        run_ranks(greedy, 2)


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


def test_a_module_that_ranks_do_not_find_is_said(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def f(rank): pass")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    (tmp_path / "only_here.py").unlink()
    with pytest.raises(RankError, match=r"rank \d raised ModuleNotFoundError: No module named 'only_here'"):
        run_ranks(only_here.f, 2)
    del sys.modules["only_here"]


# ---- ranks that others wait for


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


def test_ranks_in_different_collectives_wait_for_each_other():
    def crossed(rank):
        if rank == 0:
            distributed.all_reduce(torch.ones(4))
        else:
            distributed.all_gather([torch.ones(4)] * 2, torch.ones(4), async_op=True).wait()

    with pytest.raises(RankError, match="ranks 0, 1 wait for each other, and not in the same place") as caught:
        run_ranks(crossed, 2, timeout=1)
    assert "rank 0 waits in all_reduce" in str(caught.value) and "rank 1 waits in wait: " in str(caught.value)


def test_a_ring_that_never_closes_is_told_by_memlabs_own_names():
    def half(rank):
        from memlab.ranks import exchange

        exchange(torch.ones(2), 1 - rank, torch.empty(2), 1 - rank) if rank else time.sleep(1000)

    with pytest.raises(RankError, match="rank 1 waits for messages that did not come, or were not taken") as caught:
        run_ranks(half, 2, timeout=1)
    assert "rank 1 waits in exchange: exchange(torch.ones(2)" in str(caught.value) and caught.value.rank == 0


@pytest.mark.parametrize(("ranks", "blamed"), [(2, 0), (4, 0)])
def test_messages_that_nobody_sends_are_no_fault_of_those_that_had_none_to_send(ranks, blamed):
    def both_receive_first(rank):
        from memlab.ranks import receive

        if rank < 2:
            receive(torch.zeros(4), 1 - rank)

    with pytest.raises(RankError, match="ranks 0, 1 wait for ") as caught:
        run_ranks(both_receive_first, ranks, timeout=1)
    first = str(caught.value).splitlines()[0]
    expected = "each other" if ranks == 2 else "messages that did not come, or were not taken"
    assert caught.value.rank == blamed and first.endswith(f"wait for {expected}")


def one_step_less(rank, wrap):
    model = wrap(torch.nn.Linear(4, 4))
    for _ in range(1 if rank == 1 else 2):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    "wrap",
    [
        torch.nn.parallel.DistributedDataParallel,
        DataParallel,
        functools.partial(DataParallel, all_reduce=ring_all_reduce),
    ],
    ids=["DDP", "library's all-reduce", "ring in a thread"],
)
def test_a_rank_with_a_batch_less_is_blamed_and_not_those_that_wait_in_backward(wrap):
    with pytest.raises(RankError, match="rank 1 never arrived where ranks? 0") as caught:
        run_ranks(one_step_less, 2, wrap, timeout=1.5)
    assert caught.value.rank == 1


def test_a_victim_that_raises_something_else_from_its_broken_connection_is_no_culprit():
    def dies(rank):
        if rank == 0:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            distributed.all_reduce(torch.ones(4))
        except RuntimeError as error:
            raise ValueError("step 17 failed") from error

    for _ in range(5):
        with pytest.raises(RankError, match="rank 0 was killed by SIGKILL"):
            run_ranks(dies, 3, timeout=10)


def test_a_death_after_the_function_returned_says_so():
    assert "after its function had returned" in of_death(1, 0.0, 3, "", returned=True).summary
    assert "before its function returned" in of_death(1, 0.0, 3, "").summary


class LeavesPython(Exception):
    def __reduce__(self):
        return sys.exit, (9,)


def test_an_exception_that_cannot_be_made_again_does_not_end_the_launcher():
    def fails(rank):
        raise LeavesPython("as it is")

    with pytest.raises(RankError, match="raised .*LeavesPython: as it is") as caught:
        run_ranks(fails, 1)
    assert caught.value.__cause__ is None


def test_a_rank_may_close_what_it_prints_to():
    def closes(rank):
        sys.stdout.close()
        return rank

    assert run_ranks(closes, 2) == [0, 1]


def test_a_slow_function_is_no_missing_rank():
    with pytest.raises(RankError, match="after 0.5 s, ranks 0, 1 did not end"):
        run_ranks(lambda rank: time.sleep(1000), 2, timeout=0.5)


def test_a_rank_that_hangs_without_letting_go_of_python_is_found():
    def hangs(rank):
        import ctypes

        if rank == 0:
            ctypes.PyDLL(None).sleep(1000)
        meet()

    with pytest.raises(RankError, match="rank 0 never arrived where rank 1 waits") as caught:
        run_ranks(hangs, 2, timeout=1)
    assert "rank 0 is at: ctypes.PyDLL(None).sleep(1000)" in str(caught.value)
    assert no_rank_lives()


def test_a_stopped_rank_is_found_and_ended():
    def stops(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        meet()

    with pytest.raises(RankError, match="rank 1 never arrived where rank 0 waits") as caught:
        run_ranks(stops, 2, timeout=0.5)
    assert "rank 1 is somewhere that cannot be told" in str(caught.value)
    assert no_rank_lives()


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


def test_the_error_itself_can_be_pickled():
    error = pickle.loads(pickle.dumps(planted(raises, culprit=0, world=1)))
    assert error.rank == 0 and "planted in 0" in str(error) and "ValueError" in error.traceback
