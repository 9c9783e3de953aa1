"""Exercise 2 of chapter 15: the order in which a stage computes, under 1F1B and where there is room for less."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from memlab.book.checks.answers import Wrong, a_function, exercise, kind_of
from memlab.pipeline_parallelism import Action, one_forward_one_backward

_KINDS = {"F": "forward", "B": "backward"}
_SHAPES = ((4, 8), (4, 2), (3, 3), (1, 3), (2, 5), (6, 7))  # stages, micro-batches


@exercise
def order(answer: object) -> str:
    """Exercise 2, first part: (stage, stages, micro_batches) → the stage's order under 1F1B, as a text."""
    function = a_function(answer, "order(stage, stages, micro_batches)")
    for stages, micro_batches in _SHAPES:
        texts = (function(stage, stages, micro_batches) for stage in range(stages))
        _graded(texts, stages, micro_batches, None)
    held = [min(4 - stage, 8) for stage in range(4)]
    return f"With 4 stages and 8 micro-batches they hold {', '.join(map(str, held))}; GPipe takes as long, and holds 8."


@exercise
def order_in_groups(answer: object) -> str:
    """Exercise 2, second part: (stage, stages, micro_batches, most) → an order with at most `most` in flight."""
    function = a_function(answer, "order_in_groups(stage, stages, micro_batches, most)")
    for stages, micro_batches in _SHAPES:
        for most in range(1, stages):
            texts = (function(stage, stages, micro_batches, most) for stage in range(stages))
            _graded(texts, stages, micro_batches, most)
    plain, *others = (_in_groups(4, 8, most) for most in (8, 3, 2, 1))
    return (
        f"4 stages, 8 micro-batches: a step is {plain} forwards long under 1F1B; with 3, 2, 1 in flight at most "
        f"{', '.join(map(str, others))}. A pipeline pays for its speed in memory."
    )


def _graded(texts: Iterable[object], stages: int, micro_batches: int, most: int | None) -> None:
    """An answer's orders of all stages, played together. most: of a group; None: all are one group, of 1F1B."""
    case = f"{stages} stages, {micro_batches} micro-batches" + (f", at most {most}" if most else "")
    orders = []
    for stage, text in enumerate(texts):
        where = f"{case}: stage {stage}"
        turns = words(text, where)
        complete(turns, micro_batches, where)
        allowed = min(stages - stage, most or micro_batches)
        if (found := in_flight(turns)) > allowed:
            why = "" if allowed == most else " That many forwards are enough for the first gradient to be there."
            raise Wrong(f"{where} holds {found} micro-batches at once; {allowed} may be.{why}")
        orders.append([Action(_KINDS[kind], stage, i) for kind, i in turns])
    taken, enough = played(orders, case), _in_groups(stages, micro_batches, most or micro_batches)
    if taken > enough:
        raise Wrong(
            f"{case}: the orders are complete and hold no more than they may, but a step is {taken} forwards long; "
            f"{enough} are enough. Does a stage wait for a gradient while it could compute a forward, or for a forward "
            "while its next gradient is there?"
        )


def _in_groups(stages: int, micro_batches: int, most: int) -> int:
    """How many forwards long a step is in groups of `most`, 1F1B each; in a single group it is 1F1B."""
    orders: list[list[Action]] = [[] for _ in range(stages)]
    for first in range(0, micro_batches, most):
        group = one_forward_one_backward(stages, min(most, micro_batches - first))
        for order, actions in zip(orders, group.actions, strict=True):
            computed = [a for a in actions if a.kind in _KINDS.values()]
            order += [Action(a.kind, a.stage, first + a.micro_batch) for a in computed]
    return played(orders, "1F1B in groups")


# ---- texts of turns, for the other exercises as well


def words(text: object, where: str, pattern: str = r"[FB]\d+") -> list[tuple[str, int]]:
    """A text such as "F0 F1 B0" as [("F", 0), ("F", 1), ("B", 0)]. Raises Wrong."""
    if not isinstance(text, str):
        raise Wrong(f'{where}: expected a text such as "F0 F1 B0", found {kind_of(text)}.')
    found = []
    for word in text.split():
        if not re.fullmatch(pattern, word, re.ASCII):
            raise Wrong(f'{where}: expected words such as "F0" and "B0" with blanks between them, found {word[:20]!r}.')
        kind = word.rstrip("0123456789")
        found.append((kind, int(word[len(kind) :])))
    return found


def complete(turns: Sequence[tuple[str, int]], micro_batches: int, where: str) -> None:
    """Raise Wrong unless each micro-batch's forward and, after it, its backward are there once."""
    seen: set[tuple[str, int]] = set()
    for kind, i in turns:
        if i >= micro_batches:
            raise Wrong(
                f"{where}: found {kind}{i}; the last of {micro_batches} micro-batches has number {micro_batches - 1}."
            )
        if (kind, i) in seen:
            raise Wrong(f"{where}: {kind}{i} is there twice.")
        if kind == "B" and ("F", i) not in seen:
            raise Wrong(f"{where}: B{i} comes before F{i}.")
        seen.add((kind, i))
    for kind in "FB":
        for i in range(micro_batches):
            if (kind, i) not in seen:
                raise Wrong(f"{where}: {kind}{i} is missing.")


def in_flight(turns: Sequence[tuple[str, int]]) -> int:
    """How many micro-batches are held at most between their forward and their backward."""
    held = most = 0
    for kind, _ in turns:
        held += 1 if kind == "F" else -1
        most = max(most, held)
    return most


def played(orders: Sequence[Sequence[Action]], case: str) -> int:
    """How many forwards long a step is, if a backward takes two and a message none. Raises Wrong if it stops."""
    stages = 1 + max(action.stage for order in orders for action in order)
    waiting, free = [list(reversed(order)) for order in orders], [0] * len(orders)
    ended: dict[Action, int] = {}
    while any(waiting):
        before = len(ended)
        for rank, order in enumerate(waiting):
            while order and all(need in ended for need in _needs(order[-1], stages)):
                action = order.pop()
                begin = max([free[rank], *(ended[need] for need in _needs(action, stages))])
                free[rank] = ended[action] = begin + (1 if action.kind == "forward" else 2)
        if len(ended) == before:
            stuck = [f"rank {rank} with {order[-1]}" for rank, order in enumerate(waiting) if order]
            raise Wrong(
                f"{case}: each stage's order is complete, and together they stop. There wait {', '.join(stuck)}: for "
                "another rank's computation that comes later there."
            )
    return max(free)


def _needs(action: Action, stages: int) -> list[Action]:
    """The computations without which this one cannot begin."""
    stage, i = action.stage, action.micro_batch
    if action.kind == "forward":
        return [Action("forward", stage - 1, i)] if stage else []
    return [Action("backward", stage + 1, i)] if stage < stages - 1 else [Action("forward", stage, i)]
