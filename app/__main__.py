"""Run the command as ``python -m mlx_spec_app``."""

import sys

from mlx_spec_app.cli import main

sys.exit(main())
