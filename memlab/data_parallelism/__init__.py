"""Data parallelism: every rank has other data, and holds the whole of the model, or less and less of it.

Read the pages in this order: `flat` (parameters side by side, cut into equal pieces).
"""

from memlab.data_parallelism.flat import FlatLayout

__all__ = ["FlatLayout"]
