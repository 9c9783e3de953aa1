"""Offloading, drawn: transfer against arithmetic by a model's width, and a step's copies beside its arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from memlab.book.interactive import Interactive
from memlab.book.style import (
    COLOURS,
    HATCHES,
    LABEL_SIZE,
    LINE_COLOURS,
    LINE_STYLES,
    SMALL_SIZE,
    Picture,
    byte_unit,
    finish,
)
from memlab.book.tables import Table
from memlab.checking import one_of
from memlab.memory_arithmetic import Transformer
from memlab.offloading import (
    LINKS,
    POLICIES,
    Held,
    Overlap,
    Run,
    block_overlap,
    chosen,
    hidden_tokens,
    hidden_width,
    ordered,
    simulate,
)
from memlab.units import format_bytes

# ---- transfer against arithmetic

WIDTHS = (512, 1024, 2048, 4096, 8192, 16384)
RATES = (50, 100, 200, 400, 800)  # TFLOP/s reached
TOKENS = (512, 2048, 8192, 32768)
HEAD_WIDTH = 128
SENT = {"all that is saved": False, "block inputs only": True}


@functools.lru_cache(maxsize=4096)
def block_of(
    width: int, tokens: int, flops_per_second: float, bytes_per_second: float, inputs_only: bool = False
) -> Overlap:
    """One block of a GPT in 16 bits, heads of 128, one text of so many tokens, in forward."""
    model = Transformer(4, width, max(1, width // HEAD_WIDTH), vocabulary=256, context=tokens)
    return block_overlap(model, 1, tokens, flops_per_second, bytes_per_second, inputs_only=inputs_only)


def draw_overlap(
    width: int = 4096,
    link: str = "PCIe Gen5 x16",
    teraflops: float = 400,
    tokens: int = 2048,
    *,
    links: Mapping[str, float] = LINKS,
    measured: Mapping[str, tuple[float, float]] | None = None,
) -> Picture:
    """A block's transfer as a multiple of its forward, over the width; where it is 1, offloading becomes free.

    link: one of `links`, bytes a second by name. teraflops: reached, 10¹² a second. measured: machines as name →
    (FLOPs a second, bytes a second); each is a point at this width, for all that is saved. Below: the milliseconds.
    Raises ValueError for a link that is not there, and a width that is not one of WIDTHS.
    """
    one_of("link", link, tuple(links))
    if width not in WIDTHS:
        raise ValueError(f"expected a width of {', '.join(map(str, WIDTHS))}; found {width}")
    flops_per_second, bytes_per_second = teraflops * 1e12, links[link]
    figure = Figure(figsize=(8, 4.8), dpi=90)
    axes, bars = figure.subplots(2, height_ratios=(5, 2))
    figure.subplots_adjust(0.1, 0.1, 0.98, 0.88, hspace=0.62)
    words, heights = [], [1.0]
    axes.axhline(1, color="black", linewidth=0.9)
    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.8, "linewidth": 0}
    axes.text(WIDTHS[0] / 1.15, 1, "free below", va="center", fontsize=SMALL_SIZE, bbox=box, zorder=3)
    for number, (name, inputs_only) in enumerate(SENT.items()):
        found = [block_of(each, tokens, flops_per_second, bytes_per_second, inputs_only) for each in WIDTHS]
        ratios = [one.transfer_seconds / one.compute_seconds for one in found]
        heights += ratios
        look = {"color": LINE_COLOURS[number], "linestyle": LINE_STYLES[number], "marker": "os"[number]}
        axes.plot(WIDTHS, ratios, label=name, markersize=4, linewidth=1.4, **look)
        at = ratios[WIDTHS.index(width)]
        axes.plot(width, at, "os"[number], color=LINE_COLOURS[number], markeredgecolor="black", markersize=9)
        free = hidden_width(flops_per_second, bytes_per_second, bytes_per_width=(32, 2)[number], tokens=tokens)
        axes.plot(free, 1, "v", color="black", markersize=7) if WIDTHS[0] <= free <= WIDTHS[-1] else None
        said = f"from width {free:,.0f} on" if free > 0 else "at any width"
        words.append(f"{name} free {said}")
    for number, (name, rates) in enumerate((measured or {}).items()):
        one = block_of(width, tokens, *rates)
        heights.append(one.transfer_seconds / one.compute_seconds)
        axes.plot(width, heights[-1], "P*X"[number % 3], color="black", markersize=9, linestyle="", label=name)
        words.append(f"{name} at width {width:,}: transfer is {heights[-1]:.3g} times the forward")
    axes.axvline(width, color="black", linestyle=":", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(WIDTHS[0] / 1.2, WIDTHS[-1] * 1.2)
    axes.set_ylim(min(heights) / 1.6, max(heights) * 1.6)
    axes.set_xticks(WIDTHS, [f"{each:,}" for each in WIDTHS])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(loc="upper right", frameon=False, fontsize=SMALL_SIZE)
    head = f"{link}, {bytes_per_second / 1e9:g} GB/s; {teraflops:g} TFLOP/s; {tokens:,} tokens"
    finish(axes, "width", "transfer ÷ forward", "")
    axes.xaxis.set_label_coords(0.5, -0.13)
    figure.suptitle(f"{head}\n{'; '.join(words[:2])}", x=0.02, ha="left", fontsize=LABEL_SIZE)
    said = _draw_milliseconds(bars, width, tokens, flops_per_second, bytes_per_second)
    return Picture(
        figure,
        f"A block's transfer over its forward, by width, for {head}. {'; '.join(words)}. At width {width:,}: {said}.",
    )


def _draw_milliseconds(axes, width: int, tokens: int, flops_per_second: float, bytes_per_second: float) -> str:
    """A bar for the forward, one for each transfer, at one width."""
    everything, inputs = (block_of(width, tokens, flops_per_second, bytes_per_second, only) for only in (False, True))
    rows = {
        "forward": (everything.compute_seconds, "parameter"),
        "transfer, all": (everything.transfer_seconds, "activation"),
        "transfer, inputs": (inputs.transfer_seconds, "input"),
    }
    for y, (name, (seconds, colour)) in enumerate(rows.items()):
        look = {"color": COLOURS[colour], "hatch": HATCHES.get(colour, ""), "edgecolor": "black", "linewidth": 0.6}
        axes.barh(y, 1e3 * seconds, **look)
        axes.text(1e3 * seconds, y, f"  {name}: {1e3 * seconds:.3g} ms", va="center", fontsize=SMALL_SIZE)
    axes.set_xlim(0, 1e3 * max(seconds for seconds, _ in rows.values()) * 1.3)
    axes.set_ylim(2.6, -0.6)
    axes.set_yticks([])
    finish(axes, f"one block at width {width:,}, one text, alone (ms)", "")
    axes.xaxis.set_label_coords(0.5, -0.32)
    return ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, (seconds, _) in rows.items())


def explore_overlap(
    measured: Mapping[str, tuple[float, float]] | None = None, links: Mapping[str, float] = LINKS
) -> Interactive:
    """Sliders for width, FLOP rate and tokens, and buttons for the link. measured: as of `draw_overlap`."""
    first = "PCIe Gen5 x16" if "PCIe Gen5 x16" in links else next(iter(links))

    def draw(width: int = 4096, link: str = first, teraflops: int = 400, tokens: int = 2048) -> Picture:
        return draw_overlap(width, link, teraflops, tokens, links=links, measured=measured)

    return Interactive(draw, width=WIDTHS, link=list(links), teraflops=RATES, tokens=TOKENS)


def overlap_table(links: Mapping[str, float] = LINKS, teraflops: Sequence[float] = (100, 400, 800)) -> Table:
    """From which width, and from how many tokens a batch, offloading is free: every link at every FLOP rate.

    Widths are for short texts (attention's own FLOPs left out) with dropout: 34 bytes a token and unit of width.
    """
    rows = []
    for name, speed in links.items():
        for rate in (each * 1e12 for each in teraflops):
            widths = (
                hidden_width(rate, speed),
                hidden_width(rate, speed, phase="backward"),
                hidden_width(rate, speed, bytes_per_width=2),
            )
            rows.append(
                (name, f"{speed / 1e9:g}", f"{rate / 1e12:g}", *map(round, widths), round(hidden_tokens(rate, speed)))
            )
    columns = ("width, forward", "width, backward", "width, inputs only", "tokens, streamed weights")
    return Table(["link", "GB/s", "TFLOP/s", *columns], rows)


# ---- a step's copies beside its arithmetic

LANES = {"arithmetic": "parameter", "to the host": "activation", "back": "input"}
PARTS = tuple(range(0, 101, 10))  # percent


def may_leave_bytes(tensors: Sequence[Held]) -> int:
    """Bytes of all tensors that may leave."""
    return sum(tensors[i].nbytes for i in ordered(tensors, "first come"))


def send_part(tensors: Sequence[Held], bytes_per_second: float, part: float, policy: str) -> Run:
    """A step that sends a part, from 0 to 1, of what may leave."""
    return simulate(tensors, chosen(tensors, policy, part * may_leave_bytes(tensors)), bytes_per_second)


def draw_schedule(
    tensors: Sequence[Held],
    bytes_per_second: float,
    part: int = 50,
    policy: str = "first come",
    title: str = "",
) -> Picture:
    """Arithmetic, the link down and the link up as bars over time; below, the bytes on the device, and without sending.

    part: percent of the bytes that may leave; policy: which first.
    """
    run, before = (send_part(tensors, bytes_per_second, share / 100, policy) for share in (part, 0))
    unit, scale = byte_unit(before.peak_bytes)
    figure = Figure(figsize=(8, 4.2), dpi=90)
    lanes, axes = figure.subplots(2, height_ratios=(2, 3))
    figure.subplots_adjust(0.12, 0.11, 0.98, 0.88, hspace=0.12)
    _draw_lanes(lanes, run)
    for one, style, name in ((before, ":", "nothing sent"), (run, "-", f"{part} % sent")):
        seconds, nbytes = zip(*one.curve, strict=True)
        held = [each / scale for each in nbytes]
        axes.step(seconds, held, where="post", linestyle=style, color="black", linewidth=1.2, label=name)
    axes.set_ylim(0, before.peak_bytes / scale * 1.15)
    end = run.step_seconds * 1.02
    for one in (lanes, axes):
        one.set_xlim(0, end)
    axes.legend(loc="upper right", frameon=False, fontsize=SMALL_SIZE, ncols=2)
    finish(axes, "seconds of the step", f"on the device ({unit})", "")
    axes.xaxis.set_label_coords(0.5, -0.14)
    found = (
        f"{part} % sent, {policy}: peak {format_bytes(run.peak_bytes)} of {format_bytes(before.peak_bytes)}, "
        f"step {run.step_seconds:.3g} s, of which {run.stall_seconds:.2g} s waits"
    )
    figure.suptitle(f"{title}: {found}" if title else found, x=0.02, ha="left", fontsize=LABEL_SIZE)
    copies = f"{len(run.transfers)} copies"
    return Picture(figure, f"Bars of arithmetic and {copies} over a step, above the bytes on the device. {found}.")


def _draw_lanes(axes, run: Run) -> None:
    edges = [0.0, *(edge for stall in run.stalls for edge in stall), run.step_seconds]
    spans = {
        "arithmetic": list(zip(edges[::2], edges[1::2], strict=True)),
        "to the host": [(t.start, t.stop) for t in run.transfers if t.way == "down"],
        "back": [(t.start, t.stop) for t in run.transfers if t.way == "up"],
    }
    for y, (name, colour) in enumerate(LANES.items()):
        boxes = [[(a, y - 0.38), (b, y - 0.38), (b, y + 0.38), (a, y + 0.38)] for a, b in spans[name]]
        axes.add_collection(PolyCollection(boxes, facecolor=COLOURS[colour], edgecolor="black", linewidth=0.3))
    axes.set_ylim(2.6, -0.6)
    axes.set_yticks(range(3), list(LANES), fontsize=SMALL_SIZE)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def explore_schedule(
    tensors: Sequence[Held], links: Mapping[str, float], title: str = "", parts: Sequence[int] = PARTS
) -> Interactive:
    """A slider for the part that is sent, and buttons for the policy and the link (bytes a second by name)."""

    def draw(part: int = parts[len(parts) // 2], policy: str = "first come", link: str = next(iter(links))) -> Picture:
        return draw_schedule(tensors, links[link], part, policy, title)

    return Interactive(draw, part=parts, policy=list(POLICIES), link=list(links))


# ---- too much of it


def knee(runs: Sequence[Run], slack: float = 0.01) -> int:
    """Of runs that send more and more: the place of the last before a step takes `slack` longer than the first."""
    slow = (i for i, run in enumerate(runs) if run.step_seconds > (1 + slack) * runs[0].step_seconds)
    return next(slow, len(runs)) - 1


def part_runs(
    tensors: Sequence[Held],
    links: Mapping[str, float],
    policy: str = "first come",
    parts: Sequence[int] = PARTS,
) -> dict[str, list[Run]]:
    """For each link, by name, a step for each part (percent) that is sent."""
    return {name: [send_part(tensors, speed, part / 100, policy) for part in parts] for name, speed in links.items()}


def draw_too_much(runs: Mapping[str, Sequence[Run]], title: str = "", parts: Sequence[int] = PARTS) -> Picture:
    """A step's seconds, and its peak, by the part that is sent, a line a link. runs: as of `part_runs`.

    The knee of each is marked: the most that costs less than 1 %.
    """
    figure = Figure(figsize=(8, 4.4), dpi=90)
    upper, lower = figure.subplots(2)
    figure.subplots_adjust(0.1, 0.11, 0.98, 0.93, hspace=0.16)
    words, (unit, scale) = [], byte_unit(max(run.peak_bytes for row in runs.values() for run in row))
    for number, (name, row) in enumerate(runs.items()):
        at = knee(row)
        look = {"color": LINE_COLOURS[number % 7], "linestyle": LINE_STYLES[number % 8], "linewidth": 1.4}
        mark = {"color": look["color"], "markeredgecolor": "black", "markersize": 7, "marker": "osD^vPX"[number % 7]}
        upper.plot(parts, [run.step_seconds for run in row], label=name, **look)
        lower.plot(parts, [run.peak_bytes / scale for run in row], **look)
        upper.plot(parts[at], row[at].step_seconds, **mark)
        lower.plot(parts[at], row[at].peak_bytes / scale, **mark)
        words.append(
            f"{name}: {parts[at]} % cost less than 1 % and leave a peak of {format_bytes(row[at].peak_bytes)}, "
            f"{parts[-1]} % take {row[-1].step_seconds / row[0].step_seconds:.3g} times as long for "
            f"{format_bytes(row[-1].peak_bytes)}"
        )
    upper.set_ylim(bottom=0)
    lower.set_ylim(bottom=0)
    finish(upper, "", "step (s)", "")
    finish(lower, "sent, of all that may leave (%)", f"peak ({unit})", "")
    upper.set_xticklabels([])
    small = {"frameon": False, "fontsize": SMALL_SIZE, "title_fontsize": SMALL_SIZE}
    upper.legend(loc="upper left", title="marked: the most that costs less than 1 %", **small)
    figure.suptitle(title, x=0.02, ha="left", fontsize=LABEL_SIZE)
    return Picture(figure, f"A step's seconds and peak bytes by the part that is sent. {'; '.join(words)}.")


def too_much_table(runs: Mapping[str, Sequence[Run]], parts: Sequence[int] = PARTS) -> Table:
    """The same as text: for each link nothing sent, the knee, and all."""
    rows = []
    for name, row in runs.items():
        for at in sorted({0, knee(row), len(row) - 1}):
            run = row[at]
            peak, sent = format_bytes(run.peak_bytes), format_bytes(run.sent_bytes)
            rows.append((name, f"{parts[at]} %", sent, peak, f"{run.step_seconds:.3g}", f"{run.stall_seconds:.2g}"))
    return Table(["link", "part", "sent", "peak", "step (s)", "of it waits (s)"], rows)
