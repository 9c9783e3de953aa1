"""`python -m memlab`: what this machine has, what each chapter needs, what is recorded, and what is wrong."""

import argparse
import sys
from collections.abc import Sequence

from memlab.book.pages import print_as_far_as_possible


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the health report. Returns 1 where PyTorch cannot be imported, for then there is no other report."""
    argparse.ArgumentParser(prog="python -m memlab", description=__doc__).parse_args(arguments)
    print_as_far_as_possible()
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        print(f"PyTorch cannot be imported ({error}).\nInstall it: README.md, first command, in the book's folder.")
        return 1
    from memlab.book.health import report

    print(report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
