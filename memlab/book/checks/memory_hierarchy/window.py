"""Exercise 6 of chapter 03: attention in a sliding window, in tiles: bytes and FLOPs grow with T."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.book.checks.answers import Wrong, a_function, exercise
from memlab.memory_hierarchy.counting import FLOPS
from memlab.memory_timeline import Meter, Timeline

_FEW, _MANY = 256, 1024  # tokens
_GROWTH = 4.5  # of what is linear in tokens it is 4, of what is quadratic, 16

_TASKS = {  # leading dimensions, tokens, head_dim, window, dtype
    "a window of 8 in 40 tokens": ((2,), 40, 8, 8, torch.float64),
    "a window of 1": ((2,), 33, 8, 1, torch.float64),
    "a window of 2": ((1,), 200, 4, 2, torch.float64),
    "one token": ((1, 1), 1, 8, 4, torch.float64),
    "a window as long as the text": ((2,), 50, 8, 50, torch.float64),
    "a window longer than the text": ((2,), 150, 8, 1000, torch.float64),
    "a window of 100 in 700 tokens": ((2,), 700, 8, 100, torch.float64),
    "two texts with three heads": ((2, 3), 300, 16, 17, torch.float64),
    "512 tokens": ((1,), 512, 8, 64, torch.float64),
    "scores in the thousands": ((2,), 300, 8, 60, torch.float64),
    "FP32": ((1, 2), 260, 16, 30, torch.float32),
}


def _qkv(leading: tuple[int, ...], tokens: int, head_dim: int, dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(*leading, tokens, head_dim, generator=draw, dtype=dtype) for _ in range(3))
    return [q * scale, k, v]


def by_hand(q: Tensor, k: Tensor, v: Tensor, before: int, after: int = 0, scale: float | None = None) -> Tensor:
    """Each query sees `before` keys up to its own, its own included, and `after` keys more."""
    i = torch.arange(q.shape[-2])
    apart = i[:, None] - i
    seen = (apart < before) & (apart >= -after)
    scores = (q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ v


class _Work(TorchDispatchMode):
    """FLOPs of products, and one for each number that any other op makes: quicker than OpCounter in a long loop."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if formula := FLOPS.get(func.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        elif isinstance(result, Tensor) and not func.is_view:
            self.flops += result.numel()
        return result


@exercise
def window_attention(answer: object) -> str:
    """Exercise 6: (q, k, v, window) → attention of each query to the last `window` keys, nothing T × T."""
    function = a_function(answer, "window_attention(q, k, v, window)")
    for name, (leading, tokens, head_dim, window, dtype) in _TASKS.items():
        given = _qkv(leading, tokens, head_dim, dtype, 1000 if "thousands" in name else 1)
        before = [tensor.clone() for tensor in given]
        found = function(*given, window)
        where = f"{name} ({tokens} tokens, window {window})"
        if not isinstance(found, Tensor) or found.shape != given[0].shape or found.dtype != dtype:
            kind = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise Wrong(f"{where}: expected a tensor of {dtype} {tuple(given[0].shape)}, found {kind}.")
        if not all(map(torch.equal, before, given)):
            raise Wrong(f"{where}: your function has changed q, k or v; they are not yours.")
        _same(found, given, window, where)
    return _linear(function)


def _same(found: Tensor, given: list[Tensor], window: int, where: str) -> None:
    right = by_hand(*given, window)
    tolerance = 1e-12 if found.dtype == torch.float64 else 1e-5
    off = (found - right).abs().amax(-1).flatten(0, -2).amax(0) if found.dim() > 2 else (found - right).abs().amax(-1)
    if (off <= tolerance).all():
        return
    first = int((~(off <= tolerance)).nonzero()[0])
    look = ""
    if found.isnan().any():
        look = (
            " NaN: where a whole row of a tile is masked, its maximum is −∞, and −∞ − (−∞) is no number."
            if given[0].abs().max() < 100
            else " NaN: an exponent was too large. What keeps it below 0?"
        )
    else:
        slips = {
            "a key too many, before the window": (window + 1,),
            "a key too few, the first of the window": (window - 1,),
            "keys after the query's own": (window, window - 1),
            "one key after the query's own": (window, 1),
            "all earlier keys, without a window": (found.shape[-2],),
            "all keys": (found.shape[-2], found.shape[-2]),
            "scores that are not divided by √head_dim": (window, 0, 1.0),
            "scores that are divided by head_dim": (window, 0, 1 / found.shape[-1]),
        }
        close = functools.partial(torch.allclose, found, rtol=0, atol=1e-5, equal_nan=True)
        look = next(
            (f" That is attention with {what}." for what, kind in slips.items() if close(by_hand(*given, *kind))), ""
        )
        if not look and off.max() < 1e-5:
            look = " Is everything in the dtype that came in?"
        elif not look and first > window:
            look = f" The {first} before it are right: what is different there? Does a tile begin, or end?"
        elif not look:
            look = " Compare it with windowed_by_hand: do the weights of what it sees add up to 1, and is the rest 0?"
    raise Wrong(f"{where}: query {first} is off by {off[first]:.2g}.{look}")


def _metered(function: Callable, tokens: int) -> tuple[Timeline, int]:
    """The timeline of one forward of two heads with a window of 32, and its FLOPs."""
    given = _qkv((1, 2), tokens, 16, torch.float32)
    with Meter(inputs=given) as meter:
        out = function(*given, 32)
    del out
    with _Work() as work:
        function(*given, 32)
    return meter.timeline, work.flops


def _linear(function: Callable) -> str:
    """Raise Wrong for bytes or FLOPs that are not linear in tokens, and for what stays."""
    (few, few_flops), (many, many_flops) = (_metered(function, tokens) for tokens in (_FEW, _MANY))
    result = 2 * _MANY * 16 * 4
    if (left := many.totals[-1] - many.totals[0]) > result:
        raise Wrong(f"the values are right, and {left - result:,} B beside the result are alive when all is done.")
    extra = [t.peak_bytes - t.totals[0] for t in (few, many)]
    if extra[1] > _GROWTH * extra[0]:
        raise Wrong(
            f"the values are right. With {_FEW:,} tokens {extra[0]:,} B are held beside q, k and v, with {_MANY:,} "
            f"{extra[1]:,} B: {extra[1] / extra[0]:.1f} times as much for four times the tokens. {_largest(many)}"
        )
    if any(math.prod(s.shape[-2:]) >= _MANY * _MANY for s in many.storages.values()):
        raise Wrong(f"the values are right, but something T × T was made, if only for a moment. {_largest(many)}")
    if many_flops > _GROWTH * few_flops:
        raise Wrong(
            f"the values are right, and nothing T × T is held, but computed: {few_flops:,} FLOPs with {_FEW:,} tokens, "
            f"{many_flops:,} with {_MANY:,}, {many_flops / few_flops:.1f} times as many. Make no tile that the mask "
            "hides altogether: which keys can a tile of queries see?"
        )
    whole = 2 * _MANY * _MANY * 4
    return f"{_MANY:,} tokens with {extra[1]:,} B, where T × T alone is {whole:,} B; and {many_flops:,} FLOPs."


def _largest(timeline: Timeline) -> str:
    storage = max((s for s in timeline.storages.values() if s.phase != "before"), key=lambda s: s.nbytes)
    return f"The largest: {'×'.join(map(str, storage.shape))} {storage.dtype}, made by\n    {storage.line}"
