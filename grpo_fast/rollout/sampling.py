"""From logits to tokens: the distribution that `SamplingOptions` describe, and draws from it."""

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from grpo_fast.rollout import SamplingOptions

_BLOCK = 256  # tokens whose probabilities are summed before one of them is looked for
_CHUNK = 2**24  # logits drawn from at once: 64 rows of a vocabulary of 262144


def warpers(options: SamplingOptions) -> list[LogitsProcessor]:
    """What makes of a model's logits those of the distribution sampled from; nothing with greedy decoding."""
    if options.temperature == 0:
        return []
    found: list[LogitsProcessor] = []
    if options.temperature != 1:
        found.append(TemperatureLogitsWarper(float(options.temperature)))
    if options.top_k:
        found.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        found.append(TopPLogitsWarper(options.top_p))
    return found


def draw(logits_RV: Tensor, uniforms_R: Tensor, options: SamplingOptions) -> tuple[Tensor, Tensor]:
    """One token a row, and its log-prob in the distribution it was drawn from.

    Inverts the cumulative distribution: a row's token depends on its own logits and number alone, not on which rows
    are beside it, and costs one random number where an exponential race (`torch.multinomial`) takes V.

    Args:
        logits_RV: [R, V], as the model gives them.
        uniforms_R: float64 [R], in [0, 1); not read with greedy decoding.
        options: temperature, top_k and top_p are read.

    Returns:
        int64 [R] and float32 [R], nats.
    """
    size = max(_CHUNK // logits_RV.shape[1], 1)
    if len(logits_RV) <= size:
        return _draw(logits_RV, uniforms_R, options)
    parts = zip(logits_RV.split(size), uniforms_R.split(size), strict=True)
    ids, logps = zip(*(_draw(*part, options) for part in parts), strict=True)
    return torch.cat(ids), torch.cat(logps)


def _draw(logits: Tensor, uniforms: Tensor, options: SamplingOptions) -> tuple[Tensor, Tensor]:
    scores = logits.float()
    for warper in warpers(options):
        scores = warper(None, scores)
    largest = scores.amax(-1, keepdim=True)
    weights = nn.functional.pad((scores - largest).exp_(), (0, -scores.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    # Sums of blocks in float64: in float32 the tail of a large vocabulary would be lost in the rounding of what is
    # before it. Within a block, the next step, there is little to lose.
    ends = weights.sum(-1).cumsum(-1, dtype=torch.float64)
    if options.temperature == 0:
        ids = scores.argmax(-1)
    else:
        block, start = _first_above(ends, uniforms * ends[:, -1])
        inside = weights.take_along_dim(block[:, None, None], 1)[:, 0].cumsum(-1, dtype=torch.float64)
        ids = block * _BLOCK + _first_above(inside, uniforms * ends[:, -1] - start)[0]
    chosen = scores.gather(1, ids[:, None]) - largest
    return ids, (chosen[:, 0].double() - ends[:, -1].log()).float()


def _first_above(sums: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Of rising `sums` [R, X] the first above each threshold, and the one before it, both [R].

    A threshold that rounding brought to the last one or beyond is taken as just below. What added nothing to the sums
    is never the first.
    """
    last = sums[:, -1]
    threshold = torch.minimum(threshold, torch.nextafter(last, torch.zeros_like(last)))[:, None]
    first = torch.searchsorted(sums, threshold, right=True)
    before = torch.where(first > 0, sums.gather(1, (first - 1).clamp(min=0)), 0.0)
    return first[:, 0], before[:, 0]
