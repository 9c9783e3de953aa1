"""Chapter 14's library as a whole: a GPT on 1, 2 and 4 ranks beside one process, what it sends, and what it refuses."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from memlab.book.workloads import GPT, GPTConfig, text_batch
from memlab.gradient_accumulation import accumulate
from memlab.gradient_checkpointing import checkpoint
from memlab.memory_timeline import Meter, imagine
from memlab.mixed_precision import LossScaler, MasterWeights
from memlab.ranks import RankError, Traffic, imagined_ranks, one_rank, run_ranks
from memlab.tensor_parallelism import (
    TensorParallelAttention,
    TensorParallelBlock,
    TensorParallelGPT,
    check_replicas,
    cut_of,
    full_state_dict,
    gather_from_ranks,
    load_full_state_dict,
)
from memlab.tensor_parallelism.blocks import TensorParallelFeedForward

SIZES = {"layers": 2, "width": 32, "heads": 4, "context": 16, "vocabulary": 256}
WAYS = {
    "plain": {},
    "sequence": {"sequence_parallel": True},
    "two keys": {"kv_heads": 2, "sequence_parallel": True, "keep_gathered": True},
    "one key": {"kv_heads": 1},
    "tied": {},
}
RANKS = (1, 2, 4)


# ---- the references: one process


class Grouped(nn.Module):
    """The book's attention with fewer keys and values: each is repeated for the queries that share it."""

    def __init__(self, config: GPTConfig, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads = config.heads, kv_heads
        keys = config.width // config.heads * kv_heads
        self.keys = keys
        self.qkv = nn.Linear(config.width, config.width + 2 * keys)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).split((width, self.keys, self.keys), -1)
        q = q.view(batch, tokens, self.heads, -1).transpose(1, 2)
        k, v = (
            t.view(batch, tokens, self.kv_heads, -1).transpose(1, 2).repeat_interleave(self.heads // self.kv_heads, 1)
            for t in (k, v)
        )
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


def one_process(kv_heads: int | None = None, tied: bool = False) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SIZES))
    if kv_heads is not None:
        for block in model.blocks:
            block.attention = Grouped(model.config, kv_heads)
    if tied:  # and small, or logits would be as large as vectors are long
        nn.init.normal_(model.token_embedding.weight, std=0.02)
        model.head.weight = model.token_embedding.weight
    return model.double()


def train(model: nn.Module, steps: int = 10) -> None:
    # The true gradient of a key's bias is zero, and Adam divides what rounding leaves of it by eps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-7)
    for seed in range(steps):
        x, y = text_batch(4, 16, seed=seed)
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def references() -> dict[str, tuple[dict, dict]]:
    """State dicts of one process before and after ten steps."""
    found = {}
    for name, options in WAYS.items():
        model = one_process(options.get("kv_heads"), name == "tied")
        before = {key: value.clone() for key, value in model.state_dict().items()}
        train(model)
        found[name] = before, model.state_dict()
    return found


# ---- what a rank does


def split(name: str, state: dict | None = None, **options) -> TensorParallelGPT:
    torch.manual_seed(0)
    model = TensorParallelGPT(**SIZES, **WAYS[name], **options, dtype=torch.float64)
    if name == "tied":
        model.head.weight = model.token_embedding.weight
    if state is not None:
        load_full_state_dict(model, state, group=options.get("group"))
    return model


def train_every_way(rank: int, states: dict) -> dict:
    found = {}
    for name in WAYS:
        model = split(name, states[name])
        x, y = text_batch(4, 16, seed=100)
        with check_replicas(model):
            model(x, y).backward()
        alike = {key: p.grad.clone() for key, p in model.named_parameters() if cut_of(p) is None}
        with torch.no_grad():
            logits, loss = gather_from_ranks(model(x)), model(x, y)
        model.zero_grad()
        train(model)
        found[name] = {"full": full_state_dict(model), "alike": alike, "logits": logits, "loss": loss}
    return found


@pytest.fixture(scope="module", params=RANKS)
def trained(request, references) -> tuple[int, list[dict]]:
    states = {name: before for name, (before, _) in references.items()}
    return request.param, run_ranks(train_every_way, request.param, states)


# ---- equal to one process


def test_ten_steps_on_any_number_of_ranks_are_those_of_one_process(trained, references):
    _, ranks = trained
    for name, (_, after) in references.items():
        full = ranks[0][name]["full"]
        assert full.keys() == after.keys()
        for key, value in after.items():
            assert (full[key] - value).norm() <= 1e-12 * value.norm(), (name, key)


def test_gradients_of_what_every_rank_holds_whole_are_the_same_bit_by_bit(trained):
    _, ranks = trained
    for name in WAYS:
        for key, gradient in ranks[0][name]["alike"].items():
            assert all(torch.equal(other[name]["alike"][key], gradient) for other in ranks), (name, key)
        assert len(ranks[0][name]["alike"]) == 2 * (2 + 2 + 1 + 1) + 2  # norms, and the row parallel layers' biases


def test_logits_gathered_are_those_of_one_process_and_the_loss_is_theirs(trained, references):
    _, ranks = trained
    x, y = text_batch(4, 16, seed=100)
    for name, (before, _) in references.items():
        plain = one_process(WAYS[name].get("kv_heads"), name == "tied")
        plain.load_state_dict(before)
        with torch.no_grad():
            logits = plain(x)
        for rank in ranks:
            assert (rank[name]["logits"] - logits).norm() <= 1e-13 * logits.norm()
            assert abs(rank[name]["loss"] - F.cross_entropy(logits.flatten(0, 1), y.flatten())) < 1e-13


def test_tied_weights_are_one_parameter_and_stay_equal(trained):
    full = trained[1][0]["tied"]["full"]
    assert torch.equal(full["head.weight"], full["token_embedding.weight"])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_group_of_one_is_the_plain_model_bit_by_bit_with_dropout_too_and_sends_nothing(dropout):
    config = GPTConfig(**SIZES, dropout=dropout)
    x, y = text_batch(2, 16)
    torch.manual_seed(0)
    plain = GPT(config)
    plain(x, y).backward()
    with one_rank("cpu"), Traffic() as traffic:
        torch.manual_seed(0)
        model = TensorParallelGPT(**{key: value for key, value in asdict(config).items() if key != "attention"})
        model(x, y).backward()
    assert traffic.records == []
    for (name, p), (other, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert name == other and torch.equal(p, q)
        assert (p.grad - q.grad).norm() <= 1e-5 * p.grad.norm()  # FP32: the loss is computed in another order


# ---- what is sent


def both_ways(call) -> tuple[Counter, Counter]:
    """Which collectives a call and the backward of what it returns are made of."""
    with Traffic() as forward:
        y = call()
    with Traffic() as backward:
        y.sum().backward()
    return tuple(Counter(record.name for record in traffic.records) for traffic in (forward, backward))


@pytest.fixture(scope="module")
def sent() -> dict[tuple[str, str], tuple[Counter, Counter]]:
    """Collectives of a block and of a GPT of three layers on two imagined ranks."""
    found = {}
    x = torch.zeros(2, 8, dtype=torch.int64)
    with imagined_ranks(2):
        for name, options in {**WAYS, "kept": {"sequence_parallel": True, "keep_gathered": True}}.items():
            block = TensorParallelBlock(32, 4, **options)
            rows = torch.randn(8 if block.norm1.sequence_parallel else 16, 32, requires_grad=True)
            found[name, "block"] = both_ways(functools.partial(block, rows, 2))
            model = TensorParallelGPT(**{**SIZES, "layers": 3}, **options)
            found[name, "gpt"] = both_ways(functools.partial(model, x))
    return found


def test_a_block_needs_two_all_reduces_each_way_and_a_gpt_one_for_both_embeddings_and_one_back_from_the_head(sent):
    assert sent["plain", "block"] == (Counter(all_reduce=2), Counter(all_reduce=2))
    assert sent["plain", "gpt"] == (Counter(all_reduce=1 + 2 * 3), Counter(all_reduce=2 * 3 + 1))


def test_sequence_parallelism_has_a_gather_and_a_scatter_for_each_all_reduce_and_small_sums_for_norms(sent):
    forward, backward = sent["kept", "block"]
    assert forward == Counter(all_gather=2, reduce_scatter=2)
    assert backward == Counter(all_gather=2, reduce_scatter=2, all_reduce=4)  # a norm's weight and bias, twice
    forward, backward = sent["sequence", "block"]
    assert forward == Counter(all_gather=2, reduce_scatter=2)
    assert backward == Counter(all_gather=4, reduce_scatter=2, all_reduce=4)  # gathers again, beside what it computes
    forward, backward = sent["kept", "gpt"]
    assert forward == Counter(all_gather=7, reduce_scatter=7)
    assert backward == Counter(all_gather=7, reduce_scatter=7, all_reduce=14)


def test_the_loss_sums_a_few_numbers_a_token_and_never_gathers_logits():
    x, y = text_batch(2, 8)
    with imagined_ranks(2):
        model = TensorParallelGPT(**SIZES)
        with Traffic() as logits:
            model(x)
        with Traffic() as loss:
            model(x, y)
    more = loss.records[len(logits.records) :]
    assert more and sum(record.sent_bytes for record in more) <= 3 * 16 * 4


# ---- with the other chapters' techniques


def checkpointed(model: TensorParallelGPT, how) -> None:
    for block in model.blocks:
        block.forward = lambda x, batch, forward=block.forward: how(forward, x, batch)


def with_other_techniques(rank: int) -> dict:
    found = {}
    x, y = text_batch(4, 16)
    ways = {
        "none": None,
        "memlab": checkpoint,
        "torch": lambda f, *args: torch_checkpoint(f, *args, use_reentrant=False),
        "re-entrant": lambda f, *args: torch_checkpoint(f, *args, use_reentrant=True),
    }
    for name in ("plain", "sequence", "two keys"):
        for how, way in ways.items():
            model = split(name, dropout=0.2)
            if way is not None:
                checkpointed(model, way)
            torch.manual_seed(1)
            model(x, y).backward()
            found[name, how] = [p.grad for p in model.parameters()], torch.rand(1)

    model = split("sequence")
    parts = [(x[i : i + 2], y[i : i + 2]) for i in (0, 2)]
    accumulate(lambda part: model(*part), parts, reduction="mean")
    found["accumulated"] = [p.grad for p in model.parameters()]
    model = split("sequence")
    model(x, y).backward()
    found["at once"] = [p.grad for p in model.parameters()]

    torch.manual_seed(0)
    model = TensorParallelGPT(1, 16, 2, 8, 16, sequence_parallel=True, dtype=torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-2)
    tokens = torch.arange(16).view(2, 8)
    losses = []
    for _ in range(4):
        loss = model(tokens, tokens.roll(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found["bf16"] = losses, [p.detach().float() for p in model.parameters() if cut_of(p) is None]

    def agree(found_inf):
        torch.distributed.all_reduce(found_inf, torch.distributed.ReduceOp.MAX)
        return found_inf

    model = split("plain")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), LossScaler(8.0, agree=agree)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(model(x, y)).backward()
    if rank == 1:
        model.blocks[0].attention.qkv.weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    found["skipped"] = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    found["scale"] = scaler.get_scale()
    return found


@pytest.fixture(scope="module")
def others() -> list[dict]:
    return run_ranks(with_other_techniques, 2)


@pytest.mark.parametrize("name", ["plain", "sequence", "two keys"])
@pytest.mark.parametrize("how", ["memlab", "torch", "re-entrant"])
def test_a_checkpoint_repeats_masks_and_collectives_so_gradients_are_the_same_bit_by_bit(others, name, how):
    for rank in others:
        (gradients, after), (expected, same) = rank[name, how], rank[name, "none"]
        assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
        assert torch.equal(after, same)


def test_accumulated_micro_batches_make_the_gradient_of_the_whole_batch(others):
    for rank in others:
        for part, whole in zip(rank["accumulated"], rank["at once"], strict=True):
            assert (part - whole).norm() <= 1e-12 * whole.norm()


def test_bf16_weights_with_fp32_masters_learn_and_stay_equal_on_all_ranks(others):
    (losses, replicas), (other, same) = (rank["bf16"] for rank in others)
    assert losses == other and losses[-1] < losses[0]
    assert all(torch.equal(one, two) for one, two in zip(replicas, same, strict=True))


def test_an_inf_on_one_rank_makes_all_skip_the_step_where_the_scaler_is_told_to_agree(others):
    assert [(rank["skipped"], rank["scale"]) for rank in others] == [(True, 4.0), (True, 4.0)]


# ---- a group among several


def two_groups(rank: int, states: dict) -> tuple:
    pairs = [torch.distributed.new_group(pair) for pair in ([0, 1], [2, 3])]
    group = pairs[rank // 2]
    found = {}
    for name in ("plain", "two keys", "one key", "sequence"):
        model = split(name, states[name], group=group)
        x, y = text_batch(2, 16, seed=rank // 2)
        with Traffic() as traffic:
            model(x, y).backward()
        for p in model.parameters():
            p.data = p.grad
        found[name] = full_state_dict(model, group), {record.ranks for record in traffic.records}
    return found


def test_in_a_subgroup_each_group_computes_the_gradient_of_its_own_batch(references):
    states = {name: before for name, (before, _) in references.items()}
    ranks = run_ranks(two_groups, 4, states)
    for number in range(2):
        for name, (full, sizes) in ranks[2 * number].items():
            plain = one_process(WAYS[name].get("kv_heads"))
            plain.load_state_dict(states[name])
            plain(*text_batch(2, 16, seed=number)).backward()
            assert sizes == {2}
            for key, p in plain.named_parameters():
                assert (full[key] - p.grad).norm() <= 1e-12 * p.grad.norm(), (name, key)


# ---- imagined


def test_one_of_many_imagined_ranks_holds_its_share_of_the_weights():
    with imagine("H100-80GB"), imagined_ranks(64), Meter() as meter:
        model = TensorParallelGPT(2, 256, 64, 128, 128, kv_heads=8, sequence_parallel=True, dropout=0.1)
        x = torch.zeros(2, 128, dtype=torch.int64)
        model(x, x).backward()
    cut = sum(p.numel() for p in model.parameters() if cut_of(p) is not None)
    whole = sum(p.numel() for p in model.parameters() if cut_of(p) is None)
    assert whole == 2 * (4 * 256 + 2 * 256) + 2 * 256
    attention = (4 + 2 * 4) * 257 + 256 * 4  # 1 of 64 heads, of keys and values 1 of 8; and the way back
    feed_forward = 1024 // 64 * (256 + 1 + 256)
    assert cut == 2 * (attention + feed_forward) + 3 * 128 // 64 * 256
    assert meter.timeline.peak_bytes > 2 * 4 * (cut + whole)  # weights and gradients


# ---- refused


@pytest.mark.parametrize(
    ("ranks", "make", "words"),
    [
        (
            5,
            lambda: TensorParallelAttention(96, 12),
            "12 heads cannot be split over 5 ranks; pick a tensor-parallel size that divides 12 (1, 2, 3, 4, 6, 12)",
        ),
        (4, lambda: TensorParallelAttention(96, 12, kv_heads=6), "6 key-value heads cannot be split over 4 ranks"),
        (2, lambda: TensorParallelAttention(100, 12), "12 heads cannot share a width of 100"),
        (2, lambda: TensorParallelAttention(96, 12, kv_heads=5), "divide them (1, 2, 3, 4, 6, 12)"),
        (2, lambda: TensorParallelAttention(96, 0), "expected heads of at least 1, found 0"),
        (2, lambda: TensorParallelAttention(96, 12, kv_heads=0), "expected kv_heads of at least 1, found 0"),
        (4, lambda: TensorParallelFeedForward(96, 42), "42 hidden features cannot be split over 4 ranks"),
        (4, lambda: TensorParallelGPT(1, 32, 4, 32, 50_257), "4 ranks 50260 entries of the vocabulary"),
        (4, lambda: TensorParallelGPT(1, 32, 4, 30, 256), "30 positions of the context cannot be split over 4 ranks"),
        (2, lambda: TensorParallelGPT(1, 32, 4, 8, 16)(torch.zeros(1, 9, dtype=torch.int64)), "at most 8 tokens"),
        (
            4,
            lambda: TensorParallelGPT(1, 32, 4, 8, 16, sequence_parallel=True)(torch.zeros(3, 6, dtype=torch.int64)),
            "18 rows (batch · tokens) cannot be split over 4 ranks",
        ),
        (2, lambda: TensorParallelBlock(32, 4)(torch.zeros(9, 32), 2), "rows of 2 texts of one length, found 9 rows"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_and_the_error_says_which_do(ranks, make, words):
    with imagined_ranks(ranks), pytest.raises(ValueError, match=re.escape(words)):
        make()


def test_without_a_process_group_the_error_says_how_to_get_one():
    with pytest.raises(RuntimeError, match="expected a process group, found none; call this in a function that run_"):
        TensorParallelGPT(**SIZES)


def fails_in_the_middle(rank: int) -> None:
    model = split("plain")
    if rank == 1:
        model.blocks[1].feed_forward.register_forward_pre_hook(fail)
    model(*text_batch(2, 16)).backward()


def fail(*_) -> None:
    raise ArithmeticError("planted")


def test_a_rank_that_fails_where_others_wait_for_it_ends_the_launch_and_is_named():
    with pytest.raises(RankError, match="rank 1 raised ArithmeticError: planted"):
        run_ranks(fails_in_the_middle, 2)
