"""The memory hierarchy: how fast each level is, and attention that stays in the fast ones."""
