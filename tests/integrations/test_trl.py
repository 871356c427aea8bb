"""One micro-batch through TRL's loss and ours, on equal models: loss, gradients and logged metrics are the same."""

import math

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

trl = pytest.importorskip("trl", reason="needs pip install 'grpo-fast[trl]'")

from trl_problems import GRPOTrainer, difference, make_batch, make_pair, measure  # noqa: E402

import grpo_fast.integrations.trl as integration  # noqa: E402
from grpo_fast import linear_token_logprobs as logprobs  # noqa: E402

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo")
BASE = {"beta": 0.1, "epsilon_high": 0.28, "use_bias_correction_kl": False}


def assert_same_metrics(got, expected, tolerance=1e-5):
    assert got.keys() == expected.keys()
    for mode, metrics in expected.items():
        assert got[mode].keys() == metrics.keys()
        for name, values in metrics.items():
            assert got[mode][name] == pytest.approx(values, rel=tolerance, abs=tolerance, nan_ok=True), name


def assert_equal(pair, batch, tolerance=1e-5):
    """What TRL says of the batch, after checking that we say the same."""
    expected, got = (measure(trainer, dict(batch)) for trainer in pair)
    assert got[0].item() == pytest.approx(expected[0].item(), rel=tolerance, abs=tolerance)
    assert difference(got[1], expected[1]) < tolerance
    assert_same_metrics(got[2], expected[2], tolerance)
    assert math.isfinite(expected[0].item())
    assert max(g.abs().max() for g in expected[1].values()) > 1e-4
    return expected


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_with_ratios_off_policy(tmp_path, loss_type, level, beta):
    """Tool holes, a masked sequence, a dead one; accumulation, so that each normaliser has all its factors."""
    cap = 1.3 if loss_type == "cispo" else 0.28
    pair = make_pair(tmp_path, loss_type=loss_type, importance_sampling_level=level, beta=beta, epsilon_high=cap)
    metrics = assert_equal(pair, make_batch(pair[0]))[2]["train"]
    assert set(metrics) >= {"entropy"} | ({"kl"} if beta else set())
    if level == "token":  # the batch leaves the clip range on both sides
        names = ("cispo_clip_ratio",) if loss_type == "cispo" else ("clip_ratio/low_mean", "clip_ratio/high_mean")
        assert all(metrics[name][0] > 0 for name in names)


OPTIONS = [
    ({"epsilon": 0.05}, {}),
    ({"epsilon_high": 0.8}, {}),
    ({"delta": 1.3}, {}),
    ({"beta": 0.4}, {}),
    ({"use_bias_correction_kl": True}, {}),
    ({"use_bias_correction_kl": True, "importance_sampling_level": "sequence"}, {}),
    ({"temperature": 0.7}, {}),
    ({"entropy_coef": 0.5}, {}),
    ({"entropy_coef": 0.5, "loss_type": "grpo", "importance_sampling_level": "sequence"}, {}),
    ({"top_entropy_quantile": 0.4}, {}),
    ({"top_entropy_quantile": 0.4, "beta": 0.0, "importance_sampling_level": "sequence"}, {}),
    ({"off_policy_mask_threshold": 0.09}, {}),  # by the sampler's log-probs row 1 is out; by the old ones it is not
    ({"off_policy_mask_threshold": 0.09, "top_entropy_quantile": 0.4, "loss_type": "cispo", "epsilon_high": 1.3}, {}),
    ({"loss_type": "dr_grpo", "max_completion_length": 12}, {}),
    ({"gradient_accumulation_steps": 1}, {}),
    ({"gradient_accumulation_steps": 1, "loss_type": "bnpo"}, {}),
    ({"steps_per_generation": 3}, {}),
    ({}, {"on_policy": True}),
    ({"importance_sampling_level": "sequence"}, {"on_policy": True}),
    ({"loss_type": "cispo", "epsilon_high": 1.3}, {"on_policy": True}),
    ({}, {"tools": False}),
    ({}, {"per_token_advantages": True}),
    ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"per_token_advantages": True}),
]


@pytest.mark.parametrize("config, batch", OPTIONS, ids=str)
def test_options(tmp_path, config, batch):
    """Each changes TRL's own gradients of this batch, so none of them can be dropped unnoticed."""
    pair = make_pair(tmp_path, **{**BASE, **config})
    grads = assert_equal(pair, make_batch(pair[0], **batch))[1]
    plain = make_pair(tmp_path, **BASE)[0]
    assert difference(measure(plain, make_batch(plain))[1], grads) > 1e-3


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_the_token_count_of_the_generation_batch_and_the_processes_normalise(tmp_path, monkeypatch, loss_type):
    pair = make_pair(tmp_path, loss_type=loss_type, epsilon_high=1.3)
    batch = make_batch(pair[0])
    loss = assert_equal(pair, batch)[0]
    batch["num_items_in_batch"] = torch.tensor(74)
    assert assert_equal(pair, batch)[0].item() == pytest.approx(loss.item() / 2, rel=1e-4)
    monkeypatch.setattr(type(pair[0].accelerator), "num_processes", property(lambda self: 2))
    assert assert_equal(pair, batch)[0].item() == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_in_evaluation_nothing_is_divided_by_the_accumulation(tmp_path, loss_type):
    pair = make_pair(tmp_path, loss_type=loss_type, epsilon_high=1.3, entropy_coef=0.1)
    batch = make_batch(pair[0])
    loss = assert_equal(pair, batch)[0]
    for trainer in pair:
        trainer.model.eval()
    evaluated, _, metrics = assert_equal(pair, batch)
    assert abs(evaluated - loss) > 1e-3
    assert not metrics["train"]
    with torch.no_grad():
        assert pair[1]._compute_loss(pair[1].model, batch).item() == pytest.approx(evaluated.item(), rel=1e-5)


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("loss_type", ["grpo", "cispo", "luspo"])
def test_sampler_weights_multiply_the_policy_term_alone(tmp_path, loss_type, per_sequence):
    """As TRL's four modes make them: truncated or masked (0), per token or per sequence."""
    pair = make_pair(tmp_path, loss_type=loss_type, beta=0.1, epsilon_high=1.3, off_policy_mask_threshold=0.09)
    batch = make_batch(pair[0])
    grads = assert_equal(pair, batch)[1]
    ratio = torch.rand(5, 1 if per_sequence else 7) * 2
    batch["importance_sampling_ratio"] = ratio.masked_fill(ratio < 0.4, 0.0)
    for trainer in pair:
        trainer.use_vllm = True
    weighted = assert_equal(pair, batch)[1]
    assert difference(weighted, grads) > 1e-3
    for trainer in pair:
        trainer.vllm_importance_sampling_correction = False
    assert difference(assert_equal(pair, batch)[1], grads) == 0.0


@pytest.mark.parametrize("score_dead_rows", [True, False])
def test_the_adaptive_entropy_bonus_is_controlled_alike(tmp_path, monkeypatch, score_dead_rows):
    """Off until entropy was measured, then on below the target and off above; the coefficient moves with it.

    By the entropy of all tokens, also while the bonus is off and tokens without an advantage have no gradient.
    """
    monkeypatch.setattr(GRPOTrainer, "score_dead_rows", score_dead_rows)
    options = {"use_adaptive_entropy": True, "entropy_target": 2.5, "entropy_coef_delta": 0.3, "entropy_coef_max": 1.0}
    pair = make_pair(tmp_path, **options)
    batch = make_batch(pair[0])
    losses = []
    for target in (2.5, 2.5, 0.1, 0.1):
        for trainer in pair:
            trainer.args.entropy_target = target
        losses.append(assert_equal(pair, batch)[0].item())
        assert pair[1].entropy_coef == pytest.approx(pair[0].entropy_coef)
        assert pair[1]._last_world_entropy == pytest.approx(pair[0]._last_world_entropy, rel=1e-5)
    assert losses[1] < losses[0] - 1e-2
    assert losses[3] == pytest.approx(losses[0])


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "cohere", "granite", "phi", "mixtral"])
def test_models(tmp_path, kind):
    """A tied head and dropout; a softcap; a scale; a divisor; a bias; experts. Old log-probs at another temperature."""
    options = {"router_aux_loss_coef": 0.0} if kind == "mixtral" else {}
    pair = make_pair(tmp_path, kind, beta=0.1, temperature=0.8, **options)
    batch = make_batch(pair[0])
    assert_equal(pair, batch)
    for trainer in pair:
        trainer.top_entropy_quantile = 0.4
    assert_equal(pair, batch)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        for model in ("model", "ref_model"):
            policy = model == "model"
            expected, got = (
                trainer._get_per_token_logps_and_entropies(
                    getattr(trainer, model).eval(), ids, attention, 7, batch_size=2, compute_entropy=policy
                )
                for trainer in pair
            )
            torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
            assert got[0][0].max() < 0
            assert got[0].shape == (5, 7)
            if policy:
                torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=1e-5)


def test_the_logits_never_exist(tmp_path, monkeypatch):
    """Not for the loss, not for old and reference log-probs; a plain call still returns them."""
    trainer = make_pair(tmp_path, beta=0.1)[1]
    calls, scored = [], []
    for model in (trainer.model, trainer.ref_model):
        model.lm_head.register_forward_hook(lambda *_: calls.append(True))
    batch = make_batch(trainer)
    monkeypatch.setattr(integration, "linear_token_logprobs", lambda *a, **k: scored.append(a[0]) or logprobs(*a, **k))
    measure(trainer, batch)
    assert not scored
    for model in (trainer.model, trainer.ref_model):
        trainer._get_per_token_logps_and_entropies(model, batch["prompt_ids"], batch["prompt_mask"], 2)
    assert len(scored) == 2
    assert not calls
    logits = trainer.model(batch["prompt_ids"]).logits
    assert logits.shape[:2] == batch["prompt_ids"].shape
    assert len(calls) == 1


def test_without_dead_rows_only_the_metrics_are_over_fewer_tokens(tmp_path, monkeypatch):
    """Loss and gradients stay TRL's; entropy and clip ratios are TRL's of the batch without advantage 0."""
    pair = make_pair(tmp_path, loss_type="grpo")
    batch = make_batch(pair[0])
    monkeypatch.setattr(GRPOTrainer, "score_dead_rows", False)
    expected, got = (measure(trainer, batch) for trainer in pair)
    live = {**batch, "tool_mask": batch["tool_mask"] * (batch["advantages"] != 0)[:, None]}
    of_live = measure(pair[0], live)[2]
    assert got[0].item() == pytest.approx(expected[0].item(), rel=1e-5)
    assert difference(got[1], expected[1]) < 1e-5
    assert_same_metrics(got[2], of_live)
    assert abs(of_live["train"]["entropy"][0] - expected[2]["train"]["entropy"][0]) > 1e-3
    batch["advantages"][4] = 0.3  # and where all are alive, all is TRL's
    assert_equal(pair, batch)
    for trainer in pair:  # a bonus on every token's entropy leaves none dead
        trainer._entropy_bonus_enabled, trainer.entropy_coef = True, 0.1
    batch["advantages"][4] = 0.0
    assert_equal(pair, batch)


@pytest.mark.parametrize("score_dead_rows", [True, False])
def test_what_sits_in_tokens_without_a_score_does_not_matter(tmp_path, monkeypatch, score_dead_rows):
    """Padding, tools and dropped rows have no log-prob here; a ratio to their old one must not overflow into NaN."""
    monkeypatch.setattr(GRPOTrainer, "score_dead_rows", score_dead_rows)
    trainer = make_pair(tmp_path, beta=0.1 if score_dead_rows else 0.0)[1]  # with beta no row is dead
    batch = make_batch(trainer)
    expected = measure(trainer, batch)
    unscored = (batch["completion_mask"] * batch["tool_mask"]) == 0
    if not score_dead_rows:
        unscored[4] = True
    batch["old_per_token_logps"][unscored] = -200.0
    got = measure(trainer, batch)
    assert got[0] == expected[0]
    assert difference(got[1], expected[1]) == 0
    assert_same_metrics(got[2], expected[2], 0)


def test_nothing_alive(tmp_path):
    """Every completion truncated and masked: loss and gradients 0, not NaN, and the same metrics."""
    pair = make_pair(tmp_path, beta=0.1)
    batch = make_batch(pair[0])
    batch["completion_mask"].zero_()
    expected, got = (measure(trainer, batch) for trainer in pair)
    assert expected[0] == got[0] == 0
    assert all(not g.any() for g in got[1].values())
    assert_same_metrics(got[2], expected[2])


def test_autocast_rounds_as_much_as_trl_does(tmp_path):
    pair = make_pair(tmp_path, bf16=True, beta=0.1)
    assert_equal(pair, make_batch(pair[0]), tolerance=2e-2)


def test_an_fp32_head_under_autocast(tmp_path):
    """The trunk's hidden states are the same bf16 numbers, so what the head makes of them agrees to fp32 rounding."""
    options = {"bf16": True, "loss_type": "cispo", "epsilon_high": 1.3}  # on-policy the loss is a sum of log-probs
    pair = make_pair(tmp_path, cast_lm_head_to_fp32=True, **options)
    batch = make_batch(pair[0], on_policy=True)
    expected, got = (measure(trainer, batch) for trainer in pair)
    assert got[0].item() == pytest.approx(expected[0].item(), rel=1e-6)
    assert_same_metrics(got[2], expected[2])
    assert difference(got[1], expected[1]) < 1e-2  # of the trunk, in bf16
    rounded = measure(make_pair(tmp_path, **options)[0], batch)
    assert abs(rounded[0] / expected[0] - 1) > 1e-5
    ids, attention = batch["prompt_ids"], batch["prompt_mask"]
    with torch.no_grad():
        expected, got = (t._get_per_token_logps_and_entropies(t.model, ids, attention, 2)[0] for t in pair)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_a_distributed_wrapper_sees_the_forward(tmp_path):
    """Its reducer is armed by its own forward: a loss beside it would leave ranks with different gradients."""
    pair = make_pair(tmp_path)
    batch = make_batch(pair[0])
    expected = measure(pair[0], batch)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(pair[1].model, find_unused_parameters=True)
        reduced = []
        wrapped.register_comm_hook(None, lambda _, bucket: reduced.append(1) or _done(bucket.buffer() * 3))
        pair[1].model.zero_grad()
        loss = pair[1]._compute_loss(wrapped, batch)
        loss.backward()
    finally:
        torch.distributed.destroy_process_group()
    assert reduced
    grads = {name: p.grad / 3 for name, p in pair[1].model.named_parameters()}
    assert loss.item() == pytest.approx(expected[0].item(), rel=1e-5)
    assert difference(grads, expected[1]) < 1e-5


def _done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future
