"""Checks of the exercises to chapter 02."""

from memlab.book.checks.memory_arithmetic.lora import lora_bytes, lora_linear
from memlab.book.checks.memory_arithmetic.sizes import adam_bytes, block_keeps, largest_batch, unexplained

__all__ = ["adam_bytes", "block_keeps", "unexplained", "largest_batch", "lora_linear", "lora_bytes"]
