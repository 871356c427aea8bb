"""From a configuration to a trainer that is ready to train. Everything but the model is checked before it loads."""

from transformers.utils import logging as transformers_logging

from grpo_fast.config import GRPOConfig
from grpo_fast.data import load_dataset
from grpo_fast.model import load_policy
from grpo_fast.rewards import resolve_reward
from grpo_fast.trainer import GRPOTrainer


def prepare_run(args: GRPOConfig) -> GRPOTrainer:
    """Loads data, reward functions, model and tokenizer, in this order.

    Raises:
        ValueError: something in `args` is missing or impossible with these data.
        OSError: a file or the model is missing.
        ImportError: an optional package is missing.
        MemoryError: the training cannot fit.
    """
    if args.model.path is None:
        raise ValueError("model.path: expected a folder or hub name, got null. Set model.path")
    if not args.reward.funcs:
        raise ValueError("reward.funcs: expected at least one reward function, got []. Set e.g. [exact_match]")
    train_rows, eval_rows = load_dataset(args.data, "train"), load_dataset(args.data, "eval")
    if args.batch.prompts_per_step > len(train_rows):
        raise ValueError(
            f"batch.prompts_per_step: expected at most the {len(train_rows)} prompts of the training data, "
            f"got {args.batch.prompts_per_step}. Set 1 to {len(train_rows)}"
        )
    rewards = [resolve_reward(name) for name in args.reward.funcs]
    transformers_logging.disable_progress_bar()
    try:
        model, tokenizer = load_policy(args)
    except OSError as error:
        raise OSError(f"model.path: no model in the folder or hub repository {args.model.path}: {error}") from error
    return GRPOTrainer(model, rewards, args, train_rows, eval_rows, tokenizer)
