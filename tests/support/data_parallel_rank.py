"""A process of a data-parallel run: some steps of the trainer, with completions that depend on the prompt alone."""

import random
import tempfile

import torch
from tiny_models import VOCAB, make_model, make_tokenizer

from grpo_fast.config import build_config
from grpo_fast.rollout import Rollout
from grpo_fast.trainer import GRPOTrainer

ROWS = [{"prompt": f"{number}+{number % 3}=", "number": number} for number in range(12)]
GENERATIONS = 2
RATE = 0.1


class ByPrompt:
    """An engine whose completions are functions of the prompt, whichever process asks, of 1 to 6 tokens."""

    def generate(self, prompts, options, seed):
        return [self._rollout(prompt, index) for prompt in prompts for index in range(options.n)]

    def _rollout(self, prompt, index):
        rng = random.Random(str((tuple(prompt), index)))
        ids = tuple(rng.randrange(3, len(VOCAB)) for _ in range(rng.randrange(1, 7)))
        logprobs = tuple(-3.0 - rng.random() for _ in ids)
        return Rollout(prompt_ids=tuple(prompt), completion_ids=ids, truncated=False, logprobs=logprobs)

    def sync(self, model):
        pass


class ThreeAndNine(ByPrompt):
    """Completions of 1 and 2 tokens for the first prompt asked for, of 4 and 5 for others: 3 and 9 for two prompts."""

    def _rollout(self, prompt, index):
        lengths = (1, 2) if prompt[0] == make_tokenizer()("0").input_ids[0] else (4, 5)
        ids = tuple(range(5, 5 + lengths[index]))
        return Rollout(prompt_ids=tuple(prompt), completion_ids=ids, truncated=False, logprobs=tuple(-3.0 for _ in ids))


def longest_wins(completion_ids, number, **_):
    """Groups of every third prompt are dead."""
    return [float(len(ids)) + ids[0] / 100 if n % 3 else 0.0 for ids, n in zip(completion_ids, number, strict=True)]


def always_alive(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]


def run(rank: int, case: dict) -> dict:
    """Weights, and metrics of every step, of a run with plain gradient descent: a factor in a gradient shows.

    Args:
        rank: makes the weights that a process starts from its own, those of the first count.
        case: steps, rows, engine, reward, dtype and sections of the configuration.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "max_steps": case.get("steps", 1),
            "data": {"shuffle_dataset": False},
            "rollout": {"num_generations": GENERATIONS, "max_completion_length": 6, **case.get("rollout", {})},
            "loss": {"beta": 0.0, **case.get("loss", {})},
            "optim": {
                "learning_rate": RATE,
                "lr_scheduler_type": "constant",
                "max_grad_norm": 1e6,
                **case.get("optim", {}),
            },
            "batch": {"prompts_per_step": case.get("prompts", 4), "max_tokens_per_micro_batch": 20},
            "log": {"output_dir": folder, "progress": False, "plot": False},
        }
        model = make_model(seed=rank).to(torch.float64)
        trainer = GRPOTrainer(
            model,
            case.get("reward", longest_wins),
            build_config(settings),
            case.get("rows", ROWS),
            processing_class=make_tokenizer(),
            rollout=case.get("engine", ByPrompt)(),
        )
        trainer.update.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        metrics = [trainer.step() for _ in range(case.get("steps", 1))]
    return {"before": before, "after": model.state_dict(), "metrics": metrics}
