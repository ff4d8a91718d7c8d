"""Checkpoints: the files of a stopped run, written and read by all ranks, and checked byte by byte."""
