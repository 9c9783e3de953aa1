"""Chapter 06: the loss scaler beside PyTorch's, and what master weights add to a step."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch
from torch import nn

from memlab.book.measures.timing import compared, interleaved, keep_freed_blocks
from memlab.book.workloads import GPT, text_batch
from memlab.memory_arithmetic.optimizers import CHUNK_BYTES, chunks, slice_elements
from memlab.mixed_precision import LossScaler, MasterWeights
from memlab.mixed_precision.flat_group import views_in

SHORT = 8
"""How many times the rounds, for steps that are short on a GPU: chance is a larger part of their time."""


def loss_scaling(device: str, rounds: int) -> list[tuple]:
    """LossScaler against torch.amp.GradScaler: the whole step's time, and every bit, through overflows and growth."""
    rounds *= SHORT if device == "cuda" else 1
    batch = tuple(tensor.to(device) for tensor in text_batch(8, 128))
    settings = {"init_scale": 2.0**10, "growth_interval": 4}
    rows = []
    for fused in (False, True):
        scalers = {"ours": LossScaler(**settings), "torch": torch.amp.GradScaler(device, **settings)}
        models, histories, runs = {}, {name: [] for name in scalers}, {}
        for name, scaler in scalers.items():
            torch.manual_seed(0)
            models[name] = GPT(layers=4, width=256, context=128).to(device)
            runs[name] = scaled_step(models[name], scaler, batch, histories[name], fused=fused)
        times = interleaved(runs, max(rounds, 3))  # as far as the first overflow
        pairs = zip(models["ours"].parameters(), models["torch"].parameters(), strict=True)
        weights = "bitwise" if all(torch.equal(a, b) for a, b in pairs) else "DIFFER"
        history = "equal" if histories["ours"] == histories["torch"] else "DIFFERS"
        changes = [after / before for before, after in itertools.pairwise(histories["ours"])]
        through = f"{sum(c < 1 for c in changes)} overflows and {sum(c > 1 for c in changes)} growths"
        figure = f"{compared(times, 'ours', 'torch')}; parameters {weights}, scale history {history} through {through}"
        row = f"LossScaler / GradScaler, step of a GPT 4 × 256{', fused AdamW' if fused else ''}"
        rows.append((row, figure, "≤ 1.05×, bitwise, equal"))
    return rows


def scaled_step(model: nn.Module, scaler, batch: tuple, history: list[float], *, fused: bool) -> Callable[[], None]:
    """A training step with a scaler: in every seven one overflow, and one whose gradients are clipped."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)

    def step() -> None:
        scaler.scale(model(*batch)).backward()
        if len(history) % 7 == 2:
            model.head.weight.grad[0, 0] = torch.inf
        if len(history) % 7 == 3:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        history.append(scaler.get_scale())

    return step


def master_weights(device: str, rounds: int) -> list[tuple]:
    """A step of AdamW on BF16 weights with FP32 masters, against one on FP32 weights of the same shapes.

    And its ops alone, for how much of the difference is theirs.
    """
    chunk_bytes = CHUNK_BYTES["cpu" if device == "cpu" else "gpu"]
    models = {
        "GPT 4 × 256": [p.shape for p in GPT(layers=4, width=256).parameters()],
        "24 of 1,024 × 1,024": [(1024, 1024)] * 24,
    }
    if device == "cuda":  # which the others leave idle
        models["24 of 4,096 × 4,096"] = [(4096, 4096)] * 24
    implementations = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    rows = []
    keep_freed_blocks()
    for (shapes_name, shapes), (name, how) in itertools.product(models.items(), implementations.items()):
        wide, narrow, bare = (with_gradients(shapes, dtype, device) for dtype in (torch.float32, *[torch.bfloat16] * 2))
        runs = {
            "FP32": torch.optim.AdamW(wide, **how).step,
            "masters": MasterWeights(narrow, torch.optim.AdamW, **how).step,
            "by hand": cast_step_cast(bare, chunk_bytes, how),
        }
        times = interleaved(runs, rounds * SHORT if device == "cuda" and "4,096" not in shapes_name else rounds)
        by_hand = statistics.median(a / b for a, b in zip(times["by hand"], times["FP32"], strict=True))
        figure = compared(times, "masters", "FP32").replace(")", f"; its casts and steps alone {by_hand:.2f}×)")
        rows.append((f"master weights / FP32, step of AdamW ({name}), {shapes_name}", figure, "≤ 1.25×"))
    return rows


def with_gradients(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    """A parameter of each shape, with a gradient."""
    parameters = [nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return parameters


def cast_step_cast(weights: list[nn.Parameter], chunk_bytes: int, how: dict) -> Callable[[], None]:
    """What a step on master weights cannot do without: of each chunk gradients to FP32, AdamW's step, and the weights.

    Each chunk's masters are one vector, or a slice of a larger weight's; so are its FP32 gradients, in a block that all
    chunks use. Nothing is looked up or checked.
    """
    pieces = []  # of each weight its slices, and those of its gradient
    for weight in weights:
        each = slice_elements(weight.numel(), chunk_bytes)
        pieces += zip(*(its.detach().flatten().split(each) for its in (weight, weight.grad)), strict=True)
    bounds = chunks([narrow.numel() for narrow, _ in pieces], chunk_bytes)
    largest = max(sum(narrow.numel() for narrow, _ in pieces[start:stop]) for start, stop in bounds)
    parts, block = [], torch.empty(largest, device=weights[0].device)
    for start, stop in bounds:
        narrow, gradients = zip(*pieces[start:stop], strict=True)
        master = nn.Parameter(torch.cat([its.float() for its in narrow]))
        master.grad = block[: master.numel()]
        masters, widened = (views_in(flat, narrow) for flat in (master.detach(), master.grad))
        parts.append((narrow, gradients, masters, widened, torch.optim.AdamW([master], **how)))

    @torch.no_grad()
    def step() -> None:
        for narrow, gradients, masters, widened, optimizer in parts:
            torch._foreach_copy_(widened, gradients)
            optimizer.step()
            torch._foreach_copy_(narrow, masters)

    return step
