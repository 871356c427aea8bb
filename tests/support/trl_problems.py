"""TRL's trainer and ours on equal models, and a batch as TRL's own generation would hand it to the loss."""

import torch
import trl
from datasets import Dataset
from tiny_models import IDS, SIZES, VOCAB, make_model, make_tokenizer
from transformers import MixtralConfig, MixtralForCausalLM, PhiConfig, PhiForCausalLM

from grpo_fast.integrations.trl import GRPOTrainer

# 3 micro-batches an optimizer step, 2 a generation: every factor of TRL's normalisers differs from 1.
CONFIG = {
    "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    "logging_steps": 1, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_generations": 4,
    "gradient_accumulation_steps": 3, "steps_per_generation": 2, "max_completion_length": 9, "learning_rate": 0.05,
    "optim": "sgd", "lr_scheduler_type": "constant",
}  # fmt: skip
UNTIMED = ("step_time", "runtime", "per_second")


def reward(completions, **_):
    """What share of a completion is the letter a or b."""
    return [sum(c in "ab" for c in text) / max(len(text), 1) for text in completions]


def dataset(rows=24):
    return Dataset.from_dict({"prompt": ["12+3=", "a", "x<y", "9-9 is"] * (rows // 4)})


def make_any_model(kind="llama"):
    """`make_model`, and two more: a head with a bias, and a mixture of experts."""
    if kind in ("phi", "mixtral"):
        torch.manual_seed(0)
        sizes = {"vocab_size": len(VOCAB), **SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64}
        if kind == "phi":
            model = PhiForCausalLM(PhiConfig(**sizes))
            torch.nn.init.normal_(model.lm_head.bias)
        else:
            model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=2, sliding_window=None))
        model.lm_head.weight.data.mul_(20.0)
        return model
    return make_model(kind)


def make_trainer(trainer_class, folder, model=None, evaluates=False, peft_config=None, **config):
    return trainer_class(
        make_any_model() if model is None else model,
        reward,
        trl.GRPOConfig(output_dir=str(folder), **{**CONFIG, **config}),
        dataset(),
        dataset(4) if evaluates else None,
        processing_class=make_tokenizer(),
        peft_config=peft_config,
    )


def make_pair(folder, kind="llama", **config):
    """(theirs, ours), mid-training. A model folder rather than a model where TRL loads a reference from it."""
    model = str(folder / kind)
    make_any_model(kind).save_pretrained(model)
    pair = []
    for trainer_class in (trl.GRPOTrainer, GRPOTrainer):
        trainer = make_trainer(trainer_class, folder, model, **config)
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        trainer.model.train()
        pair.append(trainer)
    return pair


def make_batch(trainer, *, on_policy=False, tools=True, per_token_advantages=False):
    """5 rows of 7 completion tokens after left-padded prompts; row 3 is masked whole, row 4 has advantage 0.

    Old and reference log-probs lie around the policy's own, so that ratios leave the clip range on both sides.
    """
    rng = torch.Generator().manual_seed(1)
    lengths, prompts, width, start = [7, 3, 5, 0, 6], [4, 1, 2, 4, 3], 7, 4
    completion_mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    batch = {
        "prompt_ids": torch.randint(3, len(VOCAB), (5, start), generator=rng),
        "prompt_mask": (torch.arange(start) >= start - torch.tensor(prompts)[:, None]).long(),
        "completion_ids": torch.randint(1, len(VOCAB), (5, width), generator=rng),
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.0, -0.7, -0.5, -1.1, 0.0]),
        "num_items_in_batch": torch.tensor(37),
    }
    batch["completion_ids"][completion_mask == 0] = IDS["pad_token_id"]
    if per_token_advantages:
        batch["advantages"] = batch["advantages"][:, None] * (torch.arange(width) - 2.5)
    if tools:  # holes: what a tool wrote
        batch["tool_mask"] = torch.ones_like(completion_mask)
        batch["tool_mask"][0, 2:4] = batch["tool_mask"][2, 0] = batch["tool_mask"][4, 3] = 0
    with torch.no_grad():
        logps = trainer._get_per_token_logps_and_entropies(
            trainer.model.eval(),
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
            torch.cat([batch["prompt_mask"], completion_mask], 1),
            width,
        )[0]
    trainer.model.train()

    def near(scale):
        return logps + scale * torch.randn(logps.shape, generator=rng) * completion_mask

    if not on_policy:
        batch["old_per_token_logps"] = near(0.4)
    if trainer.beta > 0:
        batch["ref_per_token_logps"] = near(0.6)
    batch["sampling_per_token_logps"] = near(0.5)
    return batch


def measure(trainer, batch):
    """(loss, {name: gradient}, {metric: values}) of TRL's _compute_loss and a backward, from seed 0."""
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    trainer._metrics["eval"].clear()
    torch.manual_seed(0)  # dropout
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return loss.detach(), grads, {mode: dict(values) for mode, values in trainer._metrics.items()}


def difference(got, expected):
    """Largest difference of all gradients, against the largest gradient."""
    assert got.keys() == expected.keys()
    largest = max(g.abs().max() for g in expected.values())
    return float(max((got[name] - g).abs().max() for name, g in expected.items()) / largest)


def history(trainer):
    """What was logged, without times."""
    return [
        {name: value for name, value in entry.items() if not any(part in name for part in UNTIMED)}
        for entry in trainer.state.log_history
    ]
