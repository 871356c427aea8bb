"""The losses once more, token by token in float64, from the papers' min/clip form: shares no line with the product."""

import math

import torch


def transformed(row, temperature=1.0, softcap=None, logit_scale=None):
    z = row.double()
    if logit_scale is not None:
        z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / temperature


def loss(
    logits, token_ids, advantages, mask, *, old_logps=None, ref_logps=None, sampling_weights=None, loss_type="grpo",
    epsilon=0.2, epsilon_high=None, delta=None, beta=0.0, importance_sampling_level="token",
    use_bias_correction_kl=False, entropy_coef=0.0, max_completion_length=None, denominator=None,
    entropy_denominator=None, **transform,
):  # fmt: skip
    """Padded [B, T, V] logits, all other tensors [B, T]. Returns a 0-d float64 loss with a graph on `logits`."""
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    num_sequences, length = token_ids.shape
    total = torch.zeros((), dtype=torch.float64)
    bonus = torch.zeros((), dtype=torch.float64)
    num_valid = 0
    for b in range(num_sequences):
        positions = [t for t in range(length) if mask[b, t] != 0]
        num_valid += len(positions)
        if not positions:
            continue
        logps, log_ratios = [], []
        for t in positions:
            z = transformed(logits[b, t], **transform)
            probabilities = torch.softmax(z, 0)
            logp = torch.log_softmax(z, 0)[token_ids[b, t]]
            logps.append(logp)
            old = logp.detach() if old_logps is None else old_logps[b, t].double()
            log_ratios.append(logp - old)
            seen = probabilities > 0
            bonus = bonus - (probabilities[seen] * probabilities[seen].log()).sum()
        if importance_sampling_level == "sequence":
            log_ratios = [sum(log_ratios) / len(log_ratios)] * len(log_ratios)
        sequence = torch.zeros((), dtype=torch.float64)
        for t, logp, log_ratio in zip(positions, logps, log_ratios, strict=True):
            ratio = torch.exp(log_ratio)
            advantage = advantages[b, t].double()
            weight = 1.0 if sampling_weights is None else sampling_weights[b, t].double()
            if loss_type == "cispo":
                policy = -ratio.detach().clamp(max=epsilon_high) * advantage * logp
            else:
                capped = ratio if delta is None else ratio.clamp(max=delta)
                clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
                policy = -torch.minimum(capped * advantage, clipped * advantage)
            token = weight * policy
            if beta > 0:
                d = ref_logps[b, t].double() - logp
                kl = torch.exp(d) - d - 1
                token = token + beta * (kl * ratio if use_bias_correction_kl else kl)
            sequence = sequence + token / (len(positions) if loss_type == "grpo" else 1)
        total = total + sequence
    if denominator is None:
        denominator = {
            "grpo": num_sequences,
            "luspo": num_sequences,
            "dr_grpo": num_sequences * (max_completion_length or math.nan),
        }.get(loss_type, num_valid)
    result = total / (denominator or 1)
    if entropy_coef > 0:
        result = result - entropy_coef * bonus / (entropy_denominator or num_valid or 1)
    return result
