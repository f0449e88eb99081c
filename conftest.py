"""What tests and the processes that they start inherit: the project to import, and signals that are not ignored."""

import os
import signal
from pathlib import Path

os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))

# Who starts the suite with nohup, or in the background of a script, leaves signals ignored; a run keeps to that.
for _signal, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _handler)
