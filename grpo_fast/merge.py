"""An adapter's checkpoint made into a plain model's."""

from pathlib import Path

from grpo_fast.checkpoint import save_checkpoint
from grpo_fast.config import GRPOConfig, ModelConfig
from grpo_fast.environment import default_device
from grpo_fast.lora import saved_adapter
from grpo_fast.merged_weights import frozen_copy
from grpo_fast.model import load_model_config, load_policy, load_tokenizer


def merge_adapter(adapter: str | Path, out: str | Path, dtype: str = "auto") -> Path:
    """Writes the model that `adapter` was trained on with the adapter merged into it.

    Args:
        adapter: a folder that peft, and the trainer with lora.r, wrote.
        out: the folder to write; `from_pretrained` loads it, without peft.
        dtype: of the weights, as in model.dtype; auto: as the model's own are saved.

    Raises:
        ValueError: the folder holds no adapter, or one that cannot be merged.
    """
    if saved_adapter(str(adapter)) is None:
        raise ValueError(f"ADAPTER: expected a folder with adapter_config.json, got {adapter}")
    args = GRPOConfig(model=ModelConfig(path=str(adapter), dtype=dtype))
    model = load_policy(args, load_model_config(args), default_device())
    return save_checkpoint(out, frozen_copy(model, strict=True), load_tokenizer(args))
