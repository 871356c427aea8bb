"""Rollouts by `model.generate` of transformers: works with any causal language model it loads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from grpo_fast.modes import evaluation_mode
from grpo_fast.reference_model import frozen_copy
from grpo_fast.rollout import Rollout, SamplingOptions


def eos_token_ids(model: PreTrainedModel, tokenizer=None) -> tuple[int, ...]:
    """Every id that ends a completion: the generation config's, often several, and the tokenizer's."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    ids = set(declared if isinstance(declared, (list, tuple)) else [declared])
    ids.add(getattr(tokenizer, "eos_token_id", None))
    vocab_size = model.get_input_embeddings().num_embeddings  # default configs name ids of other models
    return tuple(sorted(i for i in ids if i is not None and 0 <= i < vocab_size))


def until_eos(ids: Sequence[int], eos_ids: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """The ids up to and including the first end-of-sequence id, and whether there was one."""
    for position, token in enumerate(ids):
        if token in eos_ids:
            return tuple(ids[: position + 1]), True
    return tuple(ids), False


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


class TransformersRollout:
    """Samples from a model by its own `generate`.

    Prompts are left-padded with an attention mask and position ids that start at 0 with the first real token.
    On a GPU it samples from a bfloat16 copy of a float32 policy, which `sync` refreshes; otherwise from the
    policy itself.

    Args:
        model: the policy.
        tokenizer: asked for its end and pad ids only; None leaves the model's own.
        copy_dtype: sample from a copy of this dtype; None: bfloat16 for a float32 model on a GPU, else no copy.
    """

    def __init__(self, model: PreTrainedModel, tokenizer=None, *, copy_dtype: torch.dtype | None = None) -> None:
        if not model.can_generate():
            raise ValueError(f"model: expected a causal language model with `generate`, got {type(model).__name__}")
        self.eos_ids = eos_token_ids(model, tokenizer)
        pad_id = getattr(tokenizer, "pad_token_id", None)
        self.pad_id = pad_id if pad_id is not None else (self.eos_ids[0] if self.eos_ids else 0)
        if copy_dtype is None and model.device.type == "cuda" and model.dtype == torch.float32:
            copy_dtype = torch.bfloat16
        self.model = model if copy_dtype is None else frozen_copy(model, copy_dtype)

    @torch.no_grad()
    def sync(self, model: PreTrainedModel) -> None:
        """Copy the policy's weights into the copy sampled from, if there is one."""
        if self.model is model:
            return
        for copies, sources in (
            (self.model.parameters(), model.parameters()),
            (self.model.buffers(), model.buffers()),
        ):
            for copy, source in zip(copies, sources, strict=True):
                copy.copy_(source)

    def generate(self, prompts: list[list[int]], options: SamplingOptions, seed: int) -> list[Rollout]:
        """`options.n` completions of every prompt, group after group. See `RolloutEngine.generate`.

        Raises:
            ValueError: for a prompt that is empty or leaves no room for `options.max_tokens` in the model's
                positions.
        """
        self._check_lengths(prompts, options.max_tokens)
        rows = [prompt for prompt in prompts for _ in range(options.n)]
        size = options.max_rows or max(len(rows), 1)
        rollouts: list[Rollout] = []
        with self._sampling(seed):
            for start in range(0, len(rows), size):
                rollouts += self._generate_rows(rows[start : start + size], options)
        return rollouts

    def _check_lengths(self, prompts: list[list[int]], max_tokens: int) -> None:
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompts[{index}]: expected at least one token id to condition on, got none")
            if limit is not None and len(prompt) + max_tokens > limit:
                raise ValueError(
                    f"prompts[{index}]: {len(prompt)} + {max_tokens} tokens exceed the model's {limit} positions. "
                    f"Set rollout.max_completion_length={limit - len(prompt)} or less"
                )

    @contextmanager
    def _sampling(self, seed: int) -> Iterator[None]:
        """Eval mode, an own random state, none of the checkpoint's defaults (penalties, bans, ...)."""
        model = self.model
        devices = [model.device] if model.device.type == "cuda" else []
        defaults = model.generation_config
        with torch.random.fork_rng(devices=devices), evaluation_mode(model):
            _seed(seed, model.device)
            # generate() fills what a config leaves open from model.generation_config: hence the swap
            model.generation_config = GenerationConfig(
                pad_token_id=self.pad_id, eos_token_id=list(self.eos_ids) or None
            )
            try:
                yield
            finally:
                model.generation_config = defaults

    def _generate_rows(self, rows: list[list[int]], options: SamplingOptions) -> list[Rollout]:
        width = max(map(len, rows))
        device = self.model.device
        input_ids = torch.tensor([[self.pad_id] * (width - len(row)) + list(row) for row in rows], device=device)
        attention_mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        # the warpers below do the work of temperature, top_k and top_p, so that the recorder runs after them
        neutral = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(
            max_new_tokens=options.max_tokens,
            **(neutral if options.temperature > 0 else {"do_sample": False}),
            use_cache=True,
            pad_token_id=self.pad_id,
            eos_token_id=list(self.eos_ids) or None,
        )
        recorder = _LogprobRecorder() if options.logprobs else None
        # generate() derives position ids from the attention mask
        sequences = self.model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=config,
            logits_processor=_warpers(options) + ([recorder] if recorder else []),
        )
        completions = sequences[:, width:]
        logprobs = recorder.finish(completions[:, -1]).tolist() if recorder else None
        return [
            self._rollout(row, ids, None if logprobs is None else logprobs[index])
            for index, (row, ids) in enumerate(zip(rows, completions.tolist(), strict=True))
        ]

    def _rollout(self, prompt: list[int], sampled: list[int], logprobs: list[float] | None) -> Rollout:
        ids, ended = until_eos(sampled, self.eos_ids)
        return Rollout(
            prompt_ids=tuple(prompt),
            completion_ids=ids,
            truncated=not ended,
            logprobs=None if logprobs is None else tuple(logprobs[: len(ids)]),
        )


def _seed(seed: int, device: torch.device) -> None:
    """Seed the CPU and this device alone: torch.manual_seed would change every GPU's random state."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _warpers(options: SamplingOptions) -> list[LogitsProcessor]:
    if options.temperature == 0:
        return []
    warpers: list[LogitsProcessor] = []
    if options.temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(options.temperature)))
    if options.top_k:
        warpers.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        warpers.append(TopPLogitsWarper(options.top_p))
    return warpers
