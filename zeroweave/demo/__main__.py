"""What `zeroweave demo` runs on each rank."""

from __future__ import annotations

from zeroweave.demo.run import main

if __name__ == "__main__":
    main()
