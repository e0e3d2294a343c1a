"""Repeats the published guides for elastic training and emergency checkpoints with the real command, on a small model.

  python -m end_to_end.guides [--simulated]

Behind a stand-in for Pathways, with the real proxy client, or on simulated slices. The flags are the guides' own,
except for the size of the model, the number of steps and the fault, which is injected instead of a deleted worker.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from end_to_end import cluster_drill
from tests.support import guide_awk
from tests.support.command import without_times

from trainer.observe.events import read_events

SHRUNK = (
  "override_model_config=true base_num_decoder_layers=1 base_emb_dim=16 base_num_query_heads=2 base_num_kv_heads=1 "
  "base_mlp_dim=32 head_dim=8 vocab_size=64 dtype=float32 num_slices=3 devices_per_slice=1 enable_report=false "
  "services="
)
SIMULATED = ("cluster=simulated",)
PATHWAYS = ("cluster=pathways", "cluster_standin=3x1")
KILLED = -9


def trainer(directory: Path, name: str, cluster: tuple[str, ...], *keys: str, code: int = 0) -> str:
  """Runs the command, which must end with `code`, and returns log.txt of the run."""
  places = [f"base_output_directory={directory}", f"run_name={name}", f"jax_cache_dir={directory}/cache"]
  command = [sys.executable, "-m", "trainer", "configs/base.yml", *" ".join(keys).split(), *SHRUNK.split(), *places]
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
  done = subprocess.run([*command, *cluster], capture_output=True, text=True, timeout=800, env=environment)
  assert done.returncode == code, f"exit code {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
  return without_times((directory / name / "log.txt").read_text())


def fixed_mesh(directory: Path, cluster: tuple[str, ...]) -> None:
  """A slice is lost, a replacement comes, and all slices rewind to the last checkpoint."""
  flags = """model_name=qwen3-0.6b dataset_type=synthetic per_device_batch_size=1 max_target_length=32 attention=flash
    remat_policy=full steps=160 enable_checkpointing=true checkpoint_period=100 enable_single_controller=True
    elastic_enabled=true elastic_timeout_seconds=300 elastic_max_retries=10"""
  keys = "elastic_backup_kind=checkpoint fault_injection=slice_down@150:1"
  log = trainer(directory, "elastic-qwen3", cluster, flags, keys)
  checkpoint = re.escape(f"{directory}/elastic-qwen3/checkpoints/100")
  sequence = [
    r"Elastic utils: Elastic training enabled\.",
    r"Elastic Retry Enabled",
    r"completed step: 8, seconds: \d+\.\d{3}, TFLOP/s/device: \d+\.\d{3}, loss: \d+\.\d{3}, .*",
    r"completed step: 9, seconds: .*",
    r"completed step: 148, .*",  # 149 may be lost with the slice: it was dispatched, and perhaps not computed
    r"Slice down event detected\. Retrying\. Lost after step \d+: slice 1 \(.*\)\.",
    rf"Found commit_success file\. Keeping {checkpoint}/\.",
    r"Elastic attempt 2 out of 10",
    rf"Restoring checkpoint from {checkpoint}\.",
    r"completed step: 101, .*",
    r"completed step: 160, .*",
  ]
  found = re.search("^" + "$(?:.|\n)*?^".join(sequence) + "$", log, re.MULTILINE)
  assert found, log
  rewind = found[0].split("Slice down event detected. Retrying.")[1]
  between = [line for line in rewind.split("completed step: 101")[0].splitlines() if line.startswith("completed")]
  assert between == []
  assert cluster_drill.verify(log, returns=True, most_lost=100) == []


def fewer_slices(directory: Path, cluster: tuple[str, ...]) -> None:
  """Three slices, two, and three again. The guide's awk script, unchanged, reads the log."""
  flags = """per_device_batch_size=4 enable_checkpointing=false remat_policy=full global_parameter_scale=8 steps=60
    max_target_length=32 use_iota_embed=true reuse_example_batch=1 dataset_type=synthetic attention=flash
    gcs_metrics=True enable_pathways_goodput=True"""
  faults = "fault_injection=slice_down@20:1,slice_up@30:1"
  keys = "elastic_enabled=true elastic_min_slice_count=2 elastic_min_resize_interval_seconds=0 log_period=100"
  trainer(directory, "pathways-user", cluster, flags, keys, faults)
  lines = guide_awk.slice_count_changes(directory / "pathways-user" / "log.txt")
  assert len(lines) == 2, lines
  assert re.fullmatch(r"Step: \d+, Old Slice Count: 3, New Slice Count: 2", lines[0])
  assert re.fullmatch(r"Step: \d+, Old Slice Count: 2, New Slice Count: 3", lines[1])


def emergency_checkpoints(directory: Path, cluster: tuple[str, ...]) -> None:
  """A lost slice, and then a killed controller, cost the steps since the last local copy, not since the bucket's."""
  name, ram = "user_mtc_runner", directory / "ram"
  flags = f"""dataset_type=synthetic steps=120 per_device_batch_size=6 max_target_length=32
    enable_checkpoint_cloud_logger=True checkpoint_period=100 enable_emergency_checkpoint=True
    local_checkpoint_period=10 local_checkpoint_directory={ram}"""
  keys = "elastic_enabled=true elastic_backup_kind=checkpoint"
  faults = "fault_injection=slice_down@46:1,ckpt_kill@100"
  trainer(directory, name, cluster, flags, keys, faults, code=KILLED)
  log = trainer(directory, name, cluster, flags, keys, faults)
  restored = [e for e in read_events(str(directory / name)) if e["kind"] == "restore" and e["step"]]
  assert [e["tier"] for e in restored] == ["emergency", "emergency"], restored
  assert restored[0]["step"] == 40 and restored[1]["step"] in (90, 100), restored
  assert f"Restoring checkpoint from {ram}" in log and "completed step: 120, " in log


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--simulated", action="store_true", help="on simulated slices instead of the stand-in")
  cluster = SIMULATED if parser.parse_args().simulated else PATHWAYS
  for guide in (fixed_mesh, fewer_slices, emergency_checkpoints):
    with tempfile.TemporaryDirectory(prefix="guides-") as directory:
      start = time.monotonic()
      guide(Path(directory), cluster)
    print(f"{guide.__name__}: as in the guide, {time.monotonic() - start:.0f} s", flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
