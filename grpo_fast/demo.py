"""A complete GRPO run that needs no download: a tiny Llama, made and warmed up here, learns to add.

The supervised warm start stops while the model is still poor, with right answers among its samples. From then
on GRPO has only the verifier's word, right or wrong, for each sampled answer.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_fast.config import GRPOConfig, build_config
from grpo_fast.data import load_dataset
from grpo_fast.environment import check_environment
from grpo_fast.rewards import resolve_reward
from grpo_fast.rollout import SamplingOptions
from grpo_fast.rollout.transformers import TransformersRollout
from grpo_fast.trainer import GRPOTrainer

PAD, EOS = "<pad>", "<eos>"
WARM_START_ACCURACY = 0.25  # where the supervised phase stops, on training sums, greedy
WARM_START_RATE = 3e-3
MAX_ANSWER_TOKENS = 4  # three digits and the end


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Held-out greedy accuracy and mean training reward at the start and the end of a demo, and its folder."""

    accuracy_before: float
    accuracy_after: float
    reward_before: float
    reward_after: float
    folder: Path

    def __str__(self) -> str:
        return (
            f"held-out accuracy  {self.accuracy_before:.2f} -> {self.accuracy_after:.2f}  (greedy)\n"
            f"training reward    {self.reward_before:.2f} -> {self.reward_after:.2f}  (sampled)\n"
            f"in {self.folder}: metrics.jsonl, samples.jsonl, reward.png and the checkpoint"
        )


def demo_config(
    seed: int = 0,
    steps: int = 200,
    output_dir: str | Path = "runs/demo",
    overrides: Sequence[str] = (),
) -> GRPOConfig:
    """Returns the configuration of the demo, with overrides as in `load_config`."""
    settings = {
        "seed": seed,
        "max_steps": steps,
        "data": {"task": "addition", "task_args": {"max_value": 49, "digits": 2, "eval_size": 256, "seed": seed}},
        "reward": {"funcs": ["exact_match"]},
        "rollout": {"num_generations": 16, "max_completion_length": MAX_ANSWER_TOKENS},
        "batch": {"prompts_per_step": 64},
        "loss": {"beta": 0.001},
        "optim": {"learning_rate": 1e-3, "adam_beta2": 0.99, "warmup_steps": 5},
        "eval": {"eval_steps": 25, "num_prompts": 256},
        "log": {"output_dir": str(output_dir)},
    }
    return build_config(settings, overrides)


def make_tokenizer(characters: str = "0123456789+=") -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token a character."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left")


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> LlamaForCausalLM:
    """Returns a Llama of 0.3 million parameters with seeded random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def warm_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[dict],
    *,
    until: float = WARM_START_ACCURACY,
    max_steps: int = 500,
    seed: int = 0,
    progress: bool = True,
) -> float:
    """Trains on the rows' answers until the greedy accuracy on a part of them reaches `until`; returns it."""
    input_ids, labels = _supervised_tensors(tokenizer, rows)
    probe = rows[:256]
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_START_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    accuracy = 0.0
    with tqdm(range(1, max_steps + 1), desc="warm start", disable=not progress) as steps:
        for step in steps:
            batch = torch.randint(len(rows), (256,), generator=generator)
            loss = model(input_ids=input_ids[batch], labels=labels[batch]).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:  # GRPO ends 0.1 to 0.2 lower without
                group["lr"] = WARM_START_RATE * min(1.0, step / 20)
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                accuracy = greedy_accuracy(model, tokenizer, probe)
                steps.set_postfix_str(f"loss {loss.item():.2f} accuracy {accuracy:.2f}")
                if accuracy >= until:
                    break
    return accuracy


def _supervised_tensors(tokenizer: PreTrainedTokenizerFast, rows: Sequence[dict]) -> tuple[Tensor, Tensor]:
    """Token ids of prompt, answer and end, padded on the right; labels of the last two only."""
    prompts = [tokenizer.encode(row["prompt"]) for row in rows]
    answers = [tokenizer.encode(row["answer"] + EOS) for row in rows]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    input_ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        start, end = len(prompt), len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, start:end] = torch.tensor(answer)
    return input_ids, labels


def greedy_accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[dict]) -> float:
    """Returns the share of rows whose greedy completion is the answer."""
    options = SamplingOptions(n=1, max_tokens=MAX_ANSWER_TOKENS, temperature=0.0)
    prompts = [tokenizer.encode(row["prompt"]) for row in rows]
    rollouts = TransformersRollout(model, tokenizer).generate(prompts, options, seed=0)
    answers = [tokenizer.decode(rollout.completion_ids, skip_special_tokens=True) for rollout in rollouts]
    return sum(answer == row["answer"] for answer, row in zip(answers, rows, strict=True)) / len(rows)


def prepare_demo(args: GRPOConfig) -> GRPOTrainer:
    """Checks the machine and the settings, makes the data and the model, and warms it up.

    Raises:
        ValueError, ImportError: as `grpo_fast.run.prepare_run`.
    """
    check_environment(args)
    train_rows, eval_rows = load_dataset(args.data, "train"), load_dataset(args.data, "eval")
    rewards = [resolve_reward(name) for name in args.reward.funcs]
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args.seed)
    warm_start(model, tokenizer, train_rows, seed=args.seed, progress=args.log.progress)
    return GRPOTrainer(model, rewards, args, train_rows, eval_rows, tokenizer)


def run_demo(args: GRPOConfig) -> DemoResult:
    """Makes and warms up the model, trains it with GRPO as `args` says, and returns what was reached."""
    trainer = prepare_demo(args)
    trainer.train()
    return demo_result(Path(args.log.output_dir))


def demo_result(folder: Path) -> DemoResult:
    """What the run in `folder` reached, read from its metrics."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    rewards = [line["reward"] for line in lines if "reward" in line]
    few = min(5, len(rewards))
    return DemoResult(
        accuracy_before=accuracies[0],
        accuracy_after=accuracies[-1],
        reward_before=sum(rewards[:few]) / few,
        reward_after=sum(rewards[-few:]) / few,
        folder=folder,
    )
