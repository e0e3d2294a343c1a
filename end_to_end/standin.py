"""The Pathways stand-in: every conformance program, and every scenario of faults.

  python -m end_to_end.standin conformance        each program equal to the CPU, bit for bit
  python -m end_to_end.standin faults             what clients see when slices fail

The exit code is 1 if something is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from tests.support.command import standin_environment

from pathways_standin.process import start_standin


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("what", choices=["conformance", "faults"])
  options = parser.parse_args()
  server = start_standin(2, 2, "TPU v5 lite")
  try:
    module, platforms, arguments = {
      "conformance": ("tests.pathways_standin.conformance", "proxy,cpu", []),
      "faults": ("tests.pathways_standin.faults", "proxy", [server.control_path]),
    }[options.what]
    report = json.loads(_client(server, module, arguments, platforms).communicate()[0].splitlines()[-1])
  finally:
    server.close()
  wrong = {name: text for name, text in report.items() if text}
  for name, text in wrong.items():
    print(f"{name}: {text}")
  print(f"{len(report) - len(wrong)} of {len(report)} as expected")
  return 1 if wrong else 0


def _client(server, module: str, arguments: list[str], platforms: str = "proxy") -> subprocess.Popen[str]:
  command, environment = [sys.executable, "-m", module, *arguments], standin_environment(server.address, platforms)
  return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
  sys.exit(main())
