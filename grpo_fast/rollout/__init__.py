"""Rollout engines: token ids in, token ids out. A sampled completion is never decoded and encoded again.

An engine is any object with `generate` and `sync` as in `RolloutEngine`: `rollout.transformers` holds the default one,
`rollout.vllm` the one for much generation on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How to sample; nothing else may change the distribution (no penalty, no suppressed token, ...).

    Attributes:
        n: completions per prompt.
        max_tokens: longest completion, in tokens, the end-of-sequence token included.
        temperature: divides the logits; 0 is greedy.
        top_p: mass of the nucleus sampled from, 1 keeps everything.
        top_k: sample among the k most likely tokens, 0 keeps everything.
        max_rows: most completions generated at once, None for all.
        logprobs: whether to return the log-probs of the sampled tokens.
    """

    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_rows: int | None = None
    logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled completion.

    Attributes:
        prompt_ids: the prompt as given to the engine.
        completion_ids: the sampled ids up to and including the first end-of-sequence token; may be empty. The
            completion mask derives from this length, so that a pad token equal to the end token does no harm.
        truncated: the length limit ended it, not an end-of-sequence token.
        logprobs: natural log of the probability with which each id was drawn (after temperature, top-k and
            top-p, renormalised over the kept tokens; with greedy decoding the untempered log-prob), or None.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    truncated: bool
    logprobs: tuple[float, ...] | None = None


def until_eos(ids: Sequence[int], eos_ids: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """The ids up to and including the first end-of-sequence id, and whether there was one."""
    for position, token in enumerate(ids):
        if token in eos_ids:
            return tuple(ids[: position + 1]), True
    return tuple(ids), False


def eos_token_ids(model, tokenizer=None) -> tuple[int, ...]:
    """Every id that ends a completion: the model's generation config's, often several, and the tokenizer's."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    ids = set(declared if isinstance(declared, (list, tuple)) else [declared])
    ids.add(getattr(tokenizer, "eos_token_id", None))
    vocab_size = model.get_input_embeddings().num_embeddings  # default configs name ids of other models
    return tuple(sorted(i for i in ids if i is not None and 0 <= i < vocab_size))


def check_prompts(prompts: Sequence[Sequence[int]], max_tokens: int, positions: int | None) -> None:
    """Refuse prompts that cannot be continued.

    Args:
        prompts: token ids of each.
        max_tokens: of a completion.
        positions: that the engine has for a prompt and its completion, None for no limit.

    Raises:
        ValueError: for a prompt that is empty or too long, naming it.
    """
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompts[{index}]: expected at least one token id to condition on, got none")
        if positions is not None and len(prompt) + max_tokens > positions:
            raise ValueError(
                f"prompts[{index}]: {len(prompt)} + {max_tokens} tokens exceed the model's {positions} positions. "
                f"Set rollout.max_completion_length={positions - len(prompt)} or less"
            )


@runtime_checkable
class RolloutEngine(Protocol):
    """What the trainer asks of an engine."""

    def generate(self, prompts: list[list[int]], options: SamplingOptions, seed: int) -> list[Rollout]:
        """`options.n` completions of every prompt, side by side, in the prompts' order.

        Equal weights, prompts, options and seed give equal completions. Random states that others draw from,
        the CPU's and every device's, are afterwards what they were.
        """
        ...

    def sync(self, model) -> None:
        """Make the engine sample from the weights `model` has now."""
        ...
