"""What `zeroweave demo` runs on each rank: the demo's program with this folder's model and text."""

from llama import Llama
from text import Text

from zeroweave.report.demo import main

if __name__ == "__main__":
    main(Llama, lambda rank, world: Text(rank=rank, world=world))
