"""Token batches: a budget of tokens instead of a number of examples.

A batch is a rectangle. Its shorter examples are padded to the longest, and activations take bytes for padding too:

    padded tokens = examples × longest

With a fixed number of examples the longest example met so far decides the peak, and most of the rectangle is padding.
So the budget is set on the product: many short examples share a batch, or a few long ones. To have little padding,
examples of like length must share it, hence sorting. To have chance, only a *window* of shuffled examples is sorted at
a time, and the batches are shuffled as well. Vaswani et al. 2017, section 5.1, batch so.

Batches then differ in examples and tokens, and a mean of their means is not the mean: weigh them by their tokens.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterable

from memlab.checking import positive


def token_batches(
    lengths: Iterable[int], max_tokens: int, *, window: int | None = None, seed: int = 0
) -> list[list[int]]:
    """Batches of indices into `lengths`, every index once, each batch of at most `max_tokens` padded tokens.

    window: how many shuffled examples are sorted by length together. None, all: there are as few batches as the budget
      allows, and nearly the same ones every time; only ties, the batches' order and the end from which they are cut are
      left to chance. 1, none: no sorting. In between, several batches' worth: a window of one batch sorts nothing.
    seed: the same seed gives the same batches; give the epoch, and each has its own.

    The result is a `batch_sampler` for torch's DataLoader.

    Raises TypeError for what is not a whole number; ValueError for a number below 1, no lengths at all, and an example
    that is longer than the budget.

    >>> sorted(map(sorted, token_batches([30, 5, 28, 6, 7], max_tokens=60)))
    [[0, 2], [1, 3, 4]]
    """
    refuse_seed(seed)
    positive("max_tokens", max_tokens)
    if window is not None:
        positive("window", window)
    lengths = within(lengths, "max_tokens", max_tokens)
    rng = random.Random(seed)
    shuffled = list(range(len(lengths)))
    rng.shuffle(shuffled)

    order, window, downwards = [], window or len(shuffled), rng.random() < 0.5
    for start in range(0, len(shuffled), window):
        order += sorted(shuffled[start : start + window], key=lengths.__getitem__, reverse=downwards)
        downwards = not downwards  # long meets long and short meets short where two windows share a batch

    batches, longest = [[]], 0
    for i in order:
        longest = max(longest, lengths[i])
        if (len(batches[-1]) + 1) * longest > max_tokens:
            batches.append([])
            longest = lengths[i]
        batches[-1].append(i)
    rng.shuffle(batches)
    return batches


def refuse_seed(seed: int) -> None:
    """Raise TypeError for what is no int (None would be another seed each time), ValueError for one below 0."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"expected seed as an int, such as the epoch's number; found {seed!r}")
    if seed < 0:
        raise ValueError(f"expected a seed of at least 0, found {seed}, which is the same as {-seed}")


def within(lengths: Iterable[int], name: str, limit: int) -> list[int]:
    """The lengths as ints of Python, if each is at least 1 and at most `limit`, which is called `name`.

    Raises TypeError and ValueError as `token_batches` does.
    """
    lengths = list(lengths)
    if not lengths:
        raise ValueError("expected the lengths of at least one example, found none")
    for i, length in enumerate(lengths):
        try:
            lengths[i] = operator.index(length)
        except TypeError:
            raise TypeError(f"expected the length of example {i} as an int, found {length!r}") from None
        if isinstance(length, bool):
            raise TypeError(f"expected the length of example {i} as an int, found {length!r}")
        if length < 1:
            raise ValueError(f"expected a length of at least 1, found {length} in example {i}; drop what is empty")
    if max(lengths) > limit:
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        over = sum(length > limit for length in lengths)
        others = f", the longest of {over} that are over" if over > 1 else ""
        raise ValueError(
            f"expected examples of at most {limit:,} tokens ({name}), found {lengths[longest]:,} in example "
            f"{longest}{others}; raise {name} to {lengths[longest]:,}, or truncate or drop what is longer"
        )
    return lengths
