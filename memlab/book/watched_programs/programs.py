"""Small training programs whose memory is watched: some leak, some do not, and a seed decides everything else.

    with leaky("hooks again", seed=7) as program:
        for i in range(200):
            program.step(i)

Which model, its sizes, optimizer, lengths of batches, what it does besides training (`habits`), and, of a leak, how
fast, how often and from when on: all drawn from the seed. Every other seed trains a model that is not ours.
"""

from __future__ import annotations

import gc
import random

import torch

from memlab.book.watched_programs.faults import FIVE, FURTHER
from memlab.book.watched_programs.habits import HABITS, cycles
from memlab.book.watched_programs.models import OURS, THEIRS, Sizes, build, theirs_available

CLEAN = "clean"
KINDS = tuple(fault.__name__.replace("_", " ") for fault in FIVE)
MORE_KINDS = tuple(fault.__name__.replace("_", " ") for fault in FURTHER)
_FAULTS = dict(zip(KINDS + MORE_KINDS, FIVE + FURTHER, strict=True))


class Program:
    """A training program, built on entry and let go on exit. `step(i)` trains one step; i counts from 0.

    kind: "clean" or a kind of leak. scale: 1 for a meter; larger for a process, whose own noise is larger, too.
    `steps`: how many a clean program is watched; for a leak, about how many fill the budget once it leaks.
    `settles`: the step from which on all but a leak has been at its highest (known once it was entered).
    """

    def __init__(self, kind: str, seed: int, scale: int = 1):
        self.kind, self.seed, self.scale = kind, seed, scale
        self.chance = random.Random(f"{kind} {seed}")
        theirs = seed % 2 == 0 and theirs_available()
        names = THEIRS if theirs else OURS
        self.model_name = names[(seed // 2 + len(kind)) % len(names)]
        self.sizes = Sizes.drawn(self.chance, scale)
        leaks = kind != CLEAN
        # A program whose cycles are never collected cannot have the habit of collecting them.
        habits = [habit for habit in HABITS if not (kind == "cycles uncollected" and habit is cycles)]
        self.habits = tuple(
            self.chance.sample(habits, self.chance.randint(1, 2) if leaks else self.chance.randint(2, 4))
        )
        self.steps = self.chance.randint(110, 180) if leaks else self.chance.randint(200, 250)
        self._grows_by, self.budget_factor = self.chance.uniform(1.0, 3.0), self.chance.uniform(1.3, 3.0)
        self._lengths = self.chance.choice(("fixed", "even", "short mostly", "buckets"))
        self._optimizer = self.chance.choice(("AdamW", "AdamW", "Adam", "SGD"))

    @property
    def name(self) -> str:
        """What it is, in one line."""
        habits = ", ".join(habit.__name__.replace("_", " ") for habit in self.habits)
        return f"{self.kind}, seed {self.seed}: {self.model_name}, {self._optimizer}, {self._lengths} lengths; {habits}"

    def __enter__(self) -> Program:
        self._collects = gc.isenabled()
        self.trained = build(self.model_name, self.sizes, self.seed)
        sgd = self._optimizer == "SGD"
        options = {"momentum": 0.9, "foreach": True} if sgd else {"fused": True}
        parameters = list(self.trained.module.parameters())
        self.optimizer = getattr(torch.optim, self._optimizer)(parameters, lr=1e-3, **options)
        self.state_bytes = sum(parameter.nbytes for parameter in parameters) * (2 if sgd else 3)
        self.part, self.micro_steps, self.begins, self.settles = 1.0, 1, 0, 2
        saved_bytes, self.logits_bytes = self._sizes_of_a_step()
        self.leak_bytes = self._grows_by * (self.state_bytes + saved_bytes) / self.steps
        self._after = [habit(self) for habit in self.habits]
        if self.kind != CLEAN:
            self._after.append(_FAULTS[self.kind](self))
        return self

    def step(self, i: int) -> None:
        """One training step, and what the program does after it. The batch and its loss live until the next."""
        self.batch = self.trained.batch(self.amount())
        self.loss, self.logits = self.trained.run(self.batch)
        self.loss.backward()
        if i % self.micro_steps == self.micro_steps - 1:
            self.optimizer.step()
            self.optimizer.zero_grad()
        for act in self._after:
            act(i)
        del self.logits

    def __exit__(self, *error) -> None:
        for name in ("trained", "optimizer", "batch", "loss", "logits", "running", "_after"):
            vars(self).pop(name, None)
        if self._collects and not gc.isenabled():
            gc.enable()
            gc.collect(1)  # what was made in between; the whole heap would take long

    # ---- for habits and leaks

    def amount(self) -> float:
        """How large the next batch is, between 0 and 1: drawn as the data are, times the curriculum's part."""
        drawn = {
            "fixed": lambda: 1.0,
            "even": lambda: self.chance.uniform(0.3, 1.0),
            "short mostly": lambda: min(1.0, 0.2 + self.chance.expovariate(3.0)),
            "buckets": lambda: self.chance.choice((0.25, 0.5, 0.75, 1.0)),
        }[self._lengths]()
        return drawn * self.part

    def disable_collector(self) -> None:
        """Switch Python's garbage collector off until the program ends."""
        gc.disable()

    def _sizes_of_a_step(self) -> tuple[int, int]:
        """Bytes that a step saves for backward, roughly (parameters and views count, too), and those of its logits."""
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.data_ptr()] = tensor.nbytes
            return tensor.detach()  # an op's own output would hold the op that holds it, for ever

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = self.trained.run(self.trained.batch(1.0))[1]
        return sum(saved.values()), logits.nbytes


def leaky(kind: str, seed: int, scale: int = 1) -> Program:
    """A program with a leak of this kind, one of KINDS or MORE_KINDS. Raises ValueError for another."""
    if kind not in _FAULTS:
        raise ValueError(f"expected one of {', '.join(map(repr, _FAULTS))}, found {kind!r}")
    return Program(kind, seed, scale)


def clean(seed: int, scale: int = 1) -> Program:
    """A program that does not leak."""
    return Program(CLEAN, seed, scale)
