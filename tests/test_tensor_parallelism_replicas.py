"""Checking that ranks hold the same where they must."""

from __future__ import annotations

import re

import torch
from torch import nn

from memlab import tensor_parallelism as tp
from memlab.memory_timeline import imagine
from memlab.ranks import Traffic, imagined_ranks, one_rank, run_ranks
from memlab.tensor_parallelism.replicas import checksum


def test_checksums_differ_where_one_bit_or_two_places_do():
    for dtype in (torch.float64, torch.bfloat16, torch.uint8, torch.bool, torch.complex128):
        x = torch.arange(1, 600_001).remainder(120).to(dtype)
        y = x.clone()
        assert checksum(x) == checksum(y) and checksum(x).dtype == torch.int64
        y[400_000] = 0
        assert checksum(x) != checksum(y)
        if dtype != torch.bool:
            y = x.clone()
            y[[3, 400_000]] = x[[400_000, 3]]
            assert checksum(x) != checksum(y)
    assert checksum(torch.zeros(3)) != checksum(torch.tensor([0.0, -0.0, 0.0]))
    assert checksum(torch.empty(0)) == 0 and checksum(torch.ones(6, 4).t()) == checksum(torch.ones(4, 6))
    x = torch.randn(5, dtype=torch.complex128)
    assert checksum(x.conj()) == checksum(x.conj().resolve_conj()) != checksum(x)
    assert checksum(x.conj().imag) == checksum(x.conj().imag.resolve_neg()) != checksum(x.imag)
    rows = torch.sparse_coo_tensor([[2, 0, 2]], torch.tensor([[1.0, 2], [3, 4], [5, 6]]), (4, 2), check_invariants=True)
    assert checksum(rows) == checksum(torch.tensor([[3.0, 4], [0, 0], [6, 8], [0, 0]])) != checksum(2 * rows)


def gpt(**options) -> tp.TensorParallelGPT:
    torch.manual_seed(0)
    return tp.TensorParallelGPT(1, 16, 4, 8, 32, **options)


TEXT = torch.arange(16).view(2, 8)


def checked(model, run) -> None:
    with tp.check_replicas(model):
        run(model)


def changed(model, tensor, place, by) -> None:
    with torch.no_grad():
        tensor[place] += by
    checked(model, lambda model: model(TEXT, TEXT))


def frozen_there(rank, model):
    """Below its one trained layer that rank needs no gradient, and would not come to sum it."""
    if rank == 1:
        model.requires_grad_(False)
        model.head.requires_grad_(True)
    checked(model, lambda model: model(TEXT, TEXT).backward())


def other_dropout(rank, model):
    model.dropout.p = 0.5
    with tp.different_on_ranks():
        checked(model, lambda model: model(TEXT, TEXT))


def other_gradient(rank, model, change):
    with tp.check_replicas(model):
        model(TEXT, TEXT).backward()
        change(model.blocks[0].norm2.bias)


class Deep(nn.Module):
    """A layer, called some times."""

    def __init__(self, times: int):
        super().__init__()
        self.layer, self.times = tp.ColumnParallelLinear(4, 16), times  # on four ranks 4 outputs here

    def forward(self, x):
        for _ in range(self.times):
            x = self.layer(x)
        return x


def one_layer_more(rank, model):
    """At the end of forward: the others are in backward by then."""
    checked(Deep(2 if rank == 1 else 1), lambda deep: deep(torch.ones(3, 4, requires_grad=True)).sum().backward())


def sparse_gradient(rank, model, twice=True):
    """Of a whole table beside a parallel layer; each rank has looked up as many rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), tp.ColumnParallelLinear(4, 4))
    with tp.check_replicas(model):
        model(torch.arange(4)).sum().backward()
        if rank == 1 and twice:
            model[0].weight.grad = 2 * model[0].weight.grad


BATCH = "same input of TensorParallelGPT on all ranks of the group, found "
KEYS = "parameter blocks.0.attention.qkv.weight, section 2, piece 0"  # two ranks hold one piece; the last differs
FAULTS = {  # what every rank is told; ranks 1 and 2 differ, or rank 1 does
    f"{BATCH}on rank 0, 3: (2, 8) of torch.int64 and …; on rank 1: …; on rank 2: …; give every rank of the group": (
        lambda rank, model: checked(model, lambda model: model(TEXT + rank % 3, TEXT))
    ),
    f"{BATCH}on rank 0, 3: (2, 8)": lambda rank, model: checked(model, lambda model: model(TEXT, TEXT + rank % 3)),
    f"{BATCH}on rank 0, 3: (1, 8) of …; on rank 1, 2: (2, 8)": (
        lambda rank, model: checked(model, lambda model: model(*[TEXT[: 1 + (rank in (1, 2))]] * 2))
    ),
    "same parameter norm.weight …on rank 0, 3: (16,) of …, bits …; seed all ranks alike": (
        lambda rank, model: changed(model, model.norm.weight, slice(None), rank % 3)
    ),
    KEYS: lambda rank, model: changed(model, model.blocks[0].attention.qkv.weight, -1, rank % 3),
    "requires_grad of token_embedding.weight …on rank 0, 2, 3: True; on rank 1: False": frozen_there,
    "same input of ReplicatedLayerNorm blocks.0.norm1 on all ranks": other_dropout,
    "same gradient of blocks.0.norm2.bias on all ranks …; every rank must run the same backward": (
        lambda rank, model: other_gradient(rank, model, lambda bias: bias.grad.add_(rank % 3))
    ),
    "same gradient of blocks.0.norm2.bias …; on rank 1: none": lambda rank, model: other_gradient(
        rank, model, lambda bias: setattr(bias, "grad", None if rank == 1 else bias.grad)
    ),
    "same gradient of 0.weight on all ranks …; every rank must run the same backward": sparse_gradient,
    "on rank 0, 2, 3: ColumnParallelLinear head; on rank 1: ReplicatedLayerNorm norm; every rank": (
        lambda rank, model: checked(model, lambda model: (model.norm if rank == 1 else model.head)(torch.ones(3, 16)))
    ),
    "on rank 0, 2, 3: the end of forward; on rank 1: ColumnParallelLinear layer; every rank must call": one_layer_more,
    "on rank 0, 2, 3: ReplicatedLayerNorm norm; on rank 1: the block's end; every rank must call the same": (
        lambda rank, model: checked(model, lambda model: rank == 1 or model.norm(torch.ones(3, 16)))
    ),
}


def faults(rank: int) -> dict:
    """What is told of each fault. A right step passes, with dropout and sequence parallelism, too."""
    said, models = {}, []
    for words, fault in FAULTS.items():
        models.append(gpt(kv_heads=2))
        try:
            fault(rank, models[-1])
        except ValueError as error:
            said[words] = str(error)
    sparse_gradient(rank, None, twice=False)
    for sequence in (False, True):
        models.append(gpt(kv_heads=2, dropout=0.2, sequence_parallel=sequence))
        checked(models[-1], lambda model: model(TEXT, TEXT).backward())
    modules = [module for model in models for module in model.modules()]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    return said


def test_what_differs_is_named_on_every_rank_with_who_differs_and_no_hook_stays():
    for said in run_ranks(faults, 4):
        for words in FAULTS:
            assert re.search(".*".join(map(re.escape, words.split("…"))), said[words], re.DOTALL), said[words]


def test_on_imagined_ranks_and_alone_the_check_does_nothing():
    with imagined_ranks(4), imagine("H100-80GB"):
        model = gpt()
        with tp.check_replicas(model):
            assert not any(module._forward_pre_hooks for module in model.modules())
            model(torch.zeros(2, 8, dtype=torch.int64))
    with one_rank("cpu"):
        model = gpt()
        with tp.check_replicas(model), Traffic() as traffic:
            model(TEXT)
    assert traffic.records == []
