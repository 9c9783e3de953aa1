"""Exercise 2 of chapter 08: a step that holds more than the formula says, and computes less."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memlab.book.checks.answers import Wrong, a_function, exercise, same_bytes
from memlab.book.checks.gradient_accumulation.lets_go import beyond
from memlab.book.checks.gradient_checkpointing.witness import forgetful, same
from memlab.memory_timeline import Meter, Timeline


class Reader(nn.Module):
    """The exercise's model. tokens: (rows, length) of int64 → logits (rows, window, 256)."""

    def __init__(self, blocks: int = 6, width: int = 32, window: int = 16):
        super().__init__()
        self.window, self.awake = window, []
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(blocks))

    def block(self, number: int, x: Tensor) -> Tensor:
        """Width → 4 × width → width, added to x: (rows, window, width)."""
        hidden = F.gelu(self.up[number](x))
        self.awake.append((hidden > 0).float().mean(-1))
        return x + self.down[number](hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)[:, -self.window :]
        for number in range(len(self.up)):
            x = forgetful(self.block, number, x)
        return self.head(x)


def _turn(timeline: Timeline) -> int:
    """The event at which forward has ended: the loss is there, and backward's first gradient is not."""
    return next(span.start - 1 for span in timeline.phases if span.phase == "backward")


# ---- first part


@functools.cache
def _parts() -> dict[str, int]:
    """The right answers, from the meter and from hooks that count FLOPs."""
    torch.manual_seed(0)
    model, tokens = Reader(), torch.randint(256, (4, 64))
    with Meter(model, inputs=tokens) as meter:
        model(tokens).mean().backward()
    timeline = meter.timeline
    read = 4 * 16 * 32 * 4
    view = sum(s.nbytes - read for s in timeline.alive(_turn(timeline)) if s.op == "embedding")
    left = sum(s.nbytes for s in timeline.alive(len(timeline)) if s.category == "activation" and s.shape)
    flops: list[int] = []
    for layer in (*model.up, *model.down, model.head):  # a hook is called when its layer's forward has ended
        layer.register_forward_hook(lambda layer, x, y: flops.append(2 * y.numel() * layer.in_features))
    loss = model(tokens).mean()
    once = sum(flops)
    loss.backward()
    return {"view_bytes": view, "twice_bytes": left // 2, "spared_flops": 2 * once - sum(flops)}


@exercise
def unexplained(view: object, twice: object, spared: object) -> str:
    """Exercise 2, first part: bytes that a view keeps, bytes that are there twice, FLOPs that are not done again."""
    right = _parts()
    for found, name, hint in (
        (
            view,
            "view_bytes",
            "Which of the inputs is larger than the others, how large is it, and how much of it is ever read? A view "
            "keeps all of its storage.",
        ),
        (
            twice,
            "twice_bytes",
            "How many tensors are in model.awake after the step, how many should there be, and of how many bytes each?",
        ),
    ):
        same_bytes(found, right[name], name, hint, secret=True)
    if type(spared) is not int:
        raise Wrong(f"spared_flops: expected a whole number (int), found {type(spared).__name__} {str(spared)[:40]}.")
    if spared == 0:
        raise Wrong("there is no answer yet: spared_flops is 0.")
    if spared != right["spared_flops"]:
        down, head = 2 * 4 * 16 * 32 * 128, 2 * 4 * 16 * 32 * 256
        slips = {
            6 * down: "the blocks' part, or what *is* done again; which layer is in no block?",
            head: "the head's part; is a block's last layer run again? Who would need its result?",
            down + head: "one block's part and the head's",
            down: "one block's part",
            12 * down: "all that the blocks' forward takes",
            12 * down + head: "one whole forward",
            right["spared_flops"] // 2: "half of it; a product and a sum are two FLOPs",
            2 * right["spared_flops"]: "twice as much as it should be",
        }
        found = next((what for slip, what in slips.items() if slip == spared), "too many")
        found = "too few" if found == "too many" and spared < right["spared_flops"] else found
        found += "." * (not found.endswith("?"))
        raise Wrong(f"spared_flops: {spared:,} are {found} Which results does backward need?")
    return (
        "A view keeps its whole storage; what a function does besides returning is done twice; the last layer is not."
    )


# ---- second part


def _plain(model: nn.Module, tokens: Tensor) -> Tensor:
    """The model without checkpointing."""
    x = model.embedding(tokens[:, -model.window :])
    for up, down in zip(model.up, model.down, strict=True):
        hidden = F.gelu(up(x))
        model.awake.append((hidden > 0).float().mean(-1))
        x = x + down(hidden)
    return model.head(x)


def _formula(model: nn.Module, tokens: Tensor) -> Tensor:
    """The model as the formula counts it."""

    def block(up, down, x):
        hidden = F.gelu(up(x))
        return x + down(hidden), (hidden > 0).float().mean(-1)

    x = model.embedding(tokens[:, -model.window :])
    for up, down in zip(model.up, model.down, strict=True):
        x, awake = forgetful(block, up, down, x)
        model.awake.append(awake)
    return model.head(x)


@dataclass
class _Run:
    """Two steps of a reader; the timeline is the second's, and so are the generator's states held at its turn."""

    logits: Tensor
    gradients: dict[str, Tensor | None]
    awake: list
    timeline: Timeline
    states: int


_SIZES = ({"blocks": 6, "width": 32, "window": 16, "rows": 4}, {"blocks": 4, "width": 8, "window": 40, "rows": 7})


def _run(forward: Callable, blocks: int, width: int, window: int, rows: int) -> _Run:
    torch.manual_seed(0)
    model, texts = Reader(blocks, width, window), torch.randint(256, (2, rows, 64))
    for tokens in texts:
        model.zero_grad()
        with Meter(model, inputs=tokens) as meter:
            with _states() as states:
                logits = forward(model, tokens)
            if not isinstance(logits, Tensor):
                raise Wrong(f"expected logits, a tensor; found {type(logits).__name__}.")
            held = sum(state() is not None for state in states)
            out = logits.detach().clone()
            loss = logits.mean()
            del logits
            loss.backward()
    return _Run(out, {name: p.grad for name, p in model.named_parameters()}, model.awake, meter.timeline, held)


@contextmanager
def _states() -> Iterator[list[weakref.ref[Tensor]]]:
    """Whatever `torch.get_rng_state` hands out; no op makes it, so the meter does not see it."""
    get, found = torch.get_rng_state, []

    def noted() -> Tensor:
        state = get()
        found.append(weakref.ref(state))
        return state

    torch.get_rng_state = noted
    try:
        yield found
    finally:
        torch.get_rng_state = get


@functools.cache
def _references(number: int) -> tuple[_Run, _Run]:
    return _run(_plain, **_SIZES[number]), _run(_formula, **_SIZES[number])


@exercise
def mended(answer: object) -> str:
    """Exercise 2, second part: (model, tokens) → logits, with the bytes of the formula and each entry once."""
    function = a_function(answer, "mended(model, tokens)")
    for number, sizes in enumerate(_SIZES):
        plain, formula = _references(number)
        found = _run(function, **sizes)
        _same_values(found, plain)
        _same_entries(found.awake, plain.awake, sizes["blocks"])
        mine, right = found.timeline, formula.timeline
        more = mine.totals[_turn(mine)] - right.totals[_turn(right)]
        spare = 64 + 8 * sizes["rows"] * sizes["window"]  # a scalar, and the tokens once more
        if more > spare:
            raise Wrong(
                f"values and entries are right, and between forward and backward {more:,} B more are held than each "
                f"block's input, the head's, and the entries. {_needless(mine, right)}"
            )
        if found.states:
            raise Wrong(
                f"values and entries are right, and between forward and backward {found.states} states of torch's "
                f"generator, {torch.get_rng_state().nbytes:,} B each, are held for blocks that draw nothing: "
                "preserve_rng_state=False."
            )
        if (more := mine.totals[-1] - right.totals[-1]) > spare:
            raise Wrong(f"values and entries are right, and after the step {more:,} B too many are alive.")
        if (more := mine.peak_bytes - right.peak_bytes) > spare:
            raise Wrong(
                f"values and entries are right, and the peak is {more:,} B higher than with each block checkpointed. "
                f"{beyond(mine, right)}"
            )
    return "What the formula says, to the byte, and a plot that shows each forward once."


def _same_values(found: _Run, plain: _Run) -> None:
    if not same(found.logits, plain.logits):
        raise Wrong("the logits are not those of the model, over the last `window` tokens of each text.")
    for name, grad in found.gradients.items():
        if grad is None or not same(grad, plain.gradients[name]):
            raise Wrong(f"the logits are right, and the gradient of {name} is not that without checkpointing.")


def _same_entries(found: list, right: list, blocks: int) -> None:
    if not isinstance(found, list) or len(found) != len(right):
        count = len(found) if isinstance(found, list) else "no list"
        look = " Each is there twice: once for the forward, once for the recomputation." if count == 4 * blocks else ""
        raise Wrong(
            f"the logits are right. After two steps expected {len(right)} entries in model.awake, one for each block "
            f"and forward, found {count}.{look}"
        )
    if not all(same(mine, due) for mine, due in zip(found, right, strict=True)):
        raise Wrong("the logits are right, and the entries of model.awake are not those of the blocks, in their order.")
    if any(entry.requires_grad for entry in found):
        raise Wrong("the entries of model.awake have a graph, which holds what it was computed from; detach them.")


def _needless(found: Timeline, right: Timeline) -> str:
    """The largest that is there between forward and backward, and not with the formula's bytes, in words."""
    there = Counter(s.shape for s in right.alive(_turn(right)))
    for storage in found.alive(_turn(found)):
        if not there[storage.shape]:
            shape = "×".join(map(str, storage.shape))
            return f"The largest that is needless is {shape}, made by\n    {storage.line}"
        there[storage.shape] -= 1
    return ""
