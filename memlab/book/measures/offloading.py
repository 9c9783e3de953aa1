"""Chapter 09: swaps to files and to the host beside none and PyTorch's; the step on the host; streamed weights."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from tempfile import TemporaryDirectory

import torch
from torch.autograd.graph import save_on_cpu

from memlab.book.measures.timing import compared, interleaved
from memlab.book.steps import weights_in
from memlab.book.workloads import GPT, text_batch
from memlab.gradient_checkpointing import checkpoint
from memlab.memory_timeline import Meter, Timeline
from memlab.offloading import OffloadedOptimizer, stream_weights, swap_activations


def metered(model, batch, context) -> tuple[int, int, list[torch.Tensor]]:
    """Forward in the context, then backward: bytes held after forward, bytes at the peak, and the gradients.

    The bytes are those on the model's device: what has left it may be more than what stays.
    """
    torch.manual_seed(1)
    model.zero_grad()
    with Meter(model, inputs=batch) as forward, context:
        loss = model(*batch)
    loss.backward()
    model.zero_grad()
    torch.manual_seed(1)
    with Meter(model, inputs=batch) as meter:
        with context:
            loss = model(*batch)
        loss.backward()
    held, peak = where_the_model_is(forward.timeline).totals[-1], where_the_model_is(meter.timeline).peak_bytes
    return held, peak, [parameter.grad.clone() for parameter in model.parameters()]


def where_the_model_is(timeline: Timeline) -> Timeline:
    """The timeline of the device that the parameters are on."""
    return timeline.on(next(one.device for one in timeline.of_all_devices[0] if one.category == "parameter"))


def step(model, batch, context) -> None:
    """Forward in the context, then backward."""
    with context:
        loss = model(*batch)
    loss.backward()


def swapped_to_files(device: str, rounds: int) -> list[tuple]:
    """A GPT's activations to a file: ahead of need, each waited for, and not at all."""
    if device == "cuda":  # its row is the host's memory
        return []
    batch = text_batch(16, 128)
    torch.manual_seed(0)
    model = GPT(layers=6, width=256, heads=4, context=128, dropout=0.1)
    with TemporaryDirectory() as folder:
        ways = {"none": nullcontext()}
        for name, prefetch in {"async": 2, "sync": 0}.items():
            ways[name] = swap_activations(folder, ram_bytes="16 MiB", prefetch=prefetch)
        found = {name: metered(model, batch, context) for name, context in ways.items()}
        times = interleaved({n: functools.partial(step, model, batch, context) for n, context in ways.items()}, rounds)
    same = all(all(map(torch.equal, found["none"][2], found[name][2])) for name in ("async", "sync"))
    parts = ", ".join(f"{name} {found[name][1] / found['none'][1]:.3f}×" for name in ("async", "sync"))
    return [
        ("swap to a file, async / sync, time", compared(times, "async", "sync"), "< 1×"),
        ("swap to a file, async / none, time", compared(times, "async", "none"), ""),
        ("swap to a file, peak (storages) / none", f"{parts}; {'bitwise' if same else 'differs'}", "≤ 0.35×, bitwise"),
    ]


def wide_gpt(device: str) -> GPT:
    """A GPT of 6 GiB in BF16, made where it is to be: in main memory, in FP32, it would take twice that first."""
    with weights_in("bf16"), torch.device(device):
        return GPT(layers=4, width=8192, heads=64, context=1024)


def swapped_to_the_host(device: str, rounds: int) -> list[tuple]:
    """On a GPU: all activations to pinned memory beside PyTorch's `save_on_cpu`, and block inputs of a wide GPT."""
    if device != "cuda":
        return [("swap to the host / save_on_cpu(pin_memory=True), time", "needs a GPU", "≤ 0.67×")]
    rows = []
    for texts, make in ((16, lambda: GPT(layers=8, width=1024, heads=8, context=1024)), (4, lambda: wide_gpt(device))):
        batch = [tensor.to(device) for tensor in text_batch(texts, 1024)]
        model = make().to(device, torch.bfloat16)
        ways = {"ours": swap_activations("cpu"), "PyTorch's": save_on_cpu(pin_memory=True), "none": nullcontext()}
        held = {name: metered(model, batch, context)[0] for name, context in ways.items()}
        times = interleaved({n: functools.partial(step, model, batch, context) for n, context in ways.items()}, rounds)
        freed = ", ".join(f"{name} {held['none'] - held[name]:,} B" for name in ("ours", "PyTorch's"))
        row = f"swap to the host / save_on_cpu(pin_memory=True), width {model.head.in_features:,}, time"
        rows += [
            (row, compared(times, "ours", "PyTorch's"), "≤ 0.67×"),
            ("… freed after forward", freed, "as much"),
            ("… ours / none, time", compared(times, "ours", "none"), ""),
        ]
        del model, ways
    batch = [tensor.to(device) for tensor in text_batch(16, 1024)]
    wide = wide_gpt(device)
    for block in wide.blocks:
        block.forward = functools.partial(checkpoint, block.forward)
    inputs = {"inputs swapped": swap_activations("cpu"), "checkpointed": nullcontext()}
    overhead = interleaved({n: functools.partial(step, wide, batch, context) for n, context in inputs.items()}, rounds)
    return [
        *rows,
        (
            "block inputs swapped / checkpointed, width 8192",
            compared(overhead, "inputs swapped", "checkpointed"),
            "≤ 1.05×",
        ),
    ]


def plain_host_step(parameters, masters, optimizer) -> None:
    """What the row compares with: gradients widened on the host, one step, weights rounded."""
    with torch.no_grad():
        for p, master in zip(parameters, masters, strict=True):
            master.grad = p.grad.to("cpu", torch.float32)
    optimizer.step()
    with torch.no_grad():
        for p, master in zip(parameters, masters, strict=True):
            p.copy_(master)


def with_gradients(device: str) -> list[torch.nn.Parameter]:
    """The parameters of a GPT in BF16, 19 million, and a gradient for each."""
    torch.manual_seed(0)
    parameters = list(GPT(layers=6, width=512, heads=8, context=128).to(device, torch.bfloat16).parameters())
    for p in parameters:
        p.grad = torch.randn_like(p)
    return parameters


def offloaded_step(device: str, rounds: int) -> list[tuple]:
    """The optimizer's step alone: 16-bit weights, states on the host, ours and the plain loop; and states in a file."""
    rows = []
    for kind, options in {"fused": {"fused": True}, "for-loop": {"foreach": False}}.items():
        plain = with_gradients(device)  # weights of its own: ours takes over what others write to its weights
        masters = [p.detach().to("cpu", torch.float32).requires_grad_() for p in plain]
        runs = {"plain": functools.partial(plain_host_step, plain, masters, torch.optim.AdamW(masters, **options))}
        with TemporaryDirectory() as folder:
            for name, to in {"ours": "cpu", "in a file": folder}.items():
                optimizer = OffloadedOptimizer(with_gradients(device), torch.optim.AdamW, to=to, **options)
                runs[name] = optimizer.step
            times = interleaved(runs, rounds)
            optimizer.close()
        row = f"OffloadedOptimizer step / plain loop, {kind} AdamW"
        rows.append((row, compared(times, "ours", "plain"), "≤ 1.1×"))
        rows.append((f"… with its states in a file, {kind}", compared(times, "in a file", "plain"), ""))
    return rows


def streamed_weights(device: str, rounds: int) -> list[tuple]:
    """Forward and backward with weights from a file, a layer ahead and not, beside all in memory."""
    torch.manual_seed(0)
    batch = [tensor.to(device) for tensor in text_batch(4, 128)]
    models = {
        name: GPT(layers=8, width=384, heads=6, context=128).to(device) for name in ("all there", "ahead", "waited for")
    }
    with TemporaryDirectory() as folder:
        ahead = stream_weights(models["ahead"], models["ahead"].blocks, folder)
        waited = stream_weights(models["waited for"], models["waited for"].blocks, folder, prefetch=0)
        with ahead, waited:
            runs = {name: functools.partial(step, model, batch, nullcontext()) for name, model in models.items()}
            times = interleaved(runs, rounds)
    return [
        ("weights streamed from a file / all in memory, time", compared(times, "ahead", "all there"), ""),
        ("… a layer ahead / each waited for", compared(times, "ahead", "waited for"), ""),
    ]
