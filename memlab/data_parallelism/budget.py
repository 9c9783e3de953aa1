"""Budget: a training step's peak on one of N ranks, from the step on one.

Every rank runs the whole step on its own part of the batch, so its activations, inputs and temporaries are those of
that part alone. What stages divide are parameters, gradients and optimizer states; and stage 3 has, for a time,
gathered units and whole gradients. So the step of one device in closed form (`memlab.memory_arithmetic.training_step`),
moment by moment, with those three exchanged for a rank's, is a rank's step.

One thing more: on one device backward is at its fullest at its end, when all gradients are there. Where gradients are
divided it may be at its beginning, when all checkpoints are, and so that moment is looked at too.

Exact are parameters, states and activations. Gradients leave while backward is under way, and whole are, at the
fullest: of stage 1 all of them, and in the step a bucket's copy; of stage 2 two buckets, one on its way; of stage 3 a
unit and a tensor of the next. For the model of the book's story that comes to the byte at stages 0, 1 and 3, and within
0.2 % at stage 2. Where all of a model is one bucket, DataParallel has that whole from the first gradient on, which is
not counted here.
"""

from __future__ import annotations

from dataclasses import replace

from memlab.data_parallelism.arithmetic import (
    RankBytes,
    Transient,
    padded_elements,
    rank_bytes,
    transient_bytes,
    unit_sizes,
)
from memlab.memory_arithmetic import Breakdown, Term, TrainingStep
from memlab.memory_arithmetic.passes import FORWARD, LAST, LOSS, OPTIMIZER
from memlab.memory_arithmetic.segments import RECOMPUTATION, SEGMENTS
from memlab.units import parse_bytes

RANKS_OWN = ("parameter", "gradient", "optimizer_state")
SEGMENTED = (RECOMPUTATION, SEGMENTS)
SEGMENT_INPUT, DONE = "input of a segment", "gradients of a block"


def rank_step(
    step: TrainingStep,
    ranks: int,
    stage: int,
    *,
    bucket_bytes: int | str = "25 MiB",
    state_bytes: int | None = None,
) -> Breakdown:
    """The fullest moment of a training step on one of so many ranks, of which each has the whole step's batch.

    step: of one device with one rank's part of the batch, states on the device. bucket_bytes: of stage 2. state_bytes:
    a parameter, in the place of those that the step has.
    Raises ValueError for a stage that there is not, ranks below 1 and a bad size.

    The model of the book's story, eight texts a rank, checkpointed, on eight ranks:

    >>> from memlab.memory_arithmetic import Transformer, training_step
    >>> story = Transformer(layers=24, width=2048, heads=16, vocabulary=256, context=1024)
    >>> one = training_step(story, 8, 1024, precision="mixed", segments=24)
    >>> [round(rank_step(one, 8, stage).nbytes / 2**30, 1) for stage in (0, 1, 2, 3)]
    [18.6, 6.8, 5.4, 3.7]
    """
    units, root = unit_sizes(step.model)
    count = step.model.parameters
    widths = {
        "weight_bytes": step.parameters.nbytes // count,
        "gradient_bytes": step.gradients.nbytes // count,
    }
    here = step.moments[0].of("optimizer_state").nbytes
    states = {"state_bytes": here // count, "counter_bytes": here % count // step.model.parameter_tensors}
    if state_bytes is not None:
        states = {"state_bytes": state_bytes}
    held = rank_bytes([*units, root], ranks, stage, **states, **widths)
    sizes = [size * widths["gradient_bytes"] for unit in [*units, root] for size in unit]
    bucket = min(max(parse_bytes(bucket_bytes), *sizes), step.gradients.nbytes)
    early = whole = Transient(0, min((0, bucket, 2 * bucket, 0)[stage], step.gradients.nbytes))
    if stage == 3:
        whole = transient_bytes(units, ranks, root=root, **widths)
        unit = max(padded_elements([unit], ranks) for unit in units)
        early = Transient(whole.weights, widths["gradient_bytes"] * unit)
    moments = [(moment, whole) for moment in step.moments if moment.moment not in (LAST, LOSS)]
    for moment in (moment for moment in step.moments if moment.moment == LOSS):  # between the blocks' uses
        moments.append((moment, transient_bytes([], ranks, root=root, **widths) if stage == 3 else whole))
    for moment in (moment for moment in step.moments if moment.moment == LAST):  # of its unit, what there is so far
        moments.append((moment, Transient(whole.weights, _made(moment, step)) if stage == 3 else early))
    for moment in (moment for moment in step.moments if moment.moment in SEGMENTED):
        moments += [(_early_in_backward(moment, step, done), (early, whole)[done]) for done in (0, 1)]
    there = (_on_a_rank(moment, step, ranks, stage, held, most) for moment, most in moments)
    return max(there, key=lambda moment: moment.nbytes)


def _early_in_backward(moment: Breakdown, step: TrainingStep, done: int) -> Breakdown:
    """A moment of backward's last segment, as it is in the first (done=0) or second: more inputs, fewer gradients."""
    inputs = sum(term.nbytes for term in step.moment(FORWARD) if term.name == SEGMENT_INPUT)
    found = []
    for term in moment:
        count = {SEGMENT_INPUT: inputs - done * term.nbytes, DONE: done * _block_bytes(step)}
        found.append(replace(term, nbytes=count.get(term.name, term.nbytes)))
    return Breakdown(moment.moment, moment.at, tuple(found))


def _made(moment: Breakdown, step: TrainingStep) -> int:
    """Gradients in the block that backward is in, one by one."""
    roots = [f"gradient of {name}" for name in (*step.model.before, *step.model.after)]
    return sum(term.nbytes for term in moment.of("gradient") if term.name not in (DONE, *roots))


def _block_bytes(step: TrainingStep) -> int:
    """The gradients of a block."""
    return step.model.block_parameters * (step.gradients.nbytes // step.model.parameters)


def _on_a_rank(
    moment: Breakdown, step: TrainingStep, ranks: int, stage: int, held: RankBytes, whole: Transient
) -> Breakdown:
    """One moment of the step with a rank's parameters, gradients and states in it."""
    terms = [term for term in moment if term.category not in RANKS_OWN]
    count, stepping = step.model.parameters, moment.moment == OPTIMIZER
    if stepping and stage:  # a temporary with a place for each parameter has one for each of a piece
        terms = [_divided(term, ranks) if term.nbytes and not term.nbytes % count else term for term in terms]
    so_far = {term.name: term.nbytes for term in moment.of("gradient")}
    gradients, ungathered = held.gradients, whole.gradients if stage == 1 and stepping else 0
    piece = -(-step.model.block_parameters // ranks) * (_block_bytes(step) // step.model.block_parameters)
    if sum(so_far.values()) != step.gradients.nbytes:
        gradients = sum(so_far.values()) if stage < 2 else so_far.get(DONE, 0) // _block_bytes(step) * piece
        if stage >= 2 and so_far:
            ungathered = whole.gradients + sum(so_far.values()) - so_far.get(DONE, 0) - _made(moment, step)
    part = "" if stage == 0 else f", of {ranks} ranks"
    own = {
        "parameters" + part * (stage == 3): ("parameter", held.parameters),
        "gradients" + part * (stage >= 2): ("gradient", gradients),
        "optimizer states" + part: ("optimizer_state", held.optimizer_states),
        "gathered units": ("parameter", 0 if stepping else whole.weights),
        "whole gradients": ("gradient", ungathered),
    }
    found = [Term(name, category, nbytes, f"{nbytes} B", "the rank's own") for name, (category, nbytes) in own.items()]
    return Breakdown(moment.moment, moment.at, tuple(term for term in [*found, *terms] if term.nbytes))


def _divided(term: Term, ranks: int) -> Term:
    return replace(term, nbytes=-(-term.nbytes // ranks), formula=f"{term.formula} / {ranks}")
