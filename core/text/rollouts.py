"""Rollouts of language models for RLHF: a prompt is a reset, and every generated token is a step.

Prompts are a tensorclass of tokens. KL controllers adapt the weight of the KL term, which keeps the policy close to its
reference model.
"""

from __future__ import annotations

import contextlib
import math
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from tensordict import TensorClass, TensorDict

from ..errors import SchemaError, UsageError, keywords_of, require_number, suggests_keywords
from .loader import TokenizedDatasetLoader, get_dataloader
from .tokenizers import LabelledPromptTokenizer, require_transformers

DEFAULT_DATASET = "CarperAI/openai_summarize_tldr"
_GPT2_EOS = 50256


class PromptData(TensorClass):
    """Tokens of prompts and of the text that follows them, batch size `[n]`. It has the fields of TorchRL's class.

    - `input_ids`, `attention_mask`: int64 `[n, L]`; the mask is 0 at padding.
    - `prompt_rindex`: index of the prompt's last token, int64 `[n]`.
    - `labels`: what a model learns to predict, int64 `[n, L]`; -100 at padding.
    - `logits`, `loss`: for the outputs of a model; None at first.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    prompt_rindex: torch.Tensor
    labels: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    loss: torch.Tensor | None = None

    def mask_label(self, pad_token_id: int = _GPT2_EOS) -> Self:
        """Return the prompts without the text that follows: all tokens after `prompt_rindex` become padding."""
        places = torch.arange(self.input_ids.shape[-1], device=self.input_ids.device)
        kept = (places <= self.prompt_rindex.unsqueeze(-1)) & self.attention_mask.bool()
        made: Self = type(self)(
            input_ids=torch.where(kept, self.input_ids, pad_token_id),
            attention_mask=kept.to(self.attention_mask.dtype),
            prompt_rindex=self.prompt_rindex,
            batch_size=self.batch_size,
        )
        return made

    @classmethod
    @suggests_keywords(*keywords_of(TokenizedDatasetLoader))
    def from_dataset(
        cls,
        split: str,
        dataset_name: str | os.PathLike[str] | None = None,
        max_length: int = 550,
        root_dir: str | os.PathLike[str] | None = None,
        from_disk: bool = False,
        num_workers: int | None = None,
        **options: Any,
    ) -> Self:
        """Tokenize a split with the columns `prompt` and `label`, or open its token cache.

        Texts longer than `max_length` tokens are left out. The tensors are mapped copy-on-write from the cache. For the
        arguments and `options`, such as `tokenizer`, see `TokenizedDatasetLoader`.
        """
        loader = TokenizedDatasetLoader(
            split, max_length, dataset_name or DEFAULT_DATASET, LabelledPromptTokenizer, root_dir=root_dir,
            from_disk=from_disk, num_workers=num_workers, **options,
        )  # fmt: skip
        found = loader.load()
        made: Self = cls.from_tensordict(found)
        return made


@suggests_keywords(*keywords_of(get_dataloader), *keywords_of(PromptData.from_dataset))
def get_prompt_dataloader_tldr(batch_size: int, block_size: int, device: torch.device | str, **options: Any) -> Any:
    """Return batches of prompts of the TL;DR dataset: `get_dataloader` with `PromptData`. `options` are passed on."""
    return get_dataloader(batch_size, block_size, PromptData, device, **options)


class RolloutFromModel:
    """Generates text with a language model and returns it as episodes with rewards, for RLHF.

    An episode is one generated text, a step one token. It ends terminated at its first EOS token; a text without one
    after `max_new_tokens` tokens ends truncated. Models run without dropout and without gradients. The arguments match
    TorchRL's class; the rewards are as in Ouyang et al., "Training language models to follow instructions" (2022):

        reward_kl  at each step       -kl_coef × (log p_model(token) - log p_ref(token))
        reward_raw at the last step   score of the generated text - score of the text in the batch, clipped
        reward                        reward_raw + reward_kl

    UsageError (a ValueError) for invalid arguments, and for a prompt that leaves less than T positions in the model's
    context.

    Args:
        model: a causal language model of transformers, or one with the same `generate` and `forward`.
        ref_model: the frozen reference model, with the same vocabulary.
        reward_model: called with `input_ids` and `attention_mask`; returns a pair whose second item is the score of
            each text, `[B]`.
        kl_coef: the weight of the KL term.
        max_new_tokens: the number of steps, T.
        score_clip: score differences are clipped to ± this value; None for no limit.
        kl_scheduler: a controller that replaces `kl_coef`; `step_scheduler` updates it.
        num_steps: how many of the last rollouts `step_scheduler` uses; by default all since the last update.
        eos_token_id, pad_token_id: by default from the model's configuration. There may be several EOS tokens.
    """

    def __init__(
        self,
        model: Any,
        ref_model: Any,
        reward_model: Any,
        kl_coef: float = 0.1,
        max_new_tokens: int = 50,
        score_clip: float | None = 10.0,
        kl_scheduler: KLControllerBase | None = None,
        num_steps: int | None = None,
        *,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
    ) -> None:
        require_number("max_new_tokens", max_new_tokens, 1, "tokens")
        if num_steps is not None:
            require_number("num_steps", num_steps, 1, "rollouts")
        if _configured(model, "is_encoder_decoder"):
            raise UsageError(f"the {type(model).__name__} is an encoder with a decoder, expected a causal model")
        if score_clip is not None and not score_clip > 0:
            raise UsageError(f"score_clip is {score_clip!r}, expected a number above 0 or None")
        self.model = model
        self.ref_model = ref_model
        self.reward_model = reward_model
        self.max_new_tokens = max_new_tokens
        self.score_clip = score_clip
        self.kl_scheduler = kl_scheduler
        self.kl_coef = ConstantKLController(kl_coef=kl_coef).coef if kl_scheduler is None else kl_scheduler.coef
        self.num_steps = num_steps
        ends = _configured(model, "eos_token_id") if eos_token_id is None else eos_token_id
        self.eos_token_ids: tuple[int, ...] = _numbers(ends)
        pad = _configured(model, "pad_token_id") if pad_token_id is None else pad_token_id
        if pad is None and not self.eos_token_ids:
            raise UsageError(
                "the model's configuration has neither a pad token nor an EOS token", hint="name one: pad_token_id=N"
            )
        self.pad_token_id = self.eos_token_ids[0] if pad is None else int(pad)
        self._kl_values: deque[float] = deque(maxlen=num_steps)

    def rollout_from_data(self, batch: PromptData) -> TensorDict:
        """Generate text after B prompts and return its steps, batch size `[B, T]`.

        - `input_ids` int64 and `attention_mask` bool `[B, T, L + T]`: the prompt and the tokens before the step; under
          `next` also the token of the step. Root and `next` are views of one tensor: copy them before writing to them.
        - `action` int64 `[B, T]`: the token of the step.
        - `sample_log_prob` `[B, T, 1]`: its log-probability in `model`.
        - `mask` bool `[B, T]`: False for the padding steps after the end of a text. There, `done` and `terminated` are
          set, so that no return crosses them, and rewards and log-probabilities are 0.
        - `next`: `reward`, `reward_raw`, `reward_kl`, `done`, `terminated` and `truncated`, all `[B, T, 1]`.
        """
        generated, log_probs, log_ratio = self.generate(batch)
        return self.create_rollout_td(batch, generated, log_probs, log_ratio)

    @torch.no_grad()
    def generate(
        self, batch: PromptData, generation_config: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Generate text after the prompts, and score each new token with both models.

        Returns, in this order:

        - prompts with the generated text, padded on the right, int64 `[B, L + T]`;
        - the log-probability of each generated token in `model`, `[B, T, 1]`, 0 after the end of a text;
        - log p_model - log p_ref of each generated token, `[B, T]`, 0 after the end of a text.

        Args:
            batch: B prompts of up to L tokens; the text after them is ignored.
            generation_config: a `GenerationConfig` of transformers. By default tokens are sampled from the model's own
                distribution, whatever temperature, `top_p` or other settings the model came with.
        """
        prompts = left_padded(batch, self.pad_token_id)
        self._require_room(prompts)
        with _evaluated(self.model, self.ref_model):
            inputs = {"input_ids": prompts.ids, "attention_mask": prompts.real.long()}
            if generation_config is None:
                with _without_settings(self.model):
                    made = self.model.generate(**inputs, generation_config=self._generation_config())
            else:
                made = self.model.generate(**inputs, generation_config=generation_config)
            made = getattr(made, "sequences", made)[:, prompts.width :]
            if len(made) != len(prompts.ids):
                raise UsageError(f"{len(made)} texts were generated for {len(prompts.ids)} prompts, expected one each")
            if made.shape[1] < self.max_new_tokens and not bool(end_places(made, self.eos_token_ids)[1].all()):
                raise UsageError(
                    f"a text stops after {made.shape[1]} tokens without an end token, expected {self.max_new_tokens} "
                    "tokens or an end token",
                    hint=f"set max_new_tokens={made.shape[1]}, or let the generation_config stop at end tokens only",
                )
            text = right_padded(prompts, made, self.max_new_tokens, self.eos_token_ids, self.pad_token_id)
            places = text.new_places - 1  # logits at a place predict the token after it
            actions = text.ids.gather(1, text.new_places)
            own, other = (self._log_probs(model, text, places, actions) for model in (self.model, self.ref_model))
        log_probs = own.masked_fill(~text.new, 0)
        log_ratio = (own - other).masked_fill(~text.new, 0)
        width = batch.input_ids.shape[1] + self.max_new_tokens
        more = width - text.ids.shape[1]
        return torch.nn.functional.pad(text.ids, (0, more), value=self.pad_token_id), log_probs.unsqueeze(-1), log_ratio

    @torch.no_grad()
    def create_rollout_td(
        self, batch: PromptData, generated: torch.Tensor, log_probs: torch.Tensor, log_ratio: torch.Tensor
    ) -> TensorDict:
        """Return the steps of the text that `generate` returned for a batch, in the form of `rollout_from_data`."""
        steps = self.max_new_tokens
        lengths = left_padded(batch, self.pad_token_id).lengths
        index = torch.arange(steps, device=generated.device)
        actions = generated.gather(1, lengths.unsqueeze(1) + index)
        count, ended = end_places(actions, self.eos_token_ids)
        mask = index < count.unsqueeze(1)
        last = index == (count - 1).unsqueeze(1)
        terminated = (last & ended.unsqueeze(1)) | ~mask
        places = torch.arange(generated.shape[1], device=generated.device)
        stops = lengths.unsqueeze(1) + torch.minimum(
            torch.arange(steps + 1, device=generated.device), count.unsqueeze(1)
        )
        real = places < stops.unsqueeze(-1)  # [B, T + 1, L + T]
        ids = torch.where(real, generated.unsqueeze(1), self.pad_token_id)
        raw = torch.where(last, self._scores(batch, generated, real[:, -1]).unsqueeze(1), 0.0)
        reward_kl = -self.kl_coef * log_ratio
        self._kl_values.append(float(reward_kl.sum() / mask.sum()))
        flags = {"done": last | ~mask, "terminated": terminated, "truncated": last & ~ended.unsqueeze(1)}
        rewards = {"reward": raw + reward_kl, "reward_raw": raw, "reward_kl": reward_kl}
        following = {name: value.unsqueeze(-1) for name, value in (flags | rewards).items()}
        return TensorDict(
            {
                "action": actions.masked_fill(~mask, self.pad_token_id),
                "input_ids": ids[:, :-1],
                "attention_mask": real[:, :-1],
                "sample_log_prob": log_probs,
                "mask": mask,
                "next": {"input_ids": ids[:, 1:], "attention_mask": real[:, 1:], **following},
            },
            batch_size=mask.shape,
        )

    def step_scheduler(self) -> float:
        """Update `kl_coef` from the KL rewards of the rollouts since the last update (at most `num_steps`); return it.

        UsageError (a ValueError) if there is no `kl_scheduler`, or no rollout since the last update.
        """
        if self.kl_scheduler is None:
            raise UsageError("no kl_scheduler was given, so kl_coef is constant")
        self.kl_coef = self.kl_scheduler.update(list(self._kl_values))
        self._kl_values.clear()
        return self.kl_coef

    @staticmethod
    def logprobs_of_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities, `[B, T]`, of the tokens `labels`, from logits `[B, T, vocabulary]`."""
        chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return chosen - logits.logsumexp(-1)

    def _log_probs(self, model: Any, text: Sequences, places: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=text.ids, attention_mask=text.real.long()).logits
        rows = torch.arange(len(places), device=places.device).unsqueeze(1)
        return self.logprobs_of_labels(logits[rows, places].float(), actions)

    def _scores(self, batch: PromptData, generated: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Return the score of each generated text minus the score of the batch's own text, clipped, `[B]`."""
        with _evaluated(self.reward_model):
            found, reference = (
                _end_scores(self.reward_model(input_ids=ids, attention_mask=mask.long()), len(ids))
                for ids, mask in ((generated, real), (batch.input_ids, batch.attention_mask))
            )
        difference = found - reference
        return difference if self.score_clip is None else difference.clamp(-self.score_clip, self.score_clip)

    def _generation_config(self) -> Any:
        transformers = require_transformers("generation")
        return transformers.GenerationConfig(
            do_sample=True, max_new_tokens=self.max_new_tokens, pad_token_id=self.pad_token_id, top_k=0,
            eos_token_id=list(self.eos_token_ids) or None,
        )  # fmt: skip

    def _require_room(self, prompts: Sequences) -> None:
        room = _configured(self.model, "max_position_embeddings")
        if room is not None and prompts.width + self.max_new_tokens > room:
            raise UsageError(
                f"the longest prompt has {prompts.width:,} tokens, and {self.max_new_tokens:,} new ones exceed the "
                f"model's {room:,} positions",
                hint="use shorter prompts, or a smaller max_new_tokens",
            )


def _end_scores(output: Any, count: int) -> torch.Tensor:
    scores = output[1] if isinstance(output, tuple | list) and len(output) > 1 else None
    if not isinstance(scores, torch.Tensor) or scores.numel() != count:
        shape = f"scores of {list(scores.shape)}" if isinstance(scores, torch.Tensor) else f"a {type(output).__name__}"
        raise SchemaError(f"the reward model returned {shape}, expected a pair with {count} scores second")
    return scores.reshape(count)


def _configured(model: Any, name: str) -> Any:
    """Return an entry of the model's generation configuration, else of its configuration, else None."""
    configs = (getattr(model, "generation_config", None), getattr(model, "config", None))
    found = (getattr(config, name, None) for config in configs)
    return next((value for value in found if value is not None), None)


def _numbers(ends: Any) -> tuple[int, ...]:
    if ends is None:
        return ()
    return tuple(int(end) for end in ends) if isinstance(ends, list | tuple) else (int(ends),)


@contextlib.contextmanager
def _without_settings(model: Any) -> Iterator[None]:
    """Hide the model's own generation settings, which `generate` would use for options that its config leaves open."""
    settings = getattr(model, "generation_config", None)
    if settings is None:
        yield
        return
    model.generation_config = type(settings)()
    try:
        yield
    finally:
        model.generation_config = settings


@contextlib.contextmanager
def _evaluated(*models: Any) -> Iterator[None]:
    """Switch modules to evaluation mode (no dropout), and restore their mode afterwards."""
    training = [model for model in models if isinstance(model, torch.nn.Module) and model.training]
    try:
        for model in training:
            model.eval()
        yield
    finally:
        for model in training:
            model.train()


@dataclass(frozen=True, slots=True)
class Sequences:
    """Rows of tokens `ids`, int64 `[B, W]`; `real`, bool `[B, W]`, is False at padding.

    Models generate from rows padded on the left; results are padded on the right:

        left_padded    . . p p p            right_padded    p p p g g E . .
                       p p p p p                            p p p p p g g g

    `new_places`, int64 `[B, T]`, are the indices of the T generated tokens (g, E), and `new`, bool `[B, T]`, is False
    for those after the EOS token E.
    """

    ids: torch.Tensor
    real: torch.Tensor
    new_places: torch.Tensor
    new: torch.Tensor

    @property
    def width(self) -> int:
        """The length of a row, padding included."""
        return self.ids.shape[1]

    @property
    def lengths(self) -> torch.Tensor:
        """The number of tokens in each row, int64 `[B]`."""
        return self.real.sum(1)


def left_padded(batch: PromptData, pad: int) -> Sequences:
    """Return the prompts of a batch, padded on the left; UsageError for an empty prompt."""
    prompts = batch.mask_label(pad)
    real = prompts.attention_mask.bool()
    lengths = real.sum(1)
    if not bool((lengths > 0).all()):
        raise UsageError(f"the prompt at {int((lengths == 0).nonzero()[0])} is empty: it has no tokens")
    order = real.long().argsort(dim=1, stable=True)[:, real.shape[1] - int(lengths.max()) :]
    none = order[:, :0]
    return Sequences(prompts.input_ids.gather(1, order), real.gather(1, order), none, none.bool())


def right_padded(prompts: Sequences, made: torch.Tensor, steps: int, ends: tuple[int, ...], pad: int) -> Sequences:
    """Join prompts with generated tokens, `[B, up to steps]`, drop those after an end token, and pad on the right."""
    made = torch.nn.functional.pad(made, (0, steps - made.shape[1]), value=pad)
    count, _ = end_places(made, ends)
    index = torch.arange(steps, device=made.device)
    new = index < count.unsqueeze(1)
    ids, real = torch.cat((prompts.ids, made), 1), torch.cat((prompts.real, new), 1)
    order = real.long().argsort(dim=1, stable=True, descending=True)
    real = real.gather(1, order)
    ids = ids.gather(1, order).masked_fill(~real, pad)
    return Sequences(ids, real, prompts.lengths.unsqueeze(1) + index, new)


def end_places(made: torch.Tensor, ends: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of tokens up to and including the first end token, int64 `[B]`, and whether there is one, bool.

    A text without an end token has all its tokens.
    """
    stops = torch.isin(made, torch.tensor(ends, dtype=made.dtype, device=made.device))
    ended = stops.any(1)
    return torch.where(ended, stops.long().argmax(1) + 1, made.shape[1]), ended


_LARGEST_ERROR = 0.2


class NoCoefficientError(UsageError, AttributeError):
    """The model of a KL controller has no attribute `kl_coef`."""


class KLControllerBase(ABC):
    """The base class of KL controllers, which adapt the KL coefficient `coef`.

    If a model is given, `model.kl_coef` is set to the coefficient. A subclass implements `update`.

    >>> class Halving(KLControllerBase):
    ...     coef = 0.4
    ...     def update(self, kl_values):
    ...         self.coef /= 2
    ...         return self.coef
    >>> Halving().update([])
    0.2
    """

    coef: float

    def __init__(self, model: Any = None) -> None:
        if model is not None and not hasattr(model, "kl_coef"):
            raise NoCoefficientError(f"the {type(model).__name__} has no attribute kl_coef for the controller to set")
        self.model = model

    @abstractmethod
    def update(self, kl_values: Any) -> float:
        """Update the coefficient from KL rewards, -coefficient × divergence each, and return it."""

    def _set(self, coef: float) -> float:
        self.coef = coef
        if self.model is not None:
            self.model.kl_coef = coef
        return coef


class ConstantKLController(KLControllerBase):
    """A constant coefficient: `kl_coef`, or `model.kl_coef` if None.

    UsageError (a ValueError) if neither is given, or if the coefficient is negative or not a number. For a model
    without `kl_coef`, the error is also an AttributeError.
    """

    def __init__(self, *, kl_coef: float | None = None, model: Any = None) -> None:
        super().__init__(model)
        if kl_coef is None and model is None:
            raise UsageError("kl_coef and model are None, expected one of them")
        self._set(_number("kl_coef", model.kl_coef if kl_coef is None else kl_coef, zero=True))

    def update(self, kl_values: Any = None) -> float:
        """Return the coefficient, which does not depend on `kl_values`."""
        return self._set(self.coef)


class AdaptiveKLController(KLControllerBase):
    """A coefficient that grows while the KL divergence is above `target`, and shrinks while it is below.

    This is the controller of Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019). An update
    with n values computes

        error = clip(divergence / target - 1, -0.2, 0.2)
        coef  = coef × (1 + error × n / horizon)

    UsageError (a ValueError) for arguments that are not numbers above 0, and for updates without values, with values
    that are not finite, or with 5 × `horizon` values or more: the coefficient could become 0 or negative.

    Args:
        init_kl_coef: the first coefficient.
        target: the divergence to reach.
        horizon: how many values it takes to change the coefficient by `error`; larger is slower.
        model: an object whose `kl_coef` follows the coefficient.

    >>> controller = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10)
    >>> round(controller.update([-2.0, -1.0]), 4)
    0.104
    """

    def __init__(self, *, init_kl_coef: float, target: float, horizon: int, model: Any = None) -> None:
        super().__init__(model)
        self.target = _number("target", target)
        self.horizon = _number("horizon", horizon)
        self._set(_number("init_kl_coef", init_kl_coef))

    def update(self, kl_values: Any) -> float:
        """Update the coefficient from `kl_values`, KL rewards of -coefficient × divergence each, and return it."""
        if kl_values is None:
            raise UsageError("kl_values is None, expected the values that the coefficient depends on")
        values = _floats(kl_values)
        if not values:
            raise UsageError("kl_values is empty, expected the values that the coefficient depends on")
        if not all(map(math.isfinite, values)):
            raise UsageError(
                f"kl_values contains {next(one for one in values if not math.isfinite(one))}, expected finite numbers"
            )
        if _LARGEST_ERROR * len(values) >= self.horizon:
            raise UsageError(
                f"kl_values has {len(values):,} values, expected fewer than 5 times the horizon, {self.horizon:g}: "
                "the coefficient could be 0 or below"
            )
        divergence = -math.fsum(values) / len(values) / self.coef
        error = min(max(divergence / self.target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        return self._set(self.coef * (1 + error * len(values) / self.horizon))


def _floats(values: Any) -> list[float]:
    try:
        if isinstance(values, torch.Tensor):
            return [float(value) for value in values.detach().flatten().tolist()]
        if isinstance(values, Iterable):
            return [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise UsageError(f"kl_values contains something that is not a number: {error}") from error
    raise UsageError(f"kl_values is a {type(values).__name__}, expected several numbers")


def _number(name: str, value: Any, *, zero: bool = False) -> float:
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not (found > 0 or (zero and found == 0)) or math.isinf(found):
        raise UsageError(f"{name} is {value!r}, expected a number {'from' if zero else 'above'} 0")
    return found
