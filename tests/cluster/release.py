"""The chart as one release in one namespace, by Helm's own library: each call is a line of the log, with its time."""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import helm_python
import yaml

from charts import renders
from tests.cluster.api import wait_for
from tests.cluster.control_plane import ControlPlane

log = logging.getLogger("cluster")
Values = dict[str, Any]
LIMIT = {"timeout": 300}


def sample() -> Values:
    """The values of values.yaml, a new copy: groups of five kinds of GPU, a bucket's keys in a Secret."""
    return yaml.safe_load((Path(__file__).parent / "values.yaml").read_text())


class Release:
    """Helm's commands for one release. Each raises helm_python.HelmError as the command would fail.

    `options` are those of helm_python.Config's methods: timeout (seconds; 300), wait ('watcher' is `--wait`),
    rollback_on_failure. Without `wait` Helm waits for hooks alone, as its command does.
    """

    def __init__(self, plane: ControlPlane, namespace: str, name: str = "enginesmith") -> None:
        self.namespace, self.name = namespace, name
        self._plane = plane

    def install(self, values: Values, chart: Path = renders.CHART, **options: Any) -> Values:
        return self._call("install", str(chart), self.name, values, **LIMIT | options)

    def upgrade(self, values: Values, chart: Path = renders.CHART, **options: Any) -> Values:
        return self._call("upgrade", str(chart), self.name, values, **LIMIT | options)

    def rollback(self, version: int, **options: Any) -> None:
        self._call("rollback", self.name, version=version, **LIMIT | options)

    def test(self, **options: Any) -> None:
        self._call("test", self.name, **LIMIT | options)

    def uninstall(self, **options: Any) -> None:
        self._call("uninstall", self.name, **options)

    def kill(self, verb: str, values: Values, when: Callable[[], Any]) -> None:
        """helm install or upgrade in a process that is killed as soon as `when` finds something."""
        program = (
            "import json, sys; from helm_python import Config\n"
            "kubeconfig, namespace, verb, chart, name = sys.argv[1:]\n"
            "with Config(kubeconfig_path=kubeconfig, namespace=namespace) as config:\n"
            "    getattr(config, verb)(chart, name, json.load(sys.stdin))"
        )
        words = [str(self._plane.kubeconfig()), self.namespace, verb, str(renders.CHART), self.name]
        with subprocess.Popen([sys.executable, "-c", program, *words], stdin=subprocess.PIPE, text=True) as process:
            assert process.stdin
            process.stdin.write(json.dumps(values))
            process.stdin.close()
            try:
                wait_for(f"helm {verb} to be under way", when)
            finally:
                process.kill()
        log.info("helm %s %s --namespace %s: killed", verb, self.name, self.namespace)

    def remove(self) -> None:
        """Uninstall what is there, at a test's end."""
        with suppress(helm_python.HelmError):
            self._call("uninstall", self.name, logs=False, ignore_not_found=True)

    def status(self) -> str:
        """'deployed', 'failed', ...; the newest revision's."""
        return str(self._call("status", self.name, logs=False)["status"])

    def _call(self, verb: str, *words: Any, logs: bool = True, **options: Any) -> Any:
        began = time.monotonic()
        command = f"helm {verb} {self.name} --namespace {self.namespace}"
        text = " ".join([command, *(f"{k}={v}" for k, v in options.items())])
        try:
            result = self._started(verb, *words, **options).result()
        except helm_python.HelmError as error:
            log.info("%s: refused after %.1f s: %s", text, time.monotonic() - began, " ".join(str(error).split())[:300])
            raise
        if logs:
            log.info("%s: done in %.1f s", text, time.monotonic() - began)
        return result

    def _started(self, verb: str, *words: Any, **options: Any) -> "Future[Any]":
        """A call in a thread that is left behind at Ctrl-C, at which the library does not return."""
        answer: Future[Any] = Future()

        def run() -> None:
            kubeconfig = str(self._plane.kubeconfig())
            try:
                with helm_python.Config(kubeconfig_path=kubeconfig, namespace=self.namespace) as config:
                    answer.set_result(getattr(config, verb)(*words, **options))
            except Exception as error:  # whoever waits for the answer raises it
                answer.set_exception(error)

        threading.Thread(target=run, name=f"helm {verb}", daemon=True).start()
        return answer
