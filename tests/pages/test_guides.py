"""Guides that tell a reader what to type and what to look for: each line, key and option of them exists."""

from __future__ import annotations

import pathlib

import kubernetes_validate
import yaml
from tests.pages.test_code_blocks import blocks, literals, split
from tests.support import needs

from trainer.config.load import load

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"


@needs.workshop
def test_kubernetes_and_the_launchers_accept_the_objects_for_gpu_clusters():
  objects = [yaml.safe_load(text) for language, text in blocks(DOCS / "run_on_gpu_kubernetes.md") if language == "yaml"]
  assert [node["kind"] for node in objects] == ["Service", "Job", "Job"]
  for node in objects:
    kubernetes_validate.validate(node, "1.34", strict=True)
  for node, module in zip(objects[1:], ("trainer.launch.local", "trainer.launch.agent"), strict=True):
    arguments = node["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[:2] == ["-m", module]
    config, options = split(tuple(arguments[2:]))
    assert set(options) <= literals(module)
    if config:
      load(config, check_paths=False)
    pod = node["spec"]["template"]["spec"]
    assert (pod["securityContext"], pod["restartPolicy"]) == ({"fsGroup": 1000}, "Never")
    rules = node["spec"]["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule}
    assert 2 in codes["FailJob"] and not {0, 42, 134, 137, 143} & {code for values in codes.values() for code in values}
    assert {"FailJob", "FailIndex"} >= codes.keys() and any(1 in values for values in codes.values())
    # Evictions do not count. The rules are tried in order, so that an evicted pod with code 2 still fails the Job.
    assert rules[-1] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
