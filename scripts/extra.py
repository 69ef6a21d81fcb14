"""Prints the requirements of one extra of pyproject.toml, a line each, without spaces."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    for requirement in project["optional-dependencies"][sys.argv[1]]:
        print(requirement.replace(" ", ""))


if __name__ == "__main__":
    main()
