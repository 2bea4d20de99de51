"""Python imports this module at the start of each process whose PYTHONPATH has this folder: the stack's, if their code is swapped."""

import os
from pathlib import Path

from backends.taps import swaps

if swaps.FOLDER in os.environ:
    swaps.listen(Path(os.environ[swaps.FOLDER]))
