"""What grpo_fast uses of vLLM, by transformers: a prompt's keys belong to the weights it was first read with.

`install` puts it where `import vllm` finds it. Engines note what is asked of them in `calls`.
"""

import copy
import importlib.machinery
import sys
import types

import torch
from plain_rows import plain_logps
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_fast.rollout import SamplingOptions
from grpo_fast.rollout.transformers import TransformersRollout


class SamplingParams:
    def __init__(self, **options):
        self.__dict__.update(options)


class LLM:
    made = ()
    honest = True  # whether logprobs_mode is heeded

    def __init__(self, model, **options):
        self.options, self.calls, self.cache, self.asleep = options, [], {}, False
        torch.manual_seed(99)  # vLLM seeds its process, too
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).eval()
        type(self).made = (*type(self).made, self)

    def collective_rpc(self, method, kwargs=None):
        assert not self.asleep
        if callable(method):
            self.calls.append(method.__name__)
            return
        assert method == "reload_weights"
        self.calls.append(method)
        given = {name: tensor.clone() for name, tensor in kwargs["weights_iterator"]}
        missing, unexpected = self.model.load_state_dict(given, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}  # of a tied head

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")
        self.cache.clear()

    def sleep(self, level):
        self.calls.append(f"sleep {level}")
        self.asleep = True

    def wake_up(self, tags):
        self.calls.append(f"wake_up {tags}")
        self.asleep = False

    def generate(self, prompts, sampling, use_tqdm):
        assert not self.asleep
        self.calls.append("generate")
        torch.manual_seed(77)
        return [
            self._group(prompt["prompt_token_ids"], params) for prompt, params in zip(prompts, sampling, strict=True)
        ]

    def _group(self, prompt, params):
        model = self.cache.setdefault(tuple(prompt), copy.deepcopy(self.model))
        model.generation_config.eos_token_id = params.stop_token_ids or None
        options = SamplingOptions(
            n=params.n,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            logprobs=True,
        )
        rollouts = TransformersRollout(model).generate([prompt], options, params.seed)
        outputs = [self._output(model, index, rollout, params) for index, rollout in enumerate(rollouts)]
        return types.SimpleNamespace(outputs=outputs[::-1])  # which order they come in is nobody's promise

    def _output(self, model, index, rollout, params):
        logps, known = rollout.logprobs, None
        if self.options["logprobs_mode"] != "processed_logprobs" or not self.honest:
            with torch.no_grad():
                logps = plain_logps(model, rollout, 1.0)[0].tolist()  # before any temperature
        if params.logprobs is not None:
            known = [
                {token: types.SimpleNamespace(logprob=logp)}
                for token, logp in zip(rollout.completion_ids, logps, strict=True)
            ]
        return types.SimpleNamespace(index=index, token_ids=list(rollout.completion_ids), logprobs=known)


def install(monkeypatch) -> type[LLM]:
    """Returns the class of engines; `made` holds those that there are."""
    module = types.ModuleType("vllm")
    module.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    module.__version__ = "0.fake"
    module.LLM = type("LLM", (LLM,), {"made": ()})
    module.SamplingParams = SamplingParams
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module.LLM
