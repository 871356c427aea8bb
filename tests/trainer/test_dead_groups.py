"""Groups without a signal: what the update leaves out, what it still divides by, and what is sampled in their place."""

import copy
import dataclasses

import pytest
import torch
from plain_rows import assert_close, gradients_of, plain_logps
from tiny_models import EOS, make_model

import grpo_fast.forward
from grpo_fast.batching import MicroBatches, TokenBudget, Trained
from grpo_fast.config import GRPOConfig, LossConfig, OptimConfig, RolloutConfig
from grpo_fast.experience import Experience
from grpo_fast.forward import PolicyForward
from grpo_fast.metrics import PhaseTimer
from grpo_fast.rewards import Scores
from grpo_fast.rollout import Rollout
from grpo_fast.sampling_correction import SamplingCorrection
from grpo_fast.trainer import GRPOTrainer
from grpo_fast.update import GRPOUpdate

PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12), (17,)]
COMPLETIONS = [[20, 21, EOS], [22, 0, 23, 24], [30, 31, 32, EOS], [33, 34, 35, 36, 37, EOS], [26, 27], [28, 29, 30]]
ROLLOUTS = [
    Rollout(prompt_ids=PROMPTS[index // 2], completion_ids=tuple(ids), truncated=ids[-1] != EOS)
    for index, ids in enumerate(COMPLETIONS)
]
ADVANTAGES = torch.tensor([1.0, -1.0, 0.0, 0.0, -0.5, 0.5])  # the second group is dead
LENGTHS = [len(ids) for ids in COMPLETIONS]
LONGEST = 8


def update_of(model, *, max_tokens=10**6, correction=None, rollouts=ROLLOUTS, **loss):
    args = GRPOConfig(
        max_steps=1,
        rollout=RolloutConfig(max_completion_length=LONGEST),
        loss=LossConfig(beta=0.0, **loss),
        optim=OptimConfig(learning_rate=0.1, max_grad_norm=1e9),
    )
    forward = PolicyForward(model, backend=args.loss.backend)
    update, kept = GRPOUpdate(forward, args, correction), {}
    step = update._optimizer_step
    update._optimizer_step = lambda rate: (kept.update(gradients_of(model)), step(rate))[1]
    scores = Scores(torch.zeros(6), torch.zeros(6, 0))
    experience = Experience([None] * 3, rollouts, scores, ADVANTAGES, 3)
    counted = experience.counted(LENGTHS, dead_groups=args.loss.count_dead_groups)
    trained = Trained.of(rollouts, ADVANTAGES, LENGTHS, all_move=False)
    batches = MicroBatches(trained, forward.micro_batches, TokenBudget(max_tokens))
    metrics = update(trained, batches, None, (len(counted), sum(counted)), 0)
    return metrics, kept, batches, update


def oracle(model, loss_type, count_dead, weights=None):
    """Over all six rows, dead ones included, in float64."""
    rows = [0, 1, 4, 5] if not count_dead else range(6)
    tokens = sum(LENGTHS[row] for row in rows)
    divisor = {"grpo": len(rows), "luspo": len(rows), "dr_grpo": len(rows) * LONGEST, "bnpo": tokens, "dapo": tokens}
    total = 0
    for row in range(6):
        logps = plain_logps(model, ROLLOUTS[row], 1.0)[0]
        per_token = -(logps - logps.detach()).exp() * ADVANTAGES[row].double()
        if weights is not None:
            per_token = per_token * weights[row]
        total = total + (per_token.mean() if loss_type == "grpo" else per_token.sum())
    return total / divisor[loss_type]


@pytest.mark.parametrize("count_dead", [True, False])
@pytest.mark.parametrize("loss_type", ["grpo", "luspo", "dr_grpo", "bnpo", "dapo"])
def test_they_leave_the_update_and_stay_in_the_denominator_unless_asked(loss_type, count_dead):
    model = make_model().double()
    clean = copy.deepcopy(model).eval()
    loss = oracle(clean, loss_type, count_dead)
    loss.backward()
    metrics, gradients, batches, _ = update_of(model, loss_type=loss_type, count_dead_groups=count_dead)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6, abs=1e-9)
    assert_close(gradients, gradients_of(clean), 1e-6)
    assert sorted(row for batch in batches.batches for row in batch.rows) == [0, 1, 4, 5]


def test_nothing_of_them_reaches_the_model_or_the_head(monkeypatch):
    model, fed, rows = make_model(), [], []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    inner = grpo_fast.forward.linear_grpo_loss

    def counting(hidden, *args, **kwargs):
        rows.append(hidden.shape[0])
        return inner(hidden, *args, **kwargs)

    monkeypatch.setattr(grpo_fast.forward, "linear_grpo_loss", counting)
    _, _, batches, _ = update_of(model)
    living = [0, 1, 4, 5]
    fed, rows = fed[-len(batches.batches) :], rows[-len(batches.batches) :]
    assert sum(fed) == 3 + 1 + sum(LENGTHS[row] - 1 for row in living)  # no prompt twice, no last token, no dead group
    assert sum(rows) == sum(LENGTHS[row] for row in living)


@pytest.mark.parametrize("failures", [1, 2])
def test_out_of_memory_halves_the_budget_and_changes_nothing_else(failures, monkeypatch, caplog):
    expected, gradients, _, _ = update_of(make_model().double())
    left = [failures]
    inner = PolicyForward.loss

    def loss(self, batch, **options):
        out = inner(self, batch, **options)
        if left[0]:
            left[0] -= 1
            out.loss.backward()  # what an attempt leaves behind does not count
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return out

    monkeypatch.setattr(PolicyForward, "loss", loss)
    metrics, again, batches, _ = update_of(make_model().double())
    assert not left[0]
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert_close(again, gradients, 1e-6)
    whole = 3 + 1 + sum(LENGTHS[row] - 1 for row in (0, 1, 4, 5))
    assert batches._budget.max_tokens == whole // 2**failures
    said = [record for record in caplog.records if "out of memory" in record.getMessage()]
    assert len(said) == failures
    assert f"max_tokens_per_micro_batch={whole // 2}" in said[0].getMessage()


def test_one_completion_that_does_not_fit_is_said_with_what_to_do(monkeypatch):
    def loss(*args, **options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried 9 GB")

    monkeypatch.setattr(PolicyForward, "loss", loss)
    with pytest.raises(MemoryError, match=r"one prompt and completion, \d+ tokens.*gradient_checkpointing=true"):
        update_of(make_model())


def test_other_errors_are_not_taken_for_it(monkeypatch):
    def loss(*args, **options):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(PolicyForward, "loss", loss)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        update_of(make_model())


def with_logprobs(logprobs):
    return [dataclasses.replace(rollout, logprobs=given) for rollout, given in zip(ROLLOUTS, logprobs, strict=True)]


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_weights_of_another_sampler_multiply_the_policy_term(mode):
    model = make_model().double()
    clean = copy.deepcopy(model).eval()
    shifts = [torch.linspace(-0.4, 0.9, length, dtype=torch.float64) for length in LENGTHS]  # exp: 0.67 to 2.46
    logps = [plain_logps(clean, rollout, 1.0)[0].detach() for rollout in ROLLOUTS]
    rollouts = with_logprobs([tuple((p - s).tolist()) for p, s in zip(logps, shifts, strict=True)])
    ratios = [shift.exp() for shift in shifts]
    weights = [w.clamp(max=1.5) if mode == "token_truncate" else torch.where(w <= 1.5, w, 0.0) for w in ratios]
    oracle(clean, "dapo", True, weights).backward()
    metrics, gradients, _, _ = update_of(
        model, correction=SamplingCorrection(mode, 1.5), rollouts=rollouts, loss_type="dapo"
    )
    assert_close(gradients, gradients_of(clean), 1e-5)
    used = torch.cat([weights[row] for row in (0, 1, 4, 5)])
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(used.mean().item(), rel=1e-5)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(used.max().item(), rel=1e-5)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(0.9, rel=1e-4)


def test_log_probs_are_beside_their_tokens_however_many_the_engine_gives():
    """B160: too few, too many and none; what is missing weighs 1."""
    rollouts = with_logprobs([(-1.0, -2.0), (-1.0, -2.0, -3.0, -4.0, -9.0), None, None, (), (-5.0, -6.0, -7.0)])
    trained = Trained.of(rollouts, ADVANTAGES, LENGTHS, all_move=False)
    nan = float("nan")
    expected = [-1, -2, nan, -1, -2, -3, -4, nan, nan, -5, -6, -7]
    torch.testing.assert_close(trained.sampled_logps(), torch.tensor(expected).float(), equal_nan=True)
    assert SamplingCorrection().weights(torch.tensor([nan, 0.0, 9.0])).tolist() == [1.0, 1.0, 3.0]


@pytest.mark.parametrize("option", [{"top_p": 0.9}, {"top_k": 5}])
def test_log_probs_of_a_part_of_the_vocabulary_are_not_asked_for(option, make_args, tokenizer):
    """B58: the sampler's are renormalised over what it kept; against them the ratio would be below 1."""
    asked = []
    trainer = GRPOTrainer(
        make_model(),
        lambda completion_ids, **_: [float(len(set(ids))) for ids in completion_ids],
        make_args(max_steps=1, rollout=option, loss={"num_iterations": 2}),
        [{"prompt": "1+1="}, {"prompt": "2+2="}],
        processing_class=tokenizer,
    )
    inner = trainer.collect.rollout.generate

    def generate(prompts, options, seed):
        asked.append(options.logprobs)
        return inner(prompts, options, seed)

    trainer.collect.rollout.generate = generate
    metrics = trainer.step()
    assert asked == [False]
    assert not any(name.startswith("sampling/") for name in metrics)
    assert trainer.update.correction is None


def test_dead_groups_are_sampled_anew_up_to_the_cap(make_args, tokenizer):
    """Prompts with an odd number are always dead."""

    def reward(prompts, completion_ids, **_):
        return [0.0 if int(p[0]) % 2 else float(sum(ids) % 5) for p, ids in zip(prompts, completion_ids, strict=True)]

    rows = [{"prompt": f"{number}+1="} for number in range(8)]

    def run(rounds):
        args = make_args(max_steps=1, rollout={"max_resampling_rounds": rounds}, batch={"prompts_per_step": 4})
        trainer = GRPOTrainer(make_model(), reward, args, rows, processing_class=tokenizer)
        experience = trainer.collect(0, PhaseTimer(trainer.model.device))
        alive = (experience.advantages.view(4, -1) != 0).any(1)
        numbers = [int(prompt.row["prompt"][0]) for prompt in experience.prompts]
        for number, is_alive in zip(numbers, alive.tolist(), strict=True):
            assert not (number % 2 and is_alive)
        for index, prompt in enumerate(experience.prompts):
            for rollout in experience.rollouts[index * 4 : index * 4 + 4]:
                assert rollout.prompt_ids == tuple(prompt.ids)
        return alive.sum().item(), experience.groups_sampled

    without, sampled = run(0)
    assert sampled == 4
    assert without < 4, "the test needs a dead group"
    alive, sampled = run(6)
    assert alive > without
    assert 4 < sampled <= 4 + 6 * 4
