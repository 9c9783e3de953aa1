"""Activations of a split GPT: what the forward of a block keeps for backward on one of t ranks, term by term.

Korthikanti et al. 2022 count the bytes that one block keeps in 16 bits, with dropout, for s tokens, b texts, width h
and a heads (what is of a·s·s, which only attention by hand keeps, is left out):

    on one rank                s·b·h·34              section 4.1
    tensor parallel            s·b·h·(10 + 24/t)     4.2.1: 24 are inside attention and feed-forward, 10 between them
    and sequence parallel      s·b·h·34/t            4.2.2

The 10 are, of each half of the block, the input of its norm (2), the norm's output, which is the column parallel
layer's input (2), and the mask of its dropout (1). Three things are different here. Two numbers a token for each norm,
4·b·s bytes each, one a head and token in attention, 4·b·a·s, and its random state are counted too. Without dropout
there are no masks: 32, 8 + 24/t and 32/t. And a column parallel layer that keeps its gathered input (`keep_gathered`)
keeps 4·s·b·h on every rank: 4 + 28/t; the paper's, and ours by default, gathers it again in backward.

Before and after the blocks (`step_activations`), a rank keeps of the logits one matrix of s·b·v/t elements, which is
their gradient already, and of the embeddings where each token's row is, and one byte that says whether it is here.
"""

from __future__ import annotations

from memlab.checking import one_of
from memlab.memory_arithmetic import Breakdown, Term, Transformer, gpt
from memlab.memory_arithmetic.ledger import Piece, elements, in_numbers
from memlab.memory_arithmetic.ops import STREAM, Setting, kept, layer_norm
from memlab.memory_arithmetic.passes import left_by_a_block
from memlab.memory_arithmetic.step import HARDWARE, refuse_attention, refuse_dropout, refuse_sizes
from memlab.tensor_parallelism.arithmetic import ITEMSIZES, refuse_ranks
from memlab.tensor_parallelism.cuts import share

BETWEEN = ("norm1", "norm2", "branch")
"""Words in the names of what lies between two halves of a block."""
GATHERED = ("output of norm1", "output of norm2")


def block_activations(
    model: Transformer,
    batch: int,
    tokens: int,
    ranks: int,
    *,
    precision: str = "mixed",
    hardware: str = "gpu",
    dropout: float = 0.0,
    sequence_parallel: bool = False,
    keep_gathered: bool = False,
) -> Breakdown:
    """What one block's forward keeps for backward on one of so many ranks, term by term.

    batch, tokens: of the whole batch, which all ranks work on. hardware: "gpu" (cuDNN's attention in 16 bits, the
    memory-efficient kernel in FP32) or "cpu". sequence_parallel, keep_gathered: as of `TensorParallelGPT`.

    Raises ValueError for sizes that the ranks do not divide, and for attention that no fused kernel computes.

    In units of s·b·h, without dropout, which has 2 more between the halves of a block; what is above 8 + 24/t, and
    above 32/t, are norms' and attention's numbers a token:

    >>> story = Transformer(layers=24, width=2048, heads=16, vocabulary=256, context=1024)
    >>> for ranks in (1, 2, 4, 8):
    ...     kept = [block_activations(story, 8, 1024, ranks, sequence_parallel=cut).nbytes for cut in (False, True)]
    ...     print(ranks, [round(nbytes / (8 * 1024 * 2048), 2) for nbytes in kept])
    1 [32.04, 32.04]
    2 [20.02, 16.02]
    4 [14.02, 8.01]
    8 [11.01, 4.0]
    """
    count = _Count(
        model,
        batch,
        tokens,
        ranks,
        precision=precision,
        hardware=hardware,
        dropout=dropout,
        sequence_parallel=sequence_parallel,
        keep_gathered=keep_gathered,
    )
    return Breakdown("end of forward", "one block", tuple(count.block()))


def step_activations(model: Transformer, batch: int, tokens: int, ranks: int, **options) -> Breakdown:
    """What the whole model's forward keeps, loss included, when backward begins. options: as of `block_activations`.

    >>> story = Transformer(layers=24, width=2048, heads=16, vocabulary=256, context=1024)
    >>> for options in ({}, {"sequence_parallel": True, "keep_gathered": True}, {"sequence_parallel": True}):
    ...     print(round(step_activations(story, 8, 1024, 8, **options).nbytes / 2**30, 2))
    4.19
    2.85
    1.51
    """
    count = _Count(model, batch, tokens, ranks, **options)
    terms = [*count.embeddings(), *count.block(model.layers), *count.end()]
    return Breakdown("end of forward", "the whole model", tuple(term for term in terms if term.nbytes))


class _Count:
    """The sizes of a rank, and the terms that follow from them."""

    def __init__(
        self,
        model: Transformer,
        batch: int,
        tokens: int,
        ranks: int,
        *,
        precision: str = "mixed",
        hardware: str = "gpu",
        dropout: float = 0.0,
        sequence_parallel: bool = False,
        keep_gathered: bool = False,
    ):
        refuse_ranks(model, ranks)
        one_of("precision", precision, tuple(ITEMSIZES))
        one_of("hardware", hardware, HARDWARE)
        refuse_sizes(model, batch, tokens)
        refuse_dropout(dropout)
        refuse_attention(model, tokens, "fp32" if precision == "fp32" else "bf16", "fused", dropout, hardware)
        if sequence_parallel:
            share(batch * tokens, "rows (batch · tokens)", ranks)
        e = ITEMSIZES[precision]
        self.model, self.ranks = model, ranks
        self.between = ranks if sequence_parallel else 1
        self.gathered = 1 if keep_gathered else self.between
        self.setting = Setting(
            compute=e,
            stream=e,
            autocast=False,
            gpu=hardware == "gpu",
            by_hand=False,
            dropout=dropout > 0,
            batch=batch,
            heads=model.heads // ranks,
        )
        self.symbols = model.symbols | {"b": batch, "s": tokens, "S": -(-tokens // 32) * 32}

    def block(self, layers: int = 1) -> list[Term]:
        """What blocks keep: the pieces of a whole one, each by who holds it."""
        pieces = left_by_a_block(self.setting, gpt)
        return [self.term(piece, layers * n) for piece, n in pieces.items() if piece.category == "activation"]

    def embeddings(self) -> list[Term]:
        """What is kept before the blocks. Their input, a block's output each, is counted with the blocks."""
        pieces = []
        if self.ranks > 1:
            pieces = [
                kept("rows of the tokens", "b·s", 8, "embedding saves its indices, int64"),
                kept("tokens that are elsewhere", "b·s", 1, "masked_fill saves its bool mask"),
                kept("positions that are elsewhere", "s", 1, "masked_fill saves its bool mask"),
            ]
        pieces.append(kept("rows of the positions", "s", 8, "embedding saves its indices, int64"))
        made = [self._made(piece, 1, 1) for piece in pieces]
        if self.setting.dropout:
            mask = kept("mask of embeddings", STREAM, 1 if self.setting.gpu else self.setting.stream, "dropout's mask")
            made.append(self._made(mask, 1, self.between))
        return made

    def end(self) -> list[Term]:
        """What is kept after the blocks, a variable's loss among it."""
        c = self.setting
        norm = layer_norm(c, "norm", "input of norm", "output of norm").forward
        pieces = [kept("input of norm", STREAM, c.stream, "residual sum; the final norm saves its input"), *norm]
        made = [self._made(p, 1, self.gathered if p.name.startswith("output") else self.between) for p in pieces]
        logits = kept("gradient of the logits", "b·s·v", c.compute, "the loss makes it in forward, where they were")
        one = [kept("loss", "1", 4, "a variable holds it"), kept("number of targets", "1", 8, "the mean is over these")]
        return [*made, self._made(logits, 1, self.ranks), *(self._made(p, 1, 1) for p in one)]

    def term(self, piece: Piece, times: int = 1) -> Term:
        """A piece as a rank has it."""
        return self._made(piece, times, self._parts(piece))

    def _parts(self, piece: Piece) -> int:
        """Into how many parts the ranks have cut it."""
        if piece.name in GATHERED:
            return self.gathered
        if any(name in piece.name for name in BETWEEN):
            return self.between
        return self.ranks if "b" in piece.size.split("·") else 1

    def _made(self, piece: Piece, times: int, parts: int) -> Term:
        cut = lambda text, sign: f"{text} / {sign}" if parts > 1 else text  # noqa: E731
        words, numbers = cut(piece.size, "t"), cut(in_numbers(piece.size, self.symbols), parts)
        many = f"{times} × " if times > 1 else ""
        formula = f"{many}{words} × {piece.itemsize} B = {many}{numbers} × {piece.itemsize}"
        nbytes = times * elements(piece.size, self.symbols) // parts * piece.itemsize
        return Term(piece.name, piece.category, nbytes, formula, piece.source)
