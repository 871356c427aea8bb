"""Random problems that look like RL: peaked rows, ragged masks with holes, garbage in every masked slot."""

import os

import torch

import grpo_fast.ops.backends as backends

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def backends_here():
    """Backends whose code runs in this process on CPU tensors."""
    names = ["reference"]
    if backends.unavailable_reason("cpu") is None:
        names.append("cpu")
    if INTERPRETED:
        names.append("triton")
    return names


def make(batch=3, length=7, vocab=37, dtype=torch.float32, seed=0, packed=False, all_valid=False):
    """A dict of keyword arguments for grpo_loss; vectors are fp32, `logits` a leaf without grad."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = (rand(batch, length, vocab) * 3).to(dtype)
    ids = torch.randint(0, vocab, (batch, length), generator=generator)
    mask = torch.ones(batch, length, dtype=torch.bool) if all_valid else rand(batch, length) > -0.8
    if not all_valid and batch > 2:
        mask[1] = False  # an empty sequence
    logps = torch.log_softmax(logits.double(), -1).gather(-1, ids[..., None])[..., 0]
    problem = {
        "token_ids": ids,
        "advantages": rand(batch, length).float(),
        "mask": mask,
        "old_logps": (logps + 0.3 * rand(batch, length)).float(),
        "ref_logps": (logps + 0.5 * rand(batch, length)).float(),
        "sampling_weights": (rand(batch, length).abs() + 0.1).float(),
    }
    problem["advantages"][0, 0] = 0.0  # a dead but valid token
    problem["logits"] = logits
    if packed:
        problem = {name: value.reshape(batch * length, *value.shape[2:]) for name, value in problem.items()}
        problem["cu_seqlens"] = torch.arange(0, batch * length + 1, length)
    return problem


def poison(problem):
    """The same problem with garbage wherever the mask is 0."""
    poisoned = {name: value.clone() for name, value in problem.items()}
    hole = poisoned["mask"] == 0
    for name, garbage in {
        "advantages": torch.nan, "old_logps": torch.inf, "ref_logps": 1e10, "sampling_weights": torch.nan,
        "logits": torch.nan, "token_ids": -100,
    }.items():  # fmt: skip
        if name in poisoned:
            poisoned[name][hole] = garbage
    return poisoned


def as_non_leaf(buffer):
    """The buffer's own memory as a non-leaf that requires grad, as a model's output is: may be worked on in place."""
    return _NonLeaf.apply(buffer.detach(), torch.zeros((), requires_grad=True))


class _NonLeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, anchor):
        ctx.mark_dirty(buffer)
        return buffer

    @staticmethod
    def backward(ctx, grad):
        return None, None


def relative_error(actual, expected):
    """max |a - b| / max |b| (DESIGN's tolerance)."""
    expected = expected.double()
    if expected.numel() == 0:
        return 0.0
    scale = expected.abs().max().clamp(min=1e-30)
    return ((actual.double() - expected).abs().max() / scale).item()


OPTIONS = {
    "plain": {},
    "on-policy": {"old_logps": None},
    "kl": {"beta": 0.1},
    "corrected kl": {"beta": 0.1, "use_bias_correction_kl": True},
    "corrected kl on-policy": {"beta": 0.1, "use_bias_correction_kl": True, "old_logps": None},
    "weights": {"beta": 0.1, "use_weights": True},
    "entropy": {"entropy_coef": 0.05, "return_entropy": True},
    "delta": {"delta": 1.5, "epsilon_high": 0.28},
    "epsilon 1": {"epsilon": 1.0},
    "transform": {"temperature": 0.7, "softcap": 5.0, "logit_scale": 0.5, "entropy_coef": 0.05, "beta": 0.1},
    "temperature": {"temperature": 1.7, "beta": 0.1},
    "bnpo": {"loss_type": "bnpo", "beta": 0.1},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 9, "beta": 0.1},
    "luspo": {"loss_type": "luspo", "beta": 0.1},
    "denominators": {"denominator": 17, "entropy_denominator": 5, "entropy_coef": 0.1},
    "sequence": {"importance_sampling_level": "sequence", "beta": 0.1},
    "sequence bonus": {
        "importance_sampling_level": "sequence", "beta": 0.1, "use_bias_correction_kl": True, "entropy_coef": 0.1,
        "use_weights": True, "delta": 1.4,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1, "beta": 0.1},
    "cispo sequence": {"loss_type": "cispo", "epsilon_high": 1.1, "importance_sampling_level": "sequence"},
}  # fmt: skip


def split(problem, options):
    """(tensors, options) to call a loss with; ref_logps and sampling_weights only where the options use them."""
    options = dict(options)
    arguments = {k: v for k, v in problem.items() if k not in ("logits", "sampling_weights", "ref_logps")}
    if options.pop("use_weights", False):
        arguments["sampling_weights"] = problem["sampling_weights"]
    if options.get("beta"):
        arguments["ref_logps"] = problem["ref_logps"]
    if "old_logps" in options:
        arguments["old_logps"] = options.pop("old_logps")
    return arguments, options
