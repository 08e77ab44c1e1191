# SPDX-License-Identifier: Apache-2.0
"""Small frames between processes: the contract, its ZeroMQ form and a one-shot client.

Importing this package or ``base`` does not import zmq; ``zmq_link`` and ``client`` do.
"""
