"""A sequence classifier of transformers with one output as reward model."""

import math
from dataclasses import dataclass, field

import torch

from grpo_fast.rewards.text import text_of


@dataclass
class ClassifierReward:
    """The single logit of a sequence classifier on prompt + completion, higher is better.

    Conversations go through the classifier's own chat template, plain text is joined and tokenised by its
    tokenizer. Loaded on first use; pickling carries the path, not the weights.

    Args:
        path: folder or hub name of an AutoModelForSequenceClassification with num_labels=1.
        batch_size: sequences scored at once, of similar length.
        device: where to run it; None: a GPU if there is one.

    Raises:
        ValueError: a text has more tokens than the classifier has positions; texts are never cut.
    """

    path: str
    batch_size: int = 16
    device: str | None = None
    _loaded: tuple | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def __name__(self) -> str:
        return self.path.rstrip("/").split("/")[-1]

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_loaded": None}

    def _load(self) -> tuple:
        if self._loaded is None:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer

            model = AutoModelForSequenceClassification.from_pretrained(self.path, dtype="auto").eval()
            if model.config.num_labels != 1:
                raise ValueError(f"reward model {self.path}: expected num_labels=1, got {model.config.num_labels}")
            device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
            self._loaded = model.to(device), AutoTokenizer.from_pretrained(self.path)
        return self._loaded

    @torch.inference_mode()
    def __call__(self, prompts, completions, completion_ids, **columns) -> list[float]:
        model, tokenizer = self._load()
        encoded = [
            _encode(tokenizer, prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)
        ]
        self._check_lengths([len(ids) for ids in encoded])
        order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
        # the head reads the last token that is not the pad id: no padding where texts may end with that id
        pad_id = model.config.get_text_config().pad_token_id
        size = self.batch_size if pad_id is not None and pad_id != tokenizer.eos_token_id else 1
        scores = [0.0] * len(encoded)
        for start in range(0, len(order), size):
            indices = order[start : start + size]
            width = max(len(encoded[index]) for index in indices)
            rows = [encoded[index] + [pad_id] * (width - len(encoded[index])) for index in indices]
            mask = [[1] * len(encoded[index]) + [0] * (width - len(encoded[index])) for index in indices]
            tensors = (torch.tensor(values, device=model.device) for values in (rows, mask))
            logits = model(**dict(zip(("input_ids", "attention_mask"), tensors, strict=True))).logits[:, 0]
            for index, score in zip(indices, logits.float().tolist(), strict=True):
                scores[index] = score
        return scores

    def _check_lengths(self, lengths: list[int]) -> None:
        model, tokenizer = self._load()
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
        limit = min(positions, tokenizer.model_max_length)  # lower where positions count from an offset (RoBERTa)
        too_long = [row for row, length in enumerate(lengths) if length > limit]
        if too_long:
            raise ValueError(
                f"{self.path}: row {too_long[0]} has {lengths[too_long[0]]} tokens, prompt and completion, "
                f"more than its {limit} positions. Lower rollout.max_completion_length or data.max_prompt_length"
            )


def _encode(tokenizer, prompt: str | list[dict], completion: str | list[dict]) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt + text_of(completion))["input_ids"]
    messages = [*prompt, {"role": "assistant", "content": text_of(completion)}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]
