"""The configuration of a run: one small frozen dataclass a section, and the reader of YAML recipes.

Everything is checked before a model loads; an error names `section.field`, what was expected, what was
given and what to set. Field names are TRL's wherever TRL has the option.
"""

import copy
import dataclasses
import difflib
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from grpo_fast.checks import check_range, check_types, expect, refuse
from grpo_fast.ops.options import PolicyOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The policy, any causal language model that transformers loads."""

    path: str | None = None  # folder or hub name given to from_pretrained
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"  # of the trained weights; auto: as saved
    reference_dtype: Literal["float32", "bfloat16"] | None = None  # None: bfloat16 on a GPU, else model.dtype
    reference_offload: bool = False  # the copy that is the reference waits in the CPU's memory between its phases
    attn_implementation: str | None = None  # handed to transformers; None leaves the choice to it
    gradient_checkpointing: bool = False  # recompute activations in the backward to save memory
    trust_remote_code: bool = False  # run modelling code that comes with the checkpoint

    def __post_init__(self) -> None:
        check_types(self, "model")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (LoRA, arXiv 2106.09685) are trained in place of the weights; needs the extra `peft`."""

    r: int = 0  # rank of the adapters; 0: none, all weights are trained
    alpha: float | None = None  # their product is scaled by alpha / r; None: 2 * r
    target_modules: str | list[str] = "all-linear"  # names of layers; all-linear: every linear one but the head
    use_rslora: bool = False  # scale by alpha / sqrt(r) instead (arXiv 2312.03732)

    def __post_init__(self) -> None:
        check_types(self, "lora")
        check_range("lora.r", self.r, at_least=0)
        expect(self.alpha is None or self.alpha > 0, "lora.alpha", "a number > 0", self.alpha, "null for 2 * lora.r")
        expect(bool(self.target_modules), "lora.target_modules", "at least one name", self.target_modules, "all-linear")
        for name, default in (("alpha", None), ("target_modules", "all-linear"), ("use_rslora", False)):
            unused = self.r == 0 and getattr(self, name) != default
            refuse(unused, f"lora.{name}", getattr(self, name), "with lora.r=0", "lora.r, e.g. to 16")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where prompts come from: a file, a hub data set, or a built-in seeded task."""

    path: str | None = None  # .jsonl, .json or .parquet file, or hub:NAME
    eval_path: str | None = None  # held-out prompts for path; a task has a split of its own
    split: str = "train"  # split of the hub data set in path
    eval_split: str = "test"  # split of the hub data set in eval_path
    task: str | None = None  # name of a built-in task, instead of path
    task_args: dict[str, Any] = field(default_factory=dict)  # arguments of the built-in task
    prompt_column: str = "prompt"  # column that holds the prompt, a string or a list of messages
    system_prompt: str | None = None  # put before every prompt, which makes plain prompts conversational
    max_prompt_length: int | None = None  # in tokens; None: no limit
    overlong_prompt: Literal["error", "drop"] = "error"  # beyond max_prompt_length; prompts are never cut
    shuffle_dataset: bool = True  # draw prompts in a seeded random order
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # handed to the chat template

    def __post_init__(self) -> None:
        check_types(self, "data")
        task = f"with data.task={self.task}"
        refuse(bool(self.task and self.path), "data.path", self.path, task, "one of the two to null")
        refuse(bool(self.task and self.eval_path), "data.eval_path", self.eval_path, task, "it to null")
        orphan = bool(self.task_args) and self.task is None
        refuse(orphan, "data.task_args", self.task_args, "without data.task", "data.task")
        check_range("data.max_prompt_length", self.max_prompt_length, at_least=1)
        endless = self.overlong_prompt == "drop" and self.max_prompt_length is None
        refuse(endless, "data.overlong_prompt", "drop", "without a limit", "data.max_prompt_length")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """How completions are sampled."""

    engine: Literal["transformers", "vllm"] = "transformers"  # what samples; vllm needs the extra of that name
    vllm_gpu_memory_utilization: float | None = None  # vLLM's share of the device's memory; None: 0.3
    vllm_max_model_length: int | None = None  # of prompt and completion, in tokens; None: what the data can need
    num_generations: int = 8  # completions per prompt, the group size G
    max_completion_length: int = 256  # in tokens
    temperature: float = 1.0  # of sampling, and of every log-prob in the loss
    top_p: float = 1.0  # nucleus sampling; 1 keeps everything
    top_k: int = 0  # sample among the k most likely tokens; 0 keeps everything
    max_rows: int | None = None  # completions generated at once; None: all of a step
    cuda_graphs: bool = False  # launch a step of decoding as a whole; not run on a GPU yet, hence not the default
    mask_truncated_completions: bool = False  # leave completions that hit the length limit out of the loss
    # Groups of equal rewards teach nothing: how many more times a step samples other prompts in their place.
    max_resampling_rounds: int = 0
    # Weights for what was sampled from other probabilities than the policy's (rounding, another engine):
    # token_truncate caps them, token_mask leaves tokens beyond the cap out. None: token_truncate where the engine's
    # arithmetic is not the policy's own, else none.
    importance_sampling_mode: Literal["token_truncate", "token_mask", "none"] | None = None
    importance_sampling_clip_max: float = 3.0  # the cap

    def __post_init__(self) -> None:
        check_types(self, "rollout")
        size, temperature = self.num_generations, self.temperature
        expect(
            size >= 2,
            "rollout.num_generations",
            "an integer >= 2, since advantages compare the completions of one prompt",
            size,
            "e.g. 8",
        )
        check_range("rollout.max_completion_length", self.max_completion_length, at_least=1)
        expect(
            temperature > 0,
            "rollout.temperature",
            "a number > 0, since greedy completions of one prompt are all equal and teach nothing",
            temperature,
            "e.g. 1.0",
        )
        expect(0 < self.top_p <= 1, "rollout.top_p", "a number in (0, 1]", self.top_p, "1.0 to keep all")
        check_range("rollout.top_k", self.top_k, at_least=0)
        check_range("rollout.max_rows", self.max_rows, at_least=1)
        check_range("rollout.max_resampling_rounds", self.max_resampling_rounds, at_least=0)
        cap = self.importance_sampling_clip_max
        expect(cap >= 1, "rollout.importance_sampling_clip_max", "a number >= 1", cap, "e.g. 3.0")
        for name in ("vllm_gpu_memory_utilization", "vllm_max_model_length"):
            value = getattr(self, name)
            unused = self.engine != "vllm" and value is not None
            refuse(unused, f"rollout.{name}", value, f"with rollout.engine={self.engine}", "it to null")
        unused = self.engine == "vllm" and self.cuda_graphs
        refuse(unused, "rollout.cuda_graphs", True, "with rollout.engine=vllm, which has its own", "it to false")
        share, length = self.vllm_gpu_memory_utilization, self.vllm_max_model_length
        in_range = share is None or 0 < share < 1
        expect(in_range, "rollout.vllm_gpu_memory_utilization", "a number in (0, 1)", share, "e.g. 0.3")
        least = self.max_completion_length + 1
        expected = f"more than rollout.max_completion_length={self.max_completion_length}"
        expect(
            length is None or length >= least, "rollout.vllm_max_model_length", expected, length, f"at least {least}"
        )
        mode = self.importance_sampling_mode
        because = "with top_p or top_k, whose log-probs are of another distribution than the policy's"
        unlike = mode in ("token_truncate", "token_mask") and not self.samples_the_policy
        refuse(unlike, "rollout.importance_sampling_mode", mode, because, "it to null, or top_p=1.0 and top_k=0")

    @property
    def samples_the_policy(self) -> bool:
        """Whether completions are drawn from the policy's own distribution, not from a part of the vocabulary."""
        return self.top_p == 1 and self.top_k == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """What completions are worth: the weighted sum of the functions' rewards."""

    funcs: list[str] = field(default_factory=list)  # shipped name, import path pkg.mod.fn, or hf:PATH
    weights: list[float] | None = None  # one per function; None: all 1

    def __post_init__(self) -> None:
        check_types(self, "reward")
        if self.weights is not None:
            count = len(self.funcs)
            expected = f"{count} numbers, one for each of reward.funcs"
            expect(len(self.weights) == count, "reward.weights", expected, self.weights, "null for 1 each")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """The options of `grpo_fast.GRPOLoss`, and how rewards become advantages."""

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo"] = "grpo"  # how tokens average
    epsilon: float = 0.2  # clips ratios below 1 - epsilon (an on-policy update has ratio 1: nothing to clip)
    epsilon_high: float | None = None  # upper clip, None: epsilon; for cispo the cap itself, >= 1
    delta: float | None = None  # bounds the ratio for negative advantages; None: off
    beta: float = 0.04  # weight of the KL to the reference model; 0 loads no reference
    importance_sampling_level: Literal["token", "sequence"] = "token"  # sequence: one ratio for all (GSPO)
    use_bias_correction_kl: bool = False  # weigh the KL estimate with the ratio
    entropy_coef: float = 0.0  # weight of the entropy bonus
    num_iterations: int = 1  # optimizer steps on one rollout
    count_dead_groups: bool = True  # whether groups of equal rewards count in the loss's denominator
    scale_rewards: Literal["group", "batch", "none"] = "group"  # whose spread divides the advantages
    advantage_std: Literal["population", "sample"] = "population"  # "sample" (divides by n - 1) is TRL's
    backend: Literal["reference", "cpu", "triton", "cuda"] | None = None  # None: the best for the device

    def __post_init__(self) -> None:
        check_types(self, "loss")
        options = [option.name for option in dataclasses.fields(PolicyOptions) if hasattr(self, option.name)]
        try:
            PolicyOptions(**{name: getattr(self, name) for name in options})
        except ValueError as error:
            raise ValueError(f"loss.{error}") from None
        check_range("loss.num_iterations", self.num_iterations, at_least=1)
        no_kl = self.use_bias_correction_kl and self.beta == 0
        refuse(no_kl, "loss.use_bias_correction_kl", True, "with loss.beta=0", "it to false")
        no_std = self.advantage_std == "sample" and self.scale_rewards == "none"
        refuse(no_std, "loss.advantage_std", "sample", "with loss.scale_rewards=none", "it to population")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW and its schedule."""

    # Peak; None: 1e-6, and 1e-5 for adapters (ten times as much: Schulman et al. 2025, "LoRA Without Regret").
    learning_rate: float | None = None
    weight_decay: float = 0.0  # decoupled
    adam_beta1: float = 0.9  # decay of the mean of the gradients
    adam_beta2: float = 0.999  # decay of the mean of their squares
    adam_epsilon: float = 1e-8  # added to the root of the latter
    warmup_steps: int = 0  # optimizer steps of linear warm-up from 0
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"  # linear and cosine end at 0
    max_grad_norm: float = 1.0  # gradients of a larger norm are scaled down to it

    def __post_init__(self) -> None:
        check_types(self, "optim")
        for name in ("learning_rate", "weight_decay", "adam_epsilon", "warmup_steps"):
            check_range(f"optim.{name}", getattr(self, name), at_least=0)
        for name in ("adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            expect(0 <= value < 1, f"optim.{name}", "a number in [0, 1)", value, "e.g. 0.9")
        norm = self.max_grad_norm
        expect(norm > 0, "optim.max_grad_norm", "a number > 0", norm, "e.g. 1.0")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """How much goes into a step, and how it is cut for memory; the cut never changes the result."""

    prompts_per_step: int = 8  # each is completed rollout.num_generations times
    max_tokens_per_micro_batch: int = 16384  # padding included; a longer single row goes alone

    def __post_init__(self) -> None:
        check_types(self, "batch")
        check_range("batch.prompts_per_step", self.prompts_per_step, at_least=1)
        check_range("batch.max_tokens_per_micro_batch", self.max_tokens_per_micro_batch, at_least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What a run shows and leaves behind."""

    output_dir: str = "runs/grpo"  # metrics.jsonl, samples.jsonl, checkpoints and the plot go here
    logging_steps: int = 1  # steps between two lines of metrics.jsonl
    progress: bool = True  # show a progress bar
    log_completions: bool = True  # write some of each logged step's completions to samples.jsonl
    num_completions_to_print: int = 4  # how many of them, of as many prompts as possible
    report_to: list[Literal["tensorboard"]] = field(default_factory=list)  # further loggers
    plot: bool = True  # draw the reward curve at the end (needs the extra `plots`)

    def __post_init__(self) -> None:
        check_types(self, "log")
        check_range("log.logging_steps", self.logging_steps, at_least=1)
        check_range("log.num_completions_to_print", self.num_completions_to_print, at_least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation on held-out prompts."""

    eval_steps: int = 0  # steps between evaluations; 0: at the start and the end only
    num_prompts: int = 64  # at most this many held-out prompts, the first ones
    num_generations_eval: int = 1  # completions per prompt, the k of pass@k
    temperature: float = 0.0  # 0 is greedy

    def __post_init__(self) -> None:
        check_types(self, "eval")
        check_range("eval.eval_steps", self.eval_steps, at_least=0)
        check_range("eval.num_prompts", self.num_prompts, at_least=1)
        check_range("eval.num_generations_eval", self.num_generations_eval, at_least=1)
        check_range("eval.temperature", self.temperature, at_least=0)
        equal = self.num_generations_eval > 1 and self.temperature == 0
        because = "above 1 with greedy decoding, which repeats itself"
        refuse(equal, "eval.num_generations_eval", self.num_generations_eval, because, "eval.temperature=1.0")


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveConfig:
    """When checkpoints are written."""

    save_steps: int = 0  # steps between checkpoints; 0: at the end only
    save_total_limit: int | None = None  # keep this many of the newest; None: all

    def __post_init__(self) -> None:
        check_types(self, "save")
        check_range("save.save_steps", self.save_steps, at_least=0)
        check_range("save.save_total_limit", self.save_total_limit, at_least=1)
        single = self.save_total_limit is not None and self.save_steps == 0
        because = "with save.save_steps=0, which saves once"
        refuse(single, "save.save_total_limit", self.save_total_limit, because, "save.save_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOConfig:
    """Everything a run depends on besides the model's and the data's own contents."""

    seed: int = 0  # of data order and sampling
    max_steps: int = 100  # rollouts; each is trained on loss.num_iterations times
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    log: LogConfig = field(default_factory=LogConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    save: SaveConfig = field(default_factory=SaveConfig)

    def __post_init__(self) -> None:
        check_types(self, "")
        # A step's own seed is a multiple of this one plus the step, and has to fit in 64 bits.
        expect(0 <= self.seed < 2**32, "seed", "a number >= 0 and < 2**32", self.seed, "e.g. 0")
        check_range("max_steps", self.max_steps, at_least=1)
        for name, default, remedy in (
            ("reference_dtype", None, "it to null"),
            ("reference_offload", False, "it to false"),
        ):
            value = getattr(self.model, name)
            for no_copy, because in (
                (self.loss.beta == 0, "with loss.beta=0"),
                (self.lora.r > 0, "with lora.r, where the reference is the policy with its adapters off"),
            ):
                refuse(no_copy and value != default, f"model.{name}", value, because, remedy)
        updates = self.max_steps * self.loss.num_iterations
        warmup = self.optim.warmup_steps
        expected = f"less than the run's {updates} optimizer steps (max_steps * loss.num_iterations)"
        expect(warmup == 0 or warmup < updates, "optim.warmup_steps", expected, warmup, "fewer")

    def to_dict(self) -> dict[str, Any]:
        """Returns the configuration as nested dicts of plain values, as written in a recipe."""
        return dataclasses.asdict(self)


def load_config(path: str | Path | None = None, overrides: typing.Sequence[str] = ()) -> GRPOConfig:
    """Reads a YAML recipe and applies overrides.

    Args:
        path: the recipe; None starts from the defaults.
        overrides: `section.field=value` each, the value in YAML: 1e-6 is a number, null is None.

    Raises:
        ValueError: an unknown key (the nearest known one is named), a wrong type, an impossible or
            meaningless value.
        FileNotFoundError: no such recipe.
    """
    return build_config({} if path is None else _read_recipe(Path(path)), overrides)


def build_config(values: dict[str, Any], overrides: typing.Sequence[str] = ()) -> GRPOConfig:
    """Makes a configuration of nested dicts, as a recipe reads, and applies overrides as `load_config` does."""
    values = copy.deepcopy(values)
    for override in overrides:
        _apply_override(values, override)
    return _build(GRPOConfig, values, "")


def _read_recipe(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no recipe at {path}")
    values = _parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a mapping of sections, got {type(values).__name__}")
    return values


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ValueError(f"--set {override}: expected section.field=value, e.g. loss.beta=0")
    *sections, name = key.split(".")
    for depth, section in enumerate(sections):
        if values.get(section) is None:  # missing, or empty in the recipe
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise ValueError(f"--set {override}: {'.'.join(sections[: depth + 1])} is not a section")
    values[name] = _parse_yaml(text, f"--set {override}")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with two changes: 1e-6 is a number, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                problem = f"key {key!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error


def _build(cls: type, values: Any, section: str) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{section}: expected a section with fields of its own, got {values!r}")
    hints = typing.get_type_hints(cls)
    arguments = {}
    for key, value in values.items():
        name = f"{section}.{key}" if section else str(key)
        if key not in hints:
            raise ValueError(f"{name}: unknown key{_nearest(str(key), hints, section)}")
        is_section = dataclasses.is_dataclass(hints[key])
        # An empty section in YAML reads as None and means its defaults.
        arguments[key] = _build(hints[key], {} if value is None else value, name) if is_section else value
    return cls(**arguments)


def _nearest(key: str, known: typing.Iterable[str], section: str) -> str:
    hints = typing.get_type_hints(GRPOConfig)
    sections = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    elsewhere = [f"{name}.{key}" for name, cls in sections.items() if key in typing.get_type_hints(cls)]
    if elsewhere:
        return f", did you mean {elsewhere[0]}?"
    match = difflib.get_close_matches(key, list(known), n=1)
    if match:
        return f", did you mean {section + '.' if section else ''}{match[0]}?"
    return f". Known here: {', '.join(known)}"
