"""Scores of a model on tasks of lm-evaluation-harness (extra lm_eval)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TypeAlias

from trainer.config.errors import ConfigError, how_to_install
from trainer.weights.model import Model

Scores: TypeAlias = dict[str, dict[str, float]]  # {task: {metric: value}}


@dataclass(frozen=True)
class Tasks:
  """Tasks that exist. manager: lm_eval's TaskManager, which reads them."""

  names: tuple[str, ...]
  manager: Any

  @classmethod
  def find(cls, names: str, folder: str = "") -> Tasks:
    """The tasks `names`, separated by commas: those of the YAMLs in `folder` or, for DIR/NAME, in DIR, or of lm_eval.
    Raises ConfigError."""
    try:
      from lm_eval.tasks import TaskManager
    except ImportError as error:
      raise ConfigError(f"tasks need lm-evaluation-harness ({error}). {how_to_install('lm_eval')}.") from error
    places, _, wanted = zip(*(name.strip().rpartition("/") for name in names.split(",")), strict=True)
    folders = [os.path.expanduser(place) for place in dict.fromkeys((folder, *places)) if place]
    if missing := next((place for place in folders if not os.path.isdir(place)), ""):
      raise ConfigError(f"{missing}: is no folder. Give the folder with the YAMLs of the tasks.")
    # To look through the tasks of lm_eval takes 16 CPU seconds.
    for with_defaults in (False, True) if folders else (True,):
      manager = TaskManager(include_path=folders or None, include_defaults=with_defaults)
      if not (unknown := [name for name in wanted if name not in manager.all_tasks]):
        return cls(wanted, manager)
    where = ", ".join([*folders, "lm_eval"])
    raise ConfigError(f"there is no task {', '.join(unknown)} in {where}. Give the folder of its YAML, DIR/NAME.")

  def score(self, model: Model) -> Scores:
    """The numbers of each task, and of each group of tasks."""
    from lm_eval import simple_evaluate

    from trainer.weights.harness import Harness

    found = simple_evaluate(
      Harness(model, longest=model.longest),
      tasks=list(self.names),
      task_manager=self.manager,
      log_samples=False,
      bootstrap_iters=0,  # the processes that it would fork could deadlock, because JAX has threads
    )
    return {
      task: {metric.removesuffix(",none"): x for metric, x in values.items() if isinstance(x, float)}
      for task, values in found["results"].items()
    }
