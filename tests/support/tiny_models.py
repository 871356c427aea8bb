"""Tiny models and tokenizers made in code: nothing is downloaded."""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from grpo_fast.rollout import Rollout

PAD, EOS, BOS = 0, 1, 2
CHARACTERS = "0123456789+-=abcdefghijklmnopqrstuvwxyz <>|."
VOCAB = ["<pad>", "<eos>", "<bos>", *CHARACTERS]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(*, adds_bos: bool = False, pad: str | None = "<pad>") -> PreTrainedTokenizerFast:
    """One token a character; with adds_bos the BOS token is put before raw text, as Gemma's tokenizer does."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCAB)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token="<eos>", bos_token="<bos>" if adds_bos else None
    )
    fast.chat_template = TEMPLATE if adds_bos else TEMPLATE.removeprefix("{{ bos_token }}")
    return fast


IDS = {"eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": BOS}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, **IDS}


def make_model(kind: str = "llama", seed: int = 0, **options):
    """A randomly initialised model with sharper logits than the default initialisation gives."""
    torch.manual_seed(seed)
    vocab = {"vocab_size": len(VOCAB)}
    if kind == "llama":
        sizes = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 128}
        model = LlamaForCausalLM(LlamaConfig(**{**vocab, **sizes, **options}))
    elif kind == "gpt2":  # absolute positions, tied head, dropout
        model = GPT2LMHeadModel(
            GPT2Config(**{**vocab, **IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **options})
        )
    elif kind == "gemma2":  # soft-capped logits
        model = Gemma2ForCausalLM(
            Gemma2Config(**{**vocab, **SIZES, "num_key_value_heads": 2, "head_dim": 8, **options})
        )
    elif kind == "cohere":  # scaled logits
        model = CohereForCausalLM(CohereConfig(**{**vocab, **SIZES, "logit_scale": 0.5, **options}))
    else:  # divided logits
        model = GraniteForCausalLM(GraniteConfig(**{**vocab, **SIZES, "logits_scaling": 3.0, **options}))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20.0)
        if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
            model.get_output_embeddings().weight.mul_(20.0)
    return model


class ScriptedRollout:
    """An engine that returns given completions, to test what the trainer makes of them."""

    def __init__(self, completions, truncated=()):
        self.completions, self.truncated = completions, truncated
        self.prompts = []

    def generate(self, prompts, options, seed):
        self.prompts.append(prompts)
        rows = [prompt for prompt in prompts for _ in range(options.n)]
        return [
            Rollout(prompt_ids=tuple(row), completion_ids=tuple(ids), truncated=index in self.truncated)
            for index, (row, ids) in enumerate(zip(rows, self.completions, strict=True))
        ]

    def sync(self, model):
        pass
