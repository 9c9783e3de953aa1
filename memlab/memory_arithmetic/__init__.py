"""Memory arithmetic: the bytes of a training step from its sizes alone, term by term, without running anything.

    step = training_step(preset("GPT-2 small"), batch=8, tokens=1024, precision="autocast")
    step.peak_bytes
    for term in step.peak:
        print(term.name, term.formula, term.source)

Read the pages in this order: `shapes` (a model's sizes, its parameters, published models), `ledger` (sizes as text, and
what is held), `ops` and `attention` (what each op keeps and makes), `gpt`, `llama` and `head` (which ops there are),
`optimizers`, `passes` (forward and backward of all blocks), `segments` (the same with checkpoints), and `step`, which
puts them together.
Nothing here imports torch: it is integer arithmetic, and the tests hold it against a metered step.
"""

from memlab.memory_arithmetic.ledger import Breakdown, Term
from memlab.memory_arithmetic.shapes import PRESETS, Transformer, preset
from memlab.memory_arithmetic.step import TrainingStep, training_step

__all__ = ["PRESETS", "Breakdown", "Term", "TrainingStep", "Transformer", "preset", "training_step"]
