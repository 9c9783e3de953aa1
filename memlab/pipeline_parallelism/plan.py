"""A pipeline's plan: which layers on which stage, in which order, and what travels between them. Made before any
process starts.

Layers are a list of modules, or of functions that make one; each takes what the one before returns: a tensor, or a
tuple of tensors. The plan runs them on imagined tensors, micro-batch by micro-batch (page `rehearsal`), to learn the
shapes that stages send each other. So what cannot work is refused here, in one process, and not by ranks that wait
for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from memlab.checking import divisors
from memlab.pipeline_parallelism.balancing import parts_of_stages
from memlab.pipeline_parallelism.checking import check_schedule
from memlab.pipeline_parallelism.imagined_layers import Layer
from memlab.pipeline_parallelism.rehearsal import LayerFacts, Wire, rehearse
from memlab.pipeline_parallelism.schedule import Schedule
from memlab.pipeline_parallelism.tied import tied_names
from memlab.units import format_bytes


@dataclass(frozen=True)
class PipelinePlan:
    """What every rank of a pipeline knows. Travels to the ranks as an argument; small, if layers are functions.

    layers: all of the model's. parts: which of them each stage has. wires: what stage s sends to stage s + 1, one
      tuple each.
    tied: names of parameters that are one, such as ("0.token_embedding.weight", "5.head.weight"); two or more of one
      shape.
    facts: what is known of each layer without making it. batch: the mini-batch's shape and dtype.
    """

    layers: tuple[Layer, ...]
    schedule: Schedule
    parts: tuple[range, ...]
    wires: tuple[tuple[Wire, ...], ...]
    batch: Wire
    tied: tuple[tuple[str, ...], ...] = field(default=())
    facts: tuple[LayerFacts, ...] = field(default=(), repr=False)

    def stage_of(self, name: str) -> int:
        """The stage that has a layer, or a parameter: "3" or "3.weight" is layer 3's."""
        number = int(name.split(".")[0])
        return next(stage for stage, part in enumerate(self.parts) if number in part)

    def __str__(self) -> str:
        """Stage by stage: the rank, the layers, their parameters, and what each micro-batch sends on."""
        lines = [f"{self.schedule.name}: {len(self.parts)} stages, {self.schedule.micro_batches} micro-batches"]
        for stage, part in enumerate(self.parts):
            facts = self.facts[part.start : part.stop]
            own = sum(one.parameter_bytes for one in facts)
            numbers = f"layer {part[0]}" if len(part) == 1 else f"layers {part[0]}–{part[-1]}"
            lines.append(
                f"stage {stage}  rank {self.schedule.ranks_of_stages[stage]}  {numbers}: "
                f"{_run_lengths([one.name for one in facts])}, parameters {format_bytes(own)}"
            )
            if stage < len(self.wires):
                sent = ", ".join(map(str, self.wires[stage]))
                there = sum(wire.nbytes for wire in self.wires[stage])
                back = sum(wire.nbytes for wire in self.wires[stage] if wire.gradient)
                lines.append(f"    ↓ {sent}: {format_bytes(there)}, gradients back {format_bytes(back)}")
        for names in self.tied:
            where = sorted({self.stage_of(name) for name in names})
            lines.append(f"tied: {' = '.join(names)}, on stage {' and '.join(map(str, where))}")
        return "\n".join(lines)


def plan_pipeline(
    layers: Sequence[Layer],
    schedule: Schedule,
    x: Tensor,
    *,
    parts: Sequence[range] | None = None,
    tied: Sequence[Sequence[str]] = (),
) -> PipelinePlan:
    """Cut layers into the schedule's stages and see that everything fits.

    layers: modules or functions that make one (an nn.Sequential or nn.ModuleList is a list, too). Of modules imagined
      copies run, with their hooks. One without parameters and buffers may stand on several stages.
    x: a mini-batch (batch, …) as training will give it, on the device of training; values are not used. Autocast that
      is on now is taken to be on in training: it decides the dtypes of what travels.
    parts: consecutive layers of each stage, as of `balance`; None: equally many.
    tied: groups of parameter names, "<layer>.<name>", that are one parameter. Names of one group may be on one stage.

    Nothing is sent while planning, also where layers talk to each other in a group of their own; such layers are
    made, so a process that is not in the group gets their errors.

    Raises ValueError for more stages than layers, a batch that the micro-batches do not divide, parts that leave
    layers out, a layer that refuses what the one before returns, or that returns no tensors, shapes that depend on
    values, a stage whose output changes its shape between micro-batches, tied names that are no parameters of one
    shape, one parameter or buffer on two stages, and an invalid schedule (`check_schedule`). Raises TypeError for
    layers that are neither modules nor functions.

    >>> import functools
    >>> from memlab.pipeline_parallelism import gpipe
    >>> layers = [functools.partial(nn.Linear, 16, 16), nn.Tanh, functools.partial(nn.Linear, 16, 4)]
    >>> print(plan_pipeline(layers, gpipe(2, 4), torch.zeros(32, 16)))
    GPipe: 2 stages, 4 micro-batches
    stage 0  rank 0  layer 0: Linear, parameters 1.1 KiB
        ↓ (8, 16) float32: 512 B, gradients back 512 B
    stage 1  rank 1  layers 1–2: Tanh, Linear, parameters 272 B
    """
    layers = _listed(layers)
    if not isinstance(schedule, Schedule):
        raise TypeError(f"expected a Schedule such as gpipe(4, 8), found {type(schedule).__name__}")
    check_schedule(schedule)
    if not layers:
        raise ValueError("expected at least one layer, found none; give modules, or functions that make them")
    if len(layers) < schedule.stages:
        raise ValueError(
            f"expected at most {len(layers)} stages for {len(layers)} layers, found a schedule with "
            f"{schedule.stages}; every stage needs a layer: take fewer stages, or cut layers into smaller ones"
        )
    parts = parts_of_stages(parts, len(layers), schedule.stages)
    with _disable_current_modes():  # only shapes count, whatever watches or imagines tensors now
        shape = torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x
        one = split_batch(shape, schedule.micro_batches)[0]
    tied = tuple(tied_names(tied))
    wires, facts = rehearse(layers, parts, one, x.device, tied=tied, more=schedule.micro_batches > 1)
    return PipelinePlan(layers, schedule, parts, wires, Wire(tuple(x.shape), x.dtype, False), tied, facts)


def split_batch(x: Tensor, micro_batches: int) -> tuple[Tensor, ...]:
    """Cut (batch, …) into equal micro-batches, without a copy.

    Raises ValueError for a batch without rows, or whose rows the micro-batches do not divide, and TypeError for no
    tensor.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a tensor (batch, …), found {type(x).__name__}")
    if x.dim() == 0 or x.shape[0] == 0:
        raise ValueError(f"expected a batch of at least one row, (batch, …), found shape {tuple(x.shape)}")
    if x.shape[0] % micro_batches:
        raise ValueError(
            f"expected a batch that {micro_batches} micro-batches divide, found {x.shape[0]} rows; pick micro-batches "
            f"that divide it ({divisors(x.shape[0])}), or {-(-x.shape[0] // micro_batches) * micro_batches} rows"
        )
    return x.chunk(micro_batches)


def _listed(layers) -> tuple[Layer, ...]:
    if isinstance(layers, nn.Module) and not isinstance(layers, (nn.Sequential, nn.ModuleList)):
        raise TypeError(
            f"expected a list of layers, found one {type(layers).__name__}; list its parts in the order in which "
            "they run"
        )
    layers = tuple(layers)
    for number, layer in enumerate(layers):
        if not isinstance(layer, nn.Module) and not callable(layer):
            raise TypeError(
                f"expected layer {number} to be a module, or a function that makes one, found {type(layer).__name__}"
            )
    return layers


def _run_lengths(names: list[str]) -> str:
    """Names with repetitions counted: "Embeddings, 3 × Block"."""
    found: list[list] = []
    for name in names:
        if found and found[-1][1] == name:
            found[-1][0] += 1
        else:
            found.append([1, name])
    return ", ".join(name if times == 1 else f"{times} × {name}" for times, name in found)
