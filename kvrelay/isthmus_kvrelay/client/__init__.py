"""The engine-side client: a unix socket for control, the mapped pool for bytes. What services use of the relay."""

from isthmus_kvrelay.client.relay_client import RelayClient
from isthmus_kvrelay.client.sink import RelaySink
from isthmus_kvrelay.client.source import RelaySource

__all__ = ["RelayClient", "RelaySink", "RelaySource"]
