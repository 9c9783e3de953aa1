"""Segments: a chain of layers cut into k pieces, each checkpointed. How many pieces hold the least?

L layers, each of which saves s bytes for its backward, among them its input of c bytes. While backward works on one of
k segments, there are the tape of its L / k layers, computed again, and the inputs of the segments before it. Backward
begins with the last, before which there are k - 1:

    bytes(k) = (k - 1)·c + (L / k)·s        d bytes / dk = c - L·s / k² = 0        k = √(L·s / c)

There 2·√(L·s·c) - c bytes are held, which grow with the root of the depth. Up to that k more segments are fewer bytes;
and since L is the most there can be, every layer is a segment as long as L <= s / c, and (L - 1)·c + s bytes are held:
nearly flat at first.

Chen et al. 2016, section 4, count s = c, and then k is √L. A GPT's block with fused attention saves 16 times its input:
√L segments are too few, and hold √L·(s + c) - c. That grows with √L too, but is (√(s / c) + √(c / s)) / 2 times as
much: twice.

Equal segments are not the last word. The first share the device with fewer inputs, so they may be longer. If segment i
of k may hold M bytes, so may every other: M >= i·c + size·s for all, and added up k·M >= c·k·(k - 1) / 2 + L·s. So no
cuts at all hold less than √(2·L·s·c) - c / 2; sizes that fall by c / s layers from one to the next come close.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from memlab.checking import balanced, positive
from memlab.gradient_checkpointing.hooks import checkpoint

Segments = int | str | Iterable[int]
"""How many; "sqrt", the whole number nearest to √layers; or where to cut: the first layer of each segment but the
first, so [3, 6, 8] cuts 10 layers into 3, 3, 2 and 2."""


def segment_bounds(layers: int, segments: Segments) -> list[tuple[int, int]]:
    """The segments of so many layers, as (first, one after last).

    A number of them gives sizes that differ by one at most, the larger first, where fewer inputs are held.

    Raises TypeError for what is none of Segments; ValueError for a number below 1 or above `layers`, and for cuts that
    do not rise or lie outside 1 … layers - 1.

    >>> segment_bounds(10, 4), segment_bounds(10, "sqrt"), segment_bounds(10, [4])
    ([(0, 3), (3, 6), (6, 8), (8, 10)], [(0, 4), (4, 7), (7, 10)], [(0, 4), (4, 10)])
    """
    positive("layers", layers)
    if isinstance(segments, str):
        if segments != "sqrt":
            raise ValueError(f"expected segments as a number, 'sqrt' or a list of cuts; found {segments!r}")
        root = math.isqrt(layers)
        return balanced(layers, root + (layers > root * (root + 1)))  # (root + ½)² is that and ¼ more
    if isinstance(segments, int) or not isinstance(segments, Iterable):
        return balanced(layers, segments)
    cuts = list(segments)
    for i, cut in enumerate(cuts):
        try:
            cuts[i] = operator.index(cut)
        except TypeError:
            raise TypeError(f"expected cuts as ints, found {cut!r} at position {i}") from None
        if isinstance(cut, bool):
            raise TypeError(f"expected cuts as ints, found {cut!r} at position {i}")
        if not 0 < cut < layers:
            raise ValueError(
                f"expected cuts between 1 and {layers - 1}, found {cut}; a cut is the first layer of a segment, and "
                f"neither 0 nor the number of layers ({layers}) is one"
            )
    for before, after in zip(cuts, cuts[1:], strict=False):
        if before >= after:
            raise ValueError(f"expected cuts that rise, found {after} after {before}; sort them and drop doubles")
    return list(zip([0, *cuts], [*cuts, layers], strict=True))


def checkpoint_sequential(layers: Iterable[Callable], segments: Segments, x: Any) -> Any:
    """layers[-1](… layers[0](x)), each segment in a `checkpoint` of its own. Values and gradients are bitwise the same.

    layers: an nn.Sequential, an nn.ModuleList, or any callables. One value goes from each to the next, as in torch's:
      what takes or gives several passes them as one tuple. x: what the first takes, usually (batch, …).
    segments: see Segments. The last is checkpointed, too, so that its tape is not there yet while what comes after the
      layers runs back. (torch.utils.checkpoint's function of this name never checkpoints it.)

    Raises TypeError for layers that cannot be called; TypeError or ValueError for segments, as `segment_bounds` does.
    """
    layers = listed(layers)
    for start, stop in segment_bounds(len(layers), segments):
        x = checkpoint(partial(run, layers[start:stop]), x)
    return x


def run(layers: Sequence[Callable], x: Any) -> Any:
    """One layer after another."""
    for layer in layers:
        x = layer(x)
    return x


def listed(layers: Iterable[Callable]) -> list[Callable]:
    """The layers as a list. Raises TypeError for what is not iterable, or has an entry that cannot be called."""
    if not isinstance(layers, Iterable):
        raise TypeError(
            f"expected layers as an nn.Sequential, an nn.ModuleList or a list, found {type(layers).__name__}; one "
            "module alone is checkpoint(module, x)"
        )
    layers = list(layers)
    for i, layer in enumerate(layers):
        if not callable(layer):
            raise TypeError(f"expected layers that can be called, found {type(layer).__name__} at position {i}")
    return layers


# ---- the theory


def segmented_bytes(layers: int, segments: Segments, saved_bytes: int, input_bytes: int) -> int:
    """The most bytes of activations that backward finds in so many equal layers, cut into segments.

    While segment i is worked on, counted from 0, there are i inputs of the segments before it, and its own tape:
    i·c + size·s. The largest of these. Not counted is what lies outside the layers.

    saved_bytes: what a layer keeps for its backward, its input included. input_bytes: what is handed from one layer to
    the next, and all that a segment keeps.

    Raises TypeError or ValueError for sizes below 1, an input larger than what a layer saves, and wrong segments.

    >>> segmented_bytes(10, 4, saved_bytes=16, input_bytes=1), segmented_bytes(10, 10, saved_bytes=16, input_bytes=1)
    (49, 25)
    """
    refuse_bytes(saved_bytes, input_bytes)
    bounds = segment_bounds(layers, segments)
    return max(i * input_bytes + (stop - start) * saved_bytes for i, (start, stop) in enumerate(bounds))


def best_segments(layers: int, saved_bytes: int, input_bytes: int) -> int:
    """How many equal segments hold the least: √(layers · saved / input), as nearly as whole layers allow, 1 to layers.

    Exact, for all of them are tried. Of several with the same bytes it is the lowest number. Arguments and errors: as
    of `segmented_bytes`.

    >>> best_segments(12, saved_bytes=16, input_bytes=1), best_segments(100, saved_bytes=16, input_bytes=1)
    (12, 39)
    """
    positive("layers", layers)
    return min(range(1, layers + 1), key=lambda k: segmented_bytes(layers, k, saved_bytes, input_bytes))


def refuse_bytes(saved_bytes: int, input_bytes: int) -> None:
    """Raise TypeError or ValueError for bytes that no layer has."""
    positive("saved_bytes", saved_bytes)
    positive("input_bytes", input_bytes)
    if input_bytes > saved_bytes:
        raise ValueError(
            f"expected saved_bytes with the layer's input included, at least input_bytes ({input_bytes:,}); found "
            f"{saved_bytes:,}"
        )


def exponent(xs: Iterable[float], ys: Iterable[float]) -> float:
    """p of the power law y = a · xᵖ that fits best: the slope of a straight line through (log x, log y), least squares.

    Raises ValueError for fewer than two different x, numbers that are not above 0, and more of one than of the other.

    >>> round(exponent([1, 4, 16], [3, 6, 12]), 12)
    0.5
    """
    xs, ys = list(map(float, xs)), list(map(float, ys))
    if len(xs) != len(ys) or len(set(xs)) < 2:
        raise ValueError(f"expected a y for each x and two different x at least, found {len(xs)} x and {len(ys)} y")
    if min(*xs, *ys) <= 0:
        raise ValueError(f"expected numbers above 0, which have a logarithm; found {min(*xs, *ys)}")
    xs, ys = [math.log(x) for x in xs], [math.log(y) for y in ys]
    x_mean, y_mean = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    rise = math.fsum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return rise / math.fsum((x - x_mean) ** 2 for x in xs)
