"""Chapter 08: checkpoints beside PyTorch's, chosen ops, attention's own backward, and plans for a budget of bytes."""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from memlab.book.measures.timing import compared, interleaved
from memlab.book.stages import vgg_stages
from memlab.book.workloads import GPT, text_batch
from memlab.gradient_checkpointing import (
    LINEARS,
    Plan,
    checkpoint,
    checkpointed,
    checkpointed_attention,
    measure_chain,
    plan_segments,
    segment_bounds,
)
from memlab.memory_hierarchy import OpCounter
from memlab.memory_timeline import Meter

WAYS = {"checkpoint": checkpoint, "PyTorch's": functools.partial(checkpoint_of_torch, use_reentrant=False)}


def checkpointed_step(device: str, rounds: int) -> list[tuple]:
    """Forward and backward of a GPT whose blocks are all checkpointed, by ours and by PyTorch's."""
    batch = [tensor.to(device) for tensor in text_batch(4, 128)]
    models = {}
    for name, way in WAYS.items():
        torch.manual_seed(0)
        models[name] = model = GPT(layers=4, width=256, heads=4, context=128, dropout=0.1).to(device)
        for block in model.blocks:
            block.forward = functools.partial(way, block.forward)
    peaks, gradients = {}, {}
    for name, model in models.items():
        torch.manual_seed(1)
        with Meter(model, inputs=batch) as meter:
            loss = model(*batch)
            loss.backward()
        peaks[name] = meter.timeline.peak_bytes
        gradients[name] = [parameter.grad.clone() for parameter in model.parameters()]
        del loss
    ours, theirs = WAYS
    same = all(map(torch.equal, gradients[ours], gradients[theirs]))
    apart = f"{peaks[ours] - peaks[theirs]:+,} B of {peaks[theirs]:,} B; gradients {'bitwise' if same else 'differ'}"
    times = interleaved({name: lambda model=model: model(*batch).backward() for name, model in models.items()}, rounds)
    row = "checkpointed GPT step / torch.utils.checkpoint"
    return [
        (f"{row}, time", compared(times, ours, theirs), "≤ 1.03×"),
        (f"{row}, peak (storages)", apart, "at most +0 B, bitwise"),
    ]


def selective_step(device: str, rounds: int) -> list[tuple]:
    """Attention's core and cheap ops made again and linear layers kept, where heads · tokens / width is 16."""
    model = GPT(layers=6, width=256, heads=16, context=256, attention="by hand").to(device)
    batch = [tensor.to(device) for tensor in text_batch(1, 256)]
    model(*batch).backward()  # the gradients are there from now on
    choices = {"nothing": None, "every block": {}, "all but linear layers": {"keep": LINEARS}, "under 20": {"keep": 20}}
    peaks, flops = {}, {}

    def inside(choice: dict | None):
        return nullcontext() if choice is None else checkpointed(model, model.blocks, **choice)

    def step(choice: dict | None) -> None:
        with inside(choice):
            model(*batch).backward()

    for name, choice in choices.items():
        with Meter(model, inputs=batch) as meter:
            step(choice)
        with OpCounter() as counter:
            step(choice)
        peaks[name], flops[name] = meter.timeline.peak_bytes, sum(op.flops for op in counter.ops)
    times = interleaved({name: functools.partial(step, choice) for name, choice in choices.items()}, rounds)
    none, full = "nothing", "every block"
    rows = []
    for name, words in (("all but linear layers", "all but linear layers"), ("under 20", "ops under 20 FLOPs a byte")):
        gain = (peaks[none] - peaks[name]) / (peaks[none] - peaks[full])
        again = (flops[name] - flops[none]) / (flops[full] - flops[none])
        rows.append((f"selective: {words} again / every block, saving (peak)", f"{gain:.1%}", "≥ 65 %"))
        rows.append((f"selective: {words} again / every block, FLOPs again", f"{again:.1%}", "≤ 40 %"))
        rows.append((f"selective: {words} again / every block, time", compared(times, name, full), ""))
    rows.append(("every block checkpointed / none, attention by hand, time", compared(times, full, none), ""))
    return rows


def attention_backward(device: str, rounds: int) -> list[tuple]:
    """Attention that makes its tiles again in backward: what it saves, its error, its bits and its time."""
    shape = batch, heads, tokens, width = 2, 4, 300, 64
    q, k, v = (torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True) for _ in range(3))
    saved: dict[int, int] = {}

    def note(tensor):
        saved[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = checkpointed_attention(q, k, v, causal=True)
    expected = 4 * batch * heads * tokens * width + batch * heads * tokens
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)
    plain = (q @ k.mT / math.sqrt(width)).masked_fill(mask, -math.inf).softmax(-1) @ v
    seed = torch.randn_like(out)
    found, truth = (torch.autograd.grad(result, (q, k, v), seed, retain_graph=True) for result in (out, plain))
    error = max(((a - b).norm() / b.norm()).item() for a, b in zip((out, *found), (plain, *truth), strict=True))
    again = torch.autograd.grad(checkpointed_attention(q, k, v, causal=True), (q, k, v), seed)
    bits = "the same bits" if all(map(torch.equal, found, again)) else "other bits"
    rows = [
        ("attention's backward in tiles, elements saved (4·BHTd + BHT)", f"{sum(saved.values()):,}", f"{expected:,}"),
        ("attention's backward in tiles, error by norm, FP64", f"{error:.1e}; {bits} again", "≤ 1e-12, the same"),
    ]
    for size, causal in (((1, 8, 2048, 64), False), ((1, 8, 2048, 64), True), ((4, 4, 512, 64), True)):
        q, k, v = (torch.randn(size, device=device, requires_grad=True) for _ in range(3))
        seed = torch.randn(size, device=device)
        runs = {
            name: lambda attend=attend, x=(q, k, v), seed=seed, causal=causal: torch.autograd.grad(
                attend(*x, **causal), x, seed
            )
            for name, attend, causal in (
                ("tiles", checkpointed_attention, {"causal": causal}),
                ("fused", F.scaled_dot_product_attention, {"is_causal": causal}),
            )
        }
        name = f"attention in tiles / SDPA, forward and backward, {' × '.join(map(str, size))}{', causal' * causal}"
        rows.append((name, compared(interleaved(runs, rounds), "tiles", "fused"), "≤ 3×" if device == "cpu" else ""))
    return rows


def optimal_plans(device: str, rounds: int) -> list[tuple]:
    """Plans beside equal segments of no lower peak, on a chain that grows wider while its maps shrink."""
    images, labels = torch.randn(4, 3, 64, 64, device=device), torch.randint(10, (4,), device=device)
    stages = vgg_stages(labels).to(device)
    chain = measure_chain(stages, images)

    def metered(plan: Plan) -> int:
        stages.zero_grad()
        with Meter(stages, inputs=(images, labels)) as meter:
            loss = plan.run(stages, images)
            loss.backward()
        return meter.timeline.peak_bytes

    count = len(stages)
    splits = [Plan(chain, tuple(tuple(range(*b)) for b in segment_bounds(count, k))) for k in range(2, count + 1)]
    peaks = [metered(split) for split in splits]
    less, off, over = [], 0, 0
    for peak in peaks:
        rival = min(split.recomputed for split, other in zip(splits, peaks, strict=True) if other <= peak)
        plan = plan_segments(chain, peak)
        found = metered(plan)
        less.append(1 - plan.recomputed / rival)
        off, over = max(off, abs(found - plan.peak_bytes)), max(over, found - peak)
    row = f"optimal plan / best equal segments, {count} stages"
    return [
        (f"{row}, fewer FLOPs again", f"{min(less):.0%} (at least; at most {max(less):.0%})", "≥ 15 %"),
        (f"{row}, peak: metered against predicted", f"{off:+,} B; over a budget by {max(over, 0):,} B", "0 B"),
    ]
