"""Exercise 5 of chapter 06, second part: steps on masters that are kept as BF16 weights and two bytes each."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from memlab.book.checks.answers import Wrong, a_function, a_method, exercise
from memlab.memory_timeline import Meter, Storage, Timeline
from memlab.units import format_bytes


def _cut(master: Tensor) -> tuple[Tensor, Tensor]:
    """A right split for the second part, so that it doesn't depend on the first."""
    number = master.view(torch.int32)
    half = (number + 2**15).bitwise_right_shift_(16)
    low = number.sub(half, alpha=2**16).to(torch.int16)
    return half.to(torch.int16).view(torch.bfloat16), low


def _put_together(weight: Tensor, rest: Tensor) -> Tensor:
    return weight.view(torch.int16).int().mul_(2**16).add_(rest).view(torch.float32)


_SHAPES = ((40, 48),) * 8 + ((48,), (), (7, 3))
_STEPS, _WITHOUT = 3, {(1, 8), (2, 0)}  # at these steps these parameters have no gradient
_TURNED = 1  # before the last step, somebody turns the sign of this parameter's weights
_ALLOWED = 32  # bytes for each element of the largest parameter, above what is held


@functools.cache
def _gradients() -> list[list[Tensor | None]]:
    """Each step's gradients, in BF16."""
    draw = torch.Generator().manual_seed(1)
    return [
        [
            None if (step, number) in _WITHOUT else (torch.randn(shape, generator=draw) * 1e-3).bfloat16()
            for number, shape in enumerate(_SHAPES)
        ]
        for step in range(_STEPS)
    ]


@functools.cache
def _by_first() -> list[dict[float, int]]:
    """Which parameter a gradient belongs to, by its first number, for each step."""
    return [{g.flatten()[0].item(): i for i, g in enumerate(step) if g is not None} for step in _gradients()]


def _weights() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(shape, generator=draw).bfloat16()) for shape in _SHAPES]


def _adam(master: Tensor, gradient: Tensor, state: dict) -> None:
    """AdamW with the defaults of torch's, for one tensor."""
    if not state:
        state.update(steps=0, mean=torch.zeros_like(master), square=torch.zeros_like(master))
    state["steps"] += 1
    state["mean"].lerp_(gradient, 0.1)
    state["square"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    root = state["square"].div(1 - 0.999 ** state["steps"]).sqrt_().add_(1e-8)
    master.mul_(1 - 1e-5).addcdiv_(state["mean"], root, value=-1e-3 / (1 - 0.9 ** state["steps"]))


@functools.cache
def _expected() -> list[list[Tensor]]:
    """The FP32 masters before each step, and after the last; each is stepped on by itself."""
    masters, states = [p.detach().float() for p in _weights()], [{} for _ in _SHAPES]
    history = [[m.clone() for m in masters]]
    for step, gradients in enumerate(_gradients()):
        if step == _STEPS - 1:
            history[-1][_TURNED] = masters[_TURNED].neg_().clone()
        for m, gradient, state in zip(masters, gradients, states, strict=True):
            if gradient is not None:
                _adam(m, gradient.float(), state)
        history.append([m.clone() for m in masters])
    return history


class _Watched:
    """AdamW for one tensor, which looks at what it is given."""

    def __init__(self):
        self.step, self.seen = 0, []

    @torch.no_grad()
    def __call__(self, master: Tensor, gradient: Tensor, state: dict) -> None:
        number = self._number(master, gradient, state)
        self.seen.append(number)
        expected = _expected()[self.step][number]
        if not torch.equal(master.detach(), expected):
            off = (master.detach() - expected).abs().max().item()
            look = ""
            if torch.equal(master.detach(), _cut(expected)[0].float()):
                look = " It is the BF16 weight: what its rounding cut off was not kept."
            elif torch.equal(master.detach(), -expected):
                look = " Between the two, somebody has turned the sign of the parameter: a step begins with what it is."
            raise Wrong(
                f"step {self.step}, parameter {number} of shape {_SHAPES[number]}: the master given to update differs "
                f"by up to {off:.2g} from the one that update left in the step before.{look}"
            )
        _adam(master.detach(), gradient.detach(), state)

    def _number(self, master: object, gradient: object, state: object) -> int:
        """Which parameter's turn it is, known by its gradient, after a look at the types."""
        for what, tensor in (("master", master), ("gradient", gradient)):
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
                found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise Wrong(f"update(master, gradient, state): expected a {what} in torch.float32, found {found}.")
        if not isinstance(state, dict):
            raise Wrong(f"update(master, gradient, state): expected a dict as state, found {type(state).__name__}.")
        number = _by_first()[self.step].get(gradient.flatten()[0].item())
        due = None if number is None else _gradients()[self.step][number]
        if due is None or gradient.shape != due.shape or not bool((gradient == due).all()):
            raise Wrong(f"step {self.step}: update was given a gradient that is no parameter's .grad, in FP32.")
        due = sum((before, number) not in _WITHOUT for before in range(self.step))
        if state and state["mean"].shape != _SHAPES[number]:
            raise Wrong(
                f"step {self.step}, parameter {number} of shape {_SHAPES[number]}: its state has averages of shape "
                f"{tuple(state['mean'].shape)}, which belong to another parameter."
            )
        if state.get("steps", 0) != due:
            raise Wrong(
                f"step {self.step}, parameter {number}: its state has seen {state.get('steps', 0)} updates, expected "
                f"{due}. Each parameter needs a dict of its own, which stays from step to step."
            )
        return number


def _stepped(make: Callable) -> tuple[int, Timeline]:
    """Bytes that there are besides, and the timeline of all steps, at whose end only what an answer holds is alive."""
    parameters, update, expected, gradients = _weights(), _Watched(), _expected(), _gradients()
    rounded = [[_cut(m)[0] for m in masters] for masters in expected[1:]]
    _by_first()
    with Meter(inputs=(parameters, expected, rounded, gradients)) as meter:
        optimizer = make((p for p in parameters), update, _cut, _put_together)
        for step in range(_STEPS):
            update.step, update.seen = step, []
            for p, gradient in zip(parameters, gradients[step], strict=True):
                p.grad = None if gradient is None else gradient.clone()
            if step == _STEPS - 1:
                with torch.no_grad():
                    parameters[_TURNED].neg_()
            a_method(optimizer, "step", "SplitMasters(…)")()
            due = [number for number, gradient in enumerate(gradients[step]) if gradient is not None]
            if sorted(update.seen) != due:
                raise Wrong(
                    f"step {step}: expected update to be called once for each of the {len(due)} parameters that have "
                    f"a gradient, found {len(update.seen)} calls. (`params` may be a generator, such as "
                    "model.parameters(), which can be read once.)"
                )
            for p, gradient in zip(parameters, gradients[step], strict=True):
                if gradient is not None and (p.grad is None or not torch.equal(p.grad, gradient)):
                    raise Wrong(
                        f"step {step}: the gradient of a parameter of shape {tuple(p.shape)} is not what it was before "
                        "the step. Clearing gradients is the caller's affair, who may still want their norm."
                    )
            if step == _STEPS - 2:
                rounded[step][_TURNED] = -rounded[step][_TURNED]  # not turned yet
            for p, right in zip(parameters, rounded[step], strict=True):
                if p.dtype != torch.bfloat16 or not torch.equal(p.detach(), right):
                    raise Wrong(
                        f"step {step}: a parameter of shape {tuple(p.shape)} is not its new master's BF16 number. The "
                        "model reads the parameters themselves, so the step must write to them."
                    )
        for p in parameters:
            p.grad = None
    return sum(s.nbytes for s in meter.timeline.alive(0)), meter.timeline


@exercise
def split_masters(answer: object) -> str:
    """Exercise 5, second part: SplitMasters(params, update, split, join), with a step() that goes one by one."""
    make = a_function(answer, "or class SplitMasters(params, update, split, join)")
    besides, timeline = _stepped(make)
    numel = sum(map(math.prod, _SHAPES))
    besides -= 2 * numel  # the weights
    held, due = timeline.totals[-1] - besides, (2 + 2 + 8) * numel
    if held > due:
        born = [s for s in timeline.alive(len(timeline)) if s.phase != "before"]
        raise Wrong(
            f"the values are right. After the last step {held:,} B are held, expected {due:,} B: 2 a weight, 2 for its "
            f"rest, 8 for the averages in `state`. Alive are, among others:{_listed(born)}"
        )
    peak, allowed = timeline.peak_bytes - besides, due + 2 * numel + _ALLOWED * max(map(math.prod, _SHAPES))
    if peak > allowed:
        wide = [s for s in timeline.alive(timeline.peak_event) if s.phase != "before" and s.dtype != "bfloat16"]
        raise Wrong(
            f"the values are right, and the peak is {peak:,} B, expected at most {allowed:,} B: masters and gradients "
            f"in FP32 exist for one parameter at a time. Alive there, among others:{_listed(wide)}"
        )
    return (
        f"The masters of FP32 AdamW, bit for bit, in {(held / numel) - 8:.0f} bytes beside its averages, not 6; and a "
        f"peak of {format_bytes(peak)}, gradients included."
    )


_OWN = {"_adam": "update", "_put_together": "join", "_cut": "split"}


def _listed(storages: list[Storage]) -> str:
    """The most common kinds among some storages, a line each."""
    kinds: dict[tuple, list[int]] = {}
    for s in storages:
        line = _OWN.get(str(s.line).partition(":")[0], str(s.line))
        kinds.setdefault(("×".join(map(str, s.shape)) or "scalar", s.dtype, line), []).append(s.nbytes)
    largest = sorted(kinds.items(), key=lambda item: -sum(item[1]))[:4]
    return "".join(f"\n    {len(n)} × {shape} {dtype}, made by {line}" for (shape, dtype, line), n in largest)
