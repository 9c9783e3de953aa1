"""Exercise 4 of chapter 15: the interleaved schedule, in which a rank has several stages and takes turns with them."""

from __future__ import annotations

from memlab.book.checks.answers import Wrong, a_function, exercise
from memlab.book.checks.pipeline_parallelism.orders import played
from memlab.pipeline_parallelism import Action, bubble_share

_CASES = ((4, 2, 8), (2, 2, 4), (2, 3, 2), (3, 2, 6), (4, 1, 8), (1, 2, 3))  # ranks, chunks, micro-batches


def _forwards(rank: int, ranks: int, chunks: int, micro_batches: int) -> list[tuple[int, int]]:
    return [
        (chunk * ranks + rank, first + i)
        for first in range(0, micro_batches, ranks)
        for chunk in range(chunks)
        for i in range(ranks)
    ]


def _ahead(rank: int, ranks: int, chunks: int, micro_batches: int) -> int:
    return min((chunks - 1) * ranks + 1 + 2 * (ranks - 1 - rank), chunks * micro_batches)


def _order(rank: int, ranks: int, chunks: int, micro_batches: int) -> list[Action]:
    """A rank's whole order: backwards go through its stages from the last to the first."""
    ahead, stages = _ahead(rank, ranks, chunks, micro_batches), ranks * chunks
    forwards = [Action("forward", *turn) for turn in _forwards(rank, ranks, chunks, micro_batches)]
    mirrored = _forwards(ranks - 1 - rank, ranks, chunks, micro_batches)
    backwards = [Action("backward", stages - 1 - stage, i) for stage, i in mirrored]
    order = forwards[:ahead]
    for number, backward in enumerate(backwards):
        order += [backward, *forwards[ahead + number : ahead + number + 1]]
    return order


@exercise
def forwards(answer: object) -> str:
    """Exercise 4, first part: (rank, ranks, chunks, micro_batches) → [(stage, micro-batch)], a rank's forwards."""
    function = a_function(answer, "forwards(rank, ranks, chunks, micro_batches)")
    for ranks, chunks, micro_batches in _CASES:
        for rank in range(ranks):
            where = f"rank {rank} of {ranks}, {chunks} stages each, {micro_batches} micro-batches"
            _same(function(rank, ranks, chunks, micro_batches), (rank, ranks, chunks, micro_batches), where)
    stages = [f"{played([_order(r, 4, v, 8) for r in range(4)], 'right') / v:g}" for v in (1, 2, 4)]
    return (
        f"4 ranks, 8 micro-batches: with 1, 2, 4 stages on each a step is {', '.join(stages)} forwards of a whole "
        f"rank long, and the bubble is {', '.join(f'{bubble_share(4, 8, v):.0%}' for v in (1, 2, 4))} of it."
    )


def _same(found: object, case: tuple[int, int, int, int], where: str) -> None:
    rank, ranks, chunks, micro_batches = case
    right = _forwards(*case)
    if not isinstance(found, (list, tuple)):
        raise Wrong(f"{where}: expected a list of pairs (stage, micro_batch), found {type(found).__name__}.")
    for turn in found:
        if not isinstance(turn, (tuple, list)) or len(turn) != 2 or any(type(number) is not int for number in turn):
            raise Wrong(f"{where}: expected pairs (stage, micro_batch) of whole numbers, found {str(turn)[:40]}.")
    turns = [tuple(turn) for turn in found]
    for stage, i in turns:
        if (stage, i) not in right:
            look = f"Its stages are {', '.join(str(c * ranks + rank) for c in range(chunks))}"
            raise Wrong(
                f"{where}: found stage {stage}, micro-batch {i}. {look}; micro-batches are 0 to {micro_batches - 1}."
            )
    if len(turns) != len(right) or len(set(turns)) != len(right):
        raise Wrong(
            f"{where}: expected {len(right)} different forwards, found {len(turns)}, {len(set(turns))} different."
        )
    if turns != right:
        groups = f"in groups of {ranks}, each group through all of the rank's stages before the next begins"
        at = next(n for n, (mine, due) in enumerate(zip(turns, right, strict=True)) if mine != due)
        look = ""
        if turns == sorted(right):
            look = " All micro-batches through one stage, then through the next, is GPipe's order: nothing is gained."
        elif turns == sorted(right, key=lambda turn: turn[::-1]):
            look = " The next stage's input of this micro-batch is not there yet: it is on its way through the others."
        raise Wrong(
            f"{where}: forward number {at} is of stage {turns[at][0]}, micro-batch {turns[at][1]}; expected "
            f"micro-batches {groups}.{look}"
        )


@exercise
def ahead(answer: object) -> str:
    """Exercise 4, second part: (rank, ranks, chunks, micro_batches) → forwards before the first backward."""
    function = a_function(answer, "ahead(rank, ranks, chunks, micro_batches)")
    for ranks, chunks, micro_batches in _CASES:
        for rank in reversed(range(ranks)):
            where = f"rank {rank} of {ranks}, {chunks} stages each, {micro_batches} micro-batches"
            found, right = function(rank, ranks, chunks, micro_batches), _ahead(rank, ranks, chunks, micro_batches)
            if type(found) is not int:
                raise Wrong(f"{where}: expected a whole number (int), found {type(found).__name__}.")
            if found != right:
                look = _look(found, right, rank, ranks, chunks * micro_batches)
                raise Wrong(f"{where}: {found} forwards before its first backward: that is {look}")
    held = _ahead(0, 4, 2, 8)
    return (
        f"4 ranks with 2 stages each: rank 0 holds what {held} forwards saved, each of half a rank's layers, so as "
        f"much as {held / 2:g} whole ones, where 1F1B holds 4. A shorter bubble costs memory, and more than twice the "
        f"messages: a micro-batch passes between ranks {4 * 2 - 1} times, not {4 - 1}, and its gradient as often."
    )


def _look(found: int, right: int, rank: int, ranks: int, all_turns: int) -> str:
    if found > all_turns:
        return f"more than there are: {all_turns}."
    if found == right - 1:
        return "one too few. Count the forward of the micro-batch whose backward comes first, too."
    if rank == ranks - 1:
        return (
            f"too {'many' if found > right else 'few'}. The last rank's first backward is that of micro-batch 0 on the "
            "last stage of all: which of its forwards is that one?"
        )
    return (
        f"too {'many' if found > right else 'few'}. From this rank to the last and back, how many beats is micro-batch "
        "0 on its way? In each of them there is time for a forward."
    )
