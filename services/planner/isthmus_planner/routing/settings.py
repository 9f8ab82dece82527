"""The settings of routing, a part of the planner's."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from isthmus_planner.routing.policy import Policy, Weights
from isthmus_shared.config import ServiceConfig

_WEIGHTS = Weights()
_POLICY = Policy()
MOST = 1e6
"""Of any weight: far above what would drown all others."""


class RoutingConfig(ServiceConfig):
    PREFIX: ClassVar[str] = "PLANNER"

    itl_weight: float = Field(
        default=_WEIGHTS.itl,
        ge=0,
        le=MOST,
        description="Of a second that a request's own tokens take, beside a second to its first token",
    )
    residents_weight: float = Field(
        default=_WEIGHTS.residents,
        ge=0,
        le=MOST,
        description="Of a second that a request costs those already on its workers",
    )
    transfer_weight: float = Field(
        default=_WEIGHTS.transfer, ge=0, le=MOST, description="Of a second that its KV takes to cross"
    )
    dollar_s: float = Field(
        default=_WEIGHTS.dollar_s, ge=0, le=MOST, description="Seconds of waiting that a dollar is worth"
    )
    prices: tuple[str, ...] = Field(
        default=(),
        description="Dollars an hour, as `name=price`, of a worker by its id, or of all that have a vendor label",
    )
    slo_missed_s: float = Field(
        default=_WEIGHTS.missed_s,
        ge=0,
        le=MOST,
        description="Seconds that a missed target weighs, for each request that misses one by a route",
    )
    slo_excess_weight: float = Field(
        default=_WEIGHTS.excess, ge=0, le=MOST, description="Of each second beyond a target, on top of that"
    )
    slo_margin: float = Field(
        default=_POLICY.slo_margin,
        ge=0.1,
        le=10,
        description="A target counts as met when so many times the prediction is within it",
    )
    no_room_s: float = Field(
        default=_WEIGHTS.room_s,
        ge=0,
        le=MOST,
        description="Seconds that a worker without room for the KV is put behind one with room",
    )
    expected_osl_tokens: float = Field(
        default=_POLICY.expected_osl_tokens,
        gt=0,
        le=MOST,
        description="Tokens that an answer is expected to have until some have ended; at most what it may have",
    )

    @field_validator("prices")
    @classmethod
    def _prices(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for each in given:
            _price(each)
        return given

    def weights(self) -> Weights:
        return Weights(
            itl=self.itl_weight,
            residents=self.residents_weight,
            transfer=self.transfer_weight,
            dollar_s=self.dollar_s,
            missed_s=self.slo_missed_s,
            excess=self.slo_excess_weight,
            room_s=self.no_room_s,
        )

    def price_of(self) -> dict[str, float]:
        return dict(map(_price, self.prices))


def _price(given: str) -> tuple[str, float]:
    name, _, text = given.rpartition("=")
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not name or not 0 <= price < float("inf"):
        raise ValueError(f"{given!r} is no name=price with a price in dollars an hour")
    return name, price
