"""How much memory training will hold before activations, from the configuration alone; and how running out shows."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_fast.config import LoraConfig
from grpo_fast.lora import add_lora

GIB = 2**30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes held for the whole run; activations, key-value cache and the loss's workspace come on top.

    Attributes:
        parameters: of the policy, tied ones counted once.
        trained: how many of them get gradients; with LoRA those of the adapters, which are float32.
        training: weights, gradients and AdamW's two moments: 16 bytes a trained float32 parameter.
        reference: the frozen copy behind the KL term, 0 without one.
        rollout: the bfloat16 copy that a GPU samples from, 0 on a CPU.
    """

    parameters: int
    trained: int
    training: int
    reference: int
    rollout: int

    @property
    def total(self) -> int:
        return self.training + self.reference + self.rollout

    def __str__(self) -> str:
        parts = [f"weights, gradients and AdamW {self.training / GIB:.2f} GiB"]
        if self.reference:
            parts.append(f"reference {self.reference / GIB:.2f} GiB")
        if self.rollout:
            parts.append(f"rollout copy {self.rollout / GIB:.2f} GiB")
        total = f"{self.total / GIB:.2f} GiB, and activations"
        count = f"{self.parameters / 1e6:.1f} M parameters"
        if self.trained < self.parameters:
            count += f", {self.trained / 1e6:.2f} M of them trained"
        return f"{count}: {', '.join(parts)} = {total}"


def count_parameters(config, *, trust_remote_code: bool = False, lora: LoraConfig | None = None) -> tuple[int, int]:
    """Parameters of the causal language model that a configuration describes, and of its adapters; allocates nothing.

    Args:
        config: of transformers.
        trust_remote_code: without it, code that comes with the checkpoint is not run: a ValueError of transformers.
        lora: adapters to add; None, or r = 0: none.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        if lora is None or lora.r == 0:
            return parameters, 0
        model = add_lora(model, lora, seed=0)
    return parameters, sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def estimate_memory(
    parameters: int,
    dtype: torch.dtype,
    reference_dtype: torch.dtype | None,
    *,
    on_gpu: bool,
    adapters: int = 0,
    reference_offload: bool = False,
) -> MemoryEstimate:
    """What training holds.

    Args:
        parameters: of the model.
        dtype: theirs.
        reference_dtype: of the copy that is the reference, or None for none.
        on_gpu: where.
        adapters: parameters that LoRA adds, the only ones to be trained then; 0: all are.
        reference_offload: whether that copy is elsewhere most of the time.
    """
    copy = 0 if reference_dtype is None or adapters or (on_gpu and reference_offload) else reference_dtype.itemsize
    training = dtype.itemsize * parameters + 16 * adapters if adapters else 4 * dtype.itemsize * parameters
    return MemoryEstimate(
        parameters=parameters + adapters,
        trained=adapters or parameters,
        training=training,
        reference=copy * parameters,
        rollout=2 * parameters if on_gpu and dtype == torch.float32 else 0,
    )


def reference_dtype(name: str | None, model_dtype: torch.dtype, device: torch.device | str) -> torch.dtype:
    """model.reference_dtype as a dtype; None: bfloat16 on a GPU, the policy's own on a CPU."""
    if name is not None:
        return getattr(torch, name)
    return torch.bfloat16 if torch.device(device).type == "cuda" else model_dtype


def available_memory(device: torch.device) -> int:
    """Bytes free on the device; on a CPU what the system and a container's limit leave."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free


def check_memory(estimate: MemoryEstimate, available: int) -> None:
    """Refuse what cannot fit.

    Raises:
        MemoryError: with the bytes needed and available, and what to set.
    """
    if estimate.total <= available:
        return
    remedies = ["choose a smaller model.path"]
    if estimate.trained == estimate.parameters:
        remedies.insert(0, "set lora.r=16 (trains adapters alone)")
    if estimate.training == 16 * estimate.parameters:
        remedies.insert(0, "set model.dtype=bfloat16 (halves weights, gradients and AdamW)")
    if estimate.reference:
        remedies.insert(0, "set loss.beta=0 (no reference)")
    raise MemoryError(f"{estimate}, but only {available / GIB:.2f} GiB are free; {', or '.join(remedies)}")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device or the system refused memory. A CPU's allocator says so in the message alone."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: " in str(error)
