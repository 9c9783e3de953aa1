"""Exercises 1 and 2 of chapter 07: what a micro-batch weighs, and the bytes that smaller ones leave as they were."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import torch
from torch import nn

from memlab.book.checks.answers import Wrong, a_function, exercise, plain, same_bytes, unchanged
from memlab.book.checks.memory_arithmetic.sizes import NoTensors
from memlab.book.workloads import GPT, MLP, text_batch
from memlab.memory_timeline import Meter, Timeline
from memlab.units import GiB, KiB

# ---- 1

_COUNTS = ((6, 2), (5,), (4, 4, 4, 4), (1, 9, 30), (7, 0, 3), (0, 0, 512), (2048, 1731, 40, 0, 1999))


@exercise
def weights(answer: object) -> str:
    """Exercise 1: (label_counts) → the factor of each micro-batch's mean loss, so that they add up to the mean."""
    function = a_function(answer, "weights(label_counts)")
    for counts in _COUNTS:
        where = f"weights({list(counts)})"
        given = list(counts)
        found = function(given)
        unchanged(given, list(counts), where)
        if not isinstance(found, (list, tuple)) or len(found) != len(counts):
            what = f"{len(found)} of them" if isinstance(found, (list, tuple)) else type(found).__name__
            raise Wrong(f"{where}: expected a list of {len(counts)} factors, found {what}.")
        found = list(map(plain, found))
        for each in found:
            if type(each) not in (float, int) or not math.isfinite(each):
                raise Wrong(f"{where}: expected factors that are floats, found {type(each).__name__} {str(each)[:40]}.")
        expected = [Fraction(count, sum(counts)) for count in counts]
        if all(abs(each - float(right)) <= 1e-12 for each, right in zip(found, expected, strict=True)):
            continue
        at = next(i for i, right in enumerate(expected) if abs(found[i] - float(right)) > 1e-12)
        look = ""
        if all(math.isclose(each, 1 / len(counts)) for each in found):
            look = (
                " That is the mean of the means: each micro-batch counts as much as any other, however few its labels."
            )
        elif not math.isclose(sum(found), 1):
            look = f" If the loss is 1 at every label, its mean is 1, and by your factors {sum(found):.6g}."
        elif counts[at] == 0:
            look = " What has no labels adds nothing."
        raise Wrong(
            f"{where}: micro-batch {at} has {counts[at]:,} of {sum(counts):,} labels, so the factor {found[at]:.6g} is "
            f"not its part.{look}"
        )
    return "Each mean counts by its labels; what a text is cut into makes no difference any more."


# ---- 2, first part


@functools.cache
def four_of_eight() -> Timeline:
    """Exercise 2's timeline: eight texts through a small GPT, in four micro-batches."""
    torch.manual_seed(0)
    model = GPT(layers=1, width=48, heads=2, context=12, vocabulary=256)
    batch = text_batch(batch=8, tokens=12)
    with Meter(model, inputs=batch) as meter:
        for part in zip(*(tokens.chunk(4) for tokens in batch), strict=True):
            (model(*part) / 4).backward()
    return meter.timeline


def _parts() -> dict[str, int]:
    """The right answers of the first part, from the timeline."""
    timeline = four_of_eight()
    turn = next(span.start - 1 for span in reversed(timeline.phases) if span.phase == "backward")
    activations = [s for s in timeline.alive(turn) if s.category == "activation"]
    peak = timeline.alive(timeline.peak_event)
    of_weights = {s.shape for s in peak if s.category == "parameter"}
    return {
        "waiting": timeline.bytes_by_category(turn)["gradient"],
        "fixed": sum(s.nbytes for s in activations if not s.shape or s.dtype == "int64"),
        "fresh": sum(s.nbytes for s in peak if s.category == "temporary" and s.shape in of_weights and s.shape),
    }


@exercise
def unexplained(waiting: object, fixed: object, fresh: object) -> str:
    """Exercise 2, first part: what is alive with four micro-batches and does not shrink with them, in bytes."""
    right = _parts()
    for found, name, hint in (
        (
            waiting,
            "waiting",
            "The first micro-batches' backward has ended, and the step is yet to come. What of theirs must stay until "
            "then, and for how many of the weights?",
        ),
        (
            fixed,
            "fixed",
            "List the activations at the two turns beside each other, down to the smallest: which stand in both with "
            "the same shape? A scalar has no shape, and a size.",
        ),
        (
            fresh,
            "fresh",
            "At the peak, look at the temporaries: one of them has a weight's shape. The waiting gradient of that "
            "weight is not it.",
        ),
    ):
        same_bytes(found, right[name], f"{name}_bytes", hint, secret=True)
    return (
        "Activations shrink with the micro-batch. Gradients wait, and a new one needs its own place before it is added."
    )


# ---- 2, second part


def _metered_turn(model: nn.Module, batch: tuple, k: int) -> int:
    """Bytes at the turn of the last of k micro-batches; where there were others, their gradients wait."""
    for p in model.parameters():
        p.grad = None if k == 1 else torch.zeros_like(p)
    with Meter(model, inputs=batch) as meter:
        loss = model(*(part.chunk(k)[-1] for part in batch))
        held = meter.timeline.totals[-1]
        del loss
    return held


@functools.cache
def _measured() -> dict[str, tuple[tuple[int, int, int, int], dict[int, int]]]:
    """Models, as (weight_bytes, other_bytes, example_bytes, batch), and what the meter says of each k."""
    made = {}
    for name, model, batch in (
        ("a narrow MLP with a batch of 24", MLP(16, 16), 24),
        ("a wide MLP, whose gradients outweigh its activations", MLP(64, 96), 24),
        ("an MLP in FP64 with a batch of 7", MLP(8, 32).double(), 7),
    ):
        torch.manual_seed(0)
        features = model.layers[0].in_features
        x = torch.randn(batch, features, dtype=model.layers[0].weight.dtype)
        given = x, torch.arange(batch) % 16
        turns = {k: _metered_turn(model, given, k) for k in _divisors(batch)}
        weight = sum(p.nbytes for p in model.parameters())
        example = (turns[1] + weight - turns[batch]) // (batch - 1)
        made[name] = (weight, turns[1] - weight - batch * example, example, batch), turns
    return made


def _divisors(batch: int) -> list[int]:
    return [k for k in range(1, batch + 1) if batch % k == 0]


def _imagined() -> dict[str, tuple[tuple[int, int, int, int], dict[int, int]]]:
    """Sizes of larger models, and their bytes at the turn by the rule that the measured ones follow."""
    made = {}
    for name, sizes in (
        ("a model of 7 billion BF16 weights with AdamW", (14 * 10**9, 84 * 10**9, 3 * GiB, 60)),
        ("a batch of one", (KiB, KiB, KiB, 1)),
        ("activations that a byte does not divide evenly", (1000, 3000, 333, 30)),
    ):
        weight, other, example, batch = sizes
        held = {k: weight * (2 if k > 1 else 1) + other + example * (batch // k) for k in _divisors(batch)}
        made[name] = sizes, held
    return made


@exercise
def fewest_micro_batches(answer: object) -> str:
    """Exercise 2, second part: (budget, weights, others, an example, batch) → the smallest k that fits, or None."""
    named = "fewest_micro_batches(budget_bytes, weight_bytes, other_bytes, example_bytes, batch)"
    function = a_function(answer, named)
    for name, (sizes, turns) in (_measured() | _imagined()).items():
        budgets = {held + more for held in turns.values() for more in (-1, 0)} | {1, 2 * max(turns.values())}
        for budget in sorted(budgets, reverse=True):
            fits = [k for k, held in turns.items() if held <= budget]
            where = f"{name}: fewest_micro_batches({', '.join(f'{n:,}' for n in (budget, *sizes))})"
            with NoTensors():
                found = function(budget, *sizes)
            if found is not None and type(found) is not int:
                raise Wrong(f"{where}: expected a whole number (int) or None, found {type(found).__name__} {found!r}.")
            if found == (fits[0] if fits else None):
                continue
            batch = sizes[-1]
            if found is None:
                raise Wrong(f"{where}: you say that none fits. k = {fits[0]} holds {turns[fits[0]]:,} B at the turn.")
            if found not in turns:
                raise Wrong(f"{where}: {found} micro-batches of the same size can't be made of {batch} examples.")
            if found not in fits:
                waits = "no gradient waits" if found == 1 else "the gradients of the earlier ones wait"
                raise Wrong(
                    f"{where}: with k = {found} the turn holds {turns[found]:,} B, {turns[found] - budget:,} too many. "
                    f"With k = {found}, {waits}."
                )
            look = " With k = 1 no gradient waits." if fits[0] == 1 else ""
            raise Wrong(
                f"{where}: k = {found} fits, and so does k = {fits[0]}, with {turns[fits[0]]:,} B at the turn.{look}"
            )
    return "To the byte of the meter. Two micro-batches may need more than one: what waits can outweigh what is halved."
