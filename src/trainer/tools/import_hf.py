"""`python -m trainer.tools.import_hf DIR RUN_DIR`: makes a run folder with the weights of a Hugging Face folder.

DIR: config.json and safetensors of a Qwen3, Qwen3-MoE or Llama, local, gs:// or s3://. RUN_DIR: new. Train from it with
`load_parameters_path=RUN_DIR`; trainer.tools.generate, evaluate and export_hf read it.
"""

from __future__ import annotations

import argparse

import trainer
from trainer import cluster, commands
from trainer.observe import screen


def main(argv: list[str] | None = None) -> int:
  parser = commands.parser(__doc__)
  parser.add_argument("directory", metavar="DIR")
  parser.add_argument("run_directory", metavar="RUN_DIR")
  return commands.main(parser, _run, argv)


def _run(options: argparse.Namespace) -> None:
  cluster.check_environment()
  trainer.import_folder(options.directory, options.run_directory)


if __name__ == "__main__":
  screen.command(main)
