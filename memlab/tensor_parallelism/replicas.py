"""A checking mode: do ranks hold the same where they must? What goes wrong otherwise goes wrong silently.

Ranks of one group compute one model's step together. Given another batch each, or begun with another seed each, they
still run, send what they should, and learn nonsense. So within `check_replicas` they compare checksums: of whole
parameters at the beginning, of every parallel layer's input as it is called, and of whole parameters' gradients at the
end.

A checksum is of bits, and 64 bits long: each number, read as an integer, times an odd number that depends on where it
stands, summed modulo 2⁶⁴. A single number that differs always shows.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_leaves

from memlab.ranks import all_gather, place_in
from memlab.tensor_parallelism.blocks import ReplicatedLayerNorm
from memlab.tensor_parallelism.cuts import cut_of
from memlab.tensor_parallelism.embedding import VocabularyParallelEmbedding
from memlab.tensor_parallelism.gpt import TensorParallelGPT
from memlab.tensor_parallelism.linear import ColumnParallelLinear, RowParallelLinear

_LAYERS = (
    TensorParallelGPT,
    VocabularyParallelEmbedding,
    ColumnParallelLinear,
    RowParallelLinear,
    ReplicatedLayerNorm,
)
_CHUNK = 2**18  # numbers at a time: a checksum works on copies of 8 bytes each
_ODD = -7046029254386353131  # 2⁶⁴ divided by the golden ratio, as a signed integer: its multiples are far apart
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INPUTS = (
    "give every rank of the group the same batch, seed all alike (torch.manual_seed) before training draws any random "
    "number, and let only different_on_ranks draw what differs"
)
_BEGIN = "seed all ranks alike (torch.manual_seed) before the model is made, or load one checkpoint on all"
_GRADIENTS = (
    "every rank must run the same backward; what a rank computes with its own part or rows only, send through "
    "copy_to_ranks first (sequence_parallel=True of norms and row parallel layers does)"
)
_ORDER = "every rank must call the same layers, in one order"


@contextlib.contextmanager
def check_replicas(model: nn.Module) -> Iterator[None]:
    """Within the block, compare what all ranks of the group must hold alike; raise ValueError on all where they do not.

        with check_replicas(model):
            model(x, y).backward()

    Compared bit by bit are parameters and buffers that are not cut, at the beginning (of a cut one, pieces that several
    ranks hold), and which parameters are trained; inputs of every parallel layer, when it is called (of a layer that
    takes a part, their shapes); and the gradients of all such parameters at the end. The error names the layer or
    parameter, the ranks that differ from the group's rank 0, and what to do. Ranks that call different layers in the
    model's forward, or bring other shapes, are told and do not hang; those of which one runs another backward may.

    Costs: every such tensor is read once more; for each call of a layer, and at each end of forward, 24 bytes go from
    each rank to each, and a GPU is waited for. So it is for a step in doubt, not for every step.
    On imagined ranks and alone it does nothing. Its hooks go with the block, also on errors. Gradients are equal to the
    bit where ranks run on one kind of device.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, _LAYERS)}
    if not layers:
        raise ValueError(
            f"expected a model with parallel layers, found none in {type(model).__name__}; build it of such, as "
            "TensorParallelGPT is"
        )
    group = next(iter(layers.values())).group
    if place_in(group)[1] == 1 or distributed.get_backend(group) == "fake":
        yield
        return
    _compare_held(model, "the block's beginning", _BEGIN, group)
    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            hook = layer.register_forward_pre_hook(_Hook(f"{type(layer).__name__} {name}".rstrip()), with_kwargs=True)
            stack.callback(hook.remove)
        device = next(model.parameters()).device
        end = model.register_forward_hook(lambda *_: _meet("the end of forward", (), False, device, group))
        stack.callback(end.remove)
        yield
    _compare_held(model, "the block's end", _GRADIENTS, group, gradients=True)


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """64 bits that differ where a tensor's bits do. (...) of any dtype and layout → () of int64, on its device."""
    dense = (tensor if tensor.layout == torch.strided else tensor.to_dense()).resolve_conj().resolve_neg()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense.detach()).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, chunk in enumerate(flat.split(_CHUNK)):
        places = torch.arange(number * _CHUNK, number * _CHUNK + len(chunk), device=flat.device)
        total += (chunk.view(_INTEGERS[chunk.itemsize]) * (places * _ODD | 1)).sum()
    return total


class _Hook:
    """Compares what a layer is called with, before it runs."""

    def __init__(self, place: str):
        self.place = place

    def __call__(self, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        _meet(self.place, inputs, _takes_whole(layer), inputs[0].device, layer.group)


def _takes_whole(layer: nn.Module) -> bool:
    """Whether a layer's inputs have the same values on all ranks."""
    if isinstance(layer, RowParallelLinear):
        return False
    return isinstance(layer, (TensorParallelGPT, VocabularyParallelEmbedding)) or not layer.sequence_parallel


def _meet(place: str, inputs: Sequence[Tensor], whole: bool, device: torch.device, group) -> None:
    """One small collective: is every rank here, with inputs of one shape and, where they are whole, one value?"""
    _, ranks = place_in(group)
    shapes = " and ".join(f"{tuple(x.shape)} of {x.dtype}" for x in inputs)
    codes = torch.tensor([zlib.crc32(text.encode()) for text in (place, shapes)], device=device)
    sums = [checksum(x) * (2 * number + 1) for number, x in enumerate(inputs) if whole]
    mine = torch.cat((codes, torch.stack([codes.new_zeros(()), *sums]).sum(0, keepdim=True)))
    everyone = mine.new_empty(ranks * len(mine))
    all_gather(everyone, mine, group)
    if (rows := everyone.view(ranks, -1)).equal(rows[:1].expand_as(rows)):
        return
    said: list = [None] * ranks
    distributed.all_gather_object(said, (place, shapes), group=group)
    _refuse_difference("layer, called at the same time,", {rank: place for rank, (place, _) in enumerate(said)}, _ORDER)
    found = {rank: f"{shapes}, bits {rows[rank, 2].item():x}" for rank, (_, shapes) in enumerate(said)}
    _refuse_difference(f"input of {place}", found, _INPUTS)


def _compare_held(model: nn.Module, place: str, hint: str, group, gradients: bool = False) -> None:
    """Compare parameters and buffers, or gradients, that several ranks hold."""
    _meet(place, (), False, next(model.parameters()).device, group)
    mine = (
        {} if gradients else {f"requires_grad of {name}": str(p.requires_grad) for name, p in model.named_parameters()}
    )
    for what, tensor in _held(model, group, gradients):
        described = tensor is not None and f"{tuple(tensor.shape)} of {tensor.dtype}, bits {checksum(tensor).item():x}"
        mine[what] = described or "none"
    everyone: list = [None] * place_in(group)[1]
    distributed.all_gather_object(everyone, mine, group=group)
    for what in dict.fromkeys(what for one in everyone for what in one):
        here = {rank: one[what] for rank, one in enumerate(everyone) if what in one}
        _refuse_difference(what, here, hint)


def _held(model: nn.Module, group, gradients: bool) -> Iterator[tuple[str, Tensor | None]]:
    """What several ranks hold, by name: whole tensors, and pieces of which there are fewer than ranks."""
    if not gradients:
        yield from ((f"buffer {name}", buffer) for name, buffer in model.named_buffers())
    rank, ranks = place_in(group)
    for name, p in model.named_parameters():
        cut, tensor = cut_of(p), p.grad if gradients else p
        what = f"gradient of {name}" if gradients else f"parameter {name}"
        if cut is None or tensor is None:
            yield what, tensor
            continue
        for number, ((_, pieces), piece) in enumerate(zip(cut.sections, cut.pieces_in(tensor), strict=True)):
            if pieces < ranks:
                yield f"{what}, section {number}, piece {rank * pieces // ranks}", piece


def _refuse_difference(what: str, found: dict[int, str], hint: str) -> None:
    ranks_of: dict[str, list[int]] = {}
    for rank, one in found.items():
        ranks_of.setdefault(one, []).append(rank)
    if len(ranks_of) > 1:
        listed = "; ".join(f"on rank {', '.join(map(str, ranks))}: {one}" for one, ranks in ranks_of.items())
        raise ValueError(f"expected the same {what} on all ranks of the group, found {listed}; {hint}")
