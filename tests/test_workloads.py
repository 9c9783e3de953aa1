"""The models every chapter runs, against torch's own layers, and the data, the same on every machine."""

import math
import re
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memlab.book import workloads
from memlab.book.workloads import (
    GPT,
    LSTM,
    MLP,
    Attention,
    ConvNet,
    GPTConfig,
    Llama,
    LlamaConfig,
    lengths,
    text,
    text_batch,
)
from tests.harness import refusals, refused

SMALL = {"layers": 2, "width": 32, "heads": 4, "context": 16, "vocabulary": 64}


def test_fused_attention_and_attention_by_hand_are_the_same_function():
    torch.manual_seed(0)
    fused, by_hand = (Attention(GPTConfig(**SMALL, attention=way)).double() for way in ("fused", "by hand"))
    by_hand.load_state_dict(fused.state_dict())
    x = torch.randn(2, 16, 32, dtype=torch.float64)
    torch.testing.assert_close(fused(x), by_hand(x), rtol=1e-12, atol=1e-14)


def test_a_block_is_torchs_own_transformer_layer():
    torch.manual_seed(0)
    block = workloads.Block(GPTConfig(**SMALL)).double()
    theirs = nn.TransformerEncoderLayer(32, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True).double()
    theirs.load_state_dict(
        {
            "self_attn.in_proj_weight": block.attention.qkv.weight,
            "self_attn.in_proj_bias": block.attention.qkv.bias,
            "self_attn.out_proj.weight": block.attention.out.weight,
            "self_attn.out_proj.bias": block.attention.out.bias,
            "linear1.weight": block.feed_forward.up.weight,
            "linear1.bias": block.feed_forward.up.bias,
            "linear2.weight": block.feed_forward.down.weight,
            "linear2.bias": block.feed_forward.down.bias,
            **{
                f"{name}.{part}": getattr(getattr(block, name), part)
                for name in ("norm1", "norm2")
                for part in ("weight", "bias")
            },
        }
    )
    x = torch.randn(2, 16, 32, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(16, dtype=torch.float64)
    torch.testing.assert_close(block(x), theirs(x, src_mask=mask, is_causal=True), rtol=1e-10, atol=1e-12)


def test_a_model_does_not_look_ahead_and_a_llama_knows_positions():
    for model in (GPT(**SMALL), Llama(**SMALL, kv_heads=1)):
        x = torch.randint(64, (1, 16))
        changed = x.clone()
        changed[0, 10:] = (changed[0, 10:] + 1) % 64
        same = model(x)[0, :10] - model(changed)[0, :10]
        assert same.abs().max() < 1e-5 < (model(x)[0, 10:] - model(changed)[0, 10:]).abs().max()
    swapped = x[:, [1, 0, *range(2, 16)]]
    assert (model(x)[0, 5] - model(swapped)[0, 5]).abs().max() > 1e-5


def test_a_gpt_has_the_parameters_that_the_closed_form_counts():
    c = GPTConfig(**SMALL)
    per_layer = 12 * c.width**2 + 13 * c.width
    expected = c.layers * per_layer + (2 * c.vocabulary + c.context) * c.width + 2 * c.width
    assert sum(p.numel() for p in GPT(c).parameters()) == expected


def test_a_llama_is_transformers_own():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ours = Llama(**SMALL, kv_heads=2, hidden=88).double()
    sizes = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=2, vocab_size=64, max_position_embeddings=16, rms_norm_eps=1e-5
    )
    theirs = transformers.LlamaForCausalLM(config).double()
    names = {
        "token_embedding": "embed_tokens",
        "blocks": "layers",
        "attention.out": "self_attn.o_proj",
        "attention": "self_attn",
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "feed_forward": "mlp",
    }
    renamed = {}
    for name, value in ours.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new)
        name = re.sub(r"(?<=\.)(q|k|v|gate|up|down)(?=\.)", r"\1_proj", name)
        renamed[name if name.startswith("head") else f"model.{name}"] = value
    renamed["lm_head.weight"] = renamed.pop("head.weight")
    theirs.load_state_dict(renamed)
    x = torch.randint(64, (2, 16))
    torch.testing.assert_close(ours(x), theirs(x).logits, rtol=1e-5, atol=1e-6)  # both make the angles in FP32


TOKENS = torch.zeros(1, 17, dtype=torch.int64)
REFUSALS = {
    "odd heads": (lambda: LlamaConfig(width=32, heads=32), ValueError, "rotary positions need"),
    "no shares": (lambda: LlamaConfig(width=32, heads=4, kv_heads=3), ValueError, "kv_heads that divide heads"),
    "too many tokens": (lambda: GPT(**SMALL)(TOKENS), ValueError, "expected at most 16 tokens"),
    "too many for a Llama": (lambda: Llama(**SMALL)(TOKENS), ValueError, "expected at most 16 tokens"),
    "no width for the heads": (lambda: GPT(width=30), ValueError, "4 heads cannot share a width of 30"),
    "another attention": (lambda: GPT(attention="flash"), ValueError, "expected attention="),
    "too much text": (lambda: text(10**9), ValueError, "holds … bytes"),
}


@refusals(REFUSALS)
def test_what_cannot_be_built_is_refused(call, error, words):
    refused(call, error, words)


@pytest.mark.parametrize(
    ("model", "x", "y", "classes"),
    [
        (GPT(**SMALL), torch.randint(64, (3, 16)), torch.randint(64, (3, 16)), 64),
        (Llama(**SMALL), torch.randint(64, (3, 16)), torch.randint(64, (3, 16)), 64),
        (LSTM(64, 16), torch.randint(64, (3, 16)), torch.randint(64, (3, 16)), 64),
        (MLP(8, 16, 5), torch.randn(3, 8), torch.randint(5, (3,)), 5),
        (ConvNet(8, 5), torch.randn(3, 3, 16, 16), torch.randint(5, (3,)), 5),
    ],
    ids=["GPT", "Llama", "LSTM", "MLP", "ConvNet"],
)
def test_every_model_gives_predictions_or_the_mean_cross_entropy(model, x, y, classes):
    predictions = model(x)
    assert predictions.shape == (*y.shape, classes)
    torch.testing.assert_close(model(x, y), F.cross_entropy(predictions.flatten(0, -2), y.flatten()))
    assert abs(model(x, y).item() - math.log(classes)) < 2


def test_a_gpt_learns_the_text():
    torch.manual_seed(0)
    model, (x, y) = GPT(layers=1, width=64, context=32), text_batch(8, 32, nbytes=100_000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = model(x, y).item()
    for _ in range(30):
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
    assert model(x, y).item() < first / 2


def test_text_is_the_standard_librarys_own_bytes():
    first = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[0].read_bytes()
    assert bytes(text(len(first)).tolist()) == first
    changed = text(100)
    changed.fill_(0)
    assert bytes(text(100).tolist()) == first[:100], "a reader who changes the text changes only a copy"


def test_a_batch_is_windows_of_the_text_with_targets_one_byte_later_and_leaves_torchs_random_numbers_alone():
    before = torch.get_rng_state()
    x, y = text_batch(4, 32, seed=3, nbytes=50_000)
    assert torch.equal(torch.get_rng_state(), before)
    assert x.shape == y.shape == (4, 32) and x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    whole = bytes(text(50_000).tolist())
    assert all(bytes(row.tolist()) in whole for row in x)
    assert torch.equal(x, text_batch(4, 32, seed=3, nbytes=50_000)[0])
    assert not torch.equal(x, text_batch(4, 32, seed=4, nbytes=50_000)[0])


def test_lengths_are_a_committed_list_of_positive_whole_numbers():
    assert len(lengths()) == 1024
    assert all(type(length) is int and length > 0 for length in lengths())
    assert len(set(lengths())) > 100
