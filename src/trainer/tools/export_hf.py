"""`python -m trainer.tools.export_hf RUN_DIR[@STEP] DIR`: writes the weights of a run as a Hugging Face folder.

STEP: default is the newest checkpoint. DIR: new, local, gs:// or s3://. It gets config.json, generation_config.json,
the files of the tokenizer, which adds the token that began the run's documents, and safetensors; transformers, vLLM and
others read it. Every tensor keeps its type unless --dtype names another.
"""

from __future__ import annotations

import argparse

import trainer
from trainer import cluster
from trainer.observe import screen
from trainer.tools.ends import exit_code


def main(argv: list[str] | None = None) -> int:
  """Returns the exit code: 0, or 2 with one line on stderr if the run is wrong or the folder cannot be written."""
  parser = argparse.ArgumentParser(prog="python -m trainer.tools.export_hf", description=__doc__.split("\n\n")[0])
  parser.add_argument("run_directory", metavar="RUN_DIR[@STEP]")
  parser.add_argument("directory", metavar="DIR")
  parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="")
  arguments = parser.parse_args(argv)

  def work() -> None:
    cluster.check_environment()
    trainer.export_run(arguments.run_directory, arguments.directory, arguments.dtype)

  return exit_code(work)


if __name__ == "__main__":
  screen.command(main)
