"""Which workers live, from their heartbeats. Pure: time is an argument."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from isthmus_ingress.saga_types import WorkerBack, WorkerGone
from isthmus_shared.errors import ModelNotFound, Unavailable
from isthmus_shared.ids import Incarnation, WorkerId
from isthmus_shared.messages.health import LOST_AFTER_BEATS, ProcessState, WorkerHeartbeat

MAX_WORKERS = 4096
"""Heartbeats of more are ignored: a cluster of that size has more than one ingress view to worry about."""


@dataclass(slots=True)
class _Seen:
    beat: WorkerHeartbeat
    at_s: float


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    max_model_len_tokens: int
    """The least of all workers that serve it, so that any of them can take the request."""


@dataclass(slots=True)
class Roster:
    model_name: str | None = None
    """The model that this ingress has a tokenizer for; None: whatever the workers serve, if they agree."""
    more: frozenset[str] = frozenset()
    """Other models that it has tokenizers for."""
    _seen: dict[WorkerId, _Seen] = field(default_factory=dict)
    _silent: OrderedDict[Incarnation, None] = field(default_factory=OrderedDict)
    """Lives that were forgotten for their silence."""

    def beat(self, beat: WorkerHeartbeat, *, now_s: float) -> WorkerGone | WorkerBack | None:
        """Take a heartbeat in. A new life of a worker is the end of its old one; one that was silent is back."""
        old = self._seen.get(beat.worker_id)
        if old is None and len(self._seen) >= MAX_WORKERS:
            return None
        self._seen[beat.worker_id] = _Seen(beat, now_s)
        if beat.incarnation in self._silent:
            del self._silent[beat.incarnation]
            return WorkerBack(beat.incarnation)
        if old is None or old.beat.incarnation == beat.incarnation:
            return None
        return WorkerGone(old.beat.incarnation, f"worker {beat.worker_id} has started anew")

    def lost(self, incarnation: Incarnation) -> None:
        for worker_id, seen in list(self._seen.items()):
            if seen.beat.incarnation == incarnation:
                del self._seen[worker_id]

    def silent(self, *, now_s: float) -> list[WorkerGone]:
        """Forget, and report, every worker that has missed its beats."""
        gone = []
        for worker_id, seen in list(self._seen.items()):
            bound_s = LOST_AFTER_BEATS * seen.beat.interval_s
            if now_s - seen.at_s > bound_s:
                del self._seen[worker_id]
                self.called_silent(seen.beat.incarnation)
                why = f"worker {worker_id} sent no heartbeat for {bound_s:g} s"
                gone.append(WorkerGone(seen.beat.incarnation, why, certain=False))
        return gone

    def worker(self, incarnation: Incarnation) -> WorkerHeartbeat | None:
        """That life's last beat, if it is alive."""
        return next((seen.beat for seen in self._seen.values() if seen.beat.incarnation == incarnation), None)

    def called_silent(self, incarnation: Incarnation) -> None:
        """Somebody no longer hears it: its next beat says that it is back."""
        self._silent[incarnation] = None
        while len(self._silent) > MAX_WORKERS:
            self._silent.popitem(last=False)

    def excuse(self, *, now_s: float) -> None:
        """Silence until now proves nothing (we could not hear): count from here."""
        for seen in self._seen.values():
            seen.at_s = now_s

    @property
    def models(self) -> tuple[Model, ...]:
        """By name, of ready workers only; just those that it has tokenizers for when they are named."""
        shortest: dict[str, int] = {}
        for seen in self._seen.values():
            beat = seen.beat
            if beat.state is ProcessState.READY and self._serves(beat.model):
                known = shortest.get(beat.model, beat.max_model_len_tokens)
                shortest[beat.model] = min(known, beat.max_model_len_tokens)
        return tuple(Model(name, length) for name, length in sorted(shortest.items()))

    def model(self, name: str | None) -> Model:
        """The model of a request (None or empty: the only one, or the first). Raises `ModelNotFound` or
        `Unavailable`."""
        models = self.models
        if self.model_name is not None and (self.more or not models):
            return self._named(name or self.model_name, models)
        if not models:
            raise Unavailable("no worker is ready", why="none has sent a heartbeat", todo="try again shortly")
        if len(models) > 1:
            names = ", ".join(model.name for model in models)
            why = f"workers serve {names}, and one ingress has one tokenizer"
            raise Unavailable("the model is ambiguous", why=why, todo="set ISTHMUS_INGRESS_MODEL_NAME")
        if name and name != models[0].name:
            raise self._not_found(name, models[0].name)
        return models[0]

    def _serves(self, name: str) -> bool:
        return self.model_name is None or name == self.model_name or name in self.more

    def _named(self, name: str, models: tuple[Model, ...]) -> Model:
        """One of several."""
        found = next((model for model in models if model.name == name), None)
        if found is not None:
            return found
        if self._serves(name):
            why = f"none that serves `{name}` has sent a heartbeat" if models else "none has sent a heartbeat"
            raise Unavailable("no worker is ready", why=why, todo="try again shortly")
        raise self._not_found(name, "`, `".join(sorted({self.model_name or "", *self.more} - {""})))

    @staticmethod
    def _not_found(name: str, known: str) -> ModelNotFound:
        return ModelNotFound(f"The model `{name[:128]}` does not exist", todo=f"use `{known}`", param="model")
