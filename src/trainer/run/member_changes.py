"""Records what happens to the members of a run with several worlds, in the words of the elastic loop."""

from __future__ import annotations

from trainer.elastic.attempt import ElasticRun
from trainer.elastic.events import Event, Kind
from worlds.peers import Change


def record(elastic: ElasticRun, change: Change, step: int) -> None:
  """Writes log lines and events, and begins recoveries, for `change` after `step` completed steps.

  The attempt continues through all changes.
  """
  before = change.before
  elastic.session.events.epoch = change.epoch
  for member, (reason, seconds_ago) in change.lost.items():
    began = elastic.clock() - seconds_ago
    event = Event(Kind.SLICE_DOWN, reason, frozenset({member}))
    elastic.lose(event, change.members, began, before=before, step=step)
    elastic.retries.failed()
    elastic.session.log.line(f"Elastic attempt {elastic.retries.attempt} out of {elastic.cfg.elastic_max_retries}")
  if change.joined:
    elastic.grow(list(change.joined), change.members, before=before, step=step)
  if change.holds:
    elastic.session.log.line(
      f"{len(change.members)} of {elastic.session.cluster.num_slices} slices are alive and elastic_min_slice_count="
      f"{elastic.cfg.elastic_min_slice_count}: waiting for the others, with the state of step {step} in memory."
    )
  elastic.recovery.restored(step, "memory", 0.0)
