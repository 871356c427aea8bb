"""Bad input gets one clear error that names the argument, before any work."""

import types

import numpy as np
import problems
import pytest
import torch

import grpo_fast as gf

NUMBERS = [
    ({"temperature": 0.0}, "temperature.*greedy"),
    ({"temperature": float("nan")}, "temperature"),
    ({"softcap": -1.0}, "softcap"),
    ({"logit_scale": 0.0}, "logit_scale"),
    ({"beta": -0.1}, "beta"),
    ({"beta": 0.1}, "ref_logps"),
    ({"epsilon": 1.5}, "epsilon"),
    ({"epsilon": -0.1}, "epsilon"),
    ({"epsilon_high": -0.1}, "epsilon_high"),
    ({"delta": 1.1}, "delta.*1.2"),
    ({"loss_type": "dappo"}, "loss_type"),
    ({"loss_type": "dr_grpo"}, "max_completion_length"),
    ({"loss_type": "cispo"}, "epsilon_high"),
    ({"loss_type": "cispo", "epsilon_high": 0.2}, "epsilon_high"),
    ({"loss_type": "cispo", "epsilon_high": 2.0, "delta": 3.0}, "delta"),
    ({"importance_sampling_level": "word"}, "importance_sampling_level"),
    ({"reduction": "mean"}, "reduction"),
    ({"entropy_coef": -1.0}, "entropy_coef"),
    ({"max_completion_length": 0}, "max_completion_length"),
    ({"denominator": -1}, "denominator"),
    ({"denominator": torch.ones(2)}, "denominator"),
    ({"backend": "cudnn"}, "backend"),
]


@pytest.mark.parametrize("options, message", NUMBERS)
def test_options(options, message):
    problem = problems.make()
    del problem["ref_logps"]
    with pytest.raises(ValueError, match=message):
        gf.grpo_loss(**problem | options)


SHAPES = [
    ("mask", torch.ones(3, 8), r"mask.*\[3, 7\].*\[3, 8\]"),  # B22
    ("token_ids", torch.zeros(3, 8, dtype=torch.int64), r"token_ids.*\[3, 7\].*\[3, 8\]"),
    ("token_ids", torch.zeros(3, 7), "token_ids.*int64"),
    ("old_logps", torch.zeros(3, 1), r"old_logps.*\[3, 7\].*\[3, 1\]"),
    ("ref_logps", torch.zeros(21), "ref_logps"),
    ("advantages", torch.zeros(7), "advantages"),
    ("advantages", 1.0, "advantages"),
    ("sampling_weights", torch.zeros(2), "sampling_weights"),
    ("logits", torch.zeros(3, 7, 37, dtype=torch.int64), "logits.*floating"),
    ("logits", torch.zeros(37), "logits"),
    ("cu_seqlens", torch.tensor([0, 21]), "cu_seqlens"),
    ("mask", torch.ones(3, 7, device="meta"), "mask.*device"),
]


@pytest.mark.parametrize("name, value, message", SHAPES)
def test_shapes(name, value, message):
    with pytest.raises(ValueError, match=message):
        gf.grpo_loss(**problems.make() | {name: value})


@pytest.mark.parametrize("bounds", [[0, 7, 5, 21], [0, 7, 20], [1, 21], [0.0, 21.0]])
def test_cu_seqlens(bounds):
    packed = problems.make(packed=True) | {"cu_seqlens": torch.tensor(bounds)}
    packed["advantages"] = torch.zeros(21)
    packed["sampling_weights"] = None
    with pytest.raises(ValueError, match="cu_seqlens"):
        gf.grpo_loss(**packed)
    del packed["cu_seqlens"]
    with pytest.raises(ValueError, match="cu_seqlens"):
        gf.grpo_loss(**packed)


@pytest.mark.parametrize("backend", problems.backends_here())
@pytest.mark.parametrize("bad", [-1, 37, -100])
def test_ids_out_of_range(backend, bad):
    problem = problems.make(all_valid=True)
    problem["token_ids"][2, 3] = bad
    for logits in (problem["logits"], problem["logits"].clone().requires_grad_()):
        with pytest.raises(ValueError, match=f"token_ids.*got {bad}"):
            gf.grpo_loss(**problem | {"logits": logits}, backend=backend)
    with pytest.raises(ValueError, match="token_ids"):
        gf.linear_token_logprobs(torch.zeros(3, 7, 2), torch.zeros(37, 2), problem["token_ids"], backend=backend)


def test_backends_refuse_with_a_reason():
    with pytest.raises(NotImplementedError, match='backend="cuda"'):
        gf.grpo_loss(**problems.make(), backend="cuda")
    if not problems.INTERPRETED:
        with pytest.raises(NotImplementedError, match="CUDA device"):
            gf.grpo_loss(**problems.make(), backend="triton")
    if "cpu" in problems.backends_here():
        with pytest.raises(NotImplementedError, match="float64"):
            gf.grpo_loss(**problems.make(dtype=torch.float64), backend="cpu")


def test_heads():
    hidden, ids = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    advantages = torch.ones(2)
    with pytest.raises(ValueError, match=r"weight.*D=4"):
        gf.linear_grpo_loss(hidden, torch.zeros(9, 5), ids, advantages)
    with pytest.raises(ValueError, match=r"bias.*V=9"):
        gf.linear_grpo_loss(hidden, torch.zeros(9, 4), ids, advantages, bias=torch.zeros(8))
    with pytest.raises(ValueError, match="workspace_bytes"):
        gf.linear_grpo_loss(hidden, torch.zeros(9, 4), ids, advantages, workspace_bytes=0)
    with pytest.raises(ValueError, match=r"live_rows.*misses flat index 1"):
        gf.linear_grpo_loss(hidden, torch.zeros(9, 4), ids, advantages, live_rows=torch.tensor([0, 2, 3, 4, 5]))
    with pytest.raises(ValueError, match="live_rows"):
        gf.linear_grpo_loss(hidden, torch.zeros(9, 4), ids, advantages, live_rows=torch.tensor([99]))


def test_modules():
    problem = problems.make()
    logits = problem.pop("logits")
    module = gf.GRPOLoss(beta=0.1, loss_type="dapo")
    out = module(logits, **problem)
    assert out.loss == gf.grpo_loss(logits, **problem, beta=0.1, loss_type="dapo").loss
    assert "beta=0.1" in repr(module)
    assert not list(module.parameters())
    for wrong in ("betta", "old_logps", "logits"):
        with pytest.raises(TypeError, match=wrong):
            gf.GRPOLoss(**{wrong: 1})
    with pytest.raises(TypeError, match="beta"):
        module(logits, **problem, beta=0.2)
    with pytest.raises(TypeError, match="inplace"):
        gf.LinearGRPOLoss(inplace=True)
    for wrong in ({"epsilon": -1.0}, {"temperature": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            gf.GRPOLoss(**wrong)
    head = gf.LinearGRPOLoss(beta=0.1)
    assert head(torch.zeros(3, 7, 2), torch.zeros(37, 2), **problem, bias=torch.zeros(37)).loss.isfinite()


HEAD = {"hidden": torch.ones(2, 3, 4), "weight": torch.ones(5, 4), "token_ids": torch.zeros(2, 3, dtype=torch.int64)}
WRONG = {
    r"hidden: expected a tensor, got SimpleNamespace; .*last_hidden_state": {"hidden": types.SimpleNamespace()},
    r"weight: expected a tensor, got Linear; .*head_weight": {"weight": torch.nn.Linear(4, 5)},
    r"weight: expected \[V, D=4\] .* got \[4, 5\]; transposed\?": {"weight": torch.ones(4, 5)},
    r"bias: expected a tensor, got bool": {"bias": False},
    r"token_ids: expected a tensor, got NoneType": {"token_ids": None},
    r"mask: expected a tensor, got list": {"mask": [[1, 1, 1], [1, 1, 1]]},
    r"old_logps: expected a tensor, got list": {"old_logps": [0.0]},
    r"live_rows: expected a tensor, got list": {"live_rows": [0]},
    r"score_dead_rows: expected True or False, got 'no'": {"score_dead_rows": "no"},
    r"return_entropy: expected True or False, got 1": {"return_entropy": 1},
    r"use_bias_correction_kl: expected True or False": {"use_bias_correction_kl": "no"},
    r"denominator: expected a number >= 0, got -4": {"denominator": torch.tensor(-4.0)},
    r"denominator: expected a number >= 0, got nan": {"denominator": torch.tensor(torch.nan)},
    r"denominator: expected a number >= 0, got True": {"denominator": torch.tensor(True)},
    r"temperature: expected a finite number > 0, got 0; greedy": {"temperature": 0},
    r"temperature: expected a finite number > 0, got '1'$": {"temperature": "1"},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_heads_arguments(message):
    arguments = HEAD | {"advantages": torch.ones(2)} | WRONG[message]
    with pytest.raises(ValueError, match=message):
        gf.linear_grpo_loss(**arguments)


def test_lengths_for_cu_seqlens():
    with pytest.raises(ValueError, match="these look like lengths"):
        gf.linear_grpo_loss(
            torch.ones(5, 4), torch.ones(5, 4), torch.zeros(5, dtype=torch.int64), torch.ones(2),
            cu_seqlens=torch.tensor([2, 3]),
        )  # fmt: skip


def test_numpy_scalars_are_numbers():
    options = {"epsilon": np.float32(0.25), "beta": np.float64(0.5), "temperature": np.int64(1), "entropy_coef": 0}
    arguments = HEAD | {"advantages": torch.ones(2), "ref_logps": torch.zeros(2, 3), "denominator": np.int64(4)}
    arguments["hidden"] = arguments["hidden"].clone().requires_grad_()
    expected = gf.linear_grpo_loss(**arguments, epsilon=0.25, beta=0.5)
    assert gf.linear_grpo_loss(**arguments, **options).loss == expected.loss
    logits = torch.randn(2, 3, 5).requires_grad_()
    tokens = (arguments["token_ids"], torch.ones(2))
    expected = gf.grpo_loss(logits, *tokens, ref_logps=torch.zeros(2, 3), epsilon=0.25, beta=0.5)
    assert gf.grpo_loss(logits, *tokens, ref_logps=torch.zeros(2, 3), **options).loss == expected.loss
