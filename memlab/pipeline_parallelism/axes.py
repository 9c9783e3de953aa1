"""Three axes: what a rank of a GPT holds and sends, if data, tensors and depth are divided at once.

    N ranks = data · tensor · pipeline     a rank holds                        and sends in a step of m micro-batches

    data                                   everything, for fewer texts         its gradients, once
    tensor                                 1/t of nearly everything            2 sums a block, each way, m times
    pipeline                               some layers, micro-batches in       the stream, once each way, m times
                                           flight

The stream of a micro-batch is b·s·h elements: a stage sends it once where a block of a tensor rank sends 2·(t − 1)/t
of it four times. Gradients do not grow with the batch. So the tensor axis talks most, and belongs on the fastest
links (innermost); data and pipeline may cross from node to node.

By bytes: weights, gradients and states divide by tensor · pipeline, activations by data (fewer texts) and tensor, and
not by pipeline: the first of p stages has 1/p of the layers, and p micro-batches in flight.

Sources: Narayanan et al. 2021 (Megatron-LM), section 3; pages `arithmetic` and `activations` of
memlab.tensor_parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from memlab.checking import divisors, one_of, positive
from memlab.data_parallelism.buckets import bucketed
from memlab.memory_arithmetic import Transformer
from memlab.memory_arithmetic.ledger import elements
from memlab.pipeline_parallelism.arithmetic import in_flight
from memlab.pipeline_parallelism.balancing import parts_of_stages
from memlab.ranks import ring_bytes
from memlab.tensor_parallelism.activations import block_activations, step_activations
from memlab.tensor_parallelism.arithmetic import ITEMSIZES, STATE_BYTES, Sent, refuse_ranks, sent_bytes, step_traffic

AXES = ("data", "pipeline", "tensor")
BUCKET_BYTES = 25 * 2**20
"""Gradients that travel together, as of DataParallel."""


@dataclass(frozen=True)
class StageShare:
    """What a rank of one stage holds, and sends along each axis in a step, in bytes.

    layers: of embeddings, blocks, head. saved: of all micro-batches in flight. gradients: with the buckets' padding.
    """

    stage: int
    layers: range
    parameters: int
    gradients: int
    optimizer_states: int
    in_flight: int
    saved: int
    sent: dict[str, int]

    @property
    def nbytes(self) -> int:
        """All that is held when most is in flight, without what a computation needs meanwhile, and without messages."""
        return self.parameters + self.gradients + self.optimizer_states + self.saved


def stage_shares(
    model: Transformer,
    batch: int,
    tokens: int,
    *,
    data: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    micro_batches: int = 1,
    schedule: str = "1F1B",
    parts: Sequence[range] | None = None,
    precision: str = "mixed",
    hardware: str = "gpu",
    sequence_parallel: bool = False,
    keep_gathered: bool = False,
    counter_bytes: int = 0,
) -> list[StageShare]:
    """For each stage, what one of its ranks holds and sends in a step of `gpt_layers` under AdamW.

    batch: texts in a step, of all data ranks; each has batch / data, in micro-batches. tokens: of a text.
    schedule: "1F1B" or "GPipe". parts: of the layers + 2 layers; None: equally many. precision: "fp32", "bf16", or
    "mixed" (the same with FP32 master weights). Other options: as of `block_activations`. Of a tied model the first and
    the last of several stages both hold the table, and send each other its gradient, once a step.

    Raises ValueError for sizes that do not divide, saying which would; parts that are not all layers, one part for each
    stage; and a schedule or a precision that is none.

    GiB of the running story's model, 64 texts in a step: on one rank, and on each stage of eight:

    >>> story = Transformer(layers=24, width=2048, heads=16, vocabulary=256, context=1024)
    >>> [round(share.nbytes / 2**30, 1) for share in stage_shares(story, 64, 1024)]
    [114.7]
    >>> [round(s.nbytes / 2**30, 1) for s in stage_shares(story, 64, 1024, pipeline=8, micro_batches=64)]
    [2.5, 3.6, 3.4, 3.2, 3.0, 2.8, 3.5, 2.5]
    """
    for name, value in (("batch", batch), ("data", data), ("pipeline", pipeline), ("micro_batches", micro_batches)):
        positive(name, value)
    one_of("precision", precision, tuple(ITEMSIZES))
    refuse_ranks(model, tensor)
    if batch % (data * micro_batches):
        raise ValueError(
            f"{batch} texts cannot be split over {data} data ranks with {micro_batches} micro-batches each; pick "
            f"numbers whose product divides it ({divisors(batch)})"
        )
    parts = parts_of_stages(parts, model.layers + 2, pipeline)
    itemsize, rows = ITEMSIZES[precision], batch // (data * micro_batches)
    cut = {"sequence_parallel": sequence_parallel, "keep_gathered": keep_gathered, "precision": precision}
    kept = _kept(model, rows, tokens, tensor, hardware=hardware, **cut)
    stream = itemsize * rows * tokens * model.width // (tensor if sequence_parallel else 1)
    table = itemsize * model.vocabulary * model.width // tensor if model.tied and pipeline > 1 else 0
    shares = []
    for stage, part in enumerate(parts):
        sizes, neighbours = _sizes(model, part, tensor), (stage > 0) + (stage < pipeline - 1)
        gradients = _buckets(sizes, data, itemsize)
        held = in_flight(schedule, stage, pipeline, micro_batches)
        talks = sent_bytes(_tensor_traffic(model, part, rows, tokens, tensor, **cut))
        sent = {
            "data": sum(ring_bytes("all_reduce", nbytes, data) for nbytes in gradients),
            "pipeline": micro_batches * stream * neighbours + table * (neighbours < 2),
            "tensor": micro_batches * talks,
        }
        shares.append(
            StageShare(
                stage,
                part,
                itemsize * sum(sizes),
                sum(gradients),
                STATE_BYTES[precision] * sum(sizes) + counter_bytes * len(sizes),
                held,
                held * sum(kept[min(number, 1) + (number == model.layers + 1)] for number in part),
                sent,
            )
        )
    return shares


def _kept(model: Transformer, rows: int, tokens: int, ranks: int, **options) -> tuple[int, int, int]:
    """What embeddings, a block, and head and loss keep of one micro-batch."""
    one = replace(model, layers=1)
    block = [term for term in block_activations(one, rows, tokens, ranks, **options) if term.nbytes]
    # Without the loss that a variable holds: a pipeline keeps the graph only, and the losses apart.
    whole = [term for term in step_activations(one, rows, tokens, ranks, **options) if term.name != "loss"]
    begin = [term.name for term in whole].index(block[0].name)
    count = lambda terms: sum(term.nbytes for term in terms)  # noqa: E731
    return count(whole[:begin]), count(block), count(whole[begin + len(block) :])


def _sizes(model: Transformer, part: Sequence[int], ranks: int) -> list[int]:
    """Elements of each parameter that a tensor rank has of these layers, in order."""
    named: dict[str, str] = {}
    after = model.after if 0 in part else replace(model, tied=False).after  # elsewhere the head has a copy of the table
    for number in part:
        at = 0 if number == 0 else 2 if number == model.layers + 1 else 1
        named |= {f"{number}.{name}": size for name, size in (model.before, model.block, after)[at].items()}
    whole = lambda name: "norm" in name or name.endswith(("out.bias", "down.bias"))  # noqa: E731
    counted = {name: elements(size, model.symbols) for name, size in named.items()}
    return [count if whole(name) else count // ranks for name, count in counted.items()]


def _buckets(sizes: Sequence[int], data: int, itemsize: int) -> list[int]:
    """Bytes of each bucket in which gradients of so many elements travel, padded to pieces for the data ranks."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    parameters = [torch.empty(size, dtype=dtype, device="meta") for size in sizes]
    buckets = bucketed(parameters, [0] * len(sizes), BUCKET_BYTES)
    return [itemsize * -(-sum(sizes[n] for n in bucket) // data) * data for bucket in buckets]


def _tensor_traffic(
    model: Transformer, part: Sequence[int], rows: int, tokens: int, ranks: int, **options
) -> list[Sent]:
    """What one micro-batch has a tensor rank of these layers send."""
    blocks = sum(0 < number <= model.layers for number in part)
    first, last = 0 in part, model.layers + 1 in part
    found = []
    for one in step_traffic(replace(model, layers=max(blocks, 1)), rows, tokens, ranks, **options):
        if one.where == "gradients of norms":
            one = one._replace(times=4 * blocks + 2 * last)
        mine = first if one.where == "embeddings" else last if one.where.startswith(("head", "loss")) else True
        if mine and one.times and (blocks or not one.where.startswith("blocks")):
            found.append(one)
    return found
