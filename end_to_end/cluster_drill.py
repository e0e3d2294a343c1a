"""Deletes a worker of a run on a real cluster and checks the recovery in the log, as the elastic guides do.

    .venv/bin/python -m end_to_end.cluster_drill RUN_NAME --manifest RUN.yml --fail-after 130
    .venv/bin/python -m end_to_end.cluster_drill RUN_NAME --cordon --fail-after 20   # the run exists already
    .venv/bin/python -m end_to_end.cluster_drill --verify LOG                        # only check a log

Steps, each with a time limit: apply the manifest, find the head pod, follow its log to {RUN_NAME}.log, wait for step
--fail-after (behind the first checkpoint), delete a worker without a grace period, wait for the recovery, let the run
go on for --steps steps, clean up, verify. With --cordon, the node of the worker is cordoned, so that training goes on
with one slice less, and uncordoned after --steps steps; then all slices must return. Needs kubectl with access to the
cluster, and a run with log_period=1. Exits with 0 if everything was seen, with 1 otherwise, and cleans up.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

_STEP = re.compile(r"completed step: (\d+), .*?loss: ([^,]+), .*?slices: (\d+)")
_DOWN = "Slice down event detected. Retrying."
_POLL_SECONDS = 1.0


class DrillError(Exception):
  """A step of the drill failed, or took too long."""


def verify(log: str, *, returns: bool, most_lost: int = 1) -> list[str]:
  """What is wrong in the log of a run that has lost a slice; [] if the recovery is as promised.

  returns: whether all slices must be back at the end. most_lost: completed steps that may be done again per loss.
  """
  steps = [(int(step), float(loss), int(slices)) for step, loss, slices in _STEP.findall(log)]
  problems = []
  if not steps:
    return ["the log has no completed step"]
  before, _, after = log.partition(_DOWN)
  if not after:
    return [f"the log has no line '{_DOWN}'"]
  if not _STEP.search(before) or not _STEP.search(after):
    problems.append("no step was completed before the loss, or none after it")
  if not re.search(r"Elastic attempt \d+ out of \d+$", after, re.MULTILINE):
    problems.append("the log has no line 'Elastic attempt 2 out of 10' after the loss")
  for (step, _, _), (following, _, _) in itertools.pairwise(steps):
    if following > step + 1:
      problems.append(f"steps {step + 1} to {following - 1} are missing")
    elif step + 1 - following > most_lost:
      problems.append(
        f"{step + 1 - following} steps were done again after step {step}; at most {most_lost} may be lost"
      )
  problems += [f"the loss of step {step} is {loss}" for step, loss, _ in steps if not math.isfinite(loss)]
  problems += _changed_losses(steps)
  if returns and steps[-1][2] != steps[0][2]:
    problems.append(f"the run began on {steps[0][2]} slices and is on {steps[-1][2]}")
  return problems


def _changed_losses(steps: Sequence[tuple[int, float, int]]) -> Iterator[str]:
  """Steps that were done twice with different losses: they have trained on other examples."""
  first: dict[int, float] = {}
  for step, loss, _ in steps:
    known = first.setdefault(step, loss)
    if not math.isclose(known, loss, rel_tol=1e-3, abs_tol=2e-3):  # the log has three digits
      yield f"step {step} had the loss {known}, and {loss} when it was done again"


def kubectl(*arguments: str, timeout: float = 120.0) -> str:
  """What `kubectl *arguments` prints. DrillError if it fails."""
  try:
    done = subprocess.run(["kubectl", *arguments], capture_output=True, text=True, timeout=timeout)
  except FileNotFoundError:
    raise DrillError("kubectl is not installed. Install it, and give it access to the cluster") from None
  except subprocess.TimeoutExpired:
    raise DrillError(f"kubectl {' '.join(arguments)} has not ended in {timeout:g} s") from None
  if done.returncode:
    raise DrillError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
  return done.stdout


def running_pods(run_name: str, role: str) -> list[tuple[str, str]]:
  """(pod, node) of the running pods of a run whose names contain `role`, "head" or "worker"."""
  items = json.loads(kubectl("get", "pods", "--field-selector=status.phase=Running", "--output=json"))["items"]
  found = [(item["metadata"]["name"], item["spec"].get("nodeName", "")) for item in items]
  return sorted(pair for pair in found if run_name in pair[0] and role in pair[0])


def wait(what: str, seconds: float, look: Callable[[], object]) -> None:
  """Returns as soon as look() is true; DrillError after `seconds`."""
  print(f"waiting for {what} (at most {seconds:g} s)", flush=True)
  end = time.monotonic() + seconds
  while not look():
    if time.monotonic() > end:
      raise DrillError(f"{what}: not seen in {seconds:g} s")
    time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def followed(pod: str, container: str, path: pathlib.Path) -> Iterator[None]:
  """Copies the log of a pod to a file while the block runs."""
  command = ["kubectl", "logs", "--follow", "--container", container, pod]
  with path.open("wb") as file:
    process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
      yield
    finally:
      process.terminate()
      process.wait()


def drill(options: argparse.Namespace) -> list[str]:
  """Does all steps and returns what `verify` finds."""
  path = pathlib.Path(f"{options.run_name}.log")
  with contextlib.ExitStack() as cleanup:
    if options.manifest:
      kubectl("apply", "--filename", options.manifest)
      cleanup.callback(kubectl, "delete", "--filename", options.manifest, "--wait=false")
    wait("a running head pod", options.limit, lambda: running_pods(options.run_name, "head"))
    head = running_pods(options.run_name, "head")[0][0]
    cleanup.enter_context(followed(head, options.container, path))

    def seen() -> list[tuple[int, int]]:
      return [(int(step), int(slices)) for step, _, slices in _STEP.findall(path.read_text(errors="replace"))]

    wait(f"step {options.fail_after}", options.limit, lambda: any(step >= options.fail_after for step, _ in seen()))
    full = seen()[-1][1]
    workers = running_pods(options.run_name, "worker")
    if not workers:
      raise DrillError(f"no running pod has '{options.run_name}' and 'worker' in its name")
    pod, node = workers[0]
    with contextlib.ExitStack() as cordoned:
      if options.cordon:
        kubectl("cordon", node)
        cordoned.callback(kubectl, "uncordon", node)
      kubectl("delete", "pod", pod, "--grace-period=0", "--force")
      print(f"deleted {pod} on {node}", flush=True)
      wait("the loss in the log", options.limit, lambda: _DOWN in path.read_text(errors="replace"))

      def recovered() -> bool:
        return len(_STEP.findall(path.read_text(errors="replace").partition(_DOWN)[2])) >= options.steps

      wait(f"{options.steps} steps after it", options.limit, recovered)
      if options.cordon and seen()[-1][1] != full - 1:
        raise DrillError(f"with the node cordoned, the run is on {seen()[-1][1]} slices instead of {full - 1}")
    if options.cordon:
      wait(f"all {full} slices", options.limit, lambda: seen()[-1][1] == full)
    return verify(path.read_text(errors="replace"), returns=options.cordon, most_lost=options.most_lost)


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog="python -m end_to_end.cluster_drill", description=__doc__.split("\n\n")[0])
  parser.add_argument("run_name", nargs="?", help="part of the names of the run's pods")
  parser.add_argument("--manifest", help="YAML to apply first, and to delete at the end; else the run goes on already")
  parser.add_argument("--container", default="trainer", help="container of the head pod (default trainer)")
  parser.add_argument("--fail-after", type=int, default=130, help="step after which a worker is deleted (default 130)")
  parser.add_argument("--steps", type=int, default=20, help="steps to wait for after the loss (default 20)")
  parser.add_argument("--cordon", action="store_true", help="cordon the worker's node for these steps")
  parser.add_argument("--limit", type=float, default=1800.0, help="seconds for each wait (default 1800)")
  parser.add_argument(
    "--most-lost",
    type=int,
    default=1,
    help="steps that may be done again; snapshot_period=-1: checkpoint_period",
  )
  parser.add_argument("--verify", metavar="LOG", help="only check this log")
  options = parser.parse_args(argv)
  if not options.verify and not options.run_name:
    parser.error("give the name of a run, or --verify LOG")
  try:
    if options.verify:
      text = pathlib.Path(options.verify).read_text(errors="replace")
      problems = verify(text, returns=options.cordon, most_lost=options.most_lost)
    else:
      problems = drill(options)
  except (DrillError, OSError) as error:
    problems = [str(error)]
  for problem in problems:
    print(f"error: {problem}", file=sys.stderr)
  if not problems:
    print("The run lost a slice and recovered as promised.")
  return 1 if problems else 0


if __name__ == "__main__":
  sys.exit(main())
