"""Lets the environment that runs this see the packages of another one, editable installs and compiled parts too.

The oracle's environment adds PyTorch on top of .venv this way: one build of the kernels, one set of pins, and no
PyTorch in the environment that must do without it.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def main() -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shared = Path(sys.argv[1]).resolve() / "lib" / version / "site-packages"
    if not shared.is_dir():
        sys.exit(f"{shared} does not exist: both environments must come from the same Python")
    own = Path(sysconfig.get_path("purelib"))
    (own / "shared.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")


if __name__ == "__main__":
    main()
