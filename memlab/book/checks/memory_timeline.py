"""Checks of the exercises to chapter 01: reading a timeline, and keeping a training loop from remembering too much."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

from memlab.book.checks.answers import Wrong, a_function, a_mapping, exercise, hooks_on, same_bytes, whole_bytes
from memlab.book.workloads import GPT, MLP, text_batch
from memlab.memory_timeline import Meter, Timeline
from memlab.units import KiB, format_bytes


def _step(model: nn.Module, batch: tuple[Tensor, Tensor], *, optimizer: str = "SGD", steps: int = 1) -> Timeline:
    """The last of some training steps."""
    options = {"foreach": False} if optimizer == "AdamW" else {}
    algorithm = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3, **options)
    for _ in range(steps):
        with Meter(model, algorithm, inputs=batch) as meter:
            model(*batch).backward()
            algorithm.step()
            algorithm.zero_grad()
    return meter.timeline


def _mlp_batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 64), torch.arange(size) % 16


def _evaluation(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Timeline:
    with torch.no_grad(), Meter(model, inputs=batch) as meter:
        model(*batch)
    return meter.timeline


def _spike() -> Timeline:
    layer = nn.Linear(16, 16)
    with Meter(layer) as meter:
        torch.empty(1000)
    return meter.timeline


@functools.cache
def steps() -> dict[str, Timeline]:
    """Steps whose peaks are held by different categories."""
    torch.manual_seed(0)
    gpt, wide = GPT(layers=1, width=32, context=16), MLP(64, 256)
    return {
        "eight texts through a GPT": _step(gpt, text_batch(8, 16)),
        "one text through a GPT, AdamW, second step": _step(gpt, text_batch(1, 16), optimizer="AdamW", steps=2),
        "an evaluation of an MLP on one example": _evaluation(wide, _mlp_batch(1)),
        "a layer beside which a larger tensor is made and freed at once": _spike(),
        "a batch of 256 through a deep MLP": _step(MLP(64, 256, layers=4), _mlp_batch(256)),
        "an evaluation of a narrow MLP on 4,096 examples": _evaluation(MLP(64, 8), _mlp_batch(4096)),
    }


@exercise
def largest_category(answer: object) -> str:
    """Exercise 1: (timeline) → the category that holds most at the peak."""
    function = a_function(answer, "largest_category(timeline)")
    for name, timeline in steps().items():
        held = timeline.bytes_by_category(timeline.peak_event)
        right = max(held, key=held.get)
        found = function(timeline)
        if type(found) is not str or found not in held:
            raise Wrong(f"{name}: expected one of {', '.join(held)}, found {found!r}.")
        if found != right:
            raise Wrong(
                f"{name}: you said {found}, which holds {format_bytes(held[found])} at the peak, event "
                f"{timeline.peak_event}; another category holds {format_bytes(held[right])} there."
            )
    return "Who holds most at the peak depends on model, batch and optimizer, so always look."


@exercise
def bytes_by_line(answer: object) -> str:
    """Exercise 2: (timeline, event) → {line of code: bytes alive then that were born there during the step}."""
    function = a_function(answer, "bytes_by_line(timeline, event)")
    for name, timeline in steps().items():
        for event in (len(timeline) // 3, timeline.peak_event, len(timeline)):
            expected = Counter()
            for storage in timeline.alive(event):
                if storage.phase != "before":
                    expected[str(storage.line)] += storage.nbytes
            found = a_mapping(function(timeline, event), "bytes_by_line(timeline, event)")
            if found and not all(type(line) is str for line in found):
                raise Wrong("the keys are the lines as text: str(storage.line).")
            found = {line: whole_bytes(nbytes, line) for line, nbytes in found.items()}
            if found == expected:
                continue
            there = sum(s.nbytes for s in timeline.alive(event) if s.phase == "before")
            if sum(found.values()) == sum(expected.values()) + there:
                raise Wrong(
                    f"{name}, event {event}: {format_bytes(there)} too many. Some storages were there before the "
                    'step: their phase is "before", and no line of it made them.'
                )
            for line in sorted(expected.keys() | found.keys()):
                if found.get(line, 0) != expected[line]:
                    raise Wrong(
                        f"{name}, event {event} of {len(timeline)}: the line\n    {line}\nmade "
                        f"{expected[line]:,} B of what is alive then, you have {found.get(line, 0):,} B."
                    )
    return "Every byte that the step made, by the line that made it, at any moment."


@functools.cache
def adam_step() -> Timeline:
    """Exercise 3's step: a GPT's second, one text, AdamW one tensor after another."""
    torch.manual_seed(0)
    return _step(GPT(layers=2, width=64, context=32), text_batch(1, 32), optimizer="AdamW", steps=2)


@exercise
def unexplained(counters: object, batch: object, scratch: object) -> str:
    """Exercise 3: what the peak holds beyond 16 B a parameter, in three parts, in bytes."""
    timeline = adam_step()
    alive = timeline.alive(timeline.peak_event)
    sums = Counter()
    for storage in alive:
        sums["counters" if storage.category == "optimizer_state" and not storage.shape else storage.category] += (
            storage.nbytes
        )
    for found, name, expected, hint in (
        (counters, "counters_bytes", sums["counters"], "Adam keeps one FP32 number for each parameter tensor."),
        (
            batch,
            "batch_bytes",
            sums["input"],
            "x and y are two views of one text, shifted by one: what do they share? How wide is an integer in torch?",
        ),
        (
            scratch,
            "scratch_bytes",
            sums["temporary"],
            "Look at the temporaries of the peak: storages(second, category='temporary'). Which parameter is being "
            "updated, and which was updated just before it?",
        ),
    ):
        same_bytes(found, expected, name, hint, secret=True)
    return "Three parts, and not one byte is left over."


def _trained(train: Callable) -> tuple[list, Timeline, nn.Module]:
    """What a training loop returns, and its timeline: a deep model, and more examples to validate on than to learn."""
    torch.manual_seed(0)
    model = MLP(64, 64, layers=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches, validation = [_mlp_batch(8) for _ in range(4)], _mlp_batch(512)
    with Meter(model, optimizer, inputs=(batches, validation)) as meter:
        history = train(model, optimizer, batches, validation)
    return history, meter.timeline, model


def _frugal(model, optimizer, batches, validation):
    """What exercise 4 asks for, as sparing as it gets without contortions."""
    history = []
    for x, y in batches:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            history.append((loss.item(), model(*validation).item()))
    return history


@exercise
def frugal_training(answer: object) -> str:
    """Exercise 4: (model, optimizer, batches, validation) → [(training loss, validation loss)], nothing kept."""
    function = a_function(answer, "train(model, optimizer, batches, validation)")
    right, reference, _ = _trained(_frugal)
    found, timeline, model = _trained(function)
    if not isinstance(found, list) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in found):
        raise Wrong("expected a list with a pair (training loss, validation loss) for each batch.")
    if any(isinstance(value, Tensor) for pair in found for value in pair):
        raise Wrong("a remembered tensor keeps its storage alive, and a loss its whole graph: remember plain numbers.")
    if not all(type(value) is float for pair in found for value in pair):
        raise Wrong("expected the losses as floats.")
    if found != right:
        raise Wrong(f"the losses differ from those of the wasteful loop: expected {right[:2]}…, found {found[:2]}….")
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise Wrong(
            "after the last step the gradients are still there, if only as zeros; one that nobody needs can be None."
        )
    if not model.training or not all(parameter.requires_grad for parameter in model.parameters()):
        raise Wrong("the model is left in eval mode or frozen: whoever trains on would wonder.")
    if hooks := hooks_on(model):
        raise Wrong(f"{hooks} of your hooks are left on the model, and run in whatever is done with it; take them off.")
    grown = timeline.totals[-1] - reference.totals[-1]
    if grown > 0:
        raise Wrong(f"{grown:,} B more than necessary are alive when your loop has ended.")
    slack = 1 * KiB  # one or the other loss may live a little longer
    more = timeline.peak_bytes - reference.peak_bytes
    if more > slack:
        at_peak = timeline.alive(timeline.peak_event)
        widest = max((s for s in at_peak if s.phase != "before"), key=lambda storage: storage.nbytes)
        raise Wrong(
            f"the values are right, and the peak is {format_bytes(more)} higher than it need be. Alive there, among "
            f"others: {'×'.join(map(str, widest.shape))}, {widest.reason}, made by\n    {widest.line}"
        )
    return f"The same numbers, and a peak of {format_bytes(timeline.peak_bytes)}."


class _Programs:
    """Functions to call again and again. What each leaks, a line and its bytes a call, follows from its code."""

    def __init__(self):
        self.remembered, self.weight = [], torch.ones(100, requires_grad=True)
        self.cache, self.last, self.total = None, None, torch.zeros(100)
        self.calls, self.fails_at = 0, 1

    def clean(self):
        (self.weight * 2).sum()

    def caches(self):
        if self.cache is None:
            self.cache = self.weight.detach() * 3

    def replaces(self):
        self.last = self.weight.detach() * 4

    def remembers(self):
        self.remembered.append(self.weight.detach() * 5)

    def remembers_a_loss(self):
        self.remembered.append((self.weight * 6).exp().sum())

    def adds_up(self):
        self.total = self.total + self.weight.exp()

    def leaks_twice(self):
        self.remembered.append(torch.full((7,), 1.0))
        self.remembered.append(self.weight.detach() + 8)
        self.last = self.weight.detach() * 9

    def fails(self):
        self.calls += 1
        if self.calls >= self.fails_at:
            raise RuntimeError("this step fails")


MOST_CALLS = 10
_LEAKS = {
    "clean": {},
    "caches": {},
    "replaces": {},
    "remembers": {"self.remembered.append(self.weight.detach() * 5)": 400},
    # exp keeps its result for backward, and the sum is remembered; the product is let go
    "remembers_a_loss": {"self.remembered.append((self.weight * 6).exp().sum())": 400 + 4},
    # exp's result again; the sum is replaced
    "adds_up": {"self.total = self.total + self.weight.exp()": 400},
    "leaks_twice": {
        "self.remembered.append(torch.full((7,), 1.0))": 28,
        "self.remembered.append(self.weight.detach() + 8)": 400,
    },
}
_WHAT = {
    "clean": "a step that keeps nothing",
    "caches": "a step that computes something once and keeps it: no leak",
    "replaces": "a step that keeps its last result in place of the one before: no leak",
    "remembers": "a step that appends a tensor to a list",
    "remembers_a_loss": "a step that appends a loss, with its graph, to a list",
    "adds_up": "a step that adds to a running total with autograd on",
    "leaks_twice": "a step that leaks in two lines",
}


@exercise
def leaks(answer: object) -> str:
    """Exercise 5: (step) → {line of code: bytes that every further call of step leaves there}."""
    function, most = a_function(answer, "leaks(step)"), 0
    for name, lines in _LEAKS.items():
        expected = {f"_Programs.{name}: {line}": nbytes for line, nbytes in lines.items()}
        calls, step = [], getattr(_Programs(), name)

        def counted(calls=calls, step=step):
            calls.append(1)
            step()

        found = a_mapping(function(counted), "leaks(step)")
        if not 1 <= len(calls) <= MOST_CALLS:
            raise Wrong(f"leaks(step) called step {len(calls)} times; expected 1 to {MOST_CALLS}.")
        found = {str(line): whole_bytes(nbytes, str(line)) for line, nbytes in found.items()}
        if found != expected:
            show = lambda lines: "".join(f"\n    {line}: {n} B a call" for line, n in lines.items()) or " nothing"  # noqa: E731
            raise Wrong(f"{_WHAT[name]}:\nexpected{show(expected)}\nfound{show(found)}")
        most = max(len(calls), most)
    for at in range(1, most + 1):  # at each call that the function makes: a meter is on in some of them
        program = _Programs()
        program.fails_at = at
        try:
            function(program.fails)
        except RuntimeError as error:
            if str(error) != "this step fails":
                raise
        else:
            if program.calls >= at:
                raise Wrong(f"a step that raises, at call {at}: its error is lost in your function; let it through.")
    return "Seven programs, three leaks that grow and four that only look like it, or not at all."
