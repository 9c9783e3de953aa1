"""The course, as nbgrader is told of it when it runs in this folder. README.md has the commands and the limits."""

import os

from memlab.book import warm

c = get_config()  # noqa: F821 (nbgrader defines it)
c.CourseDirectory.course_id = "memlab"
c.CourseDirectory.root = os.path.dirname(os.path.realpath(__file__))
c.ClearSolutions.code_stub = {"python": "raise NotImplementedError  # your answer"}
c.OverwriteCells.add_missing_cells = True  # a check cell that was deleted is put back
c.Execute.kernel_name = warm.offer()  # torch is imported once, not for each student
c.Execute.timeout = 30  # seconds a cell
c.Execute.shutdown_kernel = "immediate"  # nothing in it is worth waiting for
c.Execute.extra_arguments = [
    "--HistoryManager.hist_file=:memory:",
    # before a submission runs: the CPU, a limit of memory, and nothing but nbgrader ends the kernel
    "--IPKernelApp.exec_lines=['from memlab.book.checks.limits import guard', 'guard()', 'del guard']",
]
