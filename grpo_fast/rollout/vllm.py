"""Rollouts by vLLM, in this process and on the trainer's device: it samples while the trainer waits, and sleeps after.

vLLM is imported when an engine is made. It reads no checkpoint: its model is built from the policy's configuration, and
the weights come from the policy's memory.
"""

import copy
import math
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy
import torch
from transformers import PreTrainedModel

from grpo_fast.lora import inner_model
from grpo_fast.merged_weights import merged_weights, unties
from grpo_fast.modes import evaluation_mode
from grpo_fast.rollout import Rollout, SamplingOptions, check_prompts, eos_token_ids, until_eos

_SETTINGS = {  # of vLLM's, unless the user has set them
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process: weights need not be sent
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads stay free to use every core
    "VLLM_LOGGING_LEVEL": "ERROR",  # each start and sync has warnings that mean nothing here
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU_BLOCK = 32  # tokens of a block of the cache; a prompt is shared by whole blocks, and 128 is vLLM's own choice
_MOST_DIFFERENCE = 0.2  # nats between the log-probs of policy and vLLM, on average, that may be rounding
_MAX_ROWS = 256  # completions at once, when max_rows leaves it open


class VLLMRollout:
    """Samples with vLLM from the weights that the policy had at the last `sync`, adapters merged.

    vLLM computes with kernels of its own, on a GPU in bfloat16 where the policy is float32: its log-probs are not the
    trainer's to the last bit, and the trainer corrects for that (`rollout.importance_sampling_mode`).

    Args:
        model: the policy, a causal language model of an architecture that vLLM has.
        tokenizer: asked for its end id only; vLLM itself gets none.
        max_model_length: most tokens of a prompt and its completion together; None: the model's positions.
        max_rows: most completions at once; None: 256.
        gpu_memory_utilization: vLLM's share of the device's memory, its copy of the weights included, between 0 and 1.
            On a CPU: the most that its cache may take of the machine's memory.
        trust_remote_code: handed to vLLM.

    Attributes:
        eos_ids: what ends a completion.
        exact: False: log-probs differ from the policy's own by rounding.
        reason: how it samples, in words.

    Raises:
        ImportError: vllm is not installed.
        ValueError: the model has adapters that cannot be merged, or one that unties its head from its embedding; or
            vLLM's log-probs of a few sampled tokens are not the policy's.
    """

    exact = False

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer=None,
        *,
        max_model_length: int | None = None,
        max_rows: int | None = None,
        gpu_memory_utilization: float = 0.3,
        trust_remote_code: bool = False,
    ) -> None:
        if unties(model):
            raise ValueError(
                "model: expected no adapter on a head or embedding that share their weight, which vLLM keeps once, got "
                "one. Set rollout.engine=transformers, or lora.target_modules without them"
            )
        self.eos_ids = eos_token_ids(model, tokenizer)
        policy = inner_model(model)
        config = policy.config.get_text_config()
        self._device = policy.device
        on_gpu = policy.device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu and policy.dtype == torch.float32 else policy.dtype
        self.max_model_length = max_model_length or getattr(config, "max_position_embeddings", None)
        options = {
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": self.max_model_length,
            "max_num_seqs": max_rows or _MAX_ROWS,
            "trust_remote_code": trust_remote_code,
            "load_format": "dummy",  # sync brings the weights
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # none of the checkpoint's defaults (penalties, top_k, ...)
            "logprobs_mode": "processed_logprobs",  # those of the distribution that is drawn from
            "enable_prefix_caching": True,
            "gpu_memory_utilization": gpu_memory_utilization,
        }
        if on_gpu:
            options["enable_sleep_mode"] = True
        else:
            most = int(gpu_memory_utilization * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
            needed = _cache_bytes(config, options["max_num_seqs"], self.max_model_length, dtype.itemsize)
            options |= {"enforce_eager": True, "block_size": _CPU_BLOCK, "kv_cache_memory_bytes": min(needed, most)}
        self._repack_head = not on_gpu and config.tie_word_embeddings
        self._sleeps, self._asleep = on_gpu, False
        with _unchanged_process(policy.device):
            self._vllm = _import_vllm()
            self._llm = _engine(self._vllm, policy, options)
        self.reason = f"rollout by vLLM {self._vllm.__version__} in this process, in {options['dtype']}"
        self.sync(model)
        self._check(policy)

    def sync(self, model: PreTrainedModel) -> None:
        """Copy the policy's weights to vLLM's, adapters merged, and forget the prompts computed with the old ones."""
        self._wake("weights")
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": merged_weights(model)})
        if self._repack_head:
            self._llm.collective_rpc(_repack_head)
        self._llm.reset_prefix_cache()

    def generate(self, prompts: list[list[int]], options: SamplingOptions, seed: int) -> list[Rollout]:
        """`options.n` completions of every prompt, group after group. See `RolloutEngine.generate`.

        `options.max_rows` was the constructor's to hear.

        Raises:
            ValueError: for a prompt that is empty or leaves no room for `options.max_tokens`.
        """
        check_prompts(prompts, options.max_tokens, self.max_model_length)
        if not prompts:
            return []
        generator = torch.Generator().manual_seed(seed)
        sampling = [
            self._vllm.SamplingParams(
                n=options.n,
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                top_p=options.top_p,
                top_k=options.top_k,
                seed=prompt_seed,  # completion i of the prompt has the seed's i-th successor
                stop_token_ids=list(self.eos_ids),
                ignore_eos=True,  # an end that the configuration names and eos_ids do not is none
                logprobs=0 if options.logprobs else None,  # 0: of the sampled token alone
                detokenize=False,
            )
            for prompt_seed in torch.randint(2**62, (len(prompts),), generator=generator).tolist()
        ]
        self._wake()
        with _unchanged_process(self._device):
            outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        self._sleep()
        return [
            self._rollout(prompt, completion)
            for prompt, output in zip(prompts, outputs, strict=True)
            for completion in sorted(output.outputs, key=lambda each: each.index)
        ]

    def _rollout(self, prompt: Sequence[int], completion) -> Rollout:
        ids, ended = until_eos(completion.token_ids, self.eos_ids)
        logps = None
        if completion.logprobs is not None:
            by_token = zip(completion.logprobs, ids, strict=False)
            logps = tuple(known[token].logprob for known, token in by_token)
        return Rollout(prompt_ids=tuple(prompt), completion_ids=ids, truncated=not ended, logprobs=logps)

    @torch.no_grad()
    def _check(self, policy: PreTrainedModel) -> None:
        """Refuse to sample from another distribution than the policy's: weights not loaded, raw log-probs, ..."""
        generator, vocab_size = torch.Generator().manual_seed(0), policy.get_input_embeddings().num_embeddings
        length = min(16, self.max_model_length or 16)
        prompt = torch.randint(vocab_size, (length // 2,), generator=generator).tolist()
        options = SamplingOptions(n=4, max_tokens=length - len(prompt), temperature=0.5, logprobs=True)
        differences = []
        with evaluation_mode(policy):
            for rollout in self.generate([prompt], options, 0):
                ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids], device=policy.device)
                logits = policy(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
                logps = (logits / options.temperature).log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
                differences.append((logps.cpu() - torch.tensor(rollout.logprobs)).abs())
        mean = torch.cat(differences).mean().item()
        if not mean < _MOST_DIFFERENCE:
            raise ValueError(
                f"rollout.engine: expected vLLM's log-probs of sampled tokens to be the {type(policy).__name__}'s but "
                f"for rounding, got a mean difference of {mean:.3g} nats: vLLM {self._vllm.__version__} computes this "
                "model differently, or does not load all of its weights. Set rollout.engine=transformers"
            )

    def _wake(self, part: str | None = None) -> None:
        """Take the memory back that `_sleep` left to the trainer: all of it, or "weights"."""
        if self._asleep:
            torch.cuda.empty_cache()  # what the trainer has cached, but does not use
            self._llm.wake_up([part] if part else None)
            self._asleep = part is not None

    def _sleep(self) -> None:
        """On a GPU, leave the memory to the trainer: weights wait in the CPU's, the cache is dropped."""
        if self._sleeps:
            self._llm.sleep(level=1)
            self._asleep = True


def _import_vllm():
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as error:
        raise ImportError(
            f"rollout.engine: vllm cannot be imported ({error}): pip install 'grpo-fast[vllm]'"
        ) from error
    return vllm


def _engine(vllm, policy: PreTrainedModel, options: dict):
    """vLLM's engine with a model as the policy's configuration describes it; its weights mean nothing yet."""
    config = copy.deepcopy(policy.config)
    config.architectures = [type(policy).__name__]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return vllm.LLM(model=folder, **options)


def _repack_head(worker) -> None:
    """vLLM samples from a packed copy of a CPU's head, which reloading does not renew where the head is tied."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in worker.get_model().modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def _cache_bytes(config, rows: int, length: int | None, itemsize: int) -> int:
    """Keys and values of `rows` completions of `length` tokens with their prompts, if no two share any."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    of_token = 2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    blocks = rows * (math.ceil((length or config.max_position_embeddings) / _CPU_BLOCK) + 1)
    return of_token * itemsize * blocks * _CPU_BLOCK


@contextmanager
def _unchanged_process(device: torch.device) -> Iterator[None]:
    """What vLLM does to its process is undone: random states that it seeds and draws from, the number of threads.

    On a CPU it would also leave a `torch.set_num_threads` that does nothing.
    """
    python, numbers = random.getstate(), numpy.random.get_state()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(numbers)
            torch.set_num_threads = set_num_threads
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
