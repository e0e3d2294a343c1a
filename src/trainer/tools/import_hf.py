"""`python -m trainer.tools.import_hf DIR RUN_DIR`: makes a run folder with the weights of a Hugging Face folder.

DIR: config.json and safetensors of a Qwen3, Qwen3-MoE or Llama, local, gs:// or s3://. RUN_DIR: new. Train from it with
`load_parameters_path=RUN_DIR`; trainer.tools.generate, evaluate and export_hf read it.
"""

from __future__ import annotations

import argparse

import trainer
from trainer import cluster
from trainer.observe import screen
from trainer.tools.ends import exit_code


def main(argv: list[str] | None = None) -> int:
  """Returns the exit code: 0, or 2 with one line on stderr if the folder is wrong or cannot be written."""
  parser = argparse.ArgumentParser(prog="python -m trainer.tools.import_hf", description=__doc__.split("\n\n")[0])
  parser.add_argument("directory", metavar="DIR")
  parser.add_argument("run_directory", metavar="RUN_DIR")
  arguments = parser.parse_args(argv)

  def work() -> None:
    cluster.check_environment()
    trainer.import_folder(arguments.directory, arguments.run_directory)

  return exit_code(work)


if __name__ == "__main__":
  screen.command(main)
