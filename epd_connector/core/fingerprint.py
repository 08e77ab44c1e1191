# SPDX-License-Identifier: Apache-2.0
"""Whether two engines serve the same model, as far as embeddings are concerned. Pure.

A fingerprint has two parts: of what the model's configuration says of towers and hidden
size, and of a sample of the towers' weights. Where an engine could not read the weights
the second part is ``UNKNOWN`` and says nothing either way.
"""

UNKNOWN = "unknown"
_SEPARATOR = "/"


def fingerprint(config_digest: str, tower_digest: str) -> str:
    """One fingerprint of both digests."""
    return f"{config_digest}{_SEPARATOR}{tower_digest or UNKNOWN}"


def same_model(one: str, other: str) -> bool:
    """Whether embeddings of the one engine can be used by the other."""
    config_one, _, tower_one = one.partition(_SEPARATOR)
    config_other, _, tower_other = other.partition(_SEPARATOR)
    if config_one != config_other:
        return False
    return UNKNOWN in (tower_one, tower_other) or tower_one == tower_other
