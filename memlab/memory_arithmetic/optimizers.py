"""What an optimizer keeps between steps, and what it makes inside one.

torch.optim has three implementations of the same update. The for-loop goes from parameter to parameter and holds the
temporaries of one or two; foreach runs each operation over all parameters at once, so AdamW's √v exists for all of
them; fused does everything in registers. CUDA tensors get foreach unless you ask otherwise, CPU tensors the for-loop.
"""

from __future__ import annotations

from memlab.memory_arithmetic.ledger import Ledger, Piece, elements

OPTIMIZERS = ("sgd", "momentum", "adamw")
IMPLEMENTATIONS = ("for-loop", "foreach", "fused")


def states(optimizer: str, itemsize: int, *, master: bool = False) -> list[Piece]:
    """What the optimizer keeps a parameter, in elements of `itemsize` bytes, without AdamW's step counters.

    master: also an FP32 copy of the weights, which is what the update is computed on. Micikevicius et al. 2018.
    """
    piece = lambda name, source: Piece(name, "P", itemsize, "optimizer_state", source)  # noqa: E731
    found = {
        "sgd": [],
        "momentum": [piece("momentum buffer", "SGD with momentum: one running sum of gradients")],
        "adamw": [
            piece("first moment m", "Loshchilov and Hutter 2019, algorithm 2: exp_avg"),
            piece("second moment v", "Loshchilov and Hutter 2019, algorithm 2: exp_avg_sq"),
        ],
    }[optimizer]
    copy = piece("FP32 master weights", "Micikevicius et al. 2018, section 3.1")
    return [*([copy] if master else []), *found]


STEP_COUNTERS = Piece("step counters", "T", 4, "optimizer_state", "AdamW: one FP32 number for each parameter tensor")


def play_step(
    ledger: Ledger, moment: str, sizes: list[str], optimizer: str, implementation: str, itemsize: int
) -> None:
    """Look at the fullest instant of a step whose states exist. sizes: every parameter tensor's, in order.

    The for-loop's AdamW holds √v and √v divided by the bias correction at once, and still the previous parameter's.
    """
    ledger.look(moment, f"{optimizer} step")
    if optimizer != "adamw" or implementation == "fused":
        return
    if implementation == "foreach":
        roots = Piece("√v of every parameter", "P", itemsize, "temporary", "foreach_sqrt makes the whole list")
        ledger.make(roots)
        ledger.look(moment, "foreach_sqrt of AdamW")
        ledger.free(roots.name)
        return
    counts = [elements(size, ledger.symbols) for size in sizes]
    held = [(before + 2 * now, i) for i, (before, now) in enumerate(zip([0, *counts], counts, strict=False))]
    largest = max(held, key=lambda pair: pair[0])[1]
    made = [
        Piece("√v of a parameter", sizes[largest], itemsize, "temporary", "sqrt in AdamW's loop"),
        Piece("√v / √(1 − β₂ᵗ)", sizes[largest], itemsize, "temporary", "the division after it"),
    ]
    if largest:
        made.insert(
            0,
            Piece(
                "√v / √(1 − β₂ᵗ) of the parameter before",
                sizes[largest - 1],
                itemsize,
                "temporary",
                "the loop's variable holds it until the next division",
            ),
        )
    for piece in made:
        ledger.make(piece)
    ledger.look(moment, "div in AdamW's loop")
    for piece in made:
        ledger.free(piece.name)
