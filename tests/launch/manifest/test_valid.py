"""Varied jobs: Kubernetes' own schemas and JobSet's models accept them, and they mean what they must."""

from __future__ import annotations

import functools
import re
import shlex

import kubernetes_validate
import pytest
import yaml
from tests.launch.manifest.cases import COMMON, ELASTIC, VALID, one_line, render

from trainer.config import ConfigError, load
from trainer.launch.manifest import hardware

KUBERNETES = "1.34"
# The options of xpk 1.16 and of gcluster that these commands use.
FLAGS = {
  "xpk": "workload cluster project zone tpu-type num-slices docker-image elastic-slices max-slice-restarts command "
  "pathways-gcs-location server-image proxy-server-image max-restarts termination-grace-period-seconds "
  "ramdisk-directory mtc-enabled",
  "gcluster": "image name cluster project location compute-type topology num-slices restarts pathways command mount "
  "pathways-gcs-location pathways-elastic-slices pathways-max-slice-restarts pathways-server-image "
  "pathways-worker-image pathways-proxy-server-image restart-on-exit-codes grace-period gke-mtc-enabled "
  "gke-mtc-ramdisk-dir service-account queue",
}


@functools.cache
def rendered(case: str) -> str:
  return render(case.split())


def documents(case: str) -> list[dict]:
  return list(yaml.safe_load_all(rendered(case)))


def job_specs(node: dict) -> list[dict]:
  """The Job specs in a JobSet."""
  return [job["template"]["spec"] for job in node["spec"]["replicatedJobs"]]


def pod_templates(node: dict) -> list[dict]:
  if node["kind"] == "JobSet":
    return [spec["template"] for spec in job_specs(node)]
  return [node["spec"]["controller"]["template"]]


def assert_schemas_accept(node: dict) -> None:
  """Kubernetes' schemas without unknown fields, and the JobSet's model, which drops unknown fields."""
  about = {"metadata": {"name": "x"}}
  if node["kind"] == "JobSet":
    from kubeflow_trainer_api import models  # here: every worker of pytest imports this file, for a second

    assert models.JobsetV1alpha2JobSet.from_dict(node).to_dict() == node
    for spec in job_specs(node):
      job = {"apiVersion": "batch/v1", "kind": "Job", "spec": spec} | about
      kubernetes_validate.validate(job, KUBERNETES, strict=True)
  for template in pod_templates(node):
    pod = {"apiVersion": "v1", "kind": "PodTemplate", "template": template} | about
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def program(node: dict) -> tuple[dict, dict]:
  """(pod spec, container) of the program."""
  spec = pod_templates(node)[0]["spec"]
  return spec, spec["containers"][0]


def assert_meaning(node: dict) -> None:
  """What no schema can check."""
  spec, container = program(node)
  command = container["command"][2]
  assert command.startswith("exec python -m trainer configs/base.yml ") and not re.search(r"[|;&]", command)
  config = load(shlex.split(command)[4:], check_paths=False)
  mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", ())}
  volumes = {volume["name"] for volume in spec.get("volumes", ())}
  assert set(mounts.values()) == volumes
  assert config.run.jax_cache_dir.startswith(("~", "gs://")) or "/cache" in mounts
  if config.checkpoint.enable_emergency_checkpoint:
    assert config.checkpoint.local_checkpoint_directory in mounts
  assert spec["terminationGracePeriodSeconds"] >= config.checkpoint.autocheckpoint_grace_seconds
  if node["kind"] == "JobSet":
    assert_jobset_meaning(node, config.elastic.elastic_enabled, config.cluster.enable_single_controller)


def assert_jobset_meaning(node: dict, elastic: bool, pathways: bool) -> None:
  first = job_specs(node)[0]
  (rule,) = first["podFailurePolicy"]["rules"]
  stops = rule["onExitCodes"]["values"]
  assert {1, 2, 130} <= set(stops) and not {0, 42, 134, 137, 143} & set(stops)
  assert rule["onExitCodes"]["containerName"] == first["template"]["spec"]["containers"][0]["name"]
  if pathways:
    proxy = pod_templates(node)[0]["spec"]["initContainers"][0]
    assert any(word.startswith("--num_elastic_slices=") for word in proxy["args"]) == elastic
    longest = f"{node['metadata']['name']}-pathways-head-0-0.{node['metadata']['name']}"
    assert len(longest) <= 63  # a label


def assert_command_is_known(case: str) -> None:
  """The command of xpk or gcluster has options that the tool has, and the program is called in one exec."""
  target = case.split()[0]
  words = shlex.split(one_line(rendered(case)))
  flags = {word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")}
  assert flags and flags <= set(FLAGS[target].split())
  command = next(word for word in words if word.startswith("--command="))
  assert re.match(r"--command=exec (env (\S+ )+)?python -m trainer\s", command)
  # A TPU host that finds no TPU must fail, not train on its CPU. xpk gives the head of Pathways its environment.
  assert "JAX_PLATFORMS=" in command or words[:3] == ["xpk", "workload", "create-pathways"]


@pytest.mark.parametrize("case", VALID)
def test_a_valid_job(case):
  if case.split()[0] in FLAGS:
    assert_command_is_known(case)
    return
  *before, node = documents(case)
  assert [other["kind"] for other in before] in ([], ["CheckpointConfiguration"])
  assert_schemas_accept(node)
  assert_meaning(node)


# ---- numbers


def test_the_grace_period_covers_a_save():
  """Llama 3.1 8B: 12 bytes for each of 8.03e9 parameters, at 0.5 GB/s through one controller."""
  case = next(case for case in VALID if "llama3.1-8b" in case)
  spec, container = program(documents(case)[0])
  seconds = 8_030_261_248 * 12 / 0.5e9
  assert spec["terminationGracePeriodSeconds"] == pytest.approx(5 + 1.25 * seconds + 2, abs=1)
  assert f"autocheckpoint_grace_seconds={spec['terminationGracePeriodSeconds']}" in container["command"][2]
  for keys, more in (
    ("services=wandb --image-extras wandb", 10),
    ("services=gcs_metrics", 10),
    ("services=wandb,goodput --image-extras wandb,goodput", 20),
  ):
    with_service, _ = program(documents(f"{case} {keys}")[0])
    assert with_service["terminationGracePeriodSeconds"] == spec["terminationGracePeriodSeconds"] + more


def test_the_ramdisk_follows_the_guides_rule():
  """Parameters x 12 bytes / hosts x 2 x 1.15; behind Pathways the controller has the copies of all slices."""
  rule = 596_049_920 * 12 * 2 * 1.15 / 2**20
  configuration = next(node for case in VALID if case.split()[0] == "jobset" for node in documents(case)[:-1])
  assert int(configuration["spec"]["inMemoryVolumeSize"].removesuffix("Mi")) == pytest.approx(rule / 4, abs=1)
  assert configuration["spec"]["cloudStorageBucketName"] == "my-bucket"
  head = program(documents(next(case for case in VALID if "elastic_min_slice_count=1" in case))[0])[0]
  (size,) = [volume["emptyDir"]["sizeLimit"] for volume in head["volumes"] if "emptyDir" in volume]
  assert int(size.removesuffix("Mi")) == pytest.approx(rule * 3, abs=1)


# What xpk 1.16 has for each name: topology, machine type, hosts of a slice, accelerator.
XPK_SLICES = """
v5litepod-8 2x4 ct5lp-hightpu-4t 2 tpu-v5-lite-podslice
v5litepod-16 4x4 ct5lp-hightpu-4t 4 tpu-v5-lite-podslice
v6e-4 2x2 ct6e-standard-4t 1 tpu-v6e-slice
v6e-8 2x4 ct6e-standard-4t 2 tpu-v6e-slice
v6e-16 4x4 ct6e-standard-4t 4 tpu-v6e-slice
v5p-8 2x2x1 ct5p-hightpu-4t 1 tpu-v5p-slice
v5p-128 4x4x4 ct5p-hightpu-4t 16 tpu-v5p-slice
v4-8 2x2x1 ct4p-hightpu-4t 1 tpu-v4-podslice
v4-64 2x4x4 ct4p-hightpu-4t 8 tpu-v4-podslice
tpu7x-8 2x2x1 tpu7x-standard-4t 1 tpu7x
tpu7x-128 4x4x4 tpu7x-standard-4t 16 tpu7x
"""


@pytest.mark.parametrize("row", XPK_SLICES.split("\n")[1:-1])
def test_slices_are_those_of_xpk(row):
  name, topology, machine_type, hosts, accelerator = row.split()
  found = hardware.resolve(name)
  assert (found.topology, found.machine_type, found.accelerator) == (topology, machine_type, accelerator)
  assert found.hosts == int(hosts)


def test_the_remedy_for_too_few_restarts_of_a_slice_is_the_least_that_works():
  case = f"jobset {COMMON} {ELASTIC} --elastic-slices 1 --max-slice-restarts"
  with pytest.raises(ConfigError, match=r"Give --max-slice-restarts 9 or more, or elastic_max_retries=9\.$"):
    render(f"{case} 8".split())
  assert render(f"{case} 9".split())
