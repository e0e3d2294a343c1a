"""A model for lm-evaluation-harness: `lm_eval.simple_evaluate(model=Harness(model), ...)`. Needs lm_eval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from trainer.config.errors import ConfigError, shorten
from trainer.models.decoder import Params
from trainer.models.generation import Sampling
from trainer.weights.model import Model

_LENGTHS = 64  # rows are padded to multiples of this length, so that few programs are compiled
# As in the harness's own models: new tokens of a text, and likeliest tokens of a sample, if the task does not say.
_NEW_TOKENS, _TOP_K = 256, 50
# Options of a text that change nothing with these values. `_sampling` knows the others that are accepted.
_NEUTRAL = {"num_beams": 1, "repetition_penalty": 1, "min_p": 0, "typical_p": 1, "num_return_sequences": 1}


class Harness(TemplateLM):
  """Scores continuations and writes texts, in batches of rows of similar length."""

  def __init__(self, model: Model, rows: int = 16, longest: int = 0) -> None:
    """longest: tokens that the model gets at once; 0: max_position_embeddings."""
    super().__init__()
    self._model, self._rows = model, rows
    self._longest = longest or model.functions.cfg.max_position_embeddings
    self._score = jax.jit(self._scores)

  @property
  def eot_token_id(self) -> int:
    return self._model.tokenizer.eos_id

  @property
  def prefix_token_id(self) -> int:
    begin = self._model.tokenizer.bos_id
    return self.eot_token_id if begin is None else begin

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
    """The ids of the text, as the tokenizer of an export gives them: after the token that begins a document.

    add_special_tokens=False: without this token.
    """
    begin = self._model.tokenizer.bos_id
    ids = list(self._model.tokenizer.encode(string))
    return ids if begin is None or add_special_tokens is False else [begin, *ids]

  def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
    """As `_loglikelihood_tokens`, for (context, continuation). Raises ConfigError for a continuation without tokens,
    whose score would be the best possible, and for one that the model does not get at once."""
    pairs = []
    for request in requests:
      context, continuation = request.args
      if context:
        before, continued = self._encode_pair(context, continuation)
      else:
        before, continued = [], self.tok_encode(continuation, add_special_tokens=False)
      if not 1 <= len(continued) <= self._longest:
        raise ConfigError(
          f"{_document(request)}: the continuation {shorten(continuation)!r} after {context[-20:]!r} has "
          f"{len(continued)} tokens of its own. Only 1 to {self._longest} have a score. Change target_delimiter, "
          "doc_to_target or doc_to_choice of the task, or leave it out."
        )
      pairs.append((request.args, before or [self.prefix_token_id], continued))
    return self._loglikelihood_tokens(pairs)

  def _loglikelihood_tokens(
    self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
  ) -> list[tuple[float, bool]]:
    """(sum of the log-probabilities of the continuation, whether it is the greedy one) of each request."""
    found: dict[int, tuple[float, bool]] = {}
    rows = [(context + continuation)[-self._longest - 1 :] for _, context, continuation in requests]
    for group in self._batches({i: len(row) for i, row in enumerate(rows)}):
      tokens = np.zeros((self._rows, -(-max(len(rows[i]) for i in group) // _LENGTHS) * _LENGTHS + 1), np.int32)
      for line, i in enumerate(group):
        tokens[line, : len(rows[i])] = rows[i]
      scores, greedy = (np.asarray(array) for array in self._score(self._model.params, tokens))
      for line, i in enumerate(group):
        end = len(rows[i]) - 1
        part = slice(end - min(len(requests[i][2]), end), end)
        found[i] = float(scores[line, part].sum(dtype=np.float64)), bool(greedy[line, part].all())
    return [found[i] for i in range(len(requests))]

  def _scores(self, params: Params, tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The log-probability of each next token and whether it is the most likely one, [B, T - 1]."""
    inputs, targets = tokens_BT[:, :-1], tokens_BT[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32), inputs.shape)
    logits = self._model.functions.merge(params).logits(inputs, positions, jnp.ones_like(inputs))
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == targets

  def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
    """The log-probability of each whole text, every token of it once."""
    totals = []
    for request in requests:
      (text,) = request.args
      if text and not self.tok_encode(text, add_special_tokens=False):
        raise ConfigError(f"{_document(request)}: the tokenizer gives no token for {shorten(text)!r}. Leave it out.")
      windows = utils.get_rolling_token_windows(
        self.tok_encode(text), self.prefix_token_id, self._longest, context_len=1
      )
      parts = [(None, *utils.make_disjoint_window(window)) for window in windows]
      totals.append(sum(score for score, _ in self._loglikelihood_tokens(parts)))
    return totals

  def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
    """The continuation of each context, cut before the first of its `until`."""
    found: dict[int, str] = {}
    by_options: dict[str, list[int]] = {}
    for i, request in enumerate(requests):
      by_options.setdefault(repr(request.args[1]), []).append(i)
    for same in by_options.values():
      contexts, options = [requests[i].args[0] for i in same], requests[same[0]].args[1]
      found |= zip(same, self._continue(contexts, options), strict=True)
    return [found[i] for i in range(len(requests))]

  def _continue(self, contexts: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """The continuations of contexts with the same options. Raises ConfigError for options without effect."""
    found = {}
    options = dict(normalize_gen_kwargs(dict(options), _NEW_TOKENS))
    count, until = options.pop("max_gen_toks"), options.pop("until") or []
    sampling = _sampling(options)
    most = self._longest - count
    if most < 1:
      raise ConfigError(
        f"a task asks for {count} new tokens (max_gen_toks), and the model has max_position_embeddings={self._longest}."
        " Set fewer in its YAML, or leave the task out."
      )
    prompts = [(self.tok_encode(context) or [self.prefix_token_id])[-most:] for context in contexts]
    for group in self._batches({i: len(prompt) for i, prompt in enumerate(prompts)}):
      steps = list(self._model.stream([prompts[i] for i in group], count, sampling))
      for row, i in enumerate(group):
        text = self._model.tokenizer.decode(id for step in steps if (id := step[row]) is not None)
        for stop in until:
          text = text.split(stop)[0] if stop else text
        found[i] = text
    return [found[i] for i in range(len(contexts))]

  def _batches(self, lengths: Mapping[int, int]) -> Iterator[list[int]]:
    """The keys in groups of similar length, the longest first: a lack of memory shows at once."""
    order = sorted(lengths, key=lambda i: -lengths[i])
    for begin in range(0, len(order), self._rows):
      yield order[begin : begin + self._rows]


def _document(request: Any) -> str:
  return f"task {request.task_name}, document {request.doc_id}"


def _sampling(options: Mapping[str, Any]) -> Sampling:
  """How a text of these normalized options is sampled. Raises ConfigError for an option that would be without effect.

  The temperature of options with do_sample=False is 0.
  """
  known: dict[str, Any] = {"do_sample": None, "temperature": 0.0, "top_k": _TOP_K, "top_p": 1.0}
  unknown = [f"{name}={value}" for name, value in options.items() if name not in known and _NEUTRAL.get(name) != value]
  if unknown:
    raise ConfigError(
      f"a task asks for {', '.join(unknown)}, which this generation does not have. Leave the task out, or score an "
      "export with the model hf of lm_eval."
    )
  given = {**known, **options}
  return Sampling(float(given["temperature"]), int(given["top_k"]), float(given["top_p"]))
