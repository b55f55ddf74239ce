"""The loops of a script: which batch comes next, where a loop ends, which epochs and phases are done."""
