"""The roofline of a GPT's ops: which of them wait for memory on some GPU, drawn and in shares of a step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import compress

import torch

from memlab.book.hierarchy import ridge
from memlab.book.interactive import Interactive
from memlab.book.style import LINE_COLOURS, SMALL_SIZE, Picture, canvas, finish
from memlab.book.workloads import GPT, GPTConfig
from memlab.memory_hierarchy import PUBLISHED, Op, OpCounter, bound_by, least_seconds
from memlab.memory_timeline import imagine

BATCHES = (1, 2, 4, 8, 16, 32)
SIZES = {"layers": 2, "width": 1024, "heads": 16, "context": 1024}
GROUPS = {
    "linear": ("mm", "addmm"),
    "attention": ("_scaled_dot_product", "bmm", "_softmax", "masked_fill"),
    "LayerNorm": ("native_layer_norm",),
    "GELU": ("gelu",),
    "AdamW": ("_fused_adamw_",),
}
"""What readers call an op, by what its name starts with; all else is "the rest", but for what is done to T × T."""


@functools.lru_cache(maxsize=32)
def counted(batch: int, attention: str = "fused") -> tuple[Op, ...]:
    """The ops of one training step of a GPT in BF16, on an imagined H100: 1,024 tokens a text, fused AdamW."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with imagine("H100-80GB"):
            model = GPT(GPTConfig(**SIZES, attention=attention))
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            x, y = (torch.randint(256, (batch, SIZES["context"])) for _ in "xy")
            for _ in range(2):  # the first one makes the optimizer's states
                with OpCounter() as counter:
                    model(x, y).backward()
                    optimizer.step()
                optimizer.zero_grad()
    finally:
        torch.set_default_dtype(before)
    return tuple(counter.ops)


def group_of(op: Op) -> str:
    """Under which of `GROUPS` an op goes: what works on (batch, heads, tokens, tokens) is attention, by any name."""
    if any(len(shape) == 4 and shape[-1] == shape[-2] for shape in op.shapes):
        return "attention"
    return next((group for group, starts in GROUPS.items() if op.name.startswith(starts)), "the rest")


def grouped(ops: Sequence[Op], card: str) -> dict[str, list]:
    """For each group: FLOPs, bytes, and the least seconds on a card."""
    found: dict[str, list] = {}
    machine = PUBLISHED[card].half_flops_per_second, PUBLISHED[card].memory_bandwidth
    for op in ops:
        sums = found.setdefault(group_of(op), [0, 0, 0.0])
        sums[0], sums[1], sums[2] = sums[0] + op.flops, sums[1] + op.nbytes, sums[2] + least_seconds(op, *machine)
    return found


def waiting(ops: Sequence[Op], card: str) -> tuple[float, float]:
    """Of all FLOPs, and of the least time of a step on a card: the share in ops that wait for memory."""
    machine = PUBLISHED[card].half_flops_per_second, PUBLISHED[card].memory_bandwidth
    flops, seconds = [op.flops for op in ops], [least_seconds(op, *machine) for op in ops]
    waits = [bound_by(op, *machine) == "memory" for op in ops]
    return sum(compress(flops, waits)) / sum(flops), sum(compress(seconds, waits)) / sum(seconds)


def draw_roofline(card: str = "H100-80GB", batch: int = 8, attention: str = "fused") -> Picture:
    """A card's roofline, and on it the groups of a GPT's ops; the larger a point, the more of the step's time."""
    ops, told = counted(batch, attention), PUBLISHED[card]
    figure, axes = canvas(8, 4, right=0.3)
    low, high, at = 0.02, 4000.0, ridge(card)
    peak = told.half_flops_per_second / 1e12
    axes.plot([low, at, high], [peak * low / at, peak, peak], color="black", linewidth=1.4)
    axes.axvline(at, color="black", linestyle=":", linewidth=0.8)
    axes.text(at, peak * 1.3, f"ridge: {at:.0f} FLOPs a byte ", ha="right", fontsize=SMALL_SIZE)
    groups = grouped(ops, card)
    total = sum(seconds for _, _, seconds in groups.values())
    words = []
    places = [*GROUPS, "the rest"]  # a group keeps its colour and its marker, whatever its share
    for name, (flops, nbytes, seconds) in sorted(groups.items(), key=lambda g: -g[1][2]):
        intensity = max(flops / nbytes, low)
        height = min(peak, intensity / at * peak)
        size = 30 + 900 * seconds / total
        label = f"{name}: {seconds / total:.0%} of the time, {flops / nbytes:.3g} FLOPs a byte"
        number = places.index(name)
        look = {"color": LINE_COLOURS[number], "marker": "oDv^Ps"[number], "edgecolor": "black", "alpha": 0.75}
        axes.scatter(intensity, height, s=size, zorder=3, label=label, **look)
        words.append(f"{name} {flops / nbytes:.3g} FLOPs a byte, {seconds / total:.0%} of the time")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(peak * low / at / 2, peak * 3)
    axes.minorticks_off()
    legend = axes.legend(loc="lower right", fontsize=SMALL_SIZE, framealpha=1, edgecolor="none")
    for handle in legend.legend_handles:
        handle.set_sizes([30])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    of_flops, of_time = waiting(ops, card)
    found = f"{of_flops:.1%} of the FLOPs and {of_time:.0%} of the least time in ops that wait for memory"
    finish(axes, "intensity (FLOPs a byte)", "TFLOP/s (10¹² a second)", f"{card}, batch {batch}: {found}")
    return Picture(
        figure, f"The roofline of {card} with a GPT's ops ({attention} attention): {found}; {'; '.join(words)}."
    )


def explore_roofline() -> Interactive:
    """Buttons for the card and for attention, and a slider for the batch."""
    cards = [name for name in PUBLISHED if name in ("T4-16GB", "A100-80GB", "H100-80GB", "RTX4090-24GB")]
    return Interactive(draw_roofline, card=cards, batch=BATCHES, attention=("fused", "by hand"))
