"""What tests of parts on ranks have in common."""

from __future__ import annotations

from torch import distributed

from memlab.ranks import place_in


def groups() -> list:
    """A group of one, of two and of all four ranks, with this rank in each."""
    rank, ranks = place_in()
    found = []
    for size in (1, 2, 4):
        made = [distributed.new_group(list(range(start, start + size))) for start in range(0, ranks, size)]
        found.append(made[rank // size])
    return found


def raised(call) -> str:
    """The error that a call ends with: its type and words, or "nothing"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
