"""Chapter 13: launches and failures; each technique beside one process, a formula and PyTorch's own."""

from __future__ import annotations

import functools
import os
import signal
import time

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from memlab.book.measures.timing import compared, interleaved, spread
from memlab.book.steps import shared_out
from memlab.book.workloads import GPT, text_batch
from memlab.data_parallelism import full_state_dict
from memlab.memory_timeline import Meter
from memlab.ranks import RankError, run_ranks

LAUNCHES, FAILURES = 100, 60
STAGES = {"DataParallel": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}


def ours(model: GPT, stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A rank's share of a GPT and of its AdamW."""
    return shared_out(model, stage, functools.partial(torch.optim.AdamW, lr=1e-3))


def theirs(model: GPT, stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same by DDP; by DDP and ZeroRedundancyOptimizer; by FSDP2."""
    if stage == 3:
        mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))  # it would take a GPU that is there
        for module in (*model.blocks, model):
            fsdp2(module, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    part = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if stage == 1:
        return part, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return part, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(part: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> None:
    """Forward, backward, the optimizer's step."""
    part(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- launches


def nothing(rank: int) -> int:
    """What is launched."""
    return rank


def failing(rank: int, who: int, how: str) -> None:
    """One rank fails, and the others wait for it in a collective."""
    if rank == who and how == "raises":
        raise ArithmeticError("planted")
    if rank == who and how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == who and how == "never arrives":
        time.sleep(600)
    distributed.all_reduce(torch.ones(4))


def launches(device: str, rounds: int) -> list[tuple]:
    """How long a launch takes; how many of many have the right results; how many planted failures name their rank."""
    many, faults = (LAUNCHES, FAILURES) if rounds > 1 else (2, 3)
    run_ranks(nothing, 4)
    times, right, named = [], 0, 0
    for _ in range(many):
        start = time.perf_counter()
        right += run_ranks(nothing, 4) == [0, 1, 2, 3]
        times.append(time.perf_counter() - start)
    for i in range(faults):
        how, who = ("raises", "is killed", "never arrives")[i % 3], i // 3 % 4
        try:
            run_ranks(failing, 4, who, how, timeout=1 if how == "never arrives" else 30)
        except RankError as error:
            named += f"rank {who}" in str(error).splitlines()[0]
    return [
        ("launch of 4 ranks, after the first", f"{spread(times, '{:.3f}')} s", "≤ 0.2 s"),
        ("… launches with the right results", f"{right} of {many}", "all"),
        ("… planted failures that name their rank", f"{named} of {faults}", "all"),
    ]


# ---- equal to one process


def ten_steps(rank: int, stage: int | None) -> dict[str, Tensor]:
    """A small GPT's weights in FP64 after ten steps on this rank's parts of ten batches; None: on the whole of them."""
    ranks = 1 if stage is None else distributed.get_world_size()
    torch.manual_seed(0)
    model = GPT(layers=2, width=32, heads=2, context=32).double()
    part, optimizer = (model, torch.optim.AdamW(model.parameters(), lr=1e-3)) if stage is None else ours(model, stage)
    for seed in range(10):
        step(part, optimizer, tuple(tensor.chunk(ranks)[rank] for tensor in text_batch(8, 32, seed=seed)))
    if stage == 3:
        return full_state_dict(model)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal_to_one_process(device: str, rounds: int) -> list[tuple]:
    """How far each technique's weights on 4 ranks are from one process's, by the norm of each tensor."""
    truth, parts = ten_steps(0, None), []
    for name, stage in STAGES.items():
        found = run_ranks(ten_steps, 4, stage)[0]
        parts.append(f"{name} {max(float((found[n] - p).norm() / p.norm()) for n, p in truth.items()):.0e}")
    return [("4 ranks / one process, 10 steps in FP64, by norm, worst tensor", ", ".join(parts), "≤ 1e-12")]


# ---- beside PyTorch's own


def side_by_side(rank: int, stage: int, rounds: int, sizes: dict, batch: int) -> tuple[dict, dict]:
    """Step times of ours and theirs in turn on this rank, in seconds, and their peaks in bytes of storages."""
    torch.set_num_threads(1)
    runs, peaks, shared = {}, {}, tuple(tensor.chunk(2)[rank] for tensor in text_batch(batch, sizes["context"]))
    for name, share in {"ours": ours, "PyTorch's": theirs}.items():
        torch.manual_seed(0)
        part, optimizer = share(GPT(**sizes), stage)
        runs[name] = functools.partial(step, part, optimizer, shared)
        runs[name]()
        with Meter(part, optimizer, inputs=shared) as meter:
            runs[name]()
        peaks[name] = meter.timeline.peak_bytes
    return interleaved(runs, rounds), peaks


def beside_pytorch(device: str, rounds: int) -> list[tuple]:
    """Step time and peak of each technique and PyTorch's of the same stage, on two ranks and gloo."""
    sizes = {"layers": 6, "width": 256, "heads": 4, "context": 128}
    reach = {0: "", 1: "", 3: "≤ 1.25×"}
    rows = []
    for name, stage in {
        "DataParallel / DDP": 0,
        "ZeRO-1 / ZeroRedundancyOptimizer": 1,
        "fully_shard / FSDP2": 3,
    }.items():
        times, peaks = run_ranks(side_by_side, 2, stage, rounds, sizes, 16, timeout=600)[0]
        rows.append((f"{name}, step on 2 ranks, gloo", compared(times, "ours", "PyTorch's"), reach[stage]))
        ratio = peaks["ours"] / peaks["PyTorch's"]
        rows.append(("… peak (storages)", f"{ratio:.3f}× ({peaks['ours']:,} B)", "≤ 1.05×" if stage == 3 else ""))
    return rows
