"""Arguments are checked in the same words everywhere: what was expected, and what was found."""

from __future__ import annotations


def positive(name: str, value: int) -> None:
    """Raise TypeError for what is not an int, ValueError for one below 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected {name} as an int, found {value!r}")
    if value < 1:
        raise ValueError(f"expected {name} of at least 1, found {value}")


def above_0(**rates: float) -> None:
    """Raise ValueError for a rate, by name, that is not above 0."""
    for name, rate in rates.items():
        if not rate > 0:
            raise ValueError(f"expected {name} above 0, found {rate}")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError for a value that is not allowed, naming those that are."""
    if value not in allowed:
        raise ValueError(f"expected {name} to be one of {', '.join(map(repr, allowed))}; found {value!r}")


def true_or_false(name: str, value: bool) -> None:
    """Raise TypeError for what is neither: any text, even "no", would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"expected {name} as True or False, found {value!r}")


def divisors(number: int) -> str:
    """All numbers that divide it, for an error message."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def balanced(layers: int, segments: int) -> list[tuple[int, int]]:
    """Contiguous segments of so many layers, as (first, one after last); sizes differ by one at most, the larger first.

    Raises TypeError for what is no int, ValueError for one below 1 and for more segments than there are layers.

    >>> balanced(10, 4)
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    positive("layers", layers)
    positive("segments", segments)
    if segments > layers:
        raise ValueError(
            f"expected at most as many segments as layers ({layers}), found {segments}; pick 1 to {layers}"
        )
    size, longer = divmod(layers, segments)
    starts = [i * size + min(i, longer) for i in range(segments + 1)]
    return list(zip(starts, starts[1:], strict=False))
