"""Offloading: keep it elsewhere, in the host's memory or in a file, and bring it back before it is needed.

Read the pages in this order: `slab` and `files` (two places to keep bytes), `swap` (activations leave after the forward
and come back in backward); `host_optimizer` (states, and gradients, that never lie on the device); `streaming` (weights,
layer by layer); `overlap` (when is it free?) and `schedule` (what to send first).
"""
