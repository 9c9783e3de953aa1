"""memlab: a textbook you run about how deep learning uses memory.

Each chapter of `chapters/` has a module of the same name here. Importing `memlab` imports none of them:
`from memlab.memory_timeline import Meter` is the way in.
"""

__version__ = "0.1.0"
