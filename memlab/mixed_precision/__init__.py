"""Mixed precision: train in 16 bits to the same answer.

Read the pages in this order: `formats` (what a number is, bit by bit, and what a format loses), `loss_scaler` (keeps
small gradients from FP16's floor; with `overflow`, which asks for inf and nan), `nonfinite` (which op made the first
nan or inf; with `following`, what became of each, and `looking`, what a tensor holds), `master_weights` (FP32 copies
that small updates add up in; with `writes`, whether others wrote to a weight) and `stochastic_rounding` (the same
without copies). `edges` has what a step on masters refuses, and how it loads; leave it closed at first reading.

Sources: Micikevicius et al. 2018; Kalamkar et al. 2019.
"""

from memlab.mixed_precision.formats import FORMATS, Bits, Format, bits, fates, round_to
from memlab.mixed_precision.loss_scaler import LossScaler
from memlab.mixed_precision.master_weights import MasterWeights
from memlab.mixed_precision.nonfinite import NonFinite, first_nonfinite
from memlab.mixed_precision.stochastic_rounding import StochasticRounding, round_stochastically

__all__ = [
    "FORMATS",
    "Bits",
    "Format",
    "LossScaler",
    "MasterWeights",
    "NonFinite",
    "StochasticRounding",
    "bits",
    "first_nonfinite",
    "fates",
    "round_stochastically",
    "round_to",
]
