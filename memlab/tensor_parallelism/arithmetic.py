"""Arithmetic of a split GPT: what a rank holds of weights, and what it sends.

Of a block of width h on t ranks all matrices are cut, 12·h·h/t, and the biases of column parallel layers, 7·h/t; norms
and the biases of row parallel layers, 6·h, are whole on every rank. Tables and the head are cut along their rows.

A block sends two all-reduces of b·s·h each way (b texts of s tokens). With sequence parallelism each is a
reduce-scatter and an all-gather, which send as much together; then one more all-gather for every input that is gathered
again in backward, and the gradients of the norms, 4·h, for each rank has seen only its rows. (Those of whole biases
need no sum: a row parallel layer's backward gathers the gradients of all rows anyway.)

What forward keeps is on the next page, `activations`.

Sources: Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti et al. 2022, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from memlab.checking import one_of, positive
from memlab.data_parallelism.arithmetic import RankBytes
from memlab.memory_arithmetic import Transformer
from memlab.memory_arithmetic.ledger import elements
from memlab.memory_arithmetic.step import refuse_sizes
from memlab.ranks import ring_bytes
from memlab.tensor_parallelism.cuts import share

ITEMSIZES = {"fp32": 4, "bf16": 2, "mixed": 2}
"""Precision → bytes of a weight, of a gradient and of what is kept."""
STATE_BYTES = {"fp32": 8, "bf16": 4, "mixed": 12}
"""Precision → bytes of AdamW's states a parameter; "mixed" has FP32 master weights among them."""


class RankParameters(NamedTuple):
    """Parameters of one rank, in elements: its parts of those that are cut, and those that all ranks hold."""

    cut: int
    whole: int

    @property
    def parameters(self) -> int:
        """The sum."""
        return self.cut + self.whole


class Sent(NamedTuple):
    """Collectives of one kind in a step.

    where: what they are for. tensor_bytes: of the whole tensor, each time. times: how often. ranks: how many take part.
    """

    where: str
    phase: str
    collective: str
    times: int
    tensor_bytes: int
    ranks: int

    @property
    def sent_bytes(self) -> int:
        """What each rank sends in all of them, in rings."""
        return self.times * ring_bytes(self.collective, self.tensor_bytes, self.ranks)


# ---- parameters


def rank_parameters(model: Transformer, ranks: int) -> RankParameters:
    """How many parameters a rank of `TensorParallelGPT` holds.

    Raises ValueError for sizes that the ranks do not divide, and for a family that is not "gpt".

    >>> story = Transformer(layers=24, width=2048, heads=16, vocabulary=256, context=1024)
    >>> rank_parameters(story, 8)
    RankParameters(cut=151431168, whole=299008)
    """
    refuse_ranks(model, ranks)
    cut = whole = 0
    for name, size in model.tensors.items():
        count = elements(size, model.symbols)
        if "norm" in name or name.endswith(("out.bias", "down.bias")):
            whole += count
        else:
            cut += count // ranks
    return RankParameters(cut, whole)


def rank_states(model: Transformer, ranks: int, *, precision: str = "mixed", counter_bytes: int = 0) -> RankBytes:
    """Bytes of a rank's parameters, gradients and AdamW's states. counter_bytes: 4 a tensor where AdamW is fused.

    >>> story = Transformer(layers=24, width=2048, heads=16, vocabulary=256, context=1024)
    >>> [round(rank_states(story, ranks).nbytes / 2**30, 2) for ranks in (1, 2, 4, 8)]
    [18.06, 9.03, 4.52, 2.26]
    """
    one_of("precision", precision, tuple(ITEMSIZES))
    count = rank_parameters(model, ranks).parameters
    states = STATE_BYTES[precision] * count + counter_bytes * model.parameter_tensors
    return RankBytes(ITEMSIZES[precision] * count, ITEMSIZES[precision] * count, states)


# ---- what is sent


def step_traffic(
    model: Transformer,
    batch: int,
    tokens: int,
    ranks: int,
    *,
    precision: str = "mixed",
    sequence_parallel: bool = False,
    keep_gathered: bool = False,
) -> list[Sent]:
    """What one rank sends in a forward and a backward, by place and collective; nothing on one rank.

    The optimizer's step sends nothing. Not here: what checkpoints send again, and queries that share keys.

    A step of the story's model on eight ranks, eight texts; 32 MiB a message, 98 all-reduces of them:

    >>> story = Transformer(layers=24, width=2048, heads=16, vocabulary=256, context=1024)
    >>> for cut in (False, True):
    ...     print(round(sent_bytes(step_traffic(story, 8, 1024, 8, sequence_parallel=cut)) / 2**30, 2))
    5.36
    6.7
    """
    refuse_ranks(model, ranks)
    one_of("precision", precision, tuple(ITEMSIZES))
    refuse_sizes(model, batch, tokens)
    if ranks == 1:
        return []
    e, rows, layers = ITEMSIZES[precision], batch * tokens, model.layers
    stream = rows * model.width * e
    sent: list[Sent] = []
    add = lambda *what: sent.append(Sent(*what, ranks))  # noqa: E731
    if sequence_parallel:
        add("embeddings", "forward", "reduce_scatter", 1, stream)
        add("blocks", "forward", "all_gather", 2 * layers, stream)
        add("blocks", "forward", "reduce_scatter", 2 * layers, stream)
        add("head", "forward", "all_gather", 1, stream)
    else:
        add("embeddings", "forward", "all_reduce", 1, stream)
        add("blocks", "forward", "all_reduce", 2 * layers, stream)
    add("loss: largest logit, Σ exp, logit at the target", "forward", "all_gather", 1, ranks * 3 * rows * 4)
    if sequence_parallel:
        again = [] if keep_gathered else [("head", 1), ("blocks", 2 * layers)]
        for where, times in again:
            add(f"{where}, input once more", "backward", "all_gather", times, stream)
        add("head", "backward", "reduce_scatter", 1, stream)
        add("blocks", "backward", "all_gather", 2 * layers, stream)
        add("blocks", "backward", "reduce_scatter", 2 * layers, stream)
        add("embeddings", "backward", "all_gather", 1, stream)
        add("gradients of norms", "backward", "all_reduce", 4 * layers + 2, model.width * e)
    else:
        add("head", "backward", "all_reduce", 1, stream)
        add("blocks", "backward", "all_reduce", 2 * layers, stream)
    return sent


def sent_bytes(sent: Iterable[Sent]) -> int:
    """What a rank sends in all messages of `step_traffic`, in bytes."""
    return sum(one.sent_bytes for one in sent)


def by_collective(sent: Iterable[Sent]) -> dict[str, int]:
    """Bytes by collective, as `Traffic.by_name` counts them."""
    found: dict[str, int] = {}
    for one in sent:
        found[one.collective] = found.get(one.collective, 0) + one.sent_bytes
    return found


# ---- what cannot be


def refuse_ranks(model: Transformer, ranks: int) -> None:
    """Raise ValueError for a model that cannot be split over so many ranks."""
    positive("ranks", ranks)
    one_of("family", model.family, ("gpt",))
    for size, what in (
        (model.heads, "heads"),
        (model.hidden, "hidden features"),
        (model.vocabulary, "entries of the vocabulary"),
        (model.context, "positions of the context"),
    ):
        share(size, what, ranks)
