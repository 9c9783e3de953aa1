"""Ranks in a mesh, drawn: who is in a group along each axis, and where its links run; and layers on stages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc, Rectangle

from memlab.book.style import COLOURS, LABEL_SIZE, LINE_COLOURS, SMALL_SIZE, Picture, byte_unit
from memlab.checking import positive
from memlab.ranks import mesh_groups
from memlab.units import format_bytes

# ---- the mesh

MOST_RANKS = 32
RINGS = ("data", "tensor", "sequence")
"""Axes along which ranks talk in rings; along others, such as "pipeline", each talks with the one before and after."""
SHADES = (
    ("#CFE5F2", ""),
    ("#F5CDB4", "///"),
    ("#FBE3A6", "..."),
    ("#CFEBE1", "\\\\\\"),
    ("#EFD5E3", "xxx"),
    ("#FFFFFF", ""),
)
ORDERS = {" · ".join(order): order for order in itertools.permutations(("data", "pipeline", "tensor"))}
"""What an order of axes is called → the axes, outermost first."""


def mesh_links(axes: Mapping[str, int], axis: str) -> list[tuple[int, int]]:
    """Which pairs of ranks talk along an axis: neighbours in each group, and in a ring the last with the first."""
    pairs = []
    for group in mesh_groups(axes)[axis]:
        pairs += itertools.pairwise(group)
        if axis in RINGS and len(group) > 2:
            pairs.append((group[0], group[-1]))
    return pairs


def between_nodes(links: Sequence[tuple[int, int]], node: int) -> int:
    """How many of the links run from one node of so many ranks to another."""
    return sum(one // node != other // node for one, other in links)


def draw_mesh(axes: Mapping[str, int], node: int = 4) -> Picture:
    """The ranks of `mesh(**axes)` in their nodes, once for each axis: its groups shaded, its links as arcs.

    axes: name → size, outermost first. node: how many ranks, one after the other, share a node's fast links. Links
    between nodes are dashed. Raises ValueError for more than 32 ranks.
    """
    positive("node", node)
    ranks = math.prod(axes.values())
    if not 1 < ranks <= MOST_RANKS:
        raise ValueError(f"expected a mesh of 2 to {MOST_RANKS} ranks to draw, found {ranks}")
    shown = [name for name, size in axes.items() if size > 1]
    height = 0.55 + 1.35 * len(shown)
    figure = Figure(figsize=(8, height), dpi=80)
    panels = figure.subplots(len(shown), squeeze=False)[:, 0]
    figure.subplots_adjust(0.02, 0.1 / height, 0.98, 1 - 0.65 / height, hspace=0.36)
    said = []
    for panel, name in zip(panels, shown, strict=True):
        said.append(_draw_axis(panel, axes, name, node, ranks))
    made = "mesh(" + ", ".join(f"{name}={size}" for name, size in axes.items()) + ")"
    head = f"{made}: {ranks} ranks in nodes of {node}"
    figure.suptitle(head, x=0.02, y=1 - 0.08 / height, ha="left", va="top", fontsize=LABEL_SIZE)
    return Picture(
        figure,
        f"Ranks in a row, framed by node, once for each axis, with an arc for every pair that talks. {head}. "
        f"{' '.join(said)}",
    )


def _draw_axis(panel: Axes, axes: Mapping[str, int], name: str, node: int, ranks: int) -> str:
    """A row of ranks shaded by their groups along one axis, arcs above."""
    groups, links = mesh_groups(axes)[name], mesh_links(axes, name)
    crossing = between_nodes(links, node)
    at = [rank + 0.35 * (rank // node) for rank in range(ranks)]
    which = {rank: number for number, group in enumerate(groups) for rank in group}
    for rank, x in enumerate(at):
        colour, hatch = SHADES[which[rank] % len(SHADES)]
        corner = (x - 0.42, 0)
        panel.add_patch(Rectangle(corner, 0.84, 1, facecolor=colour, edgecolor="#888888", hatch=hatch, linewidth=0))
        panel.add_patch(Rectangle(corner, 0.84, 1, fill=False, edgecolor="black", linewidth=0.6))
        box = {"boxstyle": "square,pad=0.12", "facecolor": "white", "linewidth": 0, "alpha": 0.9}
        place = {"ha": "center", "va": "center"}
        panel.text(x, 0.66, str(rank), fontsize=LABEL_SIZE, bbox=box, **place)
        panel.text(x, 0.26, _letter(which[rank]), fontsize=SMALL_SIZE, bbox=box, **place)
    for number in range(math.ceil(ranks / node)):
        begin, end = at[number * node], at[min((number + 1) * node, ranks) - 1]
        frame = {"fill": False, "edgecolor": "black", "linewidth": 1.2}
        panel.add_patch(Rectangle((begin - 0.5, -0.14), end - begin + 1, 1.28, **frame))
    for one, other in links:
        outside = one // node != other // node
        look = {"linestyle": "--" if outside else "-", "color": LINE_COLOURS[1 if outside else 0], "linewidth": 1.5}
        wide = at[other] - at[one]
        panel.add_patch(Arc(((at[one] + at[other]) / 2, 1.14), wide, _rise(wide, at), theta1=0, theta2=180, **look))
    panel.set_xlim(-0.6, max(at[-1], 3) + 0.6)
    panel.set_ylim(-0.2, 2.3)
    panel.axis("off")
    members = "; ".join(f"{_letter(number)} {', '.join(map(str, group))}" for number, group in enumerate(groups))
    many = f"{len(links)} links" if len(links) > 1 else "1 link"
    words = f"{name}: {many}, {crossing if crossing else 'none'} between nodes"
    panel.set_title(words, fontsize=LABEL_SIZE, loc="left", pad=1)
    return f"Along {words}; groups {members}."


def _rise(wide: float, at: Sequence[float]) -> float:
    """Twice an arc's height: the wider the higher, and none leaves the picture."""
    return 0.6 + 1.6 * wide / max(at[-1], 1)


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else "A" + chr(ord("A") + number - 26)


# ---- layers on stages

Costs = Sequence[float] | Callable[[int, int], float]
"""Of each layer, or a function of layer and stage, as `balance` takes them."""


def stage_costs(costs: Costs, cut: Sequence[range]) -> list[list[float]]:
    """For each stage of a cut what each of its layers costs there."""
    cost = costs if callable(costs) else lambda layer, _: costs[layer]
    return [[cost(layer, stage) for layer in part] for stage, part in enumerate(cut)]


def draw_balance(cuts: Mapping[str, Sequence[range]], nbytes: Costs, seconds: Costs) -> Picture:
    """Stages as stacked bars of their layers, by bytes and by seconds side by side, for each way to cut.

    cuts: name → the layers of each stage, as of `balance`. The dearest stage of each cut has a thick frame and its
    figure. nbytes, seconds: of a layer, in either form.

    Raises ValueError for no cut, or cuts of different numbers of layers.
    """
    if not cuts or len({sum(map(len, cut)) for cut in cuts.values()}) > 1:
        raise ValueError(f"expected cuts of the same layers, found {dict(cuts)}")
    figure = Figure(figsize=(8, 3.5), dpi=80)
    panels = figure.subplots(1, 2)
    figure.subplots_adjust(0.08, 0.16, 0.985, 0.87, wspace=0.22)
    most = max(sum(stage) for cut in cuts.values() for stage in stage_costs(nbytes, cut))
    unit, scale = byte_unit(round(most))
    said = [
        _draw_costs(panels[0], cuts, nbytes, 1 / scale, "activation", lambda value: format_bytes(round(value))),
        _draw_costs(panels[1], cuts, seconds, 1e3, "input", lambda value: f"{1e3 * value:.3g} ms"),
    ]
    panels[0].set_title(f"bytes ({unit})", fontsize=LABEL_SIZE, loc="left")
    panels[1].set_title("time of a micro-batch (ms)", fontsize=LABEL_SIZE, loc="left")
    return Picture(
        figure,
        f"Stacked bars of layers on stages. Bytes of the fullest stage: {said[0]}. Time of the slowest: {said[1]}.",
    )


def _draw_costs(axes: Axes, cuts: Mapping, costs: Costs, scale: float, colour: str, words: Callable) -> str:
    """Bars of one kind of cost; returns which stage of each cut is the dearest."""
    top = scale * max(sum(stage) for cut in cuts.values() for stage in stage_costs(costs, cut))
    at, ticks, said = 0.0, [], []
    for name, cut in cuts.items():
        parts = stage_costs(costs, cut)
        totals = [sum(part) for part in parts]
        dearest = max(range(len(totals)), key=totals.__getitem__)
        said.append(f"{name}, stage {dearest} with {words(totals[dearest])}")
        for stage, (part, layers) in enumerate(zip(parts, cut, strict=True)):
            bottom = 0.0
            for value, layer in zip(part, layers, strict=True):
                tall = value * scale
                look = {"color": COLOURS[colour] if layer % 2 else "#F2F2F2", "hatch": "" if layer % 2 else "///"}
                axes.bar(at, tall, 0.8, bottom, edgecolor="#777777", linewidth=0.4, **look)
                if tall > 0.055 * top:
                    box = {"boxstyle": "square,pad=0.1", "facecolor": "white", "linewidth": 0}
                    place = {"ha": "center", "va": "center", "fontsize": 7, "bbox": box}
                    axes.text(at, bottom + tall / 2, str(layer), **place)
                bottom += tall
            thick = 2.0 if stage == dearest else 0.6
            axes.bar(at, bottom, 0.8, fill=False, edgecolor="black", linewidth=thick)
            if stage == dearest:
                axes.text(at, bottom, words(totals[stage]), ha="center", va="bottom", fontsize=SMALL_SIZE)
            ticks.append((at, f"{stage}"))
            at += 1
        middle = at - len(cut) / 2 - 0.5
        place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top", "fontsize": SMALL_SIZE}
        axes.text(middle, -0.1, name, **place)
        at += 1
    place = {"transform": axes.get_xaxis_transform(), "ha": "right", "va": "top", "fontsize": SMALL_SIZE}
    axes.text(-0.6, -0.025, "stage", **place)
    axes.set_xticks(*zip(*ticks, strict=True), fontsize=SMALL_SIZE)
    axes.tick_params(labelsize=SMALL_SIZE, length=2)
    axes.set_ylim(0, top * 1.12)
    axes.spines[["top", "right"]].set_visible(False)
    return "; ".join(said)
