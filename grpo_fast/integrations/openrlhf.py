"""OpenRLHF's functions of logits, in the place of those in `openrlhf/models/utils.py` (0.11.2).

OpenRLHF's workers import them in one line of `openrlhf/models/actor.py`, which becomes

    from .utils import set_z3_leaf_modules
    from grpo_fast.integrations.openrlhf import compute_entropy, log_probs_from_logits

or, in a process that you start yourself, `openrlhf.models.actor.log_probs_from_logits = log_probs_from_logits` and the
same for compute_entropy. OpenRLHF itself is not imported here.
"""

from __future__ import annotations

from torch import Tensor

from grpo_fast.integrations.from_logits import entropy, label_logprobs


def compute_entropy(logits: Tensor) -> Tensor:
    """Entropy of each row in nats, [..., V] -> [...], one sweep, differentiable.

    OpenRLHF's is of the logits' dtype, and NaN where a logit is -inf; this one is fp32 and counts 0 log 0 as 0.
    """
    return entropy(logits)


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature)[label], differentiable, without a log-softmax in memory.

    OpenRLHF's differs in three ways: bf16 logits give bf16 log-probs (one near -10 is off by up to 0.03, and its ratio
    by 3 %); a temperature other than 1 divides the caller's logits in place, so that a second call divides again; -100
    is an index error unless flash-attn is installed. Here log-probs are fp32, the logits stay, and -100 gives 0 and no
    gradient, as with flash-attn. The fp32 copy of the logits that `Actor.forward` makes first is not needed.

    Args:
        logits: [..., V], fp32, bf16 or fp16, any strides; position t belongs to label t.
        labels: [...], integers.
        temperature: > 0.

    Returns:
        [...], fp32 (fp64 for fp64 logits), nats.

    Raises:
        ValueError: shapes that do not fit, an id outside [0, V) (on the CPU; NaN on a GPU).
    """
    return label_logprobs(logits, labels, temperature)
