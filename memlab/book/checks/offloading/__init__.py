"""Checks of the exercises to chapter 09."""

from memlab.book.checks.offloading.by_hand import free
from memlab.book.checks.offloading.files import swap_to
from memlab.book.checks.offloading.home import host_adam
from memlab.book.checks.offloading.once import swap_once
from memlab.book.checks.offloading.reader import for_nothing, note
from memlab.book.checks.offloading.times import when_to_call, whom_to_send

__all__ = [
    "free",
    "for_nothing",
    "note",
    "swap_to",
    "swap_once",
    "whom_to_send",
    "when_to_call",
    "host_adam",
]
