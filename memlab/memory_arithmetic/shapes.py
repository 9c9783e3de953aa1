"""Shapes: what a transformer's sizes are called, and every parameter tensor that follows from them."""

from __future__ import annotations

import difflib
from collections import Counter
from dataclasses import dataclass

from memlab.checking import divisors, one_of, positive, true_or_false
from memlab.memory_arithmetic.ledger import elements

FAMILIES = ("gpt", "llama")


def added(sizes: list[str]) -> str:
    """Sizes added up, with like products gathered.

    >>> added(["h", "3·h·h", "h", "h·h"])
    '4·h·h + 2·h'
    """
    found: Counter[tuple[str, ...]] = Counter()
    for size in sizes:
        factors = size.split("·")
        times = int(factors.pop(0)) if factors[0].isdigit() else 1
        found[tuple(factors)] += times
    ordered = sorted(found.items(), key=lambda item: (-len(item[0]), item[0]))
    return " + ".join("·".join(([str(times)] if times > 1 else []) + list(factors)) for factors, times in ordered)


@dataclass(frozen=True)
class Transformer:
    """The sizes of a decoder-only transformer, of one of two families.

    "gpt": learned positions, LayerNorm, biases everywhere but in the head, GELU between width and `hidden`
      (memlab.book.workloads.GPT, and GPT-2 when `tied`). Radford et al. 2019.
    "llama": rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases (memlab.book.workloads.Llama).
      Touvron et al. 2023.

    kv_heads: heads of keys and values (None: as many as heads; a "gpt" has no other choice). hidden: width of the
    feed-forward layer (None: 4 × width). tied: the head is the token embedding.

    Raises TypeError for a size that is no int and for tied if it is no bool; ValueError for a size below 1, for heads
    that do not divide the width, and for kv_heads that do not divide the heads.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    kv_heads: int | None = None
    hidden: int | None = None
    family: str = "gpt"
    tied: bool = False

    def __post_init__(self):
        one_of("family", self.family, FAMILIES)
        true_or_false("tied", self.tied)
        for name in ("kv_heads", "hidden"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, {"kv_heads": self.heads, "hidden": _four_times(self.width)}[name])
        for name in ("layers", "width", "heads", "vocabulary", "context", "kv_heads", "hidden"):
            positive(name, getattr(self, name))
        if self.width % self.heads:
            raise ValueError(
                f"{self.heads} heads cannot share a width of {self.width}; pick heads that divide it "
                f"({divisors(self.width)})"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.kv_heads} key-value heads cannot serve {self.heads} heads; pick kv_heads that divide them "
                f"({divisors(self.heads)})"
            )
        if self.family == "gpt" and self.kv_heads != self.heads:
            raise ValueError(
                f"expected as many kv_heads as heads ({self.heads}) in family 'gpt', found {self.kv_heads}; "
                f"grouped keys are for family='llama'"
            )
        if self.family == "llama" and self.width % (2 * self.heads):
            raise ValueError(
                f"rotary positions turn pairs of features, but {self.heads} heads share a width of {self.width} in "
                f"pieces of {self.width // self.heads}; pick heads with an even width each"
            )

    @property
    def symbols(self) -> dict[str, int]:
        """The values of h, a, d, g, f, v, c and L (see `ledger`)."""
        return {
            "h": self.width,
            "a": self.heads,
            "d": self.width // self.heads,
            "g": self.kv_heads,
            "f": self.hidden,
            "v": self.vocabulary,
            "c": self.context,
            "L": self.layers,
        }

    @property
    def block(self) -> dict[str, str]:
        """The parameter tensors of one block, in PyTorch's order: name → size in symbols."""
        if self.family == "llama":
            return {
                "norm1.weight": "h",
                "attention.q.weight": "h·h",
                "attention.k.weight": "g·d·h",
                "attention.v.weight": "g·d·h",
                "attention.out.weight": "h·h",
                "norm2.weight": "h",
                "feed_forward.gate.weight": "f·h",
                "feed_forward.up.weight": "f·h",
                "feed_forward.down.weight": "f·h",
            }
        return {
            "norm1.weight": "h",
            "norm1.bias": "h",
            "attention.qkv.weight": "3·h·h",
            "attention.qkv.bias": "3·h",
            "attention.out.weight": "h·h",
            "attention.out.bias": "h",
            "norm2.weight": "h",
            "norm2.bias": "h",
            "feed_forward.up.weight": "f·h",
            "feed_forward.up.bias": "f",
            "feed_forward.down.weight": "f·h",
            "feed_forward.down.bias": "h",
        }

    @property
    def before(self) -> dict[str, str]:
        """The parameter tensors before the blocks: name → size in symbols."""
        return {"token_embedding.weight": "v·h"} | (
            {"position_embedding.weight": "c·h"} if self.family == "gpt" else {}
        )

    @property
    def after(self) -> dict[str, str]:
        """The parameter tensors after the blocks: name → size in symbols."""
        norm = {"norm.weight": "h"} | ({"norm.bias": "h"} if self.family == "gpt" else {})
        return norm | ({} if self.tied else {"head.weight": "v·h"})

    @property
    def tensors(self) -> dict[str, str]:
        """Every parameter tensor, in PyTorch's order: name → size in symbols."""
        blocks = {f"blocks.{i}.{name}": size for i in range(self.layers) for name, size in self.block.items()}
        return self.before | blocks | self.after

    @property
    def parameters(self) -> int:
        """How many numbers are learned."""
        ends = sum(elements(size, self.symbols) for size in (self.before | self.after).values())
        return ends + self.layers * self.block_parameters

    @property
    def block_parameters(self) -> int:
        """Parameters of one block: 12·h·h + 13·h for a GPT with the usual hidden = 4 · width."""
        return elements(added(list(self.block.values())), self.symbols)

    @property
    def parameter_tensors(self) -> int:
        """In how many tensors they lie: an optimizer keeps one step counter for each."""
        return len(self.before) + self.layers * len(self.block) + len(self.after)


def _four_times(width: int) -> int:
    positive("width", width)
    return 4 * width


def _gpt2(layers: int, width: int, heads: int) -> Transformer:
    return Transformer(layers, width, heads, vocabulary=50_257, context=1024, tied=True)


def _llama(layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocabulary: int, context: int):
    return Transformer(layers, width, heads, vocabulary, context, kv_heads, hidden, "llama")


PRESETS = {
    "GPT-2 small": _gpt2(12, 768, 12),
    "GPT-2 medium": _gpt2(24, 1024, 16),
    "GPT-2 large": _gpt2(36, 1280, 20),
    "GPT-2 XL": _gpt2(48, 1600, 25),
    "GPT-3 175B": Transformer(96, 12_288, 96, vocabulary=50_257, context=2048, tied=True),
    "Llama-2 7B": _llama(32, 4096, 32, 32, 11_008, 32_000, 4096),
    "Llama-2 70B": _llama(80, 8192, 64, 8, 28_672, 32_000, 4096),
    "Llama-3 8B": _llama(32, 4096, 32, 8, 14_336, 128_256, 8192),
    "Llama-3 70B": _llama(80, 8192, 64, 8, 28_672, 128_256, 8192),
}
"""Published models. Sources: Radford et al. 2019 (GPT-2), Brown et al. 2020, table 2.1 (GPT-3), Touvron et al. 2023b
(Llama 2), Dubey et al. 2024 (Llama 3), and the configurations published with the weights."""


def preset(name: str) -> Transformer:
    """A published model's sizes. Raises ValueError for an unknown name, with the nearest one that is known.

    >>> preset("Llama-3 8B").parameters
    8030261248
    """
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    lowered = {known.lower(): known for known in PRESETS}
    near = difflib.get_close_matches(str(name).lower(), lowered, n=1, cutoff=0.4)
    hint = f"did you mean {lowered[near[0]]!r}? " if near else ""
    raise ValueError(f"expected the name of a preset, found {name!r}; {hint}known: {', '.join(PRESETS)}")
