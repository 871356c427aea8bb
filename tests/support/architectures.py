"""Tiny models of the architectures that share prompts, sliding windows and soft caps among them."""

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
WINDOW = 5  # shorter than every prompt but one, so that completions see their prompt partly or not at all
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SIZES)),
    "gemma2 with windows and soft caps": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, sliding_window=WINDOW, attn_logit_softcapping=2.0)
    ),
    "gemma3 with windows": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=8
        )
    ),
    "mistral with windows": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW)),
    "gpt2 with dropout": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
    ),
}


def make_architecture(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    with torch.no_grad():  # attention that is far from uniform
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    return model
