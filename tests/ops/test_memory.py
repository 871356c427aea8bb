"""The README's way of calling the loss in another trainer's loop: how many tensors of the logits' size it costs."""

import pytest
import torch
from allocations import Allocations

import grpo_fast as gf


def model_and_batch():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    input_ids = torch.randint(0, 8192, (4, 40))
    completion = torch.zeros(4, 40)
    completion[:, 8:] = 1
    return model, input_ids, completion


def step(model, input_ids, completion, advantages, inplace):
    logits = model(input_ids, use_cache=False).logits
    targets, mask = input_ids.roll(-1, 1), completion.roll(-1, 1)
    mask[:, -1] = 0  # the last row predicts a token that is not there
    loss = gf.grpo_loss(logits, targets, advantages, mask, inplace=inplace).loss
    loss.backward()
    return loss


@pytest.mark.parametrize("inplace, budget", [(True, 1), (False, 2)])
def test_all_rows_and_a_mask(inplace, budget):
    """The lm_head's output, and out of place its gradient: nothing else of that size in forward and backward."""
    if gf.ops.backends.unavailable_reason("cpu"):
        pytest.skip("the C++ extension is not built")
    model, input_ids, completion = model_and_batch()
    size = 4 * 40 * 8192 * 4
    with Allocations() as seen:
        step(model, input_ids, completion, torch.tensor([1.0, -1.0, 0.5, -0.5]), inplace)
    assert seen.large(size) == budget


def test_slicing_costs_a_copy():
    """Why the snippet does not slice: the backward of logits[:, :-1] makes a full tensor of zeros."""
    model, input_ids, _ = model_and_batch()
    size = 4 * 40 * 8192 * 4
    with Allocations() as seen:
        logits = model(input_ids, use_cache=False).logits
        gf.grpo_loss(logits[:, 7:-1], input_ids[:, 8:], torch.ones(4), inplace=True).loss.backward()
    assert seen.large(size) == 2


def test_masking_equals_slicing():
    model, input_ids, completion = model_and_batch()
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    step(model, input_ids, completion, advantages, True)
    masked = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logits = model(input_ids, use_cache=False).logits
    gf.grpo_loss(logits[:, 7:-1], input_ids[:, 8:], advantages).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, masked[name], atol=1e-7), name
