"""One update against an independent computation: float64, a sequence at a time, no padding, no fused loss."""

import copy
import sys

import pytest
import torch
from plain_rows import assert_close, gradients_of, plain_logps
from tiny_models import EOS, make_model

from grpo_fast.batching import MicroBatches, TokenBudget, Trained, padded_micro_batches
from grpo_fast.config import GRPOConfig, LossConfig, OptimConfig, RolloutConfig
from grpo_fast.forward import PolicyForward, find_linear_head
from grpo_fast.modes import enable_gradient_checkpointing
from grpo_fast.rollout import Rollout
from grpo_fast.update import GRPOUpdate

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [17]]
COMPLETIONS = [[20, 21, EOS], [22, 0, 23, 24, 25, EOS], [], [EOS], [26, 27], [28, 29, 30, 31, 32, 33, 34]]
ROLLOUTS = [
    Rollout(prompt_ids=tuple(PROMPTS[index // 2]), completion_ids=tuple(ids), truncated=not ids)
    for index, ids in enumerate(COMPLETIONS)
]
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0, 0.75])
LENGTHS = [len(ids) for ids in COMPLETIONS]
LONGEST = 8


def plain_loss(model, options: LossConfig, temperature, old=None, reference=None):
    """Straight from the formulas; `old` and `reference` are models."""
    total, entropies = torch.zeros((), dtype=torch.float64), []
    tokens = sum(LENGTHS)
    divisor = {
        "grpo": len(ROLLOUTS),
        "luspo": len(ROLLOUTS),
        "dr_grpo": len(ROLLOUTS) * LONGEST,
        "bnpo": tokens,
        "dapo": tokens,
    }[options.loss_type]
    for rollout, advantage in zip(ROLLOUTS, ADVANTAGES.double(), strict=True):
        if not rollout.completion_ids:
            continue
        logps, entropy = plain_logps(model, rollout, temperature)
        with torch.no_grad():
            before = logps.detach() if old is None else plain_logps(old, rollout, temperature)[0]
        ratio = (logps - before).exp()
        clipped = ratio.clamp(1 - options.epsilon, 1 + options.epsilon)
        per_token = -torch.minimum(ratio * advantage, clipped * advantage)
        if reference is not None:
            with torch.no_grad():
                anchor = plain_logps(reference, rollout, temperature)[0]
            per_token = per_token + options.beta * ((anchor - logps).exp() - (anchor - logps) - 1)
        total = total + (per_token.mean() if options.loss_type == "grpo" else per_token.sum())
        entropies.append(entropy)
    return total / divisor - options.entropy_coef * torch.cat(entropies).sum() / tokens


class Recorded(GRPOUpdate):
    """Keeps every iteration's gradients."""

    def _optimizer_step(self, rate):
        self.gradients = [*getattr(self, "gradients", []), gradients_of(self.forward.model)]
        norm = super()._optimizer_step(rate)
        self.rates = [*getattr(self, "rates", []), *{group["lr"] for group in self.optimizer.param_groups}]
        return norm


def trained_of(advantages=ADVANTAGES, *, all_move=True):
    return Trained.of(ROLLOUTS, advantages, LENGTHS, all_move=all_move)


def whole_batch(forward, **options):
    (batch,) = forward.micro_batches(trained_of(**options), 10**6)
    return batch


def run_update(
    model, *, max_tokens=10**6, reference=None, temperature=1.0, learning_rate=0.1, share_prompts=None, **loss
):
    args = GRPOConfig(
        max_steps=10,
        rollout=RolloutConfig(max_completion_length=LONGEST, temperature=temperature),
        loss=LossConfig(**loss),
        optim=OptimConfig(learning_rate=learning_rate, max_grad_norm=1e9, lr_scheduler_type="constant"),
    )
    forward = PolicyForward(model, temperature=temperature, backend=args.loss.backend, share_prompts=share_prompts)
    update = Recorded(forward, args)
    trained = trained_of(all_move=args.loss.beta > 0 or args.loss.entropy_coef > 0)
    batches = MicroBatches(trained, forward.micro_batches, TokenBudget(max_tokens))
    ref_logps = None
    if reference is not None:
        scorer = PolicyForward(reference, temperature=temperature, share_prompts=forward.share_prompts)
        ref_logps = torch.zeros(trained.tokens, dtype=torch.float64)
        with scorer.mode():
            for batch in batches.batches:
                ref_logps[batch.places] = scorer.logprobs(batch).double()
        ref_logps = ref_logps.to(model.dtype)
    return update, update(trained, batches, ref_logps, (len(LENGTHS), sum(LENGTHS)), 0)


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "cohere", "granite"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_update_equals_the_formulas(kind, beta, share_prompts):
    model = make_model(kind).double()
    reference = make_model(kind, seed=1).double() if beta else None
    options = LossConfig(beta=beta, entropy_coef=0.05)
    expected = plain_loss(copy.deepcopy(model).eval(), options, 0.7, reference=reference and reference.eval())
    clean = copy.deepcopy(model).eval()
    plain_loss(clean, options, 0.7, reference=reference).backward()
    update, metrics = run_update(
        model,
        temperature=0.7,
        reference=reference,
        beta=beta,
        entropy_coef=0.05,
        max_tokens=24,
        share_prompts=share_prompts,
    )
    assert update.forward.head is not None  # the loss is computed from hidden states
    tolerance = 1e-5 if kind == "gemma2" else 1e-6  # its own attention rounds the softmax to float32
    assert metrics["loss"] == pytest.approx(expected.item(), rel=tolerance)
    assert abs(metrics["loss"]) > 1e-3
    assert_close(update.gradients[0], gradients_of(clean), tolerance)


@pytest.mark.parametrize("loss_type", ["grpo", "luspo", "dr_grpo", "bnpo", "dapo"])
def test_loss_types(loss_type):
    model = make_model("llama").double()
    reference = make_model("llama", seed=1).double().eval()
    clean = copy.deepcopy(model).eval()
    loss = plain_loss(clean, LossConfig(beta=0.3, loss_type=loss_type), 1.0, reference=reference)
    loss.backward()
    update, metrics = run_update(model, loss_type=loss_type, beta=0.3, reference=reference, max_tokens=1)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert_close(update.gradients[0], gradients_of(clean), 1e-6)


def test_later_iterations_clip_against_the_frozen_first():
    model = make_model("llama").double()
    old = copy.deepcopy(model).eval()
    options = LossConfig(beta=0.0, num_iterations=3)
    update, metrics = run_update(model, num_iterations=3, beta=0.0, max_tokens=24, learning_rate=0.02)
    stepped = copy.deepcopy(old)
    optimizer = torch.optim.AdamW(stepped.parameters(), lr=0.02, weight_decay=0.0)
    losses = []
    for _ in range(3):
        loss = plain_loss(stepped, options, 1.0, old=old)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients = gradients_of(stepped)
        optimizer.step()
    assert_close(update.gradients[2], gradients, 1e-5)
    assert metrics["loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert metrics["clip_ratio/region_mean"] > 0.05  # the later passes are off-policy and clip
    assert_close(dict(model.named_parameters()), dict(stepped.named_parameters()), 1e-4)


@pytest.mark.parametrize(
    "num_iterations, expected",
    [(1, [1 / 3, 2 / 3, 1.0, 0.5]), (2, [1 / 3, 2 / 3, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])],
)
def test_warm_up_and_schedule_count_optimizer_steps(num_iterations, expected):
    args = GRPOConfig(
        max_steps=4,
        loss=LossConfig(beta=0.0, num_iterations=num_iterations),
        optim=OptimConfig(learning_rate=1.0, warmup_steps=2, lr_scheduler_type="linear"),
    )
    update = Recorded(PolicyForward(make_model("llama")), args)
    trained = trained_of(all_move=False)
    batches = MicroBatches(trained, update.forward.micro_batches, TokenBudget(10**6))
    counted = len(LENGTHS), sum(LENGTHS)
    reported = [update(trained, batches, None, counted, step)["learning_rate"] for step in range(4)]
    assert update.rates == pytest.approx(expected)
    assert reported == pytest.approx(expected[num_iterations - 1 :: num_iterations])  # the last of each step


@pytest.mark.parametrize("logits_path", [False, True])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_any_split_equals_one_batch(loss_type, logits_path, monkeypatch):
    if logits_path:
        monkeypatch.setattr("grpo_fast.forward.find_linear_head", lambda model: (None, "from logits"))
    results = []
    for max_tokens in (10**6, 40, 24, 1):
        model, reference = make_model("llama"), make_model("llama", seed=1)
        update, metrics = run_update(
            model,
            loss_type=loss_type,
            beta=0.1,
            entropy_coef=0.01,
            reference=reference,
            max_tokens=max_tokens,
            num_iterations=2,
        )
        results.append((metrics, update.gradients))
    whole_metrics, whole_gradients = results[0]
    for metrics, gradients in results[1:]:
        assert metrics["loss"] == pytest.approx(whole_metrics["loss"], rel=1e-6, abs=1e-6)
        assert_close(gradients[0], whole_gradients[0], 1e-6)
        for name in ("kl", "entropy", "ratio/mean", "clip_ratio/region_mean"):
            assert metrics[name] == pytest.approx(whole_metrics[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "cohere", "granite"])
def test_loss_from_logits_equals_loss_from_hidden_states(kind, monkeypatch):
    by_path = []
    for logits_path in (False, True):
        model, reference = make_model(kind), make_model(kind, seed=1)
        if logits_path:
            monkeypatch.setattr("grpo_fast.forward.find_linear_head", lambda model: (None, "from logits"))
        update, metrics = run_update(
            model, beta=0.1, entropy_coef=0.01, temperature=0.8, reference=reference, max_tokens=40
        )
        by_path.append((metrics, update.gradients[0]))
    (hidden_metrics, hidden), (logits_metrics, logits) = by_path
    assert logits_metrics == pytest.approx(hidden_metrics, rel=1e-4, abs=1e-6)
    assert_close(logits, hidden, 1e-5)


def test_models_without_logits_to_keep(monkeypatch):
    monkeypatch.setattr("grpo_fast.forward.find_linear_head", lambda model: (None, "from logits"))
    # Micro-batches whose first completions start in different columns, all but one of them later than column 0.
    expected, _ = run_update(make_model("llama"), beta=0.0, max_tokens=16)
    model = make_model("llama")
    full = model.forward
    model.forward = lambda input_ids, use_cache, **inputs: full(input_ids=input_ids, use_cache=use_cache, **inputs)
    update, _ = run_update(model, beta=0.0, max_tokens=16)
    assert_close(update.gradients[0], expected.gradients[0], 1e-6)


def test_row_t_is_scored_at_position_p_minus_1_plus_t():
    model = make_model("llama").eval()
    rollout = Rollout(prompt_ids=(5, 6, 7, 8, 9), completion_ids=(20, 21, 22, 23), truncated=True)
    (batch,) = padded_micro_batches(Trained.of([rollout], torch.ones(1), [4], all_move=False), 64)
    distribution = model(torch.tensor([[5, 6, 7, 8, 9, 20, 21, 22, 23]])).logits[0].log_softmax(-1)
    expected = [distribution[4 + t, token].item() for t, token in enumerate((20, 21, 22, 23))]
    assert PolicyForward(model, share_prompts=False).logprobs(batch).tolist() == pytest.approx(expected, abs=1e-5)


def test_heads():
    for kind in ("llama", "gpt2", "gemma2", "cohere", "granite"):
        head, reason = find_linear_head(make_model(kind))
        assert head is not None
        assert reason.startswith("loss from hidden states")
    assert find_linear_head(make_model("gemma2"))[0].softcap == 30.0
    assert find_linear_head(make_model("granite"))[0].logit_scale == pytest.approx(1 / 3)


def test_an_unnamed_transformation_is_noticed():
    model = make_model("llama")
    forward = model.forward

    def shifted(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out

    model.forward = shifted
    head, reason = find_linear_head(model)
    assert head is None
    assert "is not named in its configuration" in reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [20.0, 50.0])
def test_an_unnamed_softcap_is_noticed_although_a_fresh_models_logits_are_small(dtype, cap):
    with torch.no_grad():
        model = make_model("llama").to(dtype)
        model.lm_head.weight.div_(20.0)
    assert find_linear_head(model)[0] is not None
    forward = model.forward

    def capped(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = cap * torch.tanh(out.logits / cap)
        return out

    model.forward = capped
    assert find_linear_head(model)[0] is None


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "cohere", "granite"])
def test_the_probe_leaves_the_model_as_it_was(kind):
    model = make_model(kind).to(torch.bfloat16)
    weights, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert find_linear_head(model)[0] is not None
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert not model.base_model._forward_hooks


@pytest.mark.parametrize("options", [{}, {"beta": 0.1}, {"entropy_coef": 0.1}])
def test_live_rows_are_known_on_the_host(options, monkeypatch):
    """Advantages of 0 and sequences are; asking a GPU for them would make every micro-batch wait for it."""
    module = sys.modules["grpo_fast.ops.linear_grpo_loss"]
    monkeypatch.setattr(module, "select", lambda *_: pytest.fail("the device was asked"))
    forward = PolicyForward(make_model("llama"))
    batch = whole_batch(forward, all_move=bool(options))
    dead = LENGTHS[ADVANTAGES.tolist().index(0.0)] if not options else 0
    ref_logps = torch.zeros(len(batch.places)) if "beta" in options else None
    with forward.mode():
        out = forward.loss(batch, ref_logps=ref_logps, **options)
        assert (out.logps != 0).sum() == sum(LENGTHS) - dead
        out.loss.backward()


def test_a_micro_batch_without_a_signal_has_no_gradient():
    model = make_model("llama")
    forward = PolicyForward(model)
    assert forward.micro_batches(trained_of(ADVANTAGES * 0, all_move=False), 10**6) == []
    batch = whole_batch(forward, advantages=ADVANTAGES * 0)  # whoever makes one all the same
    with forward.mode():
        out = forward.loss(batch)
        out.loss.backward()
    assert out.loss.item() == 0.0
    assert all(not gradient.any() for gradient in gradients_of(model).values())


def test_a_head_that_is_no_plain_linear_layer():
    class Adapter(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) * 2.0

    model = make_model("llama")
    model.lm_head = Adapter(32, 47, bias=False)
    head, reason = find_linear_head(model)
    assert head is None
    assert "the Adapter is not a plain linear layer" in reason
    _, metrics = run_update(model, beta=0.0)
    assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_stale_gradients_do_not_count(kind):
    expected, _ = run_update(make_model(kind), beta=0.0)
    model = make_model(kind)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    update, _ = run_update(model, beta=0.0)
    assert_close(update.gradients[0], expected.gradients[0], 0.0)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_gradient_checkpointing_gives_the_same_gradients(kind):
    plain, _ = run_update(make_model(kind), beta=0.0)
    model = make_model(kind)
    model.train()
    enable_gradient_checkpointing(model)
    update, _ = run_update(model, beta=0.0)
    assert_close(update.gradients[0], plain.gradients[0], 1e-6)
    assert model.training


def test_dropout_leaves_ratio_one_and_kl_zero():
    model = make_model("gpt2").train()  # dropout 0.1
    _, metrics = run_update(model, beta=0.1, reference=copy.deepcopy(model).eval())
    assert metrics["kl"] == pytest.approx(0, abs=1e-9)
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1.0


@pytest.mark.parametrize("logits_path", [False, True])
def test_autocast(logits_path, monkeypatch):
    """What a GPU does by default: float32 weights, products in bfloat16, gradients in float32."""
    if logits_path:
        monkeypatch.setattr("grpo_fast.forward.find_linear_head", lambda model: (None, "from logits"))
    results = []
    for autocast in (None, torch.bfloat16):
        model = make_model("llama").eval()
        forward = PolicyForward(model, autocast=autocast)
        batch = whole_batch(forward)
        with forward.mode():
            out = forward.loss(batch, ref_logps=forward.logprobs(batch), beta=0.1)
            out.loss.backward()
        assert out.logps.dtype == torch.float32
        results.append((out, gradients_of(model)))
    (exact, gradients), (rounded, rounded_gradients) = results
    assert not torch.equal(exact.logps, rounded.logps)
    assert (exact.logps - rounded.logps).abs().max() < 0.3
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert rounded_gradients[name].dtype == torch.float32
        assert (rounded_gradients[name] - gradient).abs().max() < 0.1 * largest


def test_nothing_to_train_on_is_no_optimizer_step():
    model = make_model("llama")
    before = copy.deepcopy(model.state_dict())
    update = GRPOUpdate(PolicyForward(model), GRPOConfig(max_steps=4))
    trained = Trained.of(ROLLOUTS[2:3], torch.ones(1), [0], all_move=True)
    batches = MicroBatches(trained, update.forward.micro_batches, TokenBudget(10))
    metrics = update(trained, batches, None, (1, 0), 2)
    assert metrics.pop("learning_rate") == 5e-7
    assert set(metrics.values()) == {0.0}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_kl_is_absent_without_a_reference_and_clip_ratios_follow_the_loss():
    _, metrics = run_update(make_model("llama"), beta=0.0)
    assert "kl" not in metrics
    assert "cispo_clip_ratio" not in metrics
    assert metrics["clip_ratio/region_mean"] == 0.0
    _, metrics = run_update(make_model("llama"), beta=0.0, loss_type="cispo", epsilon_high=2.0, backend="reference")
    assert not [name for name in metrics if name.startswith("clip_ratio")]
    assert metrics["cispo_clip_ratio"] == 0.0


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_head_with_a_bias(beta):
    def biased(seed):
        model = make_model("llama", seed=seed).double()
        layer = torch.nn.Linear(32, model.lm_head.out_features, dtype=torch.float64)
        layer.weight.data.copy_(model.lm_head.weight)
        layer.bias.data.normal_(generator=torch.Generator().manual_seed(seed))
        model.lm_head = layer
        return model

    model, reference = biased(0), biased(1) if beta else None
    clean = copy.deepcopy(model).eval()
    plain_loss(clean, LossConfig(beta=beta), 1.0, reference=reference and reference.eval()).backward()
    update, _ = run_update(model, reference=reference, beta=beta, max_tokens=24)
    assert update.forward.head is not None
    assert "lm_head.bias" in update.gradients[0]
    assert_close(update.gradients[0], gradients_of(clean), 1e-5)
