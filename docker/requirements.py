"""`python requirements.py EXTRA`: prints the packages that pyproject.toml names for EXTRA and for every installation.

The image installs them before the code is there, so pip cannot be asked for the project itself.
"""

import sys
import tomllib

with open("pyproject.toml", "rb") as file:
  project = tomllib.load(file)["project"]
print("\n".join([*project["dependencies"], *project["optional-dependencies"][sys.argv[1]]]))
