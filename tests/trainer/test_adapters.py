"""LoRA on the head, and heads that share the embedding: what is trained from hidden states, and how."""

import copy

import pytest
import torch
from tiny_models import make_model, make_tokenizer

import grpo_fast as gf
from grpo_fast.batching import Trained
from grpo_fast.forward import PolicyForward, find_linear_head
from grpo_fast.rollout import Rollout

COMPLETIONS = [(20, 21, 22), (24, 25), (26, 27, 28, 29, 30), (31,)]
ROLLOUTS = [
    Rollout(prompt_ids=(5, 6, 7, 8)[: 2 + index // 2], completion_ids=ids, truncated=False)
    for index, ids in enumerate(COMPLETIONS)
]
ADVANTAGES, LENGTHS = torch.tensor([1.0, -1.0, 0.5, -0.75]), [len(ids) for ids in COMPLETIONS]


@pytest.fixture
def peft():
    return pytest.importorskip("peft", reason="peft is not installed")


def with_lora(peft, kind="llama", *, wrapped=False, dtype=torch.float64, **options):
    """The model with adapters that are not zero in attention and head, for all of which B50 wants a gradient."""
    attention = {"llama": "q_proj", "gpt2": "c_attn"}[kind]
    config = peft.LoraConfig(target_modules=[attention, "lm_head"], task_type="CAUSAL_LM", r=4, **options)
    model = make_model(kind).to(dtype)
    outer = peft.get_peft_model(model, config) if wrapped else peft.inject_adapter_in_model(config, model)
    with torch.no_grad():
        for name, parameter in outer.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return outer


def update_gradients(forward, options):
    (batch,) = forward.micro_batches(Trained.of(ROLLOUTS, ADVANTAGES, LENGTHS, all_move=True), 10**6)
    with forward.mode():
        out = forward.loss(batch, **options)
        out.loss.backward()
    model = forward.model
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return out, gradients


@pytest.mark.parametrize("wrapped", [False, True], ids=["injected", "PeftModel"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_adapters_on_the_head_train_without_logits(peft, kind, wrapped):
    """B50: every adapter, the head's included, gets the gradient that autograd gives it by way of the logits."""
    model = with_lora(peft, kind, wrapped=wrapped).eval()
    forward = PolicyForward(model)
    assert forward.reason.startswith("loss from hidden states")
    by_logits = PolicyForward(copy.deepcopy(model), head=(None, "asked for"))
    out, gradients = update_gradients(forward, {"entropy_coef": 0.1})
    expected_out, expected = update_gradients(by_logits, {"entropy_coef": 0.1})
    assert out.loss.item() == pytest.approx(expected_out.loss.item(), rel=1e-9)
    assert gradients.keys() == expected.keys()
    assert {name for name in gradients if "lm_head" in name} == {
        "lm_head.lora_A.default.weight", "lm_head.lora_B.default.weight",
    }  # fmt: skip
    assert not [name for name in gradients if "lora" not in name]
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        assert (gradients[name] - gradient).abs().max() <= 1e-9 * gradient.abs().max(), name


def test_dropout_of_adapters_is_off_in_the_update_and_does_not_cost_the_head(peft):
    model = with_lora(peft, lora_dropout=0.5).train()
    assert find_linear_head(model)[0] is not None
    assert model.training


def test_what_the_head_cannot_express_is_trained_from_logits(peft):
    model = with_lora(peft, use_dora=True).eval()
    forward = PolicyForward(model)
    assert "DoraLinearVariant" in forward.reason
    _, gradients = update_gradients(forward, {})
    assert gradients["lm_head.lora_B.default.weight"].abs().max() > 0


def test_a_wrapper_that_does_more_than_pass_on_stays(peft):
    alora = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5])
    for config in (alora, peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")):
        model = peft.get_peft_model(make_model("llama"), config)
        forward = PolicyForward(model)
        assert forward.model is model
        assert forward.head is None


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_tied_heads_gradient_is_added_to_the_embedding_once(tied):
    """B107: embedding and head share one parameter, whose gradient is the sum of both uses."""
    model = make_model("llama", tie_word_embeddings=tied).double().eval()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    ids, advantages = torch.randint(3, 47, (3, 7)), torch.tensor([1.0, -1.0, 0.5])
    mask = torch.ones(3, 7)
    mask[1, 4:] = 0
    gf.grpo_loss(model(ids).logits, ids.roll(-1, 1), advantages, mask).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    weight, bias = gf.head_weight(model.lm_head)
    gf.linear_grpo_loss(
        model.model(ids).last_hidden_state, weight, ids.roll(-1, 1), advantages, mask, bias=bias
    ).loss.backward()  # fmt: skip
    for name, p in model.named_parameters():
        assert (p.grad - expected[name]).abs().max() <= 1e-9 * expected[name].abs().max(), name


def test_adapters_on_a_tied_head_leave_the_embedding_alone(peft):
    model = with_lora(peft, "gpt2").eval()
    assert model.lm_head.base_layer.weight is model.transformer.wte.weight
    before = model.transformer.wte.weight.clone()
    forward = PolicyForward(model)
    update_gradients(forward, {})
    assert torch.equal(model.transformer.wte.weight, before)
    assert model.transformer.wte.weight.grad is None
    assert forward.head is not None


def test_the_trainer_trains_the_adapters_and_nothing_else(peft, make_args):
    model = with_lora(peft, wrapped=True, dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = gf.GRPOTrainer(
        model,
        lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        make_args(loss={"beta": 0.04}),
        [{"prompt": "1+1="}, {"prompt": "1+2="}],
        processing_class=make_tokenizer(),
    )
    metrics = trainer.train()
    assert trainer.update.forward.head is not None
    assert metrics["kl"] > 0
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora" in name}
