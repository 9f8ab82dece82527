"""What workers' steps said, to the sagas. Tokens of one stream that came together are handed on together: under load
a read of the bus holds many steps, and taking each token by itself would cost more than all else that is done for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from structlog.typing import FilteringBoundLogger

from isthmus_ingress.driver import RunningSaga, Said
from isthmus_shared.bus.port import BusMessage
from isthmus_shared.errors import ProtocolViolation
from isthmus_shared.ids import RequestId
from isthmus_shared.messages.quick import read_steps
from isthmus_shared.messages.work import StepEvents


class StepReader:
    """`malformed` is told of a message that is none."""

    def __init__(
        self,
        sagas: Mapping[RequestId, RunningSaga],
        now_s: Callable[[], float],
        malformed: Callable[[str, ProtocolViolation], None],
        log: FilteringBoundLogger,
    ) -> None:
        self._sagas, self._now_s, self._malformed = sagas, now_s, malformed
        self.log = log

    def take(self, messages: Sequence[BusMessage]) -> None:
        """In the order in which they came. What one request's events meet is no other request's concern."""
        now_s, alone = self._now_s(), len(messages) == 1
        together: dict[RequestId, list[Said]] = {}
        for message in messages:
            steps = read_steps(message.data)
            if steps is None:
                self._take_all(together, now_s)
                together = {}
                self._take_slowly(message)
            elif alone:
                for event in steps.events:
                    saga = self._sagas.get(event.request_id)
                    if saga is not None:
                        self._take_event(saga, (steps, event), now_s)
            else:
                for event in steps.events:
                    said = together.get(event.request_id)
                    if said is None:
                        together[event.request_id] = [(steps, event)]
                    else:
                        said.append((steps, event))
        self._take_all(together, now_s)

    def _take_slowly(self, message: BusMessage) -> None:
        try:
            step = StepEvents.decode(message.data)
            for event in step.events:
                saga = self._sagas.get(event.request_id)
                if saga is not None:
                    saga.take(step.worker.incarnation, event, step.step)
        except ProtocolViolation as error:
            self._malformed(message.subject, error)
        except Exception:  # a bug that one message meets ends neither the others' streams nor this process
            self.log.exception("message.broke", subject=message.subject)

    def _take_all(self, together: dict[RequestId, list[Said]], now_s: float) -> None:
        for request_id, said in together.items():
            saga = self._sagas.get(request_id)
            if saga is not None:
                self._take_run(saga, said, now_s)

    def _take_run(self, saga: RunningSaga, said: list[Said], now_s: float) -> None:
        last = said.pop() if said[-1][1].finish is not None else None
        if said and not self._together(saga, said, now_s):
            self._take_event(saga, said[0], now_s)  # a worker's first event is not usual, and the rest may be
            if len(said) > 1 and not self._together(saga, said[1:], now_s):
                for each in said[1:]:
                    self._take_event(saga, each, now_s)
        if last is not None:
            self._take_event(saga, last, now_s)

    def _together(self, saga: RunningSaga, said: list[Said], now_s: float) -> bool:
        try:
            return saga.flow_together(said, now_s)
        except Exception:  # as above
            self.log.exception("message.broke", request_id=said[0][1].request_id)
            return False

    def _take_event(self, saga: RunningSaga, said: Said, now_s: float) -> None:
        steps, event = said
        try:
            if event.finish is None and saga.flow(steps.worker.incarnation, event, steps.step, now_s):
                return
            saga.take(steps.worker.incarnation, event.as_event(), steps.step)
        except Exception:  # as above
            self.log.exception("message.broke", request_id=event.request_id)
