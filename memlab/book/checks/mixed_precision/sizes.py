"""Exercises 1, 2 and 4 of chapter 06: numbers and bytes from arithmetic, held against casts and metered steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memlab.book.checks.answers import Wrong, a_function, exercise, plain, same_bytes, unchanged, whole_bytes
from memlab.book.checks.memory_arithmetic.sizes import NoTensors
from memlab.book.workloads import GPT, MLP, text_batch
from memlab.memory_timeline import Meter, Timeline
from memlab.mixed_precision import MasterWeights, StochasticRounding

# ---- 1

_FORMATS = {
    "BF16": (torch.bfloat16, torch.int16, 7),
    "FP16": (torch.float16, torch.int16, 10),
    "FP32": (torch.float32, torch.int32, 23),
    "FP8 E5M2": (torch.float8_e5m2, torch.int8, 2),
    "FP8 E4M3": (torch.float8_e4m3fn, torch.int8, 3),
}
_ASKED = (1.0, 1.5, 0.75, 3.0, -0.02, 100.0, -1.0, 2**-5, 0.1, -240.0, 1.99, 7.9)


def _weights(name: str) -> Iterator[tuple[float, float]]:
    """Weights that a format holds, and how far the next number away from zero is: by counting its patterns up by 1."""
    dtype, integer, _ = _FORMATS[name]
    held = torch.tensor(_ASKED, dtype=torch.float64).to(dtype)
    further = (held.view(integer) + 1).view(dtype)
    yield from zip(held.double().tolist(), (further.double() - held.double()).abs().tolist(), strict=True)


def _kept(name: str, weight: float, update: float) -> float:
    """What a format keeps of weight + update."""
    return torch.tensor(weight + update, dtype=torch.float64).to(_FORMATS[name][0]).double().item()


@exercise
def smallest_update(answer: object) -> str:
    """Exercise 1: (weight, mantissa_bits) → the size below which an update is lost: half an ulp."""
    function = a_function(answer, "smallest_update(weight, mantissa_bits)")
    for name, (_, _, mantissa_bits) in _FORMATS.items():
        for weight, gap in _weights(name):
            where = f"smallest_update({weight!r}, {mantissa_bits})"
            found = plain(function(weight, mantissa_bits))
            if type(found) not in (float, int) or not found > 0:
                raise Wrong(f"{where}: expected a number above 0, found {type(found).__name__} {str(found)[:60]}.")
            if found == gap / 2:
                continue
            halfway = (min(found, gap) + gap / 2) / 2  # between the answer and the truth, and sure to show it
            update = math.copysign(halfway, weight)
            kept = _kept(name, weight, update)
            is_lost = f"in {name}, {weight!r} + {update!r} is kept as {kept!r}"
            if found > gap / 2:
                whole = " Which numbers does a value between two neighbours go to?" if found == gap else ""
                raise Wrong(f"{where}: you said {found!r}, but a smaller update arrives: {is_lost}.{whole}")
            raise Wrong(f"{where}: you said {found!r}, but a larger update is lost: {is_lost}.")
    return "Half an ulp: whatever is smaller leaves the weight where it was, a thousand times over."


# ---- 2

_RECIPES = {
    "fp32": "FP32 weights and gradients, FP32 averages",
    "autocast": "the recipe fp32, with forward under torch.autocast",
    "mixed": "BF16 weights and gradients, FP32 masters, FP32 averages",
    "stochastic": "BF16 weights and gradients, no masters, FP32 averages",
    "bf16": "BF16 weights, gradients and averages",
}


class _Given(nn.Module):
    """Parameters of any shapes; its loss multiplies by the matrices and adds up the rest."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype):
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)

    def forward(self, one: Tensor) -> Tensor:
        return sum(F.linear(one.expand(1, p.shape[1]), p).sum() if p.dim() == 2 else p.sum() for p in self.parts)


@functools.cache
def held(shapes: tuple[tuple[int, ...], ...], recipe: str) -> dict[str, int]:
    """Weights, gradients and states when the second backward has ended, metered."""
    dtype = torch.float32 if recipe in ("fp32", "autocast") else torch.bfloat16
    model, one = _Given(shapes, dtype), torch.ones(1, 1, dtype=dtype)
    if recipe in ("mixed", "stochastic"):
        kind = MasterWeights if recipe == "mixed" else StochasticRounding
        optimizer = kind(model.parameters(), torch.optim.AdamW, foreach=False)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        with Meter(model, optimizer, inputs=one) as meter:
            with torch.autocast("cpu", torch.bfloat16, enabled=recipe == "autocast"):
                loss = model(one)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    backward = next(span for span in meter.timeline.phases if span.phase == "backward")
    sums = meter.timeline.bytes_by_category(backward.stop)
    return {name: sums[name] for name in ("parameter", "gradient", "optimizer_state")}


def _shapes(model: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for p in model.parameters()]


_MODELS = {
    "a Linear layer": [(24, 40), (24,)],
    "an MLP": _shapes(MLP(16, 24)),
    "a GPT": _shapes(GPT(layers=1, width=16, context=8, vocabulary=32)),
    "a convolution and a scalar": [(8, 3, 5, 5), ()],
}


@exercise
def held_bytes(answer: object) -> str:
    """Exercise 2: (shapes, recipe) → bytes of weights, gradients, masters and AdamW's states between two steps."""
    function = a_function(answer, "held_bytes(shapes, recipe)")
    for name, shapes in _MODELS.items():
        for recipe, formats in _RECIPES.items():
            sums = held(tuple(shapes), recipe)
            expected = sum(sums.values())
            where = f'held_bytes(shapes, "{recipe}") of {name}'
            given = list(shapes)
            with NoTensors():
                found = whole_bytes(function(given, recipe), where)
            unchanged(given, list(shapes), where)
            elements, counters = sum(map(math.prod, shapes)), 4 * len(shapes)
            off = (found - expected) / elements
            hint = f"This recipe: {formats}."
            if abs(found - expected) in (counters, counters // 2):
                hint += " AdamW counts the steps of each tensor, in an FP32 number of its own, whatever the recipe."
            elif recipe == "autocast" and off == 2:
                hint += " When backward has ended, who still needs a BF16 copy of a weight?"
            elif recipe in ("mixed", "stochastic") and (abs(off) == 4 or (recipe == "mixed" and off == -2)):
                hint += " Masters, where there are any, and averages are FP32 numbers: 4 bytes each."
            elif off in (2, -2):
                hint += " Are the gradients of the weights' own type?"
            same_bytes(found, expected, where, hint)
    return "Five recipes; mixed holds what fp32 holds, and the step counters are the same in all."


# ---- 4


@functools.cache
def forward_keeps(autocast: bool) -> Timeline:
    """Exercise 4's step: a small GPT's forward and backward."""
    torch.manual_seed(0)
    model = GPT(layers=1, width=48, heads=2, context=24, vocabulary=80)
    batch = text_batch(batch=2, tokens=24)
    batch = tuple(tokens % 80 for tokens in batch)
    with Meter(model, inputs=batch) as meter:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(*batch)
        loss.backward()
    return meter.timeline


@exercise
def unexplained(copies: object, norms: object, rest: object) -> str:
    """Exercise 4: what forward keeps under autocast beyond half of FP32's, by why, in bytes."""
    timeline = forward_keeps(True)
    turn = next(span.stop for span in timeline.phases if span.phase == "forward")
    kept = [s for s in timeline.alive(turn) if s.category == "activation"]
    weights = {shape for shape, *_ in ((tuple(p.shape),) for p in GPT(layers=1, width=48).blocks.parameters())}
    weights.add((80, 48))
    sums = {"copies": 0, "norms": 0, "rest": 0}
    for storage in kept:
        if storage.dtype != "bfloat16":
            sums["norms" if "layer_norm" in storage.reason else "rest"] += storage.nbytes
        elif storage.op == "_to_copy" and storage.shape in weights:
            sums["copies"] += storage.nbytes
    for found, name, hint in (
        (
            copies,
            "copies",
            "Only the matrices that a Linear multiplies by are kept in BF16, each once. An embedding is a lookup, and "
            "a bias is not multiplied by anything, so backward needs no copy of it.",
        ),
        (
            norms,
            "norms",
            "Each of the three norms keeps its input, and for each token a mean and a 1/σ. In which format?",
        ),
        (
            rest,
            "rest",
            "List the activations of the two timelines beside each other, down to the smallest: which stand in both "
            "with the same shape and format, and belong to no norm? Indices have 8 bytes, and a scalar has some too.",
        ),
    ):
        same_bytes(found, sums[name], f"{name}_bytes", hint, secret=True)
    return "What autocast halves, it halves to the byte. The rest are copies, and what must stay in FP32."
