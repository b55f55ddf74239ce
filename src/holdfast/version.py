"""The version of Holdfast, which users see and the hosts of a job compare."""

VERSION = "0.1.0"
