"""Exercise 4 of chapter 07, first and second part: which micro-batches make a step, and what each adds to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memlab.book.checks.answers import Wrong, a_function, exercise
from memlab.book.workloads import MLP
from memlab.memory_timeline import Meter

_FEATURES, _CLASSES = 12, 16


def examples(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    """A group of micro-batches of these sizes."""
    draw = torch.Generator().manual_seed(sum(sizes))
    return [
        (
            torch.randn(size, _FEATURES, generator=draw, dtype=torch.float64),
            torch.randint(_CLASSES, (size,), generator=draw),
        )
        for size in sizes
    ]


def small_model() -> nn.Module:
    """An MLP in FP64, with the same weights each time."""
    torch.manual_seed(0)
    return MLP(_FEATURES, 24, _CLASSES, layers=2).double()


# ---- first part

_NUMBER = 64  # floats in a batch, 256 B
_EPOCHS = ((8, 4), (10, 4), (9, 4), (3, 4), (4, 1), (1, 1), (0, 3), (26, 5))


def _loader(count: int, drawn: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches made when they are asked for, as a DataLoader makes them."""
    for number in range(count):
        drawn.append(number)
        yield torch.full((_NUMBER,), float(number)), torch.full((_NUMBER,), float(-number))


def _number(micro_batch: object) -> int:
    """Which batch of the loader this is."""
    if not isinstance(micro_batch, tuple) or len(micro_batch) != 2 or not isinstance(micro_batch[0], Tensor):
        raise Wrong(
            f"groups(batches, k): a group is a list of the loader's batches, found {type(micro_batch).__name__}."
        )
    return int(micro_batch[0].flatten()[0])


@exercise
def groups(answer: object) -> str:
    """Exercise 4, first part: (batches, k) → lists of k micro-batches, one after the other, the last may be shorter."""
    function = a_function(answer, "groups(batches, k)")
    for count, k in _EPOCHS:
        where, drawn, found, ahead, before = f"{count} batches, k = {k}", [], [], 0, ()
        with Meter() as meter:
            made = function(_loader(count, drawn), k)
            if not isinstance(made, Iterable):
                raise Wrong(f"{where}: expected groups, one after the other, found {type(made).__name__}.")
            for group in made:
                if not isinstance(group, list):
                    raise Wrong(f"{where}: expected each group as a list, found {type(group).__name__}.")
                if found and len(before) != len(found[-1]):
                    raise Wrong(f"{where}: a group has changed after it was handed out; make a list for each.")
                found.append([_number(micro_batch) for micro_batch in group])
                ahead, before = max(ahead, len(drawn) - sum(map(len, found))), group
            del made
            group = before = None
        _same_groups(found, [list(range(i, min(i + k, count))) for i in range(0, count, k)], where)
        if ahead:
            raise Wrong(
                f"{where}: the groups are right, and when one was handed out, {ahead} more batches had been asked "
                "for. A loader makes a batch when it is asked; yield a group as soon as it is complete."
            )
        fullest = meter.timeline.alive(meter.timeline.peak_event)
        held = sum(s.shape == (_NUMBER,) for s in fullest) // 2
        if held > 2 * k:
            raise Wrong(
                f"{where}: the groups are right, and at the peak {held} batches are held. Those of a group before the "
                "last one are done with; who still has them?"
            )
        if (left := meter.timeline.totals[-1]) > 0:
            raise Wrong(f"{where}: the groups are right, and {left:,} B of them are still alive when all is done.")
    return "Every batch is in a group, also the last ones, and no more are held than the step at hand needs."


def _same_groups(found: list[list[int]], right: list[list[int]], where: str) -> None:
    if found == right:
        return
    look = ""
    if [] in found:
        look = " An empty group is no step."
    elif found == right[: len(found)]:
        lost = sum(map(len, right)) - sum(map(len, found))
        look = f" The last {lost} were loaded and learned nothing from."
    sizes = [len(group) for group in right]
    raise Wrong(
        f"{where}: expected the batches in their order, in groups of {sizes}, found groups of "
        f"{[len(group) for group in found]}.{look}"
    )


# ---- second part

_GROUPS = ((8, 8, 8, 8), (8, 8, 3), (5,), (1, 7, 2, 12, 4), (6, 6))


@exercise
def share(answer: object) -> str:
    """Exercise 4, second part: (model, micro_batch, group) → its part of the mean loss over the group."""
    function = a_function(answer, "share(model, micro_batch, group)")
    model, same, rows = small_model(), small_model(), []
    model.register_forward_hook(lambda module, given, result: rows.append(len(given[0])))
    for sizes in _GROUPS:
        group = examples(*sizes)
        for number, (x, y) in enumerate(group):
            where = f"micro-batch {number} of a group with {list(sizes)} examples"
            rows.clear()
            found = function(model, group[number], group)
            if any(p.grad is not None for p in model.parameters()):
                raise Wrong(f"{where}: share has left gradients; the backward is not its affair.")
            if not isinstance(found, Tensor) or found.dim():
                what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
                raise Wrong(f"{where}: expected its share as a scalar tensor, found {what}.")
            if not found.requires_grad:
                raise Wrong(f"{where}: there is no graph behind the share, so nothing can be learned from it.")
            if rows != [len(x)]:
                raise Wrong(f"{where}: the model was to run once, over its {len(x)} examples; it ran over {rows}.")
            right = F.cross_entropy(same(x), y, reduction="sum") / sum(sizes)
            _same_share(found.item(), right.item(), where, number, sizes)
            if not all(map(torch.allclose, _gradient(found, model), _gradient(right, same))):
                raise Wrong(f"{where}: the share is right, and its gradient is not.")
    return "However a group is cut, its shares add up to the mean over its examples."


def _gradient(loss: Tensor, model: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, list(model.parameters()))


def _same_share(found: float, right: float, where: str, number: int, sizes: tuple[int, ...]) -> None:
    if math.isclose(found, right, rel_tol=1e-12):
        return
    mean = right * sum(sizes) / sizes[number]
    slips = {
        "the mean of its losses, which each count as much as all others": mean,
        f"its mean, divided by the number of micro-batches, {len(sizes)}: the mean of means": mean / len(sizes),
        "the sum of its losses": right * sum(sizes),
        "its mean, divided by 4, however many there are": mean / 4,
        "its sum, divided by 4": right * sum(sizes) / 4,
    }
    look = next((f" That is {what}." for what, value in slips.items() if math.isclose(found, value, rel_tol=1e-9)), "")
    raise Wrong(f"{where}: expected {right:.9g}, its part of the mean over all examples, found {found:.9g}.{look}")
