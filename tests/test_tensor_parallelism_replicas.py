"""Splitting models that are there already, and checking that ranks hold the same where they must."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from memlab import tensor_parallelism as tp
from memlab.book.workloads import MLP, Llama, text_batch
from memlab.memory_timeline import imagine
from memlab.ranks import Traffic, imagined_ranks, one_rank, run_ranks
from memlab.tensor_parallelism.replicas import checksum
from tests.harness import refused

Column, Row, Table = tp.ColumnParallelLinear, tp.RowParallelLinear, tp.VocabularyParallelEmbedding
GATHERED = (Column, {"gather_output": True})
LLAMA = {
    "token_embedding": Table,
    "blocks.*.attention.[qkv]": GATHERED,
    "blocks.*.attention.out": (Row, {"input_is_parallel": False}),
    "*.gate": Column,
    "*.up": Column,
    "*.down": Row,
    "head": GATHERED,
}


class Heads(nn.Module):
    """Attention whose code counts its heads, as many models' does, and norms each head's queries."""

    def __init__(self):
        super().__init__()
        self.heads, self.size = 4, 8
        self.q, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        y = self.norm(self.q(x).view(*x.shape[:2], self.heads, self.size)).transpose(1, 2)
        y = (y @ y.transpose(-2, -1)).softmax(-1) @ y
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], self.heads * self.size))


class Tied(nn.Module):
    def __init__(self, device=None):
        super().__init__()
        self.table = nn.Embedding(32, 8, device=device)
        self.middle = nn.Linear(8, 8, device=device)
        self.same = self.middle
        self.norm = nn.LayerNorm(8, device=device)
        self.head = nn.Linear(8, 32, bias=False, device=device)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.norm(self.same(self.middle(self.table(x)))))


TIED = {"table": Table, "middle": GATHERED, "head": GATHERED}
HEADS = {"q": Column, "out": Row}


def seeded(make):
    torch.manual_seed(0)
    return make().double()


def stream() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 5, 32, dtype=torch.float64)


def of_normed(plan: dict):
    """Gradients of a norm that reads parts, and the whole norm; or what is told of gradients that differ."""
    model = seeded(Heads)
    tp.split_layers(nn.ModuleDict({"model": model}), plan, divide={"model": ["heads"]})
    try:
        with tp.check_replicas(model):
            model(stream()).square().sum().backward()
    except ValueError as error:
        return str(error)
    assert "weight" not in vars(model.norm)
    return [*(p.grad.clone() for p in model.norm.parameters()), tp.clip_grad_norm_(model, 1.0)]


def on_ranks(rank: int) -> dict:
    plan, found = {f"model.{name}": kind for name, kind in HEADS.items()}, {}
    found["normed"] = of_normed(plan | {"model.norm": tp.copy_to_ranks})
    found["forgotten"] = of_normed(plan)
    x, y = text_batch(2, 16)
    model = tp.split_layers(seeded(lambda: Llama(layers=2, width=32, heads=4, kv_heads=2, context=16)), LLAMA)
    with tp.check_replicas(model):
        loss = model(x, y)
        loss.backward()
    up, norm = model.blocks[1].feed_forward.up.weight.grad, model.blocks[0].norm1.weight.grad
    found["llama"] = model(x).detach(), loss.detach(), norm, up
    found["numbers"] = sum(p.numel() for p in model.parameters())
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_ranks(on_ranks, 2)


def near(found, expected, tolerance=1e-12) -> bool:
    return (found - expected).norm() <= tolerance * expected.norm()


def test_the_books_llama_split_by_names_is_the_llama_and_every_rank_has_half_of_its_matrices(ranks):
    plain = seeded(lambda: Llama(layers=2, width=32, heads=4, kv_heads=2, context=16))
    x, y = text_batch(2, 16)
    loss = plain(x, y)
    loss.backward()
    norm, up = plain.blocks[0].norm1.weight.grad, plain.blocks[1].feed_forward.up.weight.grad
    norms = sum(p.numel() for name, p in plain.named_parameters() if "norm" in name)
    for number, rank in enumerate(ranks):
        expected = plain(x).detach(), loss.detach(), norm, up.chunk(2)[number]
        assert all(map(near, rank["llama"], expected))
        assert rank["numbers"] == (sum(p.numel() for p in plain.parameters()) - norms) // 2 + norms


def test_a_norm_of_each_heads_queries_has_the_gradient_of_all_heads_if_the_plan_names_it(ranks):
    plain = seeded(Heads)
    plain(stream()).square().sum().backward()
    expected = [p.grad.clone() for p in plain.norm.parameters()]
    expected.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    for rank in ranks:
        assert all(map(near, rank["normed"], expected))
        assert "same gradient of norm.weight" in rank["forgotten"]
        assert "copy_to_ranks in the plan of split_layers" in rank["forgotten"]


def test_a_model_on_meta_gets_its_parts_with_values_and_never_a_whole_weight():
    with one_rank("cpu"):
        model = tp.split_layers(Tied("meta"), TIED, device="cpu")
        assert model.head.weight is model.table.weight and model.same is model.middle
        assert not any(p.is_meta for p in model.parameters())
        assert torch.isfinite(model(torch.arange(4)[None])).all()


def test_frozen_layers_stay_so_and_of_several_patterns_that_fit_the_first_counts():
    with imagined_ranks(2):
        model = MLP(8, 8, 8)
        model.layers[0].requires_grad_(False)
        tp.split_layers(model, {"layers.0": Row, "layers.*": Column})
        assert [type(layer) for layer in model.layers] == [Row, Column, Column]
        assert [p.requires_grad for p in model.parameters()] == [False] * 2 + [True] * 4


def hooked() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model[1].register_forward_hook(print)
    return model


PLANS = [  # a model, a plan, an error, its words, other arguments
    (MLP, {"layer.*": Column}, ValueError, "fit 'layer.*', found none; names here are layers"),
    (MLP, {"layers": Column}, TypeError, "nn.Linear at layers to make a ColumnParallelLinear"),
    (MLP, {"layers.0": nn.Linear}, TypeError, "expected ColumnParallelLinear, RowParallelLinear, Vocab"),
    (MLP, {"layers": tp.copy_to_ranks}, ValueError, "parameters of its own at layers for copy_to_ranks, found"),
    (lambda: MLP(7), {"*.0": Row}, ValueError, "7 inputs of layers.0 cannot be split over 2"),
    (Tied, {"table": Table}, ValueError, "head.weight whole"),
    (Tied, {"middle": GATHERED}, ValueError, "features in norm.heads, found None", {"divide": {"norm": ["heads"]}}),
    (hooked, {"0": Column, "1": Row}, ValueError, "no hooks on 1"),
]


@pytest.mark.parametrize("case", PLANS, ids=lambda case: case[3])
def test_a_plan_that_cannot_be_is_refused_and_the_model_is_as_it_was(case):
    make, plan, error, words, *options = case
    model = make()
    before = list(model.named_modules()), list(model.named_buffers())
    with imagined_ranks(2):
        refused(lambda: tp.split_layers(model, plan, **dict(*options)), error, words)
    assert (list(model.named_modules()), list(model.named_buffers())) == before


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
        self.layer, self.times = Column(4, 4, gather_output=True), times

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
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), Column(4, 4))
    with tp.check_replicas(model):
        model(torch.arange(4)).sum().backward()
        if rank == 1 and twice:
            model[0].weight.grad = 2 * model[0].weight.grad


BATCH = "same input of TensorParallelGPT on all ranks of the group, found "
PAD = "all parts of the logits are of one width: pad the vocabulary to a multiple of the ranks"
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
    "same input of vocabulary_parallel_cross_entropy on all ranks": lambda rank, model: checked(
        model, lambda model: tp.vocabulary_parallel_cross_entropy(model(TEXT), TEXT + rank % 3)
    ),
    f"input of logits for vocabulary_parallel_cross_entropy …on rank 0, 3: (2, 8, 5) of …; {PAD}": (
        lambda rank, model: checked(
            model, lambda model: tp.vocabulary_parallel_cross_entropy(torch.zeros(2, 8, 5 + rank % 3), TEXT)
        )
    ),
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
