"""Writes the compiled text of MaxText's training step, and the memory that it needs.

    MAXTEXT_PYTHON -P maxtext_step.py TEXT_FILE CONFIG KEY=VALUE ...

MAXTEXT_PYTHON is the Python of an environment with MaxText, which has nothing of this project. The program is MaxText's
own `train_compile`; TEXT_FILE.json gets the compiler's seconds and bytes.
"""

import json
import pathlib
import sys
import time

from maxtext.trainers.pre_train import train_compile


def main() -> None:
  path, compile_step = pathlib.Path(sys.argv[1]), train_compile.jit_and_compile

  def compile_and_write(*args, **kwargs):
    start = time.monotonic()
    compiled = compile_step(*args, **kwargs)
    stats = compiled.memory_analysis()
    found = {
      "compile_seconds": time.monotonic() - start,
      "bytes": stats.argument_size_in_bytes
      + stats.temp_size_in_bytes
      + stats.output_size_in_bytes
      - stats.alias_size_in_bytes
      + stats.generated_code_size_in_bytes,
    }
    path.with_suffix(".json").write_text(json.dumps(found))
    path.write_text(compiled.as_text())
    sys.exit(0)  # what follows in MaxText saves the program

  train_compile.jit_and_compile = compile_and_write
  train_compile.main(["train_compile", *sys.argv[2:]])


if __name__ == "__main__":
  main()
