"""Builds the extension `grpo_fast._C` where torch and a C++ compiler are at hand, installs pure if not.

By torch's stable ABI and Python's limited API one build serves torch >= 2.11 and any Python >= 3.11. With a CUDA
build of torch and the nvcc of its CUDA there is `grpo_fast._cuda`, too, for GPUs from sm_80 on.
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
    if shutil.which(compiler := os.environ.get("CXX", "c++").split()[0]) is None:
        return f"the C++ compiler {compiler} is missing (install one, or name it in CXX)"
    return None


def nvcc_flags():
    """Returns what nvcc is to compile csrc/cuda with; nothing without a CUDA build of torch and an nvcc of its CUDA."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    nvcc = shutil.which("nvcc", path=f"{CUDA_HOME}/bin")
    if torch.version.cuda is None or nvcc is None or os.environ.get("GRPO_FAST_CUDA") == "0":
        return []
    release = re.search(
        r"release (\d+)\.(\d+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    )
    if release is None or release[1] != torch.version.cuda.split(".")[0]:
        print(f"grpo_fast: no CUDA backend: torch has CUDA {torch.version.cuda}, {nvcc} has not", file=sys.stderr)
        return []
    sms = (80, 90, 100) if (int(release[1]), int(release[2])) >= (12, 8) else (80, 90)
    targets = [f"compute_{sm},code=sm_{sm}" for sm in sms]
    targets.append(f"compute_{sms[-1]},code=compute_{sms[-1]}")  # PTX, for what comes later
    return ["-O3", "-std=c++20", *(f"-gencode=arch={target}" for target in targets)]


def extension_arguments():
    """Returns what setup() needs to build the extensions: nothing where they cannot be built."""
    if reason := why_pure():  # setup.py also runs for the metadata alone, where saying it would help nobody
        if {"bdist_wheel", "editable_wheel", "install"} & set(sys.argv):
            print(f"grpo_fast: installing without the C++ backend: {reason}", file=sys.stderr)
        return {}
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    def extension(kind, name, patterns, macros=(), nvcc=()):
        return kind(
            f"grpo_fast.{name}",
            sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(f"csrc/{pattern}")),
            include_dirs=[str(ROOT / "csrc")],
            define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION), *macros],
            extra_compile_args={"cxx": ["-O3", "-std=c++20", "-fvisibility=hidden"], "nvcc": [*nvcc]},
            py_limited_api=True,
        )

    extensions = [extension(CppExtension, "_C", ["*.cpp", "cpu/*.cpp"])]
    if nvcc := nvcc_flags():
        extensions.append(extension(CUDAExtension, "_cuda", ["cuda/*.cpp", "cuda/*.cu"], [("USE_CUDA", None)], nvcc))
    options = {"bdist_wheel": {"py_limited_api": "cp311"}}
    return {"ext_modules": extensions, "cmdclass": {"build_ext": BuildExtension}, "options": options}


# Where the checkout holds the symlink grpo_fast/kernels as a text file (Windows, some archives), name it.
KERNELS_DIR = {} if (ROOT / "grpo_fast/kernels").is_dir() else {"grpo_fast.kernels": "kernels"}
PACKAGES = [*find_packages(include=["grpo_fast", "grpo_fast.*"]), "grpo_fast.kernels"]
setup(packages=PACKAGES, package_dir=KERNELS_DIR, package_data={"grpo_fast": ["py.typed"]}, **extension_arguments())
