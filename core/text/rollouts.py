"""Rollouts of language models: a prompt is a reset, and every generated token a step."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from ..errors import SchemaError, UsageError
from ..transforms.keyed import require_count
from .kl import ConstantKLController, KLControllerBase
from .prompts import PromptData
from .sequences import Sequences, end_places, left_padded, right_padded
from .transformers_extra import require_transformers


class RolloutFromModel:
    """Generates text with a language model, and makes steps with rewards of it.

    - `model`: a causal language model of transformers, or one with its `generate` and `forward`.
    - `ref_model`: the model that it is held to, with the same tokens.
    - `reward_model`: called with `input_ids` and `attention_mask`; returns a pair whose second part are the scores of
      the texts, `[B]`.
    - `kl_coef`: the weight of the KL divergence in rewards.
    - `max_new_tokens`: the number of steps, T.
    - `score_clip`: the largest difference of two scores that counts; None for no limit.
    - `kl_scheduler`: a controller, whose coefficient is taken in place of `kl_coef`; `step_scheduler` updates it with
      the mean rewards for the divergence of the last `num_steps` rollouts, all since the last update by default.
    - `eos_token_id`, `pad_token_id`: by default those of the model's configuration; several tokens may end a text.

    Text ends with its first EOS token, which is the last step, terminated; one that has none after T tokens is
    truncated. The models run without dropout and without gradients. UsageError (a ValueError) for arguments that make
    no sense, and for prompts that leave less than T places in the model.

    The reward is that of Ouyang et al., "Training language models to follow instructions" (2022): at the last step of a
    text, how much higher it is scored than the text of the batch, and at each step -`kl_coef` × (log-probability of the
    token - that of the reference). Names and form are those of TorchRL.
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
        require_count("max_new_tokens", max_new_tokens, "tokens")
        if num_steps is not None:
            require_count("num_steps", num_steps, "rollouts")
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
        """Generate text after the prompts of a batch of B, and return its steps, batch size `[B, T]`.

        - `input_ids` int64 and `attention_mask` bool `[B, T, L + T]`: the prompt and the tokens before the step, and
          under `next` those after it. Both are views of one tensor: copy before you write to them.
        - `action` int64 `[B, T]`: the token; `sample_log_prob` `[B, T, 1]`: its log-probability in `model`.
        - `mask` bool `[B, T]`: whether the text had not ended before the step. Steps after it are padding: `done` and
          `terminated` are set, so that no return crosses them, and rewards and log-probabilities are 0.
        - `next`: `reward` = `reward_raw` + `reward_kl`, `done`, `terminated`, `truncated`, all `[B, T, 1]`.
        """
        generated, log_probs, log_ratio = self.generate(batch)
        return self.create_rollout_td(batch, generated, log_probs, log_ratio)

    @torch.no_grad()
    def generate(
        self, batch: PromptData, generation_config: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return prompts with generated text, int64 `[B, L + T]`, log-probabilities, and those over the reference's.

        The text is padded on the right. Of each of its T tokens there are the log-probability, `[B, T, 1]`, and how
        much higher it is than that of the reference, `[B, T]`; 0 behind the end. `generation_config` is one of
        transformers; by default tokens are sampled from the model's distribution, whatever temperature, `top_p` or
        other settings the model came with.
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
            text = right_padded(prompts, made, self.max_new_tokens, self.eos_token_ids, self.pad_token_id)
            places = text.new_places - 1  # the logits at a place are those of the token after it
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
        """Return the steps of generated text, as `rollout_from_data` does; the other arguments are from `generate`."""
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
        """Update the coefficient with the rewards for the divergence since, and return it.

        UsageError (a ValueError) without a controller, or without a rollout since the last update.
        """
        if self.kl_scheduler is None:
            raise UsageError("there is no kl_scheduler, so kl_coef stays as it is")
        self.kl_coef = self.kl_scheduler.update(list(self._kl_values))
        self._kl_values.clear()
        return self.kl_coef

    @staticmethod
    def logprobs_of_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of tokens, `[B, T]`, by logits `[B, T, vocabulary]`."""
        chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return chosen - logits.logsumexp(-1)

    def _log_probs(self, model: Any, text: Sequences, places: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=text.ids, attention_mask=text.real.long()).logits
        rows = torch.arange(len(places), device=places.device).unsqueeze(1)
        return self.logprobs_of_labels(logits[rows, places].float(), actions)

    def _scores(self, batch: PromptData, generated: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """How much higher the generated texts are scored than those of the batch, `[B]`."""
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
                f"the longest prompt has {prompts.width:,} tokens, and with {self.max_new_tokens:,} new ones that is "
                f"more than the {room:,} places of the model",
                hint="take shorter prompts, or a smaller max_new_tokens",
            )


def _end_scores(output: Any, count: int) -> torch.Tensor:
    scores = output[1] if isinstance(output, tuple | list) and len(output) > 1 else None
    if not isinstance(scores, torch.Tensor) or scores.numel() != count:
        shape = f"scores of {list(scores.shape)}" if isinstance(scores, torch.Tensor) else f"a {type(output).__name__}"
        raise SchemaError(f"the reward model returned {shape}, expected a pair with {count} scores second")
    return scores.reshape(count)


def _configured(model: Any, name: str) -> Any:
    """An entry of the model's configuration, of that for generation first; None where it has none."""
    configs = (getattr(model, "generation_config", None), getattr(model, "config", None))
    found = (getattr(config, name, None) for config in configs)
    return next((value for value in found if value is not None), None)


def _numbers(ends: Any) -> tuple[int, ...]:
    if ends is None:
        return ()
    return tuple(int(end) for end in ends) if isinstance(ends, list | tuple) else (int(ends),)


@contextlib.contextmanager
def _without_settings(model: Any) -> Iterator[None]:
    """Generate without the settings that a model came with, which fill in what a generation's own leave open."""
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
    """Run modules without dropout, then return each to its mode."""
    training = [model for model in models if isinstance(model, torch.nn.Module) and model.training]
    try:
        for model in training:
            model.eval()
        yield
    finally:
        for model in training:
            model.train()
