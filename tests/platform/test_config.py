import dataclasses

import pytest

from grpo_fast.config import GRPOConfig, LossConfig, build_config, load_config
from grpo_fast.ops.options import PolicyOptions


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("text, value", [("1e-6", 1e-6), ("1.5E+3", 1500.0), (".5e-1", 0.05), ("2", 2.0)])
def test_scientific_notation_is_a_number_in_recipes_and_overrides(recipe, text, value):
    path = recipe(f"optim:\n  learning_rate: {text}\n")
    for rate in (
        load_config(path).optim.learning_rate,
        load_config(None, [f"optim.learning_rate={text}"]).optim.learning_rate,
    ):
        assert rate == value
        assert isinstance(rate, float)


def test_sections_of_a_recipe_and_overrides_are_merged(recipe):
    path = recipe("seed: 3\nloss:\n  beta: 0.1\n  epsilon: 0.3\ndata:\nlog: {report_to: [tensorboard]}\n")
    args = load_config(path, ["loss.beta=0", "model.path=some/model", "data.task_args={}", "eval.eval_steps=7"])
    assert (args.seed, args.loss.beta, args.loss.epsilon, args.model.path) == (3, 0.0, 0.3, "some/model")
    assert args.eval.eval_steps == 7
    assert args.log.report_to == ["tensorboard"]


def test_the_defaults_are_the_agreed_ones():
    args = GRPOConfig()
    assert (args.loss.beta, args.loss.loss_type, args.loss.num_iterations) == (0.04, "grpo", 1)
    assert (args.rollout.num_generations, args.rollout.temperature) == (8, 1.0)
    assert args.optim.learning_rate is None
    assert load_config() == args


@pytest.mark.parametrize(
    "override, said",
    [
        ("optim.learning_rate=fast", "optim.learning_rate: expected a finite number or null, got 'fast'"),
        ("loss.beta=.nan", "loss.beta: expected a finite number"),
        ("loss.betta=1", "loss.betta: unknown key, did you mean loss.beta?"),
        ("los.beta=1", "los: unknown key, did you mean loss?"),
        ("learning_rate=1", "learning_rate: unknown key, did you mean optim.learning_rate?"),
        ("loss.learning_rate=1", "did you mean optim.learning_rate?"),
        ("loss.loss_type=ppo", "loss.loss_type: expected one of grpo, bnpo"),
        ("batch.prompts_per_step=true", "batch.prompts_per_step: expected an integer, got True"),
        ("batch.prompts_per_step=0", "batch.prompts_per_step: expected a number >= 1"),
        ("seed=1.5", "seed: expected an integer"),
        ("seed=-1", "seed: expected a number >= 0"),
        ("seed=4294967296", "seed: expected a number >= 0 and < 2**32, got 4294967296"),
        ("loss=3", "loss: expected a section"),
        ("seed.x=3", "seed: expected an integer"),
        ("rollout.num_generations=1", "rollout.num_generations: expected an integer >= 2"),
        ("rollout.temperature=0", "rollout.temperature: expected a number > 0"),
        ("rollout.top_p=0", "rollout.top_p: expected a number in (0, 1]"),
        ("loss.epsilon=1.1", "loss.epsilon: expected a number in [0, 1]"),
        ("loss.delta=1.2", "loss.delta: expected None or a finite number > 1 + epsilon_high = 1.2"),
        ("loss.loss_type=cispo", 'loss.epsilon_high: with loss_type="cispo" it is the cap'),
        ("loss.entropy_coef=-1", "loss.entropy_coef: expected a finite number >= 0"),
        ("log.log_completions=4", "log.log_completions: expected true or false, got 4"),
        ("log.num_completions_to_print=0", "log.num_completions_to_print: expected a number >= 1"),
        ("reward.weights=[1]", "reward.weights: expected 0 numbers"),
        ("optim.warmup_steps=100", "optim.warmup_steps: expected less than the run's 100"),
        ("data.task_args={a: 1}", "data.task_args: {'a': 1} means nothing without data.task"),
        ("data.overlong_prompt=drop", "means nothing without a limit. Set data.max_prompt_length"),
        ("eval.num_generations_eval=4", "eval.num_generations_eval: 4 means nothing above 1 with greedy"),
        ("save.save_total_limit=2", "save.save_total_limit: 2 means nothing with save.save_steps=0"),
        ("log.report_to=[wandb]", "log.report_to: expected a list of: one of tensorboard"),
        ("loss.beta", "expected section.field=value"),
        ("loss.beta=[1", "not valid YAML"),
    ],
)
def test_what_cannot_be_is_refused_by_name(override, said):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared below, without regular expressions
        load_config(None, [override])
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.beta=0", "loss.use_bias_correction_kl=true"],
        ["loss.beta=0", "model.reference_dtype=float32"],
        ["loss.scale_rewards=none", "loss.advantage_std=sample"],
        ["data.task=addition", "data.path=x.jsonl"],
        ["data.task=addition", "data.eval_path=x.jsonl"],
    ],
)
def test_options_that_another_makes_meaningless_are_refused(overrides):
    with pytest.raises(ValueError, match="means nothing"):
        load_config(None, overrides)


def test_the_losses_own_checks_are_the_configurations():
    with pytest.raises(ValueError, match=r'^loss.delta: loss_type="cispo" has none, expected None, got 7.0$'):
        load_config(None, ["loss.loss_type=cispo", "loss.epsilon_high=5", "loss.delta=7"])
    for option in dataclasses.fields(PolicyOptions):
        assert hasattr(LossConfig(), option.name) or option.name == "max_completion_length"  # section rollout's


def test_a_key_given_twice_is_refused(recipe):
    with pytest.raises(ValueError, match="'beta' is given twice"):
        load_config(recipe("loss:\n  beta: 1\n  beta: 2\n"))


def test_recipes_must_be_mappings_that_exist(recipe, tmp_path):
    with pytest.raises(ValueError, match="expected a mapping of sections"):
        load_config(recipe("- 1\n"))
    with pytest.raises(FileNotFoundError, match=r"no recipe at .*none\.yaml"):
        load_config(tmp_path / "none.yaml")
    assert load_config(recipe("")) == GRPOConfig()


def test_a_configuration_survives_its_own_dict():
    args = load_config(None, ["loss.beta=0", "reward.funcs=[exact_match]", "data.task=addition"])
    assert build_config(args.to_dict()) == args


def test_configurations_are_frozen_and_take_keywords_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GRPOConfig().seed = 1
    with pytest.raises(TypeError):
        LossConfig("grpo")


def test_overrides_leave_the_given_dict_alone():
    values = {"loss": {"beta": 0.5}}
    assert build_config(values, ["loss.beta=0.25"]).loss.beta == 0.25
    assert values == {"loss": {"beta": 0.5}}
