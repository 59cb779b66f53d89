# SPDX-License-Identifier: Apache-2.0
"""`python -m ds_mxfp8_moe.run [-m] SCRIPT [ARGUMENTS]` runs a script, or with -m a module, after `enable()`.

For programs that one does not edit, where the hook (ds_mxfp8_moe/hook) is switched off:

    torchrun --nproc-per-node 8 -m ds_mxfp8_moe.run train.py --deepspeed ds_config.json
    accelerate launch -m ds_mxfp8_moe.run -m trl.scripts.sft --deepspeed ds_config.json
"""

import runpy
import sys
from pathlib import Path

from . import enable

USAGE = "usage: python -m ds_mxfp8_moe.run [-m] SCRIPT [ARGUMENTS]"


def main() -> None:
    """Takes the command line of the process, and leaves it to the script as if it had been started alone."""
    given = sys.argv[1:]
    as_module = given[:1] == ["-m"]
    sys.argv = given[as_module:]
    if not sys.argv or sys.argv[0].startswith("-"):
        sys.exit(USAGE)
    enable()
    if as_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    if not Path(sys.argv[0]).is_file():
        sys.exit(f"{sys.argv[0]}: no such script. {USAGE}")
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
