"""``job.py`` as mpirun starts it: the script itself takes torch's variables from those of Open MPI."""

from __future__ import annotations

import os

import holdfast

assert holdfast.__name__ == "holdfast", "imported before the variables are set, as at the top of a script"
os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
os.environ["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_SIZE"]

from tests.session.job import main  # noqa: E402

if __name__ == "__main__":
    main()
