"""A pipeline's plan: which layers on which stage, in which order, and what travels between them. Made before any process starts.

Layers are a list of modules, or of functions that make one; each takes what the one before returns: a tensor, or a tuple of
tensors. The plan runs them on imagined tensors, micro-batch by micro-batch, to learn the shapes that stages send each other. So
what cannot work is refused here, in one process, and not by ranks that wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memlab.memory_arithmetic.shapes import divisors
from memlab.pipeline_parallelism.balance import balance
from memlab.pipeline_parallelism.checking import check_schedule
from memlab.pipeline_parallelism.schedule import Schedule

Layer = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Wire:
    """A tensor that travels between two stages. gradient: whether one comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class PipelinePlan:
    """What every rank of a pipeline knows. Travels to the ranks as an argument.

    layers: all of the model's. parts: which of them each stage has. wires: what stage s sends to stage s + 1, one list each.
    tied: names of parameters that are one, such as ("0.token_embedding.weight", "5.head.weight").
    """

    layers: tuple[Layer, ...]
    schedule: Schedule
    parts: tuple[range, ...]
    wires: tuple[tuple[Wire, ...], ...]
    tied: tuple[tuple[str, str], ...] = field(default=())


def plan_pipeline(
    layers: Sequence[Layer],
    schedule: Schedule,
    x: Tensor,
    *,
    parts: Sequence[range] | None = None,
    tied: Sequence[tuple[str, str]] = (),
) -> PipelinePlan:
    """Cut layers into the schedule's stages and see that everything fits.

    x: a mini-batch (batch, …) as training will give it; its values are not used. parts: consecutive layers of each stage; None:
    equally many. tied: pairs of parameter names, "<layer>.<name>".

    Raises ValueError for more stages than layers, a batch that the micro-batches do not divide, parts that leave layers out, a
    stage whose output changes its shape between micro-batches, or an invalid schedule (`check_schedule`).
    """
    layers = tuple(layers)
    check_schedule(schedule)
    if parts is None:
        parts = balance([1] * len(layers), schedule.stages)
    if [number for part in parts for number in part] != list(range(len(layers))) or not all(parts):
        raise ValueError(
            f"expected parts that are layers 0 to {len(layers) - 1} in order, none empty, found {list(parts)}"
        )
    if len(parts) != schedule.stages:
        raise ValueError(f"expected {schedule.stages} parts, one for each stage of the schedule, found {len(parts)}")
    wires = _wires(layers, parts, split_batch(x, schedule.micro_batches))
    return PipelinePlan(layers, schedule, tuple(parts), wires, tuple(tied))


def split_batch(x: Tensor, micro_batches: int) -> tuple[Tensor, ...]:
    """Cut (batch, …) into equal micro-batches, without a copy."""
    if x.shape[0] % micro_batches:
        raise ValueError(
            f"expected a batch that {micro_batches} micro-batches divide, found {x.shape[0]} rows; "
            f"pick micro-batches that divide it ({divisors(x.shape[0])})"
        )
    return x.chunk(micro_batches)


def make_layer(layer: Layer) -> nn.Module:
    """The module itself, or what the function makes."""
    return layer if isinstance(layer, nn.Module) else layer()


def _wires(layers, parts, micro_batches) -> tuple[tuple[Wire, ...], ...]:
    """Run all micro-batches through imagined copies of the layers and note what crosses each cut."""
    found: list[list[tuple[Wire, ...]]] = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
        made = [make_layer(layer) for layer in layers]
        for i, micro_batch in enumerate(micro_batches):
            stream = torch.empty(micro_batch.shape, dtype=micro_batch.dtype)
            crossing = []
            for stage, part in enumerate(parts):
                for number in part:
                    stream = made[number](stream)
                out = stream if isinstance(stream, tuple) else (stream,)
                crossing.append(tuple(Wire(tuple(t.shape), t.dtype, t.requires_grad) for t in out))
                if found and crossing[-1] != found[0][stage]:
                    raise ValueError(
                        f"expected stage {stage} to return one shape for every micro-batch, found "
                        f"{[w.shape for w in crossing[-1]]} for micro-batch {i} and {[w.shape for w in found[0][stage]]} for "
                        "micro-batch 0; pad them to one shape"
                    )
            found.append(crossing)
    return tuple(found[0][:-1])
