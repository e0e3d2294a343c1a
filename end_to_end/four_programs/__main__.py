"""Draws one training curve with four programs, and compares them: transformers, torchtitan, MaxText and this project.

    python -m end_to_end.four_programs FOLDER [--python python3.12] [--models qwen3,llama,qwen3-moe] [--steps 1000]

All programs start from the same Hugging Face folder with random weights, about 1 million parameters, in float32. They
read the same token ids in the same batches, and use AdamW with the same clipping, warm-up, cosine and mask of the
weight decay. FOLDER gets the environments of the other programs (about 12 GB, made with pip at the first use), the
inputs of each model, and of each program `curve.csv` and its final weights as a Hugging Face folder. A curve that is
there is not drawn again. The mixture of experts has 300 steps, in transformers and here.

Prints a table: the largest relative difference of the loss and of the gradient's norm to transformers, over the first
300 and over all steps, and that of the final weights. Exits with 1 if the loss of this project differs by more than
1e-5 over 300 steps or 1e-4 over 1,000.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from end_to_end.benchmarks.common import positive
from end_to_end.four_programs import common, compare, inputs
from tests.support.command import ROOT

REQUIREMENTS = {
  "transformers": ["transformers==5.23.0", "torch==2.13.0", "numpy"],
  "torchtitan": ["torchtitan==0.3.0", "torch==2.15.0"],
  "maxtext": ["maxtext[tpu]==0.2.5"],
}
DENSE = ["transformers", "trainer", "torchtitan", "maxtext", "maxtext-own"]
PROGRAMS = {"qwen3": DENSE, "llama": DENSE, "qwen3-moe": ["transformers", "trainer", "transformers-own"]}
MOST_STEPS = {"qwen3-moe": 300}


def work(model: str, steps: int) -> common.Work:
  """The numbers of the experiment."""
  return common.Work(
    model=model,
    steps=min(steps, MOST_STEPS.get(model, steps)),
    schedule_steps=1000,
    rows=4,
    length=64,
    peak=1e-3,
    warmup=100,
    final=0.1,
    decay=0.1,
    clip=1.0,
    b1=0.9,
    b2=0.95,
    epsilon=1e-8,
    balance=0.001 if model == "qwen3-moe" else 0.0,
  )


def arguments(argv: list[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("folder", type=Path)
  parser.add_argument("--python", default="python3.12", help="makes the environments; MaxText needs Python 3.12")
  parser.add_argument("--models", default=",".join(PROGRAMS))
  parser.add_argument("--steps", type=positive, default=1000)
  args = parser.parse_args(argv)
  args.models = args.models.split(",")
  if unknown := sorted(set(args.models) - PROGRAMS.keys()):
    parser.error(f"--models {','.join(unknown)}: must be of {', '.join(PROGRAMS)}")
  if not shutil.which(args.python):
    parser.error(f"--python {args.python}: is not a command. Give the Python 3.12 that makes the environments")
  return args


def environment(folder: Path, name: str, python: str) -> Path:
  """The Python of the program's environment, which is made if it is not there."""
  place = folder / "environments" / name
  found = place / "bin" / "python"
  if not (place / "complete").exists():
    subprocess.run([python, "-m", "venv", "--clear", place], check=True)
    subprocess.run([found, "-m", "pip", "install", "--quiet", "uv"], check=True)  # pip gives up on MaxText's versions
    subprocess.run([found, "-m", "uv", "pip", "install", "--python", found, *REQUIREMENTS[name]], check=True)
    (place / "complete").touch()
  return found


def run(folder: Path, model: str, program: str, python: str) -> None:
  """Trains `model` with `program`, with its output in {program}.txt. Ends this process if it fails."""
  name, _, option = program.partition("-")
  if name == "trainer":
    command = [sys.executable, "-m", "end_to_end.four_programs.with_trainer"]
  else:
    command = [environment(folder, name, python), str(Path(__file__).parent / f"with_{name}.py")]
  variables = {"PYTHONPATH": os.pathsep.join(sys.path) if name == "trainer" else "", "JAX_PLATFORMS": "cpu"}
  shutil.rmtree(folder / model / program, ignore_errors=True)  # of an interrupted run
  log = folder / model / f"{program}.txt"
  with log.open("wb") as file:
    done = subprocess.run(
      [*command, folder / model, *filter(None, [option])],
      cwd=ROOT,
      env=os.environ | variables,
      stdout=file,
      stderr=subprocess.STDOUT,
    )
  if done.returncode:
    sys.exit(f"{program} ended with exit code {done.returncode}:\n{log.read_text()[-4000:]}")


def main() -> int:
  args = arguments(sys.argv[1:])
  folder, rows, good = args.folder.resolve(), [], True
  for model in args.models:
    if not (folder / model).exists():
      (folder / model).mkdir(parents=True)
      inputs.make(folder / model, work(model, args.steps))
    elif common.read(folder / model) != work(model, args.steps):
      sys.exit(f"{folder / model} has another experiment. Give another folder, or the same --steps.")
    for program in PROGRAMS[model]:
      if not (folder / model / program / "curve.csv").exists():
        print(f"{model}: {program}", flush=True)
        run(folder, model, program, args.python)
    found, within = compare.report(folder / model, PROGRAMS[model][1:])
    rows, good = rows + found, good and within
  for row in rows:
    last = f"  weights {row['weights']:.1e} ({row['array']})" if "weights" in row else ""
    print(f"{row['model']:10} {row['program']:15} {row['steps']:5} steps: loss {row['loss']:.1e}, ", end="")
    print(f"gradient norm {row['grad_norm']:.1e}{last}")
  (folder / "differences.json").write_text(json.dumps(rows, indent=2))
  return 0 if good else 1


if __name__ == "__main__":
  sys.exit(main())
