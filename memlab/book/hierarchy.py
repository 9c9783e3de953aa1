"""The memory hierarchy, drawn: a staircase of bandwidths, and what vendors print of some GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from memlab.book.style import LABEL_SIZE, LINE_COLOURS, LINE_STYLES, SMALL_SIZE, Picture, canvas, finish
from memlab.book.tables import Table
from memlab.memory_hierarchy import PUBLISHED, Level, fit_levels
from memlab.units import format_bytes


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
        near = [fast / 1e9 for curve in curves.values() for size, fast in curve if left <= size <= right]
        middle, above = (left * right) ** 0.5, max([speed, *near]) * 1.15
        axes.text(middle, above, f"{plateau.name}\n{speed:,.0f} GB/s", ha="center", fontsize=SMALL_SIZE)
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
        sizes = [*map(format_bytes, (registers, shared, card.l2)), f"{card.memory / 1e9:,.0f} GB"]
        links = [f"{speed / 1e9:,.0f}" if speed else "–" for speed in (card.memory_bandwidth, card.nvlink, card.pcie)]
        rows.append((name, card.multiprocessors, *sizes, *links, round(ridge(name))))
    columns = [
        "GPU",
        "SMs",
        "registers",
        "shared memory, at most",
        "L2",
        "memory",
        "its GB/s",
        "NVLink, both ways, GB/s",
        "PCIe, both ways, GB/s",
    ]
    return Table([*columns, "ridge, FLOPs a byte"], rows)


def named(device: str, nbytes: int) -> str | None:
    """The name in PUBLISHED of a GPU that calls itself `device` and has so many bytes; None if it is not there.

    A name that says PCIe is not there: of V100, A100 and H100 the SXM cards are, and their namesakes may be slower.

    >>> named("NVIDIA A100-SXM4-80GB", 84_987_740_160), named("NVIDIA H100 PCIe", 84_987_740_160)
    ('A100-80GB', None)
    """
    if re.search("pcie", device, re.IGNORECASE):
        return None
    for card, told in PUBLISHED.items():
        model = card.partition("-")[0]
        if re.search(rf"\b{model}\b", device.replace("RTX ", "RTX")) and abs(nbytes / told.memory - 1) < 0.1:
            return card
    return None


def card_at_hand() -> str | None:
    """The name in PUBLISHED of this machine's GPU; None without one, or for one that is not there."""
    if not torch.cuda.is_available():
        return None
    told = torch.cuda.get_device_properties(torch.cuda.current_device())
    return named(torch.cuda.get_device_name(), told.total_memory)


def ridge(card: str) -> float:
    """FLOPs that a card can do (in 16-bit matrix products) in the time in which its memory gives a byte."""
    return PUBLISHED[card].half_flops_per_second / PUBLISHED[card].memory_bandwidth
