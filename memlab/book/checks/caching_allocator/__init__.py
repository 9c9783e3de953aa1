"""Checks of the exercises to chapter 04."""

from memlab.book.checks.caching_allocator.checkpoint import load
from memlab.book.checks.caching_allocator.first_fit import free, malloc
from memlab.book.checks.caching_allocator.given_back import given_back, pages_given_back
from memlab.book.checks.caching_allocator.levels import reserved_bytes, unexplained
from memlab.book.checks.caching_allocator.packing import offsets

__all__ = ["reserved_bytes", "unexplained", "given_back", "pages_given_back", "malloc", "free", "load", "offsets"]
