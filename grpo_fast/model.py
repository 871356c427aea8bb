"""Loading the policy and its tokenizer, after saying how much memory training will take."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpo_fast.config import GRPOConfig
from grpo_fast.memory import MemoryEstimate, available_memory, check_memory, count_parameters, estimate_memory
from grpo_fast.reference_model import reference_dtype


def default_device() -> torch.device:
    """The current GPU if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def load_policy(args: GRPOConfig) -> tuple[PreTrainedModel, object]:
    """The model and tokenizer of `args.model`, on the default device, ready for `GRPOTrainer`.

    Prints the predicted memory before the weights are read.

    Raises:
        ValueError: model.path is not set, or holds no causal language model.
        MemoryError: training cannot fit; says what to set.
    """
    options = args.model
    if options.path is None:
        raise ValueError("model.path: expected a folder or hub name, got none. Set model.path")
    config = AutoConfig.from_pretrained(options.path, trust_remote_code=options.trust_remote_code)
    if config.is_encoder_decoder:
        raise ValueError(f"model.path: expected a causal language model, got the encoder-decoder {config.model_type}")
    device = default_device()
    estimate = predict_memory(args, config, device)
    print(estimate)
    check_memory(estimate, available_memory(device))
    model = AutoModelForCausalLM.from_pretrained(
        options.path,
        dtype=_dtype(options.dtype, config),
        attn_implementation=options.attn_implementation,
        trust_remote_code=options.trust_remote_code,
    )
    tokenizer = AutoTokenizer.from_pretrained(options.path, trust_remote_code=options.trust_remote_code)
    return model.to(device), tokenizer


def predict_memory(args: GRPOConfig, config, device: torch.device) -> MemoryEstimate:
    """What training the model that `config` describes will hold, from its shapes alone."""
    dtype = _dtype(args.model.dtype, config)
    reference = reference_dtype(args.model.reference_dtype, dtype, device) if args.loss.beta > 0 else None
    parameters = count_parameters(config, trust_remote_code=args.model.trust_remote_code)
    return estimate_memory(parameters, dtype, reference, on_gpu=device.type == "cuda")


def _dtype(name: str, config) -> torch.dtype:
    return (config.dtype or torch.float32) if name == "auto" else getattr(torch, name)
