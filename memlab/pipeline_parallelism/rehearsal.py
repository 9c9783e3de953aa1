"""The rehearsal: a model's layers run on imagined tensors, to learn what each stage sends, and whether it can.

Imagined (fake) tensors have shapes and dtypes, and no values, so the largest model runs in milliseconds and without
memory, and without a trace (page `imagined_layers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from memlab.pipeline_parallelism.imagined_layers import Layer, imagined_copies, nobody_else
from memlab.pipeline_parallelism.tied import check_tied


@dataclass(frozen=True)
class Wire:
    """A tensor that travels between two stages, for each micro-batch. gradient: whether one comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool

    @property
    def nbytes(self) -> int:
        """Of the tensor; its gradient has as many."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class LayerFacts:
    """What a layer is. name: its class."""

    name: str
    parameter_bytes: int


def rehearse(
    layers: Sequence[Layer],
    parts: Sequence[range],
    micro_batch: Tensor,
    device: torch.device,
    *,
    tied: Sequence[Sequence[str]] = (),
    more: bool = True,
) -> tuple[tuple[tuple[Wire, ...], ...], tuple[LayerFacts, ...]]:
    """Run a micro-batch through imagined copies of the layers, stage by stage. Returns what crosses each cut, and what
    each layer is.

    micro_batch: whose shape counts. device: where layers will run. more: run a second one, too, which shows what a
      layer that counts would do; the runtime looks at the others. Raises as `plan_pipeline` does.
    """
    device = torch.device("cpu") if device.type == "meta" else device
    with nobody_else(device):
        made = imagined_copies(layers, device)
        _refuse_shared(made, parts)
        check_tied(made, tied)
        stream = torch.empty(micro_batch.shape, dtype=micro_batch.dtype, device=device)
        with torch.enable_grad():
            first = _crossing(made, parts, stream)
        with torch.no_grad():  # it can only show another shape
            second = _crossing(made, parts, stream) if more else first
        for stage, (now, before) in enumerate(zip(second, first, strict=True)):
            if [(w.shape, w.dtype) for w in now] != [(w.shape, w.dtype) for w in before]:
                raise ValueError(
                    f"expected stage {stage} to return one shape for every micro-batch, found {_said(now)} for "
                    f"micro-batch 1 and {_said(before)} for micro-batch 0; receivers make room before they know, and a "
                    "mean over micro-batches is one of equal sizes: pad them to one shape"
                )
        if not any(wire.gradient for wire in first[-1]):
            raise ValueError(
                "expected an output of the last stage that depends on parameters to train, found none; set "
                "requires_grad on some"
            )
        facts = tuple(LayerFacts(type(m).__name__, sum(p.nbytes for p in m.parameters())) for m in made)
    return tuple(first[:-1]), facts


def _refuse_shared(made: Sequence[nn.Module], parts: Sequence[range]) -> None:
    """A parameter or buffer that is one object on two stages would be two after the journey."""
    owners: dict[int, tuple[int, str]] = {}
    for stage, part in enumerate(parts):
        for number in part:
            for name, p in (*made[number].named_parameters(), *made[number].named_buffers()):
                name = f"{number}.{name}"
                other, first = owners.setdefault(id(p), (stage, name))
                if other != stage:
                    raise ValueError(
                        f"expected parameters and buffers of one stage each, found {first!r} of stage {other} to be "
                        f"{name!r} of stage {stage}; make them separately, and of parameters say tied=[({first!r}, "
                        f"{name!r})]"
                    )


def _crossing(made: Sequence[nn.Module], parts: Sequence[range], stream) -> list[tuple[Wire, ...]]:
    """What each stage returns for this micro-batch."""
    found, before = [], "the batch"
    for stage, part in enumerate(parts):
        for number in part:
            layer = made[number]
            name = f"layer {number} ({type(layer).__name__}) of stage {stage}"
            given = _described(stream)
            try:
                stream = layer(stream)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise ValueError(
                    f"expected shapes that do not depend on values, found that {name} asks for some ({error}); "
                    "stages agree on shapes before there are values, so .item(), nonzero and boolean masks as an index "
                    "have no answer: use torch.where, or multiply by the mask"
                ) from error
            except Exception as error:
                raise ValueError(f"{name} cannot take {given} from {before}: {error}") from error
            _refuse_no_tensors(stream, name)
            before = name
        out = stream if isinstance(stream, tuple) else (stream,)
        found.append(tuple(Wire(tuple(t.shape), t.dtype, t.requires_grad) for t in out))
        received = tuple(t.detach().requires_grad_().clone() if t.requires_grad else t.detach() for t in out)
        stream = received if isinstance(stream, tuple) else received[0]
    return found


def _refuse_no_tensors(stream, name: str) -> None:
    tensors = stream if isinstance(stream, tuple) else (stream,)
    if isinstance(stream, tuple) and len(stream) < 2:
        raise ValueError(f"expected {name} to return a tensor, or a tuple of several, found a tuple of {len(stream)}")
    for t in tensors:
        if not isinstance(t, Tensor):
            raise ValueError(
                f"expected {name} to return a tensor, or a tuple of tensors, found {_described(stream)}; "
                "that is what can be sent"
            )
        if t.layout != torch.strided:
            raise ValueError(f"expected {name} to return dense tensors, found {t.layout}; call .to_dense()")


def _described(stream) -> str:
    if isinstance(stream, tuple):
        return "(" + ", ".join(map(_described, stream)) + ")"
    if isinstance(stream, Tensor):
        return str(Wire(tuple(stream.shape), stream.dtype, False))
    return type(stream).__name__


def _said(wires: Sequence[Wire]) -> str:
    return ", ".join(map(str, wires))
