"""Many ranks, drawn: what one of them holds by stage and by how many there are, and when what it sends is hidden."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

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
    draw_budget,
    finish,
)
from memlab.book.tables import Table
from memlab.checking import one_of
from memlab.data_parallelism import rank_step, ring_seconds, tokens_to_hide
from memlab.data_parallelism.arithmetic import STAGES
from memlab.data_parallelism.overlap import exposed_seconds
from memlab.memory_arithmetic import TrainingStep, Transformer, training_step
from memlab.offloading.links import RANK_LINKS
from memlab.units import GiB, format_bytes, parse_bytes

# ---- what a rank holds

TOKENS = 1024
MODELS = {
    "0.1 billion": (12, 768, 12),
    "0.3 billion": (24, 1024, 16),
    "1.2 billion": (24, 2048, 16),
    "6.5 billion": (32, 4096, 32),
    "12.6 billion": (40, 5120, 40),
}
"""Parameters → layers, width and heads of a GPT over bytes; the third is the model of the book's story."""
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
STATE_BYTES = {"4: BF16 moments": 4, "6: 8-bit, FP32 weights": 6, "12: all FP32": 12}
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
CARDS = ("8 GiB", "16 GiB", "24 GiB", "80 GiB")
MARKERS = "osD^"


@functools.lru_cache(maxsize=256)
def step_of(model: str, texts: int) -> TrainingStep:
    """One device's step of a model on so many texts of 1,024 tokens: BF16, FP32 masters, every block checkpointed."""
    one_of("model", model, tuple(MODELS))
    layers, width, heads = MODELS[model]
    sizes = Transformer(layers, width, heads, vocabulary=256, context=TOKENS)
    return training_step(sizes, texts, TOKENS, precision="mixed", implementation="fused", segments=layers)


@functools.lru_cache(maxsize=8192)
def categories(model: str, texts: int, ranks: int, stage: int, state_bytes: int) -> dict[str, int]:
    """A rank's fullest moment by category."""
    return rank_step(step_of(model, texts), ranks, stage, state_bytes=state_bytes).by_category()


def draw_rank_bytes(
    ranks: int = 8, model: str = "1.2 billion", state_bytes: int = 12, micro_batch: int = 8, card: str = "16 GiB"
) -> Picture:
    """A rank's peak: a stacked bar for each stage, and below it over the number of ranks, beside what a card has.

    model: one of MODELS. state_bytes: of the optimizer, a parameter. micro_batch: texts a rank, 1,024 tokens each.
    Raises ValueError for a model that is not there, and a number of ranks below 1.
    """
    limit = parse_bytes(card)
    held = {stage: categories(model, micro_batch, ranks, stage, state_bytes) for stage in STAGES}
    lines = {
        stage: [sum(categories(model, micro_batch, each, stage, state_bytes).values()) for each in RANKS]
        for stage in STAGES
    }
    figure = Figure(figsize=(8, 5.4), dpi=90)
    bars, axes = figure.subplots(2, height_ratios=(4, 5))
    figure.subplots_adjust(0.14, 0.09, 0.98, 0.87, hspace=0.5)
    _stack(bars, held, limit)
    for stage, totals in lines.items():
        look = {"color": LINE_COLOURS[stage], "linestyle": LINE_STYLES[stage], "marker": MARKERS[stage]}
        axes.plot(RANKS, [n / GiB for n in totals], label=STAGES[stage], markersize=4, linewidth=1.4, **look)
        at = sum(held[stage].values()) / GiB
        axes.plot(ranks, at, MARKERS[stage], color=LINE_COLOURS[stage], markeredgecolor="black", markersize=9)
    axes.axvline(ranks, color="black", linestyle=":", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(RANKS[::2], [f"{each:,}" for each in RANKS[::2]])
    axes.minorticks_off()
    every = [n / GiB for totals in lines.values() for n in totals]
    powers = [2.0**power for power in range(-6, 12)]
    axes.set_yticks(powers, [f"{power:g}" for power in powers])
    axes.minorticks_off()
    axes.set_ylim(min([*every, limit / GiB]) / 1.5, max([*every, limit / GiB]) * 1.6)
    axes.legend(loc="lower left", frameon=False, fontsize=SMALL_SIZE, ncols=2)
    draw_budget(axes, limit, GiB)
    finish(axes, "ranks", "peak of a rank (GiB)")
    head = f"{model} parameters, {state_bytes} bytes of states each; {micro_batch} texts a rank; {ranks:,} ranks"
    figure.suptitle(head, x=0.02, ha="left", fontsize=LABEL_SIZE)
    said = "; ".join(
        f"{STAGES[stage]} {format_bytes(sum(parts.values()))}"
        + (" fits" if sum(parts.values()) <= limit else " does not fit")
        for stage, parts in held.items()
    )
    return Picture(
        figure,
        f"Bars of a rank's bytes by category for each stage, above lines of its peak by the number of ranks. {head}. "
        f"On a card of {format_bytes(limit)}: {said}.",
    )


def _stack(axes, held: Mapping[int, Mapping[str, int]], limit: int) -> None:
    """A bar for each stage, its categories side by side."""
    left = dict.fromkeys(held, 0.0)
    for category, colour in COLOURS.items():
        widths = [held[stage].get(category, 0) / GiB for stage in held]
        if not any(width > 1e-3 for width in widths):
            continue
        look = {"color": colour, "hatch": HATCHES.get(category, ""), "edgecolor": "black", "linewidth": 0.4}
        axes.barh(list(held), widths, left=list(left.values()), label=category.replace("_", " "), **look)
        left = {stage: left[stage] + width for stage, width in zip(held, widths, strict=True)}
    top = max([*left.values(), limit / GiB])
    for stage, width in left.items():
        axes.text(width, stage, f"  {width:.1f}", va="center", fontsize=SMALL_SIZE, fontweight="bold")
    axes.set_xlim(0, top * 1.1)
    axes.set_ylim(3.6, -0.6)
    axes.set_yticks(list(held), [STAGES[stage] for stage in held])
    draw_budget(axes, limit, GiB, vertical=True)
    finish(axes, "bytes of a rank at its peak (GiB)", "")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.1), frameon=False, fontsize=SMALL_SIZE, ncols=5)


def explore_rank_bytes() -> Interactive:
    """Sliders for ranks, model, bytes of states and texts a rank, and buttons for the card."""
    return Interactive(
        draw_rank_bytes,
        ranks=RANKS,
        model={name: name for name in MODELS},
        state_bytes=STATE_BYTES,
        micro_batch=MICRO_BATCHES,
        card=list(CARDS),
    )


def rank_bytes_table(
    model: str = "1.2 billion", ranks: Sequence[int] = (1, 8, 64), state_bytes: int = 12, micro_batch: int = 8
) -> Table:
    """The same as text: each stage's parts at a rank's peak, for so many ranks."""
    rows = []
    for number in ranks:
        for stage, name in STAGES.items():
            parts = categories(model, micro_batch, number, stage, state_bytes)
            own = [parts.get(kind, 0) for kind in ("parameter", "gradient", "optimizer_state")]
            total = sum(parts.values())
            rows.append((number, name, *map(format_bytes, (*own, total - sum(own), total))))
    return Table(["ranks", "stage", "parameters", "gradients", "optimizer states", "the rest", "peak"], rows)


# ---- when what it sends is hidden

RATES = (50, 100, 200, 400, 800)  # TFLOP/s reached
RANK_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288)
WAYS = {
    "16 bits, any stage": {"stage": 0},
    "FP32 gradients, ZeRO-3": {"stage": 3, "gradient_bytes": 4},
    "FP32 gradients, data parallel": {"stage": 0, "gradient_bytes": 4},
}
"""What is sent: how it is called → options of `tokens_to_hide`."""
PARAMETERS = 1_211_748_352  # of the story's model, for the milliseconds
BUCKET = 25 * 2**20


def draw_hidden(
    tokens: int = 8192,
    link: str = "InfiniBand 400 Gb/s",
    teraflops: float = 400,
    ranks: int = 64,
    *,
    links: Mapping[str, float] = RANK_LINKS,
    measured: Mapping[str, tuple[float, float]] | None = None,
) -> Picture:
    """From how many tokens a rank what is sent is hidden, by the link's bandwidth; and one backward in milliseconds.

    tokens: of one rank in a step. link: one of `links`, bytes a second by name. teraflops: reached, 10¹² a second.
    measured: machines as name → (FLOPs a second, bytes a second), points at these tokens, each with what it needs.
    Raises ValueError for a link that is not there.
    """
    one_of("link", link, tuple(links))
    flops_per_second, bytes_per_second = teraflops * 1e12, links[link]
    figure = Figure(figsize=(8, 5), dpi=90)
    axes, bars = figure.subplots(2, height_ratios=(5, 2))
    figure.subplots_adjust(0.1, 0.1, 0.98, 0.9, hspace=0.55)
    speeds = [10 ** (8 + i / 4) for i in range(17)]  # 0.1 GB/s to 1 TB/s
    words = []
    for number, (name, how) in enumerate(WAYS.items()):
        needed = [tokens_to_hide(flops_per_second, speed, ranks, **how) for speed in speeds]
        look = {"color": LINE_COLOURS[number], "linestyle": LINE_STYLES[number], "linewidth": 1.4}
        axes.plot(speeds, needed, label=name, **look)
        words.append(f"{name} from {tokens_to_hide(flops_per_second, bytes_per_second, ranks, **how):,.0f} tokens")
    axes.plot(bytes_per_second, tokens, "o", color="black", markersize=9, zorder=3)
    for number, (name, (rate, speed)) in enumerate((measured or {}).items()):
        axes.plot(speed, tokens, "P*X"[number % 3], color="black", markersize=9, linestyle="", label=name)
        words.append(f"{name} from {tokens_to_hide(rate, speed, ranks):,.0f}")
    for name, speed in links.items():
        axes.axvline(speed, color="black", linestyle=":", linewidth=0.7)
        place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom", "fontsize": SMALL_SIZE}
        axes.text(speed, 1.01, name, **place)
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.set_xlim(speeds[0], speeds[-1])
    axes.set_ylim(RANK_TOKENS[0] / 2, RANK_TOKENS[-1] * 2)
    axes.set_yticks(RANK_TOKENS, [f"{each:,}" for each in RANK_TOKENS])
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e9:g}")
    axes.legend(loc="lower left", frameon=False, fontsize=SMALL_SIZE, title="hidden above", title_fontsize=SMALL_SIZE)
    finish(axes, "link from rank to rank (GB/s)", "tokens of a rank")
    axes.xaxis.set_label_coords(0.5, -0.12)
    said = _draw_milliseconds(bars, tokens, flops_per_second, bytes_per_second, ranks)
    head = f"{link}, {bytes_per_second / 1e9:g} GB/s; {teraflops:g} TFLOP/s; {ranks:,} ranks"
    figure.suptitle(head, x=0.02, ha="left", fontsize=LABEL_SIZE)
    return Picture(
        figure,
        f"Lines of the tokens from which what ranks send is hidden, by the link's bandwidth. {head}: "
        f"{'; '.join(words)}. With {tokens:,} tokens, 1.2 billion parameters and 16-bit gradients: {said}.",
    )


def backward_of(tokens: int, flops_per_second: float, bytes_per_second: float, ranks: int) -> tuple[float, ...]:
    """Seconds of the story's model: backward, its all-reduce of 16-bit gradients, and what is waited for at the end."""
    backward = 4 * PARAMETERS * tokens / flops_per_second
    nbytes = 2 * PARAMETERS
    count = -(-nbytes // BUCKET)
    buckets = [BUCKET] * (count - 1) + [nbytes - (count - 1) * BUCKET]
    waited = exposed_seconds(buckets, backward, ranks, bytes_per_second)
    return backward, ring_seconds(nbytes, ranks, bytes_per_second), waited


def _draw_milliseconds(axes, tokens: int, flops_per_second: float, bytes_per_second: float, ranks: int) -> str:
    seconds = backward_of(tokens, flops_per_second, bytes_per_second, ranks)
    rows = dict(zip(("backward", "all-reduce", "waited for"), seconds, strict=True))
    for y, ((name, value), colour) in enumerate(zip(rows.items(), ("parameter", "gradient", "temporary"), strict=True)):
        look = {"color": COLOURS[colour], "hatch": HATCHES.get(colour, ""), "edgecolor": "black", "linewidth": 0.6}
        axes.barh(y, 1e3 * value, **look)
        axes.text(1e3 * value, y, f"  {name}: {_milliseconds(value)}", va="center", fontsize=SMALL_SIZE)
    axes.set_xlim(0, 1e3 * max(rows.values()) * 1.3)
    axes.set_ylim(2.6, -0.6)
    axes.set_yticks([])
    finish(axes, "one backward of 1.2 billion parameters, 16-bit gradients, buckets of 25 MiB (ms)", "")
    axes.xaxis.set_label_coords(0.5, -0.32)
    return ", ".join(f"{name} {_milliseconds(value)}" for name, value in rows.items())


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def explore_hidden(
    measured: Mapping[str, tuple[float, float]] | None = None, links: Mapping[str, float] = RANK_LINKS
) -> Interactive:
    """Sliders for tokens, FLOP rate and ranks, and buttons for the link. measured: as of `draw_hidden`."""
    first = "InfiniBand 400 Gb/s" if "InfiniBand 400 Gb/s" in links else next(iter(links))

    def draw(tokens: int = 8192, link: str = first, teraflops: int = 400, ranks: int = 64) -> Picture:
        return draw_hidden(tokens, link, teraflops, ranks, links=links, measured=measured)

    return Interactive(draw, tokens=RANK_TOKENS, link=list(links), teraflops=RATES, ranks=RANKS[1:])


def hidden_table(
    links: Mapping[str, float] = RANK_LINKS, teraflops: Sequence[float] = (100, 400, 800), ranks: int = 64
) -> Table:
    """The same as text: the tokens a rank from which it is hidden, for every link and FLOP rate."""
    rows = []
    for name, speed in links.items():
        for rate in teraflops:
            needed = (tokens_to_hide(rate * 1e12, speed, ranks, **how) for how in WAYS.values())
            rows.append((name, f"{speed / 1e9:g}", f"{rate:g}", *map(round, needed)))
    return Table(["link", "GB/s", "TFLOP/s", *WAYS], rows)
