"""Runs `python -m keras_monitored`."""

import sys

from keras_monitored.cli import main

sys.exit(main())
