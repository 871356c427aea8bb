"""Rollouts from a model of transformers, in groups: a prompt is read once, rows that end make room for others."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_fast.attention.support import shared_prefix_refusal
from grpo_fast.lora import inner_model
from grpo_fast.merged_weights import frozen_copy, merged_weights
from grpo_fast.modes import evaluation_mode
from grpo_fast.rollout import Rollout, SamplingOptions, check_prompts, cuda_graph, eos_token_ids, until_eos
from grpo_fast.rollout.decoding import GroupDecoder, Recorder
from grpo_fast.rollout.generate import generate_rows
from grpo_fast.rollout.packed import packed_linears
from grpo_fast.rollout.sampling import draw

_LEAVE = 1 / 8  # ended rows are left out when they are this share of the rows: leaving out copies what stays
_LEAVE_RECORDED = 1 / 2  # where a step would have to be recorded anew, too
_LOOK_EVERY = 8  # steps between looks at which rows have ended, on a GPU, which would have to be waited for


class TransformersRollout:
    """Samples from a model of transformers.

    A prompt goes through the model once, whatever the number of its completions, and rows that ended leave the batch.
    Models whose attention cannot be ours are sampled from by their own `generate`; `reason` says so.
    On a GPU it samples from a bfloat16 copy of a float32 policy, adapters merged, which `sync` refreshes; otherwise
    from the policy itself.

    Args:
        model: the policy.
        tokenizer: asked for its end and pad ids only; None leaves the model's own.
        copy_dtype: sample from a copy of this dtype; None: bfloat16 for a float32 model on a GPU, else no copy.
        share_prompts: whether groups share their prompt's keys and values; None: where the model can.
        cuda_graphs: launch a step of decoding as a whole. It has not been run on a GPU yet.

    Attributes:
        eos_ids: what ends a completion.
        exact: whether log-probs are the policy's own, but for the order of sums.
        share_prompts, reason: how it samples, and in words why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer=None,
        *,
        copy_dtype: torch.dtype | None = None,
        share_prompts: bool | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        if not model.can_generate():
            raise ValueError(f"model: expected a causal language model with `generate`, got {type(model).__name__}")
        self.eos_ids = eos_token_ids(model, tokenizer)
        pad_id = getattr(tokenizer, "pad_token_id", None)
        self.pad_id = pad_id if pad_id is not None else (self.eos_ids[0] if self.eos_ids else 0)
        if copy_dtype is None and model.device.type == "cuda" and model.dtype == torch.float32:
            copy_dtype = torch.bfloat16
        model = inner_model(model)
        self.model = model if copy_dtype is None else frozen_copy(model, copy_dtype)
        self.exact = self.model.dtype == model.dtype
        refusal = "asked for" if share_prompts is False else None if share_prompts else shared_prefix_refusal(model)
        self.share_prompts = refusal is None
        self.reason = (
            "rollout in groups: each prompt is read once"
            if refusal is None
            else (f"rollout by model.generate, each prompt is read for each of its completions: {refusal}")
        )
        self._record = cuda_graph.record if cuda_graphs else None
        if cuda_graphs:
            refusal = refusal or cuda_graph.refusal(self.model)
            if refusal is not None:
                raise ValueError(
                    "rollout.cuda_graphs: expected a model on a GPU whose decoding can be recorded, got "
                    f"{type(model).__name__}: {refusal}. Set it to false"
                )

    @torch.no_grad()
    def sync(self, model: PreTrainedModel) -> None:
        """Copy the policy's weights into the copy sampled from, if there is one; adapters are merged there."""
        if self.model is inner_model(model):
            return
        copies = dict(self.model.named_parameters(remove_duplicate=False)) | dict(self.model.named_buffers())
        for name, tensor in merged_weights(model, strict=False):
            copies[name].copy_(tensor)

    def generate(self, prompts: list[list[int]], options: SamplingOptions, seed: int) -> list[Rollout]:
        """`options.n` completions of every prompt, group after group. See `RolloutEngine.generate`.

        With shared prompts a completion depends on its prompt, its place in the list and the seed, not on max_rows.

        Raises:
            ValueError: for a prompt that is empty or leaves no room for `options.max_tokens` in the model's
                positions.
        """
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        check_prompts(prompts, options.max_tokens, positions)
        if not self.share_prompts:
            rows = [prompt for prompt in prompts for _ in range(options.n)]
            return generate_rows(self.model, rows, options, seed, eos_ids=self.eos_ids, pad_id=self.pad_id)
        if not prompts:
            return []
        rows = len(prompts) * options.n
        with evaluation_mode(self.model), packed_linears(self.model, min(rows, options.max_rows or rows)):
            return _Generation(self.model, prompts, options, seed, self.eos_ids, self._record).run()


class _Generation:
    """One call of `generate`: completions are rows of a table; those being sampled are the batch's, and the decoder's.

    Rows that have ended may stay in the batch for a while; what is sampled for them goes to a column of its own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        options: SamplingOptions,
        seed: int,
        eos_ids: Sequence[int],
        record: Recorder | None,
    ) -> None:
        self._prompts, self._options, self._eos_ids = prompts, options, eos_ids
        device, rows = model.device, len(prompts) * options.n
        numbers = torch.rand(
            rows, options.max_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        self._uniforms = nn.functional.pad(numbers, (0, 1)).to(device)
        self._tokens = torch.zeros(rows, options.max_tokens + 1, dtype=torch.int64, device=device)
        self._logps = torch.zeros(rows, options.max_tokens + 1, device=device)
        self._ends = torch.tensor(eos_ids, dtype=torch.int64, device=device)
        self._decoder = GroupDecoder(model, options.max_tokens, record)
        self._leave = _LEAVE if record is None else _LEAVE_RECORDED
        self._most = options.max_rows or rows
        # (prompt, first row, rows): groups, or parts of those that are larger than the batch may be.
        self._waiting = deque(
            (group, group * options.n + first, min(self._most, options.n - first))
            for group in range(len(prompts))
            for first in range(0, options.n, self._most)
        )
        # Of the batch's rows: which row of the table, tokens sampled so far, the last one, and whether that ended it.
        self._rows = torch.empty(0, dtype=torch.int64, device=device)
        self._counts, self._last = self._rows, self._rows
        self._ended = self._rows.bool()

    def run(self) -> list[Rollout]:
        self._admit()
        steps = 0
        while len(self._rows):
            logits = self._decoder.step(self._last)
            self._last, self._counts, self._ended = self._sample(logits, self._rows, self._counts, self._ended)
            steps += 1
            if not self._rows.is_cuda or steps % _LOOK_EVERY == 0:
                self._leave_out()
        tokens, logps = self._tokens.tolist(), self._logps.tolist()
        return [self._rollout(row, tokens[row], logps[row]) for row in range(len(tokens))]

    def _sample(self, logits: Tensor, rows: Tensor, counts: Tensor, ended: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A token for each of `rows`; returns (tokens, counts, ended) with it."""
        columns = torch.where(ended, self._options.max_tokens, counts)
        tokens, logps = draw(logits, self._uniforms[rows, columns], self._options)
        self._tokens[rows, columns], self._logps[rows, columns] = tokens, logps
        counts = counts + 1
        return tokens, counts, ended | torch.isin(tokens, self._ends) | (counts >= self._options.max_tokens)

    def _admit(self) -> None:
        """Waiting groups, as many as there is room for: their prompts are read and their first tokens sampled."""
        parts, room = [], self._most - len(self._rows)
        while self._waiting and self._waiting[0][2] <= room:
            parts.append(self._waiting.popleft())
            room -= parts[-1][2]
        if not parts:
            return
        counts = [count for _, _, count in parts]
        logits = self._decoder.admit([self._prompts[group] for group, _, _ in parts], counts)
        rows = [row for _, first, count in parts for row in range(first, first + count)]
        rows = torch.tensor(rows, device=logits.device)
        logits = logits.repeat_interleave(torch.tensor(counts, device=logits.device), 0)
        sampled = self._sample(logits, rows, torch.zeros_like(rows), torch.zeros_like(rows, dtype=torch.bool))
        self._rows = torch.cat([self._rows, rows])
        old = (self._last, self._counts, self._ended)
        self._last, self._counts, self._ended = (torch.cat(both) for both in zip(old, sampled, strict=True))
        self._leave_out()

    def _leave_out(self) -> None:
        """Once many rows have ended, the batch goes on without them and with others."""
        ended = self._ended.tolist()
        if sum(ended) < max(self._leave * len(ended), 1):
            return
        stay = [index for index, is_over in enumerate(ended) if not is_over]
        self._decoder.keep(stay)
        index = torch.tensor(stay, dtype=torch.int64, device=self._rows.device)
        batch = (self._rows, self._last, self._counts, self._ended)
        self._rows, self._last, self._counts, self._ended = (x[index] for x in batch)
        self._admit()

    def _rollout(self, row: int, tokens: list[int], logps: list[float]) -> Rollout:
        ids, ended = until_eos(tokens[: self._options.max_tokens], self._eos_ids)
        return Rollout(
            prompt_ids=tuple(self._prompts[row // self._options.n]),
            completion_ids=ids,
            truncated=not ended,
            logprobs=tuple(logps[: len(ids)]) if self._options.logprobs else None,
        )
