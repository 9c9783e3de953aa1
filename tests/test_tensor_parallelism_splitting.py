"""Splitting models that are there already, and checking that ranks hold the same where they must."""

from __future__ import annotations

import contextlib
import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrizations import weight_norm

from memlab.book.workloads import MLP, Llama, text_batch
from memlab.memory_timeline import imagine
from memlab.ranks import RankError, Traffic, imagined_ranks, one_rank, run_ranks
from memlab.tensor_parallelism import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelGPT,
    VocabularyParallelEmbedding,
    check_replicas,
    clip_grad_norm_,
    copy_to_ranks,
    cut_of,
    different_on_ranks,
    split_layers,
    vocabulary_parallel_cross_entropy,
)
from memlab.tensor_parallelism.replicas import checksum

GATHERED = (ColumnParallelLinear, {"gather_output": True})
LLAMA = {
    "token_embedding": VocabularyParallelEmbedding,
    "blocks.*.attention.[qkv]": GATHERED,
    "blocks.*.attention.out": (RowParallelLinear, {"input_is_parallel": False}),
    "*.gate": ColumnParallelLinear,
    "*.up": ColumnParallelLinear,
    "*.down": RowParallelLinear,
    "head": GATHERED,
}
TRANSFORMERS = {
    "model.embed_tokens": VocabularyParallelEmbedding,
    "*.[qkv]_proj": ColumnParallelLinear,
    "*.o_proj": RowParallelLinear,
    "*.gate_proj": ColumnParallelLinear,
    "*.up_proj": ColumnParallelLinear,
    "*.down_proj": RowParallelLinear,
    "lm_head": GATHERED,
}


class Heads(nn.Module):
    """Attention whose code counts its heads, as many models' does."""

    def __init__(self):
        super().__init__()
        self.heads, self.size = 4, 8
        self.q, self.out = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        y = self.q(x).view(*x.shape[:2], self.heads, self.size).transpose(1, 2)
        y = (y @ y.transpose(-2, -1)).softmax(-1) @ y
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], self.heads * self.size))


class NormedHeads(Heads):
    """Attention that norms each head's queries, by a weight that all heads share."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        y = self.norm(self.q(x).view(*x.shape[:2], -1, self.size)).transpose(1, 2)
        y = (y @ y.transpose(-2, -1)).softmax(-1) @ y
        return self.out(y.transpose(1, 2).flatten(-2))


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


class TiedOutputs(nn.Module):
    """Three outputs that lie on each other, and a layer that has the same weight for one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 12), nn.Linear(4, 12)
        self.last.weight = self.first.weight


TIED = {"table": VocabularyParallelEmbedding, "middle": GATHERED, "head": GATHERED}


def llama() -> Llama:
    torch.manual_seed(0)
    return Llama(layers=2, width=32, heads=4, kv_heads=2, context=16).double()


def of_transformers(tied: bool):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).double()


def heads() -> Heads:
    torch.manual_seed(0)
    return Heads().double()


def normed() -> tuple[NormedHeads, torch.Tensor]:
    torch.manual_seed(4)
    return NormedHeads().double(), torch.randn(2, 5, 32, dtype=torch.float64)


def of_normed(plan: dict) -> dict:
    """Gradients of a norm that reads parts, and the whole norm: of a split model, of copies, after a failed forward."""
    (model, x), found = normed(), {}
    split_layers(model, {"q": ColumnParallelLinear, "out": RowParallelLinear} | plan)
    with contextlib.suppress(RuntimeError):
        model.norm(x[..., :3])
    assigned = copy.deepcopy(model)
    assigned.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    for name, one in {"split": model, "copy": copy.deepcopy(model), "assigned": assigned}.items():
        try:
            with check_replicas(one):
                one(x).square().sum().backward()
            found[name] = [p.grad.clone() for p in one.norm.parameters()]
            found[name].append(clip_grad_norm_(one, 1.0))
        except ValueError as error:
            found[name] = str(error)
        found[name, "keys"] = list(one.state_dict()), "weight" in vars(one.norm)
    return found


def on_ranks(rank: int, transformers: bool) -> dict:
    found = {}
    found["normed"], found["forgotten"] = of_normed({"norm": copy_to_ranks}), of_normed({})
    x, y = text_batch(2, 16)
    model = split_layers(llama(), LLAMA)
    with check_replicas(model):
        loss = model(x, y)
        loss.backward()
    found["llama"] = model(x).detach(), loss.detach(), model.blocks[0].norm1.weight.grad
    found["part"] = model.blocks[1].feed_forward.up.weight.grad
    found["numbers"] = sum(p.numel() for p in model.parameters())

    attention = split_layers(
        nn.ModuleDict({"attention": heads()}),
        {"*.q": ColumnParallelLinear, "*.out": RowParallelLinear},
        divide={"attention": ["heads"]},
    )["attention"]
    torch.manual_seed(1)
    with Traffic() as traffic:
        found["heads"] = attention(torch.randn(2, 5, 32, dtype=torch.float64)).detach(), attention.heads
    found["sent"] = [record.name for record in traffic.records]

    torch.manual_seed(2)
    tied = split_layers(Tied(), TIED)
    found["tied"] = tied.head.weight is tied.table.weight, tied.same is tied.middle
    tokens = torch.arange(32).view(2, 16)
    tied(tokens).square().sum().backward()
    found["tied gradient"] = tied.table.weight.grad

    if transformers:
        for tie in (False, True):
            model = split_layers(of_transformers(tie), TRANSFORMERS)
            out = model(input_ids=tokens, labels=tokens)
            out.loss.backward()
            gradients = [p.grad for p in model.parameters() if cut_of(p) is None]
            found["transformers", tie] = out.logits.detach(), out.loss.detach(), gradients
            found["still tied", tie] = model.lm_head.weight is model.model.embed_tokens.weight
    return found


def transformers_here() -> bool:
    try:
        import transformers  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_ranks(on_ranks, 2, transformers_here())


def near(found, expected, tolerance=1e-12) -> bool:
    return (found - expected).norm() <= tolerance * expected.norm()


def test_the_books_llama_split_by_names_is_the_llama_and_every_rank_has_half_of_its_matrices(ranks):
    plain = llama()
    x, y = text_batch(2, 16)
    loss = plain(x, y)
    loss.backward()
    logits, up = plain(x).detach(), plain.blocks[1].feed_forward.up.weight.grad
    norms = sum(p.numel() for name, p in plain.named_parameters() if "norm" in name)
    for number, rank in enumerate(ranks):
        assert near(rank["llama"][0], logits) and near(rank["llama"][1], loss.detach())
        assert near(rank["llama"][2], plain.blocks[0].norm1.weight.grad)
        assert near(rank["part"], up.chunk(2)[number])
        assert rank["numbers"] == (sum(p.numel() for p in plain.parameters()) - norms) // 2 + norms


def test_attention_that_counts_its_heads_gets_its_share_and_needs_one_sum(ranks):
    plain = heads()
    torch.manual_seed(1)
    expected = plain(torch.randn(2, 5, 32, dtype=torch.float64)).detach()
    for rank in ranks:
        assert near(rank["heads"][0], expected) and rank["heads"][1] == 2 and rank["sent"] == ["all_reduce"]


def test_a_norm_of_each_heads_queries_has_the_gradient_of_all_heads_if_the_plan_names_it(ranks):
    plain, x = normed()
    plain(x).square().sum().backward()
    expected = [p.grad.clone() for p in plain.norm.parameters()]
    expected.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    for rank in ranks:
        for name in ("split", "copy", "assigned"):
            assert all(near(one, other) for one, other in zip(rank["normed"][name], expected, strict=True))
            assert rank["normed"][name, "keys"] == (list(plain.state_dict()), False)
            assert "same gradient of norm.weight" in rank["forgotten"][name]
            assert "copy_to_ranks in the plan of split_layers" in rank["forgotten"][name]


def test_tied_weights_stay_one_part_and_a_layer_used_twice_stays_one_layer(ranks):
    torch.manual_seed(2)
    plain = Tied()
    plain(torch.arange(32).view(2, 16)).square().sum().backward()
    for number, rank in enumerate(ranks):
        assert rank["tied"] == (True, True)
        assert near(rank["tied gradient"], plain.table.weight.grad.chunk(2)[number], 1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_llama_computes_its_logits_on_two_ranks(ranks, tied):
    pytest.importorskip("transformers")
    plain, tokens = of_transformers(tied), torch.arange(32).view(2, 16)
    out = plain(input_ids=tokens, labels=tokens)
    out.loss.backward()
    whole = [p.grad for name, p in plain.named_parameters() if "norm" in name]
    for rank in ranks:
        logits, loss, gradients = rank["transformers", tied]
        assert near(logits, out.logits.detach()) and near(loss, out.loss.detach())
        assert all(near(one, other) for one, other in zip(gradients, whole, strict=True))
        assert rank["still tied", tied] == tied


def test_a_model_on_meta_gets_its_parts_with_values_and_never_a_whole_weight():
    with one_rank("cpu"):
        torch.manual_seed(5)
        model = split_layers(Tied("meta"), TIED, device="cpu")
        assert model.head.weight is model.table.weight
        assert not any(p.is_meta for p in model.parameters())
        assert torch.isfinite(model(torch.arange(4)[None])).all()
    with imagined_ranks(4), imagine("H100-80GB"):
        model = split_layers(Tied("meta"), TIED, device="cpu")
        assert model.table.weight.shape == (8, 8) and model.norm.weight.shape == (8,)
        model(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()


def test_frozen_and_evaluating_layers_stay_so():
    with imagined_ranks(2):
        model = MLP(8, 8, 8)
        model.layers[0].requires_grad_(False)
        model.layers[1].eval()
        split_layers(model, {"layers.0": ColumnParallelLinear, "layers.1": RowParallelLinear})
        assert not any(p.requires_grad for p in model.layers[0].parameters()) and model.layers[0].training
        assert all(p.requires_grad for p in model.layers[1].parameters()) and not model.layers[1].training
        table = nn.ModuleDict({"table": nn.Embedding(8, 4)}).requires_grad_(False)
        assert not split_layers(table, {"table": VocabularyParallelEmbedding})["table"].weight.requires_grad


def test_of_several_patterns_that_fit_the_first_counts():
    with imagined_ranks(2):
        model = split_layers(MLP(8, 8, 8), {"layers.0": RowParallelLinear, "layers.*": ColumnParallelLinear})
    assert [type(layer) for layer in model.layers] == [RowParallelLinear, ColumnParallelLinear, ColumnParallelLinear]


@pytest.mark.parametrize(
    ("model", "plan", "divide", "error", "words"),
    [
        (MLP, {"layer.*": ColumnParallelLinear}, None, ValueError, "fit 'layer.*', found none; names here are layers"),
        (MLP, {"layers": ColumnParallelLinear}, None, TypeError, "nn.Linear at layers to make a ColumnParallelLinear"),
        (MLP, {"layers.0": nn.Linear}, None, TypeError, "expected ColumnParallelLinear, RowParallelLinear, Vocab"),
        (MLP, {"layers.0": "column"}, None, TypeError, "found 'column'"),
        (Heads, {"q": ColumnParallelLinear, "nothing": copy_to_ranks}, None, ValueError, "fit 'nothing', found none"),
        (MLP, {"layers": copy_to_ranks}, None, ValueError, "parameters of its own at layers for copy_to_ranks, found"),
        (
            lambda: nn.Sequential(nn.ParameterDict({"w": torch.ones(2)})),
            {"0": copy_to_ranks},
            None,
            ValueError,
            "found a ParameterDict",
        ),
        (
            lambda: nn.Sequential(weight_norm(nn.Linear(2, 2))),
            {"0": copy_to_ranks},
            None,
            TypeError,
            "expected plain weights at 0 for copy_to_ranks",
        ),
        (
            lambda: nn.Sequential(spectral_norm(nn.Linear(2, 2))),
            {"0": copy_to_ranks},
            None,
            TypeError,
            "expected plain weights at 0 for copy_to_ranks",
        ),
        (Tied, {"norm": RowParallelLinear}, None, TypeError, "of, found LayerNorm"),
        (Tied, {"middle": VocabularyParallelEmbedding}, None, TypeError, "nn.Embedding at middle"),
        (lambda: MLP(7), {"*.0": RowParallelLinear}, None, ValueError, "7 inputs of layers.0 cannot be split over 2"),
        (Tied, {"table": VocabularyParallelEmbedding}, None, ValueError, "head.weight whole"),
        (Tied, {"table": VocabularyParallelEmbedding, "head": RowParallelLinear}, None, ValueError, "dimension 1"),
        (
            TiedOutputs,
            {"first": (ColumnParallelLinear, {"sections": (4, 4, 4)}), "last": GATHERED},
            None,
            ValueError,
            "first.weight cut by dimension 0, sections ((4, 2), (4, 2), (4, 2)), last.weight cut by dimension 0, "
            "sections ((12, 2),)",
        ),
        (Heads, {"q": ColumnParallelLinear}, {"": ["heads"]}, ValueError, "fit '', found none"),
        (Tied, {"middle": GATHERED}, {"norm": ["heads"]}, ValueError, "features in norm.heads, found None"),
        (Tied, {"middle": GATHERED}, {"norm": ["count"]}, ValueError, "3 count cannot be split over 2 ranks"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_and_the_model_is_as_it_was(model, plan, divide, error, words):
    model = model()
    if isinstance(model, Tied):
        model.norm.count = 3
    before = list(model.named_modules())
    with imagined_ranks(2), pytest.raises(error, match=re.escape(words)):
        split_layers(model, plan, divide=divide)
    assert list(model.named_modules()) == before


# ---- replicas


def test_checksums_differ_where_one_bit_or_two_places_do():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex128):
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


def gpt(seed: int = 0, **options) -> TensorParallelGPT:
    torch.manual_seed(seed)
    return TensorParallelGPT(1, 16, 4, 8, 32, **options)


TOKENS = torch.arange(16).view(2, 8)


def other_batch(rank, model):
    with check_replicas(model):
        model(TOKENS + rank % 3, TOKENS)


def other_targets(rank, model):
    with check_replicas(model):
        model(TOKENS, TOKENS + rank % 3)


def other_shape(rank, model):
    with check_replicas(model):
        model(TOKENS[: 1 + rank % 3], TOKENS[: 1 + rank % 3])


def other_weights(rank, model):
    with torch.no_grad():
        model.norm.weight += rank % 3
    with check_replicas(model):
        model(TOKENS, TOKENS)


def other_copy(rank, model):
    """Of the two ranks that hold one piece of the keys, the last differs."""
    with torch.no_grad():
        model.blocks[0].attention.qkv.weight[-1] += rank % 3
    with check_replicas(model):
        model(TOKENS, TOKENS)


def frozen_there(rank, model):
    """Below its one trained layer that rank needs no gradient, and would not come to sum it."""
    if rank == 1:
        model.requires_grad_(False)
        model.head.requires_grad_(True)
    with check_replicas(model):
        model(TOKENS, TOKENS).backward()


def other_targets_of_the_loss(rank, model):
    with check_replicas(model):
        vocabulary_parallel_cross_entropy(model(TOKENS), TOKENS + rank % 3)


def other_width_of_the_logits(rank, model):
    with check_replicas(model):
        vocabulary_parallel_cross_entropy(torch.zeros(2, 8, 5 + rank % 3), TOKENS)


def other_dropout(rank, model):
    model.dropout.p = 0.5
    with different_on_ranks(), check_replicas(model):
        model(TOKENS, TOKENS)


def other_gradient(rank, model):
    with check_replicas(model):
        model(TOKENS, TOKENS).backward()
        model.blocks[0].norm2.bias.grad += rank % 3


def no_gradient(rank, model):
    with check_replicas(model):
        model(TOKENS, TOKENS).backward()
        if rank == 1:
            model.blocks[0].norm2.bias.grad = None


def other_layer(rank, model):
    with check_replicas(model):
        (model.norm if rank == 1 else model.head)(torch.ones(3, 16))


def other_place(rank, model):
    with check_replicas(model):
        if rank != 1:
            model.norm(torch.ones(3, 16))


class Deep(nn.Module):
    """A layer, called some times."""

    def __init__(self, times: int):
        super().__init__()
        self.layer, self.times = ColumnParallelLinear(4, 4, gather_output=True), times

    def forward(self, x):
        for _ in range(self.times):
            x = self.layer(x)
        return x


def one_layer_more(rank, model):
    """At the end of forward: the others are in backward by then."""
    torch.manual_seed(0)
    deep = Deep(2 if rank == 1 else 1)
    with check_replicas(deep):
        deep(torch.ones(3, 4, requires_grad=True)).sum().backward()


def sparse_gradient(rank, model, twice=True):
    """Of a whole table beside a parallel layer; each rank has looked up as many rows."""
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), ColumnParallelLinear(4, 4))
    with check_replicas(model):
        model(torch.arange(4)).sum().backward()
        if rank == 1 and twice:
            model[0].weight.grad = 2 * model[0].weight.grad


FAULTS = {
    sparse_gradient: "same gradient of 0.weight on all ranks .*; every rank must run the same backward",
    other_batch: r"the same input of TensorParallelGPT on all ranks of the group, found on rank 0, 3: \(2, 8\) of "
    r"torch.int64 and .*; on rank 1: .*; on rank 2: .*; give every rank of the group the same batch",
    other_targets: "the same input of TensorParallelGPT on all ranks",
    other_shape: r"same input of TensorParallelGPT .* on rank 0, 3: \(1, 8\) of .* on rank 1, 2: \(2, 8\)",
    other_weights: r"same parameter norm.weight .* on rank 0, 3: \(16,\) of .*, bits .*; seed all ranks alike",
    other_copy: "parameter blocks.0.attention.qkv.weight, section 2, piece 0",
    frozen_there: r"same requires_grad of token_embedding.weight .* on rank 0, 2, 3: True; on rank 1: False",
    other_targets_of_the_loss: "same input of vocabulary_parallel_cross_entropy on all ranks",
    other_width_of_the_logits: r"same input of logits for vocabulary_parallel_cross_entropy .* on rank 0, 3: "
    r"\(2, 8, 5\) of .*; all parts of the logits are of one width: pad the vocabulary to a multiple of the ranks",
    other_dropout: "same input of ReplicatedLayerNorm blocks.0.norm1 on all ranks",
    other_gradient: "same gradient of blocks.0.norm2.bias on all ranks .*; every rank must run the same backward",
    no_gradient: "same gradient of blocks.0.norm2.bias .*; on rank 1: none",
    other_layer: "found on rank 0, 2, 3: ColumnParallelLinear head; on rank 1: ReplicatedLayerNorm norm; every rank",
    one_layer_more: "on rank 0, 2, 3: the end of forward; on rank 1: ColumnParallelLinear layer; every rank must call",
    other_place: "on rank 0, 2, 3: ReplicatedLayerNorm norm; on rank 1: the block's end; every rank must call the same",
}


def hooks_on(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def faults(rank: int) -> dict:
    said = {}
    for fault in FAULTS:
        model = gpt(kv_heads=2)
        try:
            fault(rank, model)
        except ValueError as error:
            said[fault.__name__] = str(error), hooks_on(model)
    torch.manual_seed(0)
    sparse_gradient(rank, None, twice=False)
    for sequence in (False, True):
        model = gpt(kv_heads=2, dropout=0.2, sequence_parallel=sequence)
        with check_replicas(model), Traffic() as traffic:
            model(TOKENS, TOKENS).backward()
        said[sequence] = hooks_on(model)
        said["sent", sequence] = traffic.by_name()
    return said


@pytest.fixture(scope="module")
def said() -> list[dict]:
    return run_ranks(faults, 4)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_differs_is_named_on_every_rank_with_who_differs_and_no_hook_stays(said, fault):
    for rank in said:
        text, hooks = rank[fault.__name__]
        assert re.search(FAULTS[fault], text), text
        assert hooks == 0


def test_a_right_step_passes_with_dropout_with_and_without_sequence_parallelism(said):
    assert all(rank[sequence] == 0 for rank in said for sequence in (False, True))


def test_on_imagined_ranks_and_alone_the_check_does_nothing():
    with imagined_ranks(4), imagine("H100-80GB"):
        model = gpt()
        with check_replicas(model):
            assert not any(module._forward_pre_hooks for module in model.modules())
            model(torch.zeros(2, 8, dtype=torch.int64))
    with one_rank("cpu"):
        model = gpt()
        with check_replicas(model), Traffic() as traffic:
            model(TOKENS)
    assert traffic.records == []


def test_a_model_without_parallel_layers_is_refused():
    with imagined_ranks(2), pytest.raises(ValueError, match="found none in MLP; split_layers makes them"):
        check_replicas(MLP()).__enter__()


def fails_alone(rank: int) -> None:
    model = gpt()
    with check_replicas(model):
        if rank == 1:
            raise ArithmeticError("planted")
        model(TOKENS)


def test_a_rank_that_fails_inside_the_check_ends_the_launch_and_is_named():
    with pytest.raises(RankError, match="rank 1 raised ArithmeticError: planted"):
        run_ranks(fails_alone, 2)


def test_what_would_be_lost_or_cannot_be_made_is_refused_and_the_model_stays_as_it_was():
    def two(change=lambda model: None):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        change(model)
        return model

    hooked = two(lambda model: model[1].register_forward_hook(lambda *_: None))
    watched = two(lambda model: model[1].weight.register_hook(lambda gradient: gradient))
    stepped = two(lambda model: model[1].weight.register_post_accumulate_grad_hook(lambda p: None))
    saved = two(lambda model: model[1].register_state_dict_post_hook(lambda *_: None))
    loaded = two(lambda model: model[1].register_load_state_dict_pre_hook(lambda *_: None))
    replaced = two(lambda model: setattr(model[1], "forward", lambda x: x))
    normed = two(lambda model: nn.utils.parametrizations.weight_norm(model[1]))
    adapted = two(lambda model: model[1].add_module("adapter", nn.Linear(8, 4)))
    scaled = two(lambda model: model[1].register_buffer("scale", torch.ones(4)))
    plan = {"0": ColumnParallelLinear, "1": RowParallelLinear}
    with imagined_ranks(2):
        for model, error, told in [
            (hooked, ValueError, "no hooks on 1"),
            (watched, ValueError, "no hooks on 1"),
            (stepped, ValueError, "no hooks on 1"),
            (saved, ValueError, "no hooks on 1"),
            (loaded, ValueError, "no hooks on 1"),
            (replaced, ValueError, "no hooks on 1"),
            (normed, TypeError, "parametrized|nn.Linear"),
            (adapted, TypeError, "expected nothing but weights at 1, found adapter, which would be lost; add it later"),
            (scaled, TypeError, "expected nothing but weights at 1, found scale, which would be lost; add it later"),
        ]:
            with pytest.raises(error, match=told):
                split_layers(model, plan)
            assert type(model[0]) is nn.Linear
        assert "scale" in scaled[1]._buffers
        model = two()
        with pytest.raises(TypeError, match="sequence"):
            split_layers(model, {"0": ColumnParallelLinear, "1": (RowParallelLinear, {"sequence": True})})
        with pytest.raises(ValueError, match="sections"):
            split_layers(model, {"1": RowParallelLinear, "0": (ColumnParallelLinear, {"sections": (4, 3)})})
        for option in ({"bias": False}, {"in_features": 4}):
            with pytest.raises(TypeError, match=f"expected options for 1 without {[*option][0]}, which its own layer"):
                split_layers(model, {"0": ColumnParallelLinear, "1": (RowParallelLinear, option)})
        with pytest.raises(RuntimeError, match="nowhere"):
            split_layers(model, {"0": ColumnParallelLinear, "1": (RowParallelLinear, {"device": "nowhere"})})
        with pytest.raises(RuntimeError, match="nowhere"):
            split_layers(model, plan, device="nowhere")
        assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
