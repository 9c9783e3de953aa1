"""The models and the data that every chapter runs: small, readable, and the same on every machine.

Text is bytes of Python's own standard library: real, already on the reader's disk, never downloaded. It differs
between Python versions, so no compared figure depends on its content. What depends on *lengths* reads them from a
committed list, `lengths()`.

Every model is called as `model(x, y)` and returns the loss, as `model(x)` it returns predictions.
"""

from __future__ import annotations

import functools
import json
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. `attention` is "fused" (PyTorch's scaled_dot_product_attention) or "by hand" (stores T×T)."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128
    vocabulary: int = 256
    dropout: float = 0.0
    attention: str = "fused"

    def __post_init__(self):
        if self.width % self.heads:
            raise ValueError(f"{self.heads} heads cannot share a width of {self.width}; pick heads that divide it")
        if self.attention not in ("fused", "by hand"):
            raise ValueError(f"expected attention='fused' or 'by hand', found {self.attention!r}")


class Attention(nn.Module):
    """Causal self-attention. x: (batch, tokens, width) → the same shape."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.config.heads
        qkv = self.qkv(x).view(batch, tokens, 3, heads, width // heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, width / heads)
        if self.config.attention == "fused":
            dropout = self.config.dropout if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) * (width // heads) ** -0.5  # (batch, heads, tokens, tokens)
            future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            mixed = self.dropout(weights) @ v
        mixed = mixed.transpose(1, 2).reshape(batch, tokens, width)
        return self.dropout(self.out(mixed))


class FeedForward(nn.Module):
    """Width → 4 × width → width. x: (batch, tokens, width) → the same shape."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = F.gelu(hidden)
        return self.dropout(self.down(hidden))


class Block(nn.Module):
    """One layer of a GPT: attention, then feed-forward, each on a normalised copy and added to the stream."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.feed_forward(self.norm2(x))
        return x


class GPT(nn.Module):
    """A decoder-only transformer over bytes. `GPT(layers=4, width=256)` or `GPT(GPTConfig(...))`.

    x, y: (batch, tokens) of int64. `model(x)` gives logits (batch, tokens, vocabulary), `model(x, y)` the mean
    cross-entropy as a scalar.
    """

    def __init__(self, config: GPTConfig | None = None, **sizes):
        super().__init__()
        self.config = config = config or GPTConfig(**sizes)
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if x.shape[1] > self.config.context:
            raise ValueError(f"expected at most {self.config.context} tokens (the context), found {x.shape[1]}")
        positions = torch.arange(x.shape[1], device=x.device)
        stream = self.token_embedding(x) + self.position_embedding(positions)
        stream = self.dropout(stream)
        for block in self.blocks:
            stream = block(stream)
        logits = self.head(self.norm(stream))
        if y is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class MLP(nn.Module):
    """Fully connected layers with ReLU between. x: (batch, features) → (batch, classes)."""

    def __init__(self, features: int = 256, width: int = 512, classes: int = 16, layers: int = 3):
        super().__init__()
        widths = [features] + [width] * (layers - 1) + [classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        logits = self.layers[-1](x)
        return logits if y is None else F.cross_entropy(logits, y)


class ConvNet(nn.Module):
    """Two convolutions with BatchNorm, one residual. x: (batch, 3, side, side) → (batch, classes)."""

    def __init__(self, channels: int = 32, classes: int = 10):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.body = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.norm1(self.stem(x)).relu()
        x = (x + self.norm2(self.body(x))).relu()
        logits = self.head(x.mean((2, 3)))
        return logits if y is None else F.cross_entropy(logits, y)


class LSTM(nn.Module):
    """Predicts the next byte with a recurrent network. x, y: (batch, tokens) of int64."""

    def __init__(self, vocabulary: int = 256, width: int = 128, layers: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        hidden, _ = self.lstm(self.embedding(x))
        logits = self.head(hidden)
        return logits if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())


@functools.cache
def _library_text(nbytes: int) -> bytes:
    found = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= nbytes:
            return bytes(found[:nbytes])
    raise ValueError(f"Python's standard library holds {len(found):,} bytes of top-level modules, not {nbytes:,}")


def text(nbytes: int = 1_000_000) -> Tensor:
    """The first `nbytes` bytes of Python's standard library, in alphabetical order of module, as (nbytes,) uint8.

    Raises ValueError when the library at hand is smaller.
    """
    return torch.frombuffer(bytearray(_library_text(nbytes)), dtype=torch.uint8)


def text_batch(batch: int, tokens: int, seed: int = 0, nbytes: int = 1_000_000) -> tuple[Tensor, Tensor]:
    """`batch` random windows of the text: x and, one byte later, y; both (batch, tokens) of int64."""
    data = _library_text(nbytes)
    starts = random.Random(seed).sample(range(len(data) - tokens - 1), batch)
    windows = torch.tensor([list(data[start : start + tokens + 1]) for start in starts])
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@functools.cache
def lengths() -> tuple[int, ...]:
    """Lengths in bytes of 1,024 real documents (docstrings), a committed list: the same on every machine."""
    return tuple(json.loads((Path(__file__).parent / "lengths.json").read_text())["lengths"])
