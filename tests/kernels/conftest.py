"""Kernel tests run in processes of their own: TRITON_INTERPRET is read when a kernel is decorated, and compiling
without a GPU replaces Triton's driver. test_processes.py starts them, with KERNEL_TESTS naming the folder.
"""

import os

collect_ignore = [folder for folder in ("numerics", "compiled") if os.environ.get("KERNEL_TESTS") != folder]
