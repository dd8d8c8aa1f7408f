"""Runs that give no sign of life any more: an automation of the server reports them Crashed.

A worker reports what becomes of its runs; where the machine of both is lost nobody does, and the run stays Running.
Prefect sends a sign of life for each run, every three minutes by default (`PREFECT_FLOWS_HEARTBEAT_FREQUENCY`).
"""

from datetime import timedelta

from prefect.client.schemas.objects import StateType
from prefect.events import Posture
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger

NAME = "enginery: a run without a sign of life has crashed"
# Three signs of life, and a minute for those that come late.
SILENT = timedelta(minutes=10)
_SIGN = "prefect.flow-run.heartbeat"
# Names of states, as Prefect tells of them; 'Skipped' is ours. Not 'Running', which may come after the first sign.
_ENDS = ("Completed", "Skipped", "Failed", "TimedOut", "Cancelled", "Crashed")


def automation(tag: str, silent: timedelta = SILENT) -> AutomationCore:
    """The automation for the runs with this tag; after `silent` without a sign of life they are taken for dead."""
    return AutomationCore(
        name=NAME,
        description=f"Without a sign of life for {silent.total_seconds():g} s, its machine is lost.",
        enabled=True,
        trigger=EventTrigger(
            posture=Posture.Proactive,
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related={"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"},
            after={_SIGN},
            expect={_SIGN, *(f"prefect.flow-run.{end}" for end in _ENDS)},
            for_each={"prefect.resource.id"},
            threshold=1,
            within=silent,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                message=f"no sign of life for {silent.total_seconds():g} s: its machine is lost, or does not reach the "
                "server; what it had finished is on record",
            )
        ],
    )
