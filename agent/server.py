"""The web application of the agent: authorizes callers, and serves the routes."""

from __future__ import annotations

from aiohttp import web

from agent.handlers import AgentHandlers
from agent.host.callers import authorize_with
from agent.host.facts import agent_version
from agent.routes import ROUTES
from agent.services import AgentServices
from wire.server import make_app


def application(services: AgentServices, socket_group: str) -> web.Application:
    """Return the agent's web application, for both the unix socket and TLS."""
    handlers = AgentHandlers(services)
    return make_app(
        "Twine agent",
        ROUTES,
        {route.name: getattr(handlers, route.name) for route in ROUTES},
        authorize_with(socket_group, services.domain, services.last_term, services.last_owners),
        version=agent_version(),
        metrics=lambda: services.metrics.scrape(ready=services.ready),
    )
