"""Chapter 14: a split block and a split GPT beside one process, PyTorch's DTensor, and the formulas."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

from memlab.book.measures.timing import compared, interleaved
from memlab.book.tensor_frameworks import parallelize_block, parallelize_gpt
from memlab.book.workloads import GPT, Block, GPTConfig, text_batch
from memlab.memory_arithmetic import Transformer
from memlab.memory_timeline import Meter
from memlab.ranks import Traffic, imagined_ranks, place_in, run_ranks
from memlab.tensor_parallelism import (
    TensorParallelBlock,
    TensorParallelGPT,
    block_activations,
    full_state_dict,
    load_full_state_dict,
    rank_parameters,
    step_traffic,
)
from memlab.tensor_parallelism.arithmetic import by_collective

SMALL = {"layers": 2, "width": 32, "heads": 4, "context": 32, "vocabulary": 256}
TIMED = {"layers": 6, "width": 256, "heads": 4, "context": 128, "vocabulary": 256}
TEXTS, STEPS = 8, 10


def own_rows(x: Tensor, sequence_parallel: bool) -> Tensor:
    """(batch, tokens, width) → all rows, or this rank's: (rows, width)."""
    rank, ranks = place_in(None) if sequence_parallel else (0, 1)
    return x.flatten(0, 1).chunk(ranks)[rank].clone()


# ---- equal to one process


def ten_steps(model: nn.Module, loss_of: Callable[[int], Tensor]) -> nn.Module:
    """A model after ten steps. loss_of(seed): a step's."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for seed in range(STEPS):
        loss_of(seed).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def streams(seed: int) -> tuple[Tensor, Tensor]:
    """What goes into a block and what should come out: (batch, tokens, width) each, in FP64."""
    numbers = torch.Generator().manual_seed(seed)
    size = (TEXTS, SMALL["context"], SMALL["width"])
    return tuple(torch.randn(size, generator=numbers, dtype=torch.float64) for _ in range(2))


def whole_models() -> dict[str, nn.Module]:
    """A block and a GPT in FP64."""
    torch.manual_seed(0)
    return {"block": Block(GPTConfig(**SMALL)).double(), "GPT": GPT(**SMALL).double()}


def in_one_process() -> dict[str, dict[str, Tensor]]:
    """Both after ten steps, in this process: their state dicts."""
    models = whole_models()
    block, gpt = models.values()
    ten_steps(block, lambda seed: F.mse_loss(block(streams(seed)[0]), streams(seed)[1]))
    ten_steps(gpt, lambda seed: gpt(*text_batch(TEXTS, SMALL["context"], seed=seed)))
    return {name: {key: p.detach() for key, p in model.state_dict().items()} for name, model in models.items()}


def split(rank: int) -> dict[tuple[str, bool], dict[str, Tensor]]:
    """Both, each with and without sequence parallelism, on this rank and the others: their full state dicts."""
    found = {}
    for cut in (False, True):
        options = {"sequence_parallel": cut, "dtype": torch.float64}
        block = TensorParallelBlock(SMALL["width"], SMALL["heads"], **options)
        gpt = TensorParallelGPT(**SMALL, **options)

        def block_loss(seed: int, block: nn.Module = block, cut: bool = cut) -> Tensor:
            x, y = (own_rows(whole, cut) for whole in streams(seed))
            return F.mse_loss(block(x, TEXTS), y, reduction="sum") / streams(seed)[1].numel()

        def gpt_loss(seed: int, gpt: nn.Module = gpt) -> Tensor:
            return gpt(*text_batch(TEXTS, SMALL["context"], seed=seed))

        whole = whole_models()
        for name, model, loss_of in (("block", block, block_loss), ("GPT", gpt, gpt_loss)):
            load_full_state_dict(model, whole[name].state_dict())
            found[name, cut] = full_state_dict(ten_steps(model, loss_of))
    return found


def split_equal_to_one_process(device: str, rounds: int) -> list[tuple]:
    """How far the weights of a split block and GPT are from one process's, by the norm of each tensor."""
    truth, rows = in_one_process(), []
    on_ranks = {ranks: run_ranks(split, ranks)[0] for ranks in (2, 4)}
    for name, expected in truth.items():
        parts = []
        for ranks, cut in itertools.product(on_ranks, (False, True)):
            found = on_ranks[ranks][name, cut]
            worst = max(float((found[key] - p).norm() / p.norm()) for key, p in expected.items())
            parts.append(f"{ranks} ranks{', sequence parallel' if cut else ''} {worst:.0e}")
        what = f"split {name} / one process, {STEPS} steps in FP64, by norm, worst tensor"
        rows.append((what, "; ".join(parts), "≤ 1e-12"))
    return rows


# ---- beside DTensor


class Way(NamedTuple):
    """One of the runs that take turns."""

    run: Callable[[], None]
    held: tuple
    """What the meter is told of from the start: the model, and its optimizer."""


def block_ways(mesh, cut: bool) -> dict[str, Way]:
    """A block's forward and backward, ours and DTensor's. cut: with sequence parallelism."""
    torch.manual_seed(0)
    whole = Block(GPTConfig(**TIMED))
    given = [torch.randn(TEXTS, TIMED["context"], TIMED["width"]) for _ in range(2)]  # x, and its output's gradient
    rank, ranks = place_in(None) if cut else (0, 1)

    def way(block: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Way:
        def there_and_back() -> None:
            forward(x.detach().requires_grad_()).backward(dy)
            block.zero_grad()

        return Way(there_and_back, (block,))

    def ours(**options) -> Way:
        block = TensorParallelBlock(TIMED["width"], TIMED["heads"], sequence_parallel=cut, **options)
        load_full_state_dict(block, whole.state_dict())
        return way(block, lambda x: block(x, TEXTS), *(own_rows(tensor, cut) for tensor in given))

    ways = {"ours": ours(keep_gathered=True), "ours, gathering again": ours()} if cut else {"ours": ours()}
    theirs = parallelize_block(whole, mesh, cut)
    return ways | {"DTensor's": way(theirs, theirs, *(tensor.chunk(ranks, 1)[rank].clone() for tensor in given))}


def gpt_ways(mesh, cut: bool) -> dict[str, Way]:
    """A whole GPT's step with its AdamW, ours and DTensor's."""
    batch = text_batch(TEXTS, TIMED["context"])

    def way(model: nn.Module) -> Way:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step() -> None:
            with loss_parallel():  # of DTensors only
                model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return Way(step, (model, optimizer))

    torch.manual_seed(0)
    options = {"ours": {"keep_gathered": True}, "ours, gathering again": {}} if cut else {"ours": {}}
    ways = {name: way(TensorParallelGPT(**TIMED, sequence_parallel=cut, **how)) for name, how in options.items()}
    return ways | {"DTensor's": way(parallelize_gpt(GPT(**TIMED), mesh, cut))}


STEPPED = {"block, forward and backward": (block_ways, "≤ 1.0×"), "GPT, step with AdamW": (gpt_ways, "")}


def in_turn(rank: int, rounds: int) -> dict[tuple[str, bool], tuple[dict, dict]]:
    """Of each of STEPPED, without and with sequence parallelism: seconds of its ways in turn, and their peak bytes."""
    torch.set_num_threads(1)
    mesh, found = distributed.init_device_mesh("cpu", (place_in(None)[1],)), {}
    for what, cut in itertools.product(STEPPED, (False, True)):
        ways, peaks = STEPPED[what][0](mesh, cut), {}
        for name, way in ways.items():
            way.run()
            with Meter(*way.held) as meter:
                way.run()
            peaks[name] = meter.timeline.peak_bytes
        found[what, cut] = interleaved({name: way.run for name, way in ways.items()}, rounds), peaks
    return found


def split_beside_dtensor(device: str, rounds: int) -> list[tuple]:
    """Step time and peak of ours and DTensor's, a block and a whole GPT, with and without sequence parallelism.

    With sequence parallelism "ours" keeps the gathered inputs, as DTensor does, and sends as much; "gathering again" is
    what it does by default.
    """
    rows = []
    for (what, cut), (times, peaks) in run_ranks(in_turn, 2, rounds, timeout=900)[0].items():
        for name in [name for name in times if name != "DTensor's"]:
            way = ", sequence parallel" * cut + name.removeprefix("ours")
            reach = STEPPED[what][1] if name == "ours" else ""
            rows.append((f"split {what}{way} / DTensor, 2 ranks, gloo", compared(times, name, "DTensor's"), reach))
            ratio = peaks[name] / peaks["DTensor's"]
            rows.append(("… peak (storages)", f"{ratio:.3f}× ({peaks[name]:,} B)", ""))
    return rows


# ---- formulas


def split_bytes(device: str, rounds: int) -> list[tuple]:
    """Formula less meter, in bytes: a rank's parameters, what a block keeps for backward, what a step sends."""
    shape, tokens = Transformer(**SMALL), SMALL["context"]
    apart = {"parameters": [], "activations": [], "sent": []}
    for ranks, (cut, kept) in itertools.product((1, 2, 4), ((False, False), (True, False), (True, True))):
        way = {"sequence_parallel": cut, "keep_gathered": kept}
        with imagined_ranks(ranks):
            with Meter() as built:
                model = TensorParallelGPT(**SMALL, **way)
            x = torch.zeros(TEXTS * tokens // (ranks if cut else 1), shape.width, requires_grad=True)
            dy, block, ids = torch.zeros_like(x), model.blocks[0], torch.zeros(TEXTS, tokens, dtype=torch.long)
            with Meter(block, inputs=(x, dy)) as meter:
                block(x, TEXTS).backward(dy)
            with Traffic() as traffic:
                model(ids, ids).backward()
        begins = next(span.start for span in meter.timeline.phases if span.phase == "backward") - 1
        activations = meter.timeline.bytes_by_category(begins)["activation"]
        predicted = block_activations(shape, TEXTS, tokens, ranks, precision="fp32", hardware="cpu", **way)
        sent = by_collective(step_traffic(shape, TEXTS, tokens, ranks, precision="fp32", **way))
        names = sent.keys() | traffic.by_name().keys()
        apart["parameters"].append(4 * rank_parameters(shape, ranks).parameters - built.timeline.totals[-1])
        apart["activations"].append(predicted.nbytes - activations)
        apart["sent"] += [sent.get(name, 0) - traffic.by_name().get(name, 0) for name in names]
    figure = ", ".join(f"{name} {max(found, key=abs)} B" for name, found in apart.items())
    return [("split GPT, formula − meter, 1, 2, 4 ranks, every way, worst", figure, "0 B")]
