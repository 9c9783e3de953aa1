"""Exercise 6 of chapter 07: mean and variance of a batch from those of its micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from memlab.book.checks.answers import Wrong, a_function, exercise
from memlab.memory_timeline import Meter

_CHANNELS = 256
_SIZES = (5, 64, 1, 17, 2, 40)
_SPARE = 10  # vectors alive beside the two given

_Statistics = tuple[int, Tensor, Tensor]


@functools.cache
def _data() -> dict[str, tuple[list[Tensor], float]]:
    """Micro-batches of each kind, (n, channels), and how near the statistics must come, relative to the variance."""
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, _CHANNELS, generator=draw, dtype=torch.float64) for n in _SIZES]
    apart = [part + 50 * number for number, part in enumerate(parts)]
    scale = 10.0 ** torch.linspace(-3, 3, _CHANNELS, dtype=torch.float64)
    return {
        "two halves of a batch": (list(torch.cat(parts)[:128].chunk(2)), 1e-12),
        "micro-batches of different sizes": (parts, 1e-12),
        "micro-batches whose means lie far apart": (apart, 1e-12),
        "channels of different scales": ([part * scale for part in parts], 1e-12),
        "a variance of 1 about a mean of 100,000,000": ([part + 1e8 for part in parts], 1e-6),
        "FP32, a variance of 1 about a mean of 1,000": ([(part + 1e3).float() for part in parts], 1e-3),
    }


def _of(part: Tensor) -> _Statistics:
    variance, mean = torch.var_mean(part, 0, correction=0)
    return len(part), mean, variance


@exercise
def merge(answer: object) -> str:
    """Exercise 6: two (n, mean, biased variance) → those of both together, per channel."""
    function = a_function(answer, "merge(a, b)")
    for name, (parts, tolerance) in _data().items():
        whole = torch.cat(parts)
        one, *rest = map(_of, parts)
        for part in rest:
            one = _merged(function, one, part, name)
        _near(one, whole, tolerance, f"{name}, one after the other")
        if len(parts) > 2:
            a, b = (functools.reduce(function, map(_of, side)) for side in (parts[:2], parts[2:]))
            _near(_merged(function, b, a, name), whole, tolerance, f"{name}, in two halves, the second first")
    nothing = 0, torch.zeros(_CHANNELS, dtype=torch.float64), torch.zeros(_CHANNELS, dtype=torch.float64)
    first = _data()["micro-batches of different sizes"][0][0]
    for a, b, name in (
        (nothing, _of(first), "nothing (n = 0), and five examples"),
        (_of(first), nothing, "five examples, and nothing (n = 0)"),
    ):
        _near(_merged(function, a, b, name), first, 1e-12, name)
    return _held(function)


def _merged(function: Callable, a: _Statistics, b: _Statistics, name: str) -> _Statistics:
    before = [tensor.clone() for tensor in (*a[1:], *b[1:])]
    found = function(a, b)
    if not isinstance(found, tuple) or len(found) != 3:
        raise Wrong(f"{name}: expected (n, mean, variance), found {type(found).__name__}.")
    n, *both = found
    if type(n) is not int or n != a[0] + b[0]:
        raise Wrong(f"{name}: {a[0]} and {b[0]} examples: expected n = {a[0] + b[0]} (int), found {n!r}.")
    for what, tensor in zip(("mean", "variance"), both, strict=True):
        if not isinstance(tensor, Tensor) or tensor.shape != a[1].shape or tensor.dtype != a[1].dtype:
            kind = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise Wrong(f"{name}: expected a {what} of {a[1].dtype} {tuple(a[1].shape)}, found {kind}.")
    if not all(map(torch.equal, before, (*a[1:], *b[1:]))):
        raise Wrong(f"{name}: merge has written to what it was given; others may still need it.")
    return found


def _near(found: _Statistics, whole: Tensor, tolerance: float, where: str) -> None:
    """Raise Wrong unless mean and variance are those of all examples, relative to the variance."""
    _, mean, variance = found
    right_variance, right_mean = torch.var_mean(whole.double(), 0, correction=0)
    n, least = len(whole), right_variance.clamp(min=1e-12)
    off = ((mean.double() - right_mean).abs() / least.sqrt()).max().item()
    if not off <= tolerance:
        raise Wrong(
            f"{where}: the mean is off by up to {off:.2g} standard deviations. Does each example count once, however "
            "many are beside it?"
        )
    off = ((variance.double() - right_variance).abs() / least).max().item()
    if off <= tolerance:
        return
    look = ""
    if torch.allclose(variance.double(), right_variance * n / (n - 1), rtol=1e-9):
        look = " That is the unbiased one, by n − 1; BatchNorm normalises by n."
    elif (right_mean.abs() > 500 * right_variance.sqrt()).any():
        look = (
            " The squares of large numbers were subtracted from each other, and what is small was rounded away: "
            "work with differences of means."
        )
    elif (variance.double() < right_variance).all():
        look = " The two means differ. Examples about one of them are further from the mean of both."
    raise Wrong(f"{where}: the variance is off by up to {off:.2g} of itself.{look}")


def _held(function: Callable) -> str:
    """Raise Wrong for what merging many parts leaves behind or needs at once."""
    parts = [_of(part) for part in _data()["micro-batches of different sizes"][0]] * 4
    with Meter(inputs=parts) as meter:
        merged = functools.reduce(function, parts)
    timeline, vector = meter.timeline, _CHANNELS * 8
    held = (timeline.totals[-1] - timeline.totals[0]) // vector
    if held > 2:
        raise Wrong(
            f"the values are right, and after merging {len(parts)} parts {held} vectors are alive; 2 are asked for."
        )
    if (most := (timeline.peak_bytes - timeline.totals[0]) // vector) > _SPARE:
        raise Wrong(f"the values are right, and merging two parts takes up to {most} vectors at once, not a few.")
    return f"{merged[0]:,} examples in {len(parts)} parts: a mean and a variance, and not one example was kept."
