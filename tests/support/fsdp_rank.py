"""What each rank of tests/distributed/test_fsdp_head.py does: processes import it by name."""

import torch
import torch.distributed as dist
from tiny_models import make_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Shard, distribute_tensor

import grpo_fast as gf

BATCH, LENGTH = 4, 6


def _make(lora: bool) -> nn.Module:
    """A tiny Llama; with `lora`, frozen but for adapters on its head and attention."""
    model = make_model("llama").double().eval()
    if lora:
        import peft

        config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=4)
        model = peft.inject_adapter_in_model(config, model)
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.3)
    return model


def _data(rank: int | None) -> dict:
    """A rank's half of the batch, or all of it; the ranks' valid tokens differ in number."""
    generator = torch.Generator().manual_seed(2)
    mask = torch.ones(BATCH, LENGTH)
    mask[0, 2:] = mask[2, 5:] = 0
    tensors = {
        "token_ids": torch.randint(3, 47, (BATCH, LENGTH), generator=generator),
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.75]),
        "mask": mask,
    }
    rows = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
    return {name: tensor[rows] for name, tensor in tensors.items()}


def _loss(hidden, weight, bias, batch, scale=1):
    """Over the whole batch's token count; what averages gradients has the loss multiplied by the ranks."""
    tokens = int(_data(None)["mask"].sum())
    options = {"loss_type": "dapo", "denominator": tokens, "bias": bias}
    return gf.linear_grpo_loss(hidden, weight, **batch, **options).loss * scale


def one_process(lora: bool) -> dict:
    """Gradients of the whole batch by way of logits: neither head_weight nor the fused head."""
    model, batch = _make(lora), _data(None)
    logits = model(batch["token_ids"]).logits
    gf.grpo_loss(logits, **batch, loss_type="dapo").loss.backward()
    return _gradients(model)


def _gradients(model) -> dict:
    return {
        name.removeprefix("inner.").removeprefix("model."): getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def _shard(model):
    """Layers, trunk and head by themselves, each a root of its own: trunk and head are called apart."""
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model.model)
    fully_shard(model.lm_head)
    return model


def _head_weight(rank: int, lora: bool) -> dict:
    model, batch = _shard(_make(lora)), _data(rank)
    for _ in range(2):  # the second backward adds to the first: two micro-batches of half the weight
        hidden = model.model(batch["token_ids"]).last_hidden_state
        _loss(hidden, *gf.head_weight(model.lm_head), batch, scale=dist.get_world_size() / 2).backward()
    return _gradients(model)


def _recipe(rank: int) -> dict:
    """The lines of the error, with a head that fully_shard was not called on but its parent."""
    model, batch = _make(False), _data(rank)
    fully_shard(model.model)
    fully_shard(nn.Sequential(model.lm_head))
    hidden = model.model(batch["token_ids"]).last_hidden_state
    weight = model.lm_head.weight
    calls = {
        "weight": lambda: _loss(hidden, weight, None, batch),
        "bias": lambda: _loss(hidden, torch.zeros(47, 32), weight[:, 0], batch),
        "hidden": lambda: _loss(weight[None], torch.zeros(47, 32), None, batch),
        "logprobs": lambda: gf.linear_token_logprobs(hidden, weight, batch["token_ids"]),
        "head_weight": lambda: gf.head_weight(model.lm_head),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            messages[name] = str(error)
    weight = weight.full_tensor(grad_placements=[Partial("avg")])
    _loss(hidden, weight, None, batch, scale=dist.get_world_size()).backward()
    return {"messages": messages, "gradients": _gradients(model)}


class _WithLoss(nn.Module):
    """The loss inside of the forward of the module that is sharded: there the head is whole already."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, batch, scale):
        hidden = self.inner.model(batch["token_ids"]).last_hidden_state
        return _loss(hidden, *gf.head_weight(self.inner.lm_head), batch, scale)


def _inside(rank: int, lora: bool) -> dict:
    model = _WithLoss(_make(lora))
    for layer in model.inner.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model(_data(rank), dist.get_world_size()).backward()
    return _gradients(model)


def _tensor_parallel(rank: int) -> dict:
    """Every rank has the same hidden states, and its rows of the weight."""
    model, batch = _make(False), _data(None)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(0)]))
    hidden = model.model(batch["token_ids"]).last_hidden_state
    _loss(hidden, weight.full_tensor(), None, batch).backward()
    return _gradients(model.model) | {"lm_head.weight": weight.grad.full_tensor()}


def every_case(rank: int, with_peft: bool) -> dict:
    """All cases in one pair of processes: starting them takes far longer than the cases do."""
    results = {"recipe": _recipe(rank), "tensor parallel": _tensor_parallel(rank)}
    for lora in (False, True) if with_peft else (False,):
        results["head_weight", lora] = _head_weight(rank, lora)
        results["inside", lora] = _inside(rank, lora)
    return results
