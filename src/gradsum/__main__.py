"""``python -m gradsum``: the same as the ``gradsum`` command."""

from __future__ import annotations

from gradsum.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
