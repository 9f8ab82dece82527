"""The ingress as a service: both front doors, the hub behind them, a heartbeat, and an orderly end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isthmus_ingress.body_room import BodyRoom
from isthmus_ingress.cancels import Cancels
from isthmus_ingress.config import IngressConfig
from isthmus_ingress.driver import Deps
from isthmus_ingress.exchange import Limits
from isthmus_ingress.frontend import Frontend
from isthmus_ingress.generate import HttpLimits
from isthmus_ingress.http import ApiApp
from isthmus_ingress.http_server import ApiServer, connections_possible, listen
from isthmus_ingress.hub import Hub
from isthmus_ingress.nats_door import NatsDoor
from isthmus_ingress.outcomes import tell
from isthmus_ingress.prepare import Preparer
from isthmus_ingress.releases import Releases
from isthmus_ingress.roster import Roster
from isthmus_ingress.tenants import Keyring, readable_by_others
from isthmus_ingress.text import ModelText, load_model_text
from isthmus_ingress.ui.pages import UiPages
from isthmus_ingress.ui.state import UiState
from isthmus_shared.ids import IngressId
from isthmus_shared.messages import subjects
from isthmus_shared.messages.health import IngressHeartbeat, ProcessState
from isthmus_shared.service import ServiceRuntime

TOKENIZER_THREADS = 2
"""Long prompts tokenized at once; more would starve the event loop of a small machine."""


class Ingress:
    """One ingress within its runtime. `address` is the API's ``host:port`` once `listening` is set."""

    def __init__(
        self,
        runtime: ServiceRuntime[IngressConfig],
        *,
        serve_http: bool = True,
        load_text: Callable[[Path], ModelText] = load_model_text,
    ) -> None:
        self.runtime, self.config = runtime, runtime.config
        self.roster = Roster(model_name=self.config.model_name, more=frozenset(self.config.more_models))
        self.address: str | None = None
        self.listening = asyncio.Event()
        self.server: ApiServer | None = None
        self.frontend: Frontend | None = None
        self.events_subject = subjects.ingress_events(IngressId(self.config.id), runtime.incarnation)
        self._serve_http, self._load_text = serve_http, load_text
        entries, self._classes = self.config.read_clients()
        api_keys = [key.get_secret_value() for key in self.config.api_keys]
        self._keyring = Keyring(api_keys=api_keys, entries=entries)
        self._look_at_tenants()
        self.hub = Hub(runtime.bus, self.events_subject, self.roster, runtime.metrics, runtime.log)
        self._cancels = Cancels(runtime.bus, runtime.log)
        runtime.add_readiness("workers", self._workers_problem)

    def _look_at_tenants(self) -> None:
        path = self.config.tenants
        if path is not None and readable_by_others(path):
            todo = "chmod o-r, unless everybody on this host may know the keys or their digests"
            self.runtime.log.warning("tenants.readable_by_others", path=str(path), todo=todo)
        classed = sorted(tenant.name for tenant in self._keyring.tenants.values() if tenant.slo_class)
        if classed and self.config.slo_classes is None:
            todo = "set ISTHMUS_INGRESS_SLO_CLASSES, or take slo_class out of their lines"
            self.runtime.log.warning("tenants.classes_unknown", tenants=classed[:8], count=len(classed), todo=todo)

    async def run(self) -> None:
        """Until `runtime.stopping`; then what has begun ends first."""
        with ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer") as executor:
            text = self._load_text(self.config.model)
            others = {name: self._load_text(folder) for name, folder in self.config.more_models.items()}
            async with asyncio.TaskGroup() as service:
                background = [service.create_task(self.hub.run(), name="hub")]
                await self.hub.ready.wait()
                async with asyncio.TaskGroup() as work:
                    frontend = self.frontend = self._frontend(Preparer(text, executor, others, self._classes), work)
                    door = NatsDoor(self.runtime, frontend, max_body_bytes=self.config.max_body_bytes)
                    background.append(service.create_task(door.run(), name="nats"))
                    serving = service.create_task(self._http(frontend), name="http") if self._serve_http else None
                    beat = self.runtime.heartbeat(subjects.HEARTBEAT_INGRESS, self._heartbeat)
                    background.append(service.create_task(beat, name="heartbeat"))
                    outcomes = tell(
                        self.runtime.bus,
                        self.hub.outcomes,
                        IngressId(self.config.id),
                        self.runtime.incarnation,
                        self.config.heartbeat_interval_s,
                    )
                    background.append(service.create_task(outcomes, name="outcomes"))
                    if serving is None:
                        self.listening.set()
                    await self.listening.wait()
                    await self._until_useful()
                    await self.runtime.stopping.wait()
                    self.runtime.set_state(ProcessState.DRAINING)
                    await self._drain(frontend, serving)
                for task in background:
                    task.cancel()

    async def _until_useful(self) -> None:
        """Requests are taken from the start; READY is said once one can succeed, so that a load balancer, and
        `isthmus up`, send nobody here too early."""
        async with asyncio.TaskGroup() as waiting:
            model = waiting.create_task(self.hub.knows_model.wait())
            stop = waiting.create_task(self.runtime.stopping.wait())
            await asyncio.wait({model, stop}, return_when=asyncio.FIRST_COMPLETED)
            if model.done():
                self.runtime.set_state(ProcessState.READY)
            model.cancel()
            stop.cancel()

    def _frontend(self, preparer: Preparer, work: asyncio.TaskGroup) -> Frontend:
        config, runtime = self.config, self.runtime
        deps = Deps(
            runtime.bus,
            self.events_subject,
            work,
            self._cancels,
            runtime.metrics,
            runtime.log,
            runtime.tracing,
            config.itl_target_s,
            self.hub.last_plan,
            Releases(runtime.bus),
        )
        limits = Limits(config.request_timeout_s, config.attempts, config.route_patience_s, config.max_in_flight)
        bodies = BodyRoom(config.max_bodies_bytes)
        return Frontend(preparer, self.hub, deps, limits, self._accepting, keyring=self._keyring, bodies=bodies)

    def _accepting(self) -> bool:
        return not self.runtime.stopping.is_set()

    async def _http(self, frontend: Frontend) -> None:
        config = self.config
        limits = HttpLimits(config.max_body_bytes, config.body_timeout_s)
        ui = UiPages(
            UiState(self.runtime.bus, self.hub, self.runtime.metrics),
            admin_keys=[key.get_secret_value() for key in config.admin_keys],
            clients_need_keys=frontend.keyring.needs_keys,
        )
        app = ApiApp(self.runtime, frontend, limits, ui=ui)
        with listen(config.host, config.port, shared=config.share_port) as listener:
            host, port = listener.getsockname()[:2]
            self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            self.server = ApiServer(
                app,
                grace_s=config.shutdown_grace_s,
                write_stall_s=config.write_stall_s,
                max_connections=connections_possible(config.max_connections),
            )
            self.runtime.log.info("http.listening", address=self.address)
            self.listening.set()
            await self.server.serve(sockets=[listener])

    async def _drain(self, frontend: Frontend, serving: asyncio.Task[None] | None) -> None:
        """No new connection or request; those that have begun end by themselves."""
        if self.server is not None and serving is not None:
            self.server.stop()
            await serving
        await frontend.idle.wait()
        self._cancels.close()

    def _heartbeat(self) -> IngressHeartbeat:
        return IngressHeartbeat(
            incarnation=self.runtime.incarnation,
            state=self.runtime.state,
            interval_s=self.config.heartbeat_interval_s,
            http_address=self.address,
            ingress_id=IngressId(self.config.id),
            events_subject=self.events_subject,
            requests_in_flight=self.hub.running,
            ttft=self.hub.recent.ttft,
            itl=self.hub.recent.itl,
        )

    def _workers_problem(self) -> str | None:
        return None if self.roster.models else "no worker that is ready has been heard of"
