"""Under the tensors: how CUDA's caching allocator turns requests into blocks and segments, and what other ways cost."""
