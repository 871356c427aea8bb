"""Builds the extension `grpo_fast._C` where torch and a C++ compiler are at hand, installs pure if not.

The extension uses torch's stable ABI and Python's limited API: one build serves torch >= 2.11 and any Python
>= 3.11. With a CUDA build of torch and the nvcc of its CUDA it holds the CUDA backend, too, for GPUs from sm_80 on.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
TORCH_TARGET_VERSION = "0x020b000000000000"  # 2.11: nothing newer of the stable ABI may be used


def why_pure():
    """Returns why the extension cannot be built here, or None."""
    if os.environ.get("GRPO_FAST_PURE") == "1":
        return "GRPO_FAST_PURE=1 is set"
    if find_spec("torch") is None:
        return "torch is missing in the build environment (pip's --no-build-isolation shows it yours)"
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        return f"the C++ compiler {compiler} is missing (install one, or name it in CXX)"
    return None


def nvcc_flags():
    """Returns what nvcc is to compile csrc/cuda with, or None where there is no nvcc for torch's CUDA."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    if torch.version.cuda is None or CUDA_HOME is None:
        return None
    said = subprocess.run([f"{CUDA_HOME}/bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    version = tuple(map(int, re.search(r"release (\d+)\.(\d+)", said).groups()))
    if version[0] != int(torch.version.cuda.split(".")[0]):
        print(f"grpo_fast: no CUDA backend: nvcc is {version}, torch has CUDA {torch.version.cuda}", file=sys.stderr)
        return None
    newest = 100 if version >= (12, 8) else 90  # whose PTX serves what comes later
    targets = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in (80, 90, 100) if sm <= newest]
    return ["-O3", "-std=c++20", *targets, f"-gencode=arch=compute_{newest},code=compute_{newest}"]


def extension_arguments():
    """Returns what setup() needs to build the extension: nothing where it cannot be built."""
    reason = why_pure()
    if reason is not None:
        # setup.py also runs for the metadata alone, where saying it again would help nobody.
        if {"bdist_wheel", "editable_wheel", "install"} & set(sys.argv):
            print(f"grpo_fast: installing without the C++ backend: {reason}", file=sys.stderr)
        return {}
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    cuda = nvcc_flags()
    macros = [("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)]
    extension = (CppExtension if cuda is None else CUDAExtension)(
        "grpo_fast._C",
        sorted(
            str(path.relative_to(ROOT))
            for path in ROOT.glob("csrc/**/*.c*")
            if path.suffix == ".cpp" or (path.suffix == ".cu" and cuda is not None)
        ),
        include_dirs=[str(ROOT / "csrc")],
        define_macros=macros if cuda is None else [*macros, ("USE_CUDA", None), ("GRPO_FAST_WITH_CUDA", None)],
        extra_compile_args={"cxx": ["-O3", "-std=c++20", "-fvisibility=hidden"], "nvcc": cuda or []},
        py_limited_api=True,
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp311"}},
    }


# Where the checkout holds the symlink grpo_fast/kernels as a text file (Windows, some archives), name it.
KERNELS_DIR = {} if (ROOT / "grpo_fast/kernels").is_dir() else {"grpo_fast.kernels": "kernels"}

setup(
    packages=[*find_packages(include=["grpo_fast", "grpo_fast.*"]), "grpo_fast.kernels"],
    package_dir=KERNELS_DIR,
    package_data={"grpo_fast": ["py.typed"]},
    **extension_arguments(),
)
