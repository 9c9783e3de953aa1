"""One training step in closed form: what is held at the few moments at which a step can be at its fullest.

Gradient accumulation runs forward and backward several times before the optimizer's step. The first micro-batch finds
no gradients; every later one finds them all, and the running sum of losses. Put the two side by side, instant by
instant: the first holds the gradients that its own backward has made so far, the later one holds all of them, what its
backward has just made on top, and the rest alike. So a later one is fuller at every instant, all later ones are equal,
and the peak is that of one micro-batch with gradients already allocated, for every number of micro-batches from 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memlab.checking import balanced, one_of, positive, true_or_false
from memlab.memory_arithmetic.head import sum_of_losses
from memlab.memory_arithmetic.ledger import Breakdown, Ledger, Piece
from memlab.memory_arithmetic.ops import Setting
from memlab.memory_arithmetic.optimizers import (
    IMPLEMENTATIONS,
    OPTIMIZERS,
    STEP_COUNTERS,
    chunk_limit,
    play_step,
    states,
)
from memlab.memory_arithmetic.passes import LOSS, OPTIMIZER, play
from memlab.memory_arithmetic.shapes import Transformer, added

PRECISIONS = ("fp32", "bf16", "mixed", "autocast")
ATTENTIONS = ("fused", "by hand")
HARDWARE = ("gpu", "cpu")
OFFLOADS = (None, "states", "states and gradients")


@dataclass(frozen=True)
class TrainingStep:
    """What one training step holds, in bytes of storages: what tensors hold, before an allocator rounds up.

    Not counted: what kernels allocate for themselves, the allocator's rounding and fragmentation, the CUDA context.
    `moments` are breakdowns in the order of the step; `peak` is the fullest of them.
    """

    model: Transformer
    moments: tuple[Breakdown, ...]
    activations: Breakdown
    in_main_memory: Breakdown
    _static: dict[str, Breakdown] = field(repr=False)

    @property
    def peak(self) -> Breakdown:
        """The fullest moment; the first of them where several are equal."""
        return max(self.moments, key=lambda moment: moment.nbytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at once."""
        return self.peak.nbytes

    @property
    def parameters(self) -> Breakdown:
        """The weights."""
        return self._static["parameter"]

    @property
    def gradients(self) -> Breakdown:
        """The gradients, when all are there."""
        return self._static["gradient"]

    @property
    def optimizer_states(self) -> Breakdown:
        """What the optimizer keeps between steps, wherever it lies."""
        return self._static["optimizer_state"]

    def moment(self, name: str) -> Breakdown:
        """The moment of that name. Raises KeyError, with the names there are."""
        for moment in self.moments:
            if moment.moment == name:
                return moment
        raise KeyError(f"expected one of {', '.join(repr(m.moment) for m in self.moments)}; found {name!r}")


def training_step(
    model: Transformer,
    batch: int,
    tokens: int,
    *,
    precision: str = "fp32",
    optimizer: str = "adamw",
    implementation: str | None = None,
    attention: str = "fused",
    dropout: float = 0.0,
    hardware: str = "gpu",
    first_step: bool = False,
    chunk_bytes: int | str | None = "auto",
    micro_batches: int = 1,
    segments: int | None = None,
    offload: str | None = None,
) -> TrainingStep:
    """The memory of forward, backward and optimizer step on (batch, tokens) of int64, gradients freed before it.

    precision: "fp32" (4 + 4 bytes of weight and gradient a parameter, 8 of AdamW's), "bf16" (2 + 2 + 4), "mixed" (BF16
      weights and gradients, FP32 master weights and moments: 2 + 2 + 12), "autocast" (FP32 weights, gradients and
      moments, and until backward a BF16 copy of each weight that a matrix product reads: 4 + 4 + 8, and 2 for a time).
    optimizer: "sgd", "momentum" or "adamw". implementation: "for-loop", "foreach" or "fused"; None is what torch.optim
      picks, foreach on a GPU and the for-loop on a CPU.
    attention: "fused" (scaled_dot_product_attention) or "by hand". dropout: a probability; any above 0 costs the same.
    hardware: whose kernels run; a "gpu" is NVIDIA's Hopper or later, with PyTorch's build for CUDA 13. (With one for
      CUDA 12, and on Ampere and Ada, fused attention in 16 bits is flash and keeps 8 bytes more a block; on Ada heads
      above 192 features run another kernel; before Ampere none reads BF16, and a block stores its scores.) There,
      AdamW's step counters lie in main memory unless it is fused.
    first_step: the optimizer has no states until its step.
    chunk_bytes: for "mixed", how many bytes of FP32 gradients the step makes at once, or of one parameter, if it is
      larger, as in `MasterWeights`: an int or such as "16 MiB"; None: no limit; "auto": 64 MiB on a GPU, 2 MiB on a
      CPU.
    micro_batches: how many of (batch, tokens) accumulate gradients before the optimizer's step. From 2 on, the moments
      are those of any micro-batch but the first, and their bytes are the same for every number, except for the inputs:
      x and y of all micro-batches are held from the start. Of the losses a running sum is kept, in FP32.
    segments: into how many equal segments the blocks are cut, each checkpointed; embeddings, head and loss are not.
      None: nothing is. `model.layers`: every block.
    offload: what lies in main memory, where the optimizer then steps: "states", among them an FP32 copy of the weights;
      or "states and gradients", each of which leaves the device when it is complete.

    Raises TypeError or ValueError for sizes below 1, more tokens than the context, more segments than blocks, options
    that do not exist, attention that is not counted (see `refuse_attention`), and an offload from a CPU or of BF16
    states, which no offloaded optimizer here has.
    """
    if implementation is None:
        implementation = "foreach" if hardware == "gpu" else "for-loop"
    refuse_sizes(model, batch, tokens)
    one_of("precision", precision, PRECISIONS)
    one_of("optimizer", optimizer, OPTIMIZERS)
    one_of("implementation", implementation, IMPLEMENTATIONS)
    one_of("attention", attention, ATTENTIONS)
    one_of("hardware", hardware, HARDWARE)
    true_or_false("first_step", first_step)
    chunk_bytes = chunk_limit(chunk_bytes, hardware)
    positive("micro_batches", micro_batches)
    refuse_dropout(dropout)
    refuse_attention(model, tokens, precision, attention, dropout, hardware)
    refuse_offload(offload, precision, hardware)
    if segments is not None:
        balanced(model.layers, segments)
    setting = Setting(
        compute=4 if precision == "fp32" else 2,
        stream=4 if precision in ("fp32", "autocast") else 2,
        autocast=precision == "autocast",
        gpu=hardware == "gpu",
        by_hand=attention == "by hand",
        dropout=dropout > 0,
        batch=batch,
        heads=model.heads,
        accumulating=micro_batches > 1,
        leaving=offload == "states and gradients",
    )
    of_the_batch = {"b": batch, "s": tokens, "S": -(-tokens // 32) * 32}
    of_the_model = {"r": model.width // model.heads // 2, "P": model.parameters, "T": model.parameter_tensors}
    ledger = Ledger(model.symbols | of_the_batch | of_the_model)
    mixed = precision == "mixed"
    state_size = 4 if mixed else setting.stream
    kept_states = states(optimizer, state_size, master=mixed or offload is not None)
    counters = [STEP_COUNTERS] if optimizer == "adamw" else []
    weights = parameters(model, setting)
    gradients = {
        Piece("gradients", "P", setting.stream, "gradient", "one for every parameter, once backward is done"): 1
    }
    elsewhere = counters if hardware == "gpu" and implementation != "fused" else []
    if offload is not None:
        elsewhere = kept_states + counters + (list(gradients) if setting.leaving else [])
    on_device = [piece for piece in kept_states + counters if piece not in elsewhere]
    gradients_here = {} if setting.leaving else gradients
    ids = "int64, from the data loader"
    inputs = [Piece(name, "b·s", 8, "input", ids) for name in ("x, the tokens", "y, the targets")]

    for piece, count in weights.items():
        ledger.make(piece, count)
    for piece in inputs:
        ledger.make(piece, micro_batches)
    held = [*gradients_here, sum_of_losses()] if setting.accumulating else []
    for piece in [*([] if first_step else on_device), *held]:
        ledger.make(piece)
    activations = play(ledger, setting, model, segments)
    for name in ledger.named("gradient"):
        ledger.free(name, ledger.held[name])
    for piece in gradients_here:
        ledger.make(piece)
    if offload is not None:
        ledger.look(OPTIMIZER, f"{optimizer} step, in main memory")
    else:
        play_step(
            ledger,
            OPTIMIZER,
            list(model.tensors.values()),
            optimizer,
            implementation,
            state_size,
            chunk_bytes=chunk_bytes if mixed else None,
            made=on_device if first_step else [],
        )

    static = {"parameter": weights, "gradient": gradients, "optimizer_state": dict.fromkeys(kept_states + counters, 1)}
    return TrainingStep(
        model,
        tuple(ledger.breakdown(moment) for moment in ledger.fullest),
        listed(ledger, LOSS, "end of forward", activations),
        listed(ledger, "before the optimizer's step", "main memory", dict.fromkeys(elsewhere, 1)),
        {name: listed(ledger, "between steps", name, pieces) for name, pieces in static.items()},
    )


def refuse_sizes(model: Transformer, batch: int, tokens: int) -> None:
    """Raise TypeError or ValueError for a batch that the model could not take."""
    if not isinstance(model, Transformer):
        raise TypeError(
            f"expected model as a Transformer, found {model!r}; preset('GPT-2 small') makes one by its name"
        )
    positive("batch", batch)
    positive("tokens", tokens)
    if tokens > model.context:
        raise ValueError(
            f"expected at most {model.context} tokens (the context), found {tokens}; pass fewer or raise context"
        )


def refuse_dropout(dropout: float) -> None:
    """Raise ValueError for what is no probability below 1."""
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise ValueError(f"expected dropout as a probability from 0 up to, not including, 1; found {dropout!r}")


def refuse_attention(
    model: Transformer, tokens: int, precision: str, attention: str, dropout: float, hardware: str
) -> None:
    """Raise ValueError for attention that a family does not have, or whose bytes on a GPU are others than counted here.

    FP32 takes the memory-efficient kernel, for heads of whole 16 bytes and without grouped keys; else PyTorch stores
    the scores of every block after all, and says nothing. 16 bits take cuDNN's attention (Hopper or later),
    for heads of a multiple of 8 up to 256; flash would pad others, and those above 256 go to the memory-efficient
    kernel. cuDNN's takes no single token; flash does, and keeps one number more. (PyTorch's sdp_utils.cpp.)
    Where scores are stored, a head of one feature is refused, too: heads side by side are then a view, and the Linear
    after it makes the copy. So is one token, for which nothing needs a copy.
    """
    if model.family == "llama" and (dropout or attention == "by hand"):
        asked = "dropout" if dropout else "attention='by hand'"
        raise ValueError(f"family 'llama' has no dropout and fused attention, found {asked}; use family='gpt' for it")
    stores_scores = attention == "by hand" or (hardware == "cpu" and dropout > 0)
    if stores_scores and model.heads == model.width > 1:
        raise ValueError(
            f"attention that stores its scores is counted for heads of 2 features or more, found {model.heads} heads "
            f"for a width of {model.width}; pick fewer heads"
        )
    if tokens == 1 and (stores_scores or (hardware == "gpu" and precision != "fp32")):
        which = "attention that stores its scores" if stores_scores else f"a GPU's fused attention in {precision}"
        raise ValueError(f"{which} is counted for 2 tokens or more, found 1; pass longer texts")
    if hardware == "cpu" or attention == "by hand":
        return
    width, fp32 = model.width // model.heads, precision == "fp32"
    multiple, widest = (4, width) if fp32 else (8, 256)
    if width % multiple or width > widest:
        most = "" if fp32 else ", 256 at most"
        raise ValueError(
            f"a GPU's fused attention in {precision} is counted for heads of a multiple of {multiple} wide{most}; "
            f"found {width} ({model.width} over {model.heads} heads); pick other heads, or attention='by hand'"
        )
    if fp32 and model.kv_heads != model.heads:
        raise ValueError(
            f"a GPU's fused attention in fp32 reads no grouped keys, found {model.kv_heads} kv_heads for {model.heads} "
            f"heads; pick precision='bf16' or 'autocast', or as many kv_heads as heads"
        )


def refuse_offload(offload: str | None, precision: str, hardware: str) -> None:
    """Raise ValueError for states that cannot leave, or that no optimizer on the host has."""
    one_of("offload", offload, OFFLOADS)
    if offload is not None and hardware == "cpu":
        raise ValueError(
            f"expected hardware='gpu' to offload from, found 'cpu', where offload={offload!r} moves nothing"
        )
    if offload is not None and precision == "bf16":
        raise ValueError("expected FP32 states to offload, found precision='bf16'; use 'mixed', whose masters they are")


def parameters(model: Transformer, setting: Setting) -> dict[Piece, int]:
    """The weights as pieces: those before the blocks, the blocks, those after; with how many there are of each."""
    piece = lambda name, size: Piece(name, size, setting.stream, "parameter", "the model")  # noqa: E731
    return {
        **{piece(name, size): 1 for name, size in model.before.items()},
        piece("weights of a block", added(list(model.block.values()))): model.layers,
        **{piece(name, size): 1 for name, size in model.after.items()},
    }


def listed(ledger: Ledger, moment: str, at: str, pieces: dict[Piece, int]) -> Breakdown:
    """Pieces, which need not be held, as a breakdown."""
    ledger.pieces |= {piece.name: piece for piece in pieces}
    return Breakdown(moment, at, tuple(ledger.term(piece.name, count) for piece, count in pieces.items()))
