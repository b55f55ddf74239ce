"""The program of each rank for a training function: it calls the function and stores the value for the node's actor.

``python -m holdfast.integrations.ray.rank MODULE FUNCTION ROOT PLACE``, started like ``holdfast run -m``. ROOT is the
directory of the module, PLACE the actor's private directory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast.errors import StateError
from holdfast.integrations.ray.shipped_function import load_function
from holdfast.runtime.node.rundir import write_private
from holdfast.store.format.json_values import decode_values, encode_values

CONFIG, RETURNED = "config", "returned-"
IN_RANK = "HOLDFAST_RAY_RANK"  # makes run() raise in a rank that imports a driver's script without main guard


def main() -> None:
    """Call the training function that the command-line arguments name, and store its value."""
    module, name, root, place = sys.argv[1:5]
    os.environ[IN_RANK] = "1"
    function = load_function(module, name, root)
    config = Path(place) / CONFIG
    value = function(decode_values(config.read_bytes())) if config.exists() else function()
    try:
        data = encode_values(value, "the returned value")
    except StateError as error:
        sys.stderr.write(f"holdfast: warning: {error.message}: the driver gets nothing from this rank\n")
        return
    write_private(Path(place) / f"{RETURNED}{os.environ['RANK']}", data)


if __name__ == "__main__":
    main()
