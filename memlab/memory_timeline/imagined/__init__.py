"""Hardware that isn't there: `imagine("H100-80GB")`, and where it works unlike the CPU that imagines it.

Read `imagine` first; then `fake_tensors` (what its tensors lack), `gpu_ops`, `gpu_results` and `gpu_autocast` (where a
GPU works unlike a CPU), `places` (main memory beside the card) and `budget` (when it is full).
"""
