"""Runs a load test: starts the server's process, sends planned arrivals to it, watches its memory, and reports."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.reports.load import LoadReport, LoadTerms
from enginesmith.core.text import now
from pipeline.capacity.server_overhead import time_server
from pipeline.capacity.server_process import start_server
from validation.latency.machine import SystemLoadMonitor, machine
from validation.load.arrivals import PlannedArrivals
from validation.load.open_loop import send_open_loop
from validation.load.server import REQUEST, ServedEngine
from validation.load.summary import delay_of, memory_of, phases_of

# Seconds that a server may take to answer what waits when the last request was sent.
DRAIN_S, DRAIN_INTERRUPTED_S = 30.0, 2.0


def run_load(
    plan: ServedEngine,
    arrivals: PlannedArrivals,
    which: Array,
    terms: LoadTerms,
    folder: Path,
    say: Callable[[str], object] = str,
) -> LoadReport:
    """Send the arrivals to a server of the engine, and report. which: inputs of each request, int64 [requests].
    say: gets a line for each part.

    Ctrl-C ends the sending early, with a report of what there is. Raises as `start_server`.
    """
    say("timing what the server adds to a run")
    server_adds, monitor = time_server(plan, folder), SystemLoadMonitor()
    say(f"starting a server of {plan.request.unit}")
    messages = [REQUEST.pack(number, one) for number, one in enumerate(which.tolist())]
    with start_server(plan, folder, len(arrivals)) as server:
        stop = threading.Event()
        receiving = threading.Thread(target=server.receive, daemon=True)
        watching = threading.Thread(target=server.watch, args=(stop,), daemon=True)
        receiving.start()
        watching.start()
        say(f"sending for {terms.seconds:g} s; Ctrl-C ends it and shows what there is")
        sent = send_open_loop(lambda number: server.send(messages[number]), arrivals.at)
        interrupted = sent.interrupted
        server.stop_sending()
        try:
            receiving.join(DRAIN_INTERRUPTED_S if interrupted else DRAIN_S)
        except KeyboardInterrupt:
            interrupted = True
        stop.set()
        watching.join()
        ended = time.perf_counter()
    count = len(sent.sent)
    done, failed = server.done[:count] - sent.begun, server.failed[:count]
    lasted = max(float(np.nanmax(done)) if np.isfinite(done).any() else 0.0, 1e-9)
    return LoadReport(
        unit=plan.request.unit,
        engine=plan.digest,
        machine=machine(),
        created_at=now(),
        terms=terms,
        seconds=ended - sent.begun,
        answered=int(np.count_nonzero(np.isfinite(done) & ~failed)) / lasted,
        phases=phases_of(arrivals, done, failed),
        sending=delay_of(arrivals.at, sent.sent, done),
        memory=memory_of(server.memory),
        cold_start_s=server.cold_start_s,
        first_s=server.first_s,
        batch=server.batch,
        load=monitor.stop(),
        server=server_adds,
        interrupted=interrupted,
    )
