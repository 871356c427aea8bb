"""Checkpoints: folders that `from_pretrained` loads, which appear whole or not at all."""

import os
import re
import shutil
import tempfile
from pathlib import Path

from transformers import PreTrainedModel


def prune_checkpoints(output_dir: str | Path, limit: int | None) -> list[Path]:
    """Deletes the folders `checkpoint-STEP` but for the `limit` most recently written; None keeps all.

    The time of writing decides, not the step: a folder with a higher number may be left from an earlier run.

    Returns:
        the deleted folders.
    """
    if limit is None:
        return []
    checkpoints = [path for path in Path(output_dir).iterdir() if re.fullmatch(r"checkpoint-\d+", path.name)]
    # Steps break ties of coarse clocks, as numbers: checkpoint-1000 is newer than checkpoint-200.
    checkpoints.sort(key=lambda path: (path.stat().st_mtime_ns, int(path.name.split("-")[1])))
    stale = checkpoints[:-limit]
    for path in stale:
        shutil.rmtree(path)
    return stale


def save_checkpoint(folder: str | Path, model: PreTrainedModel, tokenizer=None) -> Path:
    """Writes the model (safetensors), its configuration and generation configuration, and the tokenizer.

    Everything is written into a hidden folder beside `folder`, which then takes its name. An existing checkpoint of
    that name is renamed only once the new one is complete, and gets its name back if the new one cannot take it. A
    process killed between the two renames leaves both whole in `.NAME.*`, as `old` and `new`.

    Returns:
        the folder, which `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    new, old = temporary / "new", temporary / "old"
    try:
        new.mkdir()
        model.save_pretrained(new)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
        os.utime(new)  # prune_checkpoints goes by the time of completion
        if folder.exists():
            folder.rename(old)  # a folder that is not empty cannot be replaced in one step
        new.rename(folder)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)  # where this fails too, nothing below is reached and both stay
        shutil.rmtree(temporary)
    return folder
