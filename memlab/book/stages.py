"""Models as chains of stages, each a module of one tensor: what a plan of checkpoints is made for."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memlab.book.workloads import GPT


class Embeddings(nn.Module):
    """x: (batch, tokens) of int64 → (batch, tokens, width)."""

    def __init__(self, model: GPT):
        super().__init__()
        self.tokens, self.positions = model.token_embedding, model.position_embedding
        self.dropout = model.dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device)))


class Residual(nn.Module):
    """Half a block: x: (batch, tokens, width) → x + part(norm(x)), the same shape."""

    def __init__(self, norm: nn.Module, part: nn.Module):
        super().__init__()
        self.norm, self.part = norm, part

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(self.norm(x))


class Loss(nn.Module):
    """x: (batch, tokens, width) → the mean cross-entropy of the head's logits against y: (batch, tokens) of int64."""

    def __init__(self, model: GPT, y: Tensor):
        super().__init__()
        self.norm, self.head, self.y = model.norm, model.head, y

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), self.y.flatten())


class Classified(nn.Module):
    """x: (batch, ...) with `features` numbers each → the mean cross-entropy of ten classes against y: (batch,)."""

    def __init__(self, features: int, y: Tensor):
        super().__init__()
        self.head, self.y = nn.Linear(features, 10), y

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x.flatten(1)), self.y)


def gpt_stages(model: GPT, y: Tensor) -> nn.ModuleList:
    """A GPT and its loss, in 2 · layers + 2 stages: embeddings, attention and feed-forward of each block, the loss.

    Their parameters are the model's own: `stage(x)` one after another is `model(x, y)`.
    """
    stages: list[nn.Module] = [Embeddings(model)]
    for block in model.blocks:
        stages += [Residual(block.norm1, block.attention), Residual(block.norm2, block.feed_forward)]
    return nn.ModuleList([*stages, Loss(model, y)])


def vgg_stages(y: Tensor, side: int = 64) -> nn.ModuleList:
    """A network in the manner of VGG and its loss: convolutions that grow wider while their maps shrink, in 13 stages.

    Three times three 3 × 3 convolutions, each with its ReLU, and a pooling; channels 8, 16 and 32. The first takes
    (batch, 3, side, side), side a multiple of 8; the last gives the mean cross-entropy against y: (batch,) of int64.
    Simonyan and Zisserman 2014, with fewer channels.
    """
    stages: list[nn.Module] = []
    before = 3
    for width in (8, 16, 32):
        for _ in range(3):
            stages.append(nn.Sequential(nn.Conv2d(before, width, 3, padding=1), nn.ReLU()))
            before = width
        stages.append(nn.MaxPool2d(2))
    return nn.ModuleList([*stages, Classified(before * (side // 8) ** 2, y)])
