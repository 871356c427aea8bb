"""Rollouts by `model.generate` of transformers: works with any causal language model it loads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from grpo_fast.modes import evaluation_mode
from grpo_fast.rollout import Rollout, SamplingOptions, until_eos
from grpo_fast.rollout.sampling import warpers


class _LogprobRecorder(LogitsProcessor):
    """Notes the log-prob of every sampled token; runs last, keeps the [rows, V] scores of one step only."""

    def __init__(self) -> None:
        self._log_probs: Tensor | None = None  # of the step whose token is not known yet
        self._sampled: list[Tensor] = []

    def _resolve(self, token_ids: Tensor) -> None:
        self._sampled.append(self._log_probs.gather(1, token_ids[:, None])[:, 0])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._log_probs is not None:
            self._resolve(input_ids[:, -1])
        self._log_probs = scores.float().log_softmax(-1)
        return scores

    def finish(self, last_ids: Tensor) -> Tensor:  # [rows, steps]
        self._resolve(last_ids)
        return torch.stack(self._sampled, dim=1)


def generate_rows(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    options: SamplingOptions,
    seed: int,
    *,
    eos_ids: Sequence[int],
    pad_id: int,
) -> list[Rollout]:
    """A completion of every row, `options.max_rows` at once.

    Rows are left-padded with an attention mask and position ids that start at 0 with the first real token.
    """
    size = options.max_rows or max(len(rows), 1)
    rollouts: list[Rollout] = []
    ends = {"pad_token_id": pad_id, "eos_token_id": list(eos_ids) or None}
    with _sampling(model, seed, GenerationConfig(**ends)):
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            tokens, logps = _generate(model, part, options, ends)
            for index, row in enumerate(part):
                ids, ended = until_eos(tokens[index], eos_ids)
                own = None if logps is None else tuple(logps[index][: len(ids)])
                rollouts.append(Rollout(prompt_ids=tuple(row), completion_ids=ids, truncated=not ended, logprobs=own))
    return rollouts


@contextmanager
def _sampling(model: PreTrainedModel, seed: int, config: GenerationConfig) -> Iterator[None]:
    """Eval mode, an own random state, none of the checkpoint's defaults (penalties, bans, ...)."""
    devices = [model.device] if model.device.type == "cuda" else []
    defaults = model.generation_config
    with torch.random.fork_rng(devices=devices), evaluation_mode(model):
        _seed(seed, model.device)
        # generate() fills what a config leaves open from model.generation_config: hence the swap
        model.generation_config = config
        try:
            yield
        finally:
            model.generation_config = defaults


def _generate(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], options: SamplingOptions, ends: dict
) -> tuple[list[list[int]], list[list[float]] | None]:
    """Sampled ids and log-probs of every row; what follows an end means nothing."""
    width, device = max(map(len, rows)), model.device
    padded = [[ends["pad_token_id"]] * (width - len(row)) + list(row) for row in rows]
    attention_mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    # the warpers below do the work of temperature, top_k and top_p, so that the recorder runs after them
    neutral = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=options.max_tokens,
        **(neutral if options.temperature > 0 else {"do_sample": False}),
        use_cache=True,
        **ends,
    )
    recorder = _LogprobRecorder() if options.logprobs else None
    # generate() derives position ids from the attention mask
    sequences = model.generate(
        input_ids=torch.tensor(padded, device=device),
        attention_mask=attention_mask,
        generation_config=config,
        logits_processor=warpers(options) + ([recorder] if recorder else []),
    )
    completions = sequences[:, width:]
    logps = None if recorder is None else recorder.finish(completions[:, -1]).tolist()
    return completions.tolist(), logps


def _seed(seed: int, device: torch.device) -> None:
    """Seed the CPU and this device alone: torch.manual_seed would change every GPU's random state."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
