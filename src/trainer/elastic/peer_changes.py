"""Records what happens to the members of a run with several worlds, in the words of the elastic loop."""

from __future__ import annotations

from trainer.cluster.peers import Change
from trainer.elastic.attempt import ElasticRun
from trainer.elastic.events import Event, Kind


class PeerChanges:
  """Log lines, events and recoveries for lost and returned members. The attempt continues through all of them."""

  def __init__(self, elastic: ElasticRun) -> None:
    self._elastic = elastic

  def record(self, change: Change, step: int) -> None:
    """`change` has happened after `step` completed steps."""
    elastic, before = self._elastic, change.before
    elastic.events.epoch = change.epoch
    for member, (reason, seconds_ago) in change.lost.items():
      began = elastic.clock() - seconds_ago
      event = Event(Kind.SLICE_DOWN, reason, frozenset({member}))
      elastic.lose(event, change.members, began, before=before, step=step)
      elastic.retries.failed()
      elastic.log.line(f"Elastic attempt {elastic.retries.attempt} out of {elastic.cfg.elastic_max_retries}")
    if change.joined:
      elastic.grow(list(change.joined), change.members, before=before, step=step)
    if change.holds:
      elastic.log.line(
        f"{len(change.members)} of {elastic.cluster.num_slices} slices are alive and elastic_min_slice_count="
        f"{elastic.cfg.elastic_min_slice_count}: waiting for the others, with the state of step {step} in memory."
      )
    elastic.recovery.restored(step, "memory", 0.0)
