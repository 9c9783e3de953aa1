"""The course: what nbgrader is told when it is run in this folder. README.md says how."""

import os

# Grading looks at a CPU, also on a machine with a GPU, and PyTorch's own notes do not count as errors. One thread a
# kernel: small tensors gain nothing by more, and where cores are shared, threads wait for each other.
os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", KINETO_LOG_LEVEL="99")

c = get_config()  # noqa: F821 (nbgrader defines it)
c.CourseDirectory.course_id = "memlab"
c.ClearSolutions.code_stub = {"python": "raise NotImplementedError  # your answer"}
c.OverwriteCells.add_missing_cells = True  # a check cell that was deleted is put back
c.Execute.timeout = 30  # seconds a cell; a check ends itself after 10
c.Execute.extra_arguments = [
    "--HistoryManager.hist_file=:memory:",
    # before a submission runs: a limit of memory, and nothing but nbgrader ends the kernel
    "--IPKernelApp.exec_lines=['from memlab.book.checks.limits import guard', 'guard()', 'del guard']",
]
