"""The memory hierarchy, drawn: a staircase of bandwidths, the roofline of a model's ops, and tiles of attention."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import compress

import torch

from memlab.book.interactive import Interactive
from memlab.book.style import COLOURS, LABEL_SIZE, LINE_COLOURS, LINE_STYLES, SMALL_SIZE, Picture, canvas, finish
from memlab.book.tables import Table
from memlab.book.workloads import GPT, GPTConfig
from memlab.memory_hierarchy import PUBLISHED, Level, Op, OpCounter, bound_by, fit_levels, least_seconds
from memlab.memory_timeline import imagine
from memlab.units import KiB, format_bytes

# ---- the staircase


def staircase(curves: Mapping[str, Sequence[tuple[int, float]]], levels: Sequence[Level], title: str = "") -> Picture:
    """Bandwidth by working set, one line a curve; each level's capacity as a line, and its plateau's figure.

    curves: as of `measure_bandwidth`, by name; the first one's plateaus are written in.
    """
    figure, axes = canvas(8, 3.8, bottom=0.8)
    for number, (name, curve) in enumerate(curves.items()):
        sizes, speeds = zip(*curve, strict=True)
        look = {"color": LINE_COLOURS[number], "linestyle": LINE_STYLES[number], "marker": "os^"[number % 3]}
        axes.plot(sizes, [speed / 1e9 for speed in speeds], label=name, markersize=4, linewidth=1.4, **look)
    first = next(iter(curves.values()))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    smallest, largest = first[0][0], first[-1][0]
    words, left = [], smallest
    for plateau in fit_levels(first, levels):
        if plateau.bytes_per_second is None or left >= largest:
            continue
        right = min(plateau.nbytes, largest)
        speed = plateau.bytes_per_second / 1e9
        axes.plot([left, right], [speed, speed], color="black", linewidth=5, alpha=0.2, solid_capstyle="butt")
        axes.text(
            (left * right) ** 0.5, speed * 1.25, f"{plateau.name}\n{speed:,.0f} GB/s", ha="center", fontsize=SMALL_SIZE
        )
        if right == plateau.nbytes:
            axes.axvline(right, color="black", linestyle=":", linewidth=0.8)
        words.append(f"{plateau.name} {speed:,.0f} GB/s")
        left = right
    ticks = [2**i for i in range(smallest.bit_length() - 1, largest.bit_length(), 2)]
    axes.set_xticks(ticks, [format_bytes(tick, 0) for tick in ticks])
    axes.minorticks_off()
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top * 2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    finish(axes, "working set", "GB/s (10⁹ bytes a second)", title)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False, fontsize=LABEL_SIZE, ncols=3)
    return Picture(figure, f"Bandwidth by the size of the working set: {', '.join(words)}.")


def published() -> Table:
    """What vendors print: how large the levels of some GPUs are, and how fast. The ridge is of 16-bit products."""
    rows = []
    for name, card in PUBLISHED.items():
        registers, shared = (card.multiprocessors * each for each in (card.registers, card.shared_memory))
        sizes = (registers, shared, card.l2, card.memory)
        links = [f"{speed / 1e9:,.0f}" if speed else "–" for speed in (card.memory_bandwidth, card.nvlink, card.pcie)]
        rows.append((name, *(format_bytes(size) for size in sizes), *links, round(ridge(name))))
    columns = [
        "GPU",
        "registers",
        "shared memory, L1",
        "L2",
        "memory",
        "its GB/s",
        "NVLink, both ways, GB/s",
        "PCIe, both ways, GB/s",
    ]
    return Table([*columns, "ridge, FLOPs a byte"], rows)


def ridge(card: str) -> float:
    """FLOPs that a card can do (in 16-bit matrix products) in the time in which its memory gives a byte."""
    return PUBLISHED[card].half_flops_per_second / PUBLISHED[card].memory_bandwidth


# ---- the roofline

BATCHES = (1, 2, 4, 8, 16, 32)
SIZES = {"layers": 2, "width": 1024, "heads": 16, "context": 1024}
GROUPS = {
    "linear": ("mm", "addmm"),
    "attention": ("_scaled_dot_product", "bmm", "_softmax", "masked_fill"),
    "LayerNorm": ("native_layer_norm",),
    "GELU": ("gelu",),
    "AdamW": ("_fused_adamw_",),
}
"""What readers call an op, by what its name starts with; all else is "the rest"."""


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
    """Under which of `GROUPS` an op goes."""
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
    for number, (name, (flops, nbytes, seconds)) in enumerate(sorted(groups.items(), key=lambda g: -g[1][2])):
        intensity = max(flops / nbytes, low)
        height = min(peak, intensity / at * peak)
        size = 30 + 900 * seconds / total
        label = f"{name}: {seconds / total:.0%} of the time, {flops / nbytes:.3g} FLOPs a byte"
        look = {"color": LINE_COLOURS[number % 6], "marker": "osD^vP"[number % 6], "edgecolor": "black", "alpha": 0.75}
        axes.scatter(intensity, height, s=size, zorder=3, label=label, **look)
        words.append(f"{name} {flops / nbytes:.3g} FLOPs a byte, {seconds / total:.0%} of the time")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(peak * low / at / 2, peak * 3)
    axes.minorticks_off()
    for handle in axes.legend(loc="lower right", fontsize=SMALL_SIZE, frameon=False).legend_handles:
        handle.set_sizes([30])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    of_flops, of_time = waiting(ops, card)
    found = f"{of_flops:.1%} of the FLOPs and at least {of_time:.0%} of the time in ops that wait for memory"
    finish(axes, "intensity (FLOPs a byte)", "TFLOP/s (10¹² a second)", f"{card}, batch {batch}: {found}")
    return Picture(
        figure, f"The roofline of {card} with a GPT's ops ({attention} attention): {found}; {'; '.join(words)}."
    )


def explore_roofline() -> Interactive:
    """Buttons for the card and for attention, and a slider for the batch."""
    cards = [name for name in PUBLISHED if name in ("T4-16GB", "A100-80GB", "H100-80GB", "RTX4090-24GB")]
    return Interactive(draw_roofline, card=cards, batch=BATCHES, attention=("fused", "by hand"))


# ---- tiles of attention

TILES = (16, 32, 64, 128, 256, 512)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)


def attention_traffic(tokens: int, head_dim: int, tile: int | None = None) -> int:
    """Bytes that attention's forward moves into and out of a GPU's multiprocessors, for one head in 16 bits.

    tile None: by hand, q kᵀ, softmax and the product with v one after the other; each reads and writes T×T. Else one
    kernel: q and the result once, k and v once for each tile of queries. Dao et al. 2022, section 3.2.
    """
    if tile is None:
        return 2 * (4 * tokens * tokens + 4 * tokens * head_dim)
    return 2 * (2 * tokens * head_dim + 2 * tokens * head_dim * -(-tokens // tile))


def fast_bytes(head_dim: int, tile: int) -> tuple[int, int]:
    """What a kernel holds for one tile of queries by one of keys: in shared memory (q, k, v, 16 bits), in registers."""
    return 2 * 3 * tile * head_dim, 4 * (tile * head_dim + tile * tile)


def fits(head_dim: int, tile: int, card: str = "H100-80GB") -> bool:
    """Whether one multiprocessor of a card has room for such a tile."""
    shared, registers = fast_bytes(head_dim, tile)
    return shared <= PUBLISHED[card].shared_memory and registers <= PUBLISHED[card].registers


def draw_tiles(tokens: int = 4096, tile: int = 64, head_dim: int = 64) -> Picture:
    """What attention's forward moves by the size of its tiles, and whether one such tile fits a multiprocessor."""
    card = PUBLISHED["H100-80GB"]
    figure, axes = canvas(8, 3.4, bottom=0.6, left=1.3)
    rows = {"by hand": attention_traffic(tokens, head_dim)} | {
        f"tiles of {t}": attention_traffic(tokens, head_dim, t) for t in TILES
    }
    for y, (name, nbytes) in enumerate(rows.items()):
        chosen = name == f"tiles of {tile}"
        colour = COLOURS["gradient"] if y == 0 else COLOURS["parameter"] if chosen else COLOURS["input"]
        axes.barh(y, nbytes / 2**20, color=colour, edgecolor="black", linewidth=0.4)
        needs = ""
        if y:
            shared, registers = fast_bytes(head_dim, TILES[y - 1])
            needs = f"   needs {shared // KiB:,} KiB shared, {registers // KiB:,} KiB of registers"
            needs += "" if fits(head_dim, TILES[y - 1]) else ": too large"
        bold = {"fontweight": "bold"} if chosen else {}
        axes.text(nbytes / 2**20, y, f"  {format_bytes(nbytes)}{needs}", va="center", fontsize=SMALL_SIZE, **bold)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=SMALL_SIZE)
    axes.invert_yaxis()
    axes.set_xlim(0, max(rows.values()) / 2**20 * 1.9)
    title = (
        f"one head of {head_dim}, {tokens:,} tokens; an H100's SM has {card.shared_memory // KiB} KiB of shared memory"
    )
    finish(axes, "moved into and out of multiprocessors (MiB)", "", title)
    moved = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in rows.items())
    fitting = [t for t in TILES if fits(head_dim, t)]
    largest = f"the largest tile that fits an H100's multiprocessor is {fitting[-1]}" if fitting else "no tile fits"
    return Picture(
        figure,
        f"Bars of the bytes that attention's forward moves, for {tokens:,} tokens and a head of {head_dim}: {moved}; "
        f"{largest}.",
    )


def explore_tiles() -> Interactive:
    """Sliders for the number of tokens, the size of a tile, and a head's width."""
    return Interactive(draw_tiles, tokens=TOKENS, tile=TILES, head_dim=(32, 64, 128))
