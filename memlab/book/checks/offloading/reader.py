"""Exercise 2 of chapter 09: a step that moves more than it frees."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from memlab.book.checks.answers import Wrong, a_function, exercise, kind_of, same_bytes
from memlab.book.checks.gradient_checkpointing.witness import same
from memlab.book.checks.offloading.host import Host
from memlab.memory_timeline import Meter, Timeline


class Reader(nn.Module):
    """The exercise's model. tokens: (rows, length) of int64 → logits (rows, length, 256)."""

    def __init__(self, blocks: int = 4, width: int = 32):
        super().__init__()
        self.first, self.note = [], lambda hidden: hidden[:, 0].detach()
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.gate = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(blocks))
        self.up = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(3 * width, width) for _ in range(blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for gate, up, down in zip(self.gate, self.up, self.down, strict=True):
            hidden = F.silu(gate(x)) * up(x)
            self.first.append(self.note(hidden))
            x = x + down(hidden)
        return self.head(x)


# ---- first part


@functools.cache
def _parts() -> dict[str, int]:
    """The right answers, from what is saved and from who else holds it."""
    model, tokens, saved = Reader(), torch.randint(256, (4, 20)), []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor.detach()) or tensor, lambda tensor: tensor):
        model(tokens)
    weights, others = (
        {t.untyped_storage().data_ptr() for t in ts} for ts in (model.parameters(), [tokens, *model.first])
    )
    parts, seen = dict.fromkeys(("weight_bytes", "twice_bytes", "held_bytes"), 0), set()
    for tensor in saved:  # it keeps them all, so no address is given twice
        address = tensor.untyped_storage().data_ptr()
        if address in weights:
            parts["weight_bytes"] += tensor.nbytes
        elif address in seen:
            parts["twice_bytes"] += tensor.nbytes
        elif address in others:
            parts["held_bytes"] += tensor.nbytes
        seen.add(address)
    return parts


@exercise
def for_nothing(weight: object, twice: object, held: object) -> str:
    """Exercise 2, first part: what is sent of weights, what is sent twice, what somebody else holds."""
    right, tokens, one = _parts(), 4 * 20 * 8, 4 * 20 * 96 * 4
    head, views = 256 * 32 * 4, 4 * 4 * 96 * 4
    total = sum(right.values())
    slips = {
        "weight_bytes": {
            right["weight_bytes"] - head: "those of the blocks; the head has a weight, too",
            right["weight_bytes"] + head: "with the embedding's, which saves its indices alone",
            right["weight_bytes"] + 4 * (2 * 96 + 32) * 4 + 256 * 4: "with the biases, which nobody saves",
            head: "those of the head",
        },
        "twice_bytes": {
            right["twice_bytes"] + 4 * 20 * 32 * 4: "with the head's input, which is saved once",
            right["twice_bytes"] + right["held_bytes"] - tokens: "with hidden; who besides `down` saves it?",
            one: "one hidden's; which tensor goes into two layers?",
        },
        "held_bytes": {
            right["held_bytes"]
            - tokens: "what the plot holds; who else holds what was saved? Not only activations are",
            tokens: "what the caller holds; who else does?",
            views: "the views' own; a view holds all of its storage",
            views + tokens: "the views' own, and the tokens'; a view holds all of its storage",
            right["held_bytes"] + views: "with the views' own, which share hidden's storages",
            right["held_bytes"] + right["weight_bytes"]: "with the weights, which are counted above",
            right["held_bytes"] - tokens // 2: "with tokens of 4 bytes; an int64 has 8",
        },
    }
    hints = {
        "weight_bytes": "Which layers save a weight, and of how many numbers is it?",
        "twice_bytes": "Which tensor do two layers of a block read? The first time is not for nothing.",
        "held_bytes": "What is on the device at the turn in the second run, and is no parameter and not the loss?",
    }
    for found, name in ((weight, "weight_bytes"), (twice, "twice_bytes"), (held, "held_bytes")):
        if type(found) is int and (look := slips[name].get(found, "all together" if found == total else "")):
            raise Wrong(f"{name}: {found:,} B are {look}{'.' * (look[-1] != '?')}")
        same_bytes(found, right[name], name, hints[name], secret=True)
    return "Moved is what a hook saw, freed is what nobody holds any more: only the meter knows."


# ---- second part


@dataclass
class _Run:
    """A forward whose saved tensors are sent, and a backward."""

    first: list
    gradients: list[Tensor | None]
    turn: int
    timeline: Timeline


def _run(note: Callable, rows: int, blocks: int, width: int) -> _Run:
    torch.manual_seed(0)
    model, tokens, host = Reader(blocks, width), torch.randint(256, (rows, 20)), Host()
    model.note = note
    with Meter(model, inputs=tokens) as meter:
        with saved_tensors_hooks(host.send, host.fetch):
            loss = model(tokens).square().mean()
        turn = len(meter.timeline)
        loss.backward()
    return _Run(model.first, [p.grad for p in model.parameters()], turn, meter.timeline)


@functools.cache
def _reference(rows: int, blocks: int, width: int) -> _Run:
    return _run(lambda hidden: hidden[:, 0].detach().clone(), rows, blocks, width)


@exercise
def note(answer: object) -> str:
    """Exercise 2, second part: hidden (rows, length, units) → its first tokens (rows, units), which hold no more."""
    function = a_function(answer, "note(hidden)")
    for rows, blocks, width in ((4, 4, 32), (7, 2, 8), (1, 3, 16)):
        right = _reference(rows, blocks, width)
        found = _run(function, rows, blocks, width)
        texts = f"{rows} text{'s' * (rows > 1)} of 20 tokens"
        for mine, truth in zip(found.first, right.first, strict=True):
            if not isinstance(mine, Tensor):
                raise Wrong(f"{texts}: expected a tensor (rows, units), found {kind_of(mine)}.")
            if mine.shape != truth.shape:
                raise Wrong(f"{texts}: expected shape {tuple(truth.shape)}, found {tuple(mine.shape)}.")
            if mine.requires_grad:
                raise Wrong(f"{texts}: the note has a graph, which holds what it was made of. Detach it.")
            if not same(mine, truth) or mine.dtype != truth.dtype:
                raise Wrong(f"{texts}: the note does not have the values of each text's first token, hidden[:, 0].")
        if not all(
            grad is not None and same(grad, due) for grad, due in zip(found.gradients, right.gradients, strict=True)
        ):
            raise Wrong(f"{texts}: the notes are right, and the model's gradients are not any more.")
        if (more := found.timeline.totals[found.turn] - right.timeline.totals[right.turn]) > 0:
            look = " Is what you return a view?"
            if all(mine.untyped_storage().nbytes() <= mine.nbytes for mine in found.first):
                look = " Who else holds it?"
            elif rows == 1:
                look = (
                    " With one text, its first token's units lie one after the other in hidden, and .contiguous() and "
                    ".reshape copy only what does not."
                )
            raise Wrong(f"{texts}: the values are right, and at the turn {more:,} B are still held for them.{look}")
    sent = _run(lambda hidden: hidden[:, 0].detach(), 4, 4, 32)
    right = _reference(4, 4, 32)
    freed = sent.timeline.totals[sent.turn] - right.timeline.totals[right.turn]
    return f"{freed:,} B more are free at the turn, and not one byte more was moved."
