"""Which version this is: what a user sees, and what the hosts of a job compare."""

VERSION = "0.1.0"
