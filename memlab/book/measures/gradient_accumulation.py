"""Chapter 07: accumulation beside the full batch and a loop by hand, padding, and the largest batch that fits."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from memlab.book.epochs import WAYS, shapes, waste
from memlab.book.measures.timing import compared, interleaved
from memlab.book.steps import metered_step
from memlab.book.workloads import GPT, MLP, ConvNet, lengths, text_batch
from memlab.gradient_accumulation import accumulate, find_batch_size, labels
from memlab.memory_arithmetic import Transformer
from memlab.memory_timeline import imagine

IGNORED = -100


def accumulated_gradients(device: str, rounds: int) -> list[tuple]:
    """16 ragged texts in FP64, in k = 1 … 16 micro-batches: the gradient that is farthest from the full batch's."""
    sizes = [min(length, 64) for length in lengths()[:16]]
    texts = [tuple(tensor.to(device) for tensor in text_batch(1, size, seed=size)) for size in sizes]
    torch.manual_seed(0)
    model = GPT(layers=2, width=64, heads=2, context=64).to(device, torch.float64)

    def loss(batch, reduction="sum"):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction=reduction)

    loss(padded(texts), "mean").backward()
    expected = taken(model)
    apart = {}
    for k in range(1, 17):
        edges = [16 * i // k for i in range(k + 1)]
        accumulate(loss, [padded(texts[a:b]) for a, b in zip(edges, edges[1:], strict=False)], count=labels)
        apart[k] = max(float((a - b).norm() / b.norm()) for a, b in zip(taken(model), expected, strict=True))
    farthest = max(apart, key=apart.__getitem__)
    figure = f"{apart[farthest]:.1e} at most (with k = {farthest})"
    return [("accumulate / the full batch, FP64, 16 ragged texts, k = 1 … 16, by norm, per tensor", figure, "≤ 1e-13")]


def padded(texts: list[tuple]) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of (1, tokens) as one batch of the longest's tokens; labels of the padding are ignored."""
    longest = max(x.shape[1] for x, _ in texts)
    x = torch.cat([F.pad(x, (0, longest - x.shape[1])) for x, _ in texts])
    return x, torch.cat([F.pad(y, (0, longest - y.shape[1]), value=IGNORED) for _, y in texts])


def taken(model) -> list[torch.Tensor]:
    """The gradients, and none left. Without those of the keys' biases, whose true gradient is 0."""
    found = []
    for name, parameter in model.named_parameters():
        gradient, parameter.grad = parameter.grad, None
        if name.endswith("qkv.bias"):
            q, _, v = gradient.chunk(3)
            gradient = torch.cat((q, v))
        found.append(gradient)
    return found


def accumulation_time(device: str, rounds: int) -> list[tuple]:
    """`accumulate` against the same loop by hand: forwards and backwards of 8 micro-batches."""
    rows = []
    for layers, width, texts, tokens in ((4, 256, 2, 128), (2, 64, 1, 64)):
        model = GPT(layers=layers, width=width, heads=2, context=tokens).to(device)
        x, y = (tensor.to(device) for tensor in text_batch(8 * texts, tokens))
        group = list(zip(x.split(texts), y.split(texts), strict=True))

        def loss(batch, model=model):
            return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")

        def by_hand(model=model, group=group, loss=loss):
            count = sum((y != IGNORED).sum() for _, y in group)
            total = 0.0
            for batch in group:
                share = loss(batch) / count
                share.backward()
                total += share.detach()
            model.zero_grad()

        def ours(model=model, group=group, loss=loss):
            accumulate(loss, group, count=labels)
            model.zero_grad()

        times = interleaved({"accumulate": ours, "by hand": by_hand}, rounds)
        row = f"accumulate / a loop by hand, 8 micro-batches of {texts} × {tokens}, GPT {layers} × {width}"
        rows.append((row, compared(times, "accumulate", "by hand"), "≤ 1.02×"))
    return rows


def padding(device: str, rounds: int) -> list[tuple]:
    """How much of an epoch over the length list is padding, in batches of about or at most 8,192 tokens."""
    rows = []
    for way in WAYS:
        batches = shapes(way, 8192)
        largest = max(rows * tokens for rows, tokens, _ in batches)
        figure = f"{waste(batches):.1%}; {len(batches)} batches, the largest of {largest:,} tokens"
        rows.append(
            (f"padding, 1,024 lengths, 8,192 tokens a batch: {way}", figure, "≤ 2 %" if way == "packed" else "")
        )
    return rows


def largest_batch(device: str, rounds: int) -> list[tuple]:
    """The largest batch under a budget as predicted from small steps, and as proved."""
    sizes = Transformer(layers=4, width=768, heads=12, vocabulary=50_257, context=1024)

    def imagined(precision):
        def step(texts):
            metered_step(sizes, texts, 1024, precision=precision, micro_batches=2, first_step=True)

        with imagine("H100-80GB"):
            return find_batch_size(step, "16 GiB")

    def real(make, example):
        def step(examples):
            model = make().to(device)
            optimizer = torch.optim.AdamW(model.parameters())
            x, y = torch.randn(examples, *example, device=device), torch.randint(10, (examples,), device=device)
            model(x, y).backward()
            optimizer.step()

        return find_batch_size(step, "32 MiB")

    found = {f"GPT 4 × 768, {precision}, imagined, 16 GiB": imagined(precision) for precision in ("fp32", "autocast")}
    found["MLP, 32 MiB"] = real(lambda: MLP(classes=10), (256,))
    found["convolutions, 32 MiB"] = real(ConvNet, (3, 32, 32))
    return [
        (
            f"find_batch_size: predicted − true, {name}",
            f"{batch.predicted - batch.size:+} of {batch.size:,} ({len(batch.tried)} sizes run)",
            "within 1",
        )
        for name, batch in found.items()
    ]
