"""From a configuration to a trainer that is ready to train."""

from transformers.utils import logging as transformers_logging

from grpo_fast.config import GRPOConfig
from grpo_fast.data import load_dataset
from grpo_fast.environment import check_environment
from grpo_fast.trainer import GRPOTrainer


def prepare_run(args: GRPOConfig) -> GRPOTrainer:
    """Checks the machine, loads data, reward functions and tokenizer, checks all prompts, and then loads the model.

    Raises:
        ValueError: something in `args` is missing or impossible with these data or on this machine.
        OSError: a file or the model is missing.
        ImportError: an optional package is missing.
        MemoryError: the training cannot fit.
    """
    check_environment(args)
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
    transformers_logging.disable_progress_bar()
    return GRPOTrainer(args.model.path, args.reward.funcs, args, train_rows, eval_rows)
