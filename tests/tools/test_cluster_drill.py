"""The drill for a real cluster, with a kubectl that plays one; and its verification of our own logs."""

from __future__ import annotations

import os
import sys
import textwrap

import pytest
from end_to_end import cluster_drill

# Plays a cluster with the files of a folder: log.txt, cordoned, calls.txt.
KUBECTL = """
#!{python}
import json, pathlib, sys, time
here = pathlib.Path({folder!r})
words = sys.argv[1:]
with (here / "calls.txt").open("a") as calls:
  calls.write(" ".join(words) + "\\n")
log = here / "log.txt"
def steps(first, last, slices):
  with log.open("a") as file:
    for n in range(first, last + 1):
      file.write(f"completed step: {{n}}, seconds: 0.1, loss: {{5 - n / 100:.3f}}, x: 1, slices: {{slices}}, eta\\n")
if words[0] == "get":
  pods = [("a-run-head-0", "n0"), ("a-run-worker-1", "n1"), ("other-worker-2", "n2")]
  print(json.dumps({{"items": [{{"metadata": {{"name": p}}, "spec": {{"nodeName": n}}}} for p, n in pods]}}))
elif words[0] == "logs":
  steps(1, 6, 3)
  shown = 0
  while True:
    text = log.read_text()
    sys.stdout.write(text[shown:]); sys.stdout.flush()
    shown = len(text)
    time.sleep(0.05)
elif words[:2] == ["delete", "pod"]:
  with log.open("a") as file:
    file.write("Slice down event detected. Retrying.\\nElastic attempt 2 out of 10\\n")
  steps(6, 12, 2 if (here / "cordoned").exists() else 3)
elif words[0] == "cordon":
  (here / "cordoned").touch()
elif words[0] == "uncordon":
  steps(13, 20, 3)
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
  """A folder in which the command runs, with a kubectl on the PATH; kubectl's calls are in calls.txt."""
  program = tmp_path / "kubectl"
  program.write_text(textwrap.dedent(KUBECTL).strip().format(python=sys.executable, folder=str(tmp_path)))
  program.chmod(0o755)
  monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(cluster_drill, "_POLL_SECONDS", 0.05)
  return tmp_path


def calls(cluster) -> list[str]:
  return [line for line in (cluster / "calls.txt").read_text().splitlines() if not line.startswith("get")]


def test_the_drill_cordons_deletes_uncordons_and_cleans_up(cluster, capsys):
  options = "a-run --manifest run.yml --cordon --fail-after 5 --steps 4 --limit 60".split()
  assert cluster_drill.main(options) == 0, capsys.readouterr().err
  assert calls(cluster) == [
    "apply --filename run.yml",
    "logs --follow --container trainer a-run-head-0",
    "cordon n1",
    "delete pod a-run-worker-1 --grace-period=0 --force",
    "uncordon n1",
    "delete --filename run.yml --wait=false",
  ]


def test_a_recovery_that_never_comes_fails_and_still_cleans_up(cluster, capsys):
  options = "a-run --manifest run.yml --cordon --fail-after 5 --steps 400 --limit 6".split()
  assert cluster_drill.main(options) == 1
  assert "400 steps after it: not seen in 6 s" in capsys.readouterr().err
  assert calls(cluster)[-2:] == ["uncordon n1", "delete --filename run.yml --wait=false"]


def test_without_kubectl_there_is_one_message(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv("PATH", str(tmp_path))
  assert cluster_drill.main(["a-run"]) == 1
  assert "kubectl is not installed" in capsys.readouterr().err


DOWN = "Slice down event detected. Retrying.\nElastic attempt 2 out of 10\n"


def lines(*steps: tuple[int, float, int]) -> str:
  return "".join(
    f"completed step: {n}, seconds: 1.0, loss: {loss}, x: 1, slices: {slices}, y\n" for n, loss, slices in steps
  )


@pytest.mark.parametrize(
  ("log", "problem"),
  [
    ("", "no completed step"),
    (lines((1, 5.0, 3)), "no line 'Slice down event"),
    (lines((1, 5.0, 3)) + DOWN, "none after it"),
    (lines((1, 5.0, 3)) + DOWN + lines((3, 5.0, 2)), "steps 2 to 2 are missing"),
    (lines((1, 5.0, 3), (2, 4.0, 3), (3, 3.0, 3)) + DOWN + lines((2, 4.0, 2)), "2 steps were done again"),
    (lines((1, 5.0, 3), (2, 4.0, 3)) + DOWN + lines((2, 4.1, 2)), "step 2 had the loss 4.0, and 4.1"),
    (lines((1, 5.0, 3)) + DOWN + lines((2, float("nan"), 2)), "loss of step 2 is nan"),
    (lines((1, 5.0, 3)) + DOWN.splitlines()[0] + "\n" + lines((2, 4.0, 3)), "Elastic attempt 2"),
    (lines((1, 5.0, 3)) + DOWN + lines((2, 4.0, 2)), "began on 3 slices and is on 2"),
  ],
)
def test_a_wrong_log_is_refused(log, problem):
  assert any(problem in found for found in cluster_drill.verify(log, returns=True))


def test_a_good_log_passes_from_the_command(tmp_path):
  (tmp_path / "log").write_text(lines((1, 5.0, 3), (2, 4.0, 3)) + DOWN + lines((2, 4.001, 2), (3, 3.0, 3)))
  assert cluster_drill.main(["--verify", str(tmp_path / "log"), "--cordon"]) == 0
