from __future__ import annotations

from hypothesis import HealthCheck, settings

pytest_plugins = ["isthmus_testing.fixtures"]

# A slow machine is no finding: an example may take its time, and so may its making.
settings.register_profile("isthmus", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("isthmus")
