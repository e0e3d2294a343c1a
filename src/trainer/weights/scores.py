"""The scores of eval_tasks, which belong to each evaluation of a run."""

from __future__ import annotations

import time
from typing import TypeAlias

import jax
from jax.experimental import multihost_utils

from trainer.config.errors import ConfigError
from trainer.config.schema import Config
from trainer.models.decoder import Params
from trainer.run.plugins import Plugin, Scores, UnlessStopped
from trainer.run.run_data import RunData
from trainer.weights import hf_config, sources
from trainer.weights.model import Model
from trainer.weights.tasks import Tasks

Work: TypeAlias = Scores | Exception


class Scorer(Plugin):
  """Scores the model of a run on its eval_tasks, if it has any. Every process scores the whole model on a device of its
  own: so the next primary has the scores if the primary is lost."""

  def __init__(self, config: Config, data: RunData) -> None:
    """Raises ConfigError if the tasks are not there, or the run cannot score them."""
    super().__init__(config, data)
    self._tokenizer = data.train.tokenizer
    self._tasks: Tasks | None = None
    names = config.observe.eval_tasks
    if not names:
      return
    lacks = "evaluation data" if not data.evaluations else "a tokenizer" if self._tokenizer is None else ""
    if lacks:
      raise ConfigError(f"eval_tasks={names}: the run has no {lacks}.\nGive it, or set eval_tasks=''.")
    try:
      self._tasks = Tasks.find(names)
    except ConfigError as error:
      raise ConfigError(f"eval_tasks={names}: {error}") from error

  def evaluates(self, params: Params, step: int, unless_stopped: UnlessStopped) -> Scores | None:
    """The scores of the parameters after `step`, on one of their devices; None: no tasks, or a warning says why not.
    All processes that hold parts of `params` must call."""
    if (tasks := self._tasks) is None or (tokenizer := self._tokenizer) is None:
      return None
    start, folder = time.monotonic(), f"{self.config.run_directory}/{sources.TOKENIZER}"
    device = min(jax.tree.leaves(params)[0].sharding.addressable_devices, key=lambda device: device.id)
    gather = lambda leaf: leaf if leaf.is_fully_addressable else multihost_utils.process_allgather(leaf, tiled=True)
    put = lambda leaf, to: jax.device_put(leaf, to.sharding).astype(to.dtype)

    def work() -> Work:
      try:
        load = lambda abstract: jax.tree.map(put, whole, abstract)
        cfg, longest = self.config.model, hf_config.longest(self.config.model, self.config.data)
        return tasks.score(Model.on_one_device(cfg, load, tokenizer, folder, device, longest))
      except Exception as error:  # noqa: BLE001 -- no failure of a task, which runs code of its own, may end the run
        return error

    try:
      whole = jax.tree.map(gather, params)  # before `work`, which can fail in one process only
      scores = unless_stopped(work, f"the scores at step {step}")
    except jax.errors.JaxRuntimeError as error:  # after the loss of a slice, the next step raises it too
      scores = error
    if isinstance(scores, Exception):
      runtime = isinstance(scores, jax.errors.JaxRuntimeError)
      why = "; one device must hold the whole model" if runtime else f": {type(scores).__name__}"
      self.run.log.warning(f"no scores of eval_tasks at step {step}{why}: {scores}")
      return None
    for task, values in scores.items():
      numbers = ", ".join(f"{metric} {value:.4f}" for metric, value in values.items())
      self.run.log.line(f"scores of {task} at step {step}: {numbers}")
    self.run.log.line(f"Scored {len(scores)} tasks in {time.monotonic() - start:.2f} s.")
    return scores
