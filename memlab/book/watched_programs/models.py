"""The models of watched programs: five of ours, and eight that are not, built from a config and never downloaded.

Each is small enough for a meter that sees every op. `amount`, between 0 and 1, says how large a batch is: of a text
its length, of pictures how many there are.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memlab.book.workloads import GPT, LSTM, MLP, ConvNet, Llama

CLASSES, SIDE, MELS = 10, 16, 16


class Sizes(NamedTuple):
    """What the seed decides about a model and its batches: layers, width, vocabulary, rows and (most) tokens."""

    layers: int
    width: int
    vocabulary: int
    rows: int
    tokens: int

    @classmethod
    def drawn(cls, chance: random.Random, scale: int) -> Sizes:
        """Sizes for a meter (scale 1), or `scale` times as wide."""
        return cls(
            chance.choice((1, 1, 1, 2)),
            chance.choice((32, 48, 64)) * scale,
            chance.choice((64, 128, 256)),
            chance.choice((2, 3, 4)) * scale,
            chance.choice((8, 12, 16)) * scale,
        )


class Trained(NamedTuple):
    """A model, and functions that make a batch of an amount and that give loss (scalar) and logits of a batch."""

    module: nn.Module
    batch: Callable[[float], dict[str, Tensor]]
    run: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]


def _texts(sizes: Sizes, amount: float) -> dict[str, Tensor]:
    ids = torch.randint(2, sizes.vocabulary, (sizes.rows, max(2, round(amount * sizes.tokens))))  # 0 and 1 say pad, end
    return {"input_ids": ids, "labels": ids}


def _pictures(sizes: Sizes, amount: float) -> dict[str, Tensor]:
    rows = max(2, round(3 * amount * sizes.rows))
    return {"pixel_values": torch.randn(rows, 3, SIDE, SIDE), "labels": torch.randint(CLASSES, (rows,))}


def _vectors(sizes: Sizes, amount: float) -> dict[str, Tensor]:
    rows = max(2, round(4 * amount * sizes.rows))
    return {"x": torch.randn(rows, 4 * sizes.width), "labels": torch.randint(CLASSES, (rows,))}


def _speech(sizes: Sizes, amount: float) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(sizes.rows, MELS, 4 * sizes.tokens),
        "labels": _texts(sizes, amount)["labels"],
    }


def _run_ours(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    x, y = (tensor for name, tensor in sorted(batch.items(), key=lambda item: item[0] == "labels"))
    logits = module(x)
    return F.cross_entropy(logits.flatten(0, -2), y.flatten()), logits


def _run_theirs(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    out = module(**batch)
    return out.loss, out.logits


def _ours(name: str, s: Sizes) -> tuple[nn.Module, Callable]:
    text = {"layers": s.layers, "width": s.width, "heads": 4, "context": s.tokens, "vocabulary": s.vocabulary}
    if name == "GPT":
        return GPT(**text), _texts
    if name == "Llama":
        return Llama(**text), _texts
    if name == "LSTM":
        return LSTM(s.vocabulary, s.width, s.layers), _texts
    if name == "MLP":
        return MLP(4 * s.width, 2 * s.width, CLASSES), _vectors
    return ConvNet(s.width // 2, CLASSES), _pictures


def _theirs(name: str, s: Sizes) -> tuple[nn.Module, Callable]:
    import transformers as t

    wide = {"hidden_size": s.width, "num_hidden_layers": s.layers, "vocab_size": s.vocabulary}
    heads = {"num_attention_heads": 4, "intermediate_size": 4 * s.width}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    if name == "transformers GPT-2":
        sizes = {"n_embd": s.width, "n_layer": s.layers, "n_head": 4, "n_positions": s.tokens, "use_cache": False}
        return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=s.vocabulary, **sizes, **ids)), _texts
    if name == "transformers Llama":
        config = t.LlamaConfig(**wide, **heads, **ids, num_key_value_heads=2, use_cache=False)
        return t.LlamaForCausalLM(config), _texts
    if name == "transformers BERT":
        return t.BertForMaskedLM(t.BertConfig(**wide, **heads, max_position_embeddings=s.tokens, **ids)), _texts
    if name == "transformers T5":
        sizes = {"d_model": s.width, "d_kv": s.width // 4, "d_ff": 2 * s.width, "num_layers": s.layers, "num_heads": 4}
        config = t.T5Config(**sizes, vocab_size=s.vocabulary, decoder_start_token_id=0, use_cache=False, **ids)
        return t.T5ForConditionalGeneration(config), _texts
    if name == "transformers Mamba":
        config = t.MambaConfig(**wide, state_size=8, use_cache=False, **ids)
        return t.MambaForCausalLM(config), _texts
    if name == "transformers Whisper":
        both = {
            f"{side}_{what}": n
            for side in ("encoder", "decoder")
            for what, n in (("layers", s.layers), ("attention_heads", 4), ("ffn_dim", 2 * s.width))
        }
        config = t.WhisperConfig(
            vocab_size=s.vocabulary, d_model=s.width, num_mel_bins=MELS, max_source_positions=2 * s.tokens,
            max_target_positions=s.tokens, decoder_start_token_id=1, use_cache=False, **both, **ids,
        )  # fmt: skip
        return t.WhisperForConditionalGeneration(config), _speech
    if name == "transformers ViT":
        sizes = {name: n for name, n in (wide | heads).items() if name != "vocab_size"}
        config = t.ViTConfig(**sizes, image_size=SIDE, patch_size=4, num_labels=CLASSES)
        return t.ViTForImageClassification(config), _pictures
    config = t.ResNetConfig(
        embedding_size=s.width // 2, hidden_sizes=[s.width // 2, s.width], depths=[1] * 2, num_labels=CLASSES
    )
    return t.ResNetForImageClassification(config), _pictures


OURS = ("GPT", "Llama", "LSTM", "MLP", "ConvNet")
THEIRS = tuple(f"transformers {name}" for name in ("GPT-2", "Llama", "BERT", "T5", "ViT", "Mamba", "Whisper", "ResNet"))


def theirs_available() -> bool:
    """Whether models that are not ours can be built: whether Transformers is installed. Imports nothing."""
    return importlib.util.find_spec("transformers") is not None


def build(name: str, sizes: Sizes, seed: int) -> Trained:
    """The model called `name` (one of OURS or THEIRS) with these sizes, and its batches. Its weights come from `seed`.

    Raises ImportError for one of THEIRS where Transformers is not installed.
    """
    if name in THEIRS:  # they have many small ops
        tokens = min(sizes.tokens, 8) if "Mamba" in name else sizes.tokens  # one after the other without its kernels
        sizes = sizes._replace(layers=1, tokens=tokens)
    with torch.random.fork_rng(devices=[]), _quiet() if name in THEIRS else contextlib.nullcontext():
        torch.manual_seed(seed)
        module, batch = (_ours if name in OURS else _theirs)(name, sizes)
        module.train()
        run = _run_ours if name in OURS else _run_theirs
        trained = Trained(module, functools.partial(batch, sizes), functools.partial(run, module))
        with torch.no_grad():
            trained.run(trained.batch(1.0))  # some say at their first forward what they fall back to
    return trained


@contextlib.contextmanager
def _quiet():
    """Transformers' advice (which kernels to install …) is left out in this block."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
