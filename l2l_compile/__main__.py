"""`python -m l2l_compile` is the command `l2l`."""

import sys

from l2l_compile.command.main import main

sys.exit(main())
