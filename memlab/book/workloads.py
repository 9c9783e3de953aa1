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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memlab.gradient_accumulation import document_mask


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
    """Causal self-attention. x: (batch, tokens, width) → the same shape.

    mask: (batch, 1, tokens, tokens), added to the scores: 0 where token i may look at token j, −inf where it may not;
    None: at every j <= i.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.config.heads
        qkv = self.qkv(x).view(batch, tokens, 3, heads, width // heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, width / heads)
        if self.config.attention == "fused":
            dropout = self.config.dropout if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None)
        else:
            scores = q @ k.transpose(-2, -1) * (width // heads) ** -0.5  # (batch, heads, tokens, tokens)
            if mask is None:
                future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
                weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            else:
                weights = (scores + mask).softmax(-1)
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

    block = Block

    def __init__(self, config: GPTConfig | None = None, **sizes):
        super().__init__()
        self.config = config = config or GPTConfig(**sizes)
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(self.block(config) for _ in range(config.layers))
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


class Embeddings(nn.Module):
    """What a GPT does first. x: (batch, tokens) of int64 → stream (batch, tokens, width)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        stream = self.token_embedding(x) + self.position_embedding(positions)
        return self.dropout(stream)


class Head(nn.Module):
    """What a GPT does last. stream: (batch, tokens, width) → logits (batch, tokens, vocabulary)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        return self.head(self.norm(stream))


def gpt_in_layers(config: GPTConfig) -> list[Callable[[], nn.Module]]:
    """A GPT as functions that make its layers, one after the other: embeddings, blocks, head.

    With one seed they draw the weights that `GPT(config)` draws.
    """
    return [
        functools.partial(Embeddings, config),
        *[functools.partial(Block, config) for _ in range(config.layers)],
        functools.partial(Head, config),
    ]


def name_in_layers(name: str, layers: int) -> str:
    """The name that a parameter of a GPT has in the list of its layers.

    >>> name_in_layers("blocks.2.norm1.weight", 4), name_in_layers("head.weight", 4)
    ('3.norm1.weight', '5.head.weight')
    """
    if name.startswith("blocks."):
        _, number, rest = name.split(".", 2)
        return f"{int(number) + 1}.{rest}"
    return f"0.{name}" if "embedding" in name else f"{layers + 1}.{name}"


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The mean loss of a GPT's logits (batch, tokens, vocabulary) against y (batch, tokens), a scalar."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class PackedBlock(Block):
    """A block whose attention looks where a mask allows. x: (batch, tokens, width); mask: as of Attention."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        x = x + self.feed_forward(self.norm2(x))
        return x


class PackedGPT(GPT):
    """A GPT that also reads packed rows: `model(*pack_rows(...))`. Its sizes, weights and state dict are a GPT's.

    documents, positions: (batch, tokens) of int64: which document of its row a token is of, and how far in it stands.
    No token looks into another document. Without both it is a GPT.
    """

    block = PackedBlock

    def forward(
        self, x: Tensor, y: Tensor | None = None, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        if (documents is None) != (positions is None):
            raise ValueError("expected documents and positions together, found one of them; pack_rows() makes both")
        if documents is None:
            return super().forward(x, y)
        if x.shape[1] > self.config.context:
            raise ValueError(f"expected at most {self.config.context} tokens (the context), found {x.shape[1]}")
        stream = self.token_embedding(x) + self.position_embedding(positions)
        mask = document_mask(documents, stream.dtype)
        stream = self.dropout(stream)
        for block in self.blocks:
            stream = block(stream, mask)
        logits = self.head(self.norm(stream))
        if y is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama. `heads` queries share `kv_heads` keys and values (None: as many); hidden None is 4 × width."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    kv_heads: int | None = None
    hidden: int | None = None
    context: int = 128
    vocabulary: int = 256

    def __post_init__(self):
        if self.width % (2 * self.heads):
            raise ValueError(
                f"{self.heads} heads cannot share a width of {self.width} in pairs, which rotary positions need; "
                f"pick heads with width % (2 * heads) == 0"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(
                f"{self.kv_heads} key-value heads cannot serve {self.heads} heads; pick kv_heads that divide heads"
            )


def rotary(positions: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, (tokens, size) each, made in FP32. Su et al. 2021, section 3.4.2."""
    frequencies = 10_000.0 ** -(torch.arange(0, size, 2, device=positions.device).float() / size)
    angles = positions[:, None] * frequencies  # (tokens, size / 2)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (i, i + size / 2) of features by its position's angle. x: (batch, heads, tokens, size)."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class GroupedAttention(nn.Module):
    """Causal self-attention with rotary positions; `heads / kv_heads` queries read the same keys and values.

    x: (batch, tokens, width) → the same shape. `enable_gqa` is what Transformers passes too: a kernel that can read
    a key for several queries then needs no copies of it. Ainslie et al. 2023.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.size = config.width // config.heads
        self.q = nn.Linear(config.width, self.heads * self.size, bias=False)
        self.k = nn.Linear(config.width, self.kv_heads * self.size, bias=False)
        self.v = nn.Linear(config.width, self.kv_heads * self.size, bias=False)
        self.out = nn.Linear(self.heads * self.size, config.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = rotate(self.q(x).view(batch, tokens, self.heads, self.size).transpose(1, 2), cosine, sine)
        k = rotate(self.k(x).view(batch, tokens, self.kv_heads, self.size).transpose(1, 2), cosine, sine)
        v = self.v(x).view(batch, tokens, self.kv_heads, self.size).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class SwiGLU(nn.Module):
    """Width → hidden, gated by a second projection → width. x: (batch, tokens, width). Shazeer 2020."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        hidden = config.hidden or 4 * config.width
        self.gate = nn.Linear(config.width, hidden, bias=False)
        self.up = nn.Linear(config.width, hidden, bias=False)
        self.down = nn.Linear(hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """One layer of a Llama: attention, then feed-forward, each on a normalised copy and added to the stream."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = GroupedAttention(config)
        self.norm2 = nn.RMSNorm(config.width, eps=1e-5)
        self.feed_forward = SwiGLU(config)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cosine, sine)
        x = x + self.feed_forward(self.norm2(x))
        return x


class Llama(nn.Module):
    """A Llama over bytes. `Llama(layers=4, width=256, heads=4, kv_heads=2)` or `Llama(LlamaConfig(...))`.

    x, y: (batch, tokens) of int64. `model(x)` gives logits (batch, tokens, vocabulary), `model(x, y)` the mean
    cross-entropy as a scalar. Touvron et al. 2023.
    """

    def __init__(self, config: LlamaConfig | None = None, **sizes):
        super().__init__()
        self.config = config = config or LlamaConfig(**sizes)
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        config = self.config
        if x.shape[1] > config.context:
            raise ValueError(f"expected at most {config.context} tokens (the context), found {x.shape[1]}")
        stream = self.token_embedding(x)
        positions = torch.arange(x.shape[1], device=x.device)
        cosine, sine = rotary(positions, config.width // config.heads, stream.dtype)
        for block in self.blocks:
            stream = block(stream, cosine, sine)
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
