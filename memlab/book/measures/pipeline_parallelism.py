"""Chapter 15: a GPT in stages beside one process, PyTorch's schedules, what was simulated, and the bubble's formula."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from memlab.book.measures.tensor_parallelism import ten_steps
from memlab.book.measures.timing import compared, interleaved, spread
from memlab.book.pipeline_frameworks import MAKERS, MEMLAB
from memlab.book.spans import idle_share, spans_by_rank
from memlab.book.workloads import GPT, GPTConfig, cross_entropy, gpt_in_layers, name_in_layers, text_batch
from memlab.data_parallelism import DataParallel
from memlab.memory_timeline import Meter
from memlab.pipeline_parallelism import (
    Action,
    Pipeline,
    PipelinePlan,
    bubble_share,
    full_state_dict,
    gpipe,
    gpt_layers,
    gpt_loss,
    load_full_state_dict,
    measure_stages,
    one_forward_one_backward,
    plan_pipeline,
    simulate,
)
from memlab.pipeline_parallelism import interleaved as interleaved_1f1b
from memlab.ranks import imagined_ranks, mesh, run_ranks

SMALL = GPTConfig(layers=2, width=32, heads=4, context=32)
TIMED = GPTConfig(layers=6, width=256, heads=4, context=128)
TEXTS, MICRO_BATCHES, STEPS = 8, 8, 10
AXES = {
    "2 stages, GPipe": {"pipeline": 2},
    "2 stages, 1F1B": {"pipeline": 2},
    "data 2 × stages 2": {"data": 2, "pipeline": 2},
    "stages 2 × tensor 2": {"pipeline": 2, "tensor": 2},
    "data 2 × stages 2 × tensor 2": {"data": 2, "pipeline": 2, "tensor": 2},
}


# ---- equal to one process


def whole_model() -> GPT:
    """A small GPT, the same on every rank."""
    torch.manual_seed(0)
    return GPT(SMALL).double()


def in_layers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A GPT's state dict under the names that its parameters have in the list of its layers."""
    return {name_in_layers(name, SMALL.layers): tensor.detach() for name, tensor in state.items()}


def in_stages(rank: int, ways: list[str]) -> dict[str, dict[str, Tensor]]:
    """The model after ten steps in each of these ways, on all ranks: its full state dict on rank 0."""
    found = {}
    for way in ways:
        axes = mesh(**{"data": 1, "tensor": 1} | AXES[way])
        tensor_group, data_group = axes.get_group("tensor"), axes.get_group("data")
        part = TEXTS // axes["data"].size()
        rows = slice(part * axes.get_local_rank("data"), part * (axes.get_local_rank("data") + 1))
        sizes = {name: getattr(SMALL, name) for name in ("layers", "width", "heads", "context", "vocabulary")}
        layers = gpt_layers(**sizes, group=tensor_group, dtype=torch.float64)
        schedule = (gpipe if "GPipe" in way else one_forward_one_backward)(2, 4)
        plan = plan_pipeline(layers, schedule, text_batch(part, SMALL.context)[0])
        wrap = functools.partial(DataParallel, group=data_group) if axes["data"].size() > 1 else None
        loss_fn = functools.partial(gpt_loss, group=tensor_group)
        pipeline = Pipeline(plan, loss_fn, group=axes.get_group("pipeline"), wrap=wrap)
        load_full_state_dict(pipeline, in_layers(whole_model().state_dict()), tensor_group)
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
        for seed in range(STEPS):
            x, y = text_batch(TEXTS, SMALL.context, seed=seed)
            pipeline.step(x[rows], y[rows])
            optimizer.step()
            optimizer.zero_grad()
        found[way] = full_state_dict(pipeline, tensor_group)
    return found


def piped_equal_to_one_process(device: str, rounds: int) -> list[tuple]:
    """How far the weights of a GPT in stages, alone and with the other axes, are from one process's, by norm."""
    model, found = whole_model(), {}
    ten_steps(model, lambda seed: model(*text_batch(TEXTS, SMALL.context, seed=seed)))
    for ranks, ways in itertools.groupby(AXES, key=lambda way: 2 ** len(AXES[way])):
        found |= run_ranks(in_stages, ranks, list(ways))[0]
    parts = []
    for way, weights in found.items():
        expected = in_layers(model.state_dict())
        worst = max(float((weights[name] - p).norm() / p.norm()) for name, p in expected.items())
        parts.append(f"{way} {worst:.0e}")
    return [(f"GPT in stages / one process, {STEPS} steps in FP64, by norm, worst tensor", "; ".join(parts), "≤ 1e-12")]


# ---- beside PyTorch


def in_turn(rank: int, rounds: int) -> tuple[dict, dict, dict]:
    """Of each way, forwards and backwards of a step: seconds, peak bytes, and of memlab's the spans, round by round."""
    torch.set_num_threads(1)
    x, y = text_batch(TEXTS, TIMED.context)
    torch.manual_seed(0)
    model, pipelines, runs, peaks, spans = GPT(TIMED), {}, {}, {}, {}
    for name, make in MAKERS.items():

        def run(name: str = name) -> None:
            pipelines[name].step(x, y)
            spans.setdefault(name, []).append(getattr(pipelines[name], "spans", None))
            for module in pipelines[name].modules.values():
                module.zero_grad()

        with Meter(inputs=(x, y)) as meter:  # from the beginning: what is kept between steps counts, too
            pipelines[name] = make(model, x, MICRO_BATCHES)
            run()
            begin = len(meter.timeline)
            run()
        runs[name], peaks[name] = run, max(meter.timeline.totals[begin:])
    times = interleaved(runs, rounds)
    return times, peaks, {name: found[-rounds:] for name, found in spans.items()}


def piped_beside_pytorch(device: str, rounds: int) -> list[tuple]:
    """Step time and peak of ours and PyTorch's, schedule by schedule, and the bubble by formula and by the clock."""
    on_ranks, rows = run_ranks(in_turn, 2, rounds, timeout=900), []
    times = on_ranks[0][0]  # rank 0 begins a step and ends it
    for schedule in MEMLAB:
        ours, theirs = f"memlab, {schedule}", f"torch, {schedule}"
        what = f"{schedule}, forwards and backwards of a step / torch.distributed.pipelining, 2 ranks, gloo"
        rows.append((what, compared(times, ours, theirs), "≤ 1.05×" if schedule == "1F1B" else ""))
        peaks = [f"{found[ours] / found[theirs]:.3f}× ({found[ours]:,} B)" for _, found, _ in on_ranks]
        rows.append(("… peak (storages), ranks 0 and 1", ", ".join(peaks), ""))
        by_round = zip(*(spans[ours] for *_, spans in on_ranks), strict=True)
        measured = spread([idle_share(spans_by_rank(both)) for both in by_round])
        formula = bubble_share(2, MICRO_BATCHES, 2 if schedule == "interleaved" else 1)
        rows.append(("… bubble: formula beside measured", f"{formula:.2f} beside {measured}", ""))
    return rows


# ---- what was simulated


def on_imagined_rank(plan: PipelinePlan, rank: int, x: Tensor, y: Tensor) -> tuple[list, list[int], int]:
    """Of the second step on one rank: actions with the bytes held after each, its most in flight, and its peak."""
    done, most = [], [0] * plan.schedule.stages

    def after(action: Action) -> None:
        done.append((action, meter.event_count))
        for stage, run in pipeline.runs.items():
            most[stage] = max(most[stage], len(run.in_flight))

    with imagined_ranks(plan.schedule.ranks, rank), Meter(inputs=(x, y)) as meter:
        pipeline = Pipeline(plan, cross_entropy, after=after)
        optimizer = torch.optim.AdamW(pipeline.parameters())
        pipeline.step(x, y)
        optimizer.step()
        done.clear()
        begin = meter.event_count
        pipeline.step(x, y)
        end = meter.event_count
    timeline = meter.timeline
    totals = [held - x.nbytes - y.nbytes for held in timeline.totals]
    peak = max(totals[timeline.event_of(begin) : timeline.event_of(end) + 1])
    return [(action, totals[timeline.event_of(mark)]) for action, mark in done], most, peak


def simulated_beside_metered(device: str, rounds: int) -> list[tuple]:
    """Simulated less metered, of every schedule: in flight, bytes after each action, and each rank's peak."""
    x, y = text_batch(8, SMALL.context)
    apart = {"in flight": [], "bytes after an action": [], "peak": []}
    for schedule in (gpipe(4, 8), one_forward_one_backward(4, 8), interleaved_1f1b(2, 2, 8)):
        torch.manual_seed(0)
        plan = plan_pipeline(gpt_in_layers(SMALL), schedule, x)
        costs = measure_stages(plan, x, y, cross_entropy, optimizer=torch.optim.AdamW, repeats=1)
        simulation = simulate(schedule, costs)
        for rank in range(schedule.ranks):
            found, most, peak_bytes = on_imagined_rank(plan, rank, x, y)
            apart["in flight"] += [simulation.in_flight(s) - most[s] for s in schedule.stages_of(rank)]
            line = [(moment.action, moment.nbytes) for moment in simulation.line(rank)]
            if [action for action, _ in line] != [action for action, _ in found]:
                raise RuntimeError(
                    f"expected rank {rank} of {schedule.name} to do what its list says, found other actions"
                )
            apart["bytes after an action"] += [a - b for (_, a), (_, b) in zip(line, found, strict=True)]
            apart["peak"].append(simulation.peak_bytes(rank) - peak_bytes)
    figure = ", ".join(f"{name} {max(found, key=abs)}" for name, found in apart.items())
    return [("GPT in stages, simulated − metered, GPipe, 1F1B, interleaved, all ranks, worst", figure, "0")]
