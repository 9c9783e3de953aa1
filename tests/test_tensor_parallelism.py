"""Chapter 14's library as a whole: a GPT on ranks beside one process, alone and with other chapters' techniques."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from memlab import tensor_parallelism as tp
from memlab.book.workloads import GPT, GPTConfig, text_batch
from memlab.gradient_checkpointing import checkpoint
from memlab.ranks import Traffic, one_rank, run_ranks

SIZES = {"layers": 2, "width": 32, "heads": 4, "context": 16, "vocabulary": 256}
WAYS = {
    "plain": {},
    "sequence": {"sequence_parallel": True},
    "two keys": {"kv_heads": 2, "sequence_parallel": True, "keep_gathered": True},
    "one key": {"kv_heads": 1},
    "tied": {},
}
THOROUGH = pytest.mark.thorough


class Grouped(nn.Module):
    """The book's attention with fewer keys and values: several queries share each."""

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
        k, v = (t.view(batch, tokens, self.kv_heads, -1).transpose(1, 2) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
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


def train(model: nn.Module, steps: int = 4) -> None:
    # The true gradient of a key's bias is zero, and Adam divides what rounding leaves of it by eps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-7)
    for seed in range(steps):
        x, y = text_batch(4, 16, seed=seed)
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def references() -> dict[str, tuple[dict, dict]]:
    """State dicts of one process before and after some steps."""
    found = {}
    for name, options in WAYS.items():
        model = one_process(options.get("kv_heads"), name == "tied")
        before = {key: value.clone() for key, value in model.state_dict().items()}
        train(model)
        found[name] = before, model.state_dict()
    return found


def split(name: str, state: dict | None = None, **options) -> tp.TensorParallelGPT:
    torch.manual_seed(0)
    model = tp.TensorParallelGPT(**SIZES, **WAYS[name], **options, dtype=torch.float64)
    if name == "tied":
        model.head.weight = model.token_embedding.weight
    if state is not None:
        tp.load_full_state_dict(model, state)
    return model


def train_every_way(rank: int, states: dict) -> dict:
    found = {}
    for name in WAYS:
        model = split(name, states[name])
        x, y = text_batch(4, 16, seed=100)
        with tp.check_replicas(model):
            model(x, y).backward()
        alike = {key: p.grad.clone() for key, p in model.named_parameters() if tp.cut_of(p) is None}
        with torch.no_grad():
            logits, loss = tp.gather_from_ranks(model(x)), model(x, y)
        model.zero_grad()
        train(model)
        found[name] = {"full": tp.full_state_dict(model), "alike": alike, "logits": logits, "loss": loss}
    return found


@pytest.fixture(scope="module", params=[4, pytest.param(1, marks=THOROUGH), pytest.param(2, marks=THOROUGH)])
def trained(request, references) -> list[dict]:
    return run_ranks(train_every_way, request.param, {name: before for name, (before, _) in references.items()})


def test_steps_on_any_number_of_ranks_are_those_of_one_process(trained, references):
    for name, (_, after) in references.items():
        full = trained[0][name]["full"]
        assert full.keys() == after.keys()
        for key, value in after.items():
            assert (full[key] - value).norm() <= 1e-12 * value.norm(), (name, key)
    tied = trained[0]["tied"]["full"]
    assert torch.equal(tied["head.weight"], tied["token_embedding.weight"])


def test_gradients_of_what_every_rank_holds_whole_are_the_same_bit_by_bit(trained):
    for name in WAYS:
        assert len(trained[0][name]["alike"]) == 2 * (2 + 2 + 1 + 1) + 2  # norms, and the row parallel layers' biases
        for key, gradient in trained[0][name]["alike"].items():
            assert all(torch.equal(other[name]["alike"][key], gradient) for other in trained), (name, key)


def test_logits_gathered_are_those_of_one_process_and_the_loss_is_theirs(trained, references):
    x, y = text_batch(4, 16, seed=100)
    for name, (before, _) in references.items():
        plain = one_process(WAYS[name].get("kv_heads"), name == "tied")
        plain.load_state_dict(before)
        with torch.no_grad():
            logits = plain(x)
        for rank in trained:
            assert (rank[name]["logits"] - logits).norm() <= 1e-13 * logits.norm()
            assert abs(rank[name]["loss"] - F.cross_entropy(logits.flatten(0, 1), y.flatten())) < 1e-13


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_group_of_one_is_the_plain_model_bit_by_bit_with_dropout_too_and_sends_nothing(dropout):
    config = GPTConfig(**SIZES, dropout=dropout)
    x, y = text_batch(2, 16)
    torch.manual_seed(0)
    plain = GPT(config)
    plain(x, y).backward()
    with one_rank("cpu"), Traffic() as traffic:
        torch.manual_seed(0)
        model = tp.TensorParallelGPT(**{key: value for key, value in asdict(config).items() if key != "attention"})
        model(x, y).backward()
    assert traffic.records == []
    for (name, p), (other, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert name == other and torch.equal(p, q)
        assert (p.grad - q.grad).norm() <= 1e-5 * p.grad.norm()  # FP32: the loss is computed in another order


def checkpointed(model: tp.TensorParallelGPT, how) -> None:
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
    return found


@pytest.fixture(scope="module")
def others() -> list[dict]:
    return run_ranks(with_other_techniques, 4)


@pytest.mark.parametrize("how", ["memlab", "torch", "re-entrant"])
def test_a_checkpoint_repeats_masks_and_collectives_so_gradients_are_the_same_bit_by_bit(others, how):
    for rank in others:
        for name in ("plain", "sequence", "two keys"):
            (gradients, after), (expected, same) = rank[name, how], rank[name, "none"]
            assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
            assert torch.equal(after, same)
