"""Rollouts of language models, and the controllers of their KL coefficient."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from text_files import EOS, PAD, tiny_model

from rbtool.core.errors import SchemaError, UsageError
from rbtool.core.text.rollouts import (
    AdaptiveKLController,
    ConstantKLController,
    KLControllerBase,
    PromptData,
    RolloutFromModel,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig


STEPS, WIDTH = 6, 12
PROMPTS = [[40, 50, 60, 70], [41], [42, 43, 44, 45, 46, 47, 48]]
LABELS = [[80, 81], [90, 91, 92], [95]]


def generation(**options: Any) -> GenerationConfig:
    """Options of a generation of STEPS tokens; a call imports transformers, which takes two seconds."""
    from transformers import GenerationConfig

    return GenerationConfig(max_new_tokens=STEPS, pad_token_id=PAD, **options)


class Scores(torch.nn.Module):
    """A reward model that counts the sum of tokens."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = input_ids.float() * attention_mask / 100
        return values, values.sum(1)


def batch_of(left: bool = False, pad: int = PAD) -> PromptData:
    rows, masks, ends = [], [], []
    for prompt, label in zip(PROMPTS, LABELS, strict=True):
        more = WIDTH - len(prompt) - len(label)
        padding, text = [pad] * more, prompt + label
        rows.append(padding + text if left else text + padding)
        masks.append([0] * more * left + [1] * len(text) + [0] * more * (not left))
        ends.append(len(prompt) - 1 + more * left)
    return PromptData(
        input_ids=torch.tensor(rows), attention_mask=torch.tensor(masks), prompt_rindex=torch.tensor(ends),
        batch_size=[len(rows)],
    )  # fmt: skip


class Scripted(torch.nn.Module):
    """A model that generates given tokens, and otherwise is `tiny_model`."""

    def __init__(self, tokens: list[list[int]], **options: Any) -> None:
        super().__init__()
        self.inner = tiny_model(**options)
        self.config = self.inner.config
        self.tokens = torch.tensor(tokens)

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.cat((input_ids, self.tokens), 1)

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


ENDS = [[100, 101, EOS, PAD, PAD, PAD], [EOS, PAD, PAD, PAD, PAD, PAD], [102, 103, 104, 105, 106, 107]]
COUNTS = [3, 1, 6]


def rollout(model: Any = None, **options: Any) -> tuple[RolloutFromModel, TensorDict]:
    made = RolloutFromModel(model or Scripted(ENDS), tiny_model(1), Scores(), max_new_tokens=STEPS, **options)
    return made, made.rollout_from_data(batch_of())


def log_probs(model: Any, text: list[int], count: int) -> torch.Tensor:
    """The log-probabilities of the last tokens of one text, without any padding."""
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([text])).logits[0].log_softmax(-1)
    return logits[range(len(text) - count - 1, len(text) - 1), text[-count:]]


@pytest.mark.parametrize("left", [False, True])
def test_greedy_text_is_that_of_each_prompt_alone(left: bool) -> None:
    model = tiny_model()
    made = RolloutFromModel(model, tiny_model(1), Scores(), max_new_tokens=STEPS)
    greedy = generation(do_sample=False, eos_token_id=EOS)
    found, _, _ = made.generate(batch_of(left), greedy)
    assert found.shape == (3, WIDTH + STEPS)
    for row, prompt in zip(found.tolist(), PROMPTS, strict=True):
        alone = model.eval().generate(torch.tensor([prompt]), generation_config=greedy)[0].tolist()
        assert row[: len(alone)] == alone
        assert set(row[len(alone) :]) <= {PAD}


@pytest.mark.parametrize("left", [False, True])
def test_log_probabilities_are_those_of_each_text_alone(left: bool) -> None:
    model, reference = Scripted(ENDS), tiny_model(1)
    made = RolloutFromModel(model, reference, Scores(), max_new_tokens=STEPS)
    _, found, ratio = made.generate(batch_of(left))
    for at, (prompt, new, count) in enumerate(zip(PROMPTS, ENDS, COUNTS, strict=True)):
        own, other = (log_probs(one, prompt + new[:count], count) for one in (model, reference))
        torch.testing.assert_close(found[at, :count, 0], own, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ratio[at, :count], own - other, rtol=1e-4, atol=1e-4)
        assert not found[at, count:].any()
        assert not ratio[at, count:].any()


def test_each_step_has_the_text_before_and_after_it() -> None:
    _, found = rollout()
    assert found.batch_size == (3, STEPS)
    for at, (prompt, new, count) in enumerate(zip(PROMPTS, ENDS, COUNTS, strict=True)):
        for step in range(STEPS):
            for part, more in ((found[at, step], 0), (found[at, step]["next"], 1)):
                text = prompt + new[: min(step + more, count)]
                assert part["input_ids"].tolist() == text + [PAD] * (WIDTH + STEPS - len(text))
                assert part["attention_mask"].sum() == len(text)
                assert part["attention_mask"][: len(text)].all()
        assert found[at, :count]["action"].tolist() == new[:count]


def test_text_ends_once_and_padding_is_marked() -> None:
    _, found = rollout()
    assert found["mask"].sum(1).tolist() == COUNTS
    following = found["next"].squeeze(-1)
    ends = following["done"] & found["mask"].unsqueeze(-1)
    assert ends.squeeze(-1).nonzero().tolist() == [[at, count - 1] for at, count in enumerate(COUNTS)]
    last = [following[at, count - 1] for at, count in enumerate(COUNTS)]
    assert [bool(step["terminated"]) for step in last] == [True, True, False]
    assert [bool(step["truncated"]) for step in last] == [False, False, True]
    padding = found[~found["mask"]]["next"]
    assert padding["done"].all()
    assert padding["terminated"].all()
    assert not padding["truncated"].any()
    assert not padding["reward"].any()


def test_rewards_are_the_score_at_the_end_and_the_divergence_at_each_step() -> None:
    made, found = rollout(kl_coef=0.25, score_clip=None)
    _, _, ratio = made.generate(batch_of())
    following = found["next"]
    torch.testing.assert_close(following["reward_kl"].squeeze(-1), -0.25 * ratio)
    torch.testing.assert_close(following["reward"], following["reward_raw"] + following["reward_kl"])
    for at, (prompt, label, new, count) in enumerate(zip(PROMPTS, LABELS, ENDS, COUNTS, strict=True)):
        expected = [0.0] * STEPS
        expected[count - 1] = (sum(new[:count]) - sum(label)) / 100
        assert prompt
        assert following["reward_raw"][at, :, 0].tolist() == pytest.approx(expected, abs=1e-4)


def test_scores_are_clipped() -> None:
    _, found = rollout(score_clip=0.5)
    assert found["next", "reward_raw"].abs().max() == 0.5


@pytest.mark.parametrize("ends", [EOS, [EOS, 103]])
def test_any_of_several_tokens_ends_a_text(ends: Any) -> None:
    _, found = rollout(eos_token_id=ends)
    assert found["mask"].sum(1).tolist() == [3, 1, 6 if ends == EOS else 2]


def test_a_pad_token_that_is_the_end_token_hides_no_end() -> None:
    script = [[token if token != PAD else EOS for token in row] for row in ENDS]
    made = RolloutFromModel(Scripted(script), tiny_model(1), Scores(), max_new_tokens=STEPS, pad_token_id=EOS)
    found = made.rollout_from_data(batch_of(pad=EOS))
    assert found["mask"].sum(1).tolist() == COUNTS
    assert found["next", "attention_mask"][0, -1].sum() == len(PROMPTS[0]) + 3


def test_generation_that_stops_early_is_padded() -> None:
    short = [[100, EOS], [EOS, PAD], [103, EOS]]
    made = RolloutFromModel(Scripted(short), tiny_model(1), Scores(), max_new_tokens=STEPS)
    assert made.rollout_from_data(batch_of())["mask"].sum(1).tolist() == [2, 1, 2]


@pytest.mark.parametrize("pad", [PAD, EOS])
def test_generation_that_stops_before_a_text_ends_is_refused(pad: int) -> None:
    short = [[100, EOS], [EOS, pad], [103, 104]]
    made = RolloutFromModel(Scripted(short), tiny_model(1), Scores(), max_new_tokens=STEPS, pad_token_id=pad)
    with pytest.raises(UsageError, match="stops after 2 tokens without an end token"):
        made.rollout_from_data(batch_of(pad=pad))


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1e-4}, {"top_p": 1e-6}, {"min_p": 0.99}, {"suppress_tokens": [*range(1, 200)]}, {"num_beams": 2},
    {"repetition_penalty": 1e3}, {"num_return_sequences": 2}, {"min_new_tokens": 3}, {"max_length": 3},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
def test_samples_are_of_the_distribution_whatever_settings_a_model_came_with(settings: dict[str, Any]) -> None:
    found = []
    for own in ({}, settings):
        model = tiny_model()
        for name, value in own.items():
            setattr(model.generation_config, name, value)
        torch.manual_seed(5)
        found.append(RolloutFromModel(model, tiny_model(1), Scores(), max_new_tokens=STEPS).generate(batch_of()))
        assert all(getattr(model.generation_config, name) == value for name, value in own.items())
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_samples_follow_the_seed_and_models_return_to_their_mode() -> None:
    model = tiny_model().train()
    made = RolloutFromModel(model, model, Scores(), max_new_tokens=STEPS)
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append(made.rollout_from_data(batch_of()))
    assert model.training
    assert torch.equal(found[0]["action"], found[1]["action"])
    assert not torch.equal(found[0]["action"], found[2]["action"])
    assert not found[0]["next", "reward_kl"].any()  # without dropout a model does not differ from itself
    assert not any(value.requires_grad for value in found[0].values(True, True))


def test_the_controller_sees_the_mean_rewards_for_the_divergence() -> None:
    controller = AdaptiveKLController(init_kl_coef=0.2, target=1e9, horizon=100)
    made, found = rollout(kl_scheduler=controller, num_steps=2)
    for _ in range(2):
        made.rollout_from_data(batch_of())
    steps = found["next", "reward_kl"].squeeze(-1)[found["mask"]]
    assert made.kl_coef == 0.2
    assert made.step_scheduler() == made.kl_coef == controller.coef == pytest.approx(0.2 * (1 - 0.2 * 2 / 100))
    assert steps.mean() != 0
    with pytest.raises(UsageError, match="kl_values is empty"):
        made.step_scheduler()


def test_a_constant_controller_and_none() -> None:
    made, _ = rollout(kl_scheduler=ConstantKLController(kl_coef=0.7))
    assert made.step_scheduler() == made.kl_coef == 0.7
    with pytest.raises(UsageError, match="no kl_scheduler was given"):
        rollout()[0].step_scheduler()


def test_log_probabilities_of_labels() -> None:
    logits, labels = torch.randn(2, 3, 7), torch.randint(7, (2, 3))
    expected = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(RolloutFromModel.logprobs_of_labels(logits, labels), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"), ({"num_steps": 0}, "num_steps is 0"),
        ({"score_clip": -1.0}, "score_clip is -1.0"), ({"kl_coef": float("nan")}, "kl_coef is nan"),
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RolloutFromModel(tiny_model(), tiny_model(), Scores(), **options)


def test_a_model_without_end_and_pad_tokens_needs_a_pad_token() -> None:
    model = tiny_model(eos_token_id=None, pad_token_id=None, bos_token_id=None)
    with pytest.raises(UsageError, match="neither a pad token nor an EOS token"):
        RolloutFromModel(model, model, Scores())
    made = RolloutFromModel(model, model, Scores(), max_new_tokens=2, pad_token_id=PAD)
    assert made.rollout_from_data(batch_of())["next", "truncated"][:, -1].all()


def test_models_and_settings_that_make_other_texts_are_refused() -> None:
    with pytest.raises(UsageError, match="expected a causal model"):
        RolloutFromModel(tiny_model(is_encoder_decoder=True), tiny_model(), Scores())
    several = generation(do_sample=True, num_return_sequences=2)
    made = RolloutFromModel(tiny_model(), tiny_model(1), Scores(), max_new_tokens=STEPS)
    with pytest.raises(UsageError, match="6 texts were generated for 3 prompts"):
        made.generate(batch_of(), several)


def empty_prompt(batch: PromptData) -> None:
    batch.prompt_rindex[1] = -1


@pytest.mark.parametrize(
    ("places", "change", "message"),
    [(12, lambda batch: None, "the longest prompt has 7 tokens"), (64, empty_prompt, "the prompt at 1 is empty")],
)
def test_prompts_that_do_not_fit_are_refused(places: int, change: Callable[[PromptData], None], message: str) -> None:
    model, batch = tiny_model(places=places), batch_of()
    change(batch)
    with pytest.raises(UsageError, match=message):
        RolloutFromModel(model, model, Scores(), max_new_tokens=STEPS).rollout_from_data(batch)


@pytest.mark.parametrize("returned", [3, (1, 2), (None, torch.zeros(2))])
def test_a_reward_model_that_returns_no_scores_is_refused(returned: Any) -> None:
    made = RolloutFromModel(Scripted(ENDS), tiny_model(), lambda **inputs: returned, max_new_tokens=STEPS)
    with pytest.raises(SchemaError, match="expected a pair with 3 scores second"):
        made.rollout_from_data(batch_of())


NAN, INFINITE = float("nan"), float("inf")


def test_a_constant_coefficient_stays() -> None:
    model = SimpleNamespace(kl_coef=0.3)
    assert ConstantKLController(kl_coef=0.2).update([1.0]) == 0.2
    assert ConstantKLController(model=model).update() == 0.3
    assert ConstantKLController(model=model, kl_coef=0.5).update([1.0]) == model.kl_coef == 0.5


@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=9), st.floats(0.01, 2), st.floats(0.1, 20), st.integers(20, 99)
)
def test_the_adaptive_coefficient_follows_the_formula(
    values: list[float], first: float, target: float, horizon: int
) -> None:
    controller = AdaptiveKLController(init_kl_coef=first, target=target, horizon=horizon)
    error = min(max(-sum(values) / len(values) / first / target - 1, -0.2), 0.2)
    expected = first * (1 + error * len(values) / horizon)
    assert controller.update(torch.tensor(values, dtype=torch.float64)) == pytest.approx(expected, rel=1e-9)
    assert controller.coef == pytest.approx(expected, rel=1e-9)


def test_the_coefficient_goes_towards_the_target_and_to_the_model() -> None:
    model = SimpleNamespace(kl_coef=None)
    controller = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10, model=model)
    assert model.kl_coef == 0.1
    assert controller.update([-0.1 * 60]) == model.kl_coef == pytest.approx(0.102)
    assert controller.update([0.0]) == model.kl_coef == pytest.approx(0.102 * 0.98)


def test_a_model_without_a_coefficient_is_an_attribute_error() -> None:
    for controller in (
        lambda: ConstantKLController(model=torch.nn.Linear(1, 1)),
        lambda: AdaptiveKLController(init_kl_coef=0.1, target=1.0, horizon=9, model=object()),
    ):
        with pytest.raises(AttributeError, match="has no attribute kl_coef"):
            controller()


@pytest.mark.parametrize(
    "arguments",
    [
        {"init_kl_coef": 0}, {"init_kl_coef": NAN}, {"init_kl_coef": "much"}, {"init_kl_coef": None},
        {"target": -1.0}, {"target": INFINITE}, {"horizon": 0}, {"horizon": True},
    ],
)  # fmt: skip
def test_controllers_refuse_arguments_that_make_no_sense(arguments: dict[str, Any]) -> None:
    ((name, _),) = arguments.items()
    with pytest.raises(UsageError, match=f"{name} is .* expected a number above 0"):
        AdaptiveKLController(**{"init_kl_coef": 0.1, "target": 6.0, "horizon": 10, **arguments})


@pytest.mark.parametrize("coef", [-0.1, NAN, INFINITE, "much", True])
def test_a_constant_that_is_no_coefficient_is_refused(coef: Any) -> None:
    with pytest.raises(UsageError, match="expected a number from 0"):
        ConstantKLController(kl_coef=coef)


def test_neither_coefficient_nor_model_is_refused() -> None:
    with pytest.raises(UsageError, match="kl_coef and model are None"):
        ConstantKLController()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "kl_values is None"), ([], "kl_values is empty"), ([0.1, NAN], "kl_values contains nan"),
        (["much"], "is not a number"), (0.5, "is a float"), ([0.0] * 50, "kl_values has 50 values"),
    ],
)  # fmt: skip
def test_values_that_make_no_sense_change_nothing(values: Any, message: str) -> None:
    controller = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10)
    with pytest.raises(UsageError, match=message):
        controller.update(values)
    assert controller.coef == 0.1


def test_a_controller_of_ones_own() -> None:
    class Halving(KLControllerBase):
        coef = 0.4

        def update(self, kl_values: Any) -> float:
            return self._set(self.coef / 2)

    policy = SimpleNamespace(kl_coef=0.4)
    assert (Halving().update([]), Halving(policy).update([]), policy.kl_coef) == (0.2, 0.2, 0.2)
    assert isinstance(AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10), KLControllerBase)
    with pytest.raises(TypeError):
        KLControllerBase()  # type: ignore[abstract]
