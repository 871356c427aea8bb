"""A training step, phase by phase, against TRL's on the same model, prompts and token ids.

    python -m benchmarks bench_train_step [--quick] [--rounds 3] [--cells small medium long] [--fresh]

The whole table takes about 20 minutes on two cores; a cell that is in the results already is skipped, --fresh runs it
again. SmolLM2-135M comes from `grpo-fast prepare-smollm2 models/SmolLM2-135M-Instruct`; the cell `long` takes its first
4 layers. --quick runs a tiny model made in code and keeps nothing.

Both sides are real trainers, `grpo_fast.GRPOTrainer` and `trl.GRPOTrainer`, and a phase is what their own steps call:

* rollout: completions of a step's prompts. No token ends one, so all are equally long.
* reference: log-probs of given completions without gradients. The policy itself is asked, a copy of it costs the same.
* update: loss, backward, clipping by norm and AdamW. beta is 0, so half the groups may be dead: their advantages are 0.
* step: rollout and update of the same round, added. There is no reference phase in it, as beta is 0; tokenizing,
  rewards and logging, which both trainers do once a step, are not in it either.

All completions and advantages of reference and update are the same token ids on both sides; the columns `loss` and
`grad_norm` show that so is the result. The learning rate is too small to move a float32 weight: every call sees the
same weights. Everything of a cell is interleaved in one process.

TRL 1.16 has its best settings on a CPU: bf16=False, gradient_checkpointing=False, the step as one micro-batch, its
fused head, no reference model. What each of them runs:

* grpo_fast: a prompt once for its G completions, in the rollout and in the update; the head on completions' positions
  with a gradient, 3 GEMMs in an update; nothing for dead groups.
* TRL: every prompt G times; the head with 4 GEMMs in an update, on every position but the last on a CPU. On devices
  with Triton, cuda and xpu, its head drops the prompts' positions (trl/trainer/utils.py:1618, 1642), so what prompts
  cost TRL here says nothing about its head on a GPU.

`predicted` is the ratio of both sides' FLOPs, matrix products and attention over causal pairs, as if a FLOP cost the
same everywhere; decoding reads weights rather than multiplying, so it says little of a rollout.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from grpo_fast import demo, release_workspace

from .harness import RESULTS, Variant, interleave, load_average, peak_bytes, print_table, read_csv, write_csv
from .train_step_sides import GROUPS, SIDES, TRL, Cell, Ours, Work, make_batch, our_work, trl_work

NAME = "bench_train_step"
MODEL = Path("models/SmolLM2-135M-Instruct")
DEAD = (0.0, 0.5)
PHASES = ("rollout", "reference", "update")


CELLS = (Cell("small", 4, 46, 32), Cell("medium", 8, 128, 64), Cell("long", 8, 512, 64, layers=4))
QUICK_CELLS = (Cell("quick", 4, 12, 8),)


def make_variants(cell: Cell, sides: dict[str, Ours | TRL], vocab: int) -> dict[tuple[str, str, float], Variant]:
    """By side, phase and share of dead groups; rollout and reference are the same with and without these."""

    def variant(side: str, phase: str, dead: float) -> Variant:
        batch, run = make_batch(cell, vocab, dead), getattr(sides[side], phase)
        return Variant(f"{phase} {dead:g} {side}", lambda: run(batch))

    keys = [(phase, dead) for phase in PHASES for dead in (DEAD if phase == "update" else DEAD[:1])]
    return {(side, *key): variant(side, *key) for key in keys for side in sides}


def measure(
    cell: Cell, load: Callable[[int | None], tuple[PreTrainedModel, object]], rounds: int
) -> list[dict[str, object]]:
    """Rows of the table: every phase and the whole step, ours and TRL's, with and without dead groups."""
    with tempfile.TemporaryDirectory() as folder:
        sides = {}
        for name, side in SIDES.items():
            model, tokenizer = load(cell.layers)
            sides[name] = side(model, tokenizer, cell, folder)
        variants = make_variants(cell, sides, model.config.vocab_size)
        load_before, results, peaks = load_average(), {}, {}
        for key, variant in variants.items():
            results[key] = variant.run()  # the first call, with whatever it sets up
            release_workspace()  # what is kept between calls counts
            peaks[key] = peak_bytes(variant)
        interleave(list(variants.values()), rounds, warm_up=False)

    seconds = {key: variant.seconds for key, variant in variants.items()}
    for side in sides:
        for dead in DEAD:
            both = (seconds[side, "rollout", 0.0], seconds[side, "update", dead])
            seconds[side, "step", dead] = [sum(times) for times in zip(*both, strict=True)]
            peaks[side, "step", dead] = max(peaks[side, "rollout", 0.0], peaks[side, "update", dead])

    def work(side: str, phase: str, dead: float) -> list[Work]:
        parts = ("rollout", "update") if phase == "step" else (phase,)
        return [our_work(cell, p, dead) if side == "grpo_fast" else trl_work(cell, p) for p in parts]

    def flops(*key) -> int:
        return sum(part.flops(model) for part in work(*key))

    rows = []
    for (side, phase, dead), times in seconds.items():
        key = (side, phase, dead)
        median, works = statistics.median(times), work(*key)
        loss, norm = results[key] if phase == "update" else (math.nan, math.nan)
        low, _, high = statistics.quantiles(times, n=4, method="inclusive")
        rows.append({
            "cell": cell.name,
            "model": Path(model.name_or_path).name or "made in code",
            "layers": model.config.num_hidden_layers,
            "groups": GROUPS,
            "group": cell.group,
            "prompt": cell.prompt,
            "completion": cell.completion,
            "dead": f"{dead:g}",
            "phase": phase,
            "side": side,
            "seconds": f"{median:.3f}",
            "spread": f"{(high - low) / median:.3f}",
            "trl_over_this": f"{statistics.median(seconds['trl', phase, dead]) / median:.2f}",
            "predicted": f"{flops('trl', phase, dead) / flops(*key):.2f}",
            "trunk_tokens": sum(part.trunk_tokens for part in works),
            "head_rows": sum(part.head_rows for part in works),
            "gflops_per_s": f"{flops(*key) / median / 1e9:.1f}",
            "peak_mib": f"{peaks[key] / 2**20:.0f}",
            "loss": f"{loss:.6g}",
            "grad_norm": f"{norm:.6g}",
            "rounds": rounds,
            "load": load_before,
        })  # fmt: skip
    return rows


def load_smollm2(path: Path, layers: int | None) -> tuple[PreTrainedModel, object]:
    if not path.is_dir():
        raise SystemExit(f"--model: expected a model's folder, got {path}. Run: grpo-fast prepare-smollm2 {path}")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if layers is not None:
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
        model.config.layer_types = getattr(model.config, "layer_types", None) and model.config.layer_types[:layers]
    return model, AutoTokenizer.from_pretrained(path)


def make_quick(layers: int | None) -> tuple[PreTrainedModel, object]:
    """A model whose vocabulary is larger than the tokenizer's: only ids are used."""
    del layers
    tokenizer = demo.make_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config), tokenizer


def plot(rows: list[dict[str, str]], path: Path) -> None:
    """Seconds of rollout and update, one above the other, of both sides in every cell."""
    from matplotlib import pyplot as plt

    shapes = list(dict.fromkeys((row["cell"], row["dead"]) for row in rows))
    found = {(r["cell"], r["dead"], r["phase"], r["side"]): r for r in rows}
    figure, axes = plt.subplots(1, len(shapes), figsize=(2.4 * len(shapes), 4.5), layout="constrained")
    for axis, (cell, dead) in zip(axes, shapes, strict=True):
        for place, side in enumerate(("trl", "grpo_fast")):
            rollout = float(found[cell, "0", "rollout", side]["seconds"])
            update = float(found[cell, dead, "update", side]["seconds"])
            axis.bar(place, rollout, color="#9aa7b5", label="rollout")
            axis.bar(place, update, bottom=rollout, color="#2f6f9f", label="update")
        step = found[cell, dead, "step", "grpo_fast"]
        shape = f"G {step['group']}, P {step['prompt']}, C {step['completion']}"
        axis.set_title(
            f"{shape}\n{step['layers']} layers, {float(dead):.0%} dead\n{step['trl_over_this']}x", fontsize=9
        )
        axis.set_xticks((0, 1), ("TRL", "grpo_fast"))
    axes[0].set_ylabel("seconds of a step")
    axes[0].legend(*(part[:2] for part in axes[0].get_legend_handles_labels()))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few seconds, no results kept")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cells", nargs="+", choices=[cell.name for cell in CELLS], help="default: all")
    parser.add_argument("--fresh", action="store_true", help="measure cells that are in the results again")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--output", default=NAME, help="name of the CSV and the plot in benchmarks/results")
    args = parser.parse_args()
    transformers_logging.disable_progress_bar()
    if args.quick:
        print_table(measure(QUICK_CELLS[0], make_quick, args.rounds))
        return
    wanted = [cell for cell in CELLS if args.cells is None or cell.name in args.cells]
    rows = read_csv(args.output)
    for cell in wanted:
        if not args.fresh and any(row["cell"] == cell.name for row in rows):
            print(f"{cell.name}: in {args.output}.csv already, --fresh measures it again")
            continue
        new = measure(cell, lambda layers: load_smollm2(args.model, layers), args.rounds)
        print_table(new)
        order = [each.name for each in CELLS]
        rows = sorted(
            [*(row for row in rows if row["cell"] != cell.name), *new], key=lambda row: order.index(row["cell"])
        )
        print(write_csv(args.output, rows))
        rows = read_csv(args.output)
    plot(rows, RESULTS / f"{args.output}.png")


if __name__ == "__main__":
    main()
