"""Log-probs of one unpadded row, by the model alone, and gradients by parameter: what updates are compared with."""

import torch


def plain_logps(model, rollout, temperature):
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    distribution = (model(ids, use_cache=False).logits[0] / temperature).log_softmax(-1)
    rows = distribution[len(rollout.prompt_ids) - 1 : -1]
    chosen = rows[torch.arange(len(rows)), list(rollout.completion_ids)]
    return chosen, -(rows.exp() * rows).sum(-1)


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(got: dict, expected: dict, tolerance: float):
    assert got.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (got[name] - gradient).abs().max().item() <= tolerance * largest, name
