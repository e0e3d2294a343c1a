"""What a supervisor takes from the configuration, and a run that is not elastic."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from trainer.config import load
from trainer.membership.coordinator import Coordinator, Send
from trainer.membership.rules import RunRules

KEYS = ["configs/base.yml", "cluster=multiprocess", "num_slices=3", "dataset_type=synthetic"]


@pytest.mark.parametrize(
  ("keys", "minimum", "shares"),
  [
    (["elastic_enabled=true"], 3, 3),
    (["elastic_enabled=true", "elastic_min_slice_count=1"], 1, 3),
    (["elastic_enabled=false"], 3, 3),
    (["elastic_enabled=true", "gradient_accumulation_steps=4"], 3, 3),
    (["elastic_enabled=true", "gradient_accumulation_steps=4", "elastic_numerics=balanced"], 3, 12),
  ],
)
def test_rules_of_a_configuration(keys, minimum, shares):
  rules = RunRules.of(load([*KEYS, *keys]))
  assert (rules.slices, rules.minimum, rules.shares) == (3, minimum, shares)
  assert RunRules(**json.loads(json.dumps(dataclasses.asdict(rules)))) == rules


def training(rules: RunRules, members: int) -> Coordinator:
  """A run that trains."""
  run = rules.coordinator("id", members)
  for member in range(members):
    (welcome,) = run.hello(member, 0, 1, "")
    assert isinstance(welcome, Send) and welcome.message["run_id"] == "id"
  assert run.phase == "gathering"
  for member in range(members):
    assert run.phase == "gathering"
    run.ready(member, 0, 0)
  run.restored(0, 0, run.epoch, 0)
  assert run.phase == "running"
  return run


def test_a_start_waits_for_the_expected_members_only():
  """As with a group of torchrun that has fewer nodes than slices: they compute all shares."""
  run = training(RunRules(3, 1, 3, 300.0, 0.0, True), members=2)
  assert run.active == {0, 1} and sorted(itertools.chain(*run._dealt.values())) == [0, 1, 2]


def test_the_loss_of_a_member_ends_a_run_that_is_not_elastic():
  run = training(RunRules(2, 2, 2, 300.0, 0.0, False), members=2)
  effects = run.lost(1, "killed by SIGKILL")
  assert run.code == 1
  ends = [effect.message for effect in effects if isinstance(effect, Send)]
  assert [(end["kind"], end["reason"]) for end in ends] == [
    ("end", "Member 1 is lost (killed by SIGKILL), and elastic_enabled=false.")
  ]


def test_sigterm_to_one_member_is_a_request_to_all_in_a_run_that_is_not_elastic():
  run = training(RunRules(2, 2, 2, 300.0, 0.0, False), members=2)
  assert run.leave(1) == [] and run.stopping
  run.done(0, 0, run.epoch, "step 1")
  commits = [effect.message for effect in run.done(1, 0, run.epoch, "step 1") if isinstance(effect, Send)]
  assert [(commit["stop"], commit["leave"]) for commit in commits] == [(True, []), (True, [])]
