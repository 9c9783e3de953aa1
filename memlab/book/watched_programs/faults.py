"""What leaking training programs do: five kinds of leak, and three more. Each keeps something more, for ever.

A leak is made like a habit. `program.leak_bytes` is how much a step should leak on average for the seed's budget to
take about as many steps as the seed says; what cannot be cut to size leaks every so many steps, or as much as it does.
"""

from __future__ import annotations

import torch

from memlab.book.watched_programs.habits import Cycle, Habit, filled


def every(program, nbytes: int) -> int:
    """How many steps apart pieces of so many bytes must be to leak as much as the seed says; at least 1."""
    return max(1, round(nbytes / program.leak_bytes))


def graphs_kept(program) -> Habit:
    """Something of a step is appended to a list for the log, with the graph behind it.

    What backward has passed has let go of its saved tensors. So the loss itself holds 4 bytes; its logits hold their
    storage, an entropy of them what its own graph saved, and a loss without backward everything.
    """
    kept, small = [], program.logits_bytes < program.leak_bytes / 3
    what = "probe" if small else program.chance.choice(("logits", "entropy", "probe"))
    each = {"logits": 1, "entropy": 2, "probe": 1}[what] * program.logits_bytes
    apart = program.chance.randint(3, 12) if what == "probe" else every(program, each)

    def leak(step: int) -> None:
        if step % apart:
            return
        if what == "logits":
            kept.append(program.logits)
        elif what == "entropy":
            shares = program.logits.log_softmax(-1)
            kept.append(-(shares.exp() * shares).sum(-1).mean())
        else:
            kept.append(program.trained.run(program.trained.batch(program.amount()))[0])

    return leak


def never_detached(program) -> Habit:
    """A state that goes from step to step and is never detached: a recurrent memory, or a running mean with a graph."""
    width = program.chance.choice((16, 32))
    rows = max(1, round(program.leak_bytes / (4 * width)))
    if program.logits_bytes > program.leak_bytes / 3 and program.chance.random() < 0.5:
        program.running, apart = 0.0, every(program, program.logits_bytes)

        def leak(step: int) -> None:
            if step % apart == 0:
                program.running = 0.9 * program.running + 0.1 * program.logits.square().mean()

        return leak
    weight = torch.nn.Parameter(torch.randn(width, width) / width)
    program.running = torch.zeros(rows, width)

    def leak(step: int) -> None:
        program.running = torch.tanh(program.running @ weight + program.loss)

    return leak


def cache_of_the_new(program) -> Habit:
    """A cache whose keys hardly ever come again: lengths with ids, texts, floats."""
    cache, hit = {}, program.chance.uniform(0.0, 0.6)
    nbytes = program.leak_bytes / (1 - hit)
    varies = program.chance.choice((0.0, 0.5, 0.9))

    def leak(step: int) -> None:
        known = bool(cache) and program.chance.random() < hit
        key = program.chance.choice(list(cache)) if known else (step, program.chance.random())
        if key not in cache:
            cache[key] = filled(nbytes * program.chance.uniform(1 - varies, 1 + varies))

    return leak


def hooks_again(program) -> Habit:
    """A forward hook is registered again and again, and each one holds a tensor: a copy of the output, or a fixed one.

    Copies follow the batch's size, all of them at once: the more hooks, the louder the noise.
    """
    layers = [m for m in program.trained.module.modules() if not list(m.children()) and list(m.parameters())]
    layer = program.chance.choice(layers)
    sizes = []
    with (
        torch.no_grad(),
        layer.register_forward_hook(lambda module, inputs, out: sizes.append(getattr(out, "nbytes", 0))),
    ):
        program.trained.run(program.trained.batch(1.0))
    nbytes = max(sizes, default=0)
    copies = nbytes > program.leak_bytes / 2 and program.chance.random() < 0.7
    apart = every(program, nbytes) if copies else program.chance.randint(1, 8)
    share = program.leak_bytes * apart

    def copying():
        last = {}

        def hook(module, inputs, out):
            last["out"] = out.detach().clone()

        return hook

    def holding():
        reference = filled(share)
        return lambda module, inputs, out: reference.nbytes and None

    def leak(step: int) -> None:
        if step % apart == 0:
            layer.register_forward_hook(copying() if copies else holding())

    return leak


def evaluations_kept(program) -> Habit:
    """Each evaluation's results are kept, for a report that nobody writes: a staircase that never ends."""
    kept, apart = [], program.chance.randint(6, 25)
    wanted = program.leak_bytes * apart

    def leak(step: int) -> None:
        if step % apart == apart - 1:
            with torch.no_grad():
                batch = program.trained.batch(1.0)
                logits = program.trained.run(batch)[1]
            kept.append((batch, logits))
            rest = wanted - logits.nbytes - sum(tensor.nbytes for tensor in batch.values())
            if rest > 0:
                kept.append(filled(rest))  # the features of the layer before, too

    return leak


def main_memory(program) -> Habit:
    """What is no tensor: bytes, lists and dictionaries of Python. A meter of storages and a GPU do not see it."""
    kept, apart, lists = [], program.chance.randint(1, 8), program.chance.random() < 0.5

    def leak(step: int) -> None:
        if step % apart == 0:
            nbytes = program.leak_bytes * apart
            kept.append([float(n) for n in range(round(nbytes / 32))] if lists else b"x" * round(nbytes))

    return leak


def cycles_uncollected(program) -> Habit:
    """Reference cycles in a program that has switched the garbage collector off to be fast."""
    program.disable_collector()

    def leak(step: int) -> None:
        Cycle(filled(program.leak_bytes * program.chance.uniform(0.5, 1.5)))

    return leak


def begins_late(program) -> Habit:
    """One of the five kinds, begun when the program has run well for a while."""
    program.begins = program.chance.randint(60, 120)
    leak = program.chance.choice(FIVE)(program)
    return lambda step: leak(step - program.begins) if step >= program.begins else None


FIVE = (graphs_kept, never_detached, cache_of_the_new, hooks_again, evaluations_kept)
FURTHER = (main_memory, cycles_uncollected, begins_late)
