"""Loading the policy: configuration and tokenizer first, the weights once it is known that training fits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo_fast.config import GRPOConfig, LoraConfig
from grpo_fast.lora import require_peft, saved_adapter
from grpo_fast.memory import (
    MemoryEstimate,
    available_memory,
    check_memory,
    count_parameters,
    estimate_memory,
    reference_dtype,
)


def load_model_config(args: GRPOConfig) -> PreTrainedConfig:
    """The configuration of the model that `args.model` names.

    Raises:
        ValueError: model.path is not set, or holds no causal language model, or an adapter while lora.r is set.
        ImportError: model.path holds an adapter, and peft is not installed.
        OSError: there is no model.
    """
    options = args.model
    if options.path is None:
        raise ValueError("model.path: expected a folder or hub name, got null. Set model.path")
    path, adapter = options.path, saved_adapter(options.path)
    if adapter is not None:
        require_peft("model.path")
        path = adapter["base_model_name_or_path"]
        if args.lora.r:
            raise ValueError(f"lora.r: expected 0 with the adapter in model.path={options.path}, got {args.lora.r}")
    with _named_in_errors(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=options.trust_remote_code)
    if config.is_encoder_decoder:
        raise ValueError(f"model.path: expected a causal language model, got the encoder-decoder {config.model_type}")
    return config


def load_tokenizer(args: GRPOConfig) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model that `args.model` names.

    Raises:
        OSError: there is none.
    """
    options = args.model
    with _named_in_errors(options.path):
        return AutoTokenizer.from_pretrained(options.path, trust_remote_code=options.trust_remote_code)


def load_policy(args: GRPOConfig, config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """The model that `args.model` names and `config` describes, on `device`, ready for `GRPOTrainer`.

    Where model.path holds an adapter, that is put on the model it was trained on, to be trained on.

    Prints the predicted memory before the weights are read.

    Raises:
        MemoryError: training cannot fit; says what to set.
        OSError: there are no weights.
    """
    options = args.model
    estimate = predict_memory(args, config, device)
    print(estimate)
    check_memory(estimate, available_memory(device))
    path = options.path if saved_adapter(options.path) is None else config.name_or_path
    with _named_in_errors(path):
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=_dtype(options.dtype, config),
            attn_implementation=options.attn_implementation,
            trust_remote_code=options.trust_remote_code,
        )
    if path != options.path:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, options.path, is_trainable=True)
    return model.to(device)


@contextmanager
def _named_in_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"model.path: no model in the folder or hub repository {path}: {error}") from error


def predict_memory(args: GRPOConfig, config, device: torch.device) -> MemoryEstimate:
    """What training the model that `config` describes will hold, from its shapes alone."""
    dtype = _dtype(args.model.dtype, config)
    reference = reference_dtype(args.model.reference_dtype, dtype, device) if args.loss.beta > 0 else None
    trusted, lora = args.model.trust_remote_code, args.lora
    if args.model.path is not None and (saved := saved_adapter(args.model.path)) is not None:
        lora = LoraConfig(r=saved["r"], target_modules=saved["target_modules"])
    parameters, adapters = count_parameters(config, trust_remote_code=trusted, lora=lora)
    return estimate_memory(
        parameters,
        dtype,
        reference,
        on_gpu=device.type == "cuda",
        adapters=adapters,
        reference_offload=args.model.reference_offload,
    )


def _dtype(name: str, config) -> torch.dtype:
    return (config.dtype or torch.float32) if name == "auto" else getattr(torch, name)
