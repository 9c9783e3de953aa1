"""What notebooks need around the library: workloads, figures, tables, claims, and the executing of notebooks itself.

`memlab.book` may import any technique; no technique imports `memlab.book`.
"""
