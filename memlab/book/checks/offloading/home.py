"""Exercise 6 of chapter 09: an optimizer whose masters and states lie on the host."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memlab.book.checks.answers import Wrong, a_function, a_method, exercise
from memlab.memory_timeline import Meter, Timeline, imagine, main_memory

_CARD = "H100-80GB"
_SPARE = 2048  # bytes: Adam's counts of steps
_LR, _STEPS = 2e-3, 100  # not torch's own, which who ignores it would have
_ROUNDED_APART = 0.1  # of a parameter's numbers: sums in another order may cost one of them a rounding
_SHAPES = ((6, 8), (16,), (3, 5), (4,))


# ---- values, by real tensors


def _parameters() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter((1 + torch.rand(shape, generator=draw) / 4).bfloat16()) for shape in _SHAPES]


def _gradients(step: int) -> list[Tensor | None]:
    """Of a step: the third parameter has none before the tenth, the fourth never has one."""
    draw = torch.Generator().manual_seed(step)
    size = -2 if step % 4 == 3 else 0.2  # three small ones up, a large one down: moments that last go the other way
    made = [(size * (0.5 + torch.rand(shape, generator=draw))).bfloat16() for shape in _SHAPES]
    return [grad if number < 2 or (number == 2 and step >= 10) else None for number, grad in enumerate(made)]


@functools.cache
def _weights() -> list[list[Tensor]]:
    """The weights after each step, by AdamW on FP32 masters."""
    masters = [p.detach().float() for p in _parameters()]
    adam, found = torch.optim.AdamW(masters, lr=_LR, foreach=False), []
    for step in range(_STEPS):
        for master, grad in zip(masters, _gradients(step), strict=True):
            master.grad = None if grad is None else grad.float()
        adam.step()
        found.append([master.bfloat16() for master in masters])
    return found


def _same_weights(make: Callable) -> None:
    params = _parameters()
    optimizer, places = _made(make, params), [p.data_ptr() for p in params]
    for step, right in enumerate(_weights()):
        for p, grad in zip(params, _gradients(step), strict=True):
            p.grad = grad
        optimizer.step()
        if any(p.dtype != torch.bfloat16 for p in params):
            raise Wrong(f"after step {step + 1} a parameter is in {params[0].dtype}; weights stay in BF16.")
        if [p.data_ptr() for p in params] != places:
            raise Wrong(
                f"after step {step + 1} a parameter has another storage, the host's. The weights come up into the "
                "one that they have on the device."
            )
        if left := sum(p.grad is not None for p in params):
            raise Wrong(f"after step {step + 1} {left} parameters still have a gradient on the device. Set it to None.")
        for number, (p, due) in enumerate(zip(params, right, strict=True)):
            if not torch.allclose(p.detach().float(), due.float(), rtol=2**-7, atol=0):
                raise Wrong(
                    f"after step {step + 1} the weights of parameter {number} are not AdamW's.{_look(params, step)}"
                )
    others = [(p != due).float().mean().item() for p, due in zip(params, right, strict=True)]
    if max(others) > _ROUNDED_APART:
        raise Wrong(
            f"after {_STEPS} steps {max(others):.0%} of a parameter's weights are one rounding away from AdamW's. Is "
            "its weight decay left out, or another default changed?"
        )


def _look(params: list[nn.Parameter], step: int) -> str:
    if all(torch.equal(p, before) for p, before in zip(params, _parameters(), strict=True)):
        if step < 3:
            return " They have not changed at all."
        return f" They have not changed: a step of {_LR:g} is lost in BF16, and must be kept in an FP32 master."
    return " Is each master made once, stepped with its own gradient in FP32, and never read back from the weight?"


def _made(make: Callable, params: list[nn.Parameter]) -> Any:
    optimizer = make(params, _LR, main_memory)
    a_method(optimizer, "step", "HostAdam(params, lr, host)")
    for value in (optimizer, *getattr(optimizer, "__dict__", {}).values()):
        if any(
            kind.__module__.startswith(("memlab.offloading", "memlab.mixed_precision")) for kind in type(value).__mro__
        ):
            raise Wrong(f"this is memlab's own {type(value).__name__} at work. Here it is to be yours.")
    return optimizer


# ---- bytes, on an imagined card


def _imagined(make: Callable, *widths: int) -> tuple[int, list[int], list[int], Timeline]:
    """Parameters; the card's and the host's bytes before the first step and after each; the card's timeline."""
    with imagine(_CARD):
        model = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths))).to(torch.bfloat16)
        params = list(model.parameters())
        with Meter(model) as meter:
            optimizer = _made(make, params)
            marks = [_held(meter.timeline)]
            for _ in range(3):
                for p in params:
                    p.grad = torch.ones_like(p)
                optimizer.step()
                marks.append(_held(meter.timeline))
    on_card, on_host = zip(*marks, strict=True)
    return sum(p.numel() for p in params), list(on_card), list(on_host), meter.timeline.on(f"imagined {_CARD}")


def _held(timeline: Timeline) -> tuple[int, int]:
    """What the card and the host hold at the end of a timeline."""
    held = {device: timeline.on(device).totals[-1] for device in timeline.devices}
    return held.get(f"imagined {_CARD}", 0), held.get("cpu", 0)


@exercise
def host_adam(answer: object) -> str:
    """Exercise 6: (params, lr, host) → an optimizer with 4 bytes a parameter on the device, and 12 on the host."""
    make = a_function(answer, "HostAdam(params, lr, host)")
    _same_weights(make)
    _bytes(make, 256, 512, 256)
    count, on_card, on_host, card = _bytes(make, 96, 384)
    return (
        f"The card holds {card.peak_bytes / count:.0f} bytes a parameter at its peak and {on_card[-1] / count:.0f} "
        f"after the step, the host {round(on_host[-1] / count)}."
    )


def _bytes(make: Callable, *widths: int) -> tuple[int, list[int], list[int], Timeline]:
    count, on_card, on_host, card = _imagined(make, *widths)
    weights = 2 * count
    if (more := on_card[0] - weights) > _SPARE:
        raise Wrong(
            f"the values are right. On an imagined card HostAdam(params, lr, host) makes {more / count:.1f} bytes a "
            "parameter on the card. Masters are made inside `with host():`."
        )
    if (more := on_card[2] - on_card[1]) > _SPARE:
        raise Wrong(f"the values are right. With each step {more / count:.1f} bytes a parameter more stay on the card.")
    if (more := on_card[1] - weights) > _SPARE:
        raise Wrong(
            f"the values are right. On an imagined card {more / count:.1f} bytes a parameter more than the weights are "
            "there after a step. Adam makes its moments in its first step; in which memory does that run?"
        )
    if on_card[-1] < weights:
        raise Wrong(
            f"the values are right. On an imagined card {on_card[-1] / count:.1f} bytes a parameter are left there "
            "after three steps: the weights do not come up to where they were."
        )
    if (more := card.peak_bytes - 2 * weights) > _SPARE:
        raise Wrong(
            f"the values are right. While a step lasts, the card holds {more / count:.1f} bytes a parameter more than "
            "weights and gradients. Is something widened, or copied, before it is on the host, or before it goes up?"
        )
    if (more := on_host[-1] - 12 * count) > _SPARE:
        look = " Gradients that are used up, or states beside master and moments?"
        raise Wrong(
            f"the values are right. After a step {more / count:.1f} bytes a parameter too many are on the host.{look}"
        )
    if on_host[-1] < 12 * count:
        raise Wrong(
            f"the values are right. After a step the host has {on_host[-1] / count:.1f} bytes a parameter; master and "
            "moments in FP32 are 12."
        )
    return count, on_card, on_host, card
