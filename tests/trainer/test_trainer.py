"""The trainer as a whole, on models of a few thousand parameters."""

import copy
import json
import logging
import math

import pytest
import torch
from tiny_models import EOS, ScriptedRollout, make_model, make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo_fast as gf
import grpo_fast.forward
from grpo_fast.config import DataConfig, EvalConfig, ModelConfig, SaveConfig
from grpo_fast.trainer import GRPOTrainer

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "extra": [a, b]} for a in range(3) for b in range(3)]


def length_of(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]


def share_of_fives(completions, **_):
    return [text.count("5") / max(len(text), 1) for text in completions]


def make_trainer(args, functions=share_of_fives, rows=ROWS, model=None, **options):
    model = make_model() if model is None else model
    return GRPOTrainer(model, functions, args, rows, processing_class=make_tokenizer(), **options)


def lines_of(args, stem="metrics"):
    with open(f"{args.log.output_dir}/{stem}.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_train_learns_and_leaves_everything_behind(make_args, beta):
    args = make_args(
        max_steps=25, loss={"beta": beta}, eval=EvalConfig(num_prompts=3, num_generations_eval=2, temperature=1.0)
    )
    trainer = make_trainer(args, [share_of_fives, "exact_match"], eval_dataset=ROWS[:4])
    metrics = trainer.train()
    lines = [line for line in lines_of(args) if "reward" in line]
    assert [line["step"] for line in lines] == list(range(1, 26))
    early = sum(line["reward"] for line in lines[:5]) / 5
    assert sum(line["reward"] for line in lines[-5:]) / 5 > early + 0.3
    names = {
        "reward", "reward_std", "frac_reward_zero_std", "rewards/share_of_fives/mean", "rewards/share_of_fives/std",
        "rewards/exact_match/mean", "rewards/exact_match/std", "entropy", "ratio/mean", "ratio/min", "ratio/max",
        "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "completions/mean_length",
        "completions/min_length", "completions/max_length", "completions/clipped_ratio",
        "completions/mean_terminated_length", "completions/min_terminated_length", "completions/max_terminated_length",
        "num_tokens", "loss", "grad_norm", "learning_rate", "epoch", "step_time", "time/rollout", "time/reward",
        "time/reference", "time/update", "time/save", "tokens_per_second", "padding_share", "num_micro_batches",
        "peak_memory_gib", "step", "update_tokens", "update_token_share", "groups_sampled",
        "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
    }  # fmt: skip
    for line in lines:
        assert set(line) == names | ({"kl"} if beta else set())
        assert all(math.isfinite(value) for value in line.values())
        assert line["sampling/sampling_logp_difference/max"] < 1e-5  # the engine's arithmetic is the update's
        assert sum(line[name] for name in line if name.startswith("time/")) <= line["step_time"]
    if beta:
        assert lines[0]["kl"] == pytest.approx(0, abs=1e-8)
        assert lines[-1]["kl"] > 0
    evaluations = [line for line in lines_of(args) if "eval/accuracy" in line]
    assert [line["step"] for line in evaluations] == [0, 25]
    assert metrics["eval/pass@2"] >= metrics["eval/accuracy"] > evaluations[0]["eval/accuracy"]
    samples = lines_of(args, "samples")
    assert len(samples) == 25 * 4
    assert set(samples[0]) == {"step", "prompt", "completion", "rewards", "advantage", "truncated"}
    loaded = AutoModelForCausalLM.from_pretrained(f"{args.log.output_dir}/checkpoint-25")
    state = trainer.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    assert AutoTokenizer.from_pretrained(f"{args.log.output_dir}/checkpoint-25")("1+1=")["input_ids"]


def test_same_seed_same_run_other_seed_other_run(make_args):
    def run(seed):
        trainer = make_trainer(make_args(max_steps=2, seed=seed))
        rewards = [trainer.step()["reward"] for _ in range(2)]
        return rewards, trainer.model.state_dict()

    torch.manual_seed(1)
    rewards, weights = run(0)
    torch.manual_seed(2)
    again, same = run(0)
    assert rewards == again
    assert all(torch.equal(value, same[name]) for name, value in weights.items())
    assert not all(torch.equal(value, run(1)[1][name]) for name, value in weights.items())


def test_state_continues_a_run_exactly(make_args):
    args = make_args(max_steps=5)
    trainer = make_trainer(args)
    for _ in range(2):
        trainer.step()
    weights, state = copy.deepcopy(trainer.model.state_dict()), copy.deepcopy(trainer.state_dict())
    expected = [trainer.step() for _ in range(3)]
    model = make_model(seed=9)
    model.load_state_dict(weights)
    other = make_trainer(args, model=model)
    other.load_state_dict(state)
    got = [other.step() for _ in range(3)]
    for name in ("reward", "loss", "grad_norm", "num_tokens", "epoch", "learning_rate"):
        assert [metrics[name] for metrics in got] == [metrics[name] for metrics in expected], name


def test_groups_are_by_construction(make_args):
    """The same prompt twice in a batch is two groups of G, in whatever order the prompts come."""
    completions = [[5] * n for n in (1, 3, 2, 6)] + [[6] * n for n in (4, 4, 4, 4)]
    args = make_args(data=DataConfig(shuffle_dataset=False), loss={"beta": 0.0}, log={"num_completions_to_print": 8})
    rows = [ROWS[0], ROWS[0]]
    trainer = make_trainer(args, length_of, rows, rollout=ScriptedRollout(completions))
    metrics = trainer.step()
    assert trainer.collect.rollout.prompts[0] == [[3, 13, 3, 15]] * 2
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["reward_std"] == pytest.approx(1.8708287 / 2, abs=1e-5)
    advantages = [sample["advantage"] for sample in lines_of(args, "samples")]
    assert advantages == pytest.approx([-1.0690, 0.0, -0.5345, 1.6036, 0, 0, 0, 0], abs=1e-3)

    swapped = make_args(
        data=DataConfig(shuffle_dataset=False),
        log={"output_dir": args.log.output_dir + "2", "num_completions_to_print": 8},
    )
    make_trainer(swapped, length_of, rows, rollout=ScriptedRollout(completions[4:] + completions[:4])).step()
    assert [sample["advantage"] for sample in lines_of(swapped, "samples")] == advantages[4:] + advantages[:4]


def test_token_ids_are_never_encoded_again(make_args):
    """Ids that decode to one text and would be encoded otherwise are what is trained on."""
    tokenizer = make_tokenizer()
    completions = [[3, 0, 4, EOS], [0, 0, EOS], [3, 4], [EOS]] * 2
    assert tokenizer(tokenizer.decode(completions[0], skip_special_tokens=True))["input_ids"] == [3, 4]
    seen = []
    trainer = make_trainer(
        make_args(loss={"beta": 0.1}),
        lambda completion_ids, completions: seen.append((completion_ids, completions)) or [0.0] * 8,
        rollout=ScriptedRollout(completions),
    )  # fmt: skip
    forward = trainer.update.forward
    make_batches = forward.micro_batches
    forward.micro_batches = lambda *args: seen.append(make_batches(*args)) or seen[-1]
    trainer.step()
    assert seen[0][0] == completions
    assert seen[0][1] == ["01", "", "01", ""] * 2
    trained = [ids for batch in seen[1] for ids in batch.token_ids.split(batch.cu_seqlens.diff().tolist())]
    rows = [row for batch in seen[1] for row in batch.rows]
    assert {row: ids.tolist() for row, ids in zip(rows, trained, strict=True)} == dict(enumerate(completions))


def test_empty_completions(make_args):
    completions = [[], [EOS], [5, EOS], [5, 6]] + [[]] * 4
    texts = []

    def reward(completions, completion_ids):
        texts.extend(completions)
        return [float(len(ids)) for ids in completion_ids]

    trainer = make_trainer(make_args(), reward, rollout=ScriptedRollout(completions))
    metrics = trainer.step()
    assert texts == ["", "", "2", "23", "", "", "", ""]
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["completions/min_length"] == 0
    assert metrics["grad_norm"] > 0
    nothing = make_trainer(make_args(), reward, rollout=ScriptedRollout([[]] * 8))
    metrics = nothing.step()
    assert metrics["loss"] == metrics["grad_norm"] == metrics["padding_share"] == 0.0


def test_truncated_completions_can_be_left_out(make_args):
    completions = [[5, EOS], [5, 6, 7, 8, 9, 5], [6, EOS], [7, 7, EOS]] * 2
    runs = []
    for masked in (False, True):
        args = make_args(rollout={"mask_truncated_completions": masked}, log={"num_completions_to_print": 8})
        engine = ScriptedRollout(completions, truncated=(1, 5))
        trainer = make_trainer(args, length_of, rollout=engine)
        calls = []
        forward = trainer.update.forward
        make_batches = forward.micro_batches
        forward.micro_batches = lambda *a, calls=calls, make=make_batches: calls.append(make(*a)) or calls[-1]
        metrics = trainer.step()
        runs.append(
            (sorted(row for batch in calls[0] for row in batch.rows), metrics["reward"], lines_of(args, "samples"))
        )
    assert runs[0][0] == list(range(8))
    assert runs[1][0] == [0, 2, 3, 4, 6, 7]
    assert runs[1][1] == runs[0][1]  # its reward still counts in the group
    assert [s["advantage"] for s in runs[1][2]][-8:] == [s["advantage"] for s in runs[0][2]][-8:]
    assert metrics["completions/clipped_ratio"] == 0.25
    assert metrics["completions/mean_terminated_length"] == pytest.approx(7 / 3)


def test_conversational_prompts(make_args):
    seen = {}

    def reward(prompts, completions, answer):
        seen.update(prompts=prompts, completions=completions, answer=answer)
        return [1.0] * len(prompts)

    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in ROWS]
    trainer = make_trainer(make_args(data=DataConfig(shuffle_dataset=False)), reward, rows)
    trainer.step()
    assert seen["prompts"] == [rows[0]["prompt"]] * 4 + [rows[1]["prompt"]] * 4
    assert seen["answer"] == ["0"] * 4 + ["1"] * 4
    assert all(
        len(c) == 1 and c[0]["role"] == "assistant" and isinstance(c[0]["content"], str) for c in seen["completions"]
    )


def test_all_columns_reach_the_reward(make_args):
    seen = {}

    def reward(prompts, completions, completion_ids, **columns):
        seen.update(columns)
        return [0.0] * len(prompts)

    rows = [{**ROWS[0]}, {"prompt": "1=", "only": 7}]
    make_trainer(make_args(data=DataConfig(shuffle_dataset=False)), reward, rows).step()
    assert seen == {"answer": ["0"] * 4 + [None] * 4, "extra": [[0, 0]] * 4 + [None] * 4, "only": [None] * 4 + [7] * 4}


def test_columns_must_not_shadow_arguments(make_args):
    with pytest.raises(ValueError, match=r"columns \['completions'\] are named like"):
        make_trainer(make_args(), rows=[{"prompt": "1", "completions": 2}]).step()


def test_rows_that_nobody_rewards_have_no_gradient_and_no_nan(make_args, caplog):
    completions = [[5, EOS], [6, EOS], [7, EOS], [8, EOS]] * 2
    args = make_args(log={"num_completions_to_print": 8})
    with caplog.at_level(logging.WARNING, logger="grpo_fast.rewards"):
        metrics = make_trainer(
            args, lambda completions: [1.0, 0.0, 0.5, None] + [None] * 4, rollout=ScriptedRollout(completions)
        ).step()
    samples = lines_of(args, "samples")
    assert samples[3]["rewards"] == {"<lambda>": None}
    assert [sample["advantage"] for sample in samples[3:]] == [0.0] * 5
    assert metrics["reward"] == pytest.approx(0.5)
    assert metrics["frac_reward_zero_std"] == 0.5
    assert all(math.isfinite(value) for value in metrics.values())
    assert len(caplog.records) == 2


def test_a_crashing_reward_loses_nothing_already_logged(make_args):
    calls = []

    def reward(completions):
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("solution")
        return [float(i) for i in range(len(completions))]

    args = make_args(max_steps=5)
    with pytest.raises(RuntimeError, match="reward function reward raised KeyError: 'solution'"):
        make_trainer(args, reward).train()
    assert [line["step"] for line in lines_of(args)] == [1, 2]
    assert len(lines_of(args, "samples")) == 8


def test_number_of_forwards(make_args):
    """On-policy without a reference: one forward, and none to recompute log-probs; none at all without a signal."""

    def forwards(**loss):
        trainer = make_trainer(make_args(loss=loss), length_of, rollout=ScriptedRollout([[5, EOS], [5, 6, EOS]] * 4))
        count = [0, 0]
        trainer.model.model.register_forward_hook(lambda *_: count.__setitem__(0, count[0] + 1))
        if trainer.reference is not None:
            trainer.reference.forward.model.model.register_forward_hook(lambda *_: count.__setitem__(1, count[1] + 1))
        trainer.step()
        return count

    assert forwards(beta=0.0) == [1, 0]
    assert forwards(beta=0.1) == [1, 1]
    assert forwards(beta=0.1, num_iterations=3) == [3, 1]
    dead = make_trainer(make_args(), length_of, rollout=ScriptedRollout([[5, EOS]] * 8))
    dead.model.model.register_forward_hook(lambda *_: pytest.fail("a forward without a signal"))
    assert dead.step()["update_tokens"] == 0


def test_reference_is_a_frozen_copy(make_args):
    trainer = make_trainer(
        make_args(loss={"beta": 0.1}), lambda completion_ids: [float(sum(i)) for i in completion_ids]
    )
    before = copy.deepcopy(trainer.reference.forward.model.state_dict())
    for _ in range(2):
        metrics = trainer.step()
    assert metrics["kl"] > 0
    after = trainer.reference.forward.model.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert not any(parameter.requires_grad for parameter in trainer.reference.forward.model.parameters())
    assert make_trainer(make_args()).reference is None


def test_group_size_and_batch_need_not_divide_anything(make_args):
    args = make_args(
        loss={"beta": 0.1},
        rollout={"num_generations": 3},
        batch={"prompts_per_step": 5, "max_tokens_per_micro_batch": 7},
    )
    metrics = make_trainer(args, rows=ROWS[:2]).step()
    assert metrics["num_micro_batches"] >= 5
    assert metrics["epoch"] == 2.5


def test_a_failing_save_loses_no_metrics(make_args, monkeypatch):
    def fail(self):
        raise OSError("disk full")

    monkeypatch.setattr(GRPOTrainer, "save", fail)
    args = make_args(max_steps=2)
    trainer = make_trainer(args)
    with pytest.raises(OSError, match="disk full"):
        trainer.train()
    lines = lines_of(args)
    assert [line["step"] for line in lines] == [1, 2]
    assert (trainer.global_step, trainer.num_tokens) == (2, lines[1]["num_tokens"])
    assert lines[1]["num_tokens"] > lines[0]["num_tokens"]


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_step_with_nothing_to_train_reports_the_same_metrics(make_args, beta):
    engine = ScriptedRollout([[5, EOS], [5, 6, EOS]] * 4)
    trainer = make_trainer(make_args(loss={"beta": beta}), length_of, rollout=engine)
    names = trainer.step().keys()
    engine.completions = [[]] * 8
    assert trainer.step().keys() == names


def test_the_policys_head_is_the_references(make_args, monkeypatch):
    asked = []
    find = grpo_fast.forward.find_linear_head
    monkeypatch.setattr("grpo_fast.forward.find_linear_head", lambda model: asked.append(model) or find(model))
    trainer = make_trainer(make_args(loss={"beta": 0.1}, model=ModelConfig(reference_dtype="bfloat16")))
    assert asked == [trainer.model]
    assert trainer.reference.forward.head is trainer.update.forward.head is not None
    assert trainer.step()["kl"] >= 0  # of the reference's own, rounded weights


def test_checkpoints_at_intervals(make_args, tmp_path):
    args = make_args(max_steps=5, save=SaveConfig(save_steps=2, save_total_limit=2))
    make_trainer(args).train()
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]


def test_evaluation_interval_and_untouched_training(make_args):
    rewards = []
    for steps in (0, 1):
        args = make_args(max_steps=2, eval=EvalConfig(eval_steps=steps, num_prompts=100))
        trainer = make_trainer(args, eval_dataset=ROWS[:3] if steps else None)
        trainer.train()
        rewards.append([line["reward"] for line in lines_of(args) if "reward" in line])
    assert rewards[0] == rewards[1]
    assert [line["step"] for line in lines_of(args) if "eval/accuracy" in line] == [0, 1, 2]


def test_samples_can_be_left_out(make_args, tmp_path):
    make_trainer(make_args(log={"log_completions": False})).step()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_dropped_prompts_are_counted(make_args):
    args = make_args(data=DataConfig(max_prompt_length=4, overlong_prompt="drop"))
    metrics = make_trainer(args, rows=[*ROWS, {"prompt": "100+100=", "answer": "200"}]).step()
    assert metrics["prompts_dropped"] == 1


def test_a_world_size_without_torchrun_is_refused(make_args, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"^WORLD_SIZE: expected 1, or torchrun's RANK, .* beside 2, got none. Start"):
        make_trainer(make_args())


def test_model_and_tokenizer_from_a_path(make_args, tmp_path, capsys):
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    trainer = GRPOTrainer(str(tmp_path / "model"), share_of_fives, make_args(loss={"beta": 0.04}), ROWS)
    assert "weights, gradients and AdamW" in capsys.readouterr().out
    assert trainer.step()["num_tokens"] > 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert gf.GRPOTrainer(model, share_of_fives, make_args(), ROWS).tokenizer.eos_token_id == EOS


def test_where_the_loss_is_computed_from_is_said_once(make_args, caplog):
    with caplog.at_level(logging.INFO, logger="grpo_fast.trainer"):
        make_trainer(make_args(loss={"beta": 0.1}))
        model = make_model()
        model.lm_head = torch.nn.Sequential(model.lm_head)
        make_trainer(make_args(), model=model)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "LlamaForCausalLM: loss from hidden states: the head is a linear layer, "
         "logits are never materialised"),
        ("INFO", "LlamaForCausalLM: rows without padding, in which completions share their prompt"),
        ("INFO", "LlamaForCausalLM: reference: a copy in float32"),
        ("WARNING", "LlamaForCausalLM: loss from logits: the Sequential is not a plain linear layer"),
        ("INFO", "LlamaForCausalLM: rows without padding, in which completions share their prompt"),
    ]  # fmt: skip


def test_progress_bar(make_args, capsys):
    make_trainer(make_args(loss={"beta": 0.1}, log={"progress": True})).train()
    shown = capsys.readouterr().err
    for part in ("GRPO: 100%", "reward ", "kl ", "entropy ", "clip ", "tok/s "):
        assert part in shown
