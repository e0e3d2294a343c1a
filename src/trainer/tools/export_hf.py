"""`python -m trainer.tools.export_hf RUN_DIR[@STEP] DIR`: writes the weights of a run as a Hugging Face folder.

STEP: default is the newest checkpoint. DIR: new, local, gs:// or s3://. It gets config.json, generation_config.json,
the files of the tokenizer, which adds the token that began the run's documents, and safetensors; transformers, vLLM and
others read it. Every tensor keeps its type unless --dtype names another.
"""

from __future__ import annotations

import argparse

import trainer
from trainer import cluster, commands
from trainer.observe import screen


def main(argv: list[str] | None = None) -> int:
  parser = commands.parser(__doc__)
  parser.add_argument("run_directory", metavar="RUN_DIR[@STEP]")
  parser.add_argument("directory", metavar="DIR")
  parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="")
  return commands.main(parser, _run, argv)


def _run(options: argparse.Namespace) -> None:
  cluster.check_environment()
  trainer.export_run(options.run_directory, options.directory, options.dtype)


if __name__ == "__main__":
  screen.command(main)
