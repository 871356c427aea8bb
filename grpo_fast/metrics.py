"""What a step reports, under TRL's names where TRL has the metric, and where it is written."""

import json
import logging
import math
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from grpo_fast import parallel
from grpo_fast.batching import MicroBatches
from grpo_fast.config import LogConfig
from grpo_fast.rewards import Scores
from grpo_fast.rollout import Rollout

_logger = logging.getLogger(__name__)


class PhaseTimer:
    """Seconds spent in the named phases of a step, and in the step as a whole; a GPU's work is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self, tokens: int) -> dict[str, float]:
        """step_time and time/PHASE, in seconds; of `tokens` how many a second, without the phase "save"."""
        total = time.perf_counter() - self._start
        return {
            "step_time": total,
            "tokens_per_second": tokens / (total - self.seconds.get("save", 0.0)),
            **{f"time/{phase}": seconds for phase, seconds in self.seconds.items()},
        }


def reward_metrics(scores: Scores, names: Sequence[str], group_size: int) -> dict[str, float]:
    """Means and standard deviations (population) of rewards; abstentions are left out.

    `reward_std` is the mean over groups of the deviation within the group, `frac_reward_zero_std` the share
    of groups whose rewards are all equal: they carry no signal.
    """
    groups = scores.total.view(-1, group_size)
    answered = groups.isfinite()
    spread = torch.where(answered, groups, -math.inf).amax(1) - torch.where(answered, groups, math.inf).amin(1)
    metrics = {
        "reward": scores.total.nanmean(),
        "reward_std": _nanstd(groups, 1).nanmean(),
        "frac_reward_zero_std": (spread <= 0).float().mean(),  # -inf where nobody answered
    }
    for name, values in zip(names, scores.by_function.unbind(1), strict=True):
        metrics[f"rewards/{name}/mean"] = values.nanmean()
        metrics[f"rewards/{name}/std"] = _nanstd(values, 0)
    return {name: value.item() for name, value in metrics.items()}


def _nanstd(values: Tensor, dim: int) -> Tensor:
    return (values - values.nanmean(dim, keepdim=True)).square().nanmean(dim).sqrt()


def completion_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Lengths in tokens, of all completions and of those that ended by themselves, and the share cut off."""
    metrics = {"completions/clipped_ratio": sum(r.truncated for r in rollouts) / len(rollouts)}
    terminated = [len(r.completion_ids) for r in rollouts if not r.truncated]
    for kind, lengths in (("", [len(r.completion_ids) for r in rollouts]), ("terminated_", terminated)):
        lengths = lengths or [0]
        metrics[f"completions/mean_{kind}length"] = sum(lengths) / len(lengths)
        metrics[f"completions/min_{kind}length"] = float(min(lengths))
        metrics[f"completions/max_{kind}length"] = float(max(lengths))
    return metrics


def batch_metrics(batches: MicroBatches) -> dict[str, float]:
    """What the update's forward was given.

    Returns:
        num_micro_batches: of this process.
        padding_share: the part of all processes' tokens that is padding.
        update_tokens: tokens of one pass over all processes' micro-batches.
        update_token_share: of the tokens of all prompts and completions, each prompt counted with every completion.
    """
    given = sum(batch.input_ids.numel() for batch in batches.batches)
    padding = sum(batch.padding for batch in batches.batches)
    given, padding, all_tokens = parallel.sum_counts(given, padding, batches.all_tokens)
    return {
        "num_micro_batches": float(len(batches.batches)),
        "padding_share": padding / given if given else 0.0,
        "update_tokens": float(given),
        "update_token_share": given / max(all_tokens, 1),
    }


def progress_line(metrics: dict[str, float]) -> str:
    """The few numbers a progress bar has room for."""
    shown = (
        ("reward", "reward", ".3f"),
        ("kl", "kl", ".4f"),
        ("entropy", "entropy", ".3f"),
        ("clip", "clip_ratio/region_mean", ".3f"),
        ("clip", "cispo_clip_ratio", ".3f"),
        ("tok/s", "tokens_per_second", ".0f"),
    )
    return " ".join(f"{label} {metrics[name]:{form}}" for label, name, form in shown if name in metrics)


def reset_peak_memory(device: torch.device) -> None:
    """Begin to measure anew on a GPU; a process cannot forget its own peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory held: by tensors on a GPU since `reset_peak_memory`, by the whole process so far on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _finite(value):
    """What JSON has no number for, infinities and nan, as None; also inside lists and dicts."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class MetricsLog:
    """metrics.jsonl, samples.jsonl, TensorBoard if asked for, and the reward curve, in one folder.

    Every line is on disk when the call returns: a crash later loses nothing. Lines are standard JSON: an infinite
    value is null. Nothing is touched before the first line; then files of an earlier run are kept as
    *.previous.jsonl, unless `continues` says that this run goes on with it.
    """

    def __init__(self, options: LogConfig) -> None:
        self.folder = Path(options.output_dir)
        self.continues = False
        self._opened: set[str] = set()
        self._board = self._make_board = None
        if "tensorboard" in options.report_to:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError("log.report_to: tensorboard is not installed. pip install tensorboard") from error
            self._make_board = SummaryWriter  # it writes a file as soon as it exists

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """One line of metrics.jsonl; metrics that have no value (nan) are left out."""
        metrics = {name: value for name, value in metrics.items() if not math.isnan(value)}
        self._append("metrics", [{"step": step, **metrics}])
        if self._make_board is not None:
            self._board = self._board or self._make_board(str(self.folder))
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()

    def write_samples(self, step: int, samples: Sequence[dict]) -> None:
        """One line of samples.jsonl per sample."""
        self._append("samples", [{"step": step, **sample} for sample in samples])

    def _append(self, stem: str, records: list[dict]) -> None:
        path = self.folder / f"{stem}.jsonl"
        if stem not in self._opened:
            self._opened.add(stem)
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self.continues and path.exists():
                path.replace(self.folder / f"{stem}.previous.jsonl")
        with path.open("a", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n")

    def plot(self) -> Path | None:
        """Draw reward.png from metrics.jsonl; without matplotlib say so and return None."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            _logger.warning("no reward curve: matplotlib is not installed. pip install matplotlib")
            return None
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(xlabel="step", ylabel="reward")
        for name, style, label in (
            ("reward", "-", "training reward"),
            ("eval/accuracy", "o--", "held-out accuracy"),
        ):
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=label)
        axes.grid(alpha=0.3)
        axes.legend()
        path = self.folder / "reward.png"
        figure.savefig(path, dpi=150)
        return path

    def close(self) -> None:
        """Close TensorBoard's file."""
        if self._board is not None:
            self._board.close()
