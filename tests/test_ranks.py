"""Ranks that work: what they are given, what comes back, what they print, and that nothing of them remains."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import spawn

import psutil
import pytest
import torch
from torch import distributed

from memlab.memory_timeline import Meter
from memlab.ranks import (
    RankError,
    all_gather,
    by_value,
    exchange,
    receive,
    reduce_scatter,
    run_ranks,
    send,
    server,
    worker,
)
from tests.harness import nothing_left_behind, refusals, refused
from tests.ranks_helpers import planted, raises

WORLD = 4


def test_code_that_travels_by_value_keeps_its_file():
    class Model:
        def forward(self, x):
            return [lambda: x for _ in range(2)]

    made = pickle.loads(by_value.dumps(Model))
    forward = made.forward.__code__
    inner = next(constant for constant in forward.co_consts if isinstance(constant, types.CodeType))
    assert forward.co_filename == inner.co_filename == __file__
    assert forward.co_firstlineno == Model.forward.__code__.co_firstlineno and made().forward(3)[1]() == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.bool])
def test_tensors_of_every_dtype_are_copied_as_they_are(dtype):
    whole = torch.arange(24 * dtype.itemsize, dtype=torch.uint8).remainder(2).view(dtype).view(4, 6)
    for tensor in (whole, whole[1:, ::2], whole.t(), torch.nn.Parameter(whole, requires_grad=False)):
        there = pickle.loads(by_value.dumps({"tensor": tensor}))["tensor"]
        assert type(there) is type(tensor) and there.dtype is dtype and there.stride() == tensor.stride()
        assert there.untyped_storage().tolist() == tensor.untyped_storage().tolist()
        assert there.shape == tensor.shape and there.storage_offset() == tensor.storage_offset()


@pytest.fixture(scope="module")
def results():
    @dataclass
    class Facts:
        """As defined in a cell: the launched process can import it from nowhere."""

        environment: dict
        threads: int
        group: tuple
        tensors: dict
        timeline: object
        talk: dict

    def facts(rank, shared, factor):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
        piece, whole = torch.full((2,), float(rank)), torch.empty(2 * WORLD)
        all_gather(whole, piece)
        reduce_scatter(piece, whole)
        weight = torch.nn.Parameter(shared * factor)
        with Meter() as meter:
            kept = torch.ones(1000) * rank
        right, left = (rank + 1) % WORLD, (rank - 1) % WORLD
        theirs = exchange(shared.t() + rank, right, torch.zeros(3, 2).t(), left)
        exchange(torch.empty(0), right, torch.empty(0), left)  # nothing, which gloo does not send
        wave = torch.full((1,), 1 + rank * 1j).conj()  # its imaginary part is negative by a bit of the tensor only
        conjugate, negative = torch.zeros_like(wave).conj(), torch.zeros_like(wave).conj().imag
        exchange(wave, right, conjugate, left)
        exchange(wave.imag, right, negative, left)
        sent = torch.tensor([rank, rank], dtype=torch.int64)
        if rank % 2 == 0:
            send(sent, rank + 1)
        else:
            receive(sent, rank - 1)
        return Facts(
            {name: os.environ[name] for name in names},
            torch.get_num_threads(),
            (distributed.get_rank(), distributed.get_world_size(), distributed.get_backend()),
            {"piece": piece, "whole": whole, "weight": weight, "view": kept[:2], "half": kept[:1].bfloat16()},
            meter.timeline,
            {"theirs": theirs, "sent": sent, "wave": (conjugate.item(), negative.item())},
        )

    shared = torch.arange(6.0).view(3, 2)
    return Facts, shared, run_ranks(facts, WORLD, shared, 10.0)


def test_results_come_back_by_rank_of_the_very_class_that_the_caller_defined(results):
    kind, _, found = results
    assert [type(facts) for facts in found] == [kind] * WORLD
    assert [facts.group[:2] for facts in found] == [(rank, WORLD) for rank in range(WORLD)]
    if not torch.cuda.is_available():  # with a GPU for each rank the group is NCCL's
        assert {facts.group[2] for facts in found} == {"gloo"}


def test_a_rank_knows_who_it_is_and_shares_the_cpus_threads(results):
    for rank, facts in enumerate(results[2]):
        assert [facts.environment[name] for name in ("RANK", "LOCAL_RANK")] == [str(rank)] * 2
        assert facts.environment["WORLD_SIZE"] == facts.environment["LOCAL_WORLD_SIZE"] == str(WORLD)
        assert facts.threads == int(facts.environment["OMP_NUM_THREADS"]) == max(1, torch.get_num_threads() // WORLD)


def test_tensors_and_timelines_travel_there_and_back_by_value(results):
    _, shared, found = results
    for rank, facts in enumerate(found):
        weight = facts.tensors["weight"]
        assert torch.equal(weight, shared * 10) and isinstance(weight, torch.nn.Parameter)
        assert facts.tensors["view"].tolist() == [rank, rank] and facts.tensors["half"].dtype is torch.bfloat16
        assert not any(tensor.is_shared() for tensor in facts.tensors.values())
        assert facts.timeline.peak_bytes == 4000 + 4000
        lines = {storage.line.source for storage in facts.timeline.storages.values()}
        assert lines == {"kept = torch.ones(1000) * rank"}


def test_gather_and_scatter_are_what_they_are_called_and_messages_arrive_whatever_the_layout(results):
    _, shared, found = results
    for rank, facts in enumerate(found):
        left = (rank - 1) % WORLD
        assert facts.tensors["whole"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert facts.tensors["piece"].tolist() == [WORLD * rank] * 2
        assert torch.equal(facts.talk["theirs"], shared.t() + left)
        assert facts.talk["sent"].tolist() == [rank - rank % 2] * 2
        assert facts.talk["wave"] == (1 - left * 1j, -left)


def test_more_ranks_than_cores_and_a_single_one():
    def total(rank):
        x = torch.ones(3, dtype=torch.float64)
        distributed.all_reduce(x)
        return x.tolist()

    many = min(2 * (os.cpu_count() or 1) + 1, 9)
    assert run_ranks(total, many) == [[many] * 3] * many
    assert run_ranks(total, 1) == [[1.0] * 3]


def test_ranks_see_the_callers_directory_and_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_LATELY", "yes")
    for name in ("RANK", "WORLD_SIZE"):  # left by somebody, and no launcher's
        monkeypatch.setenv(name, "7")
    seen = run_ranks(lambda rank: (os.getcwd(), os.environ["SET_LATELY"], os.environ["WORLD_SIZE"]), 2)
    assert seen == [(str(tmp_path), "yes", "2")] * 2
    assert os.environ["RANK"] == "7"


def test_two_threads_may_launch_at_once():
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda name: run_ranks(lambda rank, name: (name, rank), 2, name), "ab"))
    assert found == [[("a", 0), ("a", 1)], [("b", 0), ("b", 1)]]


def test_printed_lines_are_grouped_by_rank_also_those_of_a_shell_and_of_c(capsys):
    def prints(rank):
        import ctypes
        import sys

        print("first", rank)
        os.system(f"echo from a shell {rank}")
        print("10 %\r100 %")
        print("é\n\nlast", end="")
        sys.stdout.flush()
        ctypes.CDLL(None).printf(b" of C\n")
        print("aside", file=sys.stderr)
        sys.stdout.close()  # a rank may do that, too

    run_ranks(prints, 2)
    out, err = capsys.readouterr()
    lines = ["first {0}", "from a shell {0}", "100 %", "é", "", "last of C"]
    assert out == "".join(f"rank {rank} │ {line}".format(rank).rstrip() + "\n" for rank in (0, 1) for line in lines)
    assert err == "rank 0 │ aside\nrank 1 │ aside\n"


def test_of_very_much_only_the_end_is_shown_also_before_a_failure(capsys):
    def fails(rank):
        print("x" * 100 + "\n" + "y" * (1 << 20) + "\nend")
        raise ValueError

    refused(lambda: run_ranks(fails, 1), RankError, "")
    shown = capsys.readouterr().out
    assert len(shown) < (1 << 20) + 200 and shown.endswith("rank 0 │ end\n") and "bytes before this are left" in shown


@refusals(
    {
        "no function": (lambda: run_ranks(None, 2), TypeError, "found NoneType; pass the function itself"),
        "no ranks": (lambda: run_ranks(print, 0), ValueError, "at least one rank, found world=0"),
        "a fraction": (lambda: run_ranks(print, 2.0), TypeError, "world as a number of ranks, found float"),
        "a yes": (lambda: run_ranks(print, True), TypeError, "world as a number"),
        "a lock": (
            lambda: run_ranks(print, 2, threading.Lock()),
            TypeError,
            "to other processes, found TypeError…lock",
        ),
        "no time": (lambda: run_ranks(print, 2, timeout=0), ValueError, "expected timeout in seconds"),
        "all time": (lambda: run_ranks(print, 2, timeout=float("inf")), ValueError, "expected timeout in seconds"),
        "words": (lambda: run_ranks(print, 2, timeout="60"), ValueError, "expected timeout in seconds"),
    }
)
def test_a_call_that_cannot_work_is_explained(call, error, words):
    refused(call, error, words)


def test_a_rank_cannot_launch_ranks():
    words = "raised RuntimeError: expected run_ranks outside of ranks"
    refused(lambda: run_ranks(lambda rank: run_ranks(print, 2), 2), RankError, words)


def test_nothing_stays_behind_neither_after_success_nor_after_failure(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_ranks(print, 1)  # the server that forks ranks is here to stay
    me = psutil.Process()
    before = threading.active_count(), dict(os.environ), len(me.children(recursive=True))
    with nothing_left_behind():
        run_ranks(print, 2)
        assert planted(raises, culprit=1, world=2).rank == 1
    assert (threading.active_count(), dict(os.environ), len(me.children(recursive=True))) == before
    assert list(tmp_path.iterdir()) == []


def test_while_ranks_start_another_threads_processes_get_their_program(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", types.SimpleNamespace(name="program"))
    with server.without_program():
        assert spawn.get_preparation_data("Process-1")["init_main_from_name"] == "program"
        assert not [key for key in spawn.get_preparation_data(worker.process_name(0)) if key.startswith("init_main")]


def test_a_forked_process_is_told_where_to_launch_ranks():
    run_ranks(lambda rank: None, 1)
    read, write = os.pipe()
    if not (pid := os.fork()):
        try:
            run_ranks(lambda rank: None, 1)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with os.fdopen(read) as said:
        assert said.read().startswith("expected run_ranks in the main process")
