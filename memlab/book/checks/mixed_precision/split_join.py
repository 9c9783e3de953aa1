"""Exercise 5 of chapter 06, first part: FP32 master weights in two bytes beside the BF16 weight, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from memlab.book.checks.answers import Wrong, a_function, exercise


@functools.cache
def _masters() -> dict[str, Tensor]:
    """FP32 numbers whose low 16 bits are of every kind, by what is special about them."""
    draw = torch.Generator().manual_seed(0)
    many = torch.randn(60, 70, generator=draw) * 10.0 ** torch.randint(-30, 30, (60, 70), generator=draw)
    low = torch.arange(2**17, dtype=torch.int32)
    return {
        "what BF16 holds exactly": torch.tensor([1.0, -2.5, 3e38]).bfloat16().float(),
        "a single number": torch.tensor(0.1),
        "positive and negative numbers of every size": many,
        "every number from 1 to the second BF16 number after it": (low + 0x3F80_0000).view(torch.float32),
        "every number from -3 to the second BF16 number before it": -(low + 0x4040_0000).view(torch.float32),
        "subnormal numbers": (low + 5).view(torch.float32),
        "numbers just below a power of two": torch.tensor([1.0, 2.0, -4.0, 1024.0]) - torch.tensor(2.0**-24),
        "zero, with either sign": torch.tensor([0.0, -0.0]),
    }


@exercise
def split_and_join(split: object, join: object) -> str:
    """Exercise 5, first part: split(master) → (weight, rest), join(weight, rest) → master, bit by bit."""
    split, join = a_function(split, "split(master)"), a_function(join, "join(weight, rest)")
    halves = {name: _halves(split, name, numbers) for name, numbers in _masters().items()}
    for name, numbers in _masters().items():
        order = torch.randperm(numbers.numel(), generator=torch.Generator().manual_seed(1))
        # in another order: nothing but their bits can help
        weight, rest = (half[order].view(numbers.shape) for half in halves[name])
        expected = numbers.flatten()[order]
        given = weight.clone(), rest.clone()
        joined = join(*given)
        if not isinstance(joined, Tensor) or joined.dtype != torch.float32 or joined.shape != weight.shape:
            found = f"{joined.dtype} {tuple(joined.shape)}" if isinstance(joined, Tensor) else type(joined).__name__
            raise Wrong(f"join(weight, rest): expected torch.float32 {tuple(weight.shape)}, found {found}.")
        if not all(map(_same_bits, given, (weight, rest))):
            raise Wrong(f"{name}: join(weight, rest) has written to what it was given; it is not yours to change.")
        weight, rest, joined = weight.flatten(), rest.flatten(), joined.flatten()
        if not _same_bits(joined, expected):
            wrong = (joined.view(torch.int32) != expected.view(torch.int32)).nonzero().flatten()
            at = wrong[0]
            raise Wrong(
                f"{name}: {len(wrong):,} of {len(order):,} come back with other bits, for example {expected[at]:.9g}, "
                f"{_hex(expected[at])}, split into {weight[at]:.9g} and {_rest(rest[at])}, comes back as "
                f"{joined[at]:.9g}, {_hex(joined[at])}.{_bits_hint(expected[at], rest[at])}"
            )
    return "Every bit comes back, from 2 + 2 bytes."


def _halves(split: Callable, name: str, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """What split makes of some numbers, flat, after a look at it."""
    master = numbers.clone()
    pair = split(master)
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(half, Tensor) for half in pair):
        raise Wrong(f"split(master): expected a pair of tensors (weight, rest), found {type(pair).__name__}.")
    if not _same_bits(master, numbers):
        raise Wrong(f"{name}: split(master) has written to master; it is not yours to change.")
    weight, rest = pair
    _two_bytes_each(weight, rest, master)
    _nearest(weight, numbers, name)
    return weight.detach().clone().flatten(), rest.detach().clone().flatten()


def _two_bytes_each(weight: Tensor, rest: Tensor, master: Tensor) -> None:
    if weight.dtype != torch.bfloat16:
        raise Wrong(f"split(master): expected a weight of torch.bfloat16, found {weight.dtype}.")
    for what, half in (("weight", weight), ("rest", rest)):
        if half.shape != master.shape or half.itemsize != 2:
            raise Wrong(
                f"split(master): expected a {what} of 2 bytes for each of {tuple(master.shape)} numbers, found "
                f"{half.dtype} {tuple(half.shape)}."
            )
        storage = half.untyped_storage()
        if storage.nbytes() > half.nbytes or half.stride() != half.contiguous().stride():
            raise Wrong(
                f"split(master): the {what} is a view of a storage of {storage.nbytes():,} B, and keeps all of it "
                f"alive; it needs one of its own, of {half.nbytes:,} B."
            )
    if weight.untyped_storage().data_ptr() == rest.untyped_storage().data_ptr():
        raise Wrong("split(master): weight and rest are the same storage.")


def _nearest(weight: Tensor, master: Tensor, name: str) -> None:
    """Raise Wrong unless every weight is the BF16 number nearest to its master; on a tie, either neighbour."""
    exact = master.double()
    off, least = (weight.double() - exact).abs(), (master.bfloat16().double() - exact).abs()
    if (off != least).any():
        at = (off != least).flatten().nonzero()[0].item()
        m, w = master.flatten()[at], weight.flatten()[at]
        cut = (m.view(torch.int32) & -0x1_0000).view(torch.float32)
        look = " Cutting off the low 16 bits rounds toward zero." if w.float() == cut else ""
        raise Wrong(f"{name}: the BF16 number nearest to {m:.9g} is {m.bfloat16():.9g}, found {w:.9g}.{look}")


def _bits_hint(master: Tensor, rest: Tensor) -> str:
    low = master.view(torch.int32).item() & 0xFFFF
    if low == 0x8000:
        return (
            " It lies halfway between two BF16 numbers: weight and rest must make clear on which side. From −32,768 to "
            "32,767 is all that 16 bits can count."
        )
    if rest.dtype.is_floating_point:
        return " A difference in a 16-bit format is rounded too. Bits are not, if you count them as integers."
    return " Was the weight rounded up? Then the bits that are missing count downward."


def _same_bits(a: Tensor, b: Tensor) -> bool:
    integer = torch.int32 if a.itemsize == 4 else torch.int16
    return torch.equal(a.detach().contiguous().view(integer), b.contiguous().view(integer))


def _hex(number: Tensor) -> str:
    return f"0x{number.detach().contiguous().view(torch.int32).item() & 0xFFFF_FFFF:08X}"


def _rest(number: Tensor) -> str:
    return f"{number.item():,}" if not number.dtype.is_floating_point else f"{number.item():.6g}"
