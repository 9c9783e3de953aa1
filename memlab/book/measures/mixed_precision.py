"""Chapter 06: the loss scaler beside PyTorch's, and what master weights add to a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

from memlab.book.measures.timing import compared, interleaved
from memlab.book.workloads import GPT, text_batch
from memlab.mixed_precision import LossScaler, MasterWeights
from memlab.units import MiB


def loss_scaling(device: str, rounds: int) -> list[tuple]:
    """LossScaler against torch.amp.GradScaler: the whole step's time, and every bit, through overflows and growth."""
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
        rows.append((row, figure, "≤ 1.05×"))
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

    On a CPU in chunks of 2 MiB: larger ones leave its caches, and glibc gives them back to the system each time.
    """
    options = {"chunk_bytes": 2 * MiB} if device == "cpu" else {}
    models = {
        "GPT 4 × 256": [p.shape for p in GPT(layers=4, width=256).parameters()],
        "24 of 1,024 × 1,024": [(1024, 1024)] * 24,
    }
    implementations = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    rows = []
    for (shapes_name, shapes), (name, how) in itertools.product(models.items(), implementations.items()):

        def step(dtype, shapes=shapes, how=how):
            parameters = [torch.nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter) * 1e-3
            if dtype is torch.float32:
                return torch.optim.AdamW(parameters, **how).step
            return MasterWeights(parameters, torch.optim.AdamW, **options, **how).step

        times = interleaved({"FP32": step(torch.float32), "masters": step(torch.bfloat16)}, rounds)
        row = f"master weights / FP32, step of AdamW ({name}), {shapes_name}"
        rows.append((row, compared(times, "masters", "FP32"), "≤ 1.25×"))
    return rows
