"""PyTorch's tensor parallelism beside this book's: the same GPT, split by `parallelize_module` into DTensors.

    def compare(rank):
        return {name: train_split(name, build, batches) for name in ways_to_split()}

    results = run_ranks(compare, 2)

A DTensor is a part on each rank that knows of the whole: its shape, and whether it is cut (Shard), whole on all ranks
(Replicate) or a summand (Partial). `parallelize_module` makes a layer's weights DTensors and hangs two hooks on it: one
turns its input into the placement that it needs, one its output into that which the next layer expects. The model is
still the plain one, but for attention: ColwiseParallel cuts a weight once, from top to bottom, and of one that has
queries, keys and values stacked on each other the first ranks would get the queries. It needs three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from memlab.book.parallel_frameworks import Batch, Running, Trained, torch_way, train_on_rank
from memlab.book.workloads import GPT, Attention, Block
from memlab.ranks import Traffic, place_in
from memlab.tensor_parallelism import TensorParallelGPT, full_state_dict, load_full_state_dict


class SeparateAttention(nn.Module):
    """The book's causal self-attention with the same weights, as three layers for queries, keys and values.

    x: (batch, tokens, width) → the same shape. Where the layers are cut by columns, this rank's heads are between them.
    """

    def __init__(self, attention: Attention):
        super().__init__()
        width, heads = attention.config.width, attention.config.heads
        self.head_size, self.out = width // heads, attention.out
        weights, biases = attention.qkv.weight.detach().chunk(3), attention.qkv.bias.detach().chunk(3)
        for name, weight, bias in zip("qkv", weights, biases, strict=True):
            layer = nn.Linear(width, width, device="meta")
            layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def parallelize_block(
    block: Block, mesh: DeviceMesh, sequence_parallel: bool = False, shared_input: bool = True
) -> Block:
    """Make a GPT's block one of DTensors, in place. It may be on "meta": then `to_empty` makes this rank's parts only.

    mesh: of one dimension.
    sequence_parallel: x is (batch, tokens / ranks, width), by PyTorch's choice cut along the tokens of each text.
    shared_input: queries, keys and values read one DTensor, made once; False, as PyTorch's tutorial has it without
      sequence parallelism, each makes its own of the plain x.
    """
    block.attention = SeparateAttention(block.attention)
    outside, whole = (Shard(1) if sequence_parallel else Replicate()), Replicate()
    plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    if shared_input or sequence_parallel:
        plan["attention"] = PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(whole,))
    plan["attention.out"] = RowwiseParallel(output_layouts=outside)
    plan["feed_forward.up"] = ColwiseParallel(input_layouts=outside)
    plan["feed_forward.down"] = RowwiseParallel(output_layouts=outside)
    if sequence_parallel:
        plan |= {name: SequenceParallel(use_local_output=True) for name in ("norm1", "norm2")}
    return parallelize_module(block, mesh, plan)


def parallelize_gpt(model: GPT, mesh: DeviceMesh, sequence_parallel: bool = False, shared_input: bool = True) -> GPT:
    """Make a GPT one of DTensors, in place: both embeddings cut by rows, the head by columns, blocks as above.

    Its logits stay cut, so its loss, forward and backward, must be computed within `loss_parallel()`. Without
    sequence parallelism the norms stay plain tensors, equal on all ranks.

    Raises ValueError for a model with dropout: on a rank's plain tensors its random numbers would be every rank's.
    """
    if model.config.dropout:
        raise ValueError(
            f"expected a GPT without dropout, found {model.config.dropout}: parallel layers hand out plain tensors, "
            "and equally seeded ranks would drop the same of different heads and tokens"
        )
    outside = Shard(1) if sequence_parallel else Replicate()
    positions = Shard(0) if sequence_parallel else Replicate()  # theirs are (tokens, width), without a batch
    plan = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "position_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=positions),
        "head": ColwiseParallel(input_layouts=outside, use_local_output=False),
    }
    if sequence_parallel:
        plan["norm"] = SequenceParallel(use_local_output=True)
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        parallelize_block(block, mesh, sequence_parallel, shared_input)
    return model


def plain_weights(model: GPT) -> dict[str, Tensor]:
    """The whole weights of a GPT of DTensors by the plain GPT's names, on every rank. All ranks must call it."""
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.state_dict().items()}
    for i in range(len(model.blocks)):
        at = f"blocks.{i}.attention."
        for kind in ("weight", "bias"):
            whole[f"{at}qkv.{kind}"] = torch.cat([whole.pop(f"{at}{name}.{kind}") for name in "qkv"])
    return whole


# ---- training


class Split(NamedTuple):
    """What training a model that is split came to, on one rank."""

    trained: Trained
    weights: dict[str, Tensor]
    """The whole model's, by the plain model's names."""
    sent: dict[str, int]
    """Bytes that this rank sent in the last step, by collective, by the formula of the ring."""
    collectives: dict[str, int]
    """How many of each there were in it."""


def ways_to_split() -> list[str]:
    """The names that `train_split` knows, memlab's first."""
    return list(MAKERS)


def train_split(how: str | Callable, build: Callable[[], GPT], batches: Sequence[Batch], lr: float = 1e-3) -> Split:
    """Train a GPT, split over all ranks, metered. Call it on each rank of a process group, in the same order.

    how: one of `ways_to_split()`, or how(model, lr), a context manager that yields a Running, with weights in the order
      of the plain model's state dict.
    build: makes the whole model, the same on every rank.
    batches: x and y for each step, the same on every rank.

    Raises KeyError for a way that there is not, RuntimeError where there is no process group.
    """
    make = how if callable(how) else MAKERS[how]
    traffic, shapes = Traffic(), {}

    @contextmanager
    def watched(model: GPT, lr: float) -> Iterator[Running]:
        shapes.update({name: weight.shape for name, weight in model.state_dict().items()})
        with make(model, lr) as running:

            def loss_of(batch: Batch) -> Tensor:
                traffic.records.clear()  # of the step before
                with traffic:
                    return running.loss_of(batch)

            def backward(loss: Tensor) -> None:
                with traffic:
                    running.backward(loss)

            def step() -> None:
                with traffic:
                    running.step()

            del model
            yield running._replace(loss_of=loss_of, backward=backward, step=step)

    trained = train_on_rank(watched, build, batches, lr)
    pieces = trained.weights.split([shape.numel() for shape in shapes.values()])
    weights = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
    names = [record.name for record in traffic.records]
    return Split(trained, weights, traffic.by_name(), {name: names.count(name) for name in dict.fromkeys(names)})


@contextmanager
def memlab_way(model: GPT, lr: float, **options) -> Iterator[Running]:
    """This book's own. options: as of TensorParallelGPT."""
    config, state = model.config, model.state_dict()
    sizes = {name: getattr(config, name) for name in ("layers", "width", "heads", "context", "vocabulary", "dropout")}
    weight = state["head.weight"]
    split = TensorParallelGPT(**sizes, **options, device=weight.device, dtype=weight.dtype)
    load_full_state_dict(split, state)
    names, whole = list(state), {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    del model, state, weight

    def weights() -> list[Tensor]:
        full = full_state_dict(split)  # on rank 0
        device = next(split.parameters()).device
        tensors = [full[name].to(device) if full else torch.empty_like(whole[name], device=device) for name in names]
        for tensor in tensors:
            distributed.broadcast(tensor, src=0)
        return tensors

    with torch_way(split, split, torch.optim.AdamW(split.parameters(), lr=lr)) as running:
        yield running._replace(weights=weights)


@contextmanager
def dtensor_way(model: GPT, lr: float, **options) -> Iterator[Running]:
    """PyTorch's. options: as of parallelize_gpt."""
    names = list(model.state_dict())
    device = next(model.parameters()).device.type
    parallelize_gpt(model, distributed.init_device_mesh(device, (place_in(None)[1],)), **options)

    def weights() -> list[Tensor]:
        whole = plain_weights(model)
        return [whole[name] for name in names]

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with loss_parallel(), torch_way(model, model, optimizer) as running:
        yield running._replace(weights=weights)


MAKERS = {
    "memlab": memlab_way,
    "memlab, sequence parallel": partial(memlab_way, sequence_parallel=True),
    "DTensor": dtensor_way,
    "DTensor, sequence parallel": partial(dtensor_way, sequence_parallel=True),
    "DTensor, each layer's own input": partial(dtensor_way, shared_input=False),
}
