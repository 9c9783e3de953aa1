"""Exercise 3 of chapter 13: the ring's schedule, and an all-reduce by it that needs no second copy."""

from __future__ import annotations

import functools
from collections import Counter

import torch
from torch import Tensor

from memlab.book.checks.answers import Wrong, a_function, exercise
from memlab.book.checks.memory_arithmetic.sizes import NoTensors
from memlab.memory_timeline import Meter

# ---- the schedule


@exercise
def piece_sent(answer: object) -> str:
    """Exercise 3, first part: (rank, step, ranks) → the number of the piece that goes to the right in a step."""
    function = a_function(answer, "piece_sent(rank, step, ranks)")
    for ranks in (2, 3, 4, 5, 8, 1):
        _played(function, ranks)
    return "8 ranks: 14 steps, and in each of them every wire of the ring is busy with another piece."


def _played(function, ranks: int) -> None:
    """Play the schedule with who is in each sum, in place of numbers."""
    has = [[Counter({rank: 1}) for _ in range(ranks)] for rank in range(ranks)]
    for step in range(2 * (ranks - 1)):
        sent = []
        for rank in range(ranks):
            with NoTensors():
                piece = function(rank, step, ranks)
            where = f"piece_sent({rank}, {step}, {ranks})"
            if type(piece) is not int:
                kind = "None (is a return missing?)" if piece is None else f"{type(piece).__name__} {str(piece)[:40]}"
                raise Wrong(f"{where}: expected the number of a piece (int), found {kind}.")
            if not 0 <= piece < ranks:
                raise Wrong(f"{where}: there is no piece {piece}; the pieces are 0 to {ranks - 1}. What does % do?")
            sent.append((piece, Counter(has[rank][piece])))
        for rank, (piece, sum_) in enumerate(sent):
            right = (rank + 1) % ranks
            if step >= ranks - 1:
                has[right][piece] = sum_
                continue
            has[right][piece] += sum_
            if (often := max(has[right][piece].values())) > 1:
                raise Wrong(
                    f"{ranks} ranks, step {step}: rank {rank} sends piece {piece}, and rank {right} has then added one "
                    f"rank's {often} times. A sum on its way must not pass where it has been."
                )
        if step == ranks - 2:
            for rank in range(ranks):
                if len(has[rank][rank]) < ranks:
                    done = [piece for piece in range(ranks) if len(has[rank][piece]) == ranks]
                    look = f" It has that of piece {done[0]}." if done else ""
                    raise Wrong(
                        f"{ranks} ranks: after the first {ranks - 1} steps rank {rank} has the sum of "
                        f"{len(has[rank][rank])} ranks in piece {rank}, not of {ranks}.{look} Which piece must it send "
                        "first, for its own to come to it last?"
                    )
    for rank in range(ranks):
        for piece in range(ranks):
            if len(has[rank][piece]) < ranks:
                raise Wrong(
                    f"{ranks} ranks: after all {2 * (ranks - 1)} steps piece {piece} of rank {rank} is the sum of "
                    f"{len(has[rank][piece])} ranks. In the second half whoever has a finished piece passes it on."
                )


# ---- the all-reduce


class _Wires:
    """Hands a tensor over as a new one, and keeps count of what each rank has sent."""

    def __init__(self, ranks: int):
        self.sent, self.largest = [0] * ranks, 0

    def send(self, rank: int, tensor: Tensor) -> Tensor:
        if type(rank) is not int or not 0 <= rank < len(self.sent):
            raise Wrong(f"send(rank, tensor): expected a rank from 0 to {len(self.sent) - 1}, found {str(rank)[:40]}.")
        if not isinstance(tensor, Tensor):
            raise Wrong(f"send(rank, tensor): expected a tensor, found {type(tensor).__name__}.")
        self.sent[rank] += tensor.nbytes
        self.largest = max(self.largest, tensor.nbytes)
        return tensor.detach().clone()


@functools.cache
def _flats(ranks: int, numel: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(numel)
    return [torch.randint(-99, 99, (numel,), generator=draw).float() for _ in range(ranks)]  # sums are exact


@exercise
def ring_all_reduce(answer: object) -> str:
    """Exercise 3, second part: (flats, send): in place, each rank's tensor becomes the sum of all."""
    function = a_function(answer, "ring_all_reduce(flats, send)")
    for ranks, numel in ((4, 8192), (2, 4096), (3, 5000), (5, 1003), (8, 4100), (4, 3), (1, 64)):
        wires, extra = _reduced(function, ranks, numel)
    _by_wire_alone(function)
    wires, extra = _reduced(function, 4, 8192)
    return (
        f"Of 4 ranks with {4 * 8192:,} B each sends {wires.sent[0]:,} B, and all of them need {extra:,} B beside their "
        f"own. A rank that collected all and sent the sum back would send {3 * 4 * 8192:,} B alone."
    )


def _by_wire_alone(function) -> None:
    """Raise Wrong if the sums are right where the wires deliver zeros: then they came another way."""
    flats = [flat.clone() for flat in _flats(4, 8192)]
    function(flats, lambda rank, tensor: torch.zeros_like(tensor))
    if all(torch.equal(flat, sum(_flats(4, 8192))) for flat in flats):
        raise Wrong(
            "the sums are right even where send returns nothing but zeros. A rank sees another's elements only as send "
            "returns them: add and copy what has come, and read no other rank's tensor."
        )


def _reduced(function, ranks: int, numel: int) -> tuple[_Wires, int]:
    where, wires = f"{ranks} ranks with {numel:,} elements each", _Wires(ranks)
    flats = [flat.clone() for flat in _flats(ranks, numel)]
    given, places = list(flats), [flat.data_ptr() for flat in flats]
    nbytes, piece_bytes = 4 * numel, 4 * -(-numel // ranks)
    with Meter(None, inputs=flats) as meter:
        begin = meter.timeline.totals[-1]
        function(flats, wires.send)
        end = meter.timeline.totals[-1]
    extra = meter.timeline.peak_bytes - max(begin, ranks * nbytes)
    if len(flats) != ranks or any(mine is not flat for mine, flat in zip(flats, given, strict=True)):
        raise Wrong(f"{where}: your function puts other tensors into the list; write into those that are there.")
    total = sum(_flats(ranks, numel))
    for rank, flat in enumerate(given):
        if torch.equal(flat, total) and flat.data_ptr() == places[rank]:
            continue
        off = int((flat != total).sum())
        if flat.shape == total.shape and torch.equal(flat, _flats(ranks, numel)[rank]) and ranks > 1:
            raise Wrong(f"{where}: rank {rank}'s tensor has not changed. The sum is written in place.")
        look = " They are the mean; a sum is asked for." if torch.allclose(flat * ranks, total) else ""
        raise Wrong(f"{where}: {off:,} elements of rank {rank} are not the sum of all ranks' elements.{look}")
    if sum(wires.sent) != 2 * (ranks - 1) * nbytes:
        many = "more" if sum(wires.sent) > 2 * (ranks - 1) * nbytes else "less"
        raise Wrong(
            f"{where}: the sums are right, and {sum(wires.sent):,} B were sent in all, {many} than the ring's "
            f"2 · (N − 1) · {nbytes:,} = {2 * (ranks - 1) * nbytes:,}."
            + (" One rank sees another's elements only as send returns them." if many == "less" else "")
        )
    if max(wires.sent) > 2 * (ranks - 1) * piece_bytes:
        busiest = max(range(ranks), key=lambda rank: wires.sent[rank])
        raise Wrong(
            f"{where}: the sums are right, and rank {busiest} sends {wires.sent[busiest]:,} B, more than "
            f"2 · (N − 1) pieces of {piece_bytes:,}. In a ring all ranks send alike."
        )
    if wires.largest > piece_bytes:
        raise Wrong(f"{where}: the sums are right, and a message has {wires.largest:,} B; a piece has {piece_bytes:,}.")
    if extra > (limit := ranks * piece_bytes):
        raise Wrong(
            f"{where}: the sums are right, and meanwhile {extra:,} B more are held than the ranks' own; the messages "
            f"of one step are {limit:,}. Do messages of earlier steps stay, or copies of pieces?"
        )
    if end > begin + 64 and end > ranks * nbytes + 64:
        raise Wrong(f"{where}: the sums are right, and {end - ranks * nbytes:,} B stay when all is done.")
    return wires, extra
