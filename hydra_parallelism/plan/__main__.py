"""``python -m hydra_parallelism.plan`` is the console script."""

from .cli import main

raise SystemExit(main())
