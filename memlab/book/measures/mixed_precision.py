"""Chapter 06: the loss scaler beside PyTorch's, and what master weights add to a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

from memlab.book.measures.timing import compared, interleaved
from memlab.book.workloads import GPT, text_batch
from memlab.mixed_precision import LossScaler

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
