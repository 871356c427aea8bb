"""Which engine samples: from `rollout.engine` to the engine."""

import importlib.util
import os

from transformers import PreTrainedModel

from grpo_fast.config import GRPOConfig
from grpo_fast.rollout import RolloutEngine
from grpo_fast.rollout.transformers import TransformersRollout
from grpo_fast.rollout.vllm import VLLMRollout


def require_vllm(key: str) -> None:
    """Refuses `key`, which asks for vLLM, where it cannot be: an ImportError or ValueError."""
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(f"{key}: vllm is not installed: pip install 'grpo-fast[vllm]'")
    processes = int(os.environ.get("WORLD_SIZE") or 1)
    if processes > 1:
        raise ValueError(
            f"{key}: expected one process with vllm, got WORLD_SIZE={processes}. Set rollout.engine=transformers"
        )


def make_rollout(
    model: PreTrainedModel,
    tokenizer,
    args: GRPOConfig,
    *,
    share_prompts: bool | None = None,
    longest_prompt: int | None = None,
) -> RolloutEngine:
    """The engine that `args.rollout` asks for, with the weights the model has now.

    Args:
        model: the policy.
        tokenizer: asked for its end and pad ids.
        args: sections rollout and model are read.
        share_prompts: see `TransformersRollout`.
        longest_prompt: in tokens, None if not known: how much vLLM has to provide for.
    """
    options = args.rollout
    if options.engine == "transformers":
        return TransformersRollout(model, tokenizer, share_prompts=share_prompts, cuda_graphs=options.cuda_graphs)
    needed = None if longest_prompt is None else longest_prompt + options.max_completion_length
    return VLLMRollout(
        model,
        tokenizer,
        max_model_length=options.vllm_max_model_length or needed,
        max_rows=options.max_rows,
        gpu_memory_utilization=options.vllm_gpu_memory_utilization or 0.3,
        trust_remote_code=args.model.trust_remote_code,
    )
