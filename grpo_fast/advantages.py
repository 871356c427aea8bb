"""Group-relative advantages."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor,
    group_size: int,
    *,
    scale: str = "group",
    std: str = "population",
    eps: float = 1e-4,
) -> Tensor:
    """Advantages of G completions of one prompt relative to each other: A = (R - mean) / (std + eps).

    GRPO, https://arxiv.org/abs/2402.03300, section 4.1.2; scale="none" is Dr.GRPO, https://arxiv.org/abs/2503.20783.

    Args:
        rewards: any shape whose elements in order are consecutive groups of `group_size`; any real dtype. A non-finite
            reward (NaN marks "no reward") leaves its group's statistics and gets advantage 0.
        group_size: G, the number of completions of a prompt.
        scale: "group" divides by the group's std, "batch" by the std of all finite rewards, "none" by nothing.
        std: "population" divides the squared deviations by n, "sample" (TRL) by n - 1.
        eps: added to the std. With eps = 0 too, groups of equal rewards give exactly 0, and so does a group of one.

    Returns:
        Advantages in rewards' shape, fp32 (fp64 for fp64 rewards), without a graph.

    Raises:
        ValueError: an unknown option, a negative eps, or a group_size that does not divide the number of rewards.
    """
    if scale not in ("group", "batch", "none"):
        raise ValueError(f'scale: expected "group", "batch" or "none", got {scale!r}')
    if std not in ("population", "sample"):
        raise ValueError(f'std: expected "population" or "sample", got {std!r}')
    if eps < 0:
        raise ValueError(f"eps: expected a number >= 0, got {eps}")
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
        raise ValueError(f"group_size: expected a positive integer, got {group_size!r}")
    if rewards.numel() % group_size:
        raise ValueError(
            f"rewards: {rewards.numel()} values are not whole groups of group_size={group_size}; "
            "pass every completion of each prompt, consecutively"
        )

    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    # float64 inside: the deviations of 1e6, 1e6 + 1, ... are lost in fp32 once a mean has been rounded.
    groups = rewards.detach().to(torch.float64).reshape(-1, group_size)  # (groups, G)
    finite = groups.isfinite()
    values = torch.where(finite, groups, 0.0)
    count = finite.sum(1, keepdim=True)
    deviation = torch.where(finite, values - values.sum(1, keepdim=True) / count.clamp(min=1), 0.0)
    # Equal rewards must give exactly 0: the rounding of their mean is not a signal.
    high = torch.where(finite, groups, -torch.inf).amax(1, keepdim=True) if groups.numel() else count
    low = torch.where(finite, groups, torch.inf).amin(1, keepdim=True) if groups.numel() else count
    deviation = torch.where(high > low, deviation, 0.0)

    if scale == "none":
        return deviation.to(dtype).reshape(rewards.shape)
    if scale == "group":
        spread = _std(deviation, count, std, dim=1)
    else:
        mean = values.sum() / count.sum().clamp(min=1)
        spread = _std(torch.where(finite, values - mean, 0.0), count.sum(), std, dim=None)
    divisor = spread + eps
    advantages = torch.where(deviation == 0, 0.0, deviation / torch.where(divisor > 0, divisor, 1.0))
    return advantages.to(dtype).reshape(rewards.shape)


def _std(deviation: Tensor, count: Tensor, std: str, dim: int | None) -> Tensor:
    square = deviation.square()
    total = square.sum() if dim is None else square.sum(dim, keepdim=True)
    return (total / (count - (1 if std == "sample" else 0)).clamp(min=1)).sqrt()
